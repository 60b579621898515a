"""Data model, signature, legality and planners of bucketplan: needs neither torch nor a web framework."""

from bucketplan_core.collectives import Candidate, FixedCollective, Group, Options
from bucketplan_core.errors import BucketplanError
from bucketplan_core.plan import Plan
from bucketplan_core.planning import make_plan
from bucketplan_core.profile import CostProfile
from bucketplan_core.request import Request

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
