"""Randomness for spreading load, apart from the job's.

A training script seeds Python's global generator so that its data comes in the same order every time; a client that
drew from it, from background threads at that, would change what the job computes.
"""

from __future__ import annotations

import random

__all__ = ["uniform"]

_GENERATOR = random.SystemRandom()


def uniform(low: float, high: float) -> float:
    """A number between `low` and `high` that leaves the state of `random` as it was."""
    return _GENERATOR.uniform(low, high)
