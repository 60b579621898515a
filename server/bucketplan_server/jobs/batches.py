"""Reports on their way to the store: calls that arrive while a transaction is written share the next ones.

A fleet reports at once, and a transaction a call would cost it a sync of the disk a rank. One transaction for all would
hold every writer for as long as it takes and end at the store's timeout, so its size is bounded, and so is what waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError

from bucketplan_core.attempt import RankReport
from bucketplan_server.beside import READ_REPORTS, beside
from bucketplan_server.problems import Problem
from bucketplan_server.service import PlanService
from bucketplan_server.store.arrivals import Arrival, RefusedReport, encode_reports
from bucketplan_server.store.engine import Store, StoreError
from bucketplan_server.store.events import Cause
from bucketplan_server.store.jobs import store_reports

__all__ = ["MOST_REPORTS", "MOST_WAITING", "ReportBatches"]

MOST_REPORTS = 2_000
"""Reports of the calls that share a transaction (a call alone has at most 1 MiB). SQLite took 40 ms for them and
PostgreSQL 65 ms on a small, busy machine, so other writers hardly wait and the store's timeout is far; ten times as
many kept the loop for 0.15 s at a stretch, and fewer would cost more syncs of the disk."""
_MOST_BYTES = 8 * 2**20
MOST_WAITING = 100_000
"""Reports that may wait to be stored: six of each of 16,384 ranks, some seconds of storing, 200 MB of memory."""
_MOST_WAITING_BYTES = 128 * 2**20

_Key = tuple[str, int, Cause]
"""Job, attempt and whose reports they are: an event has one actor."""

Stored = Callable[[str, int, Sequence[RankReport], int], None]
"""Told of job, attempt, the reports that are stored by now, and how many of them are new."""


class _Call(NamedTuple):
    """Reports that came together, and who waits for them."""

    arrived: Sequence[Arrival]
    num_bytes: int
    done: asyncio.Future[None]


class ReportBatches:
    """Stores reports in transactions of bounded size, one at a time, taking turns between attempts and callers."""

    def __init__(self, store: Store, plans: PlanService, stored: Stored) -> None:
        self._store = store
        self._plans = plans
        self._stored = stored
        self._waiting: dict[_Key, deque[_Call]] = {}
        self._writing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_waiting = 0
        self._bytes_waiting = 0

    def refuse_beyond(self) -> None:
        """Raises ``busy`` where as much waits as may."""
        if self._num_waiting >= MOST_WAITING:
            raise self._plans.busy("reports wait to be stored", MOST_WAITING)
        if self._bytes_waiting >= _MOST_WAITING_BYTES:
            raise self._plans.busy("bytes of reports wait to be stored", _MOST_WAITING_BYTES)

    async def take(self, job: str, attempt: int, reports: Sequence[RankReport], cause: Cause) -> None:
        """Returns when they are stored.

        Raises ``conflict`` where one is refused (the others are stored), ``busy`` above `MOST_WAITING`,
        ``store-unavailable``, and `DecodeError`.
        """
        # Before the transaction, which others wait for.
        arrived = await beside(len(reports) > READ_REPORTS, encode_reports, reports)
        call = _Call(arrived, sum(len(one.encoded) for one in arrived), asyncio.get_running_loop().create_future())
        self.refuse_beyond()
        key = (job, attempt, cause)
        calls = self._waiting.get(key)
        if calls is None:
            calls = self._waiting[key] = deque()
            task = asyncio.create_task(self._flush(key))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        calls.append(call)
        self._num_waiting += len(arrived)
        self._bytes_waiting += call.num_bytes
        await call.done

    async def _flush(self, key: _Key) -> None:
        waiting = self._waiting[key]
        try:
            while waiting:
                # Others take their turn between two transactions.
                async with self._writing:
                    calls = _next(waiting)
                    try:
                        await self._store_calls(key, calls)
                    except Exception as error:
                        await self._store_alone(key, calls, error)
                    finally:
                        self._num_waiting -= sum(len(call.arrived) for call in calls)
                        self._bytes_waiting -= sum(call.num_bytes for call in calls)
                        # Where this task is cancelled, too, nobody waits for ever.
                        _fail(calls, asyncio.CancelledError())
        finally:
            del self._waiting[key]
            _fail(waiting, asyncio.CancelledError())

    async def _store_alone(self, key: _Key, calls: Sequence[_Call], error: Exception) -> None:
        """What cannot be stored is one caller's; the others get their own transactions."""
        if len(calls) == 1 or not _is_about_values(error):
            _fail(calls, self._told(error))
            return
        for call in calls:
            try:
                await self._store_calls(key, [call])
            except Exception as alone:
                _fail([call], self._told(alone))

    def _told(self, error: Exception) -> Exception:
        return self._plans.store_unavailable(error) if isinstance(error, StoreError) else error

    async def _store_calls(self, key: _Key, calls: Sequence[_Call]) -> None:
        """Store the reports of these calls in one transaction and answer each; what this raises answers none."""
        job, attempt, cause = key
        arrived = [one for call in calls for one in call.arrived]
        num_new, refusals = await store_reports(self._store, job, attempt, arrived, cause)
        start = 0
        for call in calls:
            problem = _first_refusal(refusals[start : start + len(call.arrived)])
            start += len(call.arrived)
            if call.done.done():
                continue
            if problem is None:
                call.done.set_result(None)
            else:
                call.done.set_exception(problem)
        taken = [one.report for one, refused in zip(arrived, refusals, strict=True) if refused is None]
        self._stored(job, attempt, taken, num_new)


def _next(waiting: deque[_Call]) -> list[_Call]:
    """Takes the calls of the next transaction, at least one."""
    calls = [waiting.popleft()]
    num_reports, num_bytes = len(calls[0].arrived), calls[0].num_bytes
    while waiting:
        num_reports += len(waiting[0].arrived)
        num_bytes += waiting[0].num_bytes
        if num_reports > MOST_REPORTS or num_bytes > _MOST_BYTES:
            break
        calls.append(waiting.popleft())
    return calls


def _first_refusal(refusals: Sequence[RefusedReport | None]) -> Problem | None:
    """What the sender of these reports is told: of the first that was refused; the others are stored."""
    for index, refused in enumerate(refusals):
        if refused is not None:
            path = f"body.reports[{index}].{refused.path}".rstrip(".")
            return Problem("conflict", f"{path}: {refused.detail}", fields={**refused.fields, "path": path})
    return None


def _is_about_values(error: Exception) -> bool:
    """Whether the store could not take what it was given, rather than being away: another call may fare better."""
    if not isinstance(error, StoreError):
        return True
    cause = error.__cause__
    return isinstance(cause, DBAPIError) and not isinstance(cause, OperationalError | InterfaceError)


def _fail(calls: Iterable[_Call], error: BaseException) -> None:
    for call in calls:
        if not call.done.done():
            call.done.set_exception(error)
