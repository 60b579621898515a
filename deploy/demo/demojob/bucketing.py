"""Where the job meets bucketplan: an attempt is opened, then the pass rewrites the graph as the server planned it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn

from bucketplan_client import FsdpBucketingPass, PlanClient, build_module_bucket_plans
from bucketplan_client.cache import PlanCache
from bucketplan_client.opening import open_attempt
from bucketplan_client.passes import PlanSource
from bucketplan_core.plan import Plan
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
    """What a plan did to a graph: collectives a step before and after, buckets of several members, bytes packed.

    `taken_from` counts where this rank found its plan: the server, its cache, or the job's store, from another rank.
    """

    signature: str
    digest: str
    attempt: int | None
    taken_from: Mapping[str, int]
    num_before: int
    num_after: int
    num_buckets: int
    packed_bytes: int

    def facts(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(slots=True)
class _Remembering:
    """Gives the plans of an attempt, and keeps them for the report."""

    plans: PlanSource
    given: list[Plan] = field(default_factory=list)

    def plan(self, request: Request, profile: CostProfile | None = None) -> Plan:
        self.given.append(self.plans.plan(request, profile))
        return self.given[-1]


def bucket_graph(
    graph: ShardedGraph, strategy: str, *, model: nn.Module, client: PlanClient, cache: PlanCache
) -> Bucketed:
    """Bucket `graph` in place by `strategy`, as the server plans it and as all ranks agree.

    A real job opens one attempt when it starts; this one trains three ways, so each is a job of its own.
    """
    num_before = _num_launches(graph)
    job = f"demo-{strategy}"
    with open_attempt(
        client,
        job=job,
        groups={role: name for name, role in graph.roles.items()},
        options={
            "strategy": strategy,
            "bucket_cap_bytes": BUCKET_CAP_BYTES,
            "first_bucket_cap_bytes": FIRST_BUCKET_CAP_BYTES,
        },
        cache=cache,
        on_unavailable="error",
    ) as attempt:
        assert attempt.plans is not None, attempt.reason
        assert attempt.options is not None
        plans = _Remembering(attempt.plans)
        bucketing = FsdpBucketingPass(
            plans,
            options=attempt.options,
            roles=graph.roles,
            scopes=build_module_bucket_plans(model, MODULE_SCOPES) if strategy == "module" else (),
            job=job,
        )
        bucketing(graph.gm)
        (plan,) = plans.given
        statistics = [graph.gm.meta[key] for key in ("fsdp_ag_bucketing", "fsdp_rs_bucketing")]
        return Bucketed(
            signature=plan.decision.signature,
            digest=plan.digest,
            attempt=attempt.number,
            taken_from=dict(attempt.plans.taken),
            num_before=num_before,
            num_after=_num_launches(graph),
            num_buckets=sum(entry["buckets"] for entry in statistics),
            packed_bytes=sum(
                entry.get("copy_out_bytes", 0) + entry.get("packed_input_bytes", 0) for entry in statistics
            ),
        )


def _num_launches(graph: ShardedGraph) -> int:
    return sum("comm_type" in node.meta for node in graph.gm.graph.nodes)
