"""Why a plan is as it is: what closed each bucket, why a candidate stayed alone, and what limits the step.

For every bucket the tree says what merging it with its neighbours in lane order would have saved on the communication
stream and cost in packing on the compute stream, by the cost model; whether its communication is hidden, or stands in
a busy spell of its stream that ends in a stall; and in the latter case, for the longest stalls, how long the step would
be with the two merged, by the simulator. It explains any legal decision, one made by hand too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bucketplan_core.assess import gap_ppm, simulated_figures
from bucketplan_core.bound import lower_bound_ns
from bucketplan_core.cost import CostModel
from bucketplan_core.errors import PlanningError
from bucketplan_core.plan import Decision, StepOp
from bucketplan_core.planners.auto import FALLBACK
from bucketplan_core.profile import CostProfile
from bucketplan_core.request import Request
from bucketplan_core.simulate import CollectiveTimes, Simulation, run_steps, simulate
from bucketplan_core.wire import WireValue

__all__ = ["explain"]

_NEARLY_PERMILLE = 990
"""A budget counts as limiting from this share of it on."""
_MOST_SIMULATED = 64
"""Mergers that are simulated, those at the longest stalls first: each takes as long as simulating the plan."""
_LAUNCH, _WAIT = int(StepOp.LAUNCH), int(StepOp.WAIT)


def explain(
    request: Request,
    profile: CostProfile,
    decision: Decision,
    *,
    memory_budget_bytes: int | None = None,
    only: Collection[int] | None = None,
) -> dict[str, WireValue]:
    """A tree of texts and integers: `step`, `limits` and `buckets` in launch order, those of the indices in `only`.

    `memory_budget_bytes` is the budget that was planned under (`assessment["memory_budget_bytes"]` of an `auto` plan).
    Raises `PlanningError` where the request has no figures of the hardware; under strategy `auto` it names the rule
    that such a request was planned by.
    """
    if request.options.hardware is None and request.options.strategy == "auto":
        raise PlanningError("hardware", None, f"{FALLBACK}; without figures there are no costs to explain it by")
    cost = CostModel.build(request, profile)
    found = simulate(cost, decision)
    views = _views(request, decision)
    mergers = _Mergers(cost, decision, found, views)
    bound = lower_bound_ns(cost)
    budget = memory_budget_bytes if memory_budget_bytes is not None else request.options.memory_budget_bytes
    return {
        "buckets": [_bucket(mergers, view) for view in views if only is None or view.index in only],
        "limits": _limits(cost, decision, found, budget),
        "step": simulated_figures(found) | {"bound_ns": bound, "gap_ppm": gap_ppm(found.step_ns, bound)},
    }


@dataclass(frozen=True, slots=True)
class _View:
    """One bucket with its neighbours in lane order and its gaps."""

    index: int
    previous: int | None
    following: int | None
    launch: int
    wait: int


def _views(request: Request, decision: Decision) -> list[_View]:
    launches: dict[int, int] = {}
    waits: dict[int, int] = {}
    for step in decision.steps:
        if step.op is StepOp.LAUNCH:
            launches[step.target] = step.gap
        elif step.op is StepOp.WAIT:
            waits[step.target] = step.gap
    by_lane: dict[int, list[int]] = {}
    for index, bucket in enumerate(decision.buckets):
        by_lane.setdefault(bucket.lane, []).append(index)
    previous: dict[int, int] = {}
    following: dict[int, int] = {}
    for indices in by_lane.values():
        indices.sort(key=lambda i: min(map(request.lane_position, decision.buckets[i].members)))
        for before, after in pairwise(indices):
            following[before], previous[after] = after, before
    return [
        _View(index, previous.get(index), following.get(index), launches[index], waits[index])
        for index in range(len(decision.buckets))
    ]


def _bucket(mergers: _Mergers, view: _View) -> dict[str, WireValue]:
    cost, decision, found = mergers.cost, mergers.decision, mergers.found
    bucket = decision.buckets[view.index]
    times = found.buckets[view.index]
    own = cost.bucket(bucket.members)
    opened = mergers.merge(view.previous, view.index)
    closed = mergers.merge(view.index, view.following)
    tree: dict[str, WireValue] = {
        "bytes": sum(cost.full_bytes[m] for m in bucket.members),
        "closed": mergers.boundary(closed, "next"),
        "comm_ns": own.comm_ns,
        "exposed_ns": times.exposed_ns,
        "id": bucket.id,
        "launch_gap": view.launch,
        "members": [cost.request.candidates[m].param_name or f"candidate {m}" for m in bucket.members],
        "opened": mergers.boundary(opened, "previous"),
        "pack_ns": own.launch_ns - cost.hardware.launch_ns,
        "queued_ns": times.started_ns - times.launched_ns,
        "slack_ns": max(times.waited_ns - times.finished_ns, 0),
        "unpack_ns": own.wait_ns,
        "wait_gap": view.wait,
    }
    if len(bucket.members) == 1:
        tree["alone"] = mergers.why_alone([merge for merge in (opened, closed) if merge is not None])
    return tree


@dataclass(frozen=True, slots=True)
class _Merge:
    """What one bucket of two neighbours would change: stream time saved, compute time added.

    `blocked` says why it cannot be; `stalls_for_ns` is the longer of the stalls that their spells on the stream end in.
    """

    pair: tuple[int, int]
    saved_ns: int
    added_ns: int
    blocked: str | None
    stalls_for_ns: int


class _Mergers:
    """What merging neighbours of one decision would change."""

    def __init__(self, cost: CostModel, decision: Decision, found: Simulation, views: Sequence[_View]) -> None:
        self.cost, self.decision, self.found = cost, decision, found
        self._stalls = _stalls_behind(cost, decision, found)
        self._steps = [(step.gap, int(step.op), step.target) for step in decision.steps]
        self._positions = {(op, target): number for number, (_, op, target) in enumerate(self._steps)}
        self._simulated: dict[tuple[int, int], int | None] = {}
        merges = [self.merge(view.index, view.following) for view in views]
        free = [merge for merge in merges if merge is not None and merge.blocked is None]
        free.sort(key=lambda merge: (-merge.stalls_for_ns, merge.pair))
        self._worth = {merge.pair for merge in free[:_MOST_SIMULATED]}

    def merge(self, first: int | None, second: int | None) -> _Merge | None:
        if first is None or second is None:
            return None
        one, two = self.decision.buckets[first], self.decision.buckets[second]
        members = (*one.members, *two.members)
        apart = [self.cost.bucket(one.members), self.cost.bucket(two.members)]
        together = self.cost.bucket(members)
        candidates = [self.cost.request.candidates[m] for m in members]
        opens = max(c.earliest_launch for c in candidates)
        closes = min(min(c.latest_launch, c.latest_wait) for c in candidates)
        blocked = None
        if opens > closes:
            blocked = f"no launch point serves both: one is ready at gap {opens}, another is due at gap {closes}"
        elif any(edge in set(members) for c in candidates for edge in c.depends_on):
            blocked = "one feeds the other"
        return _Merge(
            pair=(first, second),
            saved_ns=sum(c.comm_ns for c in apart) - together.comm_ns,
            added_ns=together.launch_ns + together.wait_ns - sum(c.launch_ns + c.wait_ns for c in apart),
            blocked=blocked,
            stalls_for_ns=max(self._stalls.get(first, 0), self._stalls.get(second, 0)),
        )

    def boundary(self, merge: _Merge | None, side: str) -> dict[str, WireValue]:
        if merge is None:
            return {"because": f"there is no {side} bucket in its lane"}
        figures: dict[str, WireValue] = {"compute_added_ns": merge.added_ns, "stream_saved_ns": merge.saved_ns}
        if merge.blocked is not None:
            return figures | {"because": merge.blocked}
        changed = self._changed_ns(merge)
        if changed is not None:
            figures["step_changed_ns"] = changed
        return figures | {"because": self._verdict(merge, changed)}

    def why_alone(self, merges: Sequence[_Merge]) -> str:
        if not merges:
            return "it is the only one of its lane"
        free = [merge for merge in merges if merge.blocked is None]
        if not free:
            return "no neighbour can be launched together with it"
        cheapest = min(free, key=lambda merge: merge.added_ns - merge.saved_ns)
        return self._verdict(cheapest, self._changed_ns(cheapest))

    def _verdict(self, merge: _Merge, changed: int | None) -> str:
        saved, added = merge.saved_ns, merge.added_ns
        figures = f"{saved} ns of stream time saved, " + (
            f"{added} ns of launch and packing added" if added >= 0 else f"{-added} ns of launch and packing saved"
        )
        if changed is None:
            verdict = f"merged with its neighbour: {figures}; what that does to the step was not simulated here"
        elif changed > 0:
            verdict = f"merged with its neighbour the simulated step would be {changed} ns longer: {figures}"
        elif changed < 0:
            shorter = f"merged with its neighbour the simulated step would be {-changed} ns shorter"
            verdict = f"{shorter}, memory not considered: {figures}"
        else:
            verdict = f"merged with its neighbour the simulated step would be as long: {figures}"
        if merge.stalls_for_ns:
            return verdict
        return f"its communication is hidden and holds up nothing behind it on its stream; {verdict}"

    def _changed_ns(self, merge: _Merge) -> int | None:
        """How much longer the simulated step is with the two merged where they stand; None where that was not run."""
        if merge.pair not in self._worth:
            return None
        if merge.pair not in self._simulated:
            self._simulated[merge.pair] = self._simulate(*merge.pair)
        return self._simulated.get(merge.pair)

    def _simulate(self, first: int, second: int) -> int | None:
        """The better of launching at the earlier of both places, where all inputs are ready there, and at the later."""
        buckets = self.decision.buckets
        both = (*buckets[first].members, *buckets[second].members)
        opens = max(self.cost.request.candidates[m].earliest_launch for m in both)
        launches = {self._positions[_LAUNCH, index] for index in (first, second)}
        wait = min(self._positions[_WAIT, index] for index in (first, second))
        # A launch behind the earlier of both waits goes to that wait.
        places = {min(launch, wait) for launch in launches}
        members = [*(bucket.members for bucket in buckets), both]
        costs = [self.cost.bucket(m) for m in members]
        streams = [self.cost.lane_streams[bucket.lane] for bucket in (*buckets, buckets[first])]
        found = [
            run_steps(self.cost, costs, streams, self._merged_steps(first, second, place, wait)).step_ns
            for place in sorted(places)
            if self._steps[place][0] >= opens
        ]
        return min(found) - self.found.step_ns if found else None

    def _merged_steps(self, first: int, second: int, launch: int, wait: int) -> list[tuple[int, int, int]]:
        merged = len(self.decision.buckets)
        steps: list[tuple[int, int, int]] = []
        for number, (gap, op, target) in enumerate(self._steps):
            if number == launch:
                steps.append((gap, _LAUNCH, merged))
            if number == wait:
                steps.append((gap, _WAIT, merged))
            if op > _WAIT or target not in (first, second):
                steps.append((gap, op, target))
        return steps


def _stalls_behind(cost: CostModel, decision: Decision, found: Simulation) -> dict[int, int]:
    """For each bucket in a busy spell of its stream that compute has to wait for: the longest stall from it on.

    Fixed collectives of the stream belong to its spells: a bucket that delays one holds up what waits for it.
    """
    by_stream: dict[int, list[tuple[CollectiveTimes, int | None]]] = {}
    for index, times in enumerate(found.buckets):
        by_stream.setdefault(cost.lane_streams[decision.buckets[index].lane], []).append((times, index))
    for number, times in enumerate(found.fixed):
        if cost.fixed_streams[number] in by_stream:
            by_stream[cost.fixed_streams[number]].append((times, None))
    stalls: dict[int, int] = {}
    for ran in by_stream.values():
        longest = begins = 0
        # What takes no time starts and ends with its neighbour; it belongs to the same spell on either side of it.
        for times, bucket_index in sorted(ran, key=lambda one: (one[0].started_ns, one[0].finished_ns), reverse=True):
            if times.finished_ns < begins:
                longest = 0  # the stream stood idle behind it
            longest, begins = max(longest, times.exposed_ns), times.started_ns
            if longest and bucket_index is not None:
                stalls[bucket_index] = longest
    return stalls


def _limits(cost: CostModel, decision: Decision, found: Simulation, budget: int | None) -> dict[str, WireValue]:
    """Where the step goes, and the resource that a faster one would need most."""
    exposed = dict.fromkeys(cost.streams, 0)
    busy = dict.fromkeys(cost.streams, 0)
    for bucket, times in zip(decision.buckets, found.buckets, strict=True):
        stream = cost.streams[cost.lane_streams[bucket.lane]]
        exposed[stream] += times.exposed_ns
        busy[stream] += times.finished_ns - times.started_ns
    for number, times in enumerate(found.fixed):
        if cost.fixed_streams[number] >= 0:
            stream = cost.streams[cost.fixed_streams[number]]
            exposed[stream] += times.exposed_ns
            busy[stream] += times.finished_ns - times.started_ns
    shares = {
        "compute": found.compute_ns,
        "packing copies": found.copies_ns,
        "host launches": found.launches_ns,
        "compute slowed by communication": found.slowed_ns,
    } | {f"waiting for {stream}": ns for stream, ns in exposed.items()}
    most = max(shares, key=lambda name: (shares[name], name))
    others = {name: ns for name, ns in shares.items() if name != "compute" and ns}
    tight = budget is not None and found.peak_bytes * 1_000 >= budget * _NEARLY_PERMILLE
    return {
        "because": _what_limits(cost, found, others, tight),
        "memory_budget_bytes": budget,
        "memory_is_tight": tight,
        "most": most,
        "peak_bytes": found.peak_bytes,
        "stream_busy_ns": dict(busy),
        "time_ns": dict(shares),
    }


def _what_limits(cost: CostModel, found: Simulation, others: Mapping[str, int], tight: bool) -> str:
    """Which resource a faster step would need, in one sentence."""
    compute = f"compute takes {found.compute_ns} of {found.step_ns} ns"
    if not others:
        return f"{compute}: only faster compute makes this step shorter"
    name = max(others, key=lambda other: (others[other], other))
    above_bound = found.step_ns - lower_bound_ns(cost)
    memory = "; the memory budget is used up, a larger one may help" if tight and above_bound else ""
    if above_bound * 100 <= found.step_ns - found.compute_ns:
        reach = "no other plan could shorten this noticeably"
    else:
        reach = f"at most {above_bound} ns of the step can be in reach of another plan"
    return f"{compute}, {name} the most beside it, {others[name]} ns; {reach}{memory}"
