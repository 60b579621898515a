"""Plans in HyperParallel's graph mode: a pass that its pipeline runs like one of its own, behind its FSDP pass.

    from bucketplan_client.hyperparallel import BucketingPass
    graph_module = BucketingPass(attempt).run(graph_module, pass_config, model=model)

Its graphs are annotated, so nothing has to be recognised, and have ways of their own: collectives are called as
overload packets (``all_gather_into_tensor`` without ``.default``), nodes that its passes inserted carry no fake value,
and side-effecting calls free the storage of gathered parameters. All of that is read as it stands; a member of a
bucket gets storage of its own, so a free still frees one parameter. Its overlap pass runs later and expects each wait
right behind its launch, which is what placement ``original`` keeps.

The pass does nothing, with the reason at info level, where `pass_config` has ``fsdp_bucketing`` or ``fsdp_enabled``
off or a ``dp_mode`` without shards (``ddp``), without torch.distributed, in a world of one rank, and on every rank of
an attempt that was opened without buckets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import fx, nn

from bucketplan_client.errors import ScopeError, located
from bucketplan_client.failures import where_of
from bucketplan_client.membership import GroupLike, is_distributed, members_of
from bucketplan_client.opening import Attempt
from bucketplan_client.passes import LOCAL_PLANS, UNBUCKETED, FsdpBucketingPass, PlanSource, refuse_no_source
from bucketplan_client.scopes import ModuleScope, build_module_bucket_plans
from bucketplan_core.collectives import Options
from bucketplan_core.planners import current_version

__all__ = ["EXPERT_GROUP", "FSDP_GROUP", "REPLICATE_GROUP", "BucketingPass", "options_of", "run"]

FSDP_GROUP = "fsdp"
EXPERT_GROUP = "fsdp_expert"
REPLICATE_GROUP = "dp_replicate"
"""Names under which HyperParallel registers its groups, unless a run names others."""

_SHARDING_MODES = frozenset({"fsdp", "hsdp"})


def options_of(pass_config: Any) -> Options:
    """Planning options for `pass_config`: its module buckets (``fsdp_bucket_modules``), else buckets by size."""
    strategy = "module" if getattr(pass_config, "fsdp_bucket_modules", None) else "size"
    return Options(strategy=strategy, planner=current_version(strategy), placement="original")


class BucketingPass:
    """HyperParallel's pass protocol (`name`, `run`) over `FsdpBucketingPass`.

    `plans` are an opened attempt (its plans, options, groups and store; buckets only if it has them) or another source;
    by default they are made in this process. `options` default to the attempt's, without one to those of the
    configuration of each run (`options_of`). `arguments` go to `FsdpBucketingPass`. Raises `BadArgument`.
    """

    name = "fsdp_bucketing"

    def __init__(
        self, plans: PlanSource | Attempt = LOCAL_PLANS, *, options: Options | None = None, **arguments: Any
    ) -> None:
        if not isinstance(plans, Attempt):
            with located(where_of(plans)):
                refuse_no_source(plans)
        self._plans = plans
        self._options = options
        self._arguments = arguments

    def run(
        self,
        graph_module: fx.GraphModule,
        pass_config: Any,
        *,
        model: nn.Module | None = None,
        fsdp_group_name: str = FSDP_GROUP,
        fsdp_expert_group_name: str = EXPERT_GROUP,
        dp_replicate_group_name: str = REPLICATE_GROUP,
        expert_param_names: Collection[str] = (),
        **_: Any,
    ) -> fx.GraphModule:
        """Rewrite the graph in place and return it; call it on every rank. What other passes need is ignored.

        `model` is read for module buckets only. The expert group is looked at only if there are `expert_param_names`.
        Raises `ScopeError` for module buckets that do not fit `model`, else what `FsdpBucketingPass` raises.
        """
        options = self._options_for(pass_config)
        with located(where_of(self._plans)):
            scopes = _scopes(options, getattr(pass_config, "fsdp_bucket_modules", None), model)
        roles = [fsdp_group_name, dp_replicate_group_name]
        if expert_param_names:
            roles.append(fsdp_expert_group_name)
        mode = str(getattr(pass_config, "dp_mode", "fsdp")).lower()
        groups = _known_groups(roles)
        make: Callable[..., FsdpBucketingPass]
        if isinstance(self._plans, Attempt):
            groups = self._plans.groups | groups
            make = functools.partial(FsdpBucketingPass.for_attempt, self._plans)
        else:
            make = functools.partial(FsdpBucketingPass, self._plans)
        bucketing = make(
            options=options,
            enabled=bool(getattr(pass_config, "fsdp_bucketing", True)),
            fsdp_enabled=bool(getattr(pass_config, "fsdp_enabled", True)),
            # Hybrid sharding gathers and scatters within each replica as fsdp does; ddp gathers nothing.
            data_parallel_mode="fsdp" if mode in _SHARDING_MODES else mode,
            groups=groups,
            scopes=scopes,
            only_roles=roles,
            **self._arguments,
        )
        return bucketing(graph_module)

    def _options_for(self, pass_config: Any) -> Options:
        if isinstance(self._plans, Attempt) and not self._plans.bucketed:
            return UNBUCKETED
        if self._options is not None:
            return self._options
        agreed = self._plans.options if isinstance(self._plans, Attempt) else None
        return agreed if agreed is not None else options_of(pass_config)


def run(graph_module: fx.GraphModule, pass_config: Any, **kwargs: Any) -> fx.GraphModule:
    """`BucketingPass.run` as a function; `plans` (an attempt too) and `options` may be among `kwargs`."""
    plans, options = kwargs.pop("plans", LOCAL_PLANS), kwargs.pop("options", None)
    return BucketingPass(plans, options=options).run(graph_module, pass_config, **kwargs)


def _scopes(
    options: Options, modules: Sequence[str | Sequence[str]] | None, model: nn.Module | None
) -> tuple[ModuleScope, ...]:
    if options.strategy != "module":
        return ()
    if model is None:
        raise ScopeError(
            f"module buckets {modules!r} need the live model", remedy="Pass model=... to the pass, as to the FSDP pass"
        )
    return build_module_bucket_plans(model, modules or ())


def _known_groups(names: Collection[str]) -> dict[str, GroupLike]:
    """Those of `names` that are process groups here: compared also by a rank whose graph cannot be read."""
    known: dict[str, GroupLike] = {}
    for name in names if is_distributed() else ():
        try:
            members_of(name)
        except LookupError:
            continue
        known[name] = name
    return known
