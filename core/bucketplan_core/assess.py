"""What people should know of a decision: its simulated figures beside those of the rules, and how far the bound is.

The assessment is stored beside the decision and never compared between ranks. Everything in it is an integer, a text, a
list or a map; ratios are parts in a million.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bucketplan_core.bound import lower_bound_ns
from bucketplan_core.cost import CostModel
from bucketplan_core.errors import BucketplanError, PlanningError
from bucketplan_core.plan import Decision, Plan
from bucketplan_core.planners import current_version, find_planner
from bucketplan_core.planners.auto_place import backward_gap
from bucketplan_core.profile import CostProfile
from bucketplan_core.request import Request
from bucketplan_core.schedule import Placement, arrange_events
from bucketplan_core.simulate import Simulation, simulate, simulate_steps
from bucketplan_core.wire import WireValue

__all__ = ["assess", "gap_ppm", "rules_with_early_gathers", "simulated_figures"]

_RULES = (("none", "original"), ("size", "scheduled"), ("module", "scheduled"))
"""What a plan is compared with: the graph as traced, and the rules with their buckets issued ahead."""


def assess(
    request: Request, profile: CostProfile, decision: Decision, *, cost: CostModel | None = None
) -> dict[str, WireValue]:
    """Counts of the decision, and where hardware is known its simulated figures, those of the rules, and the bound.

    `baselines` holds `none` as traced and `size` and `module` as scheduled, at the request's caps; a rule that does not
    apply holds the reason under `unavailable`. Without figures `simulated` is None and `unsimulated` says why. `cost`
    is the request's cost model, where the caller has it.
    """
    packed = [bucket for bucket in decision.buckets if len(bucket.members) > 1]
    counts: dict[str, WireValue] = {
        "num_buckets": len(decision.buckets),
        "num_candidates": len(request.candidates),
        "num_fixed": len(request.fixed),
        "num_fused_buckets": len(packed),
        "packed_bytes": sum(request.candidates[m].full_bytes for bucket in packed for m in bucket.members),
        "profile": profile.digest,
    }
    try:
        cost = cost or CostModel.build(request, profile)
    except PlanningError as error:
        return counts | {"simulated": None, "unsimulated": str(error)}
    found = simulate(cost, decision)
    bound = lower_bound_ns(cost)
    return counts | {
        "baselines": {strategy: _baseline(request, profile, cost, strategy, at) for strategy, at in _RULES},
        "bound_ns": bound,
        "gap_ppm": gap_ppm(found.step_ns, bound),
        "simulated": simulated_figures(found),
        "uncosted": list(cost.uncosted),
    }


def rules_with_early_gathers(request: Request, profile: CostProfile, plan: Plan) -> tuple[str, ...]:
    """Rules beside an `auto` plan with a shorter step that gather for the backward pass where `auto` never does.

    That is before the last first use of a forward gather, see `backward_gap`. `request` has the options that made the
    plan; the steps are those of its assessment. Raises `PlannerUnavailable`.
    """
    found, simulated = plan.assessment.get("baselines"), plan.assessment.get("simulated")
    if not plan.decision.planner.startswith("auto/") or not isinstance(found, dict):
        return ()
    return tuple(
        strategy
        for strategy, at in _RULES
        if _is_faster(found.get(strategy), simulated) and _gathers_early(request, profile, strategy, at)
    )


def _is_faster(rule: WireValue, plan: WireValue) -> bool:
    rule_ns, plan_ns = (figures.get("step_ns") if isinstance(figures, dict) else None for figures in (rule, plan))
    return isinstance(rule_ns, int) and isinstance(plan_ns, int) and rule_ns < plan_ns


def _gathers_early(request: Request, profile: CostProfile, strategy: str, placement: str) -> bool:
    floor = backward_gap(request)
    return any(
        request.candidates[placed.members[0]].kind == "fsdp_all_gather_backward"
        and placed.launch < min(floor, *(request.candidates[m].latest_launch for m in placed.members))
        for placed in _rule(request, profile, strategy, placement)[1]
    )


def gap_ppm(step_ns: int, bound_ns: int) -> int:
    """How far a step is above its bound, in millionths of the bound, rounded up."""
    return -(-(step_ns - bound_ns) * 1_000_000 // bound_ns) if bound_ns else 0


def simulated_figures(found: Simulation) -> dict[str, WireValue]:
    """The figures of one simulation, ns and bytes."""
    return {
        "compute_ns": found.compute_ns,
        "copies_ns": found.copies_ns,
        "exposed_ns": found.exposed_ns,
        "launches_ns": found.launches_ns,
        "num_collectives": found.num_collectives,
        "peak_bytes": found.peak_bytes,
        "slowed_ns": found.slowed_ns,
        "step_ns": found.step_ns,
    }


def _baseline(
    request: Request, profile: CostProfile, cost: CostModel, strategy: str, placement: str
) -> dict[str, WireValue]:
    if strategy == "module" and all(candidate.scope is None for candidate in request.candidates):
        return {"placement": placement, "unavailable": "the request has no module scopes"}
    try:
        other, placements = _rule(request, profile, strategy, placement)
    except BucketplanError as error:
        return {"placement": placement, "unavailable": str(error)}
    members = [tuple(sorted(placement.members, key=request.payload_position)) for placement in placements]
    found = simulate_steps(cost, members, arrange_events(other, placements))
    return {"placement": placement} | simulated_figures(found)


def _rule(request: Request, profile: CostProfile, strategy: str, placement: str) -> tuple[Request, Sequence[Placement]]:
    """The request under a rule, and where the rule places its buckets; raises what the planner does."""
    planner = find_planner(current_version(strategy))
    options = replace(request.options, strategy=strategy, planner=planner.version, placement=placement)
    other = replace(request, options=options)
    return other, planner.propose(other, profile).placements
