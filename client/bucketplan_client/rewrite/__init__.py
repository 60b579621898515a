"""Rewriting: from a description and its plan to the rewritten graph, all or nothing."""

REWRITER_VERSION = 1
"""Raised whenever the same plan would be applied to the same graph in another way; part of compile cache keys."""
