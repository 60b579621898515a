"""Legal decisions of every shape, ways to break each rule, and an oracle that shares no code with the checker."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from bucketplan_core.legality import fitting_rewrite
from bucketplan_core.plan import Bucket, Decision, Step, StepOp
from bucketplan_core.request import Request
from bucketplan_core.schedule import Placement, Unschedulable, arrange, decide


def random_legal_decision(rng: random.Random, request: Request) -> Decision:
    """Random buckets at random points of their windows, as far as an order of them exists; else ever fewer members."""
    fuse = rng.choice((0.0, 0.5, 0.9))
    for _ in range(6):
        placements = [_random_placement(rng, request, bucket) for bucket in _random_buckets(rng, request, fuse)]
        try:
            arrange(request, placements)
        except Unschedulable:
            fuse /= 2
            continue
        return decide(request, "manual/1", placements)
    alone = [
        Placement((index,), c.launch, c.wait, c.launch_order, c.wait_order)
        for index, c in enumerate(request.candidates)
    ]
    return decide(request, "manual/1", alone)


def _random_buckets(rng: random.Random, request: Request, fuse: float) -> list[tuple[int, ...]]:
    """Not contiguous: legality knows no lane order."""
    buckets: list[list[int]] = []
    for lane in request.lanes:
        of_lane: list[list[int]] = []
        for member in rng.sample(lane.members, len(lane.members)):
            fitting = [bucket for bucket in of_lane if _window(request, [*bucket, member]) is not None]
            if fitting and rng.random() < fuse:
                rng.choice(fitting).append(member)
            else:
                of_lane.append([member])
        buckets += of_lane
    rng.shuffle(buckets)
    return [tuple(bucket) for bucket in buckets]


def _window(request: Request, members: Sequence[int]) -> tuple[int, int, int] | None:
    candidates = [request.candidates[member] for member in members]
    first = max(c.earliest_launch for c in candidates)
    last_wait = min(c.latest_wait for c in candidates)
    last = min(min(c.latest_launch for c in candidates), last_wait)
    return (first, last, last_wait) if first <= last else None


def _random_placement(rng: random.Random, request: Request, members: tuple[int, ...]) -> Placement:
    window = _window(request, members)
    assert window is not None
    first, last, last_wait = window
    if len(members) == 1 and rng.random() < 0.5:
        candidate = request.candidates[members[0]]
        return Placement(members, candidate.launch, candidate.wait, candidate.launch_order, candidate.wait_order)
    launch = rng.randint(first, last)
    return Placement(members, launch, rng.randint(launch, last_wait), rng.randrange(100), rng.randrange(100))


def is_legal(request: Request, decision: Decision) -> bool:
    """The definition of DESIGN's rules, read one by one off the list of steps, slowly."""
    members = [member for bucket in decision.buckets for member in bucket.members]
    if decision.signature != request.signature or sorted(members) != list(range(len(request.candidates))):
        return False
    if len({bucket.id for bucket in decision.buckets}) < len(decision.buckets):
        return False
    for bucket in decision.buckets:
        if not bucket.members or not 0 <= bucket.lane < len(request.lanes):
            return False
        lane = request.lanes[bucket.lane]
        if any(member not in lane.members for member in bucket.members):
            return False
        fused = {"fsdp_reduce_scatter": "scatter", "dp_all_reduce": "reduce"}.get(lane.kind, "gather")
        if bucket.rewrite != ("none" if len(bucket.members) == 1 else fused):
            return False
    expected = [(op, index) for index in range(len(decision.buckets)) for op in (StepOp.LAUNCH, StepOp.WAIT)]
    original = []
    for index, fixed in enumerate(request.fixed):
        original.append((fixed.launch_order, Step(fixed.launch, StepOp.FIXED_LAUNCH, index)))
        if fixed.wait is not None and fixed.wait_order is not None:
            original.append((fixed.wait_order, Step(fixed.wait, StepOp.FIXED_WAIT, index)))
    expected += [(step.op, step.target) for _, step in original]
    if sorted((step.op, step.target) for step in decision.steps) != sorted(expected):
        return False
    gaps = [step.gap for step in decision.steps]
    if gaps != sorted(gaps) or any(not 0 <= gap <= request.num_segments for gap in gaps):
        return False
    if [step for step in decision.steps if step.op > StepOp.WAIT] != [step for _, step in sorted(original)]:
        return False
    at = {(step.op, step.target): number for number, step in enumerate(decision.steps)}
    bucket_of = {member: index for index, bucket in enumerate(decision.buckets) for member in bucket.members}

    def launched(collective: int) -> int:
        first_fixed = len(request.candidates)
        if collective < first_fixed:
            return at[(StepOp.LAUNCH, bucket_of[collective])]
        return at[(StepOp.FIXED_LAUNCH, collective - first_fixed)]

    def waited(collective: int) -> int:
        first_fixed = len(request.candidates)
        if collective < first_fixed:
            return at[(StepOp.WAIT, bucket_of[collective])]
        return at[(StepOp.FIXED_WAIT, collective - first_fixed)]

    for index, candidate in enumerate(request.candidates):
        launch, wait = launched(index), waited(index)
        if launch >= wait:
            return False
        if not candidate.earliest_launch <= decision.steps[launch].gap <= candidate.latest_launch:
            return False
        if decision.steps[wait].gap > candidate.latest_wait:
            return False
    return all(
        waited(edge) < launched(index)
        for index, collective in enumerate((*request.candidates, *request.fixed))
        for edge in collective.depends_on
    )


Break = Callable[[random.Random, Request, Decision], Decision | None]
"""A decision that breaks one rule and none that is checked before it, or None where the decision offers no way."""


def _other_signature(rng: random.Random, request: Request, decision: Decision) -> Decision | None:
    at = rng.randrange(64)
    digit = rng.choice([d for d in "0123456789abcdef" if d != decision.signature[at]])
    return replace(decision, signature=decision.signature[:at] + digit + decision.signature[at + 1 :])


def _drop_member(rng: random.Random, request: Request, decision: Decision) -> Decision | None:
    index = _any(rng, [i for i, bucket in enumerate(decision.buckets) if len(bucket.members) > 1])
    if index is None:
        return None
    members = list(decision.buckets[index].members)
    del members[rng.randrange(len(members))]
    lane = request.lanes[decision.buckets[index].lane]
    return _with_bucket(decision, index, members=tuple(members), rewrite=fitting_rewrite(lane.kind, len(members)))


def _drop_bucket(rng: random.Random, request: Request, decision: Decision) -> Decision | None:
    if not decision.buckets:
        return None
    gone = rng.randrange(len(decision.buckets))
    steps = [
        replace(step, target=step.target - 1) if step.op <= StepOp.WAIT and step.target > gone else step
        for step in decision.steps
        if not (step.op <= StepOp.WAIT and step.target == gone)
    ]
    buckets = decision.buckets[:gone] + decision.buckets[gone + 1 :]
    return replace(decision, buckets=buckets, steps=tuple(steps))


def _repeat_member(rng: random.Random, request: Request, decision: Decision) -> Decision | None:
    lane = _any(rng, [bucket.lane for bucket in decision.buckets])
    if lane is None:
        return None
    of_lane = [i for i, bucket in enumerate(decision.buckets) if bucket.lane == lane]
    into, source = rng.choice(of_lane), rng.choice(of_lane)
    members = (*decision.buckets[into].members, rng.choice(decision.buckets[source].members))
    rewrite = fitting_rewrite(request.lanes[lane].kind, len(members))
    return _with_bucket(decision, into, members=members, rewrite=rewrite)


def _unknown_member(rng: random.Random, request: Request, decision: Decision) -> Decision | None:
    index = _any(rng, range(len(decision.buckets)))
    if index is None:
        return None
    unknown = len(request.candidates) + rng.randrange(3)
    return _with_bucket(decision, index, members=(unknown, *decision.buckets[index].members[1:]))


def _empty_bucket(rng: random.Random, request: Request, decision: Decision) -> Decision | None:
    index = _any(rng, range(len(decision.buckets)))
    return None if index is None else _with_bucket(decision, index, members=())


def _same_ids(rng: random.Random, request: Request, decision: Decision) -> Decision | None:
    if len(decision.buckets) < 2:
        return None
    a, b = rng.sample(range(len(decision.buckets)), 2)
    return _with_bucket(decision, a, id=decision.buckets[b].id)


def _drop_step(rng: random.Random, request: Request, decision: Decision) -> Decision | None:
    at = _any(rng, [i for i, step in enumerate(decision.steps) if step.op <= StepOp.WAIT])
    return None if at is None else replace(decision, steps=decision.steps[:at] + decision.steps[at + 1 :])


def _repeat_step(rng: random.Random, request: Request, decision: Decision) -> Decision | None:
    at = _any(rng, range(len(decision.steps)))
    if at is None:
        return None
    last_gap = decision.steps[-1].gap
    return replace(decision, steps=(*decision.steps, replace(decision.steps[at], gap=last_gap)))


def _unknown_target(rng: random.Random, request: Request, decision: Decision) -> Decision | None:
    at = _any(rng, range(len(decision.steps)))
    if at is None:
        return None
    step = decision.steps[at]
    number = len(decision.buckets) if step.op <= StepOp.WAIT else len(request.fixed)
    return _with_step(decision, at, target=rng.choice((number, number + 5, -1)))


def _gap_outside(rng: random.Random, request: Request, decision: Decision) -> Decision | None:
    if not decision.steps:
        return None
    if rng.random() < 0.5:
        return _with_step(decision, len(decision.steps) - 1, gap=request.num_segments + 1)
    return _with_step(decision, 0, gap=-1)


def _gaps_descend(rng: random.Random, request: Request, decision: Decision) -> Decision | None:
    at = _any(rng, [i for i, step in enumerate(decision.steps) if i and decision.steps[i - 1].gap > 0])
    return None if at is None else _with_step(decision, at, gap=decision.steps[at - 1].gap - 1)


def _trade_members(rng: random.Random, request: Request, decision: Decision) -> Decision | None:
    a = _any(rng, range(len(decision.buckets)))
    if a is None:
        return None
    b = _any(rng, [i for i, bucket in enumerate(decision.buckets) if bucket.lane != decision.buckets[a].lane])
    if b is None:
        return None
    one, other = decision.buckets[a].members, decision.buckets[b].members
    traded = _with_bucket(decision, a, members=(other[0], *one[1:]))
    return _with_bucket(traded, b, members=(one[0], *other[1:]))


def _other_lane(rng: random.Random, request: Request, decision: Decision) -> Decision | None:
    index = _any(rng, range(len(decision.buckets)))
    if index is None:
        return None
    lanes = [lane for lane in range(-1, len(request.lanes) + 1) if lane != decision.buckets[index].lane]
    return _with_bucket(decision, index, lane=rng.choice(lanes))


def _other_rewrite(rng: random.Random, request: Request, decision: Decision) -> Decision | None:
    index = _any(rng, range(len(decision.buckets)))
    if index is None:
        return None
    others = [r for r in ("gather", "none", "reduce", "scatter") if r != decision.buckets[index].rewrite]
    return _with_bucket(decision, index, rewrite=rng.choice(others))


def _wait_first(rng: random.Random, request: Request, decision: Decision) -> Decision | None:
    index = _any(rng, range(len(decision.buckets)))
    if index is None:
        return None
    launch = _at(decision, StepOp.LAUNCH, index)
    return _moved(decision, _at(decision, StepOp.WAIT, index), launch, decision.steps[launch].gap)


def _move_fixed(rng: random.Random, request: Request, decision: Decision) -> Decision | None:
    at = _any(rng, [i for i, step in enumerate(decision.steps) if step.op > StepOp.WAIT])
    if at is None:
        return None
    gap = _any(rng, [g for g in range(request.num_segments + 1) if g != decision.steps[at].gap])
    if gap is None:
        return None
    rest = decision.steps[:at] + decision.steps[at + 1 :]
    return _moved(decision, at, sum(step.gap < gap for step in rest), gap)


def _swap_fixed(rng: random.Random, request: Request, decision: Decision) -> Decision | None:
    steps = [i for i, step in enumerate(decision.steps) if step.op > StepOp.WAIT]
    if len(steps) < 2:
        return None
    a, b = sorted(rng.sample(steps, 2))
    swapped = list(decision.steps)
    swapped[a] = replace(decision.steps[b], gap=decision.steps[a].gap)
    swapped[b] = replace(decision.steps[a], gap=decision.steps[b].gap)
    return replace(decision, steps=tuple(swapped))


def _drop_fixed(rng: random.Random, request: Request, decision: Decision) -> Decision | None:
    at = _any(rng, [i for i, step in enumerate(decision.steps) if step.op > StepOp.WAIT])
    return None if at is None else replace(decision, steps=decision.steps[:at] + decision.steps[at + 1 :])


def _launch_outside(rng: random.Random, request: Request, decision: Decision) -> Decision | None:
    choices = []
    for index, bucket in enumerate(decision.buckets):
        first = max(request.candidates[m].earliest_launch for m in bucket.members)
        last = min(request.candidates[m].latest_launch for m in bucket.members)
        choices += [(index, gap) for gap in range(request.num_segments + 1) if not first <= gap <= last]
    choice = _any(rng, choices)
    if choice is None:
        return None
    index, gap = choice
    launch, wait = _at(decision, StepOp.LAUNCH, index), _at(decision, StepOp.WAIT, index)
    if gap > decision.steps[wait].gap:
        decision = _to_gap(decision, wait, gap)
    return _to_gap(decision, launch, gap, first=True)


def _wait_outside(rng: random.Random, request: Request, decision: Decision) -> Decision | None:
    choices = []
    for index, bucket in enumerate(decision.buckets):
        last = min(request.candidates[m].latest_wait for m in bucket.members)
        choices += [(index, gap) for gap in range(last + 1, request.num_segments + 1)]
    choice = _any(rng, choices)
    return None if choice is None else _to_gap(decision, _at(decision, StepOp.WAIT, choice[0]), choice[1])


def _need_unmet(rng: random.Random, request: Request, decision: Decision) -> Decision | None:
    """Launch something before what feeds it was waited for, inside all windows."""
    bucket_of = {member: index for index, bucket in enumerate(decision.buckets) for member in bucket.members}
    num_candidates = len(request.candidates)
    choices = []
    for index, candidate in enumerate(request.candidates):
        bucket = decision.buckets[bucket_of[index]]
        launch = _at(decision, StepOp.LAUNCH, bucket_of[index])
        first = max(request.candidates[m].earliest_launch for m in bucket.members)
        for edge in candidate.depends_on:
            wait = (
                _at(decision, StepOp.WAIT, bucket_of[edge])
                if edge < num_candidates
                else _at(decision, StepOp.FIXED_WAIT, edge - num_candidates)
            )
            if decision.steps[wait].gap >= first:
                choices.append((launch, wait))
    choice = _any(rng, choices)
    return None if choice is None else _moved(decision, choice[0], choice[1], decision.steps[choice[1]].gap)


def _feeds_fixed_late(rng: random.Random, request: Request, decision: Decision) -> Decision | None:
    """Wait for what feeds a fixed collective after that was launched, inside all windows."""
    bucket_of = {member: index for index, bucket in enumerate(decision.buckets) for member in bucket.members}
    choices = []
    for index, fixed in enumerate(request.fixed):
        launch = _at(decision, StepOp.FIXED_LAUNCH, index)
        for edge in fixed.depends_on:
            if edge < len(request.candidates):
                members = decision.buckets[bucket_of[edge]].members
                if min(request.candidates[m].latest_wait for m in members) >= fixed.launch:
                    choices.append((_at(decision, StepOp.WAIT, bucket_of[edge]), launch))
    choice = _any(rng, choices)
    return None if choice is None else _moved(decision, choice[0], choice[1], decision.steps[choice[1]].gap)


BREAKS: dict[str, tuple[Break, ...]] = {
    "signature": (_other_signature,),
    "complete": (
        _drop_member,
        _drop_bucket,
        _repeat_member,
        _unknown_member,
        _empty_bucket,
        _same_ids,
        _drop_step,
        _repeat_step,
        _unknown_target,
        _gap_outside,
        _gaps_descend,
    ),
    "lane": (_trade_members, _other_lane, _other_rewrite),
    "launch-before-wait": (_wait_first,),
    "fixed": (_move_fixed, _swap_fixed, _drop_fixed),
    "launch-window": (_launch_outside,),
    "wait-window": (_wait_outside,),
    "dependency": (_need_unmet, _feeds_fixed_late),
}


def _any(rng: random.Random, choices: Sequence) -> object:
    return rng.choice(choices) if choices else None


def _at(decision: Decision, op: StepOp, target: int) -> int:
    return next(i for i, step in enumerate(decision.steps) if step.op is op and step.target == target)


def _moved(decision: Decision, source: int, to: int, gap: int) -> Decision:
    """The step at `source` taken out and put in at position `to` of the rest, at `gap`."""
    steps = list(decision.steps)
    step = steps.pop(source)
    steps.insert(to, replace(step, gap=gap))
    return replace(decision, steps=tuple(steps))


def _to_gap(decision: Decision, source: int, gap: int, *, first: bool = False) -> Decision:
    """The step at `source` put first or last in `gap`."""
    rest = decision.steps[:source] + decision.steps[source + 1 :]
    return _moved(decision, source, sum(s.gap < gap if first else s.gap <= gap for s in rest), gap)


def _with_bucket(decision: Decision, index: int, **fields: object) -> Decision:
    changed: Bucket = replace(decision.buckets[index], **fields)  # type: ignore[arg-type]  # callers name fields of the class
    return replace(decision, buckets=(*decision.buckets[:index], changed, *decision.buckets[index + 1 :]))


def _with_step(decision: Decision, at: int, **fields: object) -> Decision:
    changed: Step = replace(decision.steps[at], **fields)  # type: ignore[arg-type]  # callers name fields of the class
    return replace(decision, steps=(*decision.steps[:at], changed, *decision.steps[at + 1 :]))
