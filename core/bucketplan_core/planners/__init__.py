"""The planners, one protocol, in one ordered registry."""

from __future__ import annotations

from bucketplan_core.errors import PlannerUnavailable
from bucketplan_core.planners.auto import AutoPlanner
from bucketplan_core.planners.base import Planner, Proposal
from bucketplan_core.planners.simple import ModulePlanner, NonePlanner, SizePlanner

__all__ = ["PLANNERS", "Planner", "Proposal", "current_version", "find_planner"]

PLANNERS: tuple[Planner, ...] = (
    NonePlanner(),
    SizePlanner(),
    ModulePlanner(),
    AutoPlanner(),
)
"""Every version that this build can replay; the last of a strategy is the current one."""


def find_planner(version: str) -> Planner:
    """The planner that `version` names; raises `PlannerUnavailable` when this build does not hold it."""
    for planner in PLANNERS:
        if planner.version == version:
            return planner
    raise PlannerUnavailable(version, [planner.version for planner in PLANNERS])


def current_version(strategy: str) -> str:
    """The newest version of `strategy`, as `Options.planner` wants it; an unknown one raises `PlannerUnavailable`."""
    versions = [planner.version for planner in PLANNERS if planner.version.split("/", 1)[0] == strategy]
    if not versions:
        raise PlannerUnavailable(f"{strategy}/1", [planner.version for planner in PLANNERS])
    return versions[-1]
