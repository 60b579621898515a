"""Where shapes stand in the drawings: rows, ticks, points. Templates only write the numbers down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bucketplan_server.pages.curve import Curve
from bucketplan_server.pages.figures import PlanView
from bucketplan_server.pages.timeline import WIDTH, Layer, Timeline

__all__ = ["Bars", "Chart", "Drawing", "chart_of_memory", "chart_of_sizes", "drawing_of"]

_ROW = 34
_BAR = 22
_TOP = 8
_TICKS = 6
_MEMORY_HEIGHT = 200
_MOST_BARS = 240


@dataclass(frozen=True, slots=True)
class DrawnLayer:
    """One layer: its boxes, and the narrow ones as one path."""

    layer: Layer
    path: str


@dataclass(frozen=True, slots=True)
class DrawnRow:
    """One row at height `y`."""

    name: str
    y: int
    layers: tuple[DrawnLayer, ...]


@dataclass(frozen=True, slots=True)
class Drawing:
    """A timeline with places; `ticks` are (x, ns)."""

    timeline: Timeline
    rows: tuple[DrawnRow, ...]
    ticks: tuple[tuple[float, int], ...]
    height: int
    end_x: float
    width: int = WIDTH
    bar: int = _BAR


@dataclass(frozen=True, slots=True)
class Chart:
    """The memory curves as points of polylines; `ticks` are (y, bytes), `rows` the numbers of a table."""

    before: str
    after: str
    peak_after: tuple[float, float]
    budget_y: float | None
    ticks: tuple[tuple[float, int], ...]
    rows: tuple[tuple[int, int, int], ...]
    height: int = _MEMORY_HEIGHT
    width: int = WIDTH


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars as (x, y, width, title); each stands for `joined` buckets, and `ticks` are (y, bytes)."""

    bars: tuple[tuple[float, float, float, str], ...]
    ticks: tuple[tuple[float, int], ...]
    joined: int
    height: int = _MEMORY_HEIGHT
    width: int = WIDTH


def drawing_of(timeline: Timeline) -> Drawing:
    rows = []
    for number, row in enumerate(timeline.rows):
        y = _TOP + number * _ROW
        layers = tuple(DrawnLayer(layer, _path(layer, y)) for layer in row.layers)
        rows.append(DrawnRow(row.name, y, layers))
    ticks = tuple((WIDTH * number / _TICKS, timeline.scale_ns * number // _TICKS) for number in range(_TICKS + 1))
    height = _TOP + len(rows) * _ROW
    return Drawing(timeline, tuple(rows), ticks, height, WIDTH * timeline.step_ns / timeline.scale_ns)


def chart_of_memory(view: PlanView) -> Chart | None:
    """The curves of both decisions on one scale, None without figures."""
    before, after = view.memory_before, view.memory_after
    if before is None or after is None or view.limits is None:
        return None
    budget = view.limits["memory_budget_bytes"]
    top = max(before.peak_bytes, after.peak_bytes, budget or 0, 1)

    def y(value: int) -> float:
        return _MEMORY_HEIGHT * (1 - value / top)

    def points(curve: Curve) -> str:
        step = WIDTH / len(curve.most_bytes)
        held = [(n * step, y(value)) for n, value in enumerate(curve.most_bytes)]
        return " ".join(f"{x:.1f},{at:.1f} {x + step:.1f},{at:.1f}" for x, at in held)

    stride = max(1, len(after.most_bytes) // 24)
    rows = tuple(
        (
            after.first_segments[n],
            max(before.most_bytes[n : n + stride]),
            max(after.most_bytes[n : n + stride]),
        )
        for n in range(0, len(after.most_bytes), stride)
    )
    peak_x = WIDTH * (after.peak_segment + 0.5) / max(1, view.num_segments)
    return Chart(
        before=points(before),
        after=points(after),
        peak_after=(peak_x, y(after.peak_bytes)),
        budget_y=None if budget is None else y(budget),
        ticks=tuple((y(top * n // 4), top * n // 4) for n in range(5)),
        rows=rows,
    )


def chart_of_sizes(sizes: Sequence[int]) -> Bars:
    """Bars of the largest bucket in each run of equally many, at most `_MOST_BARS`."""
    joined = max(1, -(-len(sizes) // _MOST_BARS))
    runs = [sizes[first : first + joined] for first in range(0, len(sizes), joined)]
    top = max(sizes, default=1) or 1
    step = WIDTH / max(1, len(runs))
    bars = []
    for number, run in enumerate(runs):
        first = number * joined + 1
        named = f"bucket {first}" if len(run) == 1 else f"buckets {first} to {first + len(run) - 1}"
        y = _MEMORY_HEIGHT * (1 - max(run) / top)
        bars.append((number * step, y, max(step * 0.85, 1.0), f"{named} in launch order: {max(run)} bytes at most"))
    ticks = tuple((_MEMORY_HEIGHT * (1 - n / 4), top * n // 4) for n in range(5))
    return Bars(tuple(bars), ticks, joined)


def _path(layer: Layer, y: int) -> str:
    # Waiting hangs from the top of its row and work stands on its bottom, as the boxes with titles do.
    hangs = layer.category in ("wait", "exposed")
    return "".join(
        f"M{x:.1f} {y if hangs else y + _BAR * (1 - share):.1f}h{width:.1f}v{_BAR * share:.1f}h-{width:.1f}z"
        for x, width, share in layer.path
    )
