"""A step time that no legal plan of a request can beat, by the simulator's own model.

Let D(g) be a lower bound of how far the compute stream is behind pure compute once all waits of gaps up to g are
done. Take a communication stream and two gaps e <= w. Its collectives that cannot launch before e and must be waited
for by w

- start no earlier than ``prefix(e) + D(e - 1)`` plus one host launch, since segment e - 1 has run by then (without the
  launch where one of them is fixed: the host launches the others while a fixed one runs);
- occupy the stream for at least the sum over lanes of one launch of all their bytes: a collective's time is
  subadditive in bytes, and lanes never share a collective. Fixed collectives add their own times;

so ``D(w) >= prefix(e) + D(e - 1) + launch + occupation - prefix(w)``. The bound is all compute plus D at the last
gap. It chains: a gather that nothing precedes and a reduction that nothing follows both count. It contains the usual
single bounds (all compute; the bytes of one stream; the first gather; the last reduction) and needs no assumption
about grouping, prefetch, copies or memory, all of which can only add time. Where communication slows compute down,
all compute plus the slowing while the busiest stream is busy is a bound too.
"""

from __future__ import annotations

import numpy as np

from bucketplan_core.cost import CostModel, Int64Array, as_int64

__all__ = ["lower_bound_ns"]


def lower_bound_ns(cost: CostModel) -> int:
    """The bound in ns, computed once a cost model; O(number of release gaps x number of deadlines)."""
    if "step" not in cost.bounds:
        cost.bounds["step"] = _bound(cost)
    return cost.bounds["step"]


def _bound(cost: CostModel) -> int:
    request = cost.request
    releases = {c.earliest_launch for c in request.candidates} | {f.launch for f in request.fixed}
    gaps = as_int64(sorted(releases))
    if not len(gaps):
        return cost.compute_ns
    prefix = as_int64(cost.prefix_ns)
    due: dict[int, list[tuple[int, int]]] = {}
    """Deadline -> (release index, collective), fixed ones numbered after the candidates."""
    index_of = {int(gap): index for index, gap in enumerate(gaps)}
    for number, c in enumerate(request.candidates):
        due.setdefault(c.latest_wait, []).append((index_of[c.earliest_launch], number))
    for number, f in enumerate(request.fixed):
        if f.wait is not None and cost.fixed_streams[number] >= 0:
            due.setdefault(f.wait, []).append((index_of[f.launch], len(request.candidates) + number))
    started = np.zeros(len(gaps), dtype=np.int64)  # prefix(e) + D(e - 1), from when e has been passed
    passed = 0
    delay = 0
    streams = [_Occupation(cost, stream, len(gaps)) for stream in range(len(cost.streams))]
    for deadline in sorted(due):
        while passed < len(gaps) and gaps[passed] <= deadline:
            started[passed] = prefix[gaps[passed]] + delay
            passed += 1
        touched = set()
        for release, number in due[deadline]:
            touched.add(_stream_of(cost, number))
            streams[_stream_of(cost, number)].add(release, number)
        for stream in touched:
            reached = started[:passed] + streams[stream].times(passed)
            delay = max(delay, int(reached.max()) - cost.prefix_ns[deadline])
    # While a stream is busy, the compute stream does 1,000 of every 1,000 + slowdown parts of its work.
    permille = cost.hardware.slowdown_permille
    busy = max((int(streams[stream].everything()) for stream in range(len(streams))), default=0)
    slowed = busy * permille // (1_000 + permille)
    return cost.compute_ns + max(delay, len(request.lanes) * cost.hardware.launch_ns + slowed)


def _stream_of(cost: CostModel, number: int) -> int:
    candidates = len(cost.request.candidates)
    return cost.lane_streams[cost.lane_of[number]] if number < candidates else cost.fixed_streams[number - candidates]


class _Occupation:
    """Least time on one stream of everything due so far, by the release gap from which on it is counted."""

    def __init__(self, cost: CostModel, stream: int, num_releases: int) -> None:
        self._cost = cost
        self._lanes = [lane for lane, of in enumerate(cost.lane_streams) if of == stream]
        self._bytes = {lane: np.zeros(num_releases, dtype=np.int64) for lane in self._lanes}
        self._last = dict.fromkeys(self._lanes, -1)
        self._times = {lane: np.zeros(num_releases, dtype=np.int64) for lane in self._lanes}
        self._fixed = np.zeros(num_releases, dtype=np.int64)
        self._stale: set[int] = set()

    def add(self, release: int, number: int) -> None:
        candidates = self._cost.request.candidates
        if number >= len(candidates):
            self._fixed[: release + 1] += self._cost.fixed_ns[number - len(candidates)]
            return
        lane = self._cost.lane_of[number]
        self._bytes[lane][: release + 1] += candidates[number].full_bytes
        self._last[lane] = max(self._last[lane], release)
        self._stale.add(lane)

    def everything(self) -> int:
        """Least time of all that was added, in one launch a lane."""
        lanes = sum(int(times[0]) for lane, times in self._times.items() if self._last[lane] >= 0)
        return lanes + int(self._fixed[0])

    def times(self, passed: int) -> Int64Array:
        """By release index below `passed`: launch plus occupation.

        The host's launch counts only where nothing fixed does: it hides behind a fixed collective that is under way.
        """
        total = self._fixed[:passed].copy()
        last = -1
        for lane in self._lanes:
            end = min(self._last[lane] + 1, passed)
            if lane in self._stale:
                model = self._cost.lane_models[lane]
                self._times[lane][:end] = model.times_ns(self._bytes[lane][:end])
                self._stale.discard(lane)
            total[:end] += self._times[lane][:end]
            last = max(last, end)
        if last > 0:
            total[:last] += np.where(self._fixed[:last] > 0, 0, self._cost.hardware.launch_ns)
        return total
