"""Plans in the store: the first writer of a signature wins, and what is read back is what is answered."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import ColumnElement, RowMapping, and_, bindparam, insert, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql.dml import Insert
from sqlalchemy.sql.schema import Table

from bucketplan_core.errors import BucketplanError
from bucketplan_core.plan import Plan
from bucketplan_core.wire import digest_of
from bucketplan_server.planner.planned import Planned
from bucketplan_server.store.engine import Store
from bucketplan_server.store.events import Cause, append_event
from bucketplan_server.store.pieces import pieces
from bucketplan_server.store.tables import active, profiles, quarantine, revisions, signatures

__all__ = [
    "ACTIVE_PLANS",
    "IS_OVERRIDE",
    "PLANNER_REVISION",
    "Damaged",
    "PlanRow",
    "insert_or_ignore",
    "load_active",
    "load_decision",
    "load_numbered",
    "load_requests",
    "load_revision",
    "quarantine_revision",
    "store_planned",
]

PLANNER_REVISION = 1
"""Number of the planner's own plan of a signature."""
_KEYS_PER_QUERY = 200
_OWN = revisions.alias("planners_own")

ACTIVE_PLANS = active.join(
    revisions, (revisions.c.signature == active.c.signature) & (revisions.c.revision == active.c.revision)
).outerjoin(_OWN, (_OWN.c.signature == active.c.signature) & (_OWN.c.revision == PLANNER_REVISION))
"""Who is served which revision, with what `IS_OVERRIDE` needs."""
IS_OVERRIDE = (active.c.revision != PLANNER_REVISION) & revisions.c.digest.is_distinct_from(_OWN.c.digest)
"""Whether a row of `ACTIVE_PLANS` serves another decision than the planner's own.

A revision with the planner's own decision is none: the bytes that ranks apply are the same.
"""


def _in_quarantine() -> ColumnElement[bool]:
    return and_(quarantine.c.signature == revisions.c.signature, quarantine.c.revision == revisions.c.revision)


_ACTIVE = (
    select(revisions, quarantine.c.detail)
    .outerjoin(quarantine, _in_quarantine())
    .where(
        revisions.c.signature == bindparam("wanted"),
        (revisions.c.revision == PLANNER_REVISION)
        | (
            revisions.c.revision
            == select(active.c.revision)
            .where(active.c.signature == bindparam("wanted"), active.c.job == "")
            .scalar_subquery()
        ),
    )
    .order_by(revisions.c.revision)
)
"""Built once: building it costs as much as running it for an unknown signature, which ranks of a first start ask."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One revision as it is served: the bytes of the plan and the digest of its decision."""

    signature: str
    revision: int
    digest: str
    plan: bytes


class Damaged(Exception):
    """Bytes in the store are not what their digest says; they must not be served. `known`: quarantine says so."""

    def __init__(self, signature: str, revision: int, detail: str, *, known: bool = False) -> None:
        self.signature = signature
        self.revision = revision
        self.detail = detail
        self.known = known
        super().__init__(f"revision {revision} of {signature}: {detail}")


def insert_or_ignore(connection: AsyncConnection, table: Table) -> Insert:
    """INSERT that leaves a row with the same primary key as it is, on either database."""
    if connection.dialect.name == "postgresql":
        return postgresql.insert(table).on_conflict_do_nothing()
    return sqlite.insert(table).on_conflict_do_nothing()


async def load_active(store: Store, signature: str) -> tuple[PlanRow | Damaged, PlanRow | Damaged] | None:
    """The active revision (of no particular job) and the planner's own; None for an unknown signature.

    A `Damaged` stands for a revision whose bytes changed or that was found damaged before: the other is served all the
    same. Raises `StoreError`.
    """
    async with store.read() as connection:
        return await _load_active(connection, signature)


async def load_revision(store: Store, signature: str, digest: str) -> PlanRow | None:
    """A revision of `signature` with this decision digest, the oldest that is not in quarantine.

    Raises `Damaged`, `StoreError`.
    """
    async with store.read() as connection:
        query = (
            select(revisions, quarantine.c.detail)
            .outerjoin(quarantine, _in_quarantine())
            .where(revisions.c.signature == signature, revisions.c.digest == digest)
            .order_by(quarantine.c.detail.is_not(None), revisions.c.revision)
            .limit(1)
        )
        row = (await connection.execute(query)).mappings().first()
    return None if row is None else _checked(row)


async def load_decision(store: Store, digest: str) -> PlanRow | None:
    """A revision of any signature with this decision digest, the oldest that is not in quarantine.

    Raises `Damaged`, `StoreError`.
    """
    query = (
        select(revisions, quarantine.c.detail)
        .outerjoin(quarantine, _in_quarantine())
        .where(revisions.c.digest == digest)
        .order_by(quarantine.c.detail.is_not(None), revisions.c.created_ns, revisions.c.signature, revisions.c.revision)
        .limit(1)
    )
    async with store.read() as connection:
        row = (await connection.execute(query)).mappings().first()
    return None if row is None else _checked(row)


async def load_numbered(store: Store, signature: str, revision: int) -> PlanRow:
    """The revision of this number, which exists; raises `Damaged`, `StoreError`."""
    query = (
        select(revisions, quarantine.c.detail)
        .outerjoin(quarantine, _in_quarantine())
        .where(revisions.c.signature == signature, revisions.c.revision == revision)
    )
    async with store.read() as connection:
        return _checked((await connection.execute(query)).mappings().one())


async def load_requests(store: Store, wanted: Collection[str]) -> dict[str, bytes]:
    """Canonical requests by signature, of those that are stored."""
    found: dict[str, bytes] = {}
    async with store.read() as connection:
        for names in pieces(sorted(wanted), _KEYS_PER_QUERY):
            query = select(signatures.c.signature, signatures.c.request).where(signatures.c.signature.in_(names))
            found.update({row.signature: row.request for row in await connection.execute(query)})
    return found


async def store_planned(
    store: Store, planned: Planned, cause: Cause
) -> tuple[PlanRow | Damaged, PlanRow | Damaged, bool]:
    """Store a new signature with its plan as revision 1, unless somebody was first; answers what is stored.

    The last value says whether this call stored it. The active revision, then the planner's own, as `load_active`.
    """
    now = time.time_ns()
    # Writers come one after the other, so what is not there stays away until this transaction ends.
    async with store.write() as connection:
        known = select(signatures.c.signature).where(signatures.c.signature == planned.signature)
        first = await connection.scalar(known) is None
        if first:
            await connection.execute(
                insert_or_ignore(connection, profiles).values(digest=planned.profile_digest, profile=planned.profile)
            )
            await connection.execute(
                insert(signatures).values(
                    signature=planned.signature,
                    request=planned.request,
                    profile=planned.profile_digest,
                    **planned.facts,
                    created_ns=now,
                    actor=cause.actor,
                )
            )
            await connection.execute(
                insert_or_ignore(connection, revisions).values(
                    signature=planned.signature,
                    revision=PLANNER_REVISION,
                    digest=planned.digest,
                    plan=planned.plan,
                    plan_sha256=planned.plan_sha256,
                    origin="planner",
                    planner=planned.planner,
                    options=planned.options,
                    parent=None,
                    created_ns=now,
                    actor=cause.actor,
                    reason=cause.reason,
                )
            )
            await connection.execute(
                insert_or_ignore(connection, active).values(
                    signature=planned.signature, job="", revision=PLANNER_REVISION, changed_ns=now
                )
            )
            await append_event(
                connection,
                "plan.created",
                cause,
                at_ns=now,
                signature=planned.signature,
                body={
                    "digest": planned.digest,
                    "options": digest_of(planned.options),
                    "origin": "planner",
                    "plan_sha256": planned.plan_sha256,
                    "planner": planned.planner,
                    "profile": planned.profile_digest,
                    "revision": PLANNER_REVISION,
                },
            )
        stored = await _load_active(connection, planned.signature)
    assert stored is not None
    return (*stored, first)


async def quarantine_revision(store: Store, damaged: Damaged) -> None:
    """Note for ever, with an event, that a revision must not be served; repeating it changes nothing."""
    now = time.time_ns()
    async with store.write() as connection:
        inserted = await connection.execute(
            insert_or_ignore(connection, quarantine)
            .values(
                signature=damaged.signature,
                revision=damaged.revision,
                found_ns=now,
                detail=damaged.detail,
            )
            .returning(quarantine.c.signature)
        )
        if inserted.first() is not None:
            await append_event(
                connection,
                "plan.quarantined",
                Cause("server", "digest check failed when the plan was loaded"),
                at_ns=now,
                signature=damaged.signature,
                body={"detail": damaged.detail, "revision": damaged.revision},
            )


async def _load_active(
    connection: AsyncConnection, signature: str
) -> tuple[PlanRow | Damaged, PlanRow | Damaged] | None:
    rows = (await connection.execute(_ACTIVE, {"wanted": signature})).mappings().all()
    if not rows:
        return None
    first = _read(rows[0])
    return (first if len(rows) == 1 else _read(rows[-1])), first


def _checked(row: RowMapping) -> PlanRow:
    found = _read(row)
    if isinstance(found, Damaged):
        raise found
    return found


def _read(row: RowMapping) -> PlanRow | Damaged:
    """The row, unless its bytes are not what was stored."""
    signature, revision, plan = row["signature"], row["revision"], row["plan"]
    if row["detail"] is not None:
        return Damaged(signature, revision, row["detail"], known=True)
    if not isinstance(plan, bytes):
        return Damaged(signature, revision, f"the plan is stored as {type(plan).__name__}, not as bytes")
    if digest_of(plan) != row["plan_sha256"]:
        return Damaged(
            signature, revision, f"the plan's bytes hash to {digest_of(plan)}, stored was {row['plan_sha256']}"
        )
    try:
        decoded = Plan.decode(plan, expected_signature=signature)
    except BucketplanError as error:
        return Damaged(signature, revision, f"the plan cannot be read: {error}")
    if decoded.digest != row["digest"]:
        return Damaged(signature, revision, f"the decision hashes to {decoded.digest}, stored was {row['digest']}")
    return PlanRow(signature=signature, revision=revision, digest=row["digest"], plan=plan)
