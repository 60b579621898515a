"""The append-only audit log: each event names the digest of the one before, so no past event can change unseen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from bucketplan_core.wire import WireValue, digest_of, pack
from bucketplan_server.store.engine import Store, plain_row
from bucketplan_server.store.tables import events

__all__ = ["FIRST_PREVIOUS", "Cause", "append_event", "event_digest", "load_events"]

MOST_BODY_BYTES = 4 * 2**20

FIRST_PREVIOUS = "0" * 64
"""What the first event names as its predecessor."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Who changed something, and why.

    `still_allowed` raises where whoever it is may no longer do so; every change asks it inside its transaction.
    """

    actor: str
    reason: str
    still_allowed: Callable[[], None] | None = field(default=None, compare=False, repr=False)


async def append_event(
    connection: AsyncConnection,
    kind: str,
    cause: Cause,
    *,
    at_ns: int,
    signature: str | None = None,
    job: str | None = None,
    body: Mapping[str, WireValue],
) -> int:
    """Add one event to the log inside the caller's write transaction; answers its number.

    `at_ns` is the time that the rows of the same change carry. Raises what `cause.still_allowed` raises, which undoes
    the change.
    """
    if cause.still_allowed is not None:
        cause.still_allowed()
    last = (
        await connection.execute(select(events.c.seq, events.c.digest).order_by(events.c.seq.desc()).limit(1))
    ).first()
    seq = 1 if last is None else last.seq + 1
    row = {
        "seq": seq,
        "at_ns": at_ns,
        "kind": kind,
        "actor": cause.actor,
        "reason": cause.reason,
        "signature": signature,
        "job": job,
        "body": pack(body),
        "previous": FIRST_PREVIOUS if last is None else last.digest,
    }
    row["digest"] = event_digest(row)
    await connection.execute(insert(events).values(row))
    return seq


async def load_events(
    store: Store, *, after: int, limit: int, signature: str | None, job: str | None, namespace: str | None = None
) -> list[dict[str, Any]]:
    """Events behind number `after`, the oldest first, those of one signature or job where given.

    Of a `namespace`: those of its jobs, and those of signatures that these have reported. Their bodies have at most
    `MOST_BODY_BYTES` together, but for a first one that has more: an event may be about thousands of reports.
    """
    query = (
        select(events.c.seq, func.length(events.c.body).label("size"))
        .where(events.c.seq > after)
        .order_by(events.c.seq)
        .limit(limit)
    )
    if signature is not None:
        query = query.where(events.c.signature == signature)
    if job is not None:
        query = query.where(events.c.job == job)
    if namespace is not None:
        # Late: those modules append events themselves.
        from bucketplan_server.store.jobs import of_namespace, reported_in

        plans = events.c.job.is_(None) & events.c.signature.in_(reported_in(namespace))
        query = query.where(of_namespace(events.c.job, namespace) | plans)
    async with store.read() as connection:
        numbers: list[int] = []
        left = MOST_BODY_BYTES
        for row in await connection.execute(query):
            left -= row.size
            if numbers and left < 0:
                break
            numbers.append(row.seq)
        whole = select(events).where(events.c.seq.in_(numbers)).order_by(events.c.seq)
        return [plain_row(row) for row in (await connection.execute(whole)).mappings()]


def event_digest(row: Mapping[str, WireValue]) -> str:
    """SHA-256 over every column of an event but its digest; `previous` chains it to the one before."""
    columns = ("seq", "at_ns", "kind", "actor", "reason", "signature", "job", "body", "previous")
    return digest_of(pack({column: row[column] for column in columns}))
