"""The exact plan of one reduction lane whose buckets launch as soon as their last member is ready.

A bucket i..j-1 launches at the gap where member j - 1 is ready, after all packing so far; its collective starts when
the stream is free. Packing runs on the compute stream, so a state needs two figures: when the stream is free
(`finish`) and how far compute is behind (`delay`). Neither alone decides: a bucket that finishes earlier may hold
compute up for longer. Labels (finish, delay) that no other beats in both are kept for every boundary; the least step
over the labels of the last is exact. A stream that is free before the next launch can start counts as free at that
launch, which keeps labels few.

Among partitions of that step time a second pass finds the fewest buckets: exactly up to `EXACT_TIES` members, by
merging neighbours while the step stays the same beyond. Time is O(n^2 * labels), vectorised over labels.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from bucketplan_core.cost import CostModel, Int64Array, as_int64
from bucketplan_core.planners.auto_exact import obstacles_to_exactness

__all__ = ["EXACT_TIES", "exact_reduce_conditions", "exact_reduce_lane"]

EXACT_TIES = 64
_LABEL_BUDGET = 65_536
"""Labels of all boundaries together; lanes of 300 members were seen to want up to 435 a boundary."""


def exact_reduce_conditions(cost: CostModel, lane_index: int) -> list[str]:
    """What keeps the labels from being the simulator's truth for this lane; empty where they are exact."""
    members = [cost.request.candidates[m] for m in cost.request.lanes[lane_index].members]
    reasons = obstacles_to_exactness(cost, lane_index)
    if len({c.latest_wait for c in members}) > 1:
        reasons.append("results are due at different gaps")
    if members and min(c.latest_launch for c in members) < max(c.earliest_launch for c in members):
        reasons.append("a launch window closes before the last member is ready")
    return reasons


class _Lane:
    def __init__(self, cost: CostModel, lane_index: int) -> None:
        candidates = [cost.request.candidates[m] for m in cost.request.lanes[lane_index].members]
        prefix = cost.prefix_ns
        self.n = len(candidates)
        self.ready = [prefix[c.earliest_launch] for c in candidates]
        due = min((c.latest_wait for c in candidates), default=0)
        self.due = prefix[due]
        self.tail = prefix[-1] - prefix[due]
        self._sizes = np.cumsum(as_int64([0, *(c.input_bytes for c in candidates)]))
        self._model = cost.lane_models[lane_index]
        self._cost = cost

    def into(self, j: int) -> tuple[Int64Array, Int64Array]:
        """Communication and compute cost of bucket i..j-1, for each i < j."""
        sizes = self._sizes[j] - self._sizes[:j]
        held = self._cost.copies_ns(sizes)
        held[-1] = 0
        return self._model.times_ns(sizes), held + self._cost.hardware.launch_ns

    def rest(self, j: int) -> int:
        """What the stream must still carry after boundary j: at least all of it in one launch."""
        return self._model.time_ns(int(self._sizes[-1] - self._sizes[j])) if j < self.n else 0

    def guesses(self) -> list[list[int]]:
        """Partitions to prune against: alone, even runs of 2, 4, 8 ... members, one bucket."""
        runs = [1 << power for power in range(self.n.bit_length() + 1)]
        return [[*range(0, self.n, run), self.n] for run in runs]

    def step(self, finish: Int64Array, delay: Int64Array) -> Int64Array:
        reached: Int64Array = np.maximum(finish, self.due + delay) + self.tail
        return reached


def exact_reduce_lane(cost: CostModel, lane_index: int) -> tuple[list[tuple[int, ...]], bool]:
    """The best buckets of the lane among contiguous partitions of lane order, each launched when its last member is
    ready.

    The flag says whether they are proved best: not where a boundary had more than `most_labels` labels, of which those
    of least bound were kept, and not where `exact_reduce_conditions` finds something.
    """
    lane = _Lane(cost, lane_index)
    members = cost.request.lanes[lane_index].members
    bounds, exact = _solve(lane, most_step=min(_step_of(lane, bounds) for bounds in lane.guesses()), ties=False)
    step = _step_of(lane, bounds)
    if lane.n <= EXACT_TIES:
        bounds, _ = _solve(lane, most_step=step, ties=True)
    else:
        bounds = _merge_ties(lane, bounds, step)
    buckets = [tuple(members[a:b]) for a, b in pairwise(bounds)]
    return buckets, exact and not exact_reduce_conditions(cost, lane_index)


class _Labels:
    """Labels of all boundaries as columns that grow; `start` and `parent` say which bucket led here from which
    label.
    """

    def __init__(self) -> None:
        self.columns = np.zeros((6, 1_024), dtype=np.int64)  # boundary, finish, delay, count, start, parent
        self.size = 1

    def append(self, rows: Int64Array) -> None:
        needed = self.size + rows.shape[1]
        if needed > self.columns.shape[1]:
            grown = np.zeros((6, 2 * needed), dtype=np.int64)
            grown[:, : self.size] = self.columns[:, : self.size]
            self.columns = grown
        self.columns[:, self.size : needed] = rows
        self.size = needed


def _solve(lane: _Lane, *, most_step: int, ties: bool) -> tuple[list[int], bool]:
    """Boundaries of least step not above `most_step`; with `ties`, of fewest buckets. The flag is False where labels
    were dropped.
    """
    labels = _Labels()
    exact = True
    most_labels = min(max(_LABEL_BUDGET // max(lane.n, 1), 32), 1_024)
    for j in range(1, lane.n + 1):
        comm, held = lane.into(j)
        boundary, finish, delay, count = labels.columns[:4, : labels.size]
        delay = delay + held[boundary]
        finish = np.maximum(finish, lane.ready[j - 1] + delay) + comm[boundary]
        if j < lane.n:
            finish = np.maximum(finish, lane.ready[j] + delay)
        reached = lane.step(finish + lane.rest(j), delay)
        keep = np.flatnonzero(reached <= most_step)
        keep = keep[_pareto(finish[keep], delay[keep], count[keep] if ties else None)]
        if len(keep) > most_labels:
            exact = False
            best = np.sort(np.argsort(reached[keep], kind="stable")[:most_labels])
            keep = keep[best]
        rows = np.stack([np.full(len(keep), j), finish[keep], delay[keep], count[keep] + 1, boundary[keep], keep])
        labels.append(rows.astype(np.int64))
    boundary, finish, delay, count, start, parent = labels.columns[:, : labels.size]
    last = np.flatnonzero(boundary == lane.n)
    steps = lane.step(finish[last], delay[last])
    order = np.lexsort((steps, count[last])) if ties else np.lexsort((count[last], steps))
    bounds = [lane.n]
    label = int(last[order[0]])
    while bounds[-1]:
        bounds.append(int(start[label]))
        label = int(parent[label])
    return bounds[::-1], exact


def _pareto(finish: Int64Array, delay: Int64Array, count: Int64Array | None) -> Int64Array:
    """Indices of labels that no other is at least as good as in every column; among equals the first."""
    order = np.lexsort((delay, finish))
    if count is None:
        least = np.minimum.accumulate(delay[order])
        keep = np.ones(len(order), dtype=bool)
        keep[1:] = delay[order][1:] < least[:-1]
        return order[keep]
    order = np.lexsort((count, delay, finish))
    kept: list[int] = []
    front: list[tuple[int, int]] = []  # (delay, count) of what is kept, none better than another
    for index in order.tolist():
        d, c = int(delay[index]), int(count[index])
        if any(other <= d and fewer <= c for other, fewer in front):
            continue
        front = [(other, fewer) for other, fewer in front if not (d <= other and c <= fewer)]
        front.append((d, c))
        kept.append(index)
    return np.array(kept, dtype=np.int64)


def _step_of(lane: _Lane, bounds: list[int]) -> int:
    finish = delay = 0
    for i, j in pairwise(bounds):
        comm, held = lane.into(j)
        delay += int(held[i])
        finish = max(finish, lane.ready[j - 1] + delay) + int(comm[i])
    return max(finish, lane.due + delay) + lane.tail


def _merge_ties(lane: _Lane, bounds: list[int], step: int) -> list[int]:
    """Merge neighbours from the front wherever the step stays `step`."""
    at = 1
    while at < len(bounds) - 1:
        merged = bounds[:at] + bounds[at + 1 :]
        if _step_of(lane, merged) <= step:
            bounds = merged
        else:
            at += 1
    return bounds
