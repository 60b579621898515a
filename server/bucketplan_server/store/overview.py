"""What people look at first: how much there is, which jobs ran last, what happened last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select, tuple_

from bucketplan_server.store.engine import Store
from bucketplan_server.store.jobs import of_namespace, reported_in
from bucketplan_server.store.plans import ACTIVE_PLANS, IS_OVERRIDE
from bucketplan_server.store.tables import active, attempts, events, revisions, signatures

__all__ = ["Counts", "JobRow", "count_all", "latest_events", "latest_jobs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How much the store holds; `num_overridden` signatures have another plan than the planner's own for somebody."""

    num_plans: int
    num_revisions: int
    num_overridden: int
    num_jobs: int
    num_attempts: int
    num_events: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """A job with its last attempt."""

    job: str
    last_attempt: int
    opened_ns: int


async def count_all(store: Store) -> Counts:
    async with store.read() as connection:

        async def number(query: Any) -> int:
            return int(await connection.scalar(query) or 0)

        return Counts(
            num_plans=await number(select(func.count()).select_from(signatures)),
            num_revisions=await number(select(func.count()).select_from(revisions)),
            num_overridden=await number(
                select(func.count(func.distinct(active.c.signature))).select_from(ACTIVE_PLANS).where(IS_OVERRIDE)
            ),
            num_jobs=await number(select(func.count(func.distinct(attempts.c.job)))),
            num_attempts=await number(select(func.count()).select_from(attempts)),
            # Numbers of events have no holes.
            num_events=await number(select(func.max(events.c.seq))),
        )


async def latest_jobs(
    store: Store,
    *,
    namespace: str | None = None,
    part: str | None = None,
    before: tuple[int, str] | None = None,
    limit: int,
) -> list[JobRow]:
    """Jobs by their last opening, the newest first, those behind `before` (time and name of the last of a page)."""
    opened, last = func.max(attempts.c.opened_ns), func.max(attempts.c.attempt)
    query = (
        select(attempts.c.job, last.label("last_attempt"), opened.label("opened_ns"))
        .group_by(attempts.c.job)
        .order_by(opened.desc(), attempts.c.job.desc())
        .limit(limit)
    )
    if namespace is not None:
        query = query.where(of_namespace(attempts.c.job, namespace))
    if part is not None:
        found = func.strpos(attempts.c.job, part) if store.is_postgres else func.instr(attempts.c.job, part)
        query = query.where(found > 0)
    if before is not None:
        query = query.having(tuple_(opened, attempts.c.job) < tuple_(*before))
    async with store.read() as connection:
        return [JobRow(**row) for row in (await connection.execute(query)).mappings()]


async def latest_events(
    store: Store,
    *,
    before: int | None = None,
    signature: str | None = None,
    job: str | None = None,
    kind: str | None = None,
    namespace: str | None = None,
    limit: int,
) -> list[dict[str, Any]]:
    """Events, the newest first, those below number `before`, of one signature, job or kind where given."""
    query = select(events).order_by(events.c.seq.desc()).limit(limit)
    for column, value in ((events.c.signature, signature), (events.c.job, job), (events.c.kind, kind)):
        if value is not None:
            query = query.where(column == value)
    if namespace is not None:
        plans = events.c.job.is_(None) & events.c.signature.in_(reported_in(namespace))
        query = query.where(of_namespace(events.c.job, namespace) | plans)
    if before is not None:
        query = query.where(events.c.seq < before)
    async with store.read() as connection:
        return [dict(row) for row in (await connection.execute(query)).mappings()]
