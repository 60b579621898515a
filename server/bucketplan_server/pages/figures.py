"""What the pages of one plan show, computed in a process of its own: a page of buckets, the pictures, one bucket.

Everything that is answered is plain data of bounded size, since it crosses a pipe and becomes HTML.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from bucketplan_core.assess import rules_with_early_gathers
from bucketplan_core.collectives import Candidate, Options
from bucketplan_core.cost import CostModel
from bucketplan_core.errors import PlanningError
from bucketplan_core.explain import explain
from bucketplan_core.fields import Fields
from bucketplan_core.plan import Decision, Plan, StepOp
from bucketplan_core.planners import current_version, find_planner
from bucketplan_core.profile import CostProfile
from bucketplan_core.request import Request
from bucketplan_core.schedule import decide
from bucketplan_core.simulate import Simulation, simulate
from bucketplan_core.wire import WireValue, unpack
from bucketplan_server.pages.curve import Curve, thin
from bucketplan_server.pages.timeline import Timeline, draw_timeline
from bucketplan_server.planner.planned import Stored

__all__ = ["ORDERS", "BucketRow", "BucketView", "MemberRow", "PlanQuery", "PlanView", "view_bucket", "view_plan"]

Order = Literal["launch", "exposed", "bytes"]
ORDERS: Mapping[Order, str] = {"launch": "launch order", "exposed": "most exposed first", "bytes": "largest first"}
_NAMES_IN_A_ROW = 4
_MOST_REASONS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuery:
    """Which buckets to list: those with a member, module or id that contains `find`, `size` a page.

    Beyond the last page it is the last one. `options` made the plan, canonical bytes; None for those of the request.
    """

    find: str = ""
    order: Order = "launch"
    page: int = 1
    size: int = 50
    options: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketRow:
    """One bucket as a table row; `why` is core's explanation of it, None without figures of the hardware."""

    index: int
    id: str
    kind: str
    group: str
    dtype: str
    names: tuple[str, ...]
    num_members: int
    full_bytes: int
    launch: int
    wait: int
    why: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """A page of one plan. `before` is the same request under `none` as traced; both are drawn on one scale."""

    phase: str
    groups: tuple[Mapping[str, WireValue], ...]
    num_segments: int
    rows: tuple[BucketRow, ...]
    page: int
    num_pages: int
    num_found: int
    num_buckets: int
    skipped: tuple[tuple[str, int], ...]
    num_fixed: int
    sizes: tuple[int, ...]
    """Bytes of each bucket, in launch order."""
    exposed_before_ns: int | None
    before: Timeline | None
    after: Timeline | None
    memory_before: Curve | None
    memory_after: Curve | None
    limits: Mapping[str, Any] | None
    unsimulated: str | None
    early_rules: tuple[str, ...]
    """Rules that are faster than the plan and gather where `auto` never does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRow:
    """One candidate of a bucket, in payload order."""

    number: int
    candidate: Candidate
    full_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketView:
    """One bucket with a page of its members, and the indices of its neighbours in launch order."""

    row: BucketRow
    members: tuple[MemberRow, ...]
    page: int
    num_pages: int
    previous: int | None
    following: int | None
    num_segments: int


def view_plan(stored: Stored, query: PlanQuery) -> PlanView:
    """Everything on the page of one revision; raises core's errors."""
    request, profile, plan = _decode(stored)
    decision = plan.decision
    try:
        cost = CostModel.build(request, profile)
    except PlanningError as error:
        found = None
        unsimulated: str | None = str(error)
        before = after = memory_before = memory_after = exposed_before = None
    else:
        unsimulated = None
        found = simulate(cost, decision, trace=True)
        plain = _as_traced(request, profile)
        traced = simulate(cost, plain, trace=True)
        exposed_before = traced.exposed_ns
        scale = max(found.step_ns, traced.step_ns, 1)
        before = draw_timeline(cost, plain, traced, scale_ns=scale)
        after = draw_timeline(cost, decision, found, scale_ns=scale)
        memory_before, memory_after = thin(traced.memory, plain), thin(found.memory, decision)
    indices = _ordered(request, decision, found, query)
    shown, number, num_pages = _page(indices, query.page, query.size)
    tree = None if found is None else _explained(request, profile, plan, shown)
    reasons = Counter(fixed.skipped or "not a collective that may be fused" for fixed in request.fixed)
    return PlanView(
        phase=request.phase,
        groups=tuple(group.to_wire() for group in request.groups),
        num_segments=request.num_segments,
        rows=_rows(request, decision, shown, tree, query.find),
        page=number,
        num_pages=num_pages,
        num_found=len(indices),
        num_buckets=len(decision.buckets),
        skipped=tuple(reasons.most_common(_MOST_REASONS)),
        num_fixed=len(request.fixed),
        sizes=tuple(_full_bytes(request, decision, index) for index in _launch_order(decision)),
        exposed_before_ns=exposed_before,
        before=before,
        after=after,
        memory_before=memory_before,
        memory_after=memory_after,
        limits=None if tree is None else tree["limits"],
        unsimulated=unsimulated,
        early_rules=() if found is None else rules_with_early_gathers(_asked(request, query), profile, plan),
    )


def view_bucket(stored: Stored, index: int, page: int, size: int) -> BucketView | None:
    """One bucket of a revision, None where the decision has no bucket of this index; raises core's errors."""
    request, profile, plan = _decode(stored)
    decision = plan.decision
    if index >= len(decision.buckets):
        return None
    try:
        tree = _explained(request, profile, plan, [index])
    except PlanningError:
        tree = None
    order = _launch_order(decision)
    at = order.index(index)
    members, number, num_pages = _page(decision.buckets[index].members, page, size)
    return BucketView(
        row=_rows(request, decision, [index], tree, "")[0],
        members=tuple(
            MemberRow(number=m, candidate=request.candidates[m], full_bytes=request.full_bytes[m]) for m in members
        ),
        page=number,
        num_pages=num_pages,
        previous=order[at - 1] if at else None,
        following=order[at + 1] if at + 1 < len(order) else None,
        num_segments=request.num_segments,
    )


def _decode(stored: Stored) -> tuple[Request, CostProfile, Plan]:
    request = Request.decode(stored.request)
    return request, CostProfile.decode(stored.profile, request), Plan.decode(stored.plan)


def _page(found: Sequence[int], page: int, size: int) -> tuple[Sequence[int], int, int]:
    """What stands on a page, its number, which is at most that of the last, and how many pages there are."""
    num_pages = max(1, -(-len(found) // size)) if size else 1
    page = min(page, num_pages)
    return found[(page - 1) * size : page * size], page, num_pages


def _asked(request: Request, query: PlanQuery) -> Request:
    if query.options is None:
        return request
    return request.with_options(Options.read(Fields(unpack(query.options), "options")))


def _as_traced(request: Request, profile: CostProfile) -> Decision:
    """Every collective alone where the graph had it."""
    planner = find_planner(current_version("none"))
    options = replace(request.options, strategy="none", planner=planner.version, placement="original")
    other = replace(request, options=options)
    return decide(other, planner.version, planner.propose(other, profile).placements)


def _explained(request: Request, profile: CostProfile, plan: Plan, only: Sequence[int]) -> dict[str, Any]:
    budget = plan.assessment.get("memory_budget_bytes")
    found = explain(
        request,
        profile,
        plan.decision,
        memory_budget_bytes=budget if type(budget) is int else None,
        only=frozenset(only),
    )
    return dict(found)


def _ordered(request: Request, decision: Decision, found: Simulation | None, query: PlanQuery) -> list[int]:
    order = _launch_order(decision)
    if query.find:
        order = [index for index in order if _matches(request, decision, index, query.find)]
    if query.order == "exposed" and found is not None:
        order.sort(key=lambda index: -found.buckets[index].exposed_ns)
    elif query.order == "bytes":
        order.sort(key=lambda index: -_full_bytes(request, decision, index))
    return order


def _full_bytes(request: Request, decision: Decision, index: int) -> int:
    return sum(request.full_bytes[m] for m in decision.buckets[index].members)


def _launch_order(decision: Decision) -> list[int]:
    return [step.target for step in decision.steps if step.op is StepOp.LAUNCH]


def _matches(request: Request, decision: Decision, index: int, text: str) -> bool:
    bucket = decision.buckets[index]
    return text in bucket.id or any(_named(request.candidates[m], text) for m in bucket.members)


def _named(candidate: Candidate, text: str) -> bool:
    return text in (candidate.param_name or "") or any(text in name for name in candidate.module_fqns)


def _rows(
    request: Request, decision: Decision, indices: Sequence[int], tree: Mapping[str, Any] | None, find: str
) -> tuple[BucketRow, ...]:
    launches = {step.target: step.gap for step in decision.steps if step.op is StepOp.LAUNCH}
    waits = {step.target: step.gap for step in decision.steps if step.op is StepOp.WAIT}
    # Explanations come in the decision's order of buckets, whatever order they are listed in.
    why: dict[int, Any] = {} if tree is None else dict(zip(sorted(indices), tree["buckets"], strict=True))
    rows = []
    for index in indices:
        bucket = decision.buckets[index]
        lane = request.lanes[bucket.lane]
        # What was looked for stands first, so that it is among the names shown.
        members = sorted(bucket.members, key=lambda m: bool(find) and not _named(request.candidates[m], find))
        rows.append(
            BucketRow(
                index=index,
                id=bucket.id,
                kind=lane.kind,
                group=lane.group,
                dtype=lane.wire_dtype,
                names=tuple(_name(request.candidates[m], m) for m in members[:_NAMES_IN_A_ROW]),
                num_members=len(bucket.members),
                full_bytes=_full_bytes(request, decision, index),
                launch=launches[index],
                wait=waits[index],
                why=why.get(index),
            )
        )
    return tuple(rows)


def _name(candidate: Candidate, number: int) -> str:
    return candidate.param_name or ", ".join(candidate.module_fqns) or f"candidate {number}"
