"""Plans in torch.compile: a pass in Inductor's post-grad hook that rewrites forward and backward graphs.

    from bucketplan_client.torch_compile import install

    with install(PlanClient(), options=options, epoch=epoch_id, reshard_after_forward=True):
        model = torch.compile(model)      # compiles when it is first called, so train inside the block
        train(model)

AOTAutograd cuts a training step into a forward and a backward graph and compiles them separately; each is described,
planned and rewritten by itself. When a compile cache hits, Inductor calls no hook at all: what it replays was compiled
under the same key, and the key (`BucketingPass.uuid`) covers whatever can change the plan or how it is applied. So no
rank ever waits for another inside the hook. FSDP2 (`fully_shard`) keeps its collectives out of compiled graphs; nothing
can be planned then, and a warning says so.

Settings of torch's compiler belong to the thread (and context) that made them: install in the thread that compiles.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import torch._dynamo.config as dynamo_config
import torch._inductor.config as inductor_config
import torch._inductor.custom_graph_pass as custom_graph_pass
import torch.distributed as dist
from torch import fx
from torch._guards import CompileContext
from torch._inductor.custom_graph_pass import CustomGraphPass

from bucketplan_client.arguments import refuse_bad_arguments
from bucketplan_client.capture.binding import Description, Skipped
from bucketplan_client.capture.describe import ScopeLike, describe_graph
from bucketplan_client.errors import PassFailed, Where, located
from bucketplan_client.failures import OnError, end_or_raise, step, where_of
from bucketplan_client.first_execution import FirstExecution, comparing, insert_comparison
from bucketplan_client.inductor_options import (
    CompileConflict,
    hook_without,
    num_replayed,
    passes_of,
    refuse_conflicts,
    refuse_undone_settings,
    settings_of,
)
from bucketplan_client.membership import is_distributed
from bucketplan_client.passes import (
    LOCAL_PLANS,
    LocalPlans,
    PlanSource,
    disabled_by_environment,
    is_opened,
    refuse_no_source,
    topology_of,
)
from bucketplan_client.reshard import mark_gathers
from bucketplan_client.rewrite import REWRITER_VERSION
from bucketplan_client.rewrite.apply import apply_plan
from bucketplan_client.scopes import why_left_alone
from bucketplan_core.collectives import Options
from bucketplan_core.groups import group_digests
from bucketplan_core.plan import Plan
from bucketplan_core.planners import find_planner
from bucketplan_core.request import CAPTURE_VERSION, SCHEMA_VERSION, Request
from bucketplan_core.wire import WireValue, digest_of, pack

__all__ = [
    "BucketingPass",
    "CompileConflict",
    "Installation",
    "ReshardPass",
    "RewrittenGraph",
    "current_installation",
    "graph_phase",
    "install",
]

_LOG = logging.getLogger(__name__)

Mode = Literal["bucketed", "unbucketed"]
_LOCAL_EPOCH = "local"
_HOOK = "post_grad_custom_post_pass"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewrittenGraph:
    """What the pass did to one graph; `plan` is None where nothing could be planned, `reason` why nothing was fused.

    `slot` is torch's compile id and the phase: a name in this process, which counts whatever this rank compiles.
    `replayed` says that a compile cache replayed graphs in this process before, of which nothing is known here.
    `statistics` are those of the rewrite.
    """

    phase: str
    slot: str
    request: Request = field(repr=False)
    plan: Plan | None = field(repr=False)
    statistics: Mapping[str, Mapping[str, int]]
    skipped: tuple[Skipped, ...]
    reason: str | None = None
    replayed: bool = False

    @property
    def signature(self) -> str:
        return self.request.signature

    @property
    def num_candidates(self) -> int:
        return len(self.request.candidates)

    @property
    def num_launches(self) -> int:
        """Launches of the candidates after the rewrite."""
        return self.num_candidates if self.plan is None else len(self.plan.decision.buckets)


def graph_phase(graph: fx.Graph) -> Literal["forward", "backward"]:
    """Whether AOTAutograd made `graph` as the backward: only a backward takes gradients of outputs as inputs.

    A post-grad hook is not told. Inductor itself counts the inputs that are called ``tangents`` to tell the two apart.
    """
    for node in graph.find_nodes(op="placeholder"):
        if "tangents" in node.name or "Tangent" in type(node.meta.get("desc")).__name__:
            return "backward"
    return "forward"


class _InstalledPass(CustomGraphPass):
    """A pass that stays itself when Inductor copies its options: it holds connections and locks.

    `removed` switches it off for good. Somebody's own patch of the options, left after the uninstallation, may put a
    pass back into its hook; it must then do nothing, and its key must not be that of graphs it did something to.
    """

    removed = False

    def __deepcopy__(self, memo: object) -> Self:
        return self


class BucketingPass(_InstalledPass):
    """The pass of the post-grad hook; options as for `install`, which is how it is meant to be used.

    `graphs` lists the graphs that were compiled in this process; compile-cache hits leave no trace in it.
    """

    def __init__(
        self,
        plans: PlanSource,
        *,
        options: Options,
        epoch: str,
        mode: Mode = "bucketed",
        roles: Mapping[str, str] | None = None,
        scopes: Sequence[ScopeLike] = (),
        only_roles: Collection[str] | None = None,
        exclude: Collection[str] = (),
        compute_ops: Collection[str] = (),
        topology: Mapping[str, int] | None = None,
        compare: FirstExecution | None = None,
        reshard: Sequence[str] | None = None,
        on_error: OnError = "abort",
        on_graph: Callable[[RewrittenGraph], None] | None = None,
        where: Where | None = None,
    ) -> None:
        """`reshard` is None, or what `ReshardPass` keeps gathered beside this pass; ranks must agree on that too."""
        refuse_bad_arguments(
            epoch=epoch,
            mode=mode,
            roles=roles,
            scopes=scopes,
            only_roles=only_roles,
            exclude=exclude,
            compute_ops=compute_ops,
            topology=topology,
            reshard=reshard,
            on_error=on_error,
        )
        topology = topology if topology is not None else topology_of(plans)
        self.graphs: list[RewrittenGraph] = []
        self.called = False
        """Whether Inductor gave it a graph."""
        self.keyed = False
        """Whether it was asked for its cache key, as for graphs that a compile cache then replays."""
        self._warned = False
        self._num_replayed = num_replayed()
        self._plans = plans
        self._where = where
        self.mode = mode
        self._on_error = on_error
        self._on_graph = on_graph
        self._compare = compare
        self._describing: dict[str, Any] = {
            "options": options,
            "roles": dict(roles or {}),
            "scopes": tuple(scopes),
            "only_roles": only_roles,
            "exclude": tuple(exclude),
            "compute_ops": frozenset(compute_ops),
            "topology": dict(topology),
        }
        agreed: dict[str, WireValue] = {
            "capture": CAPTURE_VERSION,
            "compute_ops": sorted(compute_ops),
            "epoch": epoch,
            "exclude": sorted(exclude),
            "first_execution": compare is not None,
            "mode": mode,
            "only_roles": None if only_roles is None else sorted(only_roles),
            "options": options.to_wire(),
            "reshard": None if reshard is None else sorted(reshard),
            "rewriter": REWRITER_VERSION,
            "roles": sorted(set((roles or {}).values())),
            "schema": SCHEMA_VERSION,
            "scopes": [{"name": scope.name, "parameters": sorted(scope.param_names)} for scope in scopes],
            "topology": dict(sorted(topology.items())),
        }
        self.fingerprint = digest_of(pack(agreed))
        """What must be the same on every rank before anything is compiled; 64 hex characters."""
        # Torch's names of groups differ between ranks, so they are no part of what ranks compare. A cache entry made
        # under another mapping must not be found all the same.
        self._local_names = digest_of(pack(dict(sorted((roles or {}).items()))))

    def uuid(self) -> tuple[str, str, str]:
        """Inductor's cache key of this pass: the agreed fingerprint and this rank's own mapping of group names."""
        if self.removed:
            return ("bucketplan", "removed", "")
        self.keyed = True
        return ("bucketplan", self.fingerprint, self._local_names)

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite `graph` in place by its plan; failures end the process or raise `PassFailed`, as `on_error` says."""
        if self.removed:
            return
        self.called = True
        if self.mode == "unbucketed":
            return
        # Now and not when it was made: the process group may have come since, and with it the rank.
        where = self._where or where_of(self._plans)
        try:
            description = self._describe(graph)
            where = where.at(signature=description.signature)
            self._rewrite(graph, description)
        except Exception as error:
            end_or_raise(error, self._on_error, where)

    def _describe(self, graph: fx.Graph) -> Description:
        refuse_conflicts()
        refuse_undone_settings()
        module = graph.owning_module
        if module is None:
            raise CompileConflict(
                "the graph's module", None, "a graph without its module cannot be described", remedy="Report this"
            )
        return step("describe", lambda: describe_graph(module, phase=graph_phase(graph), **self._describing))

    def _rewrite(self, graph: fx.Graph, description: Description) -> None:
        left_alone = why_left_alone(description.request, self._describing["scopes"])
        reason = left_alone or description.why_nothing()
        plan: Plan | None = None
        statistics: Mapping[str, Mapping[str, int]] = {}
        # A graph with one candidate is planned too: the plan may move it.
        if description.request.candidates and left_alone is None:
            plan = step("plan", lambda: self._plans.plan(description.request, description.profile))
            statistics = step("apply", lambda: apply_plan(description, plan, recompile=False)).statistics
            if self._compare is not None:
                digests = group_digests(description.request, plan.decision)
                step("apply", lambda: insert_comparison(graph, digests))
        phase = description.request.phase
        self._note(
            RewrittenGraph(
                phase=phase,
                slot=f"{CompileContext.current_compile_id()}/{phase}",
                request=description.request,
                plan=plan,
                statistics=statistics,
                skipped=description.skipped,
                reason=reason,
                replayed=num_replayed() != self._num_replayed,
            )
        )

    def warn_if_outside_scopes(self) -> None:
        """Log a warning if scopes were given and none of the graphs had a collective in one of them."""
        scopes = self._describing["scopes"]
        left_alone = [done for done in self.graphs if why_left_alone(done.request, scopes) is not None]
        if left_alone and not self._warned and not any(done.plan for done in self.graphs):
            self._warned = True
            _LOG.warning(
                "none of %d graphs has a collective in one of the scopes %s: nothing was bucketed",
                len(self.graphs),
                ", ".join(scope.name for scope in scopes),
            )

    def _note(self, done: RewrittenGraph) -> None:
        self.graphs.append(done)
        if done.reason is None:
            _LOG.info(
                "%s graph: %d collectives in %d launches, plan %s of signature %s",
                done.phase,
                done.num_candidates,
                done.num_launches,
                done.plan.digest[:12] if done.plan is not None else "none",
                done.signature[:12],
            )
        elif done.phase == "backward" and not self._warned and not any(found.plan for found in self.graphs):
            # One forward without a plan is a fragment between graph breaks; a whole step without is a mistake.
            self._warned = True
            _LOG.warning("%s graph: %s", done.phase, done.reason)
        else:
            _LOG.info("%s graph: %s", done.phase, done.reason)
        if self._on_graph is not None:
            self._on_graph(done)


class ReshardPass(_InstalledPass):
    """The pass of the joint hook: marks parameter gathers to be made again in the backward (`reshard.mark_gathers`)."""

    def __init__(
        self,
        plans: PlanSource = LOCAL_PLANS,
        *,
        keep_gathered: Sequence[str] = (),
        compute_ops: Collection[str] = (),
        on_error: OnError = "abort",
        where: Where | None = None,
    ) -> None:
        """`plans` and `where` name rank, job and server in errors, as for `install`."""
        refuse_bad_arguments(keep_gathered=keep_gathered, compute_ops=compute_ops, on_error=on_error)
        self._plans = plans
        self._keep_gathered = tuple(keep_gathered)
        self._compute_ops = frozenset(compute_ops)
        self._on_error = on_error
        self._where = where

    def uuid(self) -> tuple[Any, ...]:
        if self.removed:
            return ("bucketplan-reshard", "removed")
        return ("bucketplan-reshard", CAPTURE_VERSION, self._keep_gathered, tuple(sorted(self._compute_ops)))

    def __call__(self, graph: fx.Graph) -> None:
        if self.removed:
            return
        try:
            num_marked = mark_gathers(graph, keep_gathered=self._keep_gathered, compute_ops=self._compute_ops)
        except Exception as error:
            end_or_raise(PassFailed("describe", error), self._on_error, self._where or where_of(self._plans))
        _LOG.info("joint graph: %d parameter gathers are made again in the backward", num_marked)


class Installation:
    """An installed pass; `uninstall`, or leaving the ``with`` block, puts every option back as it was.

    A pass that somebody put into one of our hooks since then stays there.
    """

    def __init__(
        self, bucketing: BucketingPass, undo: contextlib.ExitStack, hooks: Mapping[str, tuple[Any, _InstalledPass]]
    ) -> None:
        """`hooks` maps the name of each hook to the value that it was given and to our pass in it."""
        self.bucketing = bucketing
        self.place = _caller()
        """File and line that installed it."""
        self._undo = undo
        self._hooks = hooks

    def __repr__(self) -> str:
        return f"<the bucketing pass installed at {self.place}, {'' if self.active else 'not '}active>"

    @property
    def active(self) -> bool:
        """Whether it was not uninstalled yet."""
        return not self.bucketing.removed

    @property
    def graphs(self) -> Sequence[RewrittenGraph]:
        """What was compiled in this process since the installation; cache hits are not in it."""
        return self.bucketing.graphs

    def uninstall(self) -> None:
        """Take the pass out; what was compiled stays compiled. Says so at warning level if it was passed by."""
        if not self.active:
            return
        if self.bucketing.mode == "bucketed" and sys.exc_info()[0] is None:
            self._warn_if_passed_by()
        changed = {}
        for hook, (given, ours) in self._hooks.items():
            ours.removed = True
            if getattr(inductor_config, hook) is not given:
                changed[hook] = hook_without(getattr(inductor_config, hook), _is_removed)
        self._undo.close()
        for hook, value in changed.items():
            setattr(inductor_config, hook, value)

    def _warn_if_passed_by(self) -> None:
        now = getattr(inductor_config, _HOOK)
        if self.bucketing not in passes_of(now):
            _LOG.warning(
                "torch._inductor.config.%s was set to %r after %r: what was compiled since then is not bucketed. "
                "Set it before install(), which lets the pass that it finds there run first",
                _HOOK,
                now,
                self,
            )
        elif self.bucketing.called:
            self.bucketing.warn_if_outside_scopes()
        elif self.bucketing.keyed:
            _LOG.info("no graph was compiled anew: a compile cache was asked for the graphs of %r", self)
        else:
            _LOG.warning(
                "nothing went through %r, neither a graph to compile nor a look into a compile cache for one. If a "
                "model ran in compiled form, then it was compiled before (install first, and call the model for the "
                "first time while the pass is installed), in another thread (install in that one), or with a hook of "
                "its own (set %s in torch._inductor.config before install() instead of in torch.compile's options)",
                self,
                _HOOK,
            )

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *_: object) -> None:
        self.uninstall()


def install(
    plans: PlanSource = LOCAL_PLANS,
    *,
    options: Options,
    epoch: str | None = None,
    mode: Mode | None = None,
    roles: Mapping[str, str] | None = None,
    scopes: Sequence[ScopeLike] = (),
    only_roles: Collection[str] | None = None,
    exclude: Collection[str] = (),
    compute_ops: Collection[str] = (),
    topology: Mapping[str, int] | None = None,
    compare: FirstExecution | None = None,
    reshard_after_forward: bool = False,
    keep_gathered: Sequence[str] = (),
    on_error: OnError = "abort",
    on_graph: Callable[[RewrittenGraph], None] | None = None,
    where: Where | None = None,
) -> Installation:
    """Rewrite every graph that torch.compile makes in this thread from now on, until the result is uninstalled.

    `plans` gives the plans, by default made in this process; `epoch` names everything beyond the request that decides
    which plan that is (the epoch id of the opened attempt) and is required where plans come from outside. `mode` is
    what the attempt decided, by default ``bucketed`` with its plans; without an attempt ``BUCKETPLAN_DISABLE`` says it.
    `roles`, `scopes`, `only_roles`, `exclude`, `compute_ops`, `topology` are those of `describe_graph`. With
    `reshard_after_forward` parameters are gathered again in the backward, but for those in `keep_gathered`. `compare`
    gets a graph's group digests (by role) right before the graph first runs in this process, be it compiled here or
    replayed by a compile cache.

    `on_error` says what a failure does. ``abort`` ends the process with status `failures.ABORT_STATUS` after printing
    the error: an exception can be caught, and a rank that goes on without its plan makes the others hang. ``raise``
    raises, and so does ``abort`` where there is one rank. `where` names rank, job and server in errors, by default as
    `plans` know them. A pass that is in the hook already keeps running, before ours.

    A graph without a collective in any of the given `scopes`, such as a fragment between graph breaks, is left alone
    under strategy `module`. Raises `BadArgument`, and `CompileConflict` beside Inductor's own bucketing, options of
    Dynamo that hide failures, or an installation of this thread that was not taken out (`current_installation`).
    """
    with located(where or where_of(plans)):
        refuse_no_source(plans)
        _check(plans, options, epoch)
        refuse_bad_arguments(keep_gathered=keep_gathered)
        refuse_conflicts()
        _refuse_second()
        disabled = disabled_by_environment() and not is_opened(plans)
        wanted = mode if mode is not None else ("unbucketed" if disabled else "bucketed")
        bucketing = BucketingPass(
            plans,
            options=options,
            epoch=epoch if epoch is not None else _LOCAL_EPOCH,
            mode=wanted,
            roles=roles,
            scopes=scopes,
            only_roles=only_roles,
            exclude=exclude,
            compute_ops=compute_ops,
            topology=topology,
            compare=compare,
            reshard=keep_gathered if reshard_after_forward else None,
            on_error=on_error,
            on_graph=on_graph,
            where=where,
        )
    ours: dict[str, _InstalledPass] = {_HOOK: bucketing}
    if reshard_after_forward:
        ours["joint_custom_post_pass"] = ReshardPass(
            plans, keep_gathered=keep_gathered, compute_ops=compute_ops, on_error=on_error, where=where
        )
    hooks = {
        name: (_after(hook_without(getattr(inductor_config, name), _is_removed), one), one)
        for name, one in ours.items()
    }
    changes: dict[str, Any] = {**settings_of(inductor_config), **{name: hook for name, (hook, _) in hooks.items()}}
    with contextlib.ExitStack() as undo:
        if compare is not None:
            undo.enter_context(
                comparing(compare, lambda error: end_or_raise(error, on_error, where or where_of(plans)))
            )
        undo.enter_context(inductor_config.patch(changes))
        # Past the recompile limit Dynamo runs eagerly, and it does so rank by rank.
        undo.enter_context(dynamo_config.patch(fail_on_recompile_limit_hit=True))
        installation = Installation(bucketing, undo.pop_all(), hooks)
    _installation.set(installation)
    return installation


_installation: ContextVar[Installation | None] = ContextVar("bucketplan_installation", default=None)


def current_installation() -> Installation | None:
    """The installation of this thread that was not taken out yet, None where there is none."""
    found = _installation.get()
    return found if found is not None and found.active else None


def _refuse_second() -> None:
    earlier = current_installation()
    others = [one for one in passes_of(getattr(inductor_config, _HOOK)) if isinstance(one, BucketingPass)]
    if earlier is not None or any(not one.removed for one in others):
        raise CompileConflict(
            f"torch._inductor.config.{_HOOK}",
            "a BucketingPass" if earlier is None else repr(earlier),
            "a second pass would plan again what the first one has fused",
            remedy="Take the earlier one out first (leave its with block, or call current_installation().uninstall())",
        )


def _is_removed(one: Any) -> bool:
    return isinstance(one, _InstalledPass) and one.removed


def _caller() -> str:
    """File and line of the innermost frame outside this package."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("bucketplan_client."):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _check(plans: PlanSource, options: Options, epoch: str | None) -> None:
    local = isinstance(plans, LocalPlans)
    if not local and epoch is None:
        raise CompileConflict(
            "epoch",
            None,
            f"plans come from {plans!r}: a warm compile cache could replay a plan that it no longer gives",
            remedy="Pass the epoch id of the opened attempt",
        )
    if local and find_planner(options.planner).uses_profile and is_distributed() and dist.get_world_size() > 1:
        raise CompileConflict(
            "planner",
            options.planner,
            "it plans by each rank's own cost profile, and ranks could plan differently",
            remedy="Take plans from a server, or use strategy size or module",
        )


def _after(installed: Any, ours: CustomGraphPass) -> Any:
    """The value of a hook that runs what is installed there and then `ours`."""
    if not installed:
        return ours
    if hasattr(custom_graph_pass, "get_custom_graph_passes"):
        return (*custom_graph_pass.get_custom_graph_passes(installed), ours)
    return _InTurn(installed, ours)


class _InTurn(_InstalledPass):
    """Two passes as one, for versions of torch that take a single pass only."""

    def __init__(self, first: Any, second: CustomGraphPass) -> None:
        self._first = first
        self._second = second
        self.bucketplan_links = (first, second)

    def uuid(self) -> Any:
        """None, which keeps Inductor from caching, where the first pass has no identity."""
        first = self._first.uuid() if isinstance(self._first, CustomGraphPass) else None
        return None if first is None else (first, self._second.uuid())

    def __call__(self, graph: fx.Graph) -> None:
        self._first(graph)
        self._second(graph)
