"""The exact plan of one all-gather lane that is issued one bucket ahead.

Waiting for bucket k empties the stream, and bucket k + 1 is launched right after that wait. So a step is a sum over
neighbouring buckets: with h, i, j the first members of three buckets in a row and W(m) the pure compute before the
wait of the bucket that m starts,

    cost(h, i, j) = launch and packing + max(W(i) - W(h), communication of i..j-1) + unpacking

and ``V(h, i) = min over j of cost(h, i, j) + V(i, j)``. Communication grows with j, so the two sides of the max split
at one j, and so does memory, so the feasible j form a prefix: every V(h, i) is two range minima, all V of one i a few
vector operations. O(n^2) time without a memory budget, O(n^2 log n) with one; 8 n^2 bytes.

Exact holds among contiguous partitions of lane order with every launch right after the wait before it, and only where
`exact_gather_conditions` finds nothing in the way. Ties: fewer buckets, then lexicographically least boundaries. Time
and bucket count share one integer, time first, so that minimising it minimises both in order.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from bucketplan_core.cost import CostModel, Int64Array, as_int64
from bucketplan_core.planners.auto_exact import obstacles_to_exactness

__all__ = ["exact_gather_conditions", "exact_gather_lane"]

_INFEASIBLE = 2**61


def exact_gather_conditions(cost: CostModel, lane_index: int) -> list[str]:
    """What keeps the recurrence from being the simulator's truth for this lane; empty where it is exact."""
    members = [cost.request.candidates[m] for m in cost.request.lanes[lane_index].members]
    reasons = obstacles_to_exactness(cost, lane_index)
    if any(a.latest_wait > b.latest_wait for a, b in pairwise(members)):
        reasons.append("waits are not in lane order")
    if any(c.latest_launch < c.latest_wait for c in members):
        reasons.append("a launch window closes before its wait")
    if members and max(c.earliest_launch for c in members) > members[0].latest_wait:
        reasons.append("a launch window opens after the first wait")
    return reasons


def exact_gather_lane(
    cost: CostModel, lane_index: int, budget_bytes: int | None = None
) -> list[tuple[int, ...]] | None:
    """The best buckets of the lane in the space above, None if none stays within `budget_bytes` by the simulator's
    count.

    Step time is the simulator's own where `exact_gather_conditions` is empty; elsewhere the result is a start for
    search.
    """
    request = cost.request
    members = request.lanes[lane_index].members
    n = len(members)
    candidates = [request.candidates[m] for m in members]
    prefix = as_int64(cost.prefix_ns)
    waits = as_int64([c.latest_wait for c in candidates])
    waits = np.minimum.accumulate(waits[::-1])[::-1]  # where waits are out of order, the earliest behind counts
    opens = np.maximum.accumulate(as_int64([c.earliest_launch for c in candidates]))
    opens = np.minimum(opens, waits[0])
    before = prefix[waits]  # pure compute before the wait of the bucket that starts here
    full = np.cumsum(as_int64([0, *(c.full_bytes for c in candidates)]))
    shards = np.cumsum(as_int64([0, *(c.input_bytes for c in candidates)]))
    model = cost.lane_models[lane_index]
    scale = n + 1
    memory = None if budget_bytes is None else _Memory(cost, waits, opens, full, shards, budget_bytes)

    value = np.full((n, n + 1), _INFEASIBLE, dtype=np.int64)  # V[h, i]: the bucket of h is waited for, i comes next
    value[:, n] = (prefix[-1] - before) * scale
    if memory is not None:
        value[[not memory.tail_fits(h) for h in range(n)], n] = _INFEASIBLE
    terms: list[tuple[Int64Array, Int64Array] | None] = [None] * n
    first = (0, 0)
    for i in range(n - 1, -1, -1):
        sizes = full[i + 1 :] - full[i]
        comm = model.times_ns(sizes)
        copies = cost.copies_ns(shards[i + 1 :] - shards[i]) + cost.copies_ns(sizes)
        copies[0] = 0
        fixed_cost = (copies + cost.hardware.launch_ns) * scale + 1 + value[i, i + 1 :]
        fixed_cost = np.minimum(fixed_cost, _INFEASIBLE)
        terms[i] = (comm, fixed_cost)
        if i:
            overlap = before[i] - before[:i]
            limits = np.full(i, n - i) if memory is None else memory.limits(i)
            value[:i, i] = _least(overlap, comm, fixed_cost, limits, scale)
        else:
            # The first bucket is launched where its last window opens.
            overlaps = before[0] - prefix[opens]
            limit = n if memory is None else memory.first_limit()
            totals = (prefix[opens] + np.maximum(overlaps, comm)) * scale + fixed_cost
            if limit == 0 or int(totals[:limit].min()) >= _INFEASIBLE:
                return None
            first = (0, int(totals[:limit].argmin()) + 1)
    buckets = [tuple(members[first[0] : first[1]])]
    h, i = first
    while i < n:
        found = terms[i]
        assert found is not None
        comm, fixed_cost = found
        overlap = int(before[i] - before[h])
        limit = n - i if memory is None else int(memory.limits(i)[h])
        totals = np.maximum(overlap, comm[:limit]) * scale + fixed_cost[:limit]
        j = i + 1 + int(totals.argmin())
        buckets.append(tuple(members[i:j]))
        h, i = i, j
    return buckets


def _least(overlap: Int64Array, comm: Int64Array, fixed_cost: Int64Array, limits: Int64Array, scale: int) -> Int64Array:
    """For each overlap: min over the first `limits` entries of max(overlap, comm) * scale + fixed_cost."""
    split = np.minimum(np.searchsorted(comm, overlap, side="right"), limits)
    hidden = np.minimum.accumulate(fixed_cost)
    exposed = np.minimum(fixed_cost + comm * scale, _INFEASIBLE)
    best = np.full(len(overlap), _INFEASIBLE, dtype=np.int64)
    some = split > 0
    best[some] = np.minimum(best[some], overlap[some] * scale + hidden[split[some] - 1])
    rest = limits > split
    if rest.any():
        best[rest] = np.minimum(best[rest], _range_min(exposed, split[rest], limits[rest]))
    return np.minimum(best, _INFEASIBLE)


def _range_min(values: Int64Array, start: Int64Array, end: Int64Array) -> Int64Array:
    """min(values[start:end]) of each non-empty range, through a table of minima over powers of two."""
    if bool((end == len(values)).all()):
        suffix: Int64Array = np.minimum.accumulate(values[::-1])[::-1]
        return suffix[start]
    table = [values]
    width = 1
    while 2 * width <= len(values):
        previous = table[-1]
        table.append(np.minimum(previous[:-width], previous[width:]))
        width *= 2
    levels = np.array([int(length).bit_length() - 1 for length in end - start], dtype=np.int64)
    result = np.empty(len(start), dtype=np.int64)
    for level, minima in enumerate(table):
        at = levels == level
        result[at] = np.minimum(minima[start[at]], minima[end[at] - (1 << level)])
    return result


class _Memory:
    """Which buckets fit the budget, by the simulator's table of buffers, for a lane that is alone on its graph.

    Between two waits the stream holds every result up to the bucket in flight, its flat result and its shards; all
    but the bucket in flight is the same for every partition. At a fused wait the members' copies stand beside the
    flat result.
    """

    def __init__(
        self,
        cost: CostModel,
        waits: Int64Array,
        opens: Int64Array,
        full: Int64Array,
        shards: Int64Array,
        budget_bytes: int,
    ) -> None:
        num_segments = cost.request.num_segments
        self._gap = cost.static_bytes[: num_segments + 1] + cost.live_at_gap
        self._segment = cost.static_bytes[:num_segments] + as_int64(cost.live_bytes)
        self._waits, self._opens, self._full, self._shards = waits, opens, full, shards
        self._budget = budget_bytes
        self._n = len(waits)
        # From each wait to the next: what the segments between them hold.
        self._before_next = as_int64([self._between(int(a), int(b)) for a, b in pairwise(waits)])

    def _between(self, start: int, end: int) -> int:
        """The most that stands beside the buckets from gap `start` to gap `end`, both included."""
        most = max(int(self._gap[start]), int(self._gap[end]))
        return max(most, int(self._segment[start:end].max())) if end > start else most

    def tail_fits(self, h: int) -> bool:
        after = self._segment[int(self._waits[h]) :]
        return not len(after) or int(self._full[self._n]) + int(after.max()) <= self._budget

    def _fits(self, i: int, beside: Int64Array) -> Int64Array:
        in_flight = self._full[i + 1 :] + self._shards[i + 1 :] - self._shards[i]
        limits: Int64Array = np.searchsorted(in_flight, self._budget - beside, side="right")
        unpacking = in_flight + self._full[i + 1 :] - self._full[i] + int(self._gap[int(self._waits[i])])
        fused = max(int(np.searchsorted(unpacking, self._budget, side="right")), 1)
        return np.minimum(limits, fused)

    def limits(self, i: int) -> Int64Array:
        """For each h < i: how many members the bucket that starts at i may have."""
        between = np.maximum.accumulate(self._before_next[i - 1 :: -1])[::-1]
        beside = np.maximum(np.maximum(between, self._gap[self._waits[:i]]), self._gap[int(self._waits[i])])
        return self._fits(i, beside)

    def first_limit(self) -> int:
        """How many members the first bucket may have; a longer one may open later, which only shortens what is held."""
        beside = as_int64([self._between(int(gap), int(self._waits[0])) for gap in self._opens])
        in_flight = self._full[1:] + self._shards[1:]
        fits = in_flight + beside <= self._budget
        unpacking = in_flight + self._full[1:] + int(self._gap[int(self._waits[0])]) <= self._budget
        unpacking[0] = True
        fits &= unpacking
        return int(np.argmin(fits)) if not fits.all() else self._n
