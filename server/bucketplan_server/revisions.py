"""What operators do to a plan: replan it with other options, supply one by hand, activate, roll back."""

from __future__ import annotations

import asyncio

import structlog

from bucketplan_core.collectives import Options
from bucketplan_core.epoch import complete_options
from bucketplan_core.errors import BucketplanError
from bucketplan_core.fields import Fields
from bucketplan_core.request import Request
from bucketplan_core.wire import WireValue, pack, unpack
from bucketplan_server.memory import Served
from bucketplan_server.planner.planned import RevisionJob, Stored
from bucketplan_server.planner.pool import PlannerPool
from bucketplan_server.problems import Problem, refuse
from bucketplan_server.service import Pending, PlanService, unknown_signature
from bucketplan_server.settings import Settings
from bucketplan_server.store.engine import Store, StoreError
from bucketplan_server.store.events import Cause
from bucketplan_server.store.jobs import Conflict
from bucketplan_server.store.revisions import (
    Activation,
    OwnRevisions,
    RevisionRow,
    SignatureRow,
    activate,
    add_revision,
    changed_signatures,
    last_event,
    last_revision,
    load_active,
    load_own,
    load_revisions,
    load_signature,
)

__all__ = ["RevisionService"]

_LOOK_AT_ACTIVE = (
    "Look at the revisions of this signature, which say what is active, before you repeat the call; with `expected` as "
    "it was, a repetition is done once or refused as a conflict"
)
_LOOK_AT_REVISIONS = (
    "Look at the revisions of this signature before you repeat the call: a repetition adds a revision of its own"
)


class RevisionService:
    """Revisions of stored plans. Every method raises `Problem` for what a caller must be told."""

    def __init__(self, settings: Settings, store: Store, pool: PlannerPool, plans: PlanService) -> None:
        self._settings = settings
        self._store = store
        self._pool = pool
        self._plans = plans
        self._followed: int | None = None
        self._log = structlog.get_logger("bucketplan_server")

    async def documents(self, signature: str) -> SignatureRow:
        """The request and profile of a signature."""
        try:
            found = await load_signature(self._store, signature)
        except StoreError as error:
            raise self._plans.store_unavailable(error) from None
        if found is None:
            raise unknown_signature(signature)
        return found

    async def revisions(self, signature: str, *, after: int = 0, limit: int) -> list[RevisionRow]:
        """At most `limit` revisions behind number `after`, in the order of their numbers."""
        try:
            found = await load_revisions(self._store, signature, after=after, limit=limit)
        except StoreError as error:
            raise self._plans.store_unavailable(error) from None
        if not found:
            await self.last(signature)
        return found

    async def last(self, signature: str) -> int:
        """Number of the newest revision: they are numbered from 1 on, and none is ever deleted."""
        try:
            number = await last_revision(self._store, signature)
        except StoreError as error:
            raise self._plans.store_unavailable(error) from None
        if number == 0:
            raise unknown_signature(signature)
        return number

    async def serving(self, signature: str, *, job: str = "") -> dict[str, int]:
        """The active revision for everyone, by "", and for `job` where it has one of its own."""
        try:
            return await load_active(self._store, signature, job)
        except StoreError as error:
            raise self._plans.store_unavailable(error) from None

    async def own(self, signature: str, *, namespace: str | None, limit: int) -> OwnRevisions:
        """Which jobs, of `namespace` where given, are served a revision of their own; at most `limit` by name."""
        try:
            return await load_own(self._store, signature, namespace=namespace, limit=limit)
        except StoreError as error:
            raise self._plans.store_unavailable(error) from None

    async def served(self, signature: str, revision: int | None) -> Served:
        """One revision, the active one where None, digests checked."""
        if revision is None:
            found = await self._plans.find(signature)
            if found is None:
                raise unknown_signature(signature)
            return await self._plans.under(found.entry, None)
        if 1 <= revision <= await self.last(signature):
            return await self._plans.numbered(signature, revision)
        raise _unknown_revision(signature, revision)

    async def stored(self, signature: str, revision: int | None) -> Stored:
        """One revision with the documents of its signature, for whoever computes with them."""
        try:
            plan = (await self.served(signature, revision)).row.plan
        except Pending:
            raise unknown_signature(signature) from None
        documents = await self.documents(signature)
        return Stored(request=documents.request, profile=documents.profile, plan=plan)

    async def replan(self, signature: str, options: dict[str, WireValue], *, parent: int, cause: Cause) -> int:
        """Add the plan under other options (the request's own where they are left open); answers its number."""
        documents = await self.documents(signature)
        original = (await asyncio.to_thread(Request.decode, documents.request)).options
        effective = _completed(options, original)
        return await self._add(documents, "replan", effective, parent=parent, cause=cause)

    async def options(self, signature: str, revision: int) -> Options:
        """The options that made a revision; those of the request for one by hand."""
        if not 1 <= revision <= await self.last(signature):
            raise _unknown_revision(signature, revision)
        (row,) = await self.revisions(signature, after=revision - 1, limit=1)
        return Options.read(Fields(unpack(row.options), "options"))

    async def replan_and_serve(
        self,
        signature: str,
        options: dict[str, WireValue],
        *,
        base: int,
        digest: str,
        job: str,
        expected: int,
        cause: Cause,
    ) -> int:
        """Add and serve the plan that `preview` showed as `digest`, in one transaction; answers its number.

        Raises ``conflict``, and nothing is stored, for another plan, or when `job` ("" for everyone) is served another
        revision than `expected`.
        """
        documents = await self.documents(signature)
        effective = _completed(options, await self.options(signature, base))
        number = await self._add(
            documents,
            "replan",
            effective,
            parent=base,
            cause=cause,
            digest=digest,
            job=job,
            expected=expected,
        )
        self._plans.forget(signature)
        return number

    async def preview(self, signature: str, options: dict[str, WireValue], *, base: int) -> tuple[Options, Stored, str]:
        """The plan under the options of revision `base` with `options` over them, and its decision digest.

        Nothing is stored.
        """
        documents = await self.documents(signature)
        effective = _completed(options, await self.options(signature, base))
        revised = await self._pool.revise(
            RevisionJob(
                signature=signature,
                request=documents.request,
                profile=documents.profile,
                origin="replan",
                options=pack(effective.to_wire()),
            )
        )
        stored = Stored(request=documents.request, profile=documents.profile, plan=revised.plan)
        return effective, stored, revised.digest

    async def by_hand(
        self,
        signature: str,
        *,
        buckets: tuple[tuple[int, ...], ...] | None,
        decision: bytes | None,
        parent: int,
        cause: Cause,
    ) -> int:
        """Add a plan that somebody wrote, once it has passed the rules of legality; answers its number."""
        documents = await self.documents(signature)
        options = (await asyncio.to_thread(Request.decode, documents.request)).options
        return await self._add(
            documents, "manual", options, parent=parent, cause=cause, buckets=buckets, decision=decision
        )

    async def activate(self, signature: str, wanted: Activation, cause: Cause) -> int | None:
        """Serve another revision from now on; answers the one before. Attempts that are open keep their epoch."""
        last = await self.last(signature)
        if wanted.revision is not None and not 1 <= wanted.revision <= last:
            raise Problem(
                "unknown-revision",
                f"{signature} has no revision {wanted.revision}, the last one is {last}",
                fields={"path": "body.revision", "value": wanted.revision},
            )
        if wanted.revision is not None:
            # Raises ``quarantined``: nobody is to be served what cannot be served.
            await self._plans.numbered(signature, wanted.revision)
        try:
            before = await activate(self._store, signature, wanted, cause)
        except Conflict as conflict:
            raise Problem("conflict", str(conflict), fields={"path": conflict.path}) from None
        except StoreError as error:
            raise self._plans.store_unavailable(error, look=_LOOK_AT_ACTIVE) from None
        self._plans.forget(signature)
        self._log.info(
            "plan.activated",
            signature=signature,
            revision=wanted.revision,
            before=before,
            job=wanted.job,
            actor=cause.actor,
            reason=cause.reason,
        )
        return before

    async def follow(self) -> None:
        """Drop from memory what other replicas changed since the last call; raises `StoreError`."""
        if self._followed is None:
            self._followed = await last_event(self._store)
            return
        self._followed, changed = await changed_signatures(self._store, self._followed)
        for signature in changed:
            self._plans.forget(signature)

    async def _add(
        self,
        documents: SignatureRow,
        origin: str,
        options: Options,
        *,
        parent: int,
        cause: Cause,
        buckets: tuple[tuple[int, ...], ...] | None = None,
        decision: bytes | None = None,
        digest: str | None = None,
        job: str | None = None,
        expected: int | None = None,
    ) -> int:
        signature = documents.signature
        if not 1 <= parent <= await self.last(signature):
            raise Problem(
                "unknown-revision",
                f"{signature} has no revision {parent}",
                fields={"path": "body.parent", "value": parent},
            )
        revised = await self._pool.revise(
            RevisionJob(
                signature=signature,
                request=documents.request,
                profile=documents.profile,
                origin=origin,
                options=pack(options.to_wire()),
                buckets=buckets,
                decision=decision,
            )
        )
        if digest is not None and revised.digest != digest:
            raise Problem("conflict", "these options do not make the plan that was shown", fields={"path": "digest"})
        try:
            number = await add_revision(
                self._store,
                signature,
                revised,
                origin=origin,
                parent=parent,
                cause=cause,
                job=job,
                expected=expected,
            )
        except Conflict as conflict:
            raise Problem("conflict", str(conflict), fields={"path": conflict.path}) from None
        except StoreError as error:
            raise self._plans.store_unavailable(error, look=_LOOK_AT_REVISIONS) from None
        self._log.info(
            "revision.created",
            signature=signature,
            revision=number,
            origin=origin,
            digest=revised.digest,
            actor=cause.actor,
            reason=cause.reason,
        )
        return number


def _completed(options: dict[str, WireValue], base: Options) -> Options:
    try:
        return complete_options(options, base, path="body.options")
    except BucketplanError as error:
        raise refuse(error).problem() from None


def _unknown_revision(signature: str, revision: int) -> Problem:
    fields: dict[str, WireValue] = {"path": "revision", "value": revision}
    return Problem("unknown-revision", f"{signature} has no revision {revision}", fields=fields)
