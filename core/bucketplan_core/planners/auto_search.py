"""The search of `auto`: partitions by rule, by price and by exact lane planners, then moves, all judged by the
simulator.

In order, until the step equals its lower bound or the budget of simulated steps is spent:

1. Every candidate alone; the exact planners where one lane is all there is; priced partitions at several prices and
   spans; small tensors apart from large ones; byte caps; module blocks.
2. The best partitions under other placement rules.
3. Repricing: members of the busy spells that end in a stall are charged for the stream, the others less, and the
   lanes are partitioned again.
4. Moves: split, merge or shift buckets, those in such spells first.

Afterwards every baseline that could still be better is tried, whatever was spent: that is what makes `auto` never
worse. Budgets count simulated steps, not seconds, so the same request gives the same plan on any machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from bucketplan_core.planners.auto_gather import exact_gather_conditions, exact_gather_lane
from bucketplan_core.planners.auto_groups import LaneRuns, Windows, by_block, cap_groups, small_and_large
from bucketplan_core.planners.auto_place import ORIGINAL, SCHEDULED, Ahead, Groups, Rule, Trial, Workbench
from bucketplan_core.planners.auto_polish import polish
from bucketplan_core.planners.auto_reduce import exact_reduce_conditions, exact_reduce_lane
from bucketplan_core.planners.simple import fill_by_size

__all__ = ["BASELINE_CAPS", "STEP_BUDGET", "Search"]

STEP_BUDGET = 120_000
"""Simulated steps that the search may spend; a candidate on its own is two steps of a run."""
BASELINE_CAPS = (10_000_000, 25_000_000, 50_000_000, 100_000_000, 200_000_000, 500_000_000)
_CAPS = (1_000_000, 4_000_000, *BASELINE_CAPS)
_PRICES = (1_000, 250)
_SPANS = (None, 4, 16, 64)
_AHEAD = Ahead(2_000)
_OTHER_RULES: tuple[Rule, ...] = (Ahead(1_000), Ahead(4_000), Ahead(1_500), Ahead(None), SCHEDULED)
_EXACT_CELLS = 1_500_000
"""Most squared lane members that the exact planners are given."""
_REPRICING_ROUNDS = 4
_KEPT = 4
_POLISH_BUDGET = 60_000
"""Simulated steps that moves of single launches and waits may take on top of `STEP_BUDGET`."""
_FINEST_GAP = 10_000
"""The search stops at a gap of one part in this many."""


@dataclass
class Search:
    """One search; `best` is its result, `exact` says whether a proof covers it, `tried` how many trials were run."""

    bench: Workbench
    bound_ns: int
    placement: str
    as_traced: Trial | None = None
    step_budget: int = STEP_BUDGET
    best: Trial | None = None
    tried: int = 0
    exact: bool = False
    exact_reasons: tuple[str, ...] = ()
    _seen: set[tuple[Groups, Rule]] = field(default_factory=set)
    _kept: list[Trial] = field(default_factory=list)
    _costs: dict[tuple[int, ...], tuple[int, int, int]] = field(default_factory=dict)
    _runs: dict[tuple[int, ...], LaneRuns] = field(default_factory=dict)

    @cached_property
    def _windows(self) -> Windows:
        return Windows(self.bench.request)

    def run(self) -> Trial | None:
        """The best trial within the budget of memory, None where there is none."""
        if self.as_traced is not None:
            self._seen.add((self.as_traced.groups, self.as_traced.rule))
            self._consider(self.as_traced)
        main: Rule = ORIGINAL if self.placement == "original" else _AHEAD
        self._try([(m,) for m in range(len(self.bench.request.candidates))], main)
        if not self._done():
            self._try_promising(self._starts(), main)
        self._prove()
        if self.placement != "original":
            for trial in list(self._kept):
                for rule in _OTHER_RULES:
                    if self._done():
                        break
                    self._try(trial.groups, rule)
        self._reprice(main)
        self._move()
        self._baselines()
        if self.placement != "original":
            self._polish()
        return self.best

    def _polish(self) -> None:
        """Move single steps of the best plans, the order inside gaps and against fixed collectives included."""
        until = self.bench.spent + _POLISH_BUDGET
        for trial in [self.best, *self._kept]:
            if trial is None or self._optimal() or self.bench.spent >= until:
                return
            self._consider(polish(self.bench, trial, until - self.bench.spent))

    def _done(self) -> bool:
        return self.bench.spent >= self.step_budget or self._optimal()

    def _optimal(self) -> bool:
        """Whether the rest of the gap to the bound is finer than any profile of hardware is."""
        return self.best is not None and self.best.step_ns <= self.bound_ns + self.bound_ns // _FINEST_GAP

    def _try(self, groups: Sequence[tuple[int, ...]], rule: Rule, *, below_ns: int | None = None) -> Trial | None:
        # A named placement breaks ties inside a gap by the order of its buckets, so there the order is part of the
        # trial.
        canonical = tuple(sorted(groups)) if isinstance(rule, Ahead) else tuple(groups)
        if (canonical, rule) in self._seen:
            return None
        self._seen.add((canonical, rule))
        self.tried += 1
        trial = self.bench.evaluate(canonical, rule, below_ns=below_ns)
        if trial is None:
            return None
        self._consider(trial)
        return trial

    def _consider(self, trial: Trial) -> None:
        if self.bench.budget_bytes is not None and trial.peak_bytes > self.bench.budget_bytes:
            return
        if self.best is None or trial.rank < self.best.rank:
            self.best = trial
        if all(trial.groups != kept.groups for kept in self._kept):
            self._kept = sorted([*self._kept, trial], key=lambda kept: kept.rank)[:_KEPT]

    def _try_promising(self, partitions: Iterator[Groups], rule: Rule) -> None:
        """Try partitions, those first that could be fastest, and none that cannot reach the best so far."""
        distinct = dict.fromkeys(partitions)
        for least, _, groups in sorted((self._least(g, rule), number, g) for number, g in enumerate(distinct)):
            if self._done() or (self.best is not None and least > self.best.step_ns):
                return
            self._try(groups, rule)

    def _starts(self) -> Iterator[Groups]:
        request, cost = self.bench.request, self.bench.cost
        lanes = [lane.members for lane in request.lanes]
        for price in _PRICES:
            prices = dict.fromkeys(range(len(request.candidates)), price)
            yield from self._priced(prices)
        for cap in _CAPS:
            yield tuple(group for lane in lanes for group in cap_groups(cost, self._windows, lane, cap))
        yield tuple(group for lane in lanes for group in by_block(cost, self._windows, lane))
        if self.placement != "original" and sum(len(lane) ** 2 for lane in lanes) <= _EXACT_CELLS:
            yield tuple(
                group
                for number, lane in enumerate(request.lanes)
                for group in (
                    (exact_gather_lane(cost, number) or [])
                    if request.candidates[lane.members[0]].is_gather
                    else [(m,) for m in lane.members]
                )
            )

    def _priced(self, prices: Mapping[int, int]) -> Iterator[Groups]:
        cost = self.bench.cost
        lanes = [lane.members for lane in self.bench.request.lanes]
        runs = [self._runs_of(lane) for lane in lanes]
        apart = [small_and_large(cost, lane, prices) for lane in lanes]
        small_runs = [self._runs_of(tuple(small)) for small, _ in apart if small]
        alone = [(m,) for _, large in apart for m in large]
        spans = [None if span is None else cost.compute_ns // span for span in _SPANS]
        whole = [run.partitions(prices, spans) for run in runs]
        small = [run.partitions(prices, spans) for run in small_runs] if alone else []
        for _ in spans:
            yield tuple(group for found in whole for group in next(found))
            if small:
                yield (*(group for found in small for group in next(found)), *alone)

    def _runs_of(self, members: tuple[int, ...]) -> LaneRuns:
        found = self._runs.get(members)
        if found is None:
            found = self._runs[members] = LaneRuns(self.bench.cost, self._windows, members)
        return found

    def _prove(self) -> None:
        """Run the exact planner where one lane is all there is and nothing else is in its way."""
        request, cost = self.bench.request, self.bench.cost
        if not request.candidates:
            return
        if len(request.lanes) > 1:
            self.exact_reasons = ("several lanes",)
            return
        gather = request.candidates[0].is_gather
        reasons = exact_gather_conditions(cost, 0) if gather else exact_reduce_conditions(cost, 0)
        if self.placement == "original":
            reasons.append("placement original")
        if len(request.candidates) ** 2 > _EXACT_CELLS:
            reasons.append("too many members")
        if gather and any(
            c.earliest_launch < self.bench.bucket((m,)).earliest for m, c in enumerate(request.candidates)
        ):
            reasons.append("backward gathers wait for the backward pass")
        if reasons:
            self.exact_reasons = tuple(reasons)
            return
        if gather:
            buckets = exact_gather_lane(cost, 0, self.bench.budget_bytes)
            proved = buckets is not None
        else:
            buckets, proved = exact_reduce_lane(cost, 0)
        trial = self._try(buckets, SCHEDULED) if buckets is not None else None
        self.exact = proved and trial is not None
        if buckets is not None:
            self._try(buckets, _AHEAD)

    def _reprice(self, rule: Rule) -> None:
        prices = dict.fromkeys(range(len(self.bench.request.candidates)), 0)
        for _ in range(_REPRICING_ROUNDS):
            if self._done() or self.best is None:
                return
            critical = {m for index in critical_buckets(self.best) for m in self.best.buckets[index].members}
            prices = {m: min(price // 2 + 500, 1_000) if m in critical else price // 2 for m, price in prices.items()}
            before = self.best
            self._try_promising(self._priced(prices), rule)
            if self.best is before:
                return

    def _move(self) -> None:
        """Descend from the best partitions, one move at a time, first improvement first."""
        for start in list(self._kept):
            trial = start
            while not self._done():
                better = self._improve(trial)
                if better is None:
                    break
                trial = better

    def _improve(self, trial: Trial) -> Trial | None:
        for groups in moves(self.bench, trial):
            if self._done():
                return None
            found = self._try(groups, trial.rule)
            if found is not None and found.rank < trial.rank:
                return found
        return None

    def _baselines(self) -> None:
        """Whatever `none` and `size` reach at either placement, unless their copies alone take longer than the best."""
        request = self.bench.request
        rules = (ORIGINAL,) if self.placement == "original" else (SCHEDULED, ORIGINAL)
        free_of_edges = not (any(c.depends_on for c in request.candidates) or any(f.depends_on for f in request.fixed))
        partitions: list[Groups] = [tuple((m,) for lane in request.lanes for m in lane.members)]
        for cap in sorted({*BASELINE_CAPS, request.options.bucket_cap_bytes}):
            partitions.append(
                tuple(
                    group
                    for lane in request.lanes
                    for group in fill_by_size(request, lane.members, first_cap_bytes=cap, cap_bytes=cap)
                )
            )
        for groups in partitions:
            if self.best is not None and self.best.step_ns <= self.bound_ns:
                return
            for rule in rules:
                if not free_of_edges or self.best is None or self._least(groups, rule) < self.best.step_ns:
                    self._try(groups, rule, below_ns=None if self.best is None else self.best.step_ns)

    def _least(self, groups: Groups, rule: Rule) -> int:
        """What a partition that is not split takes at least: its busiest stream, or its packing, its exposed launches
        and what the rest of that stream slows down.
        """
        cost = self.bench.cost
        busy = [0] * len(cost.streams)
        held = cost.compute_ns
        costs, streams = self._costs, cost.lane_streams
        for group in groups:
            found = costs.get(group)
            if found is None:
                own = cost.bucket(group)
                found = costs[group] = (streams[cost.lane_of[group[0]]], own.comm_ns, own.launch_ns + own.wait_ns)
            busy[found[0]] += found[1]
            held += found[2]
        exposed = sum(costs[group][1] for group in groups if self._waits_at_once(group)) if rule is ORIGINAL else 0
        permille = cost.hardware.slowdown_permille
        # While a stream is busy and not waited for, compute does 1,000 of every 1,000 + permille parts of its work.
        slowed = max(max(busy, default=0) - exposed, 0) * permille // (1_000 + permille)
        return max([held + exposed + slowed, *busy])

    def _waits_at_once(self, group: tuple[int, ...]) -> bool:
        """Whether a bucket of a graph without edges is waited for right behind its launch under `original`."""
        first = self.bench.request.candidates[group[0]]
        return len(group) > 1 or (first.launch == first.wait and first.wait_order == first.launch_order + 1)


def critical_buckets(trial: Trial) -> list[int]:
    """Buckets of the busy spells that end in a stall, the longest stall first, nearest to it first."""
    by_stream: dict[int, list[int]] = {}
    for index in sorted(range(len(trial.buckets)), key=lambda i: trial.run.launched[i][1:]):
        by_stream.setdefault(trial.buckets[index].stream, []).append(index)
    place = {index: (indices, at) for indices in by_stream.values() for at, index in enumerate(indices)}
    stalled = [i for i, (_, exposed) in enumerate(trial.run.waited) if exposed]
    found: dict[int, None] = {}
    for index in sorted(stalled, key=lambda i: (-trial.run.waited[i][1], i)):
        indices, at = place[index]
        while True:
            found[indices[at]] = None
            if not at or trial.run.launched[indices[at - 1]][2] < trial.run.launched[indices[at]][1]:
                break
            at -= 1
    return list(found)


def moves(bench: Workbench, trial: Trial) -> Iterator[Groups]:
    """Neighbouring partitions: around critical buckets first, then around all others, in lane order."""
    position = bench.request.lane_position
    groups = [tuple(sorted(bucket.members, key=position)) for bucket in trial.buckets]
    critical = critical_buckets(trial)
    order = [*critical, *(i for i in range(len(groups)) if i not in set(critical))]
    by_lane: dict[int, list[int]] = {}
    for index, bucket in enumerate(trial.buckets):
        by_lane.setdefault(bucket.lane, []).append(index)
    following: dict[int, int] = {}
    for indices in by_lane.values():
        indices.sort(key=lambda i: position(groups[i][0]))
        following |= dict(pairwise(indices))
    preceding = {after: before for before, after in following.items()}

    def replaced(gone: set[int], new: Sequence[tuple[int, ...]]) -> Groups:
        return (*(group for i, group in enumerate(groups) if i not in gone), *(group for group in new if group))

    for index in order:
        group = groups[index]
        if len(group) > 1:
            yield replaced({index}, [(m,) for m in group])
            for cut in sorted({len(group) // 2, 1, len(group) - 1}):
                yield replaced({index}, [group[:cut], group[cut:]])
        for one, two in ((index, following.get(index)), (preceding.get(index), index)):
            if one is None or two is None:
                continue
            a, b = groups[one], groups[two]
            yield replaced({one, two}, [(*a, *b)])
            if len(b) > 1:
                yield replaced({one, two}, [(*a, b[0]), b[1:]])
            if len(a) > 1:
                yield replaced({one, two}, [a[:-1], (a[-1], *b)])
