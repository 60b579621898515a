"""Graphs in HyperParallel's style on gloo ranks, trained before and after the bucketing pass; plain data comes back."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx

from bucketplan_client import open_attempt
from bucketplan_client.arguments import BadArgument
from bucketplan_client.hyperparallel import BucketingPass, run
from tests.support.demo_ranks import batch_of, sharded_job
from tests.support.fsdp_model import SMALL, VIEWS

__all__ = ["bucket", "bucket_in_attempt", "free_storage", "in_style"]

_c10d = torch.ops._c10d_functional


def free_storage(tensor: Tensor) -> None:
    """Free a gathered parameter, as the side-effecting call in a graph does."""
    tensor.untyped_storage().resize_(0)


fx.node._side_effectful_functions.add(free_storage)


def in_style(gm: fx.GraphModule) -> int:
    """Make an annotated graph what HyperParallel's passes leave behind; returns the number of frees.

    Inserted calls are overload packets without fake values, and a gathered parameter that the backward gathers again
    is freed behind its last forward reader.
    """
    regathered = {
        node.meta["param_name"] for node in gm.graph.nodes if node.meta.get("comm_type") == "fsdp_all_gather_backward"
    }
    num_frees = 0
    position = {node: index for index, node in enumerate(gm.graph.nodes)}
    for node in list(gm.graph.nodes):
        if "comm_type" not in node.meta and "wait_for" not in node.meta:
            continue
        node.target = node.target.overloadpacket
        node.meta.pop("val", None)
        if node.meta.get("comm_type") == "fsdp_all_gather" and node.meta["param_name"] in regathered:
            (wait,) = node.users
            with gm.graph.inserting_after(max(_readers(wait), key=position.__getitem__)):
                free = gm.graph.call_function(free_storage, (wait,))
            free.meta |= {"comm_type": "fsdp_reshard_free", "param_name": node.meta["param_name"]}
            free.meta["fsdp_ag_node"] = node.name
            num_frees += 1
    gm.graph.lint()
    gm.recompile()
    return num_frees


def _readers(wait: fx.Node) -> list[fx.Node]:
    found, stack = [wait], [wait]
    while stack:
        for user in stack.pop().users:
            if user.op != "output" and user not in found:
                found.append(user)
                if user.target in VIEWS:
                    stack.append(user)
    return found


def bucket_in_attempt(case: str, given: str) -> dict[str, Any]:
    """One run of the pass in an attempt; `given` says what it is bound to, `case` what becomes of the attempt.

    Rank 1 alone has the kill switch, ``at the opening`` or ``afterwards``; or there is ``no server``.
    """
    odd = dist.get_rank() == 1
    model, graph, _ = sharded_job(SMALL, "two_groups")
    in_style(graph.gm)
    before = _launches(graph.gm)
    choice: Any = "unbucketed" if case == "no server" else "local"
    attempt = open_attempt(
        None,
        groups={"fsdp": dist.group.WORLD},
        job="hyperparallel",
        on_unavailable=choice,
        disabled=odd and case == "at the opening",
    )
    with attempt, pytest.MonkeyPatch.context() as patch:
        if odd and case == "afterwards":
            patch.setenv("BUCKETPLAN_DISABLE", "1")
        source: Any = attempt if given == "attempt" else attempt.plans
        config = SimpleNamespace(fsdp_bucketing=True, fsdp_enabled=True, dp_mode="fsdp")
        try:
            BucketingPass(source, deadline_s=60.0).run(
                graph.gm, config, model=model, expert_param_names=("blocks.1.experts",)
            )
        except BadArgument as error:
            return {"option": error.option, "unchanged": _launches(graph.gm) == before}
        return {"bucketed": attempt.bucketed, "unchanged": _launches(graph.gm) == before}


def bucket(layout: str, config: dict[str, Any], keywords: dict[str, Any]) -> dict[str, Any]:
    """Train two steps with the graph as it was and with the rewritten one, from the same shards."""
    model, graph, trainer = sharded_job(SMALL, layout)
    num_frees = in_style(graph.gm)
    rewritten = copy.deepcopy(trainer)
    before = _launches(graph.gm)
    passed = run(rewritten.graph.gm, SimpleNamespace(**config), model=model, parallel_plan=None, **keywords)
    assert passed is rewritten.graph.gm
    losses = []
    for job in (trainer, rewritten):
        losses.append([job.step(*batch_of(SMALL, step, dist.get_rank())).item() for step in range(2)])
    frees = [node for node in rewritten.graph.gm.graph.nodes if node.target is free_storage]
    names = {node.name for node in rewritten.graph.gm.graph.nodes}
    return {
        "losses": losses,
        "shards": all(torch.equal(a, b) for a, b in zip(trainer.shards, rewritten.shards, strict=True)),
        "before": before,
        "after": _launches(rewritten.graph.gm),
        "frees": (num_frees, len(frees)),
        "frees_name_launches": all(node.meta["fsdp_ag_node"] in names for node in frees),
        "statistics": {key: value for key, value in rewritten.graph.gm.meta.items() if key.endswith("bucketing")},
    }


def _launches(gm: fx.GraphModule) -> dict[str, int]:
    found: dict[str, int] = {}
    for node in gm.graph.nodes:
        kind = node.meta.get("comm_type", "")
        if kind.startswith(("fsdp_all", "fsdp_reduce", "dp_all")):
            key = f"{kind}@{node.meta['comm_group']}"
            found[key] = found.get(key, 0) + 1
    return found
