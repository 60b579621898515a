"""Data model, signature, legality and planners of bucketplan: needs neither torch nor a web framework.

Each name is loaded from its module when it is first used, so that a rank which fetches its plans loads no planner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bucketplan_core.lazy import lazy_names

if TYPE_CHECKING:
    from bucketplan_core.collectives import Candidate, FixedCollective, Group, Options
    from bucketplan_core.errors import BucketplanError
    from bucketplan_core.plan import Plan
    from bucketplan_core.planning import make_plan
    from bucketplan_core.profile import CostProfile
    from bucketplan_core.request import Request

_HOMES = {
    "BucketplanError": "errors",
    "Candidate": "collectives",
    "CostProfile": "profile",
    "FixedCollective": "collectives",
    "Group": "collectives",
    "Options": "collectives",
    "Plan": "plan",
    "Request": "request",
    "make_plan": "planning",
}

__all__ = [
    "BucketplanError",
    "Candidate",
    "CostProfile",
    "FixedCollective",
    "Group",
    "Options",
    "Plan",
    "Request",
    "make_plan",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
