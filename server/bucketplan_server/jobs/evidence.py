"""Reading the reports of an attempt from the store: in pieces, and each content once for all ranks that reported it.

The ranks of a group report the same but for their number, lists of thousands of ranks included. Decoding those once
took a tenth of the time, and what is decoded is shared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bucketplan_core.attempt import RankReport
from bucketplan_core.fields import Fields
from bucketplan_core.wire import pack, unpack
from bucketplan_server.store.engine import Store
from bucketplan_server.store.jobs import Attempt, Pruned, StoredReport, load_pruned, load_reports

__all__ = ["Evidence", "ReportDecoder", "gather"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is stored of an attempt under one `mark`, see `mark_of_reports`; reports by rank, slot and ordinal."""

    mark: tuple[int, int]
    reports: Sequence[RankReport]
    pruned: Pruned | None
    num_members: int = 0
    """Members in the lists of groups that reports hold, each list that reports share once."""


class ReportDecoder:
    """Decodes stored reports; `num_decoded` counts those whose content had not come before under another rank."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, bytes], RankReport] = {}
        self.num_decoded = 0
        self.num_members = 0

    def decode(self, stored: StoredReport) -> RankReport:
        """Raises `DecodeError` for bytes that no server has stored."""
        # Canonical bytes: what two reports hold around equal keys is equal if and only if the reports are.
        around = stored.encoded.split(b"\xa4rank" + pack(stored.rank), 2)
        if len(around) != 2:
            # A name holds the same bytes; which of them are the rank's own only reading tells.
            return self._read(stored.encoded)
        content = around[0], around[1]
        known = self._known.get(content)
        if known is None:
            known = self._known[content] = self._read(stored.encoded)
        return replace(known, rank=stored.rank)

    def _read(self, encoded: bytes) -> RankReport:
        self.num_decoded += 1
        report = RankReport.read(Fields(unpack(encoded), "report"))
        self.num_members += sum(map(len, report.members.values()))
        return report


async def gather(store: Store, attempt: Attempt, mark: tuple[int, int]) -> Evidence:
    """Everything that is stored of `attempt`, read after `mark`; decoded in threads. Raises `StoreError`.

    Between two pieces others use the store. What arrives or is deleted meanwhile may be in it or not: its mark is
    another one, so that whoever asks again reads again.
    """
    decoder = ReportDecoder()
    reports: list[RankReport] = []
    async for piece in load_reports(store, attempt.job, attempt.attempt):
        reports += await asyncio.to_thread(lambda: [decoder.decode(stored) for stored in piece])  # noqa: B023  # awaited
    pruned = await load_pruned(store, attempt.job, attempt.attempt)
    return Evidence(mark, reports, pruned, decoder.num_members)
