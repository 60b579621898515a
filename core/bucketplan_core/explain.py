"""Why a plan is as it is: what closed each bucket, why a candidate stayed alone, and what limits the step.

For every bucket the tree says what merging it with its neighbours in lane order would have saved on the communication
stream and cost in packing on the compute stream, by the cost model; whether its communication is hidden; and where it
is not, how long compute stood still for it. It explains any legal decision, one made by hand too.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from bucketplan_core.assess import gap_ppm, simulated_figures
from bucketplan_core.bound import lower_bound_ns
from bucketplan_core.cost import CostModel
from bucketplan_core.plan import Decision, StepOp
from bucketplan_core.profile import CostProfile
from bucketplan_core.request import Request
from bucketplan_core.simulate import Simulation, simulate
from bucketplan_core.wire import WireValue

__all__ = ["explain"]

_NEARLY_PERMILLE = 990
"""A budget counts as limiting from this share of it on."""


def explain(
    request: Request, profile: CostProfile, decision: Decision, *, memory_budget_bytes: int | None = None
) -> dict[str, WireValue]:
    """A tree of texts and integers: `step`, `limits` and `buckets` in launch order.

    `memory_budget_bytes` is the budget that was planned under (`assessment["memory_budget_bytes"]` of an `auto` plan).
    Raises `PlanningError` where the request has no figures of the hardware.
    """
    cost = CostModel.build(request, profile)
    found = simulate(cost, decision)
    bound = lower_bound_ns(cost)
    budget = memory_budget_bytes if memory_budget_bytes is not None else request.options.memory_budget_bytes
    return {
        "buckets": [_bucket(cost, decision, found, view) for view in _views(request, decision)],
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


def _bucket(cost: CostModel, decision: Decision, found: Simulation, view: _View) -> dict[str, WireValue]:
    bucket = decision.buckets[view.index]
    times = found.buckets[view.index]
    own = cost.bucket(bucket.members)
    opened = _merge(cost, decision, view.previous, view.index)
    closed = _merge(cost, decision, view.index, view.following)
    tree: dict[str, WireValue] = {
        "bytes": sum(cost.full_bytes[m] for m in bucket.members),
        "closed": _boundary(closed, "next", found, view.index),
        "comm_ns": own.comm_ns,
        "exposed_ns": times.exposed_ns,
        "id": bucket.id,
        "launch_gap": view.launch,
        "members": [cost.request.candidates[m].param_name or f"candidate {m}" for m in bucket.members],
        "opened": _boundary(opened, "previous", found, view.index),
        "pack_ns": own.launch_ns - cost.hardware.launch_ns,
        "queued_ns": times.started_ns - times.launched_ns,
        "slack_ns": max(times.waited_ns - times.finished_ns, 0),
        "unpack_ns": own.wait_ns,
        "wait_gap": view.wait,
    }
    if len(bucket.members) == 1:
        tree["alone"] = _why_alone(found, view.index, [merge for merge in (opened, closed) if merge is not None])
    return tree


@dataclass(frozen=True, slots=True)
class _Merge:
    """What one bucket of two neighbours would change: stream time saved, compute time added; `blocked` says why it
    cannot be.
    """

    other: str
    saved_ns: int
    added_ns: int
    blocked: str | None


def _merge(cost: CostModel, decision: Decision, first: int | None, second: int | None) -> _Merge | None:
    if first is None or second is None:
        return None
    request = cost.request
    one, two = decision.buckets[first], decision.buckets[second]
    members = (*one.members, *two.members)
    apart = [cost.bucket(one.members), cost.bucket(two.members)]
    together = cost.bucket(members)
    candidates = [request.candidates[m] for m in members]
    opens = max(c.earliest_launch for c in candidates)
    closes = min(min(c.latest_launch, c.latest_wait) for c in candidates)
    blocked = None
    if opens > closes:
        blocked = f"no launch point serves both: one is ready at gap {opens}, another is due at gap {closes}"
    elif any(edge in set(members) for c in candidates for edge in c.depends_on):
        blocked = "one feeds the other"
    return _Merge(
        other=f"{one.id} and {two.id}",
        saved_ns=sum(c.comm_ns for c in apart) - together.comm_ns,
        added_ns=together.launch_ns + together.wait_ns - sum(c.launch_ns + c.wait_ns for c in apart),
        blocked=blocked,
    )


def _boundary(merge: _Merge | None, side: str, found: Simulation, index: int) -> dict[str, WireValue]:
    if merge is None:
        return {"because": f"there is no {side} bucket in its lane"}
    figures: dict[str, WireValue] = {"compute_added_ns": merge.added_ns, "stream_saved_ns": merge.saved_ns}
    if merge.blocked is not None:
        return figures | {"because": merge.blocked}
    return figures | {"because": _verdict(merge, found.buckets[index].exposed_ns)}


def _verdict(merge: _Merge, exposed_ns: int) -> str:
    if merge.added_ns <= 0:
        return "merging would cost no compute, but one launch point and one wait for both leave less to hide behind"
    if not exposed_ns:
        return (
            f"its communication is hidden, so the {merge.saved_ns} ns of stream time saved would not show, "
            f"the {merge.added_ns} ns of packing would"
        )
    if merge.added_ns >= merge.saved_ns:
        return f"packing would cost {merge.added_ns} ns of compute and save only {merge.saved_ns} ns of the stream"
    return (
        f"merging would save {merge.saved_ns} ns of the stream for {merge.added_ns} ns of packing, but move the launch "
        "to the later of both or the wait to the earlier, and the simulated step is longer"
    )


def _why_alone(found: Simulation, index: int, merges: list[_Merge]) -> str:
    if not merges:
        return "it is the only one of its lane"
    free = [merge for merge in merges if merge.blocked is None]
    if not free:
        return "no neighbour can be launched together with it"
    cheapest = min(free, key=lambda merge: merge.added_ns - merge.saved_ns)
    return _verdict(cheapest, found.buckets[index].exposed_ns)


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
    tight = budget is not None and found.peak_bytes * 1_000 >= budget * _NEARLY_PERMILLE
    return {
        "memory_budget_bytes": budget,
        "memory_is_tight": tight,
        "most": most,
        "peak_bytes": found.peak_bytes,
        "stream_busy_ns": dict(busy),
        "time_ns": dict(shares),
    }
