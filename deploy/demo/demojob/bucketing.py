"""Where the job meets bucketplan: one graph, one way of bucketing, one plan from the server."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from bucketplan_client import FsdpBucketingPass, PlanClient, build_module_bucket_plans
from bucketplan_core.collectives import Options
from bucketplan_core.plan import Plan
from bucketplan_core.planners import current_version
from bucketplan_core.profile import CostProfile
from bucketplan_core.request import Request
from demojob.fsdp import ShardedGraph

__all__ = ["BUCKET_CAP_BYTES", "FIRST_BUCKET_CAP_BYTES", "MODULE_SCOPES", "Bucketed", "bucket_graph"]

BUCKET_CAP_BYTES = 1_500_000
"""About two blocks of the demo's model; what suits a real model is hundreds of megabytes."""
FIRST_BUCKET_CAP_BYTES = 300_000
MODULE_SCOPES = ("blocks.*", ("embedding", "norm"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucketed:
    """What a plan did to a graph: collectives a step before and after, buckets of several members, bytes packed."""

    signature: str
    digest: str
    num_before: int
    num_after: int
    num_buckets: int
    packed_bytes: int

    def facts(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(slots=True)
class _Remembering:
    """Gives a client's plans, and keeps the last one for the report."""

    client: PlanClient
    last: Plan | None = None

    @property
    def address(self) -> str:
        return self.client.address

    def plan(self, request: Request, profile: CostProfile | None = None) -> Plan:
        self.last = self.client.plan(request, profile)
        return self.last


def bucket_graph(graph: ShardedGraph, strategy: str, *, model: nn.Module, client: PlanClient) -> Bucketed:
    """Bucket `graph` in place by `strategy`, as the server plans it and as all ranks agree."""
    plans = _Remembering(client)
    bucketing = FsdpBucketingPass(
        plans,
        options=Options(
            strategy=strategy,
            planner=current_version(strategy),
            bucket_cap_bytes=BUCKET_CAP_BYTES,
            first_bucket_cap_bytes=FIRST_BUCKET_CAP_BYTES,
        ),
        roles=graph.roles,
        scopes=build_module_bucket_plans(model, MODULE_SCOPES) if strategy == "module" else (),
        job="demo",
    )
    num_before = _num_launches(graph)
    bucketing(graph.gm)
    assert plans.last is not None, "the pass left the graph alone although it runs on several ranks"
    statistics = [graph.gm.meta[key] for key in ("fsdp_ag_bucketing", "fsdp_rs_bucketing")]
    return Bucketed(
        signature=plans.last.decision.signature,
        digest=plans.last.digest,
        num_before=num_before,
        num_after=_num_launches(graph),
        num_buckets=sum(entry["buckets"] for entry in statistics),
        packed_bytes=sum(entry.get("copy_out_bytes", 0) + entry.get("packed_input_bytes", 0) for entry in statistics),
    )


def _num_launches(graph: ShardedGraph) -> int:
    return sum("comm_type" in node.meta for node in graph.gm.graph.nodes)
