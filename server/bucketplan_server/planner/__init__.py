"""Planning in processes of its own, so that a long or crashing plan never stops the service."""
