"""Opening attempts, taking reports and answering their state."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog

from bucketplan_core.attempt import AttemptRequest, RankReport
from bucketplan_core.collectives import Options
from bucketplan_core.epoch import Epoch, complete_options
from bucketplan_core.errors import BucketplanError
from bucketplan_core.fields import Fields
from bucketplan_core.planners import find_planner
from bucketplan_core.presets import GroupShape, resolve_measured
from bucketplan_core.wire import WireValue, unpack
from bucketplan_server.access.principal import bare_job, namespace_of
from bucketplan_server.jobs.batches import ReportBatches
from bucketplan_server.jobs.divergence import Divergences
from bucketplan_server.jobs.state import Verdict
from bucketplan_server.jobs.states import States
from bucketplan_server.jobs.watch import Key, Reading, Watchers
from bucketplan_server.metrics import Metrics
from bucketplan_server.problems import Problem, refuse
from bucketplan_server.recent import Recent
from bucketplan_server.service import PlanService
from bucketplan_server.settings import Settings
from bucketplan_server.store.engine import Store, StoreError
from bucketplan_server.store.events import Cause
from bucketplan_server.store.hardware import load_profile
from bucketplan_server.store.jobs import (
    Attempt,
    Conflict,
    load_attempt,
    load_attempts,
    open_attempt,
    opened_before,
)
from bucketplan_server.store.plans import PlanRow
from bucketplan_server.store.retention import prune_reports

__all__ = ["PRUNE_EVERY_SECONDS", "JobService", "Opened"]

_KEPT_PARTICIPANTS = 64
_KEPT_ATTEMPTS = 64
_NS = 1_000_000_000
_DAY_NS = 86_400 * _NS
PRUNE_EVERY_SECONDS = 3_600.0
"""How often reports that are too old are looked for."""


@dataclass(frozen=True, slots=True)
class Opened:
    """An attempt with its epoch and the bytes of every override, which ranks may need when the server is away."""

    attempt: Attempt
    epoch: Epoch
    overrides: tuple[PlanRow, ...]
    created: bool


class JobService:
    """Attempts of jobs. Every method raises `Problem` for what a caller must be told."""

    def __init__(self, settings: Settings, store: Store, plans: PlanService, metrics: Metrics) -> None:
        self._settings = settings
        self._store = store
        self._plans = plans
        self._metrics = metrics
        self._defaults = settings.default_options
        self.watchers = Watchers(
            refresh_seconds=settings.refresh_seconds,
            most=settings.max_status_waiters,
            stopping=lambda: plans.stopping,
        )
        metrics.read_from("bucketplan_status_waiters", lambda: self.watchers.num_waiters)
        self._states = States(
            store, stall_ns=int(settings.stall_seconds * _NS), refresh_seconds=settings.refresh_seconds
        )
        self._attempts: Recent[Key, Attempt] = Recent(_KEPT_ATTEMPTS)
        self._expected: Recent[Key, frozenset[int]] = Recent(_KEPT_PARTICIPANTS)
        self._batches = ReportBatches(store, plans, self._stored)
        self._divergences = Divergences(store, metrics)
        self._log = structlog.get_logger("bucketplan_server")

    async def open(self, job: str, request: AttemptRequest, cause: Cause) -> Opened:
        """Open an attempt, or answer the one that was opened under this key."""
        if request.held_epoch is not None and request.held_epoch.job != bare_job(job):
            raise Problem(
                "conflict",
                f"the held epoch is that of job {request.held_epoch.job!r}, not of {bare_job(job)!r}",
                fields={"path": "body.held_epoch.job", "value": request.held_epoch.job},
            )

        try:
            before = await opened_before(self._store, job, request)
        except Conflict as conflict:
            raise _conflict(conflict) from None
        except StoreError as error:
            raise self._plans.store_unavailable(error) from None
        # Only a new attempt asks what its options mean today: a repeated call is answered whatever changed since.
        options = None if before is not None else self._complete(await self._with_figures(request))

        def make_epoch(overrides: Mapping[str, str]) -> Epoch:
            assert options is not None, "an attempt is never deleted, so one that was there stays"
            return Epoch.build(job=bare_job(job), options=options, topology=request.topology, overrides=overrides)

        try:
            attempt, epoch, created = await open_attempt(self._store, job, request, make_epoch, cause)
        except Conflict as conflict:
            raise _conflict(conflict) from None
        except StoreError as error:
            raise self._plans.store_unavailable(error) from None
        namespace = namespace_of(job)
        if created and request.held_epoch is None:
            # What this server fixed just now was active.
            self._plans.epochs.put(epoch, namespace)
            self._plans.epochs.put(epoch)
        withheld = await self._plans.withheld(epoch, namespace)
        if created:
            self._metrics.count("bucketplan_attempts_opened_total")
            self._log.info(
                "attempt.opened",
                job=job,
                attempt=attempt.attempt,
                epoch=epoch.id,
                overrides=len(epoch.overrides),
                adopted=request.held_epoch is not None,
            )
        overrides = []
        for override in epoch.overrides:
            if override.signature in withheld:
                continue
            row = await self._plans.revision(override.signature, override.digest)
            # An adopted epoch may name a plan that a restored database has lost; its ranks hold the bytes.
            if row is not None:
                overrides.append(row)
        return Opened(attempt, epoch, tuple(overrides), created)

    async def prune(self) -> None:
        """Delete reports that are older than the setting, which is not 0."""
        before_ns = time.time_ns() - self._settings.report_retention_days * _DAY_NS
        pruned = await prune_reports(self._store, before_ns, kept=self._say_damaged)
        if pruned:
            self._log.info("reports.pruned", reports=pruned)

    def _say_damaged(self, job: str, attempt: int, reason: str) -> None:
        self._store.errors += 1
        self._log.error("reports.damaged", job=job, attempt=attempt, detail=reason)

    def refuse_more_reports(self) -> None:
        """Raises ``busy`` where too many wait to be stored, before another body is read for nothing."""
        self._batches.refuse_beyond()

    async def report(self, job: str, attempt: int, reports: Sequence[RankReport], cause: Cause) -> None:
        """Store reports; those of many ranks that come at once share a transaction. Repeating one changes nothing."""
        expected = self._expected.get((job, attempt))
        if expected is None:
            opened = AttemptRequest.read(Fields(unpack((await self.attempt(job, attempt)).request), "body"))
            expected = frozenset(rank for groups in opened.participants.values() for group in groups for rank in group)
            self._expected.put((job, attempt), expected)
        for index, one in enumerate(reports):
            if expected and one.rank not in expected:
                raise Problem(
                    "conflict",
                    f"rank {one.rank} is none of the {len(expected)} participants with which attempt {attempt} of job "
                    f"{job!r} was opened; nothing of this call is stored",
                    fields={"path": f"body.reports[{index}].rank", "value": one.rank},
                )
        await self._batches.take(job, attempt, reports, cause)

    async def attempt(self, job: str, attempt: int) -> Attempt:
        """An attempt as it was opened; it never changes, so those asked for last are kept."""
        kept = self._attempts.get((job, attempt))
        if kept is not None:
            return kept
        try:
            found = await load_attempt(self._store, job, attempt)
        except StoreError as error:
            raise self._plans.store_unavailable(error) from None
        if found is None:
            raise Problem(
                "unknown-attempt",
                f"job {job!r} has no attempt {attempt}; its leader opens one with POST /v1/jobs/{job}/attempts",
                fields={"job": job, "attempt": attempt},
            )
        self._attempts.put((job, attempt), found)
        return found

    async def attempts(self, job: str, *, before: int | None, limit: int) -> list[Attempt]:
        try:
            return await load_attempts(self._store, job, before=before, limit=limit)
        except StoreError as error:
            raise self._plans.store_unavailable(error) from None

    async def epoch(self, epoch: str, *, namespace: str | None = None) -> Epoch:
        """The epoch of this id; one that no job of `namespace` was opened under does not exist there."""
        found = await self._plans.epoch(epoch, namespace=namespace)
        if found is None:
            raise Problem("unknown-epoch", f"no attempt was opened under epoch {epoch}", fields={"epoch": epoch})
        return found

    async def reading(self, attempt: Attempt) -> Reading:
        """What the store holds of the attempt now."""
        try:
            return await self._states.reading(attempt)
        except StoreError as error:
            raise self._plans.store_unavailable(error) from None

    async def wait_for_change(self, attempt: Attempt, seen: str, seconds: float) -> Reading:
        """The first reading whose version is not `seen`, else the last after `seconds` or when the server is to stop.

        All who wait for one attempt share one watcher of it; raises ``busy`` above `max_status_waiters`.
        """
        if self.watchers.is_full:
            raise self._plans.busy("callers wait for attempts to change", self._settings.max_status_waiters)
        key = (attempt.job, attempt.attempt)
        found = await self.watchers.wait(key, seen, seconds, lambda: self.reading(attempt))
        return found or await self.reading(attempt)

    async def status(self, attempt: Attempt, reading: Reading | None = None) -> Mapping[str, WireValue]:
        """The state of the attempt, of `reading` or of now, see `States.status`; not to be changed."""
        try:
            return await self._states.status(attempt, reading or await self._states.reading(attempt))
        except StoreError as error:
            raise self._plans.store_unavailable(error) from None

    async def verdicts(self, attempts: Sequence[Attempt]) -> list[Verdict | None]:
        """What a list says of each attempt, None where it would cost too much, see `States.verdicts`."""
        try:
            return await self._states.verdicts(attempts)
        except StoreError as error:
            raise self._plans.store_unavailable(error) from None

    def _stored(self, job: str, attempt: int, taken: Sequence[RankReport], num_new: int) -> None:
        self._metrics.tallies["bucketplan_reports_total", ""] += num_new
        # Repeated ones too: the server that stored them may have ended before it looked at them.
        self._divergences.watch(job, attempt, taken)
        if num_new:
            self.watchers.changed((job, attempt))

    async def _with_figures(self, request: AttemptRequest) -> Mapping[str, WireValue]:
        """The leader's options with the figures of the stored profiles that it names; raises ``unknown-profile``."""
        named = request.options.get("hardware")
        if not isinstance(named, str | list):
            return request.options
        names = [named] if isinstance(named, str) else named
        found = []
        for name in names:
            try:
                stored = await load_profile(self._store, name) if isinstance(name, str) else None
            except StoreError as error:
                raise self._plans.store_unavailable(error) from None
            if stored is None:
                raise Problem(
                    "unknown-profile",
                    f"body.options.hardware names {name!r}, which is not stored",
                    fields={"path": "body.options.hardware", "value": name if isinstance(name, str) else repr(name)},
                )
            found.append(stored.profile)
        # One role's groups may differ by a rank; the largest is what its slowest members wait for.
        sizes = {role: max(map(len, groups), default=1) for role, groups in request.participants.items()}
        shapes = {role: GroupShape(size, request.topology.get(role, 1)) for role, size in sizes.items()}
        try:
            return {**request.options, "hardware": resolve_measured(found, shapes).to_wire()}
        except BucketplanError as error:
            raise refuse(error).problem() from None

    def _complete(self, given: Mapping[str, WireValue]) -> Options:
        try:
            options = complete_options(given, self._defaults, path="body.options")
            find_planner(options.planner)
        except BucketplanError as error:
            raise refuse(error).problem() from None
        return options


def _conflict(conflict: Conflict) -> Problem:
    return Problem("conflict", str(conflict), fields={"path": conflict.path})
