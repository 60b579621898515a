"""What a decision does to a step, by a simulator that knows no planner: time, exposed communication, memory.

The model: one compute stream, and one first-in-first-out communication stream a group, shared by all lanes and fixed
collectives of that group. Steps run in plan order. A launch costs the host's launch time and packing on the compute
stream, then its collective starts as soon as its stream is free. A wait holds the compute stream until the collective
is done, then unpacks. While any collective is in flight, everything on the compute stream takes `slowdown_permille`
longer. A step ends when the compute stream does.

Memory is counted in program order, as a caching allocator sees it: activations alive (`live_bytes`; at a gap the
lesser of its two segments) plus the collectives' buffers.

| buffer | from | to |
|---|---|---|
| gather, prepared or packed shards | launch | wait |
| gather alone: result | launch | after its last use |
| gather of a bucket: flat result | launch | wait, after unpacking |
| gather of a bucket: each member's own storage | wait, before the flat result is freed | after the member's last use |
| reduction: input, unless another collective delivers it | gap where it is ready | wait if alone, else packing |
| reduction of a bucket: packed input | launch | wait |
| reduction: result | launch | after its last use |

Time and memory are linear in steps. Between two steps a slowed-down duration is rounded up once, to whole nanoseconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bucketplan_core.cost import BucketCost, CostModel, Int64Array, as_int64, held_inputs
from bucketplan_core.plan import Decision, Step, StepOp

__all__ = [
    "COMPUTE_STREAM",
    "CollectiveTimes",
    "MemoryCurve",
    "Simulation",
    "TraceEvent",
    "memory_curve",
    "simulate",
    "step_times",
]

COMPUTE_STREAM = "compute"


@dataclass(frozen=True, slots=True)
class CollectiveTimes:
    """When one collective was launched, ran and was waited for; ns from the start of the step.

    `launched_ns` is the compute stream's time after packing, `waited_ns` its time when it reached the wait, -1 where
    a fixed collective has none; `exposed_ns` what it then stood still.
    """

    launched_ns: int
    started_ns: int
    finished_ns: int
    waited_ns: int
    exposed_ns: int


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One box of a timeline: what ran on `stream` from `start_ns` for `duration_ns`."""

    name: str
    category: str
    stream: str
    start_ns: int
    duration_ns: int


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Bytes held in program order: `segment_bytes[k]` during segment k, `step_bytes[i]` the most that step i
    reaches.
    """

    segment_bytes: tuple[int, ...]
    step_bytes: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        return max(max(self.segment_bytes, default=0), max(self.step_bytes, default=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The figures of one decision.

    ``step_ns = compute_ns + copies_ns + launches_ns + exposed_ns + slowed_ns``: pure compute, packing and unpacking,
    host launches of candidates and buckets, time the compute stream stood waiting, and what communication in flight
    cost it. `buckets` go by bucket of the decision, `fixed` by fixed collective.
    """

    step_ns: int
    compute_ns: int
    copies_ns: int
    launches_ns: int
    exposed_ns: int
    slowed_ns: int
    peak_bytes: int
    num_collectives: int
    buckets: tuple[CollectiveTimes, ...]
    fixed: tuple[CollectiveTimes, ...]
    memory: MemoryCurve
    events: tuple[TraceEvent, ...] = field(default=(), repr=False)


def simulate(cost: CostModel, decision: Decision, *, trace: bool = False) -> Simulation:
    """Run `decision`, which must be legal for the cost model's request; `trace` also records every box of the
    timeline.
    """
    members = [bucket.members for bucket in decision.buckets]
    costs = [cost.bucket(m) for m in members]
    streams = [cost.lane_streams[bucket.lane] for bucket in decision.buckets]
    events: list[TraceEvent] | None = [] if trace else None
    names = [bucket.id for bucket in decision.buckets] if trace else []
    step_ns, buckets, fixed = step_times(cost, costs, streams, decision.steps, events=events, names=names)
    memory = memory_curve(cost, members, decision.steps)
    launches = len(costs) * cost.hardware.launch_ns
    copies = sum(c.launch_ns + c.wait_ns for c in costs) - launches
    exposed = sum(times.exposed_ns for times in (*buckets, *fixed))
    return Simulation(
        step_ns=step_ns,
        compute_ns=cost.compute_ns,
        copies_ns=copies,
        launches_ns=launches,
        exposed_ns=exposed,
        slowed_ns=step_ns - cost.compute_ns - launches - copies - exposed,
        peak_bytes=memory.peak_bytes,
        num_collectives=len(costs),
        buckets=tuple(buckets),
        fixed=tuple(fixed),
        memory=memory,
        events=tuple(events or ()),
    )


def step_times(
    cost: CostModel,
    costs: Sequence[BucketCost],
    streams: Sequence[int],
    steps: Sequence[Step | tuple[int, int, int]],
    *,
    events: list[TraceEvent] | None = None,
    names: Sequence[str] = (),
) -> tuple[int, list[CollectiveTimes], list[CollectiveTimes]]:
    """Step time, times of each bucket and of each fixed collective, for steps as (gap, op, target)."""
    prefix = cost.prefix_ns
    permille = cost.hardware.slowdown_permille
    free = [0] * (len(cost.streams) + 1)  # the last entry serves collectives of no known group
    launched = [(0, 0, 0)] * len(costs)
    waited = [(-1, 0)] * len(costs)
    fixed_launched = [(0, 0, 0)] * len(cost.fixed_ns)
    fixed_waited = [(-1, 0)] * len(cost.fixed_ns)
    now = at = 0

    def advance(work: int) -> int:
        if not permille or not work:
            return now + work
        # A stream is busy from now until it is free, without a hole: what it runs was launched before now.
        busy = max(free) - now
        if busy <= 0:
            return now + work
        stretched = work * (1_000 + permille)
        if stretched <= busy * 1_000:
            return now - (-stretched // 1_000)
        return now + busy - (-(stretched - busy * 1_000) // (1_000 + permille))

    def box(name: str, category: str, stream: str, start: int, end: int) -> None:
        if events is not None and end > start:
            events.append(TraceEvent(name, category, stream, start, end - start))

    for gap, op, target in ((s.gap, s.op, s.target) if isinstance(s, Step) else s for s in steps):
        if gap != at:
            begun = now
            now = advance(prefix[gap] - prefix[at])
            if events is not None:
                box(f"segments {at} to {gap - 1}", "compute", COMPUTE_STREAM, begun, now)
            at = gap
        if op == StepOp.LAUNCH:
            begun = now
            now = advance(costs[target].launch_ns)
            stream = streams[target]
            start = max(now, free[stream])
            end = start + costs[target].comm_ns
            free[stream] = end
            launched[target] = (now, start, end)
            if events is not None:
                box(f"pack {names[target]}", "copy", COMPUTE_STREAM, begun, now)
                box(names[target], "collective", cost.streams[stream], start, end)
        elif op == StepOp.WAIT:
            end = launched[target][2]
            waited[target] = (now, max(end - now, 0))
            if end > now:
                if events is not None:
                    box(f"wait {names[target]}", "exposed", COMPUTE_STREAM, now, end)
                now = end
            begun = now
            now = advance(costs[target].wait_ns)
            if events is not None:
                box(f"unpack {names[target]}", "copy", COMPUTE_STREAM, begun, now)
        elif op == StepOp.FIXED_LAUNCH:
            stream = cost.fixed_streams[target]
            start = max(now, free[stream]) if stream >= 0 else now
            end = start + cost.fixed_ns[target]
            if stream >= 0:
                free[stream] = end
            fixed_launched[target] = (now, start, end)
            if events is not None and stream >= 0:
                box(f"fixed {target}: {cost.request.fixed[target].kind}", "fixed", cost.streams[stream], start, end)
        else:
            end = fixed_launched[target][2]
            fixed_waited[target] = (now, max(end - now, 0))
            if end > now:
                if events is not None:
                    box(f"wait fixed {target}", "exposed", COMPUTE_STREAM, now, end)
                now = end
    begun = now
    now = advance(prefix[-1] - prefix[at])
    if events is not None:
        box(f"segments {at} to {len(prefix) - 2}", "compute", COMPUTE_STREAM, begun, now)
    return (
        now,
        [CollectiveTimes(*a, *b) for a, b in zip(launched, waited, strict=True)],
        [CollectiveTimes(*a, *b) for a, b in zip(fixed_launched, fixed_waited, strict=True)],
    )


def memory_curve(
    cost: CostModel, members: Sequence[Sequence[int]], steps: Sequence[Step | tuple[int, int, int]]
) -> MemoryCurve:
    """Bytes held through these steps, by the table above."""
    candidates = cost.request.candidates
    num_segments = cost.request.num_segments
    before_gap = _plan_independent(cost)
    at_launch = np.zeros((len(members), 2), dtype=np.int64)  # taken, then given back
    at_wait = np.zeros((len(members), 2), dtype=np.int64)
    for index, bucket in enumerate(members):
        inputs = sum(candidates[m].input_bytes for m in bucket)
        outputs = sum(candidates[m].output_bytes for m in bucket)
        if candidates[bucket[0]].is_gather:
            at_launch[index] = (inputs + outputs, 0)
            at_wait[index] = (0, inputs) if len(bucket) == 1 else (outputs, inputs + outputs)
        else:
            held = sum(candidates[m].input_bytes for m in bucket if held_inputs(candidates[m]))
            if len(bucket) == 1:
                at_launch[index] = (outputs, 0)
                at_wait[index] = (0, held)
            else:
                at_launch[index] = (inputs + outputs, held)
                at_wait[index] = (0, inputs)
    gaps = [s.gap if isinstance(s, Step) else s[0] for s in steps]
    taken = np.zeros(len(steps), dtype=np.int64)
    given = np.zeros(len(steps), dtype=np.int64)
    for number, step in enumerate(steps):
        _, op, target = (step.gap, step.op, step.target) if isinstance(step, Step) else step
        if op == StepOp.LAUNCH:
            taken[number], given[number] = at_launch[target]
        elif op == StepOp.WAIT:
            taken[number], given[number] = at_wait[target]
    live = as_int64(cost.live_bytes) if num_segments else np.zeros(1, dtype=np.int64)
    live_at_gap = np.minimum(np.append(live, live[-1]), np.insert(live, 0, live[0])) if num_segments else live
    after = np.cumsum(taken - given)
    at = np.array(gaps, dtype=np.int64)
    step_bytes = after + given + before_gap[at] + live_at_gap[at] if len(steps) else after
    ended = np.array([bisect_left(gaps, k + 1) for k in range(num_segments)], dtype=np.int64)
    held_in_segment = np.insert(after, 0, 0)[ended] + before_gap[:num_segments] if num_segments else after[:0]
    segment_bytes = held_in_segment + live if num_segments else held_in_segment
    return MemoryCurve(tuple(segment_bytes.tolist()), tuple(step_bytes.tolist()))


def _plan_independent(cost: CostModel) -> Int64Array:
    """Bytes by gap of what no plan moves: inputs of reductions appear when ready, results go after their last use."""
    changes = [0] * (cost.request.num_segments + 2)
    for candidate in cost.request.candidates:
        if held_inputs(candidate):
            changes[candidate.earliest_launch] += candidate.input_bytes
        changes[min(candidate.last_use, cost.request.num_segments) + 1] -= candidate.output_bytes
    return np.cumsum(as_int64(changes))
