"""Where the job meets bucketplan: one graph, one way of bucketing, one plan from the server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bucketplan_client.capture.describe import describe_graph
from bucketplan_client.rewrite.apply import apply_plan
from bucketplan_client.transport import PlanClient
from bucketplan_core.collectives import Options
from torch import fx, nn

from demojob.fsdp import ShardedGraph

__all__ = ["Bucketed", "bucket_graph"]

BUCKET_CAP_BYTES = 1_500_000
FIRST_BUCKET_CAP_BYTES = 300_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucketed:
    """A graph after its plan was applied, and what the plan did to it."""

    graph: ShardedGraph
    signature: str
    digest: str
    num_before: int
    num_after: int
    num_buckets: int
    packed_bytes: int

    def facts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__ if name != "graph"}


def bucket_graph(graph: ShardedGraph, strategy: str, *, model: nn.Module, client: PlanClient, cache: Path) -> Bucketed:
    """Bucket `graph` in place by `strategy` as the server plans it."""
    options = Options(
        strategy=strategy,
        planner=f"{strategy}/1",
        bucket_cap_bytes=BUCKET_CAP_BYTES,
        first_bucket_cap_bytes=FIRST_BUCKET_CAP_BYTES,
    )
    from types import SimpleNamespace
    tops={}
    for n in graph.param_names: tops.setdefault('.'.join(n.split('.')[:2]) if n.startswith('blocks') else 'root',set()).add(n)
    scopes=[SimpleNamespace(name=k,param_names=frozenset(v)) for k,v in tops.items()]
    description = describe_graph(graph.gm, options=options, roles=graph.roles, scopes=scopes)
    num_before = _num_launches(graph.gm)
    plan = client.plan(description.request, description.profile)
    apply_plan(description, plan)
    graph.gm.recompile()
    candidates = description.request.candidates
    fused = [bucket for bucket in plan.decision.buckets if len(bucket.members) > 1]
    return Bucketed(
        graph=graph,
        signature=description.signature,
        digest=plan.digest,
        num_before=num_before,
        num_after=_num_launches(graph.gm),
        num_buckets=len(fused),
        packed_bytes=sum(candidates[member].full_bytes for bucket in fused for member in bucket.members),
    )


def _num_launches(gm: fx.GraphModule) -> int:
    return sum("comm_type" in node.meta and node.op == "call_function" for node in gm.graph.nodes)
