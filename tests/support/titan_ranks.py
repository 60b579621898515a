"""torchtitan's graph_trainer on gloo ranks: debug models traced by its own tracer, its pipelines applied, executed.

torchtitan looks for an accelerator when it is imported; told that devices are ``cpu``, all of its meshes are gloo
meshes. The models are its debug models with two layers.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("WANDB_MODE", "disabled")

import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
import torchtitan.distributed.parallel_dims
from torch import fx, nn
from torch.nn.attention import SDPBackend
from torchtitan.config import ParallelismConfig
from torchtitan.config.configs import TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.experiments.graph_trainer.common_utils import (
    annotate_module_fqns,
    annotate_moe_ep_regions,
    apply_simple_fsdp,
)
from torchtitan.experiments.graph_trainer.configs import EpOverlapConfig, GraphTrainerCompileConfig
from torchtitan.experiments.graph_trainer.make_fx_tracer import TracedResult, minimal_fx_tracer, run_traced
from torchtitan.experiments.graph_trainer.passes import apply_graph_passes, construct_default_graph_passes
from torchtitan.experiments.graph_trainer.registry import PASS_PIPELINE_REGISTRY
from torchtitan.experiments.graph_trainer.trainer import make_fwd_bwd_step

from bucketplan_client.inductor_options import INDUCTOR_SETTINGS, CompileConflict
from bucketplan_client.opening import open_attempt
from bucketplan_client.passes import LocalPlans
from bucketplan_client.torchtitan import PIPELINE, PipelineConflict, _keeping_order, register
from bucketplan_core.collectives import Options
from bucketplan_core.planners import current_version

torchtitan.distributed.parallel_dims.device_type = "cpu"
LENGTH = 16
BATCH = 2
NUM_LAYERS = 2


class Job:
    """One rank's model, batch and traced step, as `GraphTrainer` holds them."""

    def __init__(self, name: str, *, ep: int = 1, reshard: str = "default") -> None:
        world = dist.get_world_size()
        backend = "partial_dtensor"
        set_spmd_backend(backend)
        self.dims = ParallelDims(
            dp_replicate=1, dp_shard=world, cp=1, tp=1, pp=1, ep=ep, world_size=world, spmd_backend=backend
        )
        self.dims.build_mesh()
        parallelism = ParallelismConfig(
            data_parallel_shard_degree=world,
            expert_parallel_degree=ep,
            spmd_backend=backend,
            fsdp_reshard_after_forward=reshard,
        )
        spec = _registry(name)("debugmodel", attn_backend="sdpa")
        self.config = SimpleNamespace(
            compile=GraphTrainerCompileConfig(
                enable=True, pass_pipeline=PIPELINE, disable_passes=["cudagraph_pass"], inductor_compilation="regional"
            ),
            model_spec=spec,
            parallelism=parallelism,
            activation_checkpoint=None,
        )
        spec.model.layers = spec.model.layers[:NUM_LAYERS]
        spec.model.update_from_config(config=SimpleNamespace(parallelism=parallelism))
        torch.manual_seed(0)
        self.model: nn.Module = spec.model.build()
        with torch.no_grad():
            self.model.init_states(buffer_device=torch.device("cpu"))
        for module in self.model.modules():
            if hasattr(module, "sdpa_backends"):
                # The fused attention of CPUs is tagged as random, which torchtitan's rematerialisation refuses.
                module.sdpa_backends = [SDPBackend.MATH]
        if name != "llama3":
            annotate_moe_ep_regions()
        annotate_module_fqns(self.model)
        if ep > 1:
            self.model.parallelize(self.dims)
        training = TrainingConfig(mixed_precision_param="bfloat16", mixed_precision_reduce="float32")
        apply_simple_fsdp(self.model, parallel_dims=self.dims, training=training)
        generator = torch.Generator().manual_seed(dist.get_rank())
        tokens = torch.randint(0, spec.model.vocab_size, (BATCH, LENGTH), generator=generator)
        positions = torch.arange(LENGTH).repeat(BATCH, 1)
        self.batch = (tokens, tokens.roll(-1, 1), torch.tensor(float(BATCH * LENGTH)), {"positions": positions})

    def trace(self) -> TracedResult:
        return minimal_fx_tracer(make_fwd_bwd_step(self.model, _loss), module=self.model)(*self.batch)

    def run(self, traced: TracedResult) -> list[torch.Tensor]:
        outputs = run_traced(traced, module=self.model)(*self.batch)
        return [value.to_local() if hasattr(value, "to_local") else value for value in outputs]

    def apply(self, traced: TracedResult, build: Any) -> None:
        passes = build(traced, self.config, parallel_dims=self.dims)
        traced.gm = apply_graph_passes(traced.gm, traced.example_inputs, passes, compile_config=self.config.compile)


def _registry(name: str) -> Any:
    if name == "llama3":
        from torchtitan.experiments.graph_trainer.llama3 import model_registry
    else:
        from torchtitan.experiments.graph_trainer.deepseek_v3 import model_registry
    return model_registry


def _loss(pred: torch.Tensor, labels: torch.Tensor, global_valid_tokens: torch.Tensor) -> torch.Tensor:
    total = nn.functional.cross_entropy(pred.flatten(0, 1).float(), labels.flatten(0, 1), reduction="sum")
    return total / global_valid_tokens


@contextlib.contextmanager
def registered(strategy: str, **options: Any) -> Iterator[Any]:
    """Our pipeline under its name in torchtitan's registry, which is left as it was."""
    register(
        LocalPlans(),
        options=Options(strategy=strategy, planner=current_version(strategy), placement="scheduled", **options),
    )
    try:
        yield PASS_PIPELINE_REGISTRY[PIPELINE]
    finally:
        del PASS_PIPELINE_REGISTRY[PIPELINE]


def compare(name: str, ep: int, strategy: str) -> dict[str, Any]:
    """Loss and gradients of the traced step: as traced, and after the pipeline with planned buckets."""
    job = Job(name, ep=ep)
    traced = job.trace()
    original = job.run(traced)
    with registered(strategy) as build:
        job.apply(traced, build)
    planned = job.run(traced)
    worst = [
        float((after.double() - before.double()).abs().max() / before.double().abs().max().clamp_min(1e-12))
        for before, after in zip(original, planned, strict=True)
        if before.numel()
    ]
    return {
        "loss": (float(original[0]), float(planned[0])),
        "num_gradients": len(original) - 1,
        "worst": max(worst),
        "buckets": _buckets(traced.gm),
        "statistics": {key: dict(value) for key, value in traced.gm.meta.items() if key.endswith("bucketing")},
    }


def bucketed_by(disabled_rank: int | None) -> tuple[bool, bool]:
    """Whether an attempt has buckets, and whether its registered pipeline makes some in a traced Llama."""
    disabled = dist.get_rank() == disabled_rank
    groups = {"fsdp": dist.group.WORLD}
    with open_attempt(None, groups=groups, job="titan", options={"strategy": "module"}, disabled=disabled) as attempt:
        register(attempt)
        try:
            job = Job("llama3")
            traced = job.trace()
            job.apply(traced, PASS_PIPELINE_REGISTRY[PIPELINE])
        finally:
            del PASS_PIPELINE_REGISTRY[PIPELINE]
    return attempt.bucketed, bool(_buckets(traced.gm))


def _buckets(gm: fx.GraphModule) -> list[tuple[str, str, tuple[str, ...]]]:
    """(kind, group, member parameters) of every fused collective."""
    return [
        (node.meta["comm_type"], node.meta["comm_group"], tuple(str(name) for name in node.meta["fsdp_bucket_members"]))
        for node in gm.graph.nodes
        if "fsdp_bucket_members" in node.meta
    ]


def default_passes(name: str) -> list[list[str]]:
    """Names of torchtitan's own passes and of ours, in order."""
    job = Job(name)
    traced = job.trace()
    found = []
    for build in (construct_default_graph_passes, None):
        with registered("size") as ours:
            passes = (build or ours)(traced, job.config, parallel_dims=job.dims)
        found.append([getattr(entry, "func", entry).__name__ for entry in passes])
    return found


def passes_of(name: str, build: Any) -> list[str]:
    """Names of the passes that `build` gives for a traced model."""
    job = Job(name)
    return [getattr(found, "func", found).__name__ for found in build(job.trace(), job.config, parallel_dims=job.dims)]


def keeping_order() -> dict[str, Any]:
    """What Inductor's settings are inside and behind a whole-graph pass that keeps the order, and what refuses it."""
    seen: dict[str, Any] = {}

    def inductor_pass(gm: fx.GraphModule, example_inputs: object = None) -> fx.GraphModule:
        seen["inside"] = {key: getattr(inductor_config, key) for key in INDUCTOR_SETTINGS}
        seen["inputs"] = example_inputs
        return gm

    before = {key: getattr(inductor_config, key) for key in INDUCTOR_SETTINGS}
    kept = _keeping_order(inductor_pass)
    gm = fx.GraphModule(nn.Module(), fx.Graph())
    seen["same"] = kept(gm, "inputs") is gm
    seen["restored"] = before == {key: getattr(inductor_config, key) for key in INDUCTOR_SETTINGS}
    seen["name"] = kept.__name__
    with inductor_config.patch(bucket_all_gathers_fx="all"):
        try:
            kept(gm)
        except CompileConflict as conflict:
            seen["refused"] = conflict.option
    seen["wanted"] = dict(INDUCTOR_SETTINGS)
    return seen


def refused(changes: dict[str, Any]) -> str:
    """The option that our pipeline refuses to be combined with."""
    config = GraphTrainerCompileConfig(enable=True)
    for name, value in changes.items():
        setattr(config, name, EpOverlapConfig(enabled=True) if name == "ep_overlap" else value)
    with registered("size") as build:
        try:
            build(None, SimpleNamespace(compile=config))
        except PipelineConflict as conflict:
            return conflict.option
    return "nothing"
