"""The fleet side of bucketplan: capture, transport, agreement and rewriting of fx graphs.

Importing this package costs next to nothing beside torch; each name is loaded from its module when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bucketplan_core.lazy import lazy_names

if TYPE_CHECKING:
    from bucketplan_client.cache import PlanCache
    from bucketplan_client.capture.binding import Description
    from bucketplan_client.capture.describe import describe_graph
    from bucketplan_client.errors import ClientError
    from bucketplan_client.opening import Attempt, open_attempt
    from bucketplan_client.passes import FsdpBucketingPass
    from bucketplan_client.rewrite.apply import apply_ag_buckets, apply_plan, apply_rs_buckets
    from bucketplan_client.scopes import ModuleScope, build_module_bucket_plans
    from bucketplan_client.transport import PlanClient

_HOMES = {
    "ClientError": "errors",
    "Description": "capture.binding",
    "Attempt": "opening",
    "FsdpBucketingPass": "passes",
    "PlanCache": "cache",
    "open_attempt": "opening",
    "ModuleScope": "scopes",
    "PlanClient": "transport",
    "apply_ag_buckets": "rewrite.apply",
    "apply_plan": "rewrite.apply",
    "apply_rs_buckets": "rewrite.apply",
    "build_module_bucket_plans": "scopes",
    "describe_graph": "capture.describe",
}

__all__ = [
    "Attempt",
    "ClientError",
    "Description",
    "FsdpBucketingPass",
    "ModuleScope",
    "PlanCache",
    "PlanClient",
    "apply_ag_buckets",
    "apply_plan",
    "apply_rs_buckets",
    "build_module_bucket_plans",
    "describe_graph",
    "open_attempt",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
