"""The simulated step of a stored plan as a Chrome trace, inside a planning process: what ran on which stream, and when.

The format is the one that ui.perfetto.dev and chrome://tracing open: complete events in microseconds on tracks that
are named by metadata events. Times are whole microseconds, start and end each rounded down, so that boxes that touch
still touch; the exact nanoseconds stand in each event's `args`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from bucketplan_core.cost import CostModel
from bucketplan_core.plan import Decision, Plan
from bucketplan_core.planners import current_version, find_planner
from bucketplan_core.profile import CostProfile
from bucketplan_core.request import Request
from bucketplan_core.schedule import decide
from bucketplan_core.simulate import COMPUTE_STREAM, simulate
from bucketplan_core.wire import WireValue
from bucketplan_server.planner.planned import Stored

__all__ = ["trace_step"]

BEFORE, AFTER = 1, 2
"""Process ids of the two steps in a trace."""


def trace_step(stored: Stored) -> dict[str, WireValue]:
    """The step before (every collective alone, placed as traced) and after (the stored plan), one process each.

    Raises `PlanningError` for a request without hardware figures.
    """
    request = Request.decode(stored.request)
    profile = CostProfile.decode(stored.profile, request)
    plan = Plan.decode(stored.plan).decision
    cost = CostModel.build(request, profile)
    events: list[WireValue] = []
    steps: dict[str, WireValue] = {}
    for process, label, decision in (
        (BEFORE, "before: every collective alone, as traced", _as_traced(request, profile)),
        (AFTER, f"after: the plan of {plan.planner}", plan),
    ):
        found = simulate(cost, decision, trace=True)
        steps["before_step_ns" if process == BEFORE else "after_step_ns"] = found.step_ns
        streams = {COMPUTE_STREAM: 0}
        for name in sorted({event.stream for event in found.events} - {COMPUTE_STREAM}):
            streams[name] = len(streams)
        events += _named(process, label, streams)
        buckets = {bucket.id: bucket.members for bucket in decision.buckets}
        for event in found.events:
            args: dict[str, WireValue] = {"duration_ns": event.duration_ns, "start_ns": event.start_ns}
            if event.category == "collective":
                args["parameters"] = [request.candidates[m].param_name for m in buckets[event.name]]
            starts, ends = event.start_ns // 1_000, (event.start_ns + event.duration_ns) // 1_000
            events.append(
                {
                    "args": args,
                    "cat": event.category,
                    "dur": ends - starts,
                    "name": event.name,
                    "ph": "X",
                    "pid": process,
                    "tid": streams[event.stream],
                    "ts": starts,
                }
            )
    return {
        "displayTimeUnit": "ns",
        "otherData": {"digest": plan.digest, "signature": request.signature, **steps},
        "traceEvents": events,
    }


def _as_traced(request: Request, profile: CostProfile) -> Decision:
    planner = find_planner(current_version("none"))
    options = replace(request.options, strategy="none", planner=planner.version, placement="original")
    other = replace(request, options=options)
    return decide(other, planner.version, planner.propose(other, profile).placements)


def _named(process: int, label: str, streams: dict[str, int]) -> Iterable[WireValue]:
    def metadata(name: str, args: dict[str, WireValue], thread: int = 0) -> WireValue:
        return {"args": args, "name": name, "ph": "M", "pid": process, "tid": thread}

    yield metadata("process_name", {"name": label})
    yield metadata("process_sort_index", {"sort_index": process})
    for stream, thread in streams.items():
        yield metadata("thread_name", {"name": stream}, thread)
        yield metadata("thread_sort_index", {"sort_index": thread}, thread)
