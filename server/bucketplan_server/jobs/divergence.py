"""Saying at once when ranks of one group contradict each other: people should not have to ask.

Ranks of a group contradict each other where their group digests differ (their signatures, of those that report none),
or the order of its members; the state of an attempt calls these diverged too. Ranks that do not even name the same
members are told apart by that state alone.

What this process has seen is compared in memory. Of a group that it has not seen before, the other side may have
reached another replica, or this server before it was restarted, so the store is asked once, after the report is stored
there: of two replicas that each store one side, the one that stores last finds the other's. Both may find each other's;
then both count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import structlog

from bucketplan_core.attempt import OPEN_SLOT, RankReport
from bucketplan_core.errors import DecodeError
from bucketplan_server.jobs.evidence import ReportDecoder
from bucketplan_server.metrics import Metrics
from bucketplan_server.recent import Recent
from bucketplan_server.store.engine import Store, StoreError
from bucketplan_server.store.jobs import load_reports_of, ranks_that_reported

__all__ = ["Divergences"]

_KEPT_GROUPS = 100_000
_MOST_ASKED = 50_000
"""Reports that wait for the store to be asked; what comes beyond is compared when a rank of its group reports again."""
_MOST_COMPARED = 256
"""Reports of others that a group's first one is compared with: those that were stored first."""


class _Group(NamedTuple):
    """A group's graph in an attempt; `members` as its ranks name them, by rank, None where they do not."""

    job: str
    attempt: int
    slot: str
    ordinal: int
    role: str
    members: tuple[int, ...] | None


class _Value(NamedTuple):
    """What a rank reports of a group: its digest, else its signature, and the members in its order."""

    text: str
    members: tuple[int, ...] | None


def _value(report: RankReport, role: str) -> _Value:
    return _Value(report.digests.get(role) or f"signature {report.signature}", report.members.get(role))


def _members(report: RankReport, role: str) -> tuple[int, ...] | None:
    listed = report.members.get(role)
    return None if listed is None else tuple(sorted(listed))


class Divergences:
    """Counts and logs reports that contradict others of their group."""

    def __init__(self, store: Store, metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics
        self._agreed: Recent[_Group, _Value] = Recent(_KEPT_GROUPS)
        self._asking: dict[_Group, dict[int, RankReport]] = {}
        self._num_asked = 0
        self._tasks: set[asyncio.Task[None]] = set()
        # A fleet names hundreds of graphs at once, and whoever stores waits for the same connection.
        self._turn = asyncio.Lock()
        self._log = structlog.get_logger("bucketplan_server")

    def watch(self, job: str, attempt: int, reports: Iterable[RankReport]) -> None:
        """Look at reports that are stored by now; one that is repeated after it was looked at counts again."""
        new: dict[tuple[str, int], list[_Group]] = {}
        for report in reports:
            if report.slot == OPEN_SLOT:
                continue
            for role in sorted(report.digests.keys() | report.members.keys()):
                group = _Group(job, attempt, report.slot, report.ordinal, role, _members(report, role))
                known = self._agreed.get(group)
                if known is not None:
                    self._compare(group, report, (known,))
                elif self._num_asked < _MOST_ASKED:
                    if group not in self._asking:
                        self._asking[group] = {}
                        new.setdefault((report.slot, report.ordinal), []).append(group)
                    waiting = self._asking[group]
                    self._num_asked += report.rank not in waiting
                    waiting[report.rank] = report
        for groups in new.values():
            task = asyncio.create_task(self._ask(groups))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _ask(self, groups: Sequence[_Group]) -> None:
        """Compare what waits for these groups, of one graph, with what the store has of them."""
        try:
            async with self._turn:
                stored = await self._stored(groups)
        except (StoreError, DecodeError) as error:
            # Among each other they are compared; the next report of the group asks again.
            self._log.warning("store.failed", detail=str(error))
            stored = None
        finally:
            waited = {group: list(self._asking.pop(group).values()) for group in groups}
            self._num_asked -= sum(map(len, waited.values()))
        for group, reports in waited.items():
            found = (stored or {}).get(group) or [_value(reports[0], group.role)]
            for report in reports:
                self._compare(group, report, found)
            if stored is not None:
                self._agreed.put(group, found[0])

    async def _stored(self, groups: Sequence[_Group]) -> dict[_Group, list[_Value]]:
        """Values by group that other ranks than those at hand have stored, the one that was stored first in front."""
        job, attempt, slot, ordinal = groups[0][:4]
        at_hand = {group: set(self._asking[group]) for group in groups}
        unnamed = any(group.members is None for group in groups)
        ranks = None if unnamed else {rank for group in groups for rank in group.members or ()}
        times = await ranks_that_reported(self._store, job, attempt, slot, ordinal, ranks)
        others = {
            group: sorted(
                (rank for rank in (times if group.members is None else group.members) if rank in times),
                key=lambda rank: (times[rank], rank),
            )
            for group in groups
        }
        wanted = {
            group: [rank for rank in found if rank not in at_hand[group]][:_MOST_COMPARED]
            for group, found in others.items()
        }
        decoder = ReportDecoder()
        said: dict[int, RankReport] = {}
        needed = {rank for found in wanted.values() for rank in found}
        async for piece in load_reports_of(self._store, job, attempt, slot, ordinal, needed):
            for one in await asyncio.to_thread(lambda: [decoder.decode(stored) for stored in piece]):  # noqa: B023  # awaited
                said[one.rank] = one
        values: dict[_Group, list[_Value]] = {}
        for group, found in wanted.items():
            for report in (said[rank] for rank in found if rank in said):
                speaks = group.role in report.digests or group.role in report.members
                if speaks and _members(report, group.role) == group.members:
                    values.setdefault(group, []).append(_value(report, group.role))
        return {group: list(dict.fromkeys(found)) for group, found in values.items()}

    def _compare(self, group: _Group, report: RankReport, known: Sequence[_Value]) -> None:
        value = _value(report, group.role)
        other = next((one for one in known if one != value), None)
        if other is None:
            return
        orders = {} if value.members == other.members else {"members": value.members, "others_members": other.members}
        self._metrics.count("bucketplan_divergences_total")
        self._log.warning(
            "attempt.diverged",
            job=group.job,
            attempt=group.attempt,
            role=group.role,
            slot=group.slot,
            rank=report.rank,
            digest=value.text,
            others=other.text,
            **orders,
        )
