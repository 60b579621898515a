"""Rewriting: from a description and its plan to the rewritten graph, all or nothing."""
