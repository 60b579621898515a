"""Revisions of a signature: added and activated, never changed or deleted."""

from __future__ import annotations

import time
from dataclasses import dataclass

from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from bucketplan_core.wire import digest_of
from bucketplan_server.planner.planned import Revised
from bucketplan_server.store.engine import Store
from bucketplan_server.store.events import Cause, append_event
from bucketplan_server.store.jobs import Conflict, of_namespace
from bucketplan_server.store.tables import active, events, profiles, revisions, signatures

__all__ = [
    "Activation",
    "OwnRevisions",
    "RevisionRow",
    "SignatureRow",
    "activate",
    "add_revision",
    "changed_signatures",
    "last_event",
    "last_revision",
    "load_active",
    "load_own",
    "load_revisions",
    "load_signature",
]


@dataclass(frozen=True, slots=True)
class SignatureRow:
    """A signature's own documents, canonical bytes."""

    signature: str
    request: bytes
    profile: bytes


@dataclass(frozen=True, slots=True)
class RevisionRow:
    """One revision without its plan; `active_for` are the jobs it was activated for by name, "" meaning everyone."""

    revision: int
    digest: str
    origin: str
    planner: str
    options: bytes
    parent: int | None
    created_ns: int
    actor: str
    reason: str
    active_for: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Activation:
    """What an activation asks for: `revision` for everyone, or for one `job`; None there takes the job's own back.

    Where `expected` is given, the active revision must be that one: of two operators at once, one is told. 0 expects
    that the job has no revision of its own.
    """

    revision: int | None
    job: str
    expected: int | None = None


@dataclass(frozen=True, slots=True)
class OwnRevisions:
    """Jobs that are served a revision of their own: the first by name as (job, revision), and how many there are."""

    jobs: tuple[tuple[str, int], ...]
    num_jobs: int


async def load_signature(store: Store, signature: str) -> SignatureRow | None:
    query = (
        select(signatures.c.request, profiles.c.profile)
        .join(profiles, profiles.c.digest == signatures.c.profile)
        .where(signatures.c.signature == signature)
    )
    async with store.read() as connection:
        row = (await connection.execute(query)).first()
    return None if row is None else SignatureRow(signature, row.request, row.profile)


async def last_revision(store: Store, signature: str) -> int:
    """Number of the newest revision, which is how many there are; 0 for an unknown signature."""
    async with store.read() as connection:
        query = select(func.max(revisions.c.revision)).where(revisions.c.signature == signature)
        return int(await connection.scalar(query) or 0)


async def load_active(store: Store, signature: str, job: str) -> dict[str, int]:
    """The active revision for everyone, by "", and for `job` where it has one of its own."""
    query = select(active.c.job, active.c.revision).where(active.c.signature == signature, active.c.job.in_(("", job)))
    async with store.read() as connection:
        return {row.job: row.revision for row in await connection.execute(query)}


async def load_own(store: Store, signature: str, *, namespace: str | None, limit: int) -> OwnRevisions:
    """Who has a revision of `signature` of its own, of `namespace` where given; at most `limit` jobs are listed."""
    theirs = (active.c.signature == signature) & (active.c.job != "")
    if namespace is not None:
        theirs &= of_namespace(active.c.job, namespace)
    query = select(active.c.job, active.c.revision).where(theirs).order_by(active.c.job).limit(limit)
    async with store.read() as connection:
        rows = (await connection.execute(query)).all()
        count = await connection.scalar(select(func.count()).select_from(active).where(theirs))
    return OwnRevisions(tuple((row.job, row.revision) for row in rows), int(count or 0))


async def load_revisions(store: Store, signature: str, *, after: int, limit: int) -> list[RevisionRow]:
    """The `limit` revisions behind number `after`, in the order of their numbers."""
    columns = [column for column in revisions.c if column.name not in ("plan", "plan_sha256")]
    numbers = (after, after + limit)
    query = (
        select(*columns)
        .where(revisions.c.signature == signature, revisions.c.revision > numbers[0])
        .where(revisions.c.revision <= numbers[1])
        .order_by(revisions.c.revision)
    )
    pointing = select(active).where(
        active.c.signature == signature, active.c.revision > numbers[0], active.c.revision <= numbers[1]
    )
    async with store.read() as connection:
        rows = (await connection.execute(query)).mappings().all()
        pointers = (await connection.execute(pointing)).mappings().all()
    serves: dict[int, list[str]] = {}
    for pointer in pointers:
        serves.setdefault(pointer["revision"], []).append(pointer["job"])
    return [
        RevisionRow(
            revision=row["revision"],
            digest=row["digest"],
            origin=row["origin"],
            planner=row["planner"],
            options=row["options"],
            parent=row["parent"],
            created_ns=row["created_ns"],
            actor=row["actor"],
            reason=row["reason"],
            active_for=tuple(sorted(serves.get(row["revision"], ()))),
        )
        for row in rows
    ]


async def add_revision(
    store: Store,
    signature: str,
    revised: Revised,
    *,
    origin: str,
    parent: int,
    cause: Cause,
    job: str | None = None,
    expected: int | None = None,
) -> int:
    """Store a plan as the next revision; answers its number. The planner's own is always revision 1.

    It is served from now on to `job` ("" for everyone), to nobody yet where None. Storing and serving are one
    transaction: raises `Conflict` (path ``body.expected``) and stores nothing when another revision is active than
    the caller expects.
    """
    now = time.time_ns()
    async with store.write() as connection:
        if job is not None:
            await _active(connection, signature, Activation(revision=None, job=job, expected=expected))
        query = select(func.max(revisions.c.revision)).where(revisions.c.signature == signature)
        number = int(await connection.scalar(query) or 0) + 1
        await connection.execute(
            insert(revisions).values(
                signature=signature,
                revision=number,
                digest=revised.digest,
                plan=revised.plan,
                plan_sha256=revised.plan_sha256,
                origin=origin,
                planner=revised.planner,
                options=revised.options,
                parent=parent,
                created_ns=now,
                actor=cause.actor,
                reason=cause.reason,
            )
        )
        await append_event(
            connection,
            "revision.created",
            cause,
            at_ns=now,
            signature=signature,
            body={
                "digest": revised.digest,
                "options": digest_of(revised.options),
                "origin": origin,
                "parent": parent,
                "plan_sha256": revised.plan_sha256,
                "planner": revised.planner,
                "revision": number,
            },
        )
        if job is not None:
            await _move(connection, signature, Activation(revision=number, job=job), cause, now)
    return number


def _pointer(revision: int | None) -> str:
    return f"revision {revision}" if revision else "no revision of its own"


async def activate(store: Store, signature: str, wanted: Activation, cause: Cause) -> int | None:
    """Move the pointer; answers what it named before. Activating what is active already changes nothing.

    Raises `Conflict` (path ``body.revision``) for a revision that does not exist, and (``body.expected``) when another
    revision is active than the caller expects.
    """
    async with store.write() as connection:
        return await _move(connection, signature, wanted, cause, time.time_ns())


async def _active(connection: AsyncConnection, signature: str, wanted: Activation) -> int | None:
    here = (active.c.signature == signature) & (active.c.job == wanted.job)
    before: int | None = await connection.scalar(select(active.c.revision).where(here))
    if wanted.expected is not None and (before or 0) != wanted.expected:
        raise Conflict("body.expected", f"{_pointer(before)} is active, not {_pointer(wanted.expected)}")
    return before


async def _move(connection: AsyncConnection, signature: str, wanted: Activation, cause: Cause, now: int) -> int | None:
    before = await _active(connection, signature, wanted)
    if before == wanted.revision:
        return before
    here = (active.c.signature == signature) & (active.c.job == wanted.job)
    if wanted.revision is None:
        await connection.execute(delete(active).where(here))
    else:
        query = select(revisions.c.revision).where(
            revisions.c.signature == signature, revisions.c.revision == wanted.revision
        )
        if await connection.scalar(query) is None:
            raise Conflict("body.revision", f"there is no revision {wanted.revision}")
        values = {"revision": wanted.revision, "changed_ns": now}
        if before is None:
            await connection.execute(insert(active).values(signature=signature, job=wanted.job, **values))
        else:
            await connection.execute(update(active).where(here).values(**values))
    await append_event(
        connection,
        "plan.activated",
        cause,
        at_ns=now,
        signature=signature,
        job=wanted.job or None,
        body={"before": before, "job": wanted.job, "revision": wanted.revision},
    )
    return before


async def last_event(store: Store) -> int:
    """Number of the last event, 0 in an empty log."""
    async with store.read() as connection:
        return int(await connection.scalar(select(func.max(events.c.seq))) or 0)


async def changed_signatures(store: Store, after: int) -> tuple[int, set[str]]:
    """The number of the last event, and the signatures whose served plan changed in those behind `after`."""
    query = select(events.c.seq, events.c.kind, events.c.signature).where(events.c.seq > after).order_by(events.c.seq)
    last, changed = after, set()
    async with store.read() as connection:
        for row in await connection.execute(query):
            last = row.seq
            if row.kind in ("plan.activated", "plan.quarantined") and row.signature is not None:
                changed.add(row.signature)
    return last, changed
