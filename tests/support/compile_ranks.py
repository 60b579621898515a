"""What gloo ranks do to compare a model under torch.compile with and without plans; they return plain data.

Everything is compiled by Inductor for real. Kernels are kept in build/, since compiling C++ is most of the time; the
caches of graphs, under which no hook would run, are off unless a case is about them.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
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
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bucketplan_client.compiled_attempt import install_attempt
from bucketplan_client.errors import ClientError
from bucketplan_client.fallback import AttemptPlans
from bucketplan_client.opening import open_attempt
from bucketplan_client.passes import LocalPlans
from bucketplan_client.torch_compile import Installation, install
from bucketplan_client.transport import PlanClient
from bucketplan_core.collectives import Options
from bucketplan_core.plan import Plan
from bucketplan_core.profile import CostProfile
from bucketplan_core.request import Request
from bucketplan_core.schedule import Placement, decide
from tests.support import compile_models
from tests.support.simple_fsdp import full_gradients

__all__ = ["SIZE", "beside", "compare", "first_executions", "fully_sharded", "start"]

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
        # Inductor reduces in place where it may.
        event.name.removeprefix("_c10d_functional::").removesuffix("_")
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


def compare(case: str, keywords: dict[str, Any]) -> dict[str, Any]:
    """One step of the case's model, eagerly and compiled with plans.

    `keywords`: `server` (the attempt is opened there; else plans are made here), `options`, `scopes` (module specs),
    and those of `install`.
    """
    arguments = dict(keywords)
    built = compile_models.build(case)
    eager = step(built.model, built.batch, built.model)
    torch._dynamo.reset()
    arguments["scopes"] = built.scopes(tuple(arguments.get("scopes", ())))
    with no_graph_caches(), _installed(case, built, arguments) as installed:
        planned = step(torch.compile(built.model), built.batch, built.model)
        result = {
            "loss": (eager.loss, planned.loss),
            "launches": (eager.launches, planned.launches),
            "worst_gradient": worst_difference(eager, planned),
            "graphs": facts_of(installed),
            "signatures": signatures_by_rank(installed),
        }
    torch._dynamo.reset()
    return result


@contextmanager
def _installed(case: str, built: compile_models.Built, arguments: dict[str, Any]) -> Iterator[Installation]:
    address = arguments.pop("server", None)
    options = arguments.pop("options", SIZE)
    arguments["on_error"] = "raise"
    if address is None:
        with install(options=options, roles=built.roles, **arguments) as installed:
            yield installed
        return
    fixed = {"strategy": options.strategy, "placement": options.placement}
    groups = {role: name for name, role in built.roles.items()}
    with (
        open_attempt(PlanClient(address), groups=groups, job=case, options=fixed) as attempt,
        install_attempt(attempt, roles=built.roles, **arguments) as installed,
    ):
        yield installed


def facts_of(installed: Installation) -> list[dict[str, Any]]:
    return [
        {
            "phase": graph.phase,
            "candidates": graph.num_candidates,
            "launches": graph.num_launches,
            "scopes": sorted({candidate.scope or "" for candidate in graph.request.candidates}),
            "kinds": dict(Counter(candidate.kind for candidate in graph.request.candidates)),
            "reason": graph.reason,
            "skipped": sorted({skipped.rule for skipped in graph.skipped}),
        }
        for graph in installed.graphs
    ]


def worst_difference(one: Step, other: Step) -> float:
    """The largest difference of a gradient's element, as a part of that gradient's largest element."""
    worst = 0.0
    for name, gradient in one.gradients.items():
        scale = float(gradient.abs().max().clamp_min(1e-6))
        worst = max(worst, float((gradient - other.gradients[name]).abs().max()) / scale)
    return worst


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of a job: its rank's compile cache is `folder`/rank; sequence lengths may differ between starts.

    Under dynamic shapes a cache entry made at one length serves another, so a plan must not depend on it. `without` is
    a rank whose cache is gone. With `between` rank 1 gets its first plan only when `between`/go is there, and rank 0
    makes `between`/first when it has its own.
    """

    folder: str
    address: str
    job: str
    length: int = 8
    without: int | None = None
    between: str | None = None


def start(fields: dict[str, Any]) -> dict[str, Any]:
    """Open an attempt at the server and train one step of the smallest model under its plans."""
    given = Start(**fields)
    rank = dist.get_rank()
    before = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    mine = os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{given.folder}/rank{rank}"
    if rank == given.without:
        shutil.rmtree(mine)
    built = compile_models.build("smallest")
    torch._dynamo.reset()
    counters.clear()
    batch = (compile_models.tokens(length=given.length),)
    try:
        eager = step(built.model, batch, built.model)
        groups = {role: name for name, role in built.roles.items()}
        with open_attempt(
            PlanClient(given.address, deadline_s=5.0), groups=groups, job=given.job, plan_s=5.0
        ) as opened:
            if given.between is not None and opened.plans is not None:
                _hold(opened.plans, Path(given.between), rank)
            with install_attempt(opened, roles=built.roles, on_error="raise") as installed:
                compiled = step(torch.compile(built.model, dynamic=True), batch, built.model)
            return {
                "uuid": opened.uuid,
                "hits": counters["aot_autograd"]["autograd_cache_hit"],
                "plans": {
                    graph.phase: (graph.signature, graph.plan.digest) for graph in installed.graphs if graph.plan
                },
                "taken": dict(opened.plans.taken) if opened.plans is not None else {},
                "launches": compiled.launches,
                "worst_gradient": worst_difference(eager, compiled),
            }
    finally:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = before
        torch._dynamo.reset()


def _hold(plans: AttemptPlans, between: Path, rank: int) -> None:
    take = plans.plan

    def held(request: Request, profile: CostProfile | None = None) -> Plan:
        deadline = time.monotonic() + 300.0
        while rank == 1 and not (between / "go").exists():
            assert time.monotonic() < deadline, "nobody said go"
            time.sleep(0.05)
        plan = take(request, profile)
        if rank == 0:
            (between / "first").touch()
        return plan

    plans.plan = held  # type: ignore[method-assign]  # slowed down for this test


def fully_sharded() -> dict[str, Any]:
    """FSDP2 over a compiled block with the pass installed: what the pass says, and that the block trains as without."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    torch.manual_seed(0)
    model = compile_models.Block(4, 4)
    batch = torch.ones(2, 4)
    eager = model(batch).sum()
    model.compile()
    fully_shard(model, mesh=mesh)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]  # shorter than a class
    logger = logging.getLogger("bucketplan_client.torch_compile")
    logger.addHandler(handler)
    torch._dynamo.reset()
    try:
        with no_graph_caches(), install(options=SIZE, on_error="raise") as installed:
            compiled = model(batch).sum()
            compiled.backward()
            reasons = [graph.reason for graph in installed.graphs]
    finally:
        logger.removeHandler(handler)
        torch._dynamo.reset()
    return {
        "losses": (float(eager.detach()), float(compiled.detach())),
        "reasons": reasons,
        "warnings": [record.getMessage() for record in records if record.levelno >= logging.WARNING],
    }


class _OtherPlans:
    """Plans of another size of bucket on one rank: what a wrong build, or a wrong cache, would give it."""

    def __init__(self, rank: int) -> None:
        self._others = rank == 1

    def plan(self, request: Request, profile: CostProfile | None = None) -> Plan:
        placements = [
            Placement((number,), candidate.launch, candidate.wait, candidate.launch_order, candidate.wait_order)
            for number, candidate in enumerate(request.candidates)
        ]
        if self._others:
            return Plan(decision=decide(request, request.options.planner, placements))
        return LocalPlans().plan(request, profile)


class _Doubled(nn.Module):
    """A second model whose graphs are none of the first one's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *batch: Any) -> Tensor:
        return 2 * self.model(*batch)  # type: ignore[no-any-return]  # a module returns Any


def beside(what: str | None) -> dict[str, Any]:
    """Train two models one after the other; `what` one rank compiles beside them.

    ``metric``: rank 0 compiles a metric without collectives first. ``model``: rank 1 runs the second model first, as
    no other rank does, and the job ends; the rank that gets further waits for that.
    """
    torch._dynamo.reset()
    one, two = compile_models.build("smallest"), compile_models.build("dense")
    losses: list[tuple[float, float]] = []
    doubled = _Doubled(two.model)
    eager = [float(model(*batch).detach()) for model, batch in ((one.model, one.batch), (doubled, two.batch))]
    first, second = torch.compile(one.model), torch.compile(doubled)
    with (
        no_graph_caches(),
        open_attempt(None, groups={"fsdp": tuple(range(dist.get_world_size()))}, job="beside") as opened,
        install_attempt(opened, roles=one.roles, compare_first_execution=what == "metric") as installed,
    ):
        rank = dist.get_rank()
        if what == "metric" and rank == 0:
            assert float(torch.compile(lambda x: (x * x).sum().sqrt())(torch.ones(9))) == 3.0
        if what == "model":
            # Gloo may find that the sizes differ before the watchers look; the job ends by what they do.
            with suppress(RuntimeError):
                (second(*two.batch) if rank == 1 else first(*one.batch)).backward()
            threading.Event().wait(300.0)
        for model, batch in ((first, one.batch), (second, two.batch)):
            loss = model(*batch)
            loss.backward()
            losses.append((eager[len(losses)], float(loss.detach())))
        found = opened.store.get("alarm")
        slots = [graph.slot for graph in installed.graphs if graph.plan is not None]
    torch._dynamo.reset()
    return {"losses": losses, "alarm": found, "slots": slots}


def conflict_on_rank_1() -> tuple[str, str]:
    """Install where rank 1 cannot; type and text of what each rank raised, long before the deadline."""
    hides = dist.get_rank() == 1
    with (
        torch._dynamo.config.patch(suppress_errors=hides),
        open_attempt(None, groups={"fsdp": (0, 1)}, job="conflict") as opened,
    ):
        try:
            with install_attempt(opened, deadline_s=600.0):
                return "", ""
        except ClientError as error:
            return type(error).__name__, str(error)


def first_executions(odd: bool, folder: str | None = None) -> dict[str, Any]:
    """Train a step of the smallest model with every graph compared as it first runs.

    With `odd`, rank 1 is given other plans. With `folder` graphs are cached there, each rank's apart.
    """
    rank = dist.get_rank()
    before = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    built = compile_models.build("smallest")
    groups = {role: name for name, role in built.roles.items()}
    torch._dynamo.reset()
    counters.clear()
    compared: list[str] = []
    if folder is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/rank{rank}"
    try:
        with (
            nullcontext() if folder is not None else no_graph_caches(),
            open_attempt(None, groups=groups, job="first", on_mismatch=lambda error: None) as opened,
        ):
            if odd:
                opened.plans = _OtherPlans(rank)  # type: ignore[assignment]  # has the one method that is called
            compare = opened.compare_first_execution

            def noted(slot: str, *args: Any, **keywords: Any) -> None:
                compared.append(slot)
                compare(slot, *args, **keywords)

            opened.compare_first_execution = noted  # type: ignore[method-assign]  # watched by this test
            with install_attempt(
                opened, roles=built.roles, on_error="raise", compare_first_execution=True, first_execution_s=120.0
            ) as installed:
                error: ClientError | None = None
                launches: dict[str, int] = {}
                try:
                    launches = step(torch.compile(built.model), built.batch, built.model).launches
                except ClientError as raised:
                    error = raised
            return {
                "compared": compared,
                "error": None if error is None else type(error).__name__,
                "message": str(error),
                "hits": counters["aot_autograd"]["autograd_cache_hit"],
                "launches": launches,
                "compiled": len(installed.graphs),
            }
    finally:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = before
        torch._dynamo.reset()
