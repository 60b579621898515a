"""Launches and waits under a memory budget: one sweep in program order that knows what is held and how late compute is.

`place_within` goes from gap to gap with an estimate of the compute stream's clock, stalls included. A gather is
issued when it is due soon and what it holds until its wait fits beside everything else, or where its launch window
closes; a reduction where it is ready, behind gathers that could not wait for it. Where the budget is passed
nevertheless, the oldest reductions in flight are waited for, which frees their inputs for a stall that a stream which
decides the step costs anyway. The simulator judges the result.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from bucketplan_core.cost import CostModel, Int64Array, as_int64

if TYPE_CHECKING:
    from bucketplan_core.planners.auto_place import Bucket

__all__ = ["place_within"]


def place_within(
    cost: CostModel, buckets: Sequence[Bucket], permille: int | None, budget_bytes: int
) -> tuple[list[int], list[int], frozenset[int]] | None:
    """Launch and wait gaps by bucket, and the buckets whose wait comes before every launch of its gap, which is a later
    one than that of their own launch.

    None where a bucket that feeds on others finds no gap. `buckets` in placement order.
    """
    sweep = _Sweep(cost, buckets, permille, budget_bytes)
    for gap in sweep.gaps:
        if not sweep.at(gap):
            return None
    return sweep.launches, sweep.waits, frozenset(sweep.early)


class _Sweep:
    def __init__(self, cost: CostModel, buckets: Sequence[Bucket], permille: int | None, budget_bytes: int) -> None:
        self._prefix = cost.prefix_ns
        self._buckets = buckets
        self._budget = budget_bytes
        self._permille = permille
        self.launches = [-1] * len(buckets)
        self.waits = [b.latest_wait for b in buckets]
        self.early: set[int] = set()
        self._delay = 0
        self._free = [0] * len(cost.streams)
        self._done = [0] * len(buckets)
        self._in_flight = 0
        self._reductions: OrderedDict[int, None] = OrderedDict()
        bucket_of = {m: index for index, b in enumerate(buckets) for m in b.members}
        self._sources = [sorted({bucket_of[m] for m in b.feeds_on}) for b in buckets]
        self._feeding = {source for sources in self._sources for source in sources}
        self._following: list[int] = []
        self._gathers: list[deque[int]] = [deque() for _ in cost.streams]
        self._ready: dict[int, list[int]] = {}
        self._closing: dict[int, list[int]] = {}
        self._due: dict[int, list[int]] = {}
        gaps = {0, len(self._prefix) - 1}
        for index, b in enumerate(buckets):
            gaps.update((b.earliest, b.latest_wait))
            self._due.setdefault(b.latest_wait, []).append(index)
            if b.is_gather:
                self._gathers[b.stream].append(index)
                self._closing.setdefault(b.latest_launch, []).append(index)
                gaps.add(b.latest_launch)
                if permille is not None:
                    start = self._prefix[b.latest_wait] - b.cost.comm_ns * permille // 1_000
                    gaps.add(min(max(bisect_right(self._prefix, start) - 1, b.earliest), b.latest_wait))
            else:
                self._ready.setdefault(b.earliest, []).append(index)
        self.gaps = sorted(gaps)
        self._beside = self._without_flight(cost)

    def _without_flight(self, cost: CostModel) -> Int64Array:
        """Bytes at each gap and in the segment behind it, with every gather taken only at its wait."""
        num_segments = cost.request.num_segments
        changes = [0] * (num_segments + 2)
        for b in self._buckets:
            taken = b.buffers.taken_at_launch
            if b.is_gather:
                changes[b.latest_wait] += taken + b.buffers.taken_at_wait - b.buffers.given_at_wait
            else:
                changes[b.earliest] += taken - b.buffers.given_at_launch
        held = np.cumsum(as_int64(changes))[: num_segments + 1] + cost.static_bytes[: num_segments + 1]
        live = np.append(as_int64(cost.live_bytes), cost.live_at_gap[-1:])
        total: Int64Array = held + np.maximum(live, cost.live_at_gap)
        return total

    def at(self, gap: int) -> bool:
        """Everything that happens at this gap; False if a launch window has closed on a bucket that feeds on others."""
        self._collect(gap)
        ready = self._ready.get(gap, ())
        # A packed reduction holds its inputs and their copy for a moment.
        passing = max((self._buckets[index].buffers.given_at_launch for index in ready), default=0)
        while self._reductions and self._held(gap, gap) + passing > self._budget:
            oldest = self._oldest()
            if self.launches[oldest] == gap:
                break
            self._wait_for(oldest, gap)
            self.early.add(oldest)
        if not self._follow(gap):
            return False
        for stream in range(len(self._gathers)):
            self._issue(stream, gap, 0)
        for index in self._closing.get(gap, ()):
            # It stands behind a gather that is waited for earlier and may not be launched yet.
            if self.launches[index] < 0:
                self._launch(index, gap)
        for index in ready:
            if self._sources[index]:
                self._following.append(index)
                continue
            b = self._buckets[index]
            self._issue(b.stream, gap, b.cost.comm_ns)
            self._launch(index, gap)
        if not self._follow(gap):
            return False
        for index in self._due.get(gap, ()):
            if self._buckets[index].is_gather:
                self._stand_still(self._done[index], gap)
                self._in_flight -= self._buckets[index].buffers.taken_at_launch
            elif index in self._reductions:
                self._wait_for(index, gap)
        while self._reductions and self._held(gap, gap) > self._budget:
            self._wait_for(self._oldest(), gap)
        return True

    def _oldest(self) -> int:
        """The reduction in flight that was launched first."""
        return next(iter(self._reductions))

    def _wait_for(self, index: int, gap: int) -> None:
        self._stand_still(self._done[index], gap)
        self._release(index, gap)

    def _now(self, gap: int) -> int:
        return self._prefix[gap] + self._delay

    def _stand_still(self, until: int, gap: int) -> None:
        self._delay = max(self._delay, until - self._prefix[gap])

    def _held(self, first: int, last: int) -> int:
        return int(self._beside[first : last + 1].max()) + self._in_flight

    def _launch(self, index: int, gap: int) -> None:
        b = self._buckets[index]
        self.launches[index] = gap
        self._delay += b.cost.launch_ns
        self._done[index] = self._free[b.stream] = max(self._free[b.stream], self._now(gap)) + b.cost.comm_ns
        if b.is_gather:
            self._in_flight += b.buffers.taken_at_launch
        elif index not in self._feeding:
            self._reductions[index] = None

    def _release(self, index: int, gap: int) -> None:
        del self._reductions[index]
        self.waits[index] = min(self.waits[index], gap)
        self._in_flight -= self._buckets[index].buffers.given_at_wait

    def _collect(self, gap: int) -> None:
        """Reductions that are done by now hold nothing any more."""
        now = self._now(gap)
        while self._reductions:
            index = self._oldest()
            if self._done[index] > now or self.launches[index] >= gap:
                return
            self._release(index, gap)
            self.early.add(index)

    def _issue(self, stream: int, gap: int, behind_ns: int) -> None:
        """Issue the next gathers of a stream that are due soon, before something that would take `behind_ns`."""
        waiting = self._gathers[stream]
        while waiting:
            if self.launches[waiting[0]] >= 0:
                waiting.popleft()
                continue
            b = self._buckets[waiting[0]]
            if b.earliest > gap:
                return
            must = gap >= b.latest_launch
            if not must:
                ahead = b.cost.comm_ns if self._permille is None else b.cost.comm_ns * self._permille // 1_000
                begun = max(self._free[stream], self._now(gap)) + behind_ns
                soon = self._permille is None or self._prefix[b.latest_wait] + self._delay - ahead <= begun
                if not soon or self._held(gap, b.latest_wait) + b.buffers.taken_at_launch > self._budget:
                    return
            self._launch(waiting.popleft(), gap)

    def _follow(self, gap: int) -> bool:
        """Launch what feeds on other buckets once these are done, or once its window is about to close."""
        still: list[int] = []
        for index in self._following:
            b, sources = self._buckets[index], self._sources[index]
            launched = all(self.launches[source] >= 0 for source in sources)
            done = launched and max(self._done[source] for source in sources) <= self._now(gap)
            if not done and gap < b.latest_launch:
                still.append(index)
                continue
            if not launched or gap > b.latest_launch:
                return False
            for source in sources:
                self._stand_still(self._done[source], gap)
                self.waits[source] = min(self.waits[source], gap)
                self._in_flight -= self._buckets[source].buffers.given_at_wait
            self._launch(index, gap)
        self._following = still
        return True
