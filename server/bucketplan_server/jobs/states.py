"""States of attempts, computed from what is stored: few at once, in threads, and kept while nothing changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice

from bucketplan_core.attempt import AttemptRequest, RankReport
from bucketplan_core.diff import first_difference
from bucketplan_core.fields import Fields
from bucketplan_core.request import Request
from bucketplan_core.wire import WireValue, unpack
from bucketplan_server.jobs.evidence import Evidence, gather
from bucketplan_server.jobs.state import Verdict
from bucketplan_server.jobs.status import Difference, attempt_status
from bucketplan_server.jobs.watch import Key, Reading
from bucketplan_server.recent import Recent
from bucketplan_server.store.engine import Store
from bucketplan_server.store.jobs import Attempt, mark_of_reports
from bucketplan_server.store.plans import load_requests

__all__ = ["MOST_READ_FOR_A_LIST", "States"]

MOST_READ_FOR_A_LIST = 30_000
"""Reports that one list of attempts reads: half a second of one core where ranks report alike, two where none do."""
_MOST_AT_ONCE = 2
"""States computed at once: threads share one interpreter, so more are no faster, and one huge one holds up no other."""
_KEPT_REPORTS = 250_000
"""Decoded reports kept: those of 16,384 ranks that each compiled 14 graphs; 40 MB where ranks report alike."""
_MEMBERS_PER_REPORT = 32
"""Members of groups that weigh as much as a report: lists are shared only where reports are alike."""
_KEPT_VERDICTS = 4_096
_KEPT_STATUSES = 16
_MOST_COMPARED = 32
_MOST_DECODED = 128


def _weight_of(found: Evidence) -> int:
    return 1 + len(found.reports) + found.num_members // _MEMBERS_PER_REPORT


@dataclass(frozen=True, slots=True)
class _Shown:
    """The state of an attempt under one version, computed or being computed since `made_s` (monotonic)."""

    version: str
    made_s: float
    made: asyncio.Task[Mapping[str, WireValue]]


class States:
    """What the reports of attempts say. Every method raises `StoreError`."""

    def __init__(self, store: Store, *, stall_ns: int, refresh_seconds: float) -> None:
        self._store = store
        self._stall_ns = stall_ns
        self._refresh_seconds = refresh_seconds
        self._turn = asyncio.Semaphore(_MOST_AT_ONCE)
        self._listing = asyncio.Lock()
        self._evidence: Recent[Key, Evidence] = Recent(_KEPT_REPORTS, weigh=_weight_of)
        self._shown: Recent[Key, _Shown] = Recent(_KEPT_STATUSES)
        self._verdicts: Recent[Key, tuple[str, Verdict]] = Recent(_KEPT_VERDICTS)

    async def reading(self, attempt: Attempt) -> Reading:
        """What the store holds of the attempt now."""
        count, last_ns = await mark_of_reports(self._store, attempt.job, attempt.attempt)
        stalled = time.time_ns() - attempt.opened_ns >= self._stall_ns
        return Reading(f"{attempt.epoch[:16]}-{count}-{last_ns:x}-{int(stalled)}", (count, last_ns))

    async def status(self, attempt: Attempt, reading: Reading) -> Mapping[str, WireValue]:
        """The state of the attempt as of `reading`; not to be changed.

        One that was computed under the same version within the last `refresh_seconds` is answered again: those whom a
        change wakes share one. Only the time that an opening has waited moves within a version.
        """
        key = (attempt.job, attempt.attempt)
        shown, now = self._shown.get(key), time.monotonic()
        if shown is None or shown.version != reading.version or now - shown.made_s >= self._refresh_seconds:
            made = asyncio.create_task(self._status(attempt, reading))
            shown = _Shown(reading.version, now, made)
            self._shown.put(key, shown)
            made.add_done_callback(lambda task: self._forget_failed(key, task))
        # Shielded: the caller that began it may go away, others wait for it too.
        return await asyncio.shield(shown.made)

    async def verdicts(self, attempts: Sequence[Attempt]) -> list[Verdict | None]:
        """What a list says of each attempt; all lists together compute one at a time.

        None for those of which together more than `MOST_READ_FOR_A_LIST` reports would be read; what was computed
        before and did not change since costs no reading.
        """
        found: list[Verdict | None] = []
        left = MOST_READ_FOR_A_LIST
        for attempt in attempts:
            reading = await self.reading(attempt)
            verdict = self._kept_verdict(attempt, reading)
            if verdict is None and reading.mark[0] <= left:
                left -= reading.mark[0]
                verdict = await self._verdict(attempt, reading)
            found.append(verdict)
        return found

    async def _verdict(self, attempt: Attempt, reading: Reading) -> Verdict:
        async with self._listing, self._turn:
            # Many may look at one list; the first of them computes.
            kept = self._kept_verdict(attempt, reading)
            if kept is not None:
                return kept
            evidence = self._evidence.get((attempt.job, attempt.attempt))
            if evidence is None or evidence.mark != reading.mark:
                evidence = await gather(self._store, attempt, reading.mark)
            return (await self._computed(attempt, reading, evidence, _unknown_difference))[1]

    async def _status(self, attempt: Attempt, reading: Reading) -> Mapping[str, WireValue]:
        key = (attempt.job, attempt.attempt)
        async with self._turn:
            evidence = self._evidence.get(key)
            if evidence is None or evidence.mark != reading.mark:
                evidence = await gather(self._store, attempt, reading.mark)
                self._evidence.put(key, evidence)
            difference = await self._difference(evidence.reports)
            return (await self._computed(attempt, reading, evidence, difference))[0]

    async def _computed(
        self, attempt: Attempt, reading: Reading, evidence: Evidence, difference: Difference
    ) -> tuple[Mapping[str, WireValue], Verdict]:
        def compute() -> tuple[Mapping[str, WireValue], Verdict]:
            state = attempt_status(
                AttemptRequest.read(Fields(unpack(attempt.request), "body")).participants,
                evidence.reports,
                pruned=evidence.pruned,
                opened_ns=attempt.opened_ns,
                now_ns=time.time_ns(),
                stall_ns=self._stall_ns,
                difference=difference,
            )
            named: dict[str, WireValue] = {
                "attempt": attempt.attempt,
                "epoch_id": attempt.epoch,
                "job": attempt.job,
                "opened_by": attempt.actor,
                "opened_ns": attempt.opened_ns,
                **state,
            }
            return named, Verdict.of(named)

        state, verdict = await asyncio.to_thread(compute)
        self._verdicts.put((attempt.job, attempt.attempt), (reading.version, verdict))
        return state, verdict

    def _kept_verdict(self, attempt: Attempt, reading: Reading) -> Verdict | None:
        kept = self._verdicts.get((attempt.job, attempt.attempt))
        return kept[1] if kept is not None and kept[0] == reading.version else None

    def _forget_failed(self, key: Key, task: asyncio.Task[Mapping[str, WireValue]]) -> None:
        if task.cancelled() or task.exception() is not None:
            kept = self._shown.get(key)
            if kept is not None and kept.made is task:
                self._shown.drop(key)

    async def _difference(self, reports: Sequence[RankReport]) -> Difference:
        """Names the first differing field of two signatures that stand under one name (slot and ordinal).

        Requests are decoded by what this answers, in the thread that calls it, and never on the event loop.
        """
        wanted = await asyncio.to_thread(_compared, reports)
        encoded = await load_requests(self._store, wanted) if wanted else {}

        @cache
        def decoded(signature: str) -> Request | None:
            return Request.decode(encoded[signature]) if signature in encoded else None

        @cache
        def difference(left: str, right: str) -> Mapping[str, WireValue] | None:
            one, other = decoded(left), decoded(right)
            found = None if one is None or other is None else first_difference(one, other)
            return None if found is None else found.to_wire()

        return difference


def _unknown_difference(_left: str, _right: str) -> None:
    """Lists do not say in which field requests differ."""


def _compared(reports: Sequence[RankReport]) -> set[str]:
    """Signatures to look into: where ranks differ under one name, of it the `_MOST_COMPARED` that came first.

    Names are taken in their order until there are `_MOST_DECODED`, so that a job cannot ask for more work than that.
    """
    slots: dict[tuple[str, int], dict[str, None]] = {}
    for report in reports:
        if report.signature is not None:
            slots.setdefault((report.slot, report.ordinal), {})[report.signature] = None
    wanted: dict[str, None] = {}
    for found in slots.values():
        if len(found) > 1:
            wanted.update(dict.fromkeys(islice(found, _MOST_COMPARED)))
    return set(islice(wanted, _MOST_DECODED))
