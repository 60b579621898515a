"""The memory curve of two decisions in program order, thinned to the most of each bin. Every function is pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from bucketplan_core.cost import Int64Array
from bucketplan_core.plan import Decision
from bucketplan_core.simulate import MemoryCurve

__all__ = ["MAX_BINS", "Curve", "thin"]

MAX_BINS = 240


@dataclass(frozen=True, slots=True)
class Curve:
    """The most bytes held in each of equally wide runs of segments; `first_segments` says where each run starts."""

    first_segments: tuple[int, ...]
    most_bytes: tuple[int, ...]
    peak_bytes: int
    peak_segment: int


def thin(memory: MemoryCurve, decision: Decision, *, bins: int = MAX_BINS) -> Curve:
    """The curve of `decision` in at most `bins` bins; a peak between two segments belongs to the one after it.

    A graph without segments has one bin, with what its collectives hold.
    """
    held = np.zeros(max(1, len(memory.segment_bytes)), dtype=np.int64)
    held[: len(memory.segment_bytes)] = memory.segment_bytes
    gaps: Int64Array = np.array([step.gap for step in decision.steps], dtype=np.int64)
    if len(gaps):
        np.maximum.at(held, np.minimum(gaps, len(held) - 1), memory.step_bytes)
    edges = _edges(len(held), bins)
    most = [int(held[first:last].max()) for first, last in pairwise(edges)]
    return Curve(tuple(edges[:-1]), tuple(most), memory.peak_bytes, int(held.argmax()))


def _edges(length: int, bins: int) -> Sequence[int]:
    count = min(bins, length)
    return [length * number // count for number in range(count + 1)]
