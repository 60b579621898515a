"""What gloo ranks do to compare a model under torch.compile with and without plans; they return plain data.

Everything is compiled by Inductor for real. Kernels are kept in build/, since compiling C++ is most of the time; the
caches of graphs, under which no hook would run, are off unless a case is about them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.support.paths import BUILD

# One compile thread: the pool of compile workers costs more to start than these few kernels. Both are read at import.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(BUILD / "inductor")

import torch
import torch._functorch.config
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor, nn

from bucketplan_client.torch_compile import Installation, install
from bucketplan_core.collectives import Options
from tests.support import compile_models
from tests.support.simple_fsdp import full_gradients

__all__ = ["SIZE", "compare", "no_graph_caches", "signatures_by_rank", "step"]

SIZE = Options(strategy="size", planner="size/1", placement="scheduled")
_COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single")


@dataclass(frozen=True, slots=True)
class Step:
    """One training step: loss, whole gradients, and how often each collective was launched."""

    loss: float
    gradients: dict[str, Tensor]
    launches: dict[str, int]


def step(model: Callable[..., Tensor], batch: tuple[Any, ...], parameters_of: nn.Module) -> Step:
    """Run `model` on `batch` forward and backward; gradients are those of `parameters_of`."""
    # Compiling issues operators too, so only a second run is counted.
    model(*batch).backward()
    parameters_of.zero_grad(set_to_none=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss = model(*batch)
        loss.backward()
    launches = Counter(
        event.name.removeprefix("_c10d_functional::")
        for event in profile.events()
        if event.name.startswith("_c10d_functional::")
    )
    return Step(
        float(loss.detach()),
        full_gradients(parameters_of),
        {name: launches[name] for name in _COLLECTIVES if launches[name]},
    )


@contextmanager
def no_graph_caches() -> Iterator[None]:
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield


def signatures_by_rank(installed: Installation) -> list[list[str]]:
    """The signatures that each rank saw, gathered from all of them."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, [graph.signature for graph in installed.graphs])
    return found


def compare(
    case: str,
    *,
    options: Options = SIZE,
    reshard: bool = False,
    keep_gathered: tuple[str, ...] = (),
    unplanned: bool = False,
    scopes: tuple[str, ...] = (),
) -> dict[str, Any]:
    """One step of the case's model: eagerly, compiled with plans, and if `unplanned` compiled without."""
    built = compile_models.build(case)
    eager = step(built.model, built.batch, built.model)
    result: dict[str, Any] = {"eager": (eager.loss, eager.launches)}
    with no_graph_caches():
        if unplanned:
            torch._dynamo.reset()
            result["unplanned"] = _against(eager, step(torch.compile(built.model), built.batch, built.model))
            compiled = result["unplanned"].pop("step")
        torch._dynamo.reset()
        with install(
            options=options,
            roles=built.roles,
            scopes=built.scopes(scopes),
            reshard_after_forward=reshard,
            keep_gathered=keep_gathered,
            on_error="raise",
        ) as installed:
            planned = step(torch.compile(built.model), built.batch, built.model)
            result["planned"] = _against(eager, planned)
            result["planned"].pop("step")
            result["graphs"] = [
                {
                    "phase": graph.phase,
                    "candidates": graph.num_candidates,
                    "launches": graph.num_launches,
                    "reason": graph.reason,
                    "skipped": sorted({skipped.rule for skipped in graph.skipped}),
                }
                for graph in installed.graphs
            ]
            result["signatures"] = signatures_by_rank(installed)
        if unplanned:
            result["bitwise"] = planned.loss == compiled.loss and all(
                torch.equal(gradient, compiled.gradients[name]) for name, gradient in planned.gradients.items()
            )
    torch._dynamo.reset()
    return result


def _against(eager: Step, other: Step) -> dict[str, Any]:
    worst = 0.0
    for name, gradient in eager.gradients.items():
        scale = float(gradient.abs().max().clamp_min(1e-6))
        worst = max(worst, float((gradient - other.gradients[name]).abs().max()) / scale)
    return {"loss": other.loss, "launches": other.launches, "worst_gradient": worst, "step": other}


def compare_kw(case: str, keywords: dict[str, Any]) -> dict[str, Any]:
    """`compare` for the pool, which passes positional arguments."""
    return compare(case, **keywords)
