"""Moves of single launches, waits and members in the total order of a plan's steps, each judged by the simulator.

A placement rule orders launches and waits of one gap in one way, and fixed collectives stand where they stood. Here
that order is a choice: a launch goes before or behind any other step within its window, in front of a fixed
collective or behind it, and so does a wait; neighbours of a lane are merged, buckets split, members handed over.
`polish` descends by the first improvement until no move improves or its budget of simulated steps is spent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby

from bucketplan_core.plan import StepOp
from bucketplan_core.planners.auto_place import Bucket, Rule, Trial, Workbench
from bucketplan_core.schedule import Placement, Unschedulable, arrange_events

__all__ = ["polish"]

_LAUNCH, _WAIT = int(StepOp.LAUNCH), int(StepOp.WAIT)
_FEW_BUCKETS = 12
"""Lanes of up to this many buckets are merged in all pairs, not only neighbours."""
_KICKS = 8
"""Worse regroupings of a plan at rest that are descended from."""
_MOST_STEPS = 400
"""Longer plans have more neighbours than any budget of this search could look at."""
_LEAST_KEY = -(2**60)

Step = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _State:
    """A plan as the total order of its steps, (gap, op, target)."""

    buckets: tuple[Bucket, ...]
    steps: tuple[Step, ...]


def polish(bench: Workbench, start: Trial, spend: int, *, least_memory: bool = False) -> Trial:
    """The best plan that single moves reach from `start`, itself where none improves; at most about `spend` steps.

    Best is least step time, or with `least_memory` least peak, then step time; never above the bench's budget of
    memory, and fewer buckets at ties.
    """
    return _Descent(bench, bench.spent + spend, least_memory).run(start)


class _Descent:
    def __init__(self, bench: Workbench, until: int, least_memory: bool) -> None:
        self._bench = bench
        self._until = until
        self._least_memory = least_memory

    def run(self, start: Trial) -> Trial:
        """Descend from `start`, then from the regroupings of the best plan so far, the most promising first."""
        if 2 * len(start.buckets) + len(self._bench.request.fixed) > _MOST_STEPS:
            return start
        best = self._descend(start)
        while True:
            kicks = self._kicks(best)
            better = next((found for found in map(self._descend, kicks) if self._rank(found) < self._rank(best)), None)
            if better is None:
                return best
            best = better

    def _kicks(self, best: Trial) -> Iterator[Trial]:
        """Plans of one bucket more, less or changed, though they are worse: by rank, while the budget lasts."""
        found = []
        for state in self._regrouped(self._state(best), best):
            if self._bench.spent >= self._until:
                break
            trial = self._judge(state, best.rule, None)
            if trial is not None:
                found.append(trial)
        for trial in sorted(found, key=self._rank)[:_KICKS]:
            if self._bench.spent >= self._until:
                return
            yield trial

    def _descend(self, best: Trial) -> Trial:
        improved = True
        while improved:
            improved = False
            state = self._state(best)
            for candidate in chain(self._moved_steps(state, best), self._regrouped(state, best)):
                if self._bench.spent >= self._until:
                    return best
                found = self._judge(candidate, best.rule, self._rank(best))
                if found is not None:
                    best, improved = found, True
                    break
        return best

    def _state(self, trial: Trial) -> _State:
        return _State(trial.buckets, tuple(arrange_events(self._bench.request, trial.placements)))

    def _rank(self, trial: Trial) -> tuple[int, ...]:
        return (trial.peak_bytes, *trial.rank) if self._least_memory else trial.rank

    def _judge(self, state: _State, rule: Rule, below: tuple[int, ...] | None) -> Trial | None:
        """The trial of a state, None where it has no legal order, breaks the budget or ranks no better than `below`."""
        bench, buckets, steps = self._bench, state.buckets, state.steps
        if bench.has_edges and not self._respects_edges(state):
            return None
        run = bench.run(buckets, steps)
        if below is not None and not self._least_memory and (run.step_ns, len(buckets)) >= below:
            return None
        peak = bench.memory(buckets, steps).peak_bytes
        if bench.budget_bytes is not None and peak > bench.budget_bytes:
            return None
        if below is not None and self._least_memory and (peak, run.step_ns, len(buckets)) >= below:
            return None
        order = [target for _, op, target in steps if op == _LAUNCH]
        number = {old: new for new, old in enumerate(order)}
        renumbered = [(gap, op, number[target] if op <= _WAIT else target) for gap, op, target in steps]
        placements = self._placements([buckets[i] for i in order], renumbered)
        if placements is None:
            return None
        launched = [buckets[i] for i in order]
        run = replace(run, launched=[run.launched[i] for i in order], waited=[run.waited[i] for i in order])
        launches, waits = [p.launch for p in placements], [p.wait for p in placements]
        return Trial(rule, tuple(launched), launches, waits, run, peak, named=placements)

    def _placements(self, buckets: Sequence[Bucket], steps: Sequence[Step]) -> tuple[Placement, ...] | None:
        """Placements that `arrange` puts in exactly this order; None where fixed collectives leave no keys for it."""
        keys: dict[tuple[int, int], tuple[int, int]] = {}
        for gap, here in groupby(steps, key=lambda step: step[0]):
            key, previous, pending = _LEAST_KEY, (-1, -1), 0
            for _, op, target in here:
                if op > _WAIT:
                    limit = self._bench.fixed_key(op, target)
                    if pending and key > limit:
                        return None
                    key, previous, pending = limit + 1, (-1, -1), 0
                    continue
                if (op, target) < previous:
                    key += 1
                previous, pending = (op, target), 1
                keys[op, target] = (gap, key)
        placements = tuple(
            Placement(b.members, keys[_LAUNCH, i][0], keys[_WAIT, i][0], keys[_LAUNCH, i][1], keys[_WAIT, i][1])
            for i, b in enumerate(buckets)
        )
        try:
            arranged = arrange_events(self._bench.request, placements)
        except Unschedulable:
            return None
        return placements if arranged == list(steps) else None

    def _respects_edges(self, state: _State) -> bool:
        request = self._bench.request
        self._bench.spent += len(state.steps)
        waited: set[int] = set()
        num = len(request.candidates)
        for _, op, target in state.steps:
            if op == _LAUNCH:
                needed: Sequence[int] = [
                    e for m in state.buckets[target].members for e in request.candidates[m].depends_on
                ]
            elif op == _WAIT:
                waited.update(state.buckets[target].members)
                continue
            elif op == StepOp.FIXED_LAUNCH:
                needed = request.fixed[target].depends_on
            else:
                waited.add(num + target)
                continue
            if not waited.issuperset(needed):
                return False
        return True

    def _moved_steps(self, state: _State, best: Trial) -> Iterator[_State]:
        """Every single launch and wait elsewhere, those of the longest stalls first."""
        at = _positions(state)
        for index in _by_stall(best):
            yield from self._moved(state, _LAUNCH, index, at)
            yield from self._moved(state, _WAIT, index, at)
            last = self._waited_last(state, index, at)
            if last is not None:
                yield from self._moved(last, _LAUNCH, index, _positions(last))
            if self._least_memory:
                yield from self._together(state, index)

    def _regrouped(self, state: _State, best: Trial) -> Iterator[_State]:
        """Buckets split, merged and changed by one member, those of the longest stalls first."""
        buckets, at, order = state.buckets, _positions(state), _by_stall(best)
        position = self._bench.request.lane_position
        lanes: dict[int, list[int]] = {}
        for index, bucket in enumerate(buckets):
            lanes.setdefault(bucket.lane, []).append(index)
        for indices in lanes.values():
            indices.sort(key=lambda i: min(map(position, buckets[i].members)))
        for index in order:
            members = tuple(sorted(buckets[index].members, key=position))
            for cut in range(1, len(members)) if len(members) <= _FEW_BUCKETS else (1, len(members) // 2, -1):
                yield from self._split(state, index, (members[:cut], members[cut:]))
            indices = lanes[buckets[index].lane]
            here = indices.index(index)
            near = indices if len(indices) <= _FEW_BUCKETS else indices[max(here - 1, 0) : here + 2]
            for other in near:
                if other == index:
                    continue
                theirs = tuple(sorted(buckets[other].members, key=position))
                if other > index:
                    yield from self._merged(state, index, other, at)
                if len(members) > 1:
                    for given in dict.fromkeys((members[0], members[-1])):
                        kept = tuple(m for m in members if m != given)
                        yield from self._handed(state, (index, kept), (other, (*theirs, given)))

    def _moved(self, state: _State, op: int, index: int, at: dict[tuple[int, int], int]) -> Iterator[_State]:
        """One launch or wait at every other place that its window and its own wait or launch leave it."""
        steps, bucket = state.steps, state.buckets[index]
        here = at[op, index]
        rest = (*steps[:here], *steps[here + 1 :])
        if op == _LAUNCH:
            first, last, low, high = 0, at[_WAIT, index] - 1, bucket.earliest, bucket.latest_launch
        else:
            first, last, low, high = at[_LAUNCH, index] + 1, len(rest), 0, bucket.latest_wait
        places = sorted(range(first, last + 1), key=lambda place: abs(place - here))
        for place in places:
            least = max(low, rest[place - 1][0] if place else 0)
            most = min(high, rest[place][0] if place < len(rest) else self._bench.request.num_segments)
            if least > most:
                continue
            for gap in self._gaps(op, least, most):
                if place != here or gap != steps[here][0]:
                    yield _State(state.buckets, (*rest[:place], (gap, op, index), *rest[place:]))

    def _waited_last(self, state: _State, index: int, at: dict[tuple[int, int], int]) -> _State | None:
        """The state with one wait behind all else of its last gap, so that its launch may pass where it stood."""
        due, steps, here = state.buckets[index].latest_wait, state.steps, at[_WAIT, index]
        rest = (*steps[:here], *steps[here + 1 :])
        place = next((number for number, step in enumerate(rest) if step[0] > due), len(rest))
        return None if place == here else _State(state.buckets, (*rest[:place], (due, _WAIT, index), *rest[place:]))

    def _together(self, state: _State, index: int) -> Iterator[_State]:
        """A launch with its wait right behind it, at every place that their windows leave them."""
        bucket = state.buckets[index]
        rest = tuple(step for step in state.steps if step[1] > _WAIT or step[2] != index)
        for place in range(len(rest) + 1):
            least = max(bucket.earliest, rest[place - 1][0] if place else 0)
            most = min(bucket.latest_launch, rest[place][0] if place < len(rest) else self._bench.request.num_segments)
            if least <= most:
                for gap in dict.fromkeys((least, most)):
                    pair = ((gap, _LAUNCH, index), (gap, _WAIT, index))
                    yield _State(state.buckets, (*rest[:place], *pair, *rest[place:]))

    def _gaps(self, op: int, least: int, most: int) -> tuple[int, ...]:
        """Launches early and waits late are best for time, both ends may be for memory."""
        if least == most:
            return (least,)
        if self._least_memory:
            return (least, most)
        return (least,) if op == _LAUNCH else (most,)

    def _split(self, state: _State, index: int, parts: tuple[tuple[int, ...], ...]) -> Iterator[_State]:
        """Two buckets in the place of one: launches and waits next to each other, in either order."""
        second = len(state.buckets)
        for members in (parts, parts[::-1]):
            one, two = map(self._bench.bucket, members)
            buckets = (*state.buckets[:index], one, *state.buckets[index + 1 :], two)
            new: list[Step] = []
            for gap, op, target in state.steps:
                new.append((gap, op, target))
                if op <= _WAIT and target == index:
                    new.append((gap, op, second))
            yield _State(buckets, tuple(new))

    def _merged(self, state: _State, index: int, other: int, at: dict[tuple[int, int], int]) -> Iterator[_State]:
        """One bucket in the place of two: launched at every place between their launches' and its wait."""
        both = self._bench.bucket((*state.buckets[index].members, *state.buckets[other].members))
        if both.earliest > both.latest_launch:
            return
        # The last bucket takes the number of `other`, so that numbers have no hole.
        last = len(state.buckets) - 1
        renamed = {last: other}
        buckets = list(state.buckets)
        buckets[index] = both
        buckets[other] = buckets[last]
        buckets.pop()
        wait = min(at[_WAIT, index], at[_WAIT, other])
        rest: list[Step] = []
        places: list[int] = []
        end = 0
        for number, (gap, op, target) in enumerate(state.steps):
            if op <= _WAIT and target in (index, other):
                if op == _LAUNCH:
                    places.append(len(rest))
                elif number == wait:
                    end = len(rest)
                    rest.append((min(gap, both.latest_wait), _WAIT, index))
                continue
            rest.append((gap, op, renamed.get(target, target) if op <= _WAIT else target))
        for place in dict.fromkeys((*(min(p, end) for p in places), *range(end, min(places) - 1, -1))):
            least = max(both.earliest, rest[place - 1][0] if place else 0)
            if least <= min(both.latest_launch, rest[place][0]):
                yield _State(tuple(buckets), (*rest[:place], (least, _LAUNCH, index), *rest[place:]))

    def _handed(
        self, state: _State, one: tuple[int, tuple[int, ...]], two: tuple[int, tuple[int, ...]]
    ) -> Iterator[_State]:
        """A member of one bucket in another, everything where it stands, where the windows allow that."""
        buckets = list(state.buckets)
        for index, members in (one, two):
            buckets[index] = self._bench.bucket(members)
        for gap, op, target in state.steps:
            if op <= _WAIT and target in (one[0], two[0]):
                b = buckets[target]
                if gap > b.latest_wait or (op == _LAUNCH and not b.earliest <= gap <= b.latest_launch):
                    return
        yield _State(tuple(buckets), state.steps)


def _positions(state: _State) -> dict[tuple[int, int], int]:
    return {(op, target): number for number, (_, op, target) in enumerate(state.steps)}


def _by_stall(trial: Trial) -> list[int]:
    return sorted(range(len(trial.buckets)), key=lambda i: (-trial.run.waited[i][1], trial.run.launched[i], i))
