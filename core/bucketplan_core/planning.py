"""From a request to its plan: the one function that servers, clients in fallback and audits all call."""

from __future__ import annotations

from bucketplan_core.assess import assess
from bucketplan_core.legality import check_decision
from bucketplan_core.pause import collector_paused
from bucketplan_core.plan import Plan
from bucketplan_core.planners import find_planner
from bucketplan_core.profile import CostProfile
from bucketplan_core.request import Request
from bucketplan_core.schedule import decide

__all__ = ["make_plan"]


@collector_paused()
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
        decision=decision, assessment=assess(request, bound, decision, cost=proposal.cost) | dict(proposal.notes)
    )
