"""Plans in torchtitan's graph_trainer: a graph pass with its signature, and a pass pipeline registered by name.

    from bucketplan_client.torchtitan import register
    register(attempt)                          # before the trainer compiles its first step
    # then train with --compile.pass_pipeline bucketplan

graph_trainer traces forward, loss and backward into one joint graph on every rank, so ranks run this pass in lockstep
and compare their plans before anything is rewritten. The pipeline is torchtitan's own with one pass exchanged: where
its per-block bucketing stands (after rematerialisation has cloned the gathers of the backward, and after collectives
were given their process groups), ours stands. Other passes that place FSDP collectives would work against the plan and
are refused.

Needs torchtitan, whose modules are imported when a pipeline is built.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from bucketplan_client.arguments import BadArgument
from bucketplan_client.errors import ClientError, located
from bucketplan_client.failures import where_of
from bucketplan_client.opening import Attempt
from bucketplan_client.passes import FsdpBucketingPass, PlanSource, refuse_no_source
from bucketplan_client.scopes import ModuleScope
from bucketplan_core.collectives import Options

__all__ = ["PIPELINE", "PipelineConflict", "bucketing_pass", "build_pipeline", "name_parameters", "register"]

PIPELINE = "bucketplan"
"""The name under which `register` registers its pipeline by default."""

_REPLACED = "joint_transformer_block_bucketing_reordering_pass"
_FULL_INDUCTOR = "full_inductor_compilation_pass"
_MESH_DIMENSIONS = ("dp_replicate", "fsdp", "efsdp", "tp", "ep", "cp", "pp")

GraphPass = Callable[..., fx.GraphModule]


class PipelineConflict(ClientError):
    """An option of graph_trainer cannot be combined with planned buckets: `option`, its `value`, and `why`."""

    def __init__(self, option: str, value: object, why: str, *, remedy: str) -> None:
        self.option = option
        self.value = value
        self.why = why
        super().__init__(f"{option} is {value!r}, but {why}", remedy=remedy)


def bucketing_pass(
    gm: fx.GraphModule, example_inputs: object = None, *, bucketing: FsdpBucketingPass
) -> fx.GraphModule:
    """A graph pass as graph_trainer calls it; bind `bucketing` with `functools.partial`."""
    return bucketing(gm, example_inputs)


@dataclass(frozen=True, slots=True)
class _GradientOf:
    """Describes one graph output as AOTAutograd does: `target` is the parameter's path."""

    target: str


def name_parameters(gm: fx.GraphModule, traced_result: Any) -> None:
    """Tell placeholders which parameter or buffer they hold, and outputs of which parameter they are the gradient.

    A DTensor is flattened to several values (its local tensor, its mesh); all of them get its name. Outputs are named
    only if there is one gradient behind the loss for each sharded parameter, as in torchtitan's training step.
    """
    placeholders = iter(gm.graph.find_nodes(op="placeholder"))
    sharded = []
    for index, fqn in enumerate(traced_result.state_fqns):
        layout = traced_result.input_subclass_layouts.get(index)
        for _ in range(1 if layout is None else layout.num_tensors):
            next(placeholders).meta["param_name"] = fqn
        if layout is not None:
            sharded.append(fqn)
    if len(sharded) != traced_result.num_flat_outputs - 1:
        return
    described: list[_GradientOf | None] = []
    for index, name in enumerate([None, *sharded]):
        layout = traced_result.output_subclass_layouts.get(index)
        described += [None if name is None else _GradientOf(name)] * (1 if layout is None else layout.num_tensors)
    gm.graph.output_node().meta["desc"] = described


def build_pipeline(
    traced_result: Any,
    config: Any,
    *,
    parallel_dims: Any = None,
    plans: PlanSource | Attempt,
    options: Options | None = None,
    scopes: Sequence[ModuleScope] = (),
    roles: Mapping[str, str] | None = None,
    **arguments: Any,
) -> list[GraphPass]:
    """torchtitan's default passes for a traced step, with its bucketing exchanged for planned buckets.

    `plans` are an opened attempt (its plans, options, groups and store), whose passes leave the graph unbucketed where
    it has no buckets, or another source, which needs `options`. Under strategy `module` without `scopes`, scopes are
    the buckets that torchtitan would have made. `roles` defaults to the names of the dimensions of `parallel_dims`.
    `arguments` go to `FsdpBucketingPass`. Raises `PipelineConflict` and `BadArgument`.
    """
    from torchtitan.experiments.graph_trainer.passes import construct_default_graph_passes

    with located(where_of(plans)):
        options, make = _bind(plans, options)
        _refuse_conflicts(config.compile)
        passes = construct_default_graph_passes(traced_result, config, parallel_dims=parallel_dims)
        at = [index for index, found in enumerate(passes) if _name(found) == _REPLACED]
        if len(at) != 1:
            raise PipelineConflict(
                "torchtitan's default pipeline",
                [_name(found) for found in passes],
                f"there is no one {_REPLACED} in it to exchange",
                remedy="Use torchtitan 0.3, or put bucketing_pass into a pipeline of your own",
            )
    replaced = passes[at[0]]
    if options is not None and options.strategy == "module" and not scopes:
        scopes = _scopes_of(replaced.keywords["module_bucket_plans"], traced_result.state_fqns)
    name_parameters(traced_result.gm, traced_result)
    bucketing = make(
        scopes=scopes,
        roles=roles if roles is not None else _roles_of(parallel_dims),
        **arguments,
    )
    passes[at[0]] = functools.partial(bucketing_pass, bucketing=bucketing)
    return [_keeping_order(found) if _name(found) == _FULL_INDUCTOR else found for found in passes]


def register(
    plans: PlanSource | Attempt, *, options: Options | None = None, name: str = PIPELINE, **arguments: Any
) -> None:
    """Register a pass pipeline called `name` (``--compile.pass_pipeline``); arguments as for `build_pipeline`.

    Raises `BadArgument` for what gives no plans, and for plans without `options`.
    """
    with located(where_of(plans)):
        _bind(plans, options)
    from torchtitan.experiments.graph_trainer.registry import register_pass_pipeline

    bound = functools.partial(build_pipeline, plans=plans, options=options, **arguments)
    register_pass_pipeline(name)(bound)


def _bind(
    plans: PlanSource | Attempt, options: Options | None
) -> tuple[Options | None, Callable[..., FsdpBucketingPass]]:
    """The options to plan with, None where there are to be no buckets, and what makes the pass from its arguments."""
    if isinstance(plans, Attempt):
        agreed = plans.options if options is None or not plans.bucketed else options
        return agreed, functools.partial(FsdpBucketingPass.for_attempt, plans, **_given(agreed))
    refuse_no_source(plans)
    if not isinstance(options, Options):
        raise BadArgument(
            "options", options, "the Options to plan with", remedy="Give options=Options(...), or register the attempt"
        )
    return options, functools.partial(FsdpBucketingPass, plans, options=options)


def _given(options: Options | None) -> dict[str, Any]:
    return {} if options is None else {"options": options}


def _refuse_conflicts(compile_config: Any) -> None:
    if compile_config.precompile_artifact_dir:
        raise PipelineConflict(
            "compile.precompile_artifact_dir",
            compile_config.precompile_artifact_dir,
            "a precompiled graph was rewritten when it was made, and no plan can be applied to it",
            remedy="Unset it, or make the artifact with this pipeline",
        )
    if compile_config.ep_overlap.enabled:
        raise PipelineConflict(
            "compile.ep_overlap.enabled",
            True,
            "its scheduler moves collectives after the plan has placed them",
            remedy="Switch one of the two off",
        )
    if compile_config.enable_fsdp_dense_region_overlap:
        raise PipelineConflict(
            "compile.enable_fsdp_dense_region_overlap",
            True,
            "it moves the buckets that torchtitan makes, and those are exchanged for planned ones",
            remedy="Switch one of the two off",
        )


def _name(found: GraphPass) -> str:
    function = found.func if isinstance(found, functools.partial) else found
    return str(getattr(function, "__name__", ""))


def _roles_of(parallel_dims: Any) -> dict[str, str]:
    """This process's group names with their mesh dimensions, as far as `parallel_dims` has them."""
    find = getattr(parallel_dims, "get_optional_mesh", None)
    if find is None:
        return {}
    meshes = ((name, find(name)) for name in _MESH_DIMENSIONS)
    return {mesh.get_group().group_name: name for name, mesh in meshes if mesh is not None}


def _scopes_of(buckets: Iterable[str | Sequence[str]], names: Sequence[str]) -> tuple[ModuleScope, ...]:
    """Scopes of torchtitan's buckets: a module path, or several that share one bucket; the most exact path wins."""
    paths: dict[str, str] = {}
    for bucket in buckets:
        parts = [bucket] if isinstance(bucket, str) else list(bucket)
        paths.update(dict.fromkeys(parts, "+".join(parts)))
    inside: dict[str, set[str]] = {}
    for name in names:
        owners = [path for path in paths if name.startswith(f"{path}.")]
        if owners:
            inside.setdefault(paths[max(owners, key=len)], set()).add(name)
    return tuple(ModuleScope(scope, frozenset(found)) for scope, found in inside.items())


def _keeping_order(inductor_pass: GraphPass) -> GraphPass:
    """Inductor's pass over the whole graph, with the settings without which its scheduler would undo the plan."""

    @functools.wraps(inductor_pass.func if isinstance(inductor_pass, functools.partial) else inductor_pass)
    def run(gm: fx.GraphModule, example_inputs: object = None) -> fx.GraphModule:
        import torch._inductor.config as inductor_config

        from bucketplan_client.inductor_options import refuse_conflicts, settings_of

        refuse_conflicts()
        with inductor_config.patch(settings_of(inductor_config)):
            return inductor_pass(gm, example_inputs)

    return run
