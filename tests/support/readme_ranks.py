"""What gloo ranks do to run the snippets of README.md as they are written there; plain data comes back."""

from __future__ import annotations

import contextlib
import copy
import os
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.device_mesh import init_device_mesh

from bucketplan_client import PlanClient, open_attempt
from tests.support import compile_models
from tests.support.compile_ranks import Step, no_graph_caches, step, worst_difference
from tests.support.demo_ranks import batch_of, sharded_job
from tests.support.fsdp_model import SMALL
from tests.support.hyperparallel_ranks import in_style

__all__ = ["hyperparallel", "own_pass", "torchtitan", "under_compile"]


def under_compile(snippet: str, address: str) -> dict[str, Any]:
    """The snippet for torch.compile on a small sharded model, beside one eager step."""
    os.environ["BUCKETPLAN_SERVER"] = address
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    built = compile_models.build("smallest")
    eager = step(built.model, built.batch, built.model)
    trained: list[Step] = []

    def train(compiled: Callable[..., Tensor]) -> None:
        trained.append(step(compiled, built.batch, built.model))

    torch._dynamo.reset()
    try:
        with no_graph_caches():
            exec(snippet, {"mesh": mesh, "model": built.model, "train": train})
    finally:
        del os.environ["BUCKETPLAN_SERVER"]
        torch._dynamo.reset()
    return {
        "losses": (eager.loss, trained[0].loss),
        "worst_gradient": worst_difference(eager, trained[0]),
        "launches": (eager.launches, trained[0].launches),
    }


def own_pass(snippet: str, address: str) -> dict[str, Any]:
    """The snippet for a pass of one's own on the demo's joint graph, trained before and after."""
    os.environ["BUCKETPLAN_SERVER"] = address
    _, graph, trainer = sharded_job(SMALL, "two_groups")
    rewritten = copy.deepcopy(trainer)
    try:
        exec(snippet, {"gm": rewritten.graph.gm})
    finally:
        del os.environ["BUCKETPLAN_SERVER"]
    losses = [
        [job.step(*batch_of(SMALL, number, dist.get_rank())).item() for number in range(2)]
        for job in (trainer, rewritten)
    ]
    return {"losses": losses, "launches": (_num_collectives(graph.gm), _num_collectives(rewritten.graph.gm))}


def hyperparallel(snippet: str, address: str) -> dict[str, Any]:
    """The snippet for HyperParallel on the demo's joint graph in its style, trained before and after."""
    model, graph, trainer = sharded_job(SMALL, "two_groups")
    in_style(graph.gm)
    rewritten = copy.deepcopy(trainer)
    given: dict[str, Any] = {
        "groups": {"fsdp": dist.group.WORLD},
        "graph_module": rewritten.graph.gm,
        "pass_config": SimpleNamespace(fsdp_bucketing=True, fsdp_enabled=True, dp_mode="fsdp"),
        "model": model,
        "expert_names": ("blocks.1.experts",),
        "train": lambda _: None,
    }
    with _server_at(address), open_attempt(PlanClient(), groups=given["groups"]) as attempt:
        exec(snippet, given | {"attempt": attempt})
    losses = [
        [job.step(*batch_of(SMALL, number, dist.get_rank())).item() for number in range(2)]
        for job in (trainer, rewritten)
    ]
    return {"losses": losses, "launches": (_num_collectives(graph.gm), _num_collectives(rewritten.graph.gm))}


@contextlib.contextmanager
def _server_at(address: str) -> Iterator[None]:
    os.environ["BUCKETPLAN_SERVER"] = address
    try:
        yield
    finally:
        del os.environ["BUCKETPLAN_SERVER"]


def torchtitan(snippet: str, address: str) -> list[str]:
    """The names of the passes in the pipeline that the snippet for torchtitan registers, for a traced Llama."""
    from torchtitan.experiments.graph_trainer.registry import PASS_PIPELINE_REGISTRY

    from tests.support import titan_ranks

    given: dict[str, Any] = {"groups": {"fsdp": dist.group.WORLD}}
    with _server_at(address):
        exec(snippet, given)
    if "attempt" in given:
        given["attempt"].close()
    try:
        return titan_ranks.passes_of("llama3", PASS_PIPELINE_REGISTRY["bucketplan"])
    finally:
        del PASS_PIPELINE_REGISTRY["bucketplan"]


def _num_collectives(gm: fx.GraphModule) -> int:
    counted = Counter(str(node.target) for node in gm.graph.nodes if "_c10d_functional" in str(node.target))
    return sum(number for target, number in counted.items() if "wait_tensor" not in target)
