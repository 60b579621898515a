"""The rules that make a decision safe to store and to apply, checked on its schedule over all lanes at once.

| rule | holds when |
|---|---|
| `signature` | the decision was made for this request |
| `complete` | every candidate is in exactly one bucket; every bucket and fixed collective has exactly its steps |
| `lane` | the members of a bucket share the bucket's lane, and the rewrite fits its kind |
| `launch-window` | a launch lies in every member's [earliest_launch, latest_launch] |
| `dependency` | the wait of every collective that feeds a member precedes the member's launch |
| `wait-window` | a wait lies not after any member's latest_wait |
| `launch-before-wait` | a bucket's launch precedes its wait |
| `fixed` | fixed collectives keep their gaps and their order |

Since the steps are one total order that satisfies `dependency` and `launch-before-wait`, the buckets contracted by
membership cannot wait for each other in a circle.
"""

from __future__ import annotations

from bucketplan_core.collectives import Lane
from bucketplan_core.errors import IllegalPlan
from bucketplan_core.plan import Bucket, Decision, StepOp
from bucketplan_core.request import Request

__all__ = ["RULES", "check_decision", "fitting_rewrite", "fixed_schedule"]

RULES = (
    "signature",
    "complete",
    "lane",
    "launch-before-wait",
    "fixed",
    "launch-window",
    "wait-window",
    "dependency",
)
"""In the order in which they are checked; the first that is broken is named."""


def fitting_rewrite(kind: str, num_members: int) -> str:
    """The rewrite that fuses `num_members` candidates of `kind`: `none` for one, else by kind."""
    if num_members == 1:
        return "none"
    if kind == "fsdp_reduce_scatter":
        return "scatter"
    return "reduce" if kind == "dp_all_reduce" else "gather"


def check_decision(request: Request, decision: Decision) -> None:
    """Raise `IllegalPlan` naming rule, bucket and members unless the graph of `request` may run as `decision` says."""
    if decision.signature != request.signature:
        raise IllegalPlan(
            "signature",
            f"made for {decision.signature}, the graph is {request.signature}",
        )
    bucket_of = _check_membership(request, decision)
    launched, waited = _check_steps(request, decision)
    _check_windows(request, decision, launched, waited)
    _check_dependencies(request, decision, bucket_of, launched, waited)


def _check_membership(request: Request, decision: Decision) -> list[int]:
    bucket_of = [-1] * len(request.candidates)
    seen_ids: set[str] = set()
    for index, bucket in enumerate(decision.buckets):
        if bucket.id in seen_ids:
            raise IllegalPlan("complete", "two buckets have this id", bucket=bucket.id)
        seen_ids.add(bucket.id)
        if not bucket.members:
            raise IllegalPlan("complete", "the bucket has no members", bucket=bucket.id)
        for member in bucket.members:
            if not 0 <= member < len(bucket_of):
                raise IllegalPlan("complete", "the candidate does not exist", bucket=bucket.id, members=[member])
            if bucket_of[member] != -1:
                other = decision.buckets[bucket_of[member]].id
                where = "twice" if other == bucket.id else f"in {other!r} too"
                raise IllegalPlan("complete", f"the candidate is {where}", bucket=bucket.id, members=[member])
            bucket_of[member] = index
        _check_lane(request, bucket)
    if -1 in bucket_of:
        missing = [index for index, bucket_index in enumerate(bucket_of) if bucket_index == -1]
        raise IllegalPlan(
            "complete", f"{len(missing)} candidates are in no bucket, first of all these", members=missing[:8]
        )
    return bucket_of


def _check_lane(request: Request, bucket: Bucket) -> None:
    if not 0 <= bucket.lane < len(request.lanes):
        raise IllegalPlan("lane", f"lane {bucket.lane} does not exist", bucket=bucket.id)
    lane = request.lanes[bucket.lane]
    for member in bucket.members:
        if request.lane_of[member] != bucket.lane:
            other = request.lanes[request.lane_of[member]]
            raise IllegalPlan(
                "lane",
                f"the candidate is of lane {request.lane_of[member]} ({_describe(other)}), the bucket of lane "
                f"{bucket.lane} ({_describe(lane)})",
                bucket=bucket.id,
                members=list(dict.fromkeys([bucket.members[0], member])),
            )
    expected = fitting_rewrite(lane.kind, len(bucket.members))
    if bucket.rewrite != expected:
        raise IllegalPlan("lane", f"rewrite {bucket.rewrite!r} does not fit, {expected!r} does", bucket=bucket.id)


def _describe(lane: Lane) -> str:
    op = "" if lane.reduce_op is None else f" {lane.reduce_op}"
    return f"{lane.kind}{op} of {lane.wire_dtype} on {lane.group!r}, {lane.group_size} ranks, {lane.device_type}"


def _check_steps(request: Request, decision: Decision) -> tuple[dict[int, int], dict[int, int]]:
    """Positions of launch and wait in the total order, by bucket index, and below zero (``~k``) by fixed collective."""
    launched: dict[int, int] = {}
    waited: dict[int, int] = {}
    fixed_events: list[tuple[int, StepOp, int]] = []
    gap = 0
    for position, step in enumerate(decision.steps):
        if step.gap < gap:
            raise IllegalPlan("complete", f"step {position} stands at gap {step.gap}, after gap {gap}")
        if step.gap > request.num_segments:
            raise IllegalPlan(
                "complete", f"step {position} stands at gap {step.gap}, the last is {request.num_segments}"
            )
        gap = step.gap
        is_fixed = step.op in (StepOp.FIXED_LAUNCH, StepOp.FIXED_WAIT)
        if not 0 <= step.target < (len(request.fixed) if is_fixed else len(decision.buckets)):
            what = "fixed collective" if is_fixed else "bucket"
            raise IllegalPlan("complete", f"step {position} names {what} {step.target}, which does not exist")
        into = launched if step.op in (StepOp.LAUNCH, StepOp.FIXED_LAUNCH) else waited
        key = ~step.target if is_fixed else step.target
        if key in into:
            raise IllegalPlan("complete", f"step {position} repeats step {into[key]}")
        into[key] = position
        if is_fixed:
            fixed_events.append((step.gap, step.op, step.target))
    for index, bucket in enumerate(decision.buckets):
        if index not in launched or index not in waited:
            raise IllegalPlan("complete", "the bucket lacks its launch or its wait", bucket=bucket.id)
        if launched[index] >= waited[index]:
            raise IllegalPlan(
                "launch-before-wait",
                f"the wait is step {waited[index]}, the launch step {launched[index]}",
                bucket=bucket.id,
                members=bucket.members[:2],
            )
    _check_fixed(request, fixed_events)
    return launched, waited


def _check_fixed(request: Request, events: list[tuple[int, StepOp, int]]) -> None:
    expected = fixed_schedule(request)
    for found, (gap, op, index) in zip(events, expected, strict=False):
        if found != (gap, op, index):
            verb = "launch" if op is StepOp.FIXED_LAUNCH else "wait"
            raise IllegalPlan(
                "fixed",
                f"the {verb} of fixed collective {index} ({request.fixed[index].kind}) at gap {gap} was moved, "
                f"reordered or left out",
                members=[len(request.candidates) + index],
            )
    if len(events) != len(expected):
        raise IllegalPlan("fixed", f"{len(expected)} launches and waits of fixed collectives, {len(events)} steps")


def fixed_schedule(request: Request) -> list[tuple[int, StepOp, int]]:
    """(gap, op, index) of every fixed launch and wait, in their original order."""
    events: list[tuple[int, int, StepOp, int]] = []
    for index, fixed in enumerate(request.fixed):
        events.append((fixed.launch_order, fixed.launch, StepOp.FIXED_LAUNCH, index))
        if fixed.wait is not None and fixed.wait_order is not None:
            events.append((fixed.wait_order, fixed.wait, StepOp.FIXED_WAIT, index))
    return [(gap, op, index) for _, gap, op, index in sorted(events)]


def _check_windows(
    request: Request,
    decision: Decision,
    launched: dict[int, int],
    waited: dict[int, int],
) -> None:
    for index, bucket in enumerate(decision.buckets):
        launch = decision.steps[launched[index]].gap
        wait = decision.steps[waited[index]].gap
        for member in bucket.members:
            candidate = request.candidates[member]
            if not candidate.earliest_launch <= launch <= candidate.latest_launch:
                raise IllegalPlan(
                    "launch-window",
                    f"launch at gap {launch} is outside [{candidate.earliest_launch}, {candidate.latest_launch}]",
                    bucket=bucket.id,
                    members=[member],
                )
            if wait > candidate.latest_wait:
                raise IllegalPlan(
                    "wait-window",
                    f"wait at gap {wait} comes after latest_wait {candidate.latest_wait}",
                    bucket=bucket.id,
                    members=[member],
                )


def _check_dependencies(
    request: Request,
    decision: Decision,
    bucket_of: list[int],
    launched: dict[int, int],
    waited: dict[int, int],
) -> None:
    num_candidates = len(request.candidates)

    def key_of(collective: int) -> int:
        return bucket_of[collective] if collective < num_candidates else ~(collective - num_candidates)

    for index in range(request.num_collectives):
        is_candidate = index < num_candidates
        edges = (
            request.candidates[index].depends_on if is_candidate else request.fixed[index - num_candidates].depends_on
        )
        for edge in edges:
            if waited[key_of(edge)] >= launched[key_of(index)]:
                named = (
                    decision.buckets[bucket_of[index if is_candidate else edge]].id
                    if is_candidate or (edge < num_candidates)
                    else None
                )
                raise IllegalPlan(
                    "dependency",
                    "the result of the first must be waited for before the second is launched",
                    bucket=named,
                    members=[edge, index],
                )
