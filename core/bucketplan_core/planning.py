"""From a request to its plan: the one function that servers, clients in fallback and audits all call."""

from __future__ import annotations

from bucketplan_core.legality import check_decision
from bucketplan_core.plan import Decision, Plan
from bucketplan_core.planners import find_planner
from bucketplan_core.profile import CostProfile
from bucketplan_core.request import Request
from bucketplan_core.schedule import decide
from bucketplan_core.wire import WireValue

__all__ = ["make_plan"]


def make_plan(request: Request, profile: CostProfile | None = None) -> Plan:
    """The plan of `request` under its bound cost profile; the same bytes on every machine.

    Raises `PlannerUnavailable` for a planner version that this build lacks, `PlanningError` for options that cannot be
    met, `DecodeError` for a profile of another request. The decision has passed `check_decision`.
    """
    planner = find_planner(request.options.planner)
    bound = profile if profile is not None else CostProfile.empty(request)
    bound.check(request)
    proposal = planner.propose(request, bound)
    decision = decide(
        request,
        planner.version,
        proposal.placements,
        profile=bound.digest if planner.uses_profile else None,
    )
    check_decision(request, decision)
    return Plan(
        decision=decision, assessment=_assess(request, decision) | {"profile": bound.digest} | dict(proposal.notes)
    )


def _assess(request: Request, decision: Decision) -> dict[str, WireValue]:
    """What the plan does, counted: collectives before and after, bytes that packing copies."""
    packed = [bucket for bucket in decision.buckets if len(bucket.members) > 1]
    return {
        "num_buckets": len(decision.buckets),
        "num_candidates": len(request.candidates),
        "num_fixed": len(request.fixed),
        "num_fused_buckets": len(packed),
        "packed_bytes": sum(request.candidates[m].full_bytes for bucket in packed for m in bucket.members),
    }
