"""From measured times to the protocols of a collective: a lower envelope of up to three straight lines.

The cost model takes the least over protocols of alpha + bytes / rate. For every way to cut the sorted sizes into one,
two or three runs a line is fitted to each run by least squares on relative errors; of the envelopes that are concave,
the one with the least mean relative error is taken, and a further line only where it lowers that error by a fifth.
Figures are rounded to two significant digits: repeated measurements do not agree any better, and every other digit
would give new signatures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import fmean

from bucketplan_client.errors import ClientError
from bucketplan_core.cost import CollectiveModel
from bucketplan_core.hardware import Protocol

__all__ = ["FittedOp", "LatencyTooLong", "Sample", "fit_collective", "round_figure"]

_MAX_LINES = 3
_WORTH = 0.8
_MAX_RATE = 2**50
_MAX_ALPHA_NS = 2**50
_CONVEX = 1.5
"""From this ratio of slopes on, between the larger half of the sizes and the smaller, times are called convex."""


class LatencyTooLong(ClientError):
    """The measured times of `op` say that a launch takes `alpha_ns`, more than the `most_ns` that a profile holds."""

    def __init__(self, op: str, alpha_ns: int, *, most_ns: int = _MAX_ALPHA_NS) -> None:
        self.op = op
        self.alpha_ns = alpha_ns
        self.most_ns = most_ns
        super().__init__(
            f"{op}: a latency of {alpha_ns} ns was fitted, a profile holds at most {most_ns} ns",
            remedy="Look at the clocks of the hosts and at what hung during the measurement, and measure again",
        )


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured time of a collective whose full tensor has `full_bytes`."""

    full_bytes: int
    time_ns: int


@dataclass(frozen=True, slots=True)
class FittedOp:
    """The protocols of one operation and their relative errors, (predicted - measured) / measured, by sample."""

    op: str
    group_size: int
    protocols: tuple[Protocol, ...]
    fitted: tuple[tuple[Sample, float], ...]
    held_out: tuple[tuple[Sample, float], ...]

    @property
    def warnings(self) -> list[str]:
        """What makes the fit doubtful: times of zero, or that grow faster than sizes, which no envelope follows."""
        samples = [sample for sample, _ in self.fitted]
        if all(sample.time_ns == 0 for sample in samples):
            return [f"{self.op}: every measured time is 0; these figures say that it costs nothing"]
        middle = len(samples) // 2
        lower = _line([(float(s.full_bytes), s.time_ns) for s in samples[: middle + 1]])
        upper = _line([(float(s.full_bytes), s.time_ns) for s in samples[middle:]])
        if lower is not None and upper is not None and upper[1] > _CONVEX * lower[1] > 0:
            ratio = upper[1] / lower[1]
            text = (
                f"{self.op}: a byte of large messages costs {ratio:.1f} times one of small ones; the model holds only"
            )
            return [f"{text} times that rise ever slower, so the figures fit neither: see the residuals"]
        return []

    def predict_ns(self, full_bytes: int) -> int:
        return CollectiveModel.of(self.op, self.group_size, self.protocols).time_ns(full_bytes)


def fit_collective(op: str, group_size: int, samples: Sequence[Sample], held_out: Sequence[Sample] = ()) -> FittedOp:
    """Fit `samples` and report the errors on them and on `held_out`, sizes that the fit has not seen.

    Raises `ValueError` for fewer than two sizes and for a group of one rank, which sends nothing, and `LatencyTooLong`
    for a latency above 2**50 ns, which no profile holds.
    """
    if group_size < 2:
        raise ValueError(f"a group of {group_size} rank sends nothing that could be fitted; measure on two or more")
    ordered = sorted(samples, key=lambda sample: sample.full_bytes)
    if len({sample.full_bytes for sample in ordered}) < 2:
        raise ValueError("a fit needs samples of at least two sizes")
    best: tuple[float, tuple[Protocol, ...]] | None = None
    for num_lines in range(1, _MAX_LINES + 1):
        found = [_envelope(op, group_size, ordered, cuts) for cuts in _cuts(len(ordered), num_lines)]
        candidates = [
            (fmean(abs(_error(op, group_size, protocols, sample)) for sample in ordered), protocols)
            for protocols in found
            if protocols is not None
        ]
        if not candidates:
            continue
        least = min(candidates, key=lambda candidate: candidate[0])
        if best is None or least[0] < _WORTH * best[0]:
            best = least
    assert best is not None  # one line through two sizes always exists
    protocols = best[1]
    for protocol in protocols:
        if protocol.alpha_ns > _MAX_ALPHA_NS:
            raise LatencyTooLong(op, protocol.alpha_ns)
    return FittedOp(
        op=op,
        group_size=group_size,
        protocols=protocols,
        fitted=tuple((sample, _error(op, group_size, protocols, sample)) for sample in ordered),
        held_out=tuple((sample, _error(op, group_size, protocols, sample)) for sample in held_out),
    )


def round_figure(value: float) -> int:
    """Two significant digits, at least 0."""
    whole = max(round(value), 0)
    if whole < 100:
        return whole
    scale: int = 10 ** (len(str(whole)) - 2)
    return round(whole / scale) * scale


def _cuts(count: int, num_lines: int) -> list[tuple[int, ...]]:
    """Boundaries of `num_lines` runs of at least two samples each."""
    inner = combinations(range(2, count - 1), num_lines - 1)
    found = [(0, *cuts, count) for cuts in inner]
    return [bounds for bounds in found if all(b - a >= 2 for a, b in pairwise(bounds))]


def _envelope(
    op: str, group_size: int, samples: Sequence[Sample], bounds: tuple[int, ...]
) -> tuple[Protocol, ...] | None:
    model = CollectiveModel.of(op, group_size, ())
    lines = []
    for start, end in pairwise(bounds):
        line = _line([(s.full_bytes * model.numerator / model.denominator, s.time_ns) for s in samples[start:end]])
        if line is None:
            return None
        lines.append(line)
    # Lines of larger messages start higher and rise slower; another order would not be a lower envelope.
    for (alpha, slope), (next_alpha, next_slope) in pairwise(lines):
        if next_alpha < alpha or next_slope > slope:
            return None
    return tuple(Protocol(round_figure(alpha), _rate(slope)) for alpha, slope in lines)


def _rate(slope_ns_per_byte: float) -> int:
    if slope_ns_per_byte <= 1_000 / _MAX_RATE:
        return _MAX_RATE
    return min(max(round_figure(1_000 / slope_ns_per_byte), 1), _MAX_RATE)


def _line(points: Sequence[tuple[float, int]]) -> tuple[float, float] | None:
    """alpha and slope of least relative squares, neither below zero; None where all points are one size."""
    weights = [1.0 / max(time, 1) ** 2 for _, time in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_t = sum(w * t for w, (_, t) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    if not spread:
        return None
    slope = sum(w * (x - mean_x) * (t - mean_t) for w, (x, t) in zip(weights, points, strict=True)) / spread
    if slope < 0:
        return mean_t, 0.0
    alpha = mean_t - slope * mean_x
    if alpha < 0:
        square = sum(w * x * x for w, (x, _) in zip(weights, points, strict=True))
        return 0.0, sum(w * x * t for w, (x, t) in zip(weights, points, strict=True)) / square
    return alpha, slope


def _error(op: str, group_size: int, protocols: tuple[Protocol, ...], sample: Sample) -> float:
    predicted = CollectiveModel.of(op, group_size, protocols).time_ns(sample.full_bytes)
    return (predicted - sample.time_ns) / max(sample.time_ns, 1)
