"""Partitions that `auto` tries: priced runs of a lane, small tensors apart from large ones, caps, module blocks.

A priced partition minimises, lane by lane, the sum over buckets of

    launch + packing + unpacking + price * communication time

where `price` (thousandths) says what a nanosecond of the communication stream is worth in compute time: 0 while
everything hides behind compute, 1,000 where the stream decides. Members carry prices of their own, so that the search
can charge for the stream only in the busy spells that end in a stall; a bucket pays the mean of its members'. It is
exact for that sum among runs of at most `MAX_RUN` members; longer runs are merged afterwards while that pays.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from bucketplan_core.cost import CostModel, Int64Array, as_int64
from bucketplan_core.planners.auto_place import backward_gap
from bucketplan_core.request import Request

__all__ = ["MAX_RUN", "LaneRuns", "Windows", "block_of", "by_block", "cap_groups", "small_and_large"]

MAX_RUN = 128
"""Members of one run that the recurrence considers; the table of a lane holds MAX_RUN entries a member."""
_INFEASIBLE = 2**60
_BLOCK = re.compile(r"(?:^|.*?[._])(?:layers|blocks?|h|layer|stages?|experts)[._]\d+")


class Windows:
    """By candidate: the gap from which on it may be launched, the backward pass considered, and the last gap for it."""

    def __init__(self, request: Request) -> None:
        floor = backward_gap(request)
        self.closes = [min(c.latest_launch, c.latest_wait) for c in request.candidates]
        self.opens = [
            max(c.earliest_launch, min(floor, limit)) if c.kind == "fsdp_all_gather_backward" else c.earliest_launch
            for c, limit in zip(request.candidates, self.closes, strict=True)
        ]


class LaneRuns:
    """All runs of up to `MAX_RUN` members of a sequence of one lane's candidates, with their costs."""

    def __init__(self, cost: CostModel, windows: Windows, members: Sequence[int]) -> None:
        self.members = tuple(members)
        self._cost = cost
        n = len(members)
        candidates = [cost.request.candidates[m] for m in members]
        width = min(n, MAX_RUN)
        full = np.cumsum(as_int64([0, *(cost.full_bytes[m] for m in members)]))
        inputs = np.cumsum(as_int64([0, *(cost.input_bytes[m] for m in members)]))
        ends = np.arange(1, n + 1)[:, None]
        starts = np.maximum(ends - np.arange(1, width + 1)[None, :], 0)
        self._real = ends - np.arange(1, width + 1)[None, :] >= 0
        self._starts = starts
        self.sizes = full[ends] - full[starts]
        self.comm = cost.lane_models[cost.lane_of[members[0]]].times_ns(self.sizes)
        copies = cost.copies_ns(inputs[ends] - inputs[starts])
        if candidates[0].is_gather:
            copies = copies + cost.copies_ns(self.sizes)
        copies[:, 0] = 0
        self._held = copies + cost.hardware.launch_ns
        self._fits = self._real & _windows_fit(windows, members, width)
        self.span = self._spans(width)

    def _spans(self, width: int) -> Int64Array:
        """Compute between a run's first and last member: first uses of gathers, readiness of reductions."""
        prefix = self._cost.prefix_ns
        candidates = [self._cost.request.candidates[m] for m in self.members]
        at = as_int64([prefix[c.first_use if c.is_gather else c.earliest_launch] for c in candidates])
        spans: Int64Array = np.abs(at[:, None] - at[np.minimum(self._starts, len(at) - 1)])
        return spans

    def partitions(
        self, price_of: Mapping[int, int], spans_ns: Sequence[int | None]
    ) -> Iterator[list[tuple[int, ...]]]:
        """The cheapest partition at these member prices for each bound of a run's `span`, of which none may ascend.

        Ties take fewer buckets. What stays within the next bound as well is the cheapest there, too.
        """
        keyed = self._keyed(price_of)
        bounds: list[int] | None = None
        for span_ns in spans_ns:
            if bounds is None or not self._within(bounds, span_ns):
                bounds = self._cheapest(keyed, span_ns)
            runs = [self.members[a:b] for a, b in pairwise(bounds)]
            yield self._merge_long(runs, price_of, span_ns) if self._starts.shape[1] < len(self.members) else runs

    def _keyed(self, price_of: Mapping[int, int]) -> Int64Array:
        """Cost of every run at these prices, times a scale, plus one: least cost first, then fewest runs."""
        n = len(self.members)
        prices = as_int64([price_of[m] for m in self.members])
        if (prices == prices[0]).all():
            mean = prices[:1, None]
        else:
            total = np.cumsum(np.insert(prices, 0, 0))
            ends = np.arange(1, n + 1)[:, None]
            mean = (total[ends] - total[self._starts]) // np.maximum(ends - self._starts, 1)
        cost = self._held + self.comm * mean // 1_000
        keyed: Int64Array = np.where(self._fits, cost * (n + 1) + 1, _INFEASIBLE)
        return keyed

    def _within(self, bounds: Sequence[int], span_ns: int | None) -> bool:
        return span_ns is None or all(
            b - a == 1 or int(self.span[b - 1, b - a - 1]) <= span_ns for a, b in pairwise(bounds)
        )

    def _cheapest(self, keyed: Int64Array, span_ns: int | None) -> list[int]:
        n, width = keyed.shape
        if span_ns is not None:
            keyed = np.where(self._near(span_ns), keyed, _INFEASIBLE)
        # behind[n - k] is the least for the first k members, so that those before `end` stand in one slice.
        behind = np.zeros(n + 1, dtype=np.int64)
        taken = [0] * (n + 1)
        totals = np.empty(width, dtype=np.int64)
        for end in range(1, n + 1):
            reach = min(width, end)
            here = totals[:reach]
            np.add(keyed[end - 1, :reach], behind[n - end + 1 : n - end + 1 + reach], out=here)
            run = here.argmin()
            behind[n - end] = here[run]
            taken[end] = int(run) + 1
        bounds = [n]
        while bounds[-1]:
            bounds.append(bounds[-1] - taken[bounds[-1]])
        return bounds[::-1]

    def _near(self, span_ns: int) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        near = self.span <= span_ns
        near[:, 0] = True
        return near

    def _merge_long(
        self, runs: list[tuple[int, ...]], price_of: Mapping[int, int], span_ns: int | None
    ) -> list[tuple[int, ...]]:
        """Merge neighbours of which one already is as long as the recurrence allows, wherever that is not dearer."""
        request, cost = self._cost.request, self._cost

        def priced(run: tuple[int, ...]) -> int:
            found = cost.bucket(run)
            mean: int = sum(price_of[m] for m in run) // len(run)
            return found.launch_ns + found.wait_ns + found.comm_ns * mean // 1_000

        merged: list[tuple[int, ...]] = []
        for run in runs:
            if merged and max(len(merged[-1]), len(run)) >= MAX_RUN:
                both = merged[-1] + run
                candidates = [request.candidates[m] for m in both]
                opens = max(c.earliest_launch for c in candidates)
                closes = min(min(c.latest_launch, c.latest_wait) for c in candidates)
                first, last = candidates[0], candidates[-1]
                at = [cost.prefix_ns[c.first_use if c.is_gather else c.earliest_launch] for c in (first, last)]
                near = span_ns is None or abs(at[1] - at[0]) <= span_ns
                if opens <= closes and near and priced(both) <= priced(merged[-1]) + priced(run):
                    merged[-1] = both
                    continue
            merged.append(run)
        return merged


def _windows_fit(
    windows: Windows, members: Sequence[int], width: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Whether the run of each length that ends at each member can be launched and waited for together."""
    opened, closed = as_int64([windows.opens[m] for m in members]), as_int64([windows.closes[m] for m in members])
    opens, closes = opened.copy(), closed.copy()
    n = len(members)
    fits = np.zeros((n, width), dtype=bool)
    fits[:, 0] = True
    for length in range(2, width + 1):
        opened[length - 1 :] = np.maximum(opened[length - 1 :], opens[: n - length + 1])
        closed[length - 1 :] = np.minimum(closed[length - 1 :], closes[: n - length + 1])
        fits[length - 1 :, length - 1] = (opened <= closed)[length - 1 :]
    return fits


def small_and_large(cost: CostModel, members: Sequence[int], prices: Mapping[int, int]) -> tuple[list[int], list[int]]:
    """Members whose own packing is cheaper than half a launch on the stream at their price, and the others."""
    small: list[int] = []
    large: list[int] = []
    for member in members:
        candidate = cost.request.candidates[member]
        model = cost.lane_models[cost.lane_of[member]]
        latency = model.time_ns(0) * prices[member] // 1_000 + cost.hardware.launch_ns
        copies = cost.copy_ns(cost.input_bytes[member])
        if candidate.is_gather:
            copies += cost.copy_ns(cost.full_bytes[member])
        (small if 2 * copies < latency else large).append(member)
    return small, large


def cap_groups(cost: CostModel, windows: Windows, members: Sequence[int], cap_bytes: int) -> list[tuple[int, ...]]:
    """Runs of at most `cap_bytes` whole bytes that can be launched together; what stands above the cap stays alone."""
    groups: list[list[int]] = []
    size = opens = closes = 0
    for member in members:
        full = cost.full_bytes[member]
        opened, closed = windows.opens[member], windows.closes[member]
        if groups and size + full <= cap_bytes and max(opens, opened) <= min(closes, closed):
            groups[-1].append(member)
            size += full
            opens, closes = max(opens, opened), min(closes, closed)
        else:
            groups.append([member])
            size, opens, closes = full, opened, closed
    return [tuple(group) for group in groups]


def block_of(request: Request, member: int) -> str:
    """The repeated block that a candidate belongs to by its parameter's or module's name, else its outermost module."""
    candidate = request.candidates[member]
    name = candidate.param_name or (candidate.module_fqns[0] if candidate.module_fqns else "")
    found = _BLOCK.match(name)
    return found.group(0) if found else name.partition(".")[0]


def by_block(cost: CostModel, windows: Windows, members: Sequence[int]) -> list[tuple[int, ...]]:
    """Runs of neighbours of one block."""
    groups: list[list[int]] = []
    previous: str | None = None
    for member in members:
        block = block_of(cost.request, member)
        if groups and block == previous and block:
            groups[-1].append(member)
        else:
            groups.append([member])
        previous = block
    return [run for group in groups for run in cap_groups(cost, windows, group, 2**62)]
