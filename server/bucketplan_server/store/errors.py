"""Why a command cannot go on with a store, in words for whoever started it."""

from __future__ import annotations

__all__ = ["CannotOpen"]


class CannotOpen(Exception):
    """The store, or what lies beside its file, cannot be used; the message names it and says what to do."""
