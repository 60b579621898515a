"""From buckets to a schedule: where each launch and wait goes, and one total order of all of them.

`place_original` and `place_scheduled` choose gaps, `arrange` orders the events inside each gap, `legalize` splits the buckets
that cannot be scheduled until the rest can. Every planner goes through here, so that a rule of order exists once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bucketplan_core.errors import IllegalPlan
from bucketplan_core.legality import fitting_rewrite, fixed_schedule
from bucketplan_core.plan import Bucket, Decision, Step, StepOp
from bucketplan_core.request import Request

__all__ = [
    "Placement",
    "Unschedulable",
    "arrange",
    "decide",
    "legalize",
    "place_original",
    "place_scheduled",
]

_FIRST = -1
"""Key of an event that goes as early in its gap as what it depends on allows."""
_LAST = 2**62
"""Key of an event that goes after everything else in its gap."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Gaps of one bucket's launch and wait; inside a gap, events run by key as far as their dependencies allow.

    `after` names another bucket (by position) whose wait comes before this launch even in the same gap.
    """

    members: tuple[int, ...]
    launch: int
    wait: int
    launch_key: int = _FIRST
    wait_key: int = _LAST
    after: int | None = None


class Unschedulable(Exception):
    """These buckets (positions in the sequence given) cannot all be scheduled as they are."""

    def __init__(self, buckets: Iterable[int], reason: str) -> None:
        self.buckets = frozenset(buckets)
        self.reason = reason
        super().__init__(reason)


Members = Sequence[tuple[int, ...]]
Place = Callable[[Request, Members], list[Placement]]


def decide(
    request: Request,
    planner: str,
    placements: Sequence[Placement],
    *,
    profile: str | None = None,
) -> Decision:
    """The decision of these placements; payload in registration order, buckets in launch order."""
    steps = arrange(request, placements)
    lane_of = {
        member: index
        for index, lane in enumerate(request.lanes)
        for member in lane.members
    }
    order = [step.target for step in steps if step.op is StepOp.LAUNCH]
    renumbered = {old: new for new, old in enumerate(order)}
    count_in_lane: dict[int, int] = {}
    buckets = []
    for old in order:
        members = tuple(sorted(placements[old].members, key=request.payload_position))
        lane = lane_of[members[0]]
        number = count_in_lane.get(lane, 0)
        count_in_lane[lane] = number + 1
        buckets.append(
            Bucket(
                id=f"{request.lanes[lane].group}/{lane}/{number}",
                lane=lane,
                members=members,
                rewrite=fitting_rewrite(request.lanes[lane].kind, len(members)),
            )
        )
    return Decision(
        signature=request.signature,
        planner=planner,
        profile=profile,
        buckets=tuple(buckets),
        steps=tuple(
            Step(step.gap, step.op, renumbered[step.target])
            if step.op in (StepOp.LAUNCH, StepOp.WAIT)
            else step
            for step in steps
        ),
    )


def legalize(request: Request, buckets: Members, place: Place) -> list[Placement]:
    """Place `buckets`, halving those that stand in the way of any legal schedule, until all can be placed.

    Always ends: with every candidate alone the schedule is the original one, which is legal.
    """
    current = [tuple(bucket) for bucket in buckets]
    while True:
        try:
            placements = place(request, current)
            arrange(request, placements)
            return placements
        except Unschedulable as conflict:
            blamed = {index for index in conflict.buckets if len(current[index]) > 1}
            if not blamed:
                blamed = _fused_ancestors(request, current, conflict.buckets)
            if not blamed:
                raise IllegalPlan(
                    "dependency",
                    f"the graph itself cannot be scheduled: {conflict.reason}",
                ) from None
            current = [
                half
                for index, bucket in enumerate(current)
                for half in _halves(bucket, split=index in blamed)
            ]


def _halves(bucket: tuple[int, ...], *, split: bool) -> list[tuple[int, ...]]:
    middle = (len(bucket) + 1) // 2
    return [bucket[:middle], bucket[middle:]] if split else [bucket]


def _fused_ancestors(
    request: Request, buckets: Members, start: Iterable[int]
) -> set[int]:
    bucket_of = _bucket_of(buckets)
    seen = set(start)
    stack = list(seen)
    while stack:
        for dependency in _bucket_dependencies(
            request, buckets[stack.pop()], bucket_of
        ):
            if dependency not in seen:
                seen.add(dependency)
                stack.append(dependency)
    found = {index for index in seen if len(buckets[index]) > 1}
    return found or {index for index, bucket in enumerate(buckets) if len(bucket) > 1}


def _bucket_of(buckets: Members) -> dict[int, int]:
    return {member: index for index, bucket in enumerate(buckets) for member in bucket}


def _bucket_dependencies(
    request: Request, members: tuple[int, ...], bucket_of: dict[int, int]
) -> set[int]:
    num_candidates = len(request.candidates)
    return {
        bucket_of[edge]
        for member in members
        for edge in request.candidates[member].depends_on
        if edge < num_candidates
    }


def _fixed_ready(request: Request, members: tuple[int, ...]) -> int:
    """The last gap at which a fixed collective that feeds `members` is waited for."""
    num_candidates = len(request.candidates)
    waits = [
        request.fixed[edge - num_candidates].wait
        for member in members
        for edge in request.candidates[member].depends_on
        if edge >= num_candidates
    ]
    return max((wait for wait in waits if wait is not None), default=0)


def _dependency_order(request: Request, buckets: Members) -> list[int]:
    """Buckets in an order in which each comes after those that feed it; ties by first launch."""
    bucket_of = _bucket_of(buckets)
    waiting: dict[int, int] = {}
    followers: dict[int, list[int]] = {}
    for index, members in enumerate(buckets):
        dependencies = _bucket_dependencies(request, members, bucket_of)
        if index in dependencies:
            raise Unschedulable([index], "a bucket depends on itself")
        waiting[index] = len(dependencies)
        for dependency in dependencies:
            followers.setdefault(dependency, []).append(index)
    first_launch = [
        min(request.candidates[member].launch_order for member in members)
        for members in buckets
    ]
    ready = [
        (first_launch[index], index) for index, count in waiting.items() if not count
    ]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, index = heapq.heappop(ready)
        order.append(index)
        for follower in followers.get(index, ()):
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, (first_launch[follower], follower))
    if len(order) < len(buckets):
        stuck = set(range(len(buckets))) - set(order)
        raise Unschedulable(_on_cycles(stuck, followers), "buckets wait for each other")
    return order


def _on_cycles(stuck: set[int], followers: dict[int, list[int]]) -> set[int]:
    """Drop from `stuck` what only hangs behind a cycle, so that it is not split for nothing."""
    remaining = set(stuck)
    changed = True
    while changed:
        ends = {
            index
            for index in remaining
            if not any(f in remaining for f in followers.get(index, ()))
        }
        changed = bool(ends)
        remaining -= ends
    return remaining or stuck


def place_original(request: Request, buckets: Members) -> list[Placement]:
    """Launch at the first member's launch if all inputs are ready there, else right after the latest; wait right behind.

    Lone candidates stay where they are, unless what feeds them has moved.
    """
    bucket_of = _bucket_of(buckets)
    placed: dict[int, Placement] = {}
    late: set[int] = set()
    for index in _dependency_order(request, buckets):
        members = buckets[index]
        candidates = [request.candidates[member] for member in members]
        first = min(candidates, key=lambda candidate: candidate.launch_order)
        ready = max(
            max(candidate.earliest_launch for candidate in candidates),
            _fixed_ready(request, members),
            *(
                placed[dependency].wait
                for dependency in _bucket_dependencies(request, members, bucket_of)
            ),
        )
        launch = max(first.launch, ready)
        launch_key = first.launch_order if launch == first.launch else _FIRST
        if len(members) == 1:
            wait = max(first.wait, launch)
            wait_key = first.wait_order if wait == first.wait else _FIRST
        else:
            wait, wait_key = launch, launch_key
        placed[index] = Placement(tuple(members), launch, wait, launch_key, wait_key)
        if launch > min(c.latest_launch for c in candidates) or wait > min(
            c.latest_wait for c in candidates
        ):
            late.add(index)
    if late:
        raise Unschedulable(late, "launch or wait would come after a member's window")
    return [placed[index] for index in range(len(buckets))]


def place_scheduled(request: Request, buckets: Members) -> list[Placement]:
    """Wait as late as legal; gathers launch `options.prefetch` buckets ahead, reductions as soon as ready.

    A gather goes right after the wait of the bucket `prefetch` places before it in lane order, not before its own window;
    with prefetch 0 it launches at its own wait. A reduction that feeds others waits at the launch of the next bucket of
    its lane, so that what hangs on it is not held up to the end of the graph.
    """
    bucket_of = _bucket_of(buckets)
    lane_of = {
        member: number
        for number, lane in enumerate(request.lanes)
        for member in lane.members
    }
    by_lane: dict[int, list[int]] = {}
    for index, members in enumerate(buckets):
        by_lane.setdefault(lane_of[members[0]], []).append(index)
    ahead_of: dict[int, int] = {}
    next_of: dict[int, int] = {}
    for lane in by_lane.values():
        lane.sort(
            key=lambda index: min(
                request.lane_position(member) for member in buckets[index]
            )
        )
        next_of |= dict(pairwise(lane))
        if request.options.prefetch:
            ahead_of |= dict(zip(lane[request.options.prefetch :], lane, strict=False))
    feeds = {
        d
        for members in buckets
        for d in _bucket_dependencies(request, members, bucket_of)
    }
    latest_wait = [
        min(request.candidates[m].latest_wait for m in members) for members in buckets
    ]
    latest_launch = [
        min(request.candidates[m].latest_launch for m in members) for members in buckets
    ]
    earliest = [
        max(request.candidates[m].earliest_launch for m in members)
        for members in buckets
    ]
    placed: dict[int, Placement] = {}
    late: set[int] = set()
    for index in _dependency_order(request, buckets):
        members = tuple(buckets[index])
        fed_at = [
            placed[d].wait for d in _bucket_dependencies(request, members, bucket_of)
        ]
        launch = max(earliest[index], _fixed_ready(request, members), *fed_at, 0)
        wait = latest_wait[index]
        after = None
        if request.candidates[members[0]].is_gather:
            limit = min(latest_launch[index], wait)
            before = ahead_of.get(index)
            if before is not None:
                launch, after = max(launch, min(latest_wait[before], limit)), before
                if latest_wait[before] > limit:
                    after = None
            elif not request.options.prefetch:
                launch = max(launch, limit)
        elif index in feeds:
            follower = next_of.get(index)
            wait = min(
                wait,
                max(launch, earliest[follower] if follower is not None else launch),
            )
        placed[index] = Placement(members, launch, wait, _FIRST, _LAST, after)
        if launch > latest_launch[index] or wait < launch:
            late.add(index)
    if late:
        raise Unschedulable(late, "launch or wait would come after a member's window")
    return [placed[index] for index in range(len(buckets))]


def arrange(request: Request, placements: Sequence[Placement]) -> tuple[Step, ...]:
    """One total order of all launches and waits, fixed collectives included.

    Inside a gap an event comes after what it depends on; among those free to go the least key comes first, at equal keys
    launches before waits, then by position. Raises `Unschedulable` naming the buckets that cannot be ordered.
    """
    num_candidates = len(request.candidates)
    bucket_of = _bucket_of([placement.members for placement in placements])
    events: list[tuple[int, int, StepOp, int]] = []  # gap, key, op, target
    for index, placement in enumerate(placements):
        events.append((placement.launch, placement.launch_key, StepOp.LAUNCH, index))
        events.append((placement.wait, placement.wait_key, StepOp.WAIT, index))
    at: dict[tuple[StepOp, int], int] = {}
    fixed_events = fixed_schedule(request)
    for gap, op, index in fixed_events:
        fixed = request.fixed[index]
        key = (
            fixed.wait_order
            if op is StepOp.FIXED_WAIT and fixed.wait_order is not None
            else fixed.launch_order
        )
        events.append((gap, key, op, index))
    for number, (_, _, op, target) in enumerate(events):
        at[(op, target)] = number

    followers: list[list[int]] = [[] for _ in events]
    waiting = [0] * len(events)
    conflicts: set[int] = set()

    def owner(number: int) -> list[int]:
        _, _, op, target = events[number]
        return [target] if op in (StepOp.LAUNCH, StepOp.WAIT) else []

    def edge(before: int, behind: int) -> None:
        if events[before][0] > events[behind][0]:
            conflicts.update(owner(before), owner(behind))
        elif events[before][0] == events[behind][0]:
            followers[before].append(behind)
            waiting[behind] += 1

    def wait_event(collective: int) -> int:
        if collective < num_candidates:
            return at[(StepOp.WAIT, bucket_of[collective])]
        return at[(StepOp.FIXED_WAIT, collective - num_candidates)]

    for index, placement in enumerate(placements):
        launch = at[(StepOp.LAUNCH, index)]
        edge(launch, at[(StepOp.WAIT, index)])
        for member in placement.members:
            for dependency in request.candidates[member].depends_on:
                edge(wait_event(dependency), launch)
        if placement.after is not None:
            edge(at[(StepOp.WAIT, placement.after)], launch)
    for index, fixed in enumerate(request.fixed):
        for dependency in fixed.depends_on:
            edge(wait_event(dependency), at[(StepOp.FIXED_LAUNCH, index)])
    for (_, op, index), (_, next_op, next_index) in pairwise(fixed_events):
        edge(at[(op, index)], at[(next_op, next_index)])
    if conflicts:
        raise Unschedulable(
            conflicts, "a result would be waited for after a launch that needs it"
        )

    by_gap: dict[int, list[int]] = {}
    for number, event in enumerate(events):
        by_gap.setdefault(event[0], []).append(number)
    steps: list[Step] = []
    stuck: set[int] = set()
    for gap in sorted(by_gap):
        ready = [
            (*events[number][1:], number)
            for number in by_gap[gap]
            if not waiting[number]
        ]
        heapq.heapify(ready)
        done = 0
        while ready:
            _, op, target, number = heapq.heappop(ready)
            steps.append(Step(gap, StepOp(op), target))
            done += 1
            for follower in followers[number]:
                waiting[follower] -= 1
                if not waiting[follower]:
                    heapq.heappush(ready, (*events[follower][1:], follower))
        if done < len(by_gap[gap]):
            left = {number for number in by_gap[gap] if waiting[number]}
            on_cycles = _on_cycles(left, dict(enumerate(followers)))
            stuck.update(index for number in on_cycles for index in owner(number))
    if stuck:
        raise Unschedulable(stuck, "buckets wait for each other")
    return tuple(steps)
