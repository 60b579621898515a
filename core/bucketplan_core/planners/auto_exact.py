"""What no exact lane planner can answer for: whatever else may hold up its lane's stream or the compute beside it."""

from __future__ import annotations

from bucketplan_core.cost import CostModel

__all__ = ["MAX_EXACT_MEMBERS", "obstacles_to_exactness"]

MAX_EXACT_MEMBERS = 4_000
"""Most members of a lane that exact planners take; their time grows with the square."""


def obstacles_to_exactness(cost: CostModel, lane_index: int) -> list[str]:
    """What keeps a planner that looks at this lane alone from being the simulator's truth; empty where nothing does."""
    request = cost.request
    members = request.lanes[lane_index].members
    reasons = []
    if len(request.lanes) > 1:
        reasons.append("other lanes share its stream or hold up compute")
    if request.fixed:
        reasons.append("fixed collectives hold up its stream or compute")
    if cost.hardware.slowdown_permille:
        reasons.append("communication in flight slows compute down")
    if any(request.candidates[m].depends_on for m in members):
        reasons.append("members depend on other collectives")
    if len(members) > MAX_EXACT_MEMBERS:
        reasons.append(f"more than {MAX_EXACT_MEMBERS} members")
    return reasons
