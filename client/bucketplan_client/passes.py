"""`FsdpBucketingPass`: describe a graph, get its plan, agree on it with the other ranks, rewrite; one graph pass.

A no-op, with the reason at info level, where bucketing is switched off, without torch.distributed, with one rank, and
under data parallelism other than fsdp. Otherwise it either rewrites the graph on every rank of its groups, or raises on
every one of them and leaves the graph as it was.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist
from torch import fx
from torch.distributed.distributed_c10d import Store

from bucketplan_client.agreement import DEFAULT_DEADLINE_S, DEFAULT_GRACE_S, GroupView, Lockstep, Report
from bucketplan_client.arguments import BadArgument, refuse_bad_arguments
from bucketplan_client.capture.binding import Description
from bucketplan_client.capture.describe import ScopeLike, describe_graph
from bucketplan_client.environment import DISABLE_VARIABLE, disabled_by_environment
from bucketplan_client.errors import AgreementError, PassFailed, Where, located
from bucketplan_client.failures import step, where_of
from bucketplan_client.fallback import AttemptPlans
from bucketplan_client.membership import GroupLike, groups_of_graph, is_distributed, members_of, this_rank
from bucketplan_client.rewrite.apply import Applied, apply_plan
from bucketplan_client.scopes import why_left_alone
from bucketplan_client.store import JobStore, default_store
from bucketplan_core.collectives import KINDS, Options
from bucketplan_core.groups import group_digests
from bucketplan_core.legality import check_decision
from bucketplan_core.plan import Plan
from bucketplan_core.profile import CostProfile
from bucketplan_core.request import Request
from bucketplan_core.wire import digest_of, pack

if TYPE_CHECKING:
    from bucketplan_client.opening import Attempt

__all__ = [
    "DISABLE_VARIABLE",
    "LOCAL_PLANS",
    "UNBUCKETED",
    "FsdpBucketingPass",
    "LocalPlans",
    "PlanSource",
    "disabled_by_environment",
    "is_opened",
    "refuse_no_source",
    "topology_of",
]

UNBUCKETED = Options(strategy="none", planner="none/1")
"""What passes of an attempt without buckets are made with; none of them plans anything."""

_passes = itertools.count()

_LOG = logging.getLogger(__name__)


class PlanSource(Protocol):
    """Whatever gives the plan of a request: a `PlanClient`, the plans of an opened attempt, or `LocalPlans`."""

    def plan(self, request: Request, profile: CostProfile | None = None) -> Plan: ...


class LocalPlans:
    """Plans made in this process. The same bytes as a server's for planners that use no cost profile."""

    def plan(self, request: Request, profile: CostProfile | None = None) -> Plan:
        from bucketplan_core.planning import make_plan

        return make_plan(request, profile)

    def __repr__(self) -> str:
        return "LocalPlans()"


LOCAL_PLANS = LocalPlans()


def is_opened(plans: object) -> bool:
    """Whether `plans` are those of an opened attempt, which decided on the kill switch for all of its ranks."""
    return isinstance(plans, AttemptPlans)


def topology_of(plans: PlanSource) -> Mapping[str, int]:
    """The hosts that groups of each role span, where `plans` are those of an opened attempt, else nothing."""
    found: Mapping[str, int] = getattr(plans, "topology", {})
    return found


def refuse_no_source(plans: object) -> None:
    """Raise `BadArgument` for what gives no plans, such as the `plans` of an attempt without buckets, which are None.

    To plan in this process instead would give buckets to ranks of an attempt that decided to have none.
    """
    if not callable(getattr(plans, "plan", None)):
        raise BadArgument(
            "plans",
            plans,
            "a PlanClient, LocalPlans(), or the plans of an attempt with buckets",
            remedy="Bind the pass to the attempt itself (`FsdpBucketingPass.for_attempt(attempt)`, "
            "`BucketingPass(attempt)`, `register(attempt)`, `install_attempt(attempt)`), which may run without buckets",
        )


class FsdpBucketingPass:
    """A pass ``gm -> gm`` with its options bound here; call it on every rank, or on none.

    `plans` gives the plans. `roles`, `scopes`, `only_roles`, `exclude`, `compute_ops` and `topology` (by default what
    the attempt behind `plans` agreed on) are those of `describe_graph`, `kinds` those of `apply_plan`. `groups` names
    groups that hold parameters (role to group, its name, or its ranks); the groups of the graph's own collectives are
    always compared. `store` is the job's rendezvous store, by default that of torch.distributed; `name` tells this pass
    from others on it. A comparison waits for ranks as long as `deadline_s`, and for the verdict `grace_s` longer.
    A graph without a collective in any of the given `scopes` is agreed on and left alone, with a warning. Making a pass
    raises `BadArgument`; calling it raises `AgreementError` (alike on all ranks of a group) or, where there is nobody
    to compare with, `PassFailed`.
    """

    def __init__(
        self,
        plans: PlanSource,
        *,
        options: Options,
        enabled: bool = True,
        fsdp_enabled: bool = True,
        data_parallel_mode: str = "fsdp",
        phase: str = "joint",
        roles: Mapping[str, str] | None = None,
        groups: Mapping[str, GroupLike] | None = None,
        scopes: Sequence[ScopeLike] = (),
        only_roles: Collection[str] | None = None,
        exclude: Collection[str] = (),
        compute_ops: Collection[str] = (),
        topology: Mapping[str, int] | None = None,
        kinds: Collection[str] | None = None,
        compare: bool = True,
        store: Store | JobStore | None = None,
        name: str | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
        grace_s: float = DEFAULT_GRACE_S,
        job: str | None = None,
    ) -> None:
        self._job = job
        self._plans = plans
        with located(self._where()):
            refuse_no_source(plans)
            refuse_bad_arguments(
                phase=phase,
                roles=roles,
                scopes=scopes,
                only_roles=only_roles,
                exclude=exclude,
                compute_ops=compute_ops,
                topology=topology,
                kinds=kinds,
            )
        self._options = options
        self._enabled = enabled
        self._skipped: str | None = None
        # The kill switch was agreed on when the attempt opened; from then on one rank's environment decides nothing.
        self._opened = is_opened(plans)
        self._fsdp_enabled = fsdp_enabled
        self._data_parallel_mode = data_parallel_mode
        self._phase = phase
        self._roles = dict(roles or {})
        self._groups = dict(groups or {})
        self._scopes = tuple(scopes)
        self._only_roles = only_roles
        self._exclude = exclude
        self._compute_ops = compute_ops
        self._topology = topology if topology is not None else topology_of(plans)
        self._kinds = kinds
        self._compare = compare
        self._store = store
        self._deadline_s = deadline_s
        self._grace_s = grace_s
        # Counted when passes are made, not when they first compare: a rank that fails in between must stay in step.
        self._name = f"pass/{next(_passes)}" if name is None else name
        self._lockstep: Lockstep | None = None

    @classmethod
    def for_attempt(cls, attempt: Attempt, **options: Any) -> FsdpBucketingPass:
        """The pass of an opened attempt: its plans, planning options, groups and store; `options` as for the class.

        It is a no-op where the attempt runs without buckets.
        """
        bound: dict[str, Any] = {
            "groups": attempt.groups,
            "job": attempt.job,
            "name": attempt.next_name("pass"),
            "store": attempt.store,
            **options,
        }
        if attempt.plans is None or attempt.options is None:
            bound["options"] = UNBUCKETED
            skipped = cls(LOCAL_PLANS, **bound)
            skipped._skipped = f"the attempt runs without buckets: {attempt.reason}"
            return skipped
        bound.setdefault("options", attempt.options)
        return cls(attempt.plans, **bound)

    def __call__(self, gm: fx.GraphModule, example_inputs: object = None) -> fx.GraphModule:
        """Rewrite `gm` in place and return it; `example_inputs` is there for pipelines that pass it."""
        reason = self._reason_to_skip()
        if reason is not None:
            _LOG.info("bucketing skipped: %s", reason)
            return gm
        where = self._where()
        try:
            applied, plan, reason = self._rewrite(gm, where)
        except Exception:
            raise  # every rank knows of it, and raises the same
        except BaseException as error:
            # Ctrl-C, an exit, a panic of a library: the others would wait for this rank until their deadline.
            self._withdraw(gm, error, where)
            raise
        if applied is None or plan is None:
            # Scopes that fit no collective of a whole step are a mistake more often than not.
            _LOG.warning("%s", reason)
        else:
            self._tell(applied, plan)
        return gm

    def _where(self) -> Where:
        found = where_of(self._plans)
        return found if self._job is None else found.at(job=self._job)

    def _rewrite(self, gm: fx.GraphModule, where: Where) -> tuple[Applied | None, Plan | None, str | None]:
        """What was applied, of which plan; or neither, and why the graph is left alone."""
        description: Description | None = None
        plan: Plan | None = None
        reason: str | None = None
        failure: PassFailed | None = None
        try:
            description = self._describe(gm)
            where = where.at(signature=description.signature)
            reason = why_left_alone(description.request, self._scopes)
            # Without a plan there is no digest: ranks that found a scope here where others found none are told apart.
            plan = self._obtain(description) if reason is None else None
        except PassFailed as error:
            failure = error.located(where)
        report = self._report(gm, description, plan)
        self._agree(report, failure, where)
        assert description is not None
        applied: Applied | None = None
        try:
            if plan is not None:
                applied = step("apply", lambda: apply_plan(description, plan, kinds=self._kinds))
        except PassFailed as error:
            failure = error.located(where)
        # A rank that cannot apply what was agreed must not be waited for in the first collective of the others.
        try:
            self._agree(report, failure, where)
        except BaseException:
            if applied is not None:
                applied.take_back()
            raise
        return applied, plan, reason

    def _withdraw(self, gm: fx.GraphModule, error: BaseException, where: Where) -> None:
        """Report to the other ranks that this one leaves, in a few seconds at most; raises nothing of its own."""
        reason = PassFailed("run", error, where=where).message
        try:
            report = replace(self._report(gm, None, None), failure=reason)
            if self._compares(report):
                self._compared(where).withdraw(report)
        except Exception:
            _LOG.warning("the other ranks were not told: %s", reason, exc_info=True)

    def _reason_to_skip(self) -> str | None:
        if self._skipped is not None:
            return self._skipped
        if not self._enabled:
            return "switched off by the configuration"
        if not self._opened and disabled_by_environment():
            return f"switched off by {DISABLE_VARIABLE}"
        if not self._fsdp_enabled:
            return "fsdp is switched off by the configuration"
        if self._data_parallel_mode != "fsdp":
            return f"data parallel mode is {self._data_parallel_mode!r}, not 'fsdp'"
        if not is_distributed():
            return "torch.distributed is not initialised"
        if dist.get_world_size() == 1:
            return "the world has one rank"
        return None

    def _describe(self, gm: fx.GraphModule) -> Description:
        return step(
            "describe",
            lambda: describe_graph(
                gm,
                options=self._options,
                phase=self._phase,
                roles=self._roles,
                scopes=self._scopes,
                only_roles=self._only_roles,
                exclude=self._exclude,
                compute_ops=self._compute_ops,
                topology=self._topology,
            ),
        )

    def _obtain(self, description: Description) -> Plan:
        plan = step("plan", lambda: self._plans.plan(description.request, description.profile))
        step("check", lambda: check_decision(description.request, plan.decision))
        return plan

    def _agree(self, report: Report, failure: PassFailed | None, where: Where) -> None:
        """Compare with every rank of this rank's groups; returns only if all hold one plan and none failed."""
        if failure is not None:
            report = replace(report, failure=failure.message)
        if self._compares(report):
            try:
                self._compared(where).agree(report)
            except AgreementError as error:
                raise error.located(where) from failure
        if failure is not None:
            raise failure

    def _compares(self, report: Report) -> bool:
        return self._compare and any(len(view.members) > 1 for view in report.groups)

    def _compared(self, where: Where) -> Lockstep:
        if self._lockstep is None:
            store = self._store
            if not isinstance(store, JobStore):
                store = JobStore(store or default_store(), prefix="bucketplan", where=where)
            self._lockstep = Lockstep(store, deadline_s=self._deadline_s, grace_s=self._grace_s, name=self._name)
        return self._lockstep

    def _report(self, gm: fx.GraphModule, description: Description | None, plan: Plan | None) -> Report:
        members = groups_of_graph(gm.graph, self._roles)
        members |= {role: members_of(group) for role, group in self._groups.items()}
        digests: Mapping[str, str] = {}
        if description is not None and plan is not None:
            digests = self._applied_part(group_digests(description.request, plan.decision))
        if not members:
            members = {"world": tuple(range(dist.get_world_size()))} if description is None else {}
        rank = this_rank()
        return Report(
            rank=rank,
            groups=tuple(
                GroupView(role=role, members=ranks, digest=digests.get(role))
                for role, ranks in sorted(members.items())
                if rank in ranks
            ),
            signature=None if description is None else description.signature,
            decision=None if plan is None else plan.digest,
            request=None if description is None else lambda: description.request.encoded,
        )

    def _applied_part(self, digests: Mapping[str, str]) -> Mapping[str, str]:
        """Digests of what this pass will make of a plan: one that applies some kinds only issues other collectives."""
        kinds = sorted(KINDS if self._kinds is None else frozenset(self._kinds))
        if kinds == sorted(KINDS):
            return digests
        return {role: digest_of(pack({"digest": digest, "kinds": list(kinds)})) for role, digest in digests.items()}

    def _tell(self, applied: Applied, plan: Plan) -> None:
        statistics = applied.statistics.values()
        _LOG.info(
            "bucketed %d collectives into %d buckets (%d bytes packed), plan %s of signature %s from %r; "
            "%d collectives were left as they are",
            sum(entry["original_collectives"] for entry in statistics),
            applied.num_buckets,
            sum(entry.get("copy_out_bytes", 0) + entry.get("packed_input_bytes", 0) for entry in statistics),
            plan.digest[:12],
            plan.decision.signature[:12],
            self._plans,
            len(applied.description.skipped),
        )
        if not _LOG.isEnabledFor(logging.DEBUG):
            return
        for key, entry in applied.statistics.items():
            _LOG.debug("%s: %s", key, dict(entry))
        for bucket in plan.decision.buckets:
            if len(bucket.members) > 1:
                candidates = [applied.description.request.candidates[member] for member in bucket.members]
                names = ", ".join(candidate.param_name or "?" for candidate in candidates)
                _LOG.debug("bucket %s: %s", bucket.id, names)
        for skipped in applied.description.skipped:
            _LOG.debug("left as it is: %s (%s): %s", skipped.node, skipped.rule, skipped.reason)
