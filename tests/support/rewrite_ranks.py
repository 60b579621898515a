"""Functions that gloo ranks run to compare a graph with its rewrite; they return plain data that tests judge."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from bucketplan_client.capture.describe import describe_graph
from bucketplan_client.rewrite.apply import apply_plan
from bucketplan_core.collectives import Options
from bucketplan_core.plan import Plan
from bucketplan_core.request import Request
from tests.support.collective_graphs import GraphBuilder, random_job
from tests.support.demo_ranks import group_over
from tests.support.fsdp_model import RankGroup
from tests.support.fxplans import random_legal_plan

__all__ = ["Comparison", "agreed_plan", "compare", "groups_of", "random_graphs"]

SIZE = Options(strategy="size", planner="size/1")


def groups_of(layout: str = "two_groups") -> dict[str, RankGroup]:
    """This rank's groups by role: ``two_groups`` over all ranks, ``hybrid`` with experts over neighbouring pairs."""
    world = dist.get_world_size()
    everyone = (tuple(range(world)),)
    groups = {"fsdp": group_over(everyone, "fsdp")}
    if layout == "two_groups":
        return groups | {"fsdp_expert": group_over(everyone, "fsdp_expert")}
    pairs = tuple((first, first + 1) for first in range(0, world, 2))
    across = tuple(tuple(range(first, world, 2)) for first in (0, 1))
    return groups | {
        "fsdp_expert": group_over(pairs, "fsdp_expert"),
        "replicas": group_over(across, "replicas"),
    }


def roles_of(groups: dict[str, RankGroup]) -> dict[str, str]:
    return {group.name: role for role, group in groups.items()}


def agreed_plan(request: Request, make: Any) -> Plan:
    """Rank 0's plan on every rank; fails where ranks do not hold one signature."""
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, request.signature)
    assert len(set(answers)) == 1, f"ranks describe the same graph differently: {answers}"
    sent = [make(request).encoded if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(sent, src=0)
    assert sent[0] is not None
    return Plan.decode(sent[0], expected_signature=request.signature)


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far outputs of a rewritten graph are from the original's.

    Per output: `equal` says whether all bits are; `relative` is the largest difference as a share of the largest value;
    `errors` the squared distance of both from a float64 run of the original, as (rewritten, original).
    """

    equal: tuple[bool, ...]
    relative: tuple[float, ...]
    errors: tuple[tuple[float, float], ...]
    dtypes: tuple[str, ...]


def compare(
    original: fx.GraphModule, rewritten: fx.GraphModule, inputs: Sequence[Tensor], *, with_reference: bool = True
) -> Comparison:
    """Run both on copies of `inputs` and the original on float64 ones (on the same ones without a reference)."""
    outputs = []
    reference_run = (_in_float64(original), torch.float64) if with_reference else (original, None)
    for module, dtype in ((original, None), (rewritten, None), reference_run):
        given = [x.to(dtype) if dtype is not None and x.is_floating_point() else x.clone() for x in inputs]
        with torch.no_grad():
            outputs.append(fx.Interpreter(module).run(*given))
    equal, relative, errors, dtypes = [], [], [], []
    for before, after, reference in zip(*outputs, strict=True):
        facts = [(x.shape, x.dtype, x.stride()) for x in (before, after)]
        assert facts[0] == facts[1], f"shape, dtype or stride changed: {facts}"
        equal.append(torch.equal(before, after))
        far, scale = (after.double() - before.double()).abs().max(), before.double().abs().max()
        relative.append(float(far / scale) if far else 0.0)
        dtypes.append(str(before.dtype))
        errors.append(tuple(float((x.double() - reference.double()).square().sum()) for x in (after, before)))
    return Comparison(tuple(equal), tuple(relative), tuple(errors), tuple(dtypes))  # type: ignore[arg-type]  # each holds two floats


def _in_float64(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph with every float dtype that it names widened."""
    wide = copy.deepcopy(module)
    for node in wide.graph.nodes:
        if isinstance(node.kwargs.get("dtype"), torch.dtype) and node.kwargs["dtype"].is_floating_point:
            node.kwargs = dict(node.kwargs) | {"dtype": torch.float64}
    wide.recompile()
    return wide


def rewrite(
    build: GraphBuilder, module: fx.GraphModule, make: Any, options: Options = SIZE
) -> tuple[fx.GraphModule, Plan, Request]:
    """A rewritten copy of `module` under the plan that `make` gives on rank 0."""
    rewritten = copy.deepcopy(module)
    description = describe_graph(rewritten, options=options, roles=roles_of(build.groups))
    plan = agreed_plan(description.request, make)
    apply_plan(description, plan)
    rewritten.graph.lint()
    rewritten.recompile()
    return rewritten, plan, description.request


def random_graphs(seeds: list[int], layout: str, with_values: bool) -> list[dict[str, Any]]:
    """For each seed: a random graph under a random legal plan, compared with itself as it was."""
    groups = groups_of(layout)
    results = []
    for seed in seeds:
        job = random_job(seed, groups, with_values=with_values)
        rewritten, plan, request = rewrite(
            job.builder, job.module, lambda request, seed=seed: random_legal_plan(request, seed)
        )
        comparison = compare(job.module, rewritten, job.builder.inputs(rank=dist.get_rank(), seed=seed))
        results.append(
            {
                "seed": seed,
                "num_exact": job.num_exact,
                "comparison": comparison,
                "num_candidates": len(request.candidates),
                "fused": [len(bucket.members) for bucket in plan.decision.buckets if len(bucket.members) > 1],
                "kinds": sorted({candidate.kind for candidate in request.candidates}),
            }
        )
    return results
