"""A simulated step as a picture of bounded size: boxes on rows, narrow neighbours joined, and its numbers in slices.

Coordinates are units of a drawing that is `WIDTH` wide; one unit is about a pixel on a screen. Every function is pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bucketplan_core.cost import CostModel
from bucketplan_core.plan import Decision
from bucketplan_core.simulate import COMPUTE_STREAM, Simulation

__all__ = ["CATEGORIES", "MAX_BOXES", "WIDTH", "Box", "Layer", "Row", "Slice", "Timeline", "draw_timeline", "join"]

WIDTH = 1080
MAX_BOXES = 1_200
"""Most boxes of one timeline, over all of its rows."""
NUM_SLICES = 20
_MAX_ROWS = 8
_TITLED_UNITS = 3.0
"""Narrower boxes are drawn in one path a layer: nobody can point at them."""

CATEGORIES = {
    "compute": "compute",
    "copy": "packing and unpacking",
    "wait": "compute stands still for communication",
    "hidden": "communication hidden behind compute",
    "exposed": "communication exposed",
}
"""What a layer shows, in drawing order within its row; the words are those of the legend."""

_Interval = tuple[int, int, str]


@dataclass(frozen=True, slots=True)
class Box:
    """A box of one layer, in units; `title` says what it is, and of how many intervals where it was joined.

    `share` of its width is busy: it is drawn that high, so that areas are times.
    """

    x: float
    width: float
    title: str
    share: float


@dataclass(frozen=True, slots=True)
class Layer:
    """The boxes of one category on one row; `path` draws those that are too narrow to have a title."""

    category: str
    boxes: tuple[Box, ...]
    path: tuple[tuple[float, float, float], ...]
    """Their (x, width, share)."""
    total_ns: int
    num_intervals: int


@dataclass(frozen=True, slots=True)
class Row:
    """One stream; communication streams are named by their group."""

    name: str
    is_compute: bool
    layers: tuple[Layer, ...]

    def total_ns(self, category: str) -> int:
        return sum(layer.total_ns for layer in self.layers if layer.category == category)


@dataclass(frozen=True, slots=True)
class Slice:
    """One of `NUM_SLICES` equal parts of the drawing: time by category inside it, ns."""

    start_ns: int
    end_ns: int
    totals: dict[str, int]


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step of `step_ns`, drawn so that `scale_ns` fill the width."""

    step_ns: int
    scale_ns: int
    rows: tuple[Row, ...]
    slices: tuple[Slice, ...]
    num_hidden_rows: int

    @property
    def num_boxes(self) -> int:
        return sum(len(layer.boxes) + bool(layer.path) for row in self.rows for layer in row.layers)


def draw_timeline(cost: CostModel, decision: Decision, run: Simulation, *, scale_ns: int) -> Timeline:
    """The timeline of `decision`, whose simulation `run` must hold its trace events."""
    streams = _intervals(cost, decision, run)
    names = [COMPUTE_STREAM, *cost.streams]
    shown = range(min(len(names), 1 + _MAX_ROWS))
    num_layers = sum(len(streams[number]) for number in shown)
    most = MAX_BOXES // num_layers - 1
    rows = tuple(
        Row(
            name=names[number],
            is_compute=number == 0,
            layers=tuple(_layer(category, found, scale_ns, most) for category, found in streams[number].items()),
        )
        for number in shown
    )
    return Timeline(
        step_ns=run.step_ns,
        scale_ns=scale_ns,
        rows=rows,
        slices=_slices(streams, scale_ns),
        num_hidden_rows=len(names) - len(shown),
    )


def join(intervals: Sequence[_Interval], *, unit_ns: float, most: int) -> list[tuple[int, int, str, int]]:
    """At most `most` intervals (start, end, name, how many): those closer than a unit are joined, then wider gaps too.

    `intervals` are sorted by start. What is joined covers the time between, so a joined box reads as "busy here".
    """
    gap = unit_ns
    while True:
        joined: list[tuple[int, int, str, int]] = []
        for start, end, name in intervals:
            if joined:
                first, last, named, count = joined[-1]
                narrow = end - start < gap or last - first < gap
                if start - last < gap and narrow:
                    joined[-1] = (first, max(last, end), named, count + 1)
                    continue
            joined.append((start, end, name, 1))
        if len(joined) <= most:
            return joined
        gap *= 2


def _intervals(cost: CostModel, decision: Decision, run: Simulation) -> list[dict[str, list[_Interval]]]:
    """Intervals by category, of the compute stream and then of each communication stream.

    What a stream runs after compute has reached its wait is exposed.
    """
    compute: dict[str, list[_Interval]] = {"compute": [], "copy": [], "wait": []}
    streams: list[dict[str, list[_Interval]]] = [{"hidden": [], "exposed": []} for _ in cost.streams]
    for event in run.events:
        category = "wait" if event.category == "exposed" else event.category
        if event.stream == COMPUTE_STREAM and category in compute:
            compute[category].append((event.start_ns, event.start_ns + event.duration_ns, event.name))
    collectives = [
        (cost.lane_streams[bucket.lane], bucket.id, times)
        for bucket, times in zip(decision.buckets, run.buckets, strict=True)
    ] + [
        (stream, f"fixed: {fixed.kind}", times)
        for stream, fixed, times in zip(cost.fixed_streams, cost.request.fixed, run.fixed, strict=True)
    ]
    for stream, name, times in collectives:
        if stream < 0:
            continue
        # A wait may begin while the collective still queues for its stream; only what runs is drawn there.
        exposed_from = max(times.finished_ns - times.exposed_ns, times.started_ns)
        if exposed_from > times.started_ns:
            streams[stream]["hidden"].append((times.started_ns, exposed_from, name))
        if times.finished_ns > exposed_from:
            streams[stream]["exposed"].append((exposed_from, times.finished_ns, name))
    for layers in (compute, *streams):
        for found in layers.values():
            found.sort()
    return [compute, *streams]


def _layer(category: str, intervals: Sequence[_Interval], scale_ns: int, most: int) -> Layer:
    unit_ns = scale_ns / WIDTH
    boxes: list[Box] = []
    path: list[tuple[float, float, float]] = []
    following = 0
    for start, end, name, count in join(intervals, unit_ns=unit_ns, most=most):
        at, following = following, following + count
        x, width = start / unit_ns, (end - start) / unit_ns
        busy = sum(min(last, end) - first for first, last, _ in intervals[at : at + count])
        share = min(1.0, busy / max(1, end - start))
        if width < _TITLED_UNITS:
            path.append((x, max(width, 0.5), share))
            continue
        title = name if count == 1 else f"{count} intervals from {name}"
        boxes.append(Box(x, width, f"{title}: {_ms(start)} to {_ms(end)}", share))
    total = sum(end - start for start, end, _ in intervals)
    return Layer(category, tuple(boxes), tuple(path), total, len(intervals))


def _slices(streams: Sequence[dict[str, list[_Interval]]], scale_ns: int) -> tuple[Slice, ...]:
    edges = [scale_ns * number // NUM_SLICES for number in range(NUM_SLICES + 1)]
    totals = [dict.fromkeys(CATEGORIES, 0) for _ in range(NUM_SLICES)]
    for layers in streams:
        for category, intervals in layers.items():
            for start, end, _ in intervals:
                for number in range(max(0, bisect_right(edges, start) - 1), NUM_SLICES):
                    if edges[number] >= end:
                        break
                    totals[number][category] += min(end, edges[number + 1]) - max(start, edges[number])
    return tuple(Slice(start, end, found) for (start, end), found in zip(pairwise(edges), totals, strict=True))


def _ms(ns: int) -> str:
    return f"{ns / 1_000_000:.3f} ms"
