"""Statements name a bounded number of keys each: databases limit parameters, and the loop prepares every one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

__all__ = ["pieces"]

T = TypeVar("T")


def pieces(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """`items` in their order, `size` at a time."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
