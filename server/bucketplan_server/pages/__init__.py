"""The audit pages: what was decided, drawn and in tables, as HTML that needs neither a build nor the internet."""
