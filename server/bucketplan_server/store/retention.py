"""Deleting old reports: in pieces, so that neither the event loop nor a writer waits for a large attempt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence

from sqlalchemy import CursorResult, delete, func, select, tuple_

from bucketplan_core.attempt import OPEN_SLOT, RankReport
from bucketplan_core.errors import BucketplanError
from bucketplan_core.fields import Fields
from bucketplan_core.wire import unpack
from bucketplan_server.store.engine import Store, StoreError
from bucketplan_server.store.events import Cause, append_event
from bucketplan_server.store.jobs import PRUNED
from bucketplan_server.store.tables import attempts, reports

__all__ = ["REPORTS_PER_PIECE", "prune_reports"]

REPORTS_PER_PIECE = 1_000
"""Reports that are read, decoded (20 ms of a thread) and deleted at a time, with an event each time."""
_ATTEMPTS_PER_QUERY = 500
_MOST_FAILURES = 3
"""Attempts in a row that the store fails for; then it is the store, and the others would only wait for it."""
_NAME = (reports.c.rank, reports.c.slot, reports.c.ordinal)
_IS_GRAPH = reports.c.slot != OPEN_SLOT


async def prune_reports(
    store: Store, before_ns: int, *, kept: Callable[[str, int, str], None] = lambda _job, _attempt, _reason: None
) -> int:
    """Delete reports of graphs of attempts that got none since `before_ns`, events an attempt; answers how many.

    What a job has reported stays known by signature, and so do openings: neither an epoch nor who opened changes. A
    report that cannot be read is kept with those behind it; `kept` is told job, attempt and why. Where the store fails
    for one attempt the others are pruned, and its `StoreError` is raised in the end.
    """
    total = num_failures = 0
    failed: StoreError | None = None
    async for job, attempt in _attempts(store):
        try:
            async for number in _prune(store, job, attempt, before_ns, kept):
                total += number
            num_failures = 0
        except StoreError as error:
            failed, num_failures = error, num_failures + 1
            if num_failures == _MOST_FAILURES:
                break
    if failed is not None:
        raise failed
    return total


async def _attempts(store: Store) -> AsyncIterator[tuple[str, int]]:
    name = (attempts.c.job, attempts.c.attempt)
    query = select(*name).order_by(*name).limit(_ATTEMPTS_PER_QUERY)
    behind = query
    while True:
        async with store.read() as connection:
            rows = (await connection.execute(behind)).all()
        for job, attempt in rows:
            yield job, attempt
        if len(rows) < _ATTEMPTS_PER_QUERY:
            return
        behind = query.where(tuple_(*name) > tuple_(*rows[-1]))


async def _prune(
    store: Store, job: str, attempt: int, before_ns: int, kept: Callable[[str, int, str], None]
) -> AsyncIterator[int]:
    """Numbers of reports that were deleted, a transaction each."""
    of_attempt = (reports.c.job == job, reports.c.attempt == attempt, _IS_GRAPH)
    async with store.read() as connection:
        last_ns = await connection.scalar(select(func.max(reports.c.received_ns)).where(*of_attempt))
    if last_ns is None or last_ns >= before_ns:
        return
    # One that comes now, under a name that was deleted before, stays.
    old = (*of_attempt, reports.c.received_ns < before_ns)
    piece = select(*_NAME, reports.c.report).where(*old).order_by(*_NAME).limit(REPORTS_PER_PIECE)
    cause = Cause("server", f"older than {before_ns} ns since 1970 (BUCKETPLAN_REPORT_RETENTION_DAYS)")
    while True:
        async with store.read() as connection:
            rows = (await connection.execute(piece)).all()
        if not rows:
            return
        try:
            signatures = await asyncio.to_thread(_signatures, [row.report for row in rows])
        except (BucketplanError, TypeError) as error:
            kept(job, attempt, str(error))
            return
        last = tuple_(rows[-1].rank, rows[-1].slot, rows[-1].ordinal)
        async with store.write() as connection:
            deleted = await connection.execute(delete(reports).where(*old, tuple_(*_NAME) <= last))
            assert isinstance(deleted, CursorResult)
            # Of two replicas that prune at once, one finds the piece deleted.
            number = deleted.rowcount
            if number:
                await append_event(
                    connection,
                    PRUNED,
                    cause,
                    at_ns=time.time_ns(),
                    job=job,
                    body={"attempt": attempt, "num_reports": number, "signatures": list(signatures)},
                )
        yield number


def _signatures(encoded: Sequence[bytes]) -> list[str]:
    """The signatures that these reports name; raises `BucketplanError`, `TypeError` where one cannot be read."""
    read = [RankReport.read(Fields(unpack(one), "report")) for one in encoded]
    return sorted({report.signature for report in read if report.signature is not None})
