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

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bucketplan_core.cost import BucketCost, CostModel, Int64Array, as_int64, held_inputs
from bucketplan_core.plan import Decision, StepOp

__all__ = [
    "COMPUTE_STREAM",
    "Buffers",
    "CollectiveTimes",
    "MemoryCurve",
    "Run",
    "Simulation",
    "TraceEvent",
    "buffers_of",
    "memory_curve",
    "run_steps",
    "simulate",
    "simulate_steps",
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


@dataclass(frozen=True, slots=True, eq=False)
class MemoryCurve:
    """Bytes held in program order: `segment_bytes[k]` during segment k, `step_bytes[i]` the most that step i
    reaches.
    """

    segment_bytes: Int64Array
    step_bytes: Int64Array

    @property
    def peak_bytes(self) -> int:
        return max(int(self.segment_bytes.max(initial=0)), int(self.step_bytes.max(initial=0)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
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


Steps = Sequence[tuple[int, int, int]]
"""(gap, op, target) of every step in plan order; op as in `StepOp`."""


@dataclass(frozen=True, slots=True)
class Run:
    """What `run_steps` saw: per bucket and fixed collective (launched, started, finished) and (reached the wait,
    stood still).

    `gaps` holds (gap, time of arrival, time of leaving) of every gap that has a step, and of gap 0;
    `after` the time after each step.
    """

    step_ns: int
    launched: list[tuple[int, int, int]]
    waited: list[tuple[int, int]]
    fixed_launched: list[tuple[int, int, int]]
    fixed_waited: list[tuple[int, int]]
    gaps: list[tuple[int, int, int]]
    after: list[int]


@dataclass(frozen=True, slots=True)
class Buffers:
    """Bytes that a bucket takes and then gives back at its launch and at its wait."""

    taken_at_launch: int
    given_at_launch: int
    taken_at_wait: int
    given_at_wait: int


def simulate(cost: CostModel, decision: Decision, *, trace: bool = False) -> Simulation:
    """Run `decision`, which must be legal for the cost model's request; `trace` also records the timeline's boxes."""
    steps = [(step.gap, int(step.op), step.target) for step in decision.steps]
    found, run = _simulated(cost, [bucket.members for bucket in decision.buckets], steps)
    return replace(found, events=_trace(cost, decision, run)) if trace else found


def simulate_steps(cost: CostModel, members: Sequence[tuple[int, ...]], steps: Steps) -> Simulation:
    """Run `steps` over buckets of these members, each in registration order, which no decision was made of."""
    return _simulated(cost, members, steps)[0]


def _simulated(cost: CostModel, members: Sequence[tuple[int, ...]], steps: Steps) -> tuple[Simulation, Run]:
    costs = [cost.bucket(m) for m in members]
    streams = [cost.lane_streams[cost.lane_of[m[0]]] for m in members]
    run = run_steps(cost, costs, streams, steps)
    memory = memory_curve(cost, [buffers_of(cost, m) for m in members], steps)
    buckets = tuple(CollectiveTimes(*a, *b) for a, b in zip(run.launched, run.waited, strict=True))
    fixed = tuple(CollectiveTimes(*a, *b) for a, b in zip(run.fixed_launched, run.fixed_waited, strict=True))
    launches = len(costs) * cost.hardware.launch_ns
    copies = sum(c.launch_ns + c.wait_ns for c in costs) - launches
    exposed = sum(times.exposed_ns for times in (*buckets, *fixed))
    found = Simulation(
        step_ns=run.step_ns,
        compute_ns=cost.compute_ns,
        copies_ns=copies,
        launches_ns=launches,
        exposed_ns=exposed,
        slowed_ns=run.step_ns - cost.compute_ns - launches - copies - exposed,
        peak_bytes=memory.peak_bytes,
        num_collectives=len(costs),
        buckets=buckets,
        fixed=fixed,
        memory=memory,
        events=(),
    )
    return found, run


def run_steps(cost: CostModel, costs: Sequence[BucketCost], streams: Sequence[int], steps: Steps) -> Run:
    """Run `steps` over buckets of these costs on these streams; linear in steps."""
    prefix = cost.prefix_ns
    permille = cost.hardware.slowdown_permille
    free = [0] * (len(cost.streams) + 1)  # the last entry serves collectives of no known group, and stays 0
    launched = [(0, 0, 0)] * len(costs)
    waited = [(-1, 0)] * len(costs)
    fixed_launched = [(0, 0, 0)] * len(cost.fixed_ns)
    fixed_waited = [(-1, 0)] * len(cost.fixed_ns)
    gaps: list[tuple[int, int, int]] = []
    after: list[int] = []
    now = at = arrived = 0
    # Until when compute is slowed down. A stream is busy from now until it is free, without a hole: what it runs was
    # launched before now.
    slowed_until = 0

    def advance(now: int, work: int) -> int:
        if slowed_until <= now:
            return now + work
        busy = slowed_until - now
        stretched = work * (1_000 + permille)
        if stretched <= busy * 1_000:
            return now - (-stretched // 1_000)
        return now + busy - (-(stretched - busy * 1_000) // (1_000 + permille))

    for gap, op, target in steps:
        if gap != at:
            gaps.append((at, arrived, now))
            work = prefix[gap] - prefix[at]
            now = arrived = advance(now, work) if slowed_until > now else now + work
            at = gap
        if op == _LAUNCH:
            one = costs[target]
            now = advance(now, one.launch_ns) if slowed_until > now else now + one.launch_ns
            stream = streams[target]
            start = free[stream]
            if start < now:
                start = now
            end = free[stream] = start + one.comm_ns
            if permille and end > slowed_until:
                slowed_until = end
            launched[target] = (now, start, end)
        elif op == _WAIT:
            end = launched[target][2]
            if end > now:
                waited[target] = (now, end - now)
                now = end
            else:
                waited[target] = (now, 0)
            wait_ns = costs[target].wait_ns
            now = advance(now, wait_ns) if slowed_until > now else now + wait_ns
        elif op == _FIXED_LAUNCH:
            stream = cost.fixed_streams[target]
            start = max(now, free[stream]) if stream >= 0 else now
            end = start + cost.fixed_ns[target]
            if stream >= 0:
                free[stream] = end
                if permille and end > slowed_until:
                    slowed_until = end
            fixed_launched[target] = (now, start, end)
        else:
            end = fixed_launched[target][2]
            fixed_waited[target] = (now, max(end - now, 0))
            now = max(end, now)
        after.append(now)
    gaps.append((at, arrived, now))
    return Run(advance(now, prefix[-1] - prefix[at]), launched, waited, fixed_launched, fixed_waited, gaps, after)


_LAUNCH, _WAIT, _FIXED_LAUNCH = int(StepOp.LAUNCH), int(StepOp.WAIT), int(StepOp.FIXED_LAUNCH)


def _trace(cost: CostModel, decision: Decision, run: Run) -> tuple[TraceEvent, ...]:
    """The boxes of a run, by start: compute between gaps, copies, collectives on their streams, time stood still."""
    boxes: list[TraceEvent] = []

    def box(name: str, category: str, stream: str, start: int, end: int) -> None:
        if end > start:
            boxes.append(TraceEvent(name, category, stream, start, end - start))

    ends = [(gap, arrived) for gap, arrived, _ in run.gaps[1:]] + [(len(cost.segment_ns), run.step_ns)]
    for (gap, _, left), (until, arrived) in zip(run.gaps, ends, strict=True):
        box(f"segments {gap} to {until - 1}", "compute", COMPUTE_STREAM, left, arrived)
    arrivals = {gap: arrived for gap, arrived, _ in run.gaps}
    at_gap, reached = -1, 0
    for step, after in zip(decision.steps, run.after, strict=True):
        if step.gap != at_gap:
            at_gap, reached = step.gap, arrivals[step.gap]
        if step.op is StepOp.LAUNCH:
            bucket = decision.buckets[step.target]
            _, start, end = run.launched[step.target]
            box(f"pack {bucket.id}", "copy", COMPUTE_STREAM, reached, after)
            box(bucket.id, "collective", cost.streams[cost.lane_streams[bucket.lane]], start, end)
        elif step.op is StepOp.WAIT:
            name = decision.buckets[step.target].id
            begun, exposed = run.waited[step.target]
            box(f"wait {name}", "exposed", COMPUTE_STREAM, begun, begun + exposed)
            box(f"unpack {name}", "copy", COMPUTE_STREAM, begun + exposed, after)
        elif step.op is StepOp.FIXED_LAUNCH:
            stream = cost.fixed_streams[step.target]
            _, start, end = run.fixed_launched[step.target]
            if stream >= 0:
                name = f"fixed {step.target}: {cost.request.fixed[step.target].kind}"
                box(name, "fixed", cost.streams[stream], start, end)
        else:
            begun, exposed = run.fixed_waited[step.target]
            box(f"wait fixed {step.target}", "exposed", COMPUTE_STREAM, begun, begun + exposed)
        reached = after
    return tuple(sorted(boxes, key=lambda event: (event.start_ns, event.stream, event.name)))


def buffers_of(cost: CostModel, members: Sequence[int]) -> Buffers:
    """What the bucket of these candidates holds, by the table above."""
    candidates = cost.request.candidates
    alone = len(members) == 1
    inputs = cost.input_bytes[members[0]] if alone else sum([cost.input_bytes[m] for m in members])
    outputs = cost.output_bytes[members[0]] if alone else sum([cost.output_bytes[m] for m in members])
    if candidates[members[0]].is_gather:
        return Buffers(inputs + outputs, 0, 0 if alone else outputs, inputs if alone else inputs + outputs)
    held = sum(cost.input_bytes[m] for m in members if held_inputs(candidates[m]))
    return Buffers(outputs, 0, 0, held) if alone else Buffers(inputs + outputs, held, 0, inputs)


def memory_curve(cost: CostModel, buffers: Sequence[Buffers], steps: Steps) -> MemoryCurve:
    """Bytes held through these steps by buckets of these buffers."""
    num_segments = cost.request.num_segments
    beside = cost.static_bytes
    taken = [0] * len(steps)
    given = [0] * len(steps)
    for number, (_, op, target) in enumerate(steps):
        if op <= _WAIT:
            held = buffers[target]
            if op == _LAUNCH:
                taken[number], given[number] = held.taken_at_launch, held.given_at_launch
            else:
                taken[number], given[number] = held.taken_at_wait, held.given_at_wait
    freed = as_int64(given)
    after = np.cumsum(as_int64(taken) - freed)
    at = np.array([gap for gap, _, _ in steps], dtype=np.int64)
    step_bytes = after + freed + beside[at] + cost.live_at_gap[at]
    passed = np.searchsorted(at, np.arange(1, num_segments + 1))  # steps before segment k
    segment_bytes = np.insert(after, 0, 0)[passed] + beside[:num_segments] + as_int64(cost.live_bytes)
    return MemoryCurve(segment_bytes, step_bytes)
