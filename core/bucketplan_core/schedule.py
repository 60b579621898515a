"""From buckets to a schedule: where each launch and wait goes, and one total order of all of them.

`place_original` and `place_scheduled` choose gaps, `arrange` orders the events inside each gap, `legalize` splits the
buckets that cannot be scheduled until the rest can. Every planner goes through here, so that a rule of order exists
once. Each pass is linear in events and edges but for a sort.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bucketplan_core.collectives import Candidate
from bucketplan_core.errors import IllegalPlan
from bucketplan_core.legality import fitting_rewrite, fixed_schedule
from bucketplan_core.plan import Bucket, Decision, Step, StepOp
from bucketplan_core.request import Request

__all__ = [
    "Placement",
    "Unschedulable",
    "arrange",
    "arrange_events",
    "decide",
    "legalize",
    "place_original",
    "place_scheduled",
]

_FIRST = -(2**62)
"""Key of an event that goes as early in its gap as what it depends on allows."""
_LAST = 2**62
"""Key of an event that goes after everything else in its gap."""
_ROUNDS_OF_HALVING = 24
"""A bucket of the most members that are allowed is down to single ones after 15."""
_ROUNDS_OF_SPLITTING = 24


@dataclass(frozen=True, slots=True)
class Placement:
    """Gaps of one bucket's launch and wait; inside a gap, events run by key as far as their dependencies allow.

    `after` names another bucket (by position) whose wait should come before this launch in the same gap. It is a wish:
    where the dependencies of the gap forbid it, it is dropped.
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
    """The decision of these placements; payload in registration order, buckets in launch order.

    Raises `Unschedulable` for placements that have no order; `legalize` returns such as have one.
    """
    steps = arrange_events(request, placements)
    lanes, lane_of = request.lanes, request.lane_of
    order = [target for _, op, target in steps if op == StepOp.LAUNCH]
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
                id=f"{lanes[lane].group}/{lane}/{number}",
                lane=lane,
                members=members,
                rewrite=fitting_rewrite(lanes[lane].kind, len(members)),
            )
        )
    return Decision(
        signature=request.signature,
        planner=planner,
        profile=profile,
        buckets=tuple(buckets),
        steps=tuple(
            Step(gap, _OPS[op], renumbered[target] if op <= StepOp.WAIT else target) for gap, op, target in steps
        ),
    )


def legalize(request: Request, buckets: Members, place: Place) -> list[Placement]:
    """Place `buckets`, halving those that stand in the way of any legal schedule, until all can be placed.

    Always ends: with every candidate alone both placements have an order, since the original one satisfies every edge
    and window. A stubborn tangle is split to single candidates at once, so the number of rounds has a bound.
    """
    current = [tuple(bucket) for bucket in buckets]
    rounds = 0
    while True:
        try:
            placements = place(request, current)
            arrange_events(request, placements)
            return placements
        except Unschedulable as conflict:
            blamed = {index for index in conflict.buckets if len(current[index]) > 1}
            if not blamed:
                blamed = _fused_ancestors(request, current, conflict.buckets)
            if rounds >= _ROUNDS_OF_HALVING + _ROUNDS_OF_SPLITTING:
                blamed = {index for index, bucket in enumerate(current) if len(bucket) > 1}
            if not blamed:
                raise IllegalPlan("dependency", f"the graph itself cannot be scheduled: {conflict.reason}") from None
            into = _halves if rounds < _ROUNDS_OF_HALVING else _singles
            current = [
                part
                for index, bucket in enumerate(current)
                for part in (into(bucket) if index in blamed else (bucket,))
            ]
            rounds += 1


def _halves(bucket: tuple[int, ...]) -> Sequence[tuple[int, ...]]:
    middle = (len(bucket) + 1) // 2
    return (bucket[:middle], bucket[middle:])


def _singles(bucket: tuple[int, ...]) -> Sequence[tuple[int, ...]]:
    return [(member,) for member in bucket]


def _fused_ancestors(request: Request, buckets: Members, start: Iterable[int]) -> set[int]:
    """Buckets of several members that `start` waits for, else all such buckets."""
    constraints = _Constraints(request, buckets)
    seen = set(start)
    stack = list(seen)
    while stack:
        for dependency in constraints.feeders[stack.pop()]:
            if dependency not in seen:
                seen.add(dependency)
                stack.append(dependency)
    found = {index for index in seen if len(buckets[index]) > 1}
    return found or {index for index, bucket in enumerate(buckets) if len(bucket) > 1}


class _Constraints:
    """What holds for each bucket as a whole, by its position: the joint window and the buckets that feed it."""

    def __init__(self, request: Request, buckets: Members) -> None:
        candidates = request.candidates
        num_candidates = len(candidates)
        self.earliest_launch: list[int] = []
        self.latest_launch: list[int] = []
        self.latest_wait: list[int] = []
        self.first: list[Candidate] = []
        self.feeders: list[set[int]] = [set() for _ in buckets]
        edges: list[tuple[int, int]] = []
        for index, bucket in enumerate(buckets):
            first = candidates[bucket[0]]
            opens, closes, due = first.earliest_launch, first.latest_launch, first.latest_wait
            for member in bucket:
                c = candidates[member]
                opens = max(opens, c.earliest_launch)
                closes = min(closes, c.latest_launch)
                due = min(due, c.latest_wait)
                if c.launch_order < first.launch_order:
                    first = c
                if c.depends_on:
                    edges += [(index, edge) for edge in c.depends_on]
            self.earliest_launch.append(opens)
            self.latest_launch.append(closes)
            self.latest_wait.append(due)
            self.first.append(first)
        if edges or request.fixed:
            self._join(request, buckets, edges, num_candidates)

    def _join(self, request: Request, buckets: Members, edges: Sequence[tuple[int, int]], num_candidates: int) -> None:
        """What edges to and from other collectives add: feeders, and windows that fixed ones close."""
        bucket_of = {member: index for index, bucket in enumerate(buckets) for member in bucket}
        for index, edge in edges:
            if edge < num_candidates:
                self.feeders[index].add(bucket_of[edge])
                continue
            fed_at = request.fixed[edge - num_candidates].wait
            if fed_at is not None and fed_at > self.earliest_launch[index]:
                self.earliest_launch[index] = fed_at
        for fixed in request.fixed:
            for edge in fixed.depends_on:
                if edge < num_candidates and fixed.launch < self.latest_wait[bucket_of[edge]]:
                    self.latest_wait[bucket_of[edge]] = fixed.launch

    def order(self) -> list[int]:
        """Buckets in an order in which each comes after those that feed it; ties by first launch."""
        followers: dict[int, list[int]] = {}
        waiting = [len(feeders) for feeders in self.feeders]
        for index, feeders in enumerate(self.feeders):
            if index in feeders:
                raise Unschedulable([index], "a bucket depends on itself")
            for feeder in feeders:
                followers.setdefault(feeder, []).append(index)
        ready = [(self.first[index].launch_order, index) for index, count in enumerate(waiting) if not count]
        if not followers:
            return [index for _, index in sorted(ready)]
        heapq.heapify(ready)
        order: list[int] = []
        while ready:
            _, index = heapq.heappop(ready)
            order.append(index)
            for follower in followers.get(index, ()):
                waiting[follower] -= 1
                if not waiting[follower]:
                    heapq.heappush(ready, (self.first[follower].launch_order, follower))
        if len(order) < len(waiting):
            stuck = set(range(len(waiting))).difference(order)
            raise Unschedulable(_on_cycles(stuck, followers), "buckets wait for each other")
        return order


def _on_cycles(stuck: Collection[int], followers: Mapping[int, Sequence[int]]) -> set[int]:
    """Drop from `stuck` what only hangs behind a cycle, so that it is not split for nothing."""
    remaining = set(stuck)
    before: dict[int, list[int]] = {}
    num_behind = dict.fromkeys(remaining, 0)
    for index in remaining:
        for follower in followers.get(index, ()):
            if follower in remaining:
                before.setdefault(follower, []).append(index)
                num_behind[index] += 1
    ends = [index for index, count in num_behind.items() if not count]
    while ends:
        end = ends.pop()
        remaining.discard(end)
        for index in before.get(end, ()):
            num_behind[index] -= 1
            if not num_behind[index]:
                ends.append(index)
    return remaining or set(stuck)


def place_original(request: Request, buckets: Members) -> list[Placement]:
    """Launch at the first member's launch if all inputs are ready there, else right after the latest input.

    The wait stands right behind the launch. Lone candidates stay where they are, unless what feeds them has moved.
    """
    constraints = _Constraints(request, buckets)
    placed: dict[int, Placement] = {}
    late: set[int] = set()
    for index in constraints.order():
        first = constraints.first[index]
        launch = max(first.launch, constraints.earliest_launch[index])
        for feeder in constraints.feeders[index]:
            launch = max(launch, placed[feeder].wait)
        # Below all other keys and one of a kind, so that nothing comes between this launch and its wait.
        moved_key = first.launch_order + _FIRST
        launch_key = first.launch_order if launch == first.launch else moved_key
        if len(buckets[index]) == 1:
            wait = max(first.wait, launch)
            wait_key = first.wait_order if wait == first.wait else moved_key
        else:
            wait, wait_key = launch, launch_key
        placed[index] = Placement(tuple(buckets[index]), launch, wait, launch_key, wait_key)
        if launch > constraints.latest_launch[index] or wait > constraints.latest_wait[index]:
            late.add(index)
    if late:
        raise Unschedulable(late, "launch or wait would come after a member's window")
    return [placed[index] for index in range(len(buckets))]


def place_scheduled(request: Request, buckets: Members) -> list[Placement]:
    """Wait as late as legal; gathers launch `options.prefetch` buckets ahead, reductions as soon as ready.

    A gather goes right after the wait of the bucket `prefetch` places before it in lane order, not before its own
    window; with prefetch 0 it launches at its own wait. A reduction that feeds others waits at the launch of the next
    bucket of its lane, so that what hangs on it is not held up to the end of the graph.
    """
    constraints = _Constraints(request, buckets)
    order = constraints.order()
    feeds: set[int] = set().union(*constraints.feeders)
    launch_by, wait_by = constraints.latest_launch, constraints.latest_wait
    for index in reversed(order):
        # A bucket is waited for before the last moment at which those that it feeds can be launched.
        launch_by[index] = min(launch_by[index], wait_by[index])
        for feeder in constraints.feeders[index]:
            wait_by[feeder] = min(wait_by[feeder], launch_by[index])
    ahead_of, next_of = _lane_neighbours(request, buckets)
    placed: dict[int, Placement] = {}
    late: set[int] = set()
    for index in order:
        launch, wait = constraints.earliest_launch[index], wait_by[index]
        for feeder in constraints.feeders[index]:
            launch = max(launch, placed[feeder].wait)
        after = None
        if constraints.first[index].is_gather:
            before = ahead_of.get(index)
            if before is not None:
                launch = max(launch, min(wait_by[before], launch_by[index]))
                after = before if wait_by[before] <= launch else None
            elif not request.options.prefetch:
                launch = max(launch, launch_by[index])
        elif index in feeds:
            follower = next_of.get(index)
            wait = min(wait, max(launch, launch if follower is None else constraints.earliest_launch[follower]))
        placed[index] = Placement(tuple(buckets[index]), launch, wait, _FIRST, _LAST, after)
        if launch > launch_by[index]:
            late.add(index)
    if late:
        raise Unschedulable(late, "launch or wait would come after a member's window")
    return [placed[index] for index in range(len(buckets))]


def _lane_neighbours(request: Request, buckets: Members) -> tuple[dict[int, int], dict[int, int]]:
    """For each bucket, in lane order: the one `prefetch` places before it, and the next."""
    by_lane: dict[int, list[int]] = {}
    for index, members in enumerate(buckets):
        by_lane.setdefault(request.lane_of[members[0]], []).append(index)
    ahead_of: dict[int, int] = {}
    next_of: dict[int, int] = {}
    prefetch, places = request.options.prefetch, request.lane_places
    for lane in by_lane.values():
        lane.sort(key=lambda index: min([places[member] for member in buckets[index]]))
        next_of |= dict(pairwise(lane))
        if prefetch:
            ahead_of |= dict(zip(lane[prefetch:], lane, strict=False))
    return ahead_of, next_of


def arrange(request: Request, placements: Sequence[Placement]) -> tuple[Step, ...]:
    """One total order of all launches and waits, fixed collectives included.

    Inside a gap an event comes after what it depends on; among those free to go the least key comes first, at equal
    keys launches before waits, then by position. Raises `Unschedulable` naming the buckets that cannot be ordered.
    """
    return tuple(Step(gap, _OPS[op], target) for gap, op, target in arrange_events(request, placements))


def arrange_events(request: Request, placements: Sequence[Placement]) -> list[tuple[int, int, int]]:
    """`arrange` as plain (gap, op, target), for those who try many placements."""
    events = _Events(request, placements)
    if events.misplaced:
        raise Unschedulable(events.misplaced, "a result would be waited for after a launch that needs it")
    order = events.by_key()
    tangled = events.out_of_order(order)
    if tangled:
        # Sorted by key alone is the answer wherever it respects the edges; the other gaps are sorted by both.
        by_gap: dict[int, list[int]] = {}
        for number in order:
            by_gap.setdefault(events.gaps[number], []).append(number)
        followers = events.followers(tangled)
        stuck: set[int] = set()
        for gap in tangled:
            by_gap[gap], left = events.disentangled(by_gap[gap], followers)
            stuck.update(left)
        if stuck:
            raise Unschedulable(stuck, "buckets wait for each other")
        order = [number for numbers in by_gap.values() for number in numbers]
    gaps, ops, targets = events.gaps, events.ops, events.targets
    return [(gaps[number], ops[number], targets[number]) for number in order]


_OPS = tuple(StepOp)
_LAUNCH, _WAIT = int(StepOp.LAUNCH), int(StepOp.WAIT)


class _Events:
    """Launches and waits by number (bucket b: 2b and 2b + 1, then fixed ones), and which must precede which.

    `edges` are pairs of events of one gap; events of different gaps are in order by their gaps, or `misplaced`.
    """

    def __init__(self, request: Request, placements: Sequence[Placement]) -> None:
        self.gaps: list[int] = []
        self.keys: list[int] = []
        self.ops: list[int] = [_LAUNCH, _WAIT] * len(placements)
        self.targets: list[int] = [index for index in range(len(placements)) for _ in range(2)]
        self.edges: list[tuple[int, int]] = []
        self.wishes: dict[int, int] = {}
        self.misplaced: set[int] = set()
        wait_of: list[int] = [-1] * request.num_collectives
        for index, placement in enumerate(placements):
            self.gaps += (placement.launch, placement.wait)
            self.keys += (placement.launch_key, placement.wait_key)
            for member in placement.members:
                wait_of[member] = 2 * index + 1
        fixed_launch = self._add_fixed(request, wait_of)
        candidates = request.candidates
        for index, placement in enumerate(placements):
            launch = 2 * index
            if placement.launch >= placement.wait:
                self._precede(launch, launch + 1)
            for member in placement.members:
                for edge in candidates[member].depends_on:
                    self._precede(wait_of[edge], launch)
            if placement.after is not None and placements[placement.after].wait == placement.launch:
                self.wishes[launch] = 2 * placement.after + 1
        for index, fixed in enumerate(request.fixed):
            for edge in fixed.depends_on:
                self._precede(wait_of[edge], fixed_launch[index])
        for behind in range(2 * len(placements) + 1, len(self.gaps)):
            self._precede(behind - 1, behind)

    def _add_fixed(self, request: Request, wait_of: list[int]) -> dict[int, int]:
        """Add the events of fixed collectives in their original order; returns the launches by collective."""
        launches: dict[int, int] = {}
        for number, (gap, op, index) in enumerate(fixed_schedule(request), start=len(self.gaps)):
            fixed = request.fixed[index]
            key: int | None = fixed.launch_order
            if op is StepOp.FIXED_WAIT:
                wait_of[len(request.candidates) + index] = number
                key = fixed.wait_order
            else:
                launches[index] = number
            self.gaps.append(gap)
            self.keys.append(_FIRST if key is None else key)
            self.ops.append(int(op))
            self.targets.append(index)
        return launches

    def _precede(self, before: int, behind: int) -> None:
        if self.gaps[before] == self.gaps[behind]:
            self.edges.append((before, behind))
        elif self.gaps[before] > self.gaps[behind]:
            self.misplaced.update(self._owners((before, behind)))

    def _owners(self, numbers: Iterable[int]) -> list[int]:
        return [self.targets[number] for number in numbers if self.ops[number] <= _WAIT]

    def by_key(self) -> list[int]:
        """All events by gap, key, operation and position; launches that wish to follow a wait right behind it.

        Such a launch has the least of all keys, so it is what goes next once that wait is over.
        """
        numbers = range(len(self.gaps))
        if not self.wishes:
            return [row[-1] for row in sorted(zip(self.gaps, self.keys, self.ops, self.targets, numbers, strict=True))]
        keys, ops, targets = list(self.keys), list(self.ops), list(self.targets)
        for launch, wait in self.wishes.items():
            if keys[launch] == _FIRST:
                keys[launch], ops[launch], targets[launch] = self.keys[wait], self.ops[wait], self.targets[wait]
        behind = [number in self.wishes for number in numbers]
        return [row[-1] for row in sorted(zip(self.gaps, keys, ops, targets, behind, numbers, strict=True))]

    def out_of_order(self, order: Sequence[int]) -> list[int]:
        """Gaps in which `order` breaks an edge or a wish."""
        position = [0] * len(order)
        for place, number in enumerate(order):
            position[number] = place
        broken = {self.gaps[a] for a, b in self.edges if position[a] > position[b]}
        broken |= {self.gaps[wait] for launch, wait in self.wishes.items() if position[wait] > position[launch]}
        return sorted(broken)

    def followers(self, gaps: Collection[int]) -> dict[int, list[int]]:
        """What must come behind each event of these gaps."""
        wanted = frozenset(gaps)
        found: dict[int, list[int]] = {}
        for before, behind in self.edges:
            if self.gaps[before] in wanted:
                found.setdefault(before, []).append(behind)
        return found

    def disentangled(
        self, numbers: Sequence[int], followers: Mapping[int, Sequence[int]]
    ) -> tuple[list[int], list[int]]:
        """The events of one gap in order, and the buckets on cycles, if any."""
        wishes = {number: self.wishes[number] for number in numbers if number in self.wishes}
        order, left = self._run(numbers, followers, wishes)
        if left and wishes:
            order, left = self._run(numbers, followers, {a: b for a, b in wishes.items() if a not in left})
        return order, self._owners(_on_cycles(left, followers)) if left else []

    def _run(
        self, numbers: Sequence[int], followers: Mapping[int, Sequence[int]], wishes: Mapping[int, int]
    ) -> tuple[list[int], set[int]]:
        waiting = dict.fromkeys(numbers, 0)
        wished: dict[int, list[int]] = {}
        for number in numbers:
            for follower in followers.get(number, ()):
                waiting[follower] += 1
        for launch, wait in wishes.items():
            wished.setdefault(wait, []).append(launch)
            waiting[launch] += 1
        keys, ops, targets = self.keys, self.ops, self.targets
        ready = [(keys[n], ops[n], targets[n], n) for n, count in waiting.items() if not count]
        heapq.heapify(ready)
        order: list[int] = []
        while ready:
            number = heapq.heappop(ready)[-1]
            order.append(number)
            for follower in (*followers.get(number, ()), *wished.get(number, ())):
                waiting[follower] -= 1
                if not waiting[follower]:
                    heapq.heappush(ready, (keys[follower], ops[follower], targets[follower], follower))
        return order, {number for number, count in waiting.items() if count}
