"""Where the launches and waits of given buckets go, and what the step then costs: the inner loop of `auto`'s search.

`Workbench.evaluate` takes any partition of the candidates and a placement rule. Under `Ahead(n)` a gather is issued n
thousandths of its own duration ahead of the last moment at which it would still be hidden, counted backwards from its
wait over everything that follows it on its stream; `Ahead(None)` issues it as early as it may. A reduction goes out
where it is ready, but gathers that could not wait for it go first. Reductions are waited for where they have been
done for as long as they took, so that their buffers go early and a collective twice as slow as predicted still costs
nothing. Gathers that would break the memory budget are issued later.

Every trial is run by the simulator. Positions are gaps, times ns.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from bucketplan_core.cost import BucketCost, CostModel
from bucketplan_core.errors import IllegalPlan
from bucketplan_core.plan import StepOp
from bucketplan_core.planners.auto_tight import place_within
from bucketplan_core.request import Request
from bucketplan_core.schedule import (
    Placement,
    Unschedulable,
    arrange_events,
    legalize,
    place_original,
    place_scheduled,
)
from bucketplan_core.simulate import Buffers, MemoryCurve, Run, buffers_of, memory_curve, run_steps

__all__ = ["ORIGINAL", "SCHEDULED", "Ahead", "Bucket", "Groups", "Rule", "Trial", "Workbench", "backward_gap"]

Groups = tuple[tuple[int, ...], ...]
_FIRST = -(2**62)
_LAST = 2**62
_BEFORE_LAUNCHES = _FIRST - 1
"""Key of a wait that frees memory for the launches of its gap."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """Issue gathers this many thousandths of their duration ahead of the last moment; None: as early as they may."""

    permille: int | None


@dataclass(frozen=True, slots=True)
class Named:
    """A placement of `bucketplan_core.schedule`."""

    name: str
    place: Callable[[Request, Sequence[tuple[int, ...]]], list[Placement]]


Rule = Ahead | Named
ORIGINAL = Named("original", place_original)
SCHEDULED = Named("scheduled", place_scheduled)


@dataclass(frozen=True, slots=True)
class Bucket:
    """One possible bucket with everything that placing it needs."""

    members: tuple[int, ...]
    lane: int
    stream: int
    is_gather: bool
    earliest: int
    latest_launch: int
    latest_wait: int
    cost: BucketCost
    buffers: Buffers
    feeds_on: tuple[int, ...]
    order: int

    def admits(self, launch: int, wait: int) -> bool:
        """Whether these gaps lie in the bucket's windows, the wait no earlier than the launch."""
        return self.earliest <= launch <= self.latest_launch and launch <= wait <= self.latest_wait


@dataclass(frozen=True, slots=True)
class Trial:
    """One evaluated plan: `run` by bucket of `buckets`, which go as `placements` or, without these, by the gaps.

    Waits in `early` come before the launches of their gap.
    """

    rule: Rule
    buckets: tuple[Bucket, ...]
    launches: Sequence[int]
    waits: Sequence[int]
    run: Run
    peak_bytes: int
    early: frozenset[int] = frozenset()
    named: tuple[Placement, ...] = ()

    @property
    def placements(self) -> Sequence[Placement]:
        return self.named or _placements(self.buckets, self.launches, self.waits, self.early)

    @property
    def step_ns(self) -> int:
        return self.run.step_ns

    @property
    def groups(self) -> Groups:
        return tuple(bucket.members for bucket in self.buckets)

    @property
    def rank(self) -> tuple[int, int]:
        """Least is best: step time, then buckets."""
        return (self.run.step_ns, len(self.buckets))


def backward_gap(request: Request) -> int:
    """The first gap at which the backward pass may be prefetched: no backward gather is issued before it.

    In a joint graph that is the last first use of a forward gather. Issued earlier, a backward gather would keep
    parameters whole through the loss, which undoes resharding.
    """
    forward = [c.first_use for c in request.candidates if c.kind == "fsdp_all_gather"]
    return max(forward, default=0)


class Workbench:
    """Evaluates partitions of one request; `budget_bytes` is never exceeded by a trial it returns."""

    def __init__(self, cost: CostModel, budget_bytes: int | None) -> None:
        self.cost = cost
        self.request = cost.request
        self.budget_bytes = budget_bytes
        self.spent = 0
        """Work so far in simulated steps, which the search's budget counts; ordering events by edges counts double."""
        self._buckets: dict[tuple[int, ...], Bucket] = {}
        self._backward_gap = backward_gap(cost.request)
        self._prefix = cost.prefix_ns
        self._num_candidates = len(cost.request.candidates)
        self._fixed_events = self._sorted_fixed()
        self._before_fixed: dict[int, int] = {}
        for fixed in cost.request.fixed:
            for source in fixed.depends_on:
                self._before_fixed[source] = min(self._before_fixed.get(source, fixed.launch), fixed.launch)
        self.has_edges = any(c.depends_on for c in cost.request.candidates) or bool(self._before_fixed)
        self._due = [
            min(c.latest_wait, self._before_fixed.get(index, c.latest_wait))
            for index, c in enumerate(cost.request.candidates)
        ]

    def bucket(self, members: tuple[int, ...]) -> Bucket:
        """The bucket of these candidates (all of one lane), computed once."""
        found = self._buckets.get(members)
        if found is None:
            found = self._buckets[members] = self._describe(members)
        return found

    def _describe(self, members: tuple[int, ...]) -> Bucket:
        first = self.request.candidates[members[0]]
        earliest, latest_launch, order = first.earliest_launch, first.latest_launch, first.launch_order
        latest_wait = self._due[members[0]]
        edges: set[int] = set()
        for member in members:
            c = self.request.candidates[member]
            earliest = max(earliest, c.earliest_launch)
            latest_launch = min(latest_launch, c.latest_launch)
            latest_wait = min(latest_wait, self._due[member])
            order = min(order, c.launch_order)
            if c.depends_on:
                edges.update(c.depends_on)
        latest_launch = min(latest_launch, latest_wait)
        for edge in edges:
            if edge >= self._num_candidates:
                earliest = max(earliest, self.request.fixed[edge - self._num_candidates].wait or 0)
        if first.kind == "fsdp_all_gather_backward":
            earliest = max(earliest, min(self._backward_gap, latest_launch))
        lane = self.cost.lane_of[members[0]]
        return Bucket(
            members=members,
            lane=lane,
            stream=self.cost.lane_streams[lane],
            is_gather=first.is_gather,
            earliest=earliest,
            latest_launch=latest_launch,
            latest_wait=latest_wait,
            cost=self.cost.bucket(members),
            buffers=buffers_of(self.cost, members),
            feeds_on=tuple(sorted(edge for edge in edges if edge < self._num_candidates)),
            order=order,
        )

    def evaluate(self, groups: Sequence[tuple[int, ...]], rule: Rule, *, below_ns: int | None = None) -> Trial | None:
        """The trial of this partition, None where it has no legal schedule under the rule or breaks the budget.

        With `below_ns` a named placement that takes longer is not looked at further and None as well.
        Buckets of a named placement that stand in the way of any legal schedule are split, as its planner would.
        """
        if isinstance(rule, Named):
            return self._evaluate_named(groups, rule, below_ns)
        buckets = tuple(sorted(map(self.bucket, groups), key=_placement_order))
        if any(b.earliest > b.latest_launch for b in buckets):
            return None
        try:
            return self._evaluate_ahead(buckets, rule)
        except Unschedulable:
            return None

    def _evaluate_named(self, groups: Sequence[tuple[int, ...]], rule: Named, below_ns: int | None) -> Trial | None:
        self.spent += 4 * (len(groups) + 16)
        try:
            placements = rule.place(self.request, tuple(groups))
            steps = arrange_events(self.request, placements)
        except Unschedulable:
            try:
                placements = legalize(self.request, tuple(groups), rule.place)
            except IllegalPlan:
                return None
            steps = arrange_events(self.request, placements)
        buckets = tuple([self.bucket(p.members) for p in placements])
        if rule is SCHEDULED:
            held = [
                replace(p, launch=b.earliest) if b.is_gather and p.launch < b.earliest <= p.wait else p
                for p, b in zip(placements, buckets, strict=True)
            ]
            if held != placements:
                placements = held
                steps = arrange_events(self.request, placements)
        run = self.run(buckets, steps)
        if below_ns is not None and run.step_ns > below_ns:
            return None
        launches, waits = [p.launch for p in placements], [p.wait for p in placements]
        if rule is SCHEDULED:
            settled = self._settle_waits(buckets, launches, waits, run)
            if settled != waits:
                waits = settled
                placements = [
                    p if p.wait == wait else replace(p, wait=wait) for p, wait in zip(placements, waits, strict=True)
                ]
                steps = arrange_events(self.request, placements)
                run = self.run(buckets, steps)
        peak_bytes = self.memory(buckets, steps).peak_bytes
        return self._finish(Trial(rule, buckets, launches, waits, run, peak_bytes, named=tuple(placements)))

    def _evaluate_ahead(self, buckets: tuple[Bucket, ...], rule: Ahead) -> Trial | None:
        launches, waits = self._place(buckets, rule.permille)
        steps = self._arrange(buckets, launches, waits)
        run = self.run(buckets, steps)
        settled = self._settle_waits(buckets, launches, waits, run)
        if settled != waits:
            waits = settled
            steps = self._arrange(buckets, launches, waits)
            run = self._rerun(run, buckets, steps)
        peak_bytes = self.memory(buckets, steps).peak_bytes
        early: frozenset[int] = frozenset()
        if self.budget_bytes is not None and peak_bytes > self.budget_bytes:
            self.spent += 2 * len(steps)
            found = place_within(self.cost, buckets, rule.permille, self.budget_bytes)
            if found is None:
                return None
            launches, waits, early = found
            steps = self._arrange(buckets, launches, waits, early)
            run = self.run(buckets, steps)
            peak_bytes = self.memory(buckets, steps).peak_bytes
        return self._finish(Trial(rule, buckets, launches, waits, run, peak_bytes, early))

    def lean(self, *, reduce_late: bool = False) -> Trial:
        """Every candidate alone, gathers at their own waits, reductions waited for at once: what needs little memory.

        Reductions stand where they are ready, or, with `reduce_late`, as late as they may: less where the activations
        that are alive fall faster than gradients gather.
        """
        buckets = tuple(sorted((self.bucket((m,)) for m in range(self._num_candidates)), key=_placement_order))
        launches = [b.latest_launch if b.is_gather or reduce_late else b.earliest for b in buckets]
        waits = [b.latest_wait if b.is_gather else launch for b, launch in zip(buckets, launches, strict=True)]
        number_of = {b.members[0]: index for index, b in enumerate(buckets)}
        for index in sorted(range(len(buckets)), key=lambda i: buckets[i].order):
            for source in buckets[index].feeds_on:
                launches[index] = max(launches[index], launches[number_of[source]])
                waits[number_of[source]] = min(waits[number_of[source]], launches[index])
                waits[index] = max(waits[index], launches[index])
        named: tuple[Placement, ...] = ()
        steps = None
        if all(map(Bucket.admits, buckets, launches, waits)):
            with suppress(Unschedulable):
                steps = self._arrange(buckets, launches, waits)
        if steps is None:
            named = tuple(place_original(self.request, [b.members for b in buckets]))
            steps = arrange_events(self.request, named)
        run = self.run(buckets, steps)
        peak_bytes = self.memory(buckets, steps).peak_bytes
        return Trial(Ahead(0), buckets, launches, waits, run, peak_bytes, named=named)

    def _finish(self, trial: Trial) -> Trial | None:
        if self.budget_bytes is not None and trial.peak_bytes > self.budget_bytes:
            return None
        # Placements of `bucketplan_core.schedule` keep the windows of the request, which are wider than ours.
        within = trial.named or all(map(Bucket.admits, trial.buckets, trial.launches, trial.waits))
        return trial if within else None

    def run(self, buckets: Sequence[Bucket], steps: Sequence[tuple[int, int, int]]) -> Run:
        """One run of the simulator, counted."""
        self.spent += len(steps) + 16
        return run_steps(self.cost, [b.cost for b in buckets], [b.stream for b in buckets], steps)

    def _rerun(self, run: Run, buckets: Sequence[Bucket], steps: Sequence[tuple[int, int, int]]) -> Run:
        """The run after `_settle_waits`: the same one, unless edges order steps or slowed-down times are rounded."""
        if self.has_edges or self.cost.hardware.slowdown_permille:
            return self.run(buckets, steps)
        self.spent += len(steps) + 16
        return run

    def memory(self, buckets: Sequence[Bucket], steps: Sequence[tuple[int, int, int]]) -> MemoryCurve:
        """Bytes held through these steps."""
        return memory_curve(self.cost, [b.buffers for b in buckets], steps)

    def fixed_key(self, op: int, index: int) -> int:
        """The key by which this launch or wait of a fixed collective is ordered in its gap."""
        fixed = self.request.fixed[index]
        key = fixed.launch_order if op == StepOp.FIXED_LAUNCH else fixed.wait_order
        return _FIRST if key is None else key

    def _sorted_fixed(self) -> list[tuple[int, int, int, int]]:
        events = []
        for index, fixed in enumerate(self.request.fixed):
            events.append((fixed.launch, fixed.launch_order, int(StepOp.FIXED_LAUNCH), index))
            if fixed.wait is not None and fixed.wait_order is not None:
                events.append((fixed.wait, fixed.wait_order, int(StepOp.FIXED_WAIT), index))
        return events

    def _arrange(
        self,
        buckets: Sequence[Bucket],
        launches: Sequence[int],
        waits: Sequence[int],
        early: frozenset[int] = frozenset(),
    ) -> list[tuple[int, int, int]]:
        """The steps that `arrange` makes of these gaps, sorted directly where no edge joins two collectives."""
        if self.has_edges:
            self.spent += 2 * len(buckets)
            return arrange_events(self.request, _placements(buckets, launches, waits, early))
        events = [(gap, _FIRST, 0, index) for index, gap in enumerate(launches)]
        if early:
            events += [
                (gap, _BEFORE_LAUNCHES if index in early else _LAST, 1, index) for index, gap in enumerate(waits)
            ]
        else:
            events += [(gap, _LAST, 1, index) for index, gap in enumerate(waits)]
        events += self._fixed_events
        events.sort()
        return [(gap, op, target) for gap, _, op, target in events]

    def _place(self, buckets: Sequence[Bucket], permille: int | None) -> tuple[list[int], list[int]]:
        """Launch and wait gaps; waits of reductions as late as they may be, those that feed others at their
        followers.
        """
        launches = [b.earliest for b in buckets]
        waits = [b.latest_wait for b in buckets]
        latest_start = [0] * len(buckets)
        by_stream: dict[int, list[int]] = {}
        for index, b in enumerate(buckets):
            by_stream.setdefault(b.stream, []).append(index)
        for indices in by_stream.values():
            self._issue_gathers(buckets, [i for i in indices if buckets[i].is_gather], permille, launches, latest_start)
        if any(b.feeds_on for b in buckets):
            self._follow_edges(buckets, launches, waits)
        for indices in by_stream.values():
            self._gathers_first(buckets, indices, launches, latest_start)
        return launches, waits

    def _issue_gathers(
        self,
        buckets: Sequence[Bucket],
        gathers: list[int],
        permille: int | None,
        launches: list[int],
        latest_start: list[int],
    ) -> None:
        """Backwards over one stream: each must be done by its wait and before the next can start."""
        prefix = self._prefix
        just = early = prefix[-1]
        for index in reversed(gathers):
            b = buckets[index]
            due = prefix[b.latest_wait]
            just = min(due, just) - b.cost.comm_ns
            latest_start[index] = just
            if permille is not None:
                early = min(due, early) - b.cost.comm_ns * permille // 1_000
                gap = bisect_right(prefix, early) - 1
                launches[index] = min(max(gap, b.earliest), b.latest_launch)

    def _gathers_first(
        self, buckets: Sequence[Bucket], indices: list[int], launches: list[int], latest_start: list[int]
    ) -> None:
        """Forwards over one stream: a reduction lets those gathers go ahead that could not be done in time behind
        it.
        """
        prefix = self._prefix
        gathers = [i for i in indices if buckets[i].is_gather]
        reductions = sorted((i for i in indices if not buckets[i].is_gather), key=lambda i: (launches[i], i))
        free = at = 0
        for index in reductions:
            gap = launches[index]
            now = prefix[gap]
            while at < len(gathers) and launches[gathers[at]] <= gap:
                free = max(free, prefix[launches[gathers[at]]]) + buckets[gathers[at]].cost.comm_ns
                at += 1
            while at < len(gathers):
                following = gathers[at]
                if buckets[following].earliest > gap:
                    break
                if latest_start[following] >= max(free, now) + buckets[index].cost.comm_ns:
                    break
                # Its own window may have asked for an earlier launch than those ahead of it have.
                launches[following] = min(launches[following], gap)
                free = max(free, now) + buckets[following].cost.comm_ns
                at += 1
            free = max(free, now) + buckets[index].cost.comm_ns

    def _follow_edges(self, buckets: Sequence[Bucket], launches: list[int], waits: list[int]) -> None:
        """Launch what feeds on other buckets where those should be done, and wait for these no later than that."""
        prefix = self._prefix
        bucket_of = {m: index for index, b in enumerate(buckets) for m in b.members}
        sources = [sorted({bucket_of[m] for m in b.feeds_on}) for b in buckets]
        done = [0] * len(buckets)
        free: dict[int, int] = {}
        for index in sorted(range(len(buckets)), key=lambda i: (launches[i], buckets[i].order)):
            b = buckets[index]
            if sources[index]:
                ready = max(done[s] for s in sources[index])
                gap = min(bisect_left(prefix, ready), len(prefix) - 1)
                gap = max(gap, launches[index], max(launches[s] for s in sources[index]))
                launches[index] = min(gap, b.latest_launch)
            start = max(free.get(b.stream, 0), prefix[launches[index]])
            done[index] = free[b.stream] = start + b.cost.comm_ns
        for index, b in enumerate(buckets):
            for source in sources[index]:
                waits[source] = min(waits[source], launches[index])
            if waits[index] < launches[index] or b.latest_launch < launches[index]:
                raise Unschedulable([index], "what it feeds on is done too late")

    def _settle_waits(
        self, buckets: Sequence[Bucket], launches: Sequence[int], waits: Sequence[int], run: Run
    ) -> list[int]:
        """Move waits of reductions to where they have been done for as long as they took; no time changes by that."""
        prefix = self._prefix
        arrivals = [arrived for _, arrived, _ in run.gaps]
        settled = list(waits)
        for index, b in enumerate(buckets):
            if b.is_gather or b.cost.wait_ns or run.waited[index][1]:
                continue
            finished = run.launched[index][2] + b.cost.comm_ns
            at = bisect_left(arrivals, finished)
            if at:
                gap, _, left = run.gaps[at - 1]
                end = run.gaps[at][0] if at < len(run.gaps) else len(prefix) - 1
                found = bisect_left(prefix, finished - left + prefix[gap], lo=min(gap + 1, end), hi=end)
            else:
                found = 0
            settled[index] = min(waits[index], max(found, launches[index]))
        return settled


def _placements(
    buckets: Sequence[Bucket], launches: Sequence[int], waits: Sequence[int], early: frozenset[int]
) -> list[Placement]:
    return [
        Placement(b.members, launch, wait, _FIRST, _BEFORE_LAUNCHES if index in early else _LAST)
        for index, (b, launch, wait) in enumerate(zip(buckets, launches, waits, strict=True))
    ]


def _placement_order(bucket: Bucket) -> tuple[int, int, int]:
    """Order of launches inside a gap: gathers by deadline, then reductions by readiness."""
    return (0, bucket.latest_wait, bucket.order) if bucket.is_gather else (1, bucket.earliest, bucket.order)
