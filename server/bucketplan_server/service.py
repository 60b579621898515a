"""Plans: known ones from memory or the store, unknown ones planned once, stored, read back and only then answered."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from typing import NamedTuple

import structlog

from bucketplan_core.epoch import Epoch
from bucketplan_core.errors import SignatureMismatch
from bucketplan_server.beside import HASHED_BYTES, beside
from bucketplan_server.memory import Entry, EpochMemory, PlanMemory, Served, build_entry, fixed_key, serve
from bucketplan_server.metrics import Metrics
from bucketplan_server.planner.planned import PlanJob
from bucketplan_server.planner.pool import PlannerPool
from bucketplan_server.problems import Problem, refuse
from bucketplan_server.settings import Settings
from bucketplan_server.store.engine import Store, StoreDamaged, StoreError, StoreUnconfirmed
from bucketplan_server.store.events import Cause
from bucketplan_server.store.jobs import epoch_is_known_in, load_epoch, never_served
from bucketplan_server.store.plans import (
    Damaged,
    PlanRow,
    load_active,
    load_decision,
    load_numbered,
    load_revision,
    quarantine_revision,
    store_planned,
)

__all__ = ["Found", "Pending", "PlanService", "unknown_signature"]


_CHECKED_AT_ONCE = 500
"""Overrides of an epoch that a read of one plan still checks all of, to remember the epoch."""


class Pending(Exception):
    """Planning of `signature` takes longer than a caller may wait; repeating the call is harmless."""

    def __init__(self, signature: str) -> None:
        self.signature = signature
        super().__init__(f"{signature} is being planned")


class Found(NamedTuple):
    """A plan, and where it was: ``memory`` or ``store``, None where it was planned while the caller waited."""

    entry: Entry
    source: str | None


class PlanService:
    """Finds and makes plans. Every method raises `Problem` for what a caller must be told."""

    def __init__(self, settings: Settings, store: Store, pool: PlannerPool, metrics: Metrics) -> None:
        self._settings = settings
        self._store = store
        self._pool = pool
        self._metrics = metrics
        self.memory = PlanMemory(settings.memory_cache_bytes)
        self._flights: dict[str, asyncio.Task[tuple[Entry, bool]]] = {}
        self._flight_bytes: dict[str, int] = {}
        self._most_flight_bytes = max(settings.max_bodies_bytes, settings.max_body_bytes)
        self._loads: dict[str, asyncio.Task[Entry | None]] = {}
        self._arrivals: dict[str, set[asyncio.Event]] = {}
        self._generation: dict[str, int] = {}
        self._damaged: set[tuple[str, int]] = set()
        self._waiters = 0
        self._num_expecting = 0
        self.epochs = EpochMemory()
        self.stopping = False
        self._log = structlog.get_logger("bucketplan_server")
        metrics.read_from("bucketplan_plannings_in_progress", lambda: len(self._flights))
        metrics.read_from("bucketplan_waiters", lambda: self._waiters)
        metrics.read_from("bucketplan_post_waiters", lambda: self._num_expecting)
        metrics.read_from("bucketplan_memory_plans", lambda: len(self.memory))
        metrics.read_from("bucketplan_memory_bytes", lambda: self.memory.size_bytes)

    async def find(self, signature: str, *, wait_seconds: float = 0.0) -> Found | None:
        """What is stored for `signature`, None if nothing is.

        A signature that is being planned is waited for, up to the setting; with `wait_seconds` one that nobody posted
        yet, too. Raises `Pending` when planning goes on after that, and ``busy`` in place of waiting for a post while
        the server stops.
        """
        found = await self._known(signature)
        if found is not None:
            return found
        limit = self._settings.plan_wait_seconds
        if signature not in self._flights and wait_seconds > 0:
            began = time.monotonic()
            await self._arrival(signature, min(wait_seconds, limit))
            limit = max(0.0, limit - (time.monotonic() - began))
            # Another replica may have planned it meanwhile, of which nobody tells this one.
            found = None if signature in self._flights else await self._known(signature)
            if found is not None:
                return found
        flight = self._flights.get(signature)
        if flight is not None:
            return Found((await self._join(signature, flight, limit))[0], None)
        entry = self.memory.get(signature)
        if entry is not None:
            return Found(entry, None)
        if wait_seconds > 0 and self.stopping:
            # Not as unknown: the caller did not get the time that it wanted to wait, and others can give it.
            raise self._stops()
        return None

    def count_answer(self, found: Found | None) -> None:
        """Count the answer to a caller who asked for a plan: a hit with it, a miss where none is stored."""
        if found is None:
            self._metrics.count("bucketplan_plan_misses_total")
        elif found.source is not None:
            self._metrics.count("bucketplan_plan_hits_total", found.source)

    async def post(
        self,
        signature: str,
        request: bytes,
        profile: bytes | None,
        cause: Cause,
        *,
        wait_seconds: float | None = None,
        handed_over: Callable[[], None] = lambda: None,
    ) -> tuple[Found, bool]:
        """The plan of a request: the stored one, or one that is planned now, once for everybody who asks.

        `request` must hash to `signature`. A profile is read only where the signature is new: the first one is bound
        for ever. The flag says whether this call had it planned. Who waits for a plan holds neither any longer, which
        `handed_over` is told. Raises `Pending` after `wait_seconds`, those of the setting where left out.
        """
        actual = await beside(len(request) > HASHED_BYTES, _sha256, request)
        if actual != signature:
            raise refuse(SignatureMismatch(claimed=signature, actual=actual)).problem()
        found = await self._known(signature)
        if found is not None:
            return found, False
        flight = self._flights.get(signature)
        mine = flight is None
        if flight is None:
            if len(self._flights) >= self._settings.max_queued_plannings:
                raise self.busy("signatures are in planning", self._settings.max_queued_plannings)
            size = len(request) + len(profile or b"")
            if sum(self._flight_bytes.values()) + size > self._most_flight_bytes:
                raise self.busy("bytes of requests are in planning", self._most_flight_bytes)
            self._flight_bytes[signature] = size
            flight = self._take_off(PlanJob(signature, request, profile), cause)
        else:
            self._metrics.count("bucketplan_single_flight_waits_total")
        del request, profile
        handed_over()
        limit = self._settings.plan_wait_seconds if wait_seconds is None else wait_seconds
        entry, stored = await self._join(signature, flight, limit)
        return Found(entry, None), mine and stored

    async def epoch(self, epoch: str, *, namespace: str | None = None) -> Epoch | None:
        """The epoch of this id, None if no attempt, of a job of `namespace` where given, was opened under it."""
        found = self.epochs.get(epoch, namespace)
        if found is not None:
            return found
        try:
            found = await load_epoch(self._store, epoch)
            if found is None or (namespace is not None and not await epoch_is_known_in(self._store, epoch, namespace)):
                return None
        except StoreError as error:
            raise self.store_unavailable(error) from None
        if len(found.overrides) <= _CHECKED_AT_ONCE:
            # An opening looks at all of them, however many; a read of one plan must not.
            await self.withheld(found, namespace)
        return found

    async def withheld(self, epoch: Epoch, namespace: str | None, *, only: str | None = None) -> frozenset[str]:
        """Signatures whose override a leader may have made up, see `never_served`: their bytes are not given out.

        With `only`, whether that signature is one of them. An epoch without any is remembered.
        """
        if self.epochs.get(epoch.id, namespace) is not None:
            return frozenset()
        try:
            found = await never_served(self._store, epoch, namespace, only=only)
        except StoreError as error:
            raise self.store_unavailable(error) from None
        if only is None and not found:
            self.epochs.put(epoch, namespace)
        return found

    async def under(self, entry: Entry, epoch: str | None, *, namespace: str | None = None) -> Served:
        """What a caller of `namespace` gets of an entry: under an epoch what it fixed, else the active revision."""
        if epoch is None:
            return await self._whole(entry.active)
        found = await self.epoch(epoch, namespace=namespace)
        if found is None:
            raise Problem("unknown-epoch", f"no attempt was opened under epoch {epoch}", fields={"epoch": epoch})
        signature = entry.first.signature
        digest = found.digest_for(signature)
        if digest is None:
            return await self._whole(entry.first)
        served = await self._fixed(signature, digest)
        if served is not None and signature in await self.withheld(found, namespace, only=signature):
            raise Problem(
                "unknown-revision",
                f"epoch {epoch} was adopted and fixes decision {digest}, which was never served to its job as far as "
                "this store knows; activate that revision for the job",
                fields={"signature": signature, "digest": digest, "epoch": epoch},
            )
        if served is None:
            raise Problem(
                "unknown-revision",
                f"epoch {epoch} fixes decision {digest} for this signature, which this store does not hold",
                fields={"signature": signature, "digest": digest, "epoch": epoch},
            )
        return served

    async def numbered(self, signature: str, revision: int) -> Served:
        """The revision of this number, which exists."""
        try:
            row = await load_numbered(self._store, signature, revision)
        except Damaged as damaged:
            raise await self._quarantine(damaged) from None
        except StoreError as error:
            raise self.store_unavailable(error) from None
        return await asyncio.to_thread(serve, row)

    async def decision(self, digest: str) -> PlanRow:
        """A revision with this decision, whatever its signature; raises ``unknown-revision`` where there is none."""
        try:
            row = await load_decision(self._store, digest)
        except Damaged as damaged:
            raise await self._quarantine(damaged) from None
        except StoreError as error:
            raise self.store_unavailable(error) from None
        if row is None:
            raise Problem("unknown-revision", f"no stored plan has decision {digest}", fields={"digest": digest})
        return row

    async def revision(self, signature: str, digest: str) -> PlanRow | None:
        """The revision of `signature` with this decision, None where the store has none."""
        served = await self._fixed(signature, digest)
        return None if served is None else served.row

    async def _fixed(self, signature: str, digest: str) -> Served | None:
        kept = self.memory.get(fixed_key(signature, digest))
        if kept is not None and isinstance(kept.active, Served):
            return kept.active
        try:
            row = await load_revision(self._store, signature, digest)
        except Damaged as damaged:
            raise await self._quarantine(damaged) from None
        except StoreError as error:
            raise self.store_unavailable(error) from None
        if row is None:
            return None
        served = await asyncio.to_thread(serve, row)
        self.memory.put(fixed_key(signature, digest), Entry(active=served, first=served))
        return served

    async def _whole(self, found: Served | Damaged) -> Served:
        """What was found, read again where it was damaged; raises ``quarantined``."""
        return found if isinstance(found, Served) else await self.numbered(found.signature, found.revision)

    def forget(self, signature: str) -> None:
        """Drop what is in memory of a signature, so that the next answer comes from the store.

        A load that is under way may have read what was there before, so its result is neither kept nor given to those
        who ask from now on.
        """
        self.memory.drop(signature)
        self._loads.pop(signature, None)
        self._generation[signature] = self._generation.get(signature, 0) + 1

    def stop(self) -> None:
        """End the waits for posts, now and from now on; what is being planned is still waited for."""
        self.stopping = True
        for waiting in self._arrivals.values():
            for arrived in waiting:
                arrived.set()

    async def close(self) -> None:
        """Let plannings that were begun be stored."""
        if self._flights:
            await asyncio.wait(list(self._flights.values()), timeout=self._settings.store_timeout_seconds)

    async def _known(self, signature: str) -> Found | None:
        entry = self.memory.get(signature)
        if entry is not None:
            return Found(entry, "memory")
        load = self._loads.get(signature)
        if load is None:
            load = asyncio.create_task(self._load(signature))
            self._loads[signature] = load
            load.add_done_callback(lambda done: self._loaded(signature, done))
        entry = await asyncio.shield(load)
        return None if entry is None else Found(entry, "store")

    def _loaded(self, signature: str, load: asyncio.Task[Entry | None]) -> None:
        if self._loads.get(signature) is load:
            del self._loads[signature]

    async def _load(self, signature: str) -> Entry | None:
        generation = self._generation.get(signature, 0)
        try:
            rows = await load_active(self._store, signature)
        except StoreError as error:
            raise self.store_unavailable(error) from None
        return None if rows is None else await self._remember(*rows, generation)

    def _take_off(self, job: PlanJob, cause: Cause) -> asyncio.Task[tuple[Entry, bool]]:
        flight = asyncio.create_task(self._plan(job, cause))
        self._flights[job.signature] = flight
        flight.add_done_callback(lambda done: self._landed(job.signature, done))
        for arrived in self._arrivals.pop(job.signature, ()):
            arrived.set()
        return flight

    def _landed(self, signature: str, flight: asyncio.Task[tuple[Entry, bool]]) -> None:
        del self._flights[signature], self._flight_bytes[signature]
        # Every waiter may have left (202, disconnect); the failure is then known to the log alone.
        error = None if flight.cancelled() else flight.exception()
        if error is not None and not isinstance(error, Problem):
            self._log.error("planning.failed", signature=signature, exc_info=error)

    async def _plan(self, job: PlanJob, cause: Cause) -> tuple[Entry, bool]:
        began = time.monotonic()
        generation = self._generation.get(job.signature, 0)
        outcome = "failed"
        try:
            async with self._store.planning(job.signature) as shared:
                known = await load_active(self._store, job.signature) if shared else None
                if known is not None:
                    # Another replica planned it while this one waited for its turn.
                    outcome = "known"
                    return await self._remember(*known, generation), False
                planned = await self._pool.plan(job)
                if _sha256(planned.plan) != planned.plan_sha256:
                    raise Problem("internal", "the plan changed on its way from its process; nothing was stored")
                active, first, stored = await store_planned(self._store, planned, cause)
            outcome = "stored" if stored else "known"
            self._metrics.planning_seconds.observe(time.monotonic() - began)
            self._log.info(
                "plan.stored" if stored else "plan.known",
                signature=job.signature,
                digest=planned.digest if isinstance(first, Damaged) else first.digest,
                planner=planned.planner,
                num_candidates=planned.facts["num_candidates"],
                seconds=round(time.monotonic() - began, 3),
            )
            return await self._remember(active, first, generation), stored
        except StoreError as error:
            raise self.store_unavailable(error) from None
        except Problem as problem:
            outcome = "failed" if problem.status >= 500 else "refused"
            raise
        finally:
            self._metrics.count("bucketplan_plannings_total", outcome)

    async def _join(
        self, signature: str, flight: asyncio.Task[tuple[Entry, bool]], seconds: float
    ) -> tuple[Entry, bool]:
        if self._waiters >= self._settings.max_waiters:
            raise self.busy("callers wait for planning", self._settings.max_waiters)
        self._waiters += 1
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(flight)
        except TimeoutError:
            raise Pending(signature) from None
        finally:
            self._waiters -= 1

    async def _arrival(self, signature: str, seconds: float) -> None:
        """Returns when somebody posts `signature`, after `seconds`, or as the server stops."""
        if self.stopping:
            return
        if self._num_expecting >= self._settings.max_waiters:
            raise self.busy("callers wait for a post", self._settings.max_waiters)
        arrived = asyncio.Event()
        waiting = self._arrivals.setdefault(signature, set())
        waiting.add(arrived)
        self._num_expecting += 1
        try:
            async with asyncio.timeout(seconds):
                await arrived.wait()
        except TimeoutError:
            pass
        finally:
            self._num_expecting -= 1
            waiting.discard(arrived)
            # After a post others may wait again, in a set of their own.
            if not waiting and self._arrivals.get(signature) is waiting:
                del self._arrivals[signature]

    async def _remember(self, active: PlanRow | Damaged, first: PlanRow | Damaged, generation: int) -> Entry:
        """The entry of these rows, kept in memory unless the signature changed since `generation` was read."""
        for row in (first, active) if first != active else (first,):
            if isinstance(row, Damaged):
                await self._quarantine(row)
        entry = await asyncio.to_thread(build_entry, active, first)
        if self._generation.get(active.signature, 0) == generation:
            self.memory.put(active.signature, entry)
        return entry

    async def _quarantine(self, damaged: Damaged) -> Problem:
        if (damaged.signature, damaged.revision) not in self._damaged:
            self._damaged.add((damaged.signature, damaged.revision))
            self._metrics.count("bucketplan_quarantined_total")
            self._log.error(
                "plan.quarantined", signature=damaged.signature, revision=damaged.revision, detail=damaged.detail
            )
        if not damaged.known:
            try:
                await quarantine_revision(self._store, damaged)
            except StoreError as error:
                self._log.error("store.failed", detail=str(error))
        return Problem(
            "quarantined",
            f"{damaged}; restore the database from a backup, or activate another revision",
            fields={"signature": damaged.signature, "revision": damaged.revision},
        )

    def store_unavailable(self, error: StoreError, *, look: str | None = None) -> Problem:
        """What a caller is told when the store fails: repeat, unless it is damaged; known plans are still served.

        `look` is for calls that must not just be repeated where the change may have been stored: how to find out.
        """
        self._log.error("store.failed", detail=str(error))
        if isinstance(error, StoreDamaged):
            # Without Retry-After: only an operator can end this.
            return Problem("store-damaged", f"{error}. Nothing was changed, and repeating the call will not help")
        if isinstance(error, StoreUnconfirmed) and look is not None:
            # Without Retry-After, and of a status that no client repeats by itself.
            return Problem("unconfirmed", f"the store failed: {error}. {look}")
        outcome = str(error) if isinstance(error, StoreUnconfirmed) else f"{error}; nothing was changed"
        return Problem(
            "store-unavailable",
            f"the store failed: {outcome}. Repeat the call, which is harmless",
            headers={"Retry-After": str(self._settings.retry_after_seconds)},
        )

    def busy(self, what: str, limit: int) -> Problem:
        """What a caller is told who would be one more than `limit`: repeat later."""
        return Problem(
            "busy",
            f"{limit} {what}, the most that this server takes; repeat the call",
            fields={"limit": limit},
            headers={"Retry-After": str(self._settings.retry_after_seconds)},
        )

    def _stops(self) -> Problem:
        return Problem(
            "busy",
            "the server is stopping, so it waits for no post; repeat the call, which another replica may answer",
            # On a connection of its own, the repeated call can reach one.
            headers={"Retry-After": str(self._settings.retry_after_seconds), "Connection": "close"},
        )


def unknown_signature(signature: str) -> Problem:
    return Problem(
        "unknown-signature",
        f"no plan is stored for {signature}; post the request to /v1/plans to have it planned",
        fields={"signature": signature},
    )


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
