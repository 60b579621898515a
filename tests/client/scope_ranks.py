"""What one gloo rank does in the tests of graphs outside all scopes; run by `tests.support.gloo_pool`."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist

from bucketplan_client.errors import ClientError
from bucketplan_client.passes import FsdpBucketingPass, LocalPlans
from bucketplan_client.scopes import ModuleScope
from bucketplan_core import Options
from tests.client.pass_ranks import sharded_model

OUTSIDE = ModuleScope("elsewhere", frozenset({"elsewhere.weight"}))


def outside_all_scopes(odd: str) -> dict[str, Any]:
    """A pass whose scopes hold nothing of the graph, twice; the scopes of rank 1 are as `odd` says."""
    graph, _ = sharded_model()
    names = [node.meta["param_name"] for node in graph.gm.graph.nodes if node.meta.get("param_name")]
    scopes = {"outside": [OUTSIDE], "no scopes": [], "inside": [ModuleScope("all", frozenset(names))]}
    before = str(graph.gm.graph)
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]  # shorter than a class
    logger = logging.getLogger("bucketplan_client.passes")
    logger.addHandler(handler)
    bucketing = FsdpBucketingPass(
        LocalPlans(),
        options=Options(strategy="module", planner="module/1"),
        roles=graph.roles,
        scopes=scopes["outside" if dist.get_rank() == 0 else odd],
        deadline_s=30.0,
    )
    kind = "none"
    try:
        bucketing(graph.gm)
        bucketing(graph.gm)
    except ClientError as error:
        kind = type(error).__name__
    finally:
        logger.removeHandler(handler)
    return {"kind": kind, "intact": str(graph.gm.graph) == before, "said": " ".join(said)}
