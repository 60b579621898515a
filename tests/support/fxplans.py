"""Random decisions for a described graph: legal ones of every shape, and ones that break one rule."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from bucketplan_core.errors import IllegalPlan
from bucketplan_core.legality import check_decision, fitting_rewrite
from bucketplan_core.plan import Decision, Plan, StepOp
from bucketplan_core.request import Request
from bucketplan_core.schedule import (
    Placement,
    Unschedulable,
    arrange,
    decide,
    legalize,
    place_original,
    place_scheduled,
)

__all__ = ["BREAKERS", "broken_plan", "random_legal_plan"]

_PLANNER = "size/1"


def random_legal_plan(request: Request, seed: int) -> Plan:
    """Any grouping inside the lanes, any payload order, launches and waits anywhere in their windows.

    Inside a gap, launches and waits of all lanes come in random order as far as their dependencies allow.
    """
    rng = random.Random(seed)
    grouping = []
    for lane in request.lanes:
        members = list(lane.members)
        if rng.random() < 0.5:
            rng.shuffle(members)
        while members:
            size = rng.choice((1, 2, 3, len(members)))
            grouping.append(tuple(members[:size]))
            members = members[size:]
    placements = legalize(request, grouping, rng.choice((place_original, place_scheduled)))
    for index in rng.sample(range(len(placements)), len(placements)):
        moved = [*placements]
        moved[index] = _moved(rng, request, placements[index])
        try:
            arrange(request, moved)
        except Unschedulable:
            continue
        placements = moved
    decision = decide(request, _PLANNER, placements)
    buckets = tuple(
        replace(bucket, members=tuple(rng.sample(bucket.members, len(bucket.members)))) for bucket in decision.buckets
    )
    decision = replace(decision, buckets=buckets)
    check_decision(request, decision)
    return Plan(decision=decision)


def _moved(rng: random.Random, request: Request, placement: Placement) -> Placement:
    members = [request.candidates[member] for member in placement.members]
    first = max(candidate.earliest_launch for candidate in members)
    last = min(min(candidate.latest_launch, candidate.latest_wait) for candidate in members)
    launch = rng.choice((first, last, rng.randint(first, last)))
    latest = min(candidate.latest_wait for candidate in members)
    wait = rng.choice((launch, latest, rng.randint(launch, latest)))
    keys = rng.randint(-100, 100), rng.randint(-100, 100)
    return Placement(placement.members, launch, wait, min(keys), max(keys))


Breaker = Callable[[Request, Decision, random.Random], Decision | None]


def _other_graph(request: Request, decision: Decision, rng: random.Random) -> Decision:
    """A legal plan of a graph with the same collectives that nothing constrains."""
    end = request.num_segments
    free = [
        replace(
            candidate,
            earliest_launch=0,
            latest_launch=end,
            latest_wait=end,
            first_use=end,
            last_use=end,
            depends_on=(),
        )
        for candidate in request.candidates
    ]
    fixed = [replace(collective, depends_on=()) for collective in request.fixed]
    other = Request.build(
        num_segments=end,
        groups=request.groups,
        candidates=free,
        fixed=fixed,
        options=request.options,
        phase=request.phase,
    )
    return random_legal_plan(other, rng.randrange(2**32)).decision


def _member_twice(request: Request, decision: Decision, rng: random.Random) -> Decision | None:
    lanes = [bucket.lane for bucket in decision.buckets]
    shared = [index for index, lane in enumerate(lanes) if lanes.count(lane) > 1]
    if not shared:
        return None
    into = rng.choice(shared)
    from_ = rng.choice([index for index in shared if lanes[index] == lanes[into] and index != into])
    return _with_members(
        request, decision, into, (*decision.buckets[into].members, rng.choice(decision.buckets[from_].members))
    )


def _member_lost(request: Request, decision: Decision, rng: random.Random) -> Decision | None:
    fused = [index for index, bucket in enumerate(decision.buckets) if len(bucket.members) > 1]
    if not fused:
        return None
    index = rng.choice(fused)
    return _with_members(request, decision, index, decision.buckets[index].members[1:])


def _step_lost(request: Request, decision: Decision, rng: random.Random) -> Decision | None:
    own = [index for index, step in enumerate(decision.steps) if step.op <= StepOp.WAIT]
    if not own:
        return None
    at = rng.choice(own)
    return replace(decision, steps=decision.steps[:at] + decision.steps[at + 1 :])


def _lanes_mixed(request: Request, decision: Decision, rng: random.Random) -> Decision | None:
    """Take a member of another lane into a bucket where windows and dependencies allow it."""
    pairs = [
        (one, other)
        for one in range(len(decision.buckets))
        for other in range(len(decision.buckets))
        if decision.buckets[one].lane != decision.buckets[other].lane
    ]
    rng.shuffle(pairs)
    for one, other in pairs[:20]:
        first, second = decision.buckets[one], decision.buckets[other]
        members = [request.candidates[member] for member in (*first.members, *second.members)]
        if len({member.is_gather for member in members}) > 1 or len({member.kind for member in members}) > 1:
            continue
        earliest = max(member.earliest_launch for member in members)
        latest = min(min(member.latest_launch, member.latest_wait) for member in members)
        if earliest > latest:
            continue
        placements = [
            Placement(bucket.members, step_at, wait_at)
            for index, (bucket, (step_at, wait_at)) in enumerate(zip(decision.buckets, _gaps(decision), strict=True))
            if index not in (one, other)
        ]
        placements.append(Placement((*first.members, *second.members), earliest, earliest))
        try:
            return decide(request, _PLANNER, placements)
        except Unschedulable:
            continue
    return None


def _gaps(decision: Decision) -> list[tuple[int, int]]:
    launches = {step.target: step.gap for step in decision.steps if step.op is StepOp.LAUNCH}
    waits = {step.target: step.gap for step in decision.steps if step.op is StepOp.WAIT}
    return [(launches[index], waits[index]) for index in range(len(decision.buckets))]


def _wait_first(request: Request, decision: Decision, rng: random.Random) -> Decision | None:
    """Exchange a launch with its wait."""
    if not decision.buckets:
        return None
    index = rng.randrange(len(decision.buckets))
    steps = list(decision.steps)
    launch, wait = (
        next(at for at, step in enumerate(steps) if step.op is op and step.target == index)
        for op in (StepOp.LAUNCH, StepOp.WAIT)
    )
    steps[launch] = replace(steps[launch], op=StepOp.WAIT)
    steps[wait] = replace(steps[wait], op=StepOp.LAUNCH)
    return replace(decision, steps=tuple(steps))


def _fixed_moved(request: Request, decision: Decision, rng: random.Random) -> Decision | None:
    fixed = [at for at, step in enumerate(decision.steps) if step.op > StepOp.WAIT]
    if not fixed or not request.num_segments:
        return None
    at = rng.choice(fixed)
    step = decision.steps[at]
    gap = rng.choice([gap for gap in range(request.num_segments + 1) if gap != step.gap])
    return _with_step_at(decision, at, gap, rng)


def _launch_outside(request: Request, decision: Decision, rng: random.Random) -> Decision | None:
    return _moved_outside(request, decision, rng, StepOp.LAUNCH)


def _wait_outside(request: Request, decision: Decision, rng: random.Random) -> Decision | None:
    return _moved_outside(request, decision, rng, StepOp.WAIT)


def _moved_outside(request: Request, decision: Decision, rng: random.Random, op: StepOp) -> Decision | None:
    choices = []
    gaps = _gaps(decision)
    for at, step in enumerate(decision.steps):
        if step.op is not op:
            continue
        members = [request.candidates[member] for member in decision.buckets[step.target].members]
        if op is StepOp.LAUNCH:
            first = max(member.earliest_launch for member in members)
            last = min(member.latest_launch for member in members)
            outside = [gap for gap in range(gaps[step.target][1] + 1) if not first <= gap <= last]
        else:
            last = min(member.latest_wait for member in members)
            outside = list(range(last + 1, request.num_segments + 1))
        choices += [(at, gap) for gap in outside]
    return _with_step_at(decision, *rng.choice(choices), rng) if choices else None


def _dependency_broken(request: Request, decision: Decision, rng: random.Random) -> Decision | None:
    """Put a launch before the wait that it needs, inside every window."""
    bucket_of = {member: index for index, bucket in enumerate(decision.buckets) for member in bucket.members}
    waited = {step.target: at for at, step in enumerate(decision.steps) if step.op is StepOp.WAIT}
    fixed_waited = {step.target: at for at, step in enumerate(decision.steps) if step.op is StepOp.FIXED_WAIT}
    choices = []
    for at, step in enumerate(decision.steps):
        if step.op is not StepOp.LAUNCH:
            continue
        members = [request.candidates[member] for member in decision.buckets[step.target].members]
        first = max(member.earliest_launch for member in members)
        for edge in {edge for member in members for edge in member.depends_on}:
            fixed = edge - len(request.candidates)
            wait_at = waited[bucket_of[edge]] if fixed < 0 else fixed_waited[fixed]
            choices += [(at, to) for to in range(wait_at + 1) if decision.steps[to].gap >= first]
    if not choices:
        return None
    at, to = rng.choice(choices)
    steps = list(decision.steps)
    moved = steps.pop(at)
    steps.insert(to, replace(moved, gap=steps[to].gap))
    return replace(decision, steps=tuple(steps))


def _with_step_at(decision: Decision, at: int, gap: int, rng: random.Random) -> Decision:
    """The step `at` moved to `gap`, anywhere among the steps there."""
    steps = list(decision.steps)
    moved = replace(steps.pop(at), gap=gap)
    first = sum(step.gap < gap for step in steps)
    last = sum(step.gap <= gap for step in steps)
    steps.insert(rng.randint(first, last), moved)
    return replace(decision, steps=tuple(steps))


def _with_members(request: Request, decision: Decision, index: int, members: Sequence[int]) -> Decision:
    bucket = decision.buckets[index]
    rewrite = fitting_rewrite(request.lanes[bucket.lane].kind, len(members))
    changed = replace(bucket, members=tuple(members), rewrite=rewrite)
    return replace(decision, buckets=(*decision.buckets[:index], changed, *decision.buckets[index + 1 :]))


BREAKERS: dict[str, tuple[Breaker, ...]] = {
    "signature": (_other_graph,),
    "complete": (_member_twice, _member_lost, _step_lost),
    "lane": (_lanes_mixed,),
    "launch-before-wait": (_wait_first,),
    "fixed": (_fixed_moved,),
    "launch-window": (_launch_outside,),
    "wait-window": (_wait_outside,),
    "dependency": (_dependency_broken,),
}
"""For each rule of legality, ways to break it."""


def broken_plan(request: Request, rule: str, seed: int) -> Plan | None:
    """A plan whose first broken rule is `rule`, None where this try gave none."""
    rng = random.Random(seed)
    legal = random_legal_plan(request, seed).decision
    broken = rng.choice(BREAKERS[rule])(request, legal, rng)
    if broken is None:
        return None
    try:
        check_decision(request, broken)
    except IllegalPlan as refused:
        return Plan(decision=broken) if refused.rule == rule else None
    return None
