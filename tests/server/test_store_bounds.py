"""What one call may make the store read, or this process hold, whatever a rank has sent before."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from sqlalchemy import func, select

from bucketplan_core.attempt import RankReport
from bucketplan_core.epoch import Epoch
from bucketplan_core.wire import pack
from bucketplan_server.audit import verify
from bucketplan_server.jobs import divergence
from bucketplan_server.jobs.divergence import Divergences
from bucketplan_server.jobs.evidence import Evidence, ReportDecoder
from bucketplan_server.jobs.states import _weight_of
from bucketplan_server.metrics import Metrics
from bucketplan_server.planner import worker
from bucketplan_server.planner.planned import PlanJob
from bucketplan_server.store.engine import Store, open_store
from bucketplan_server.store.events import MOST_BODY_BYTES, Cause, append_event, load_events
from bucketplan_server.store.jobs import StoredReport, never_served
from bucketplan_server.store.plans import store_planned
from bucketplan_server.store.tables import events, profiles
from tests.support.documents import profile_of, small_request

T = TypeVar("T")
CAUSE = Cause("test", "reason")


def with_store(folder: Path, use: Callable[[Store], Awaitable[T]]) -> T:
    async def run() -> T:
        store = await open_store(str(folder / "plans.db"), timeout_seconds=10)
        try:
            return await use(store)
        finally:
            await store.close()

    return asyncio.run(run())


def test_a_signature_that_is_planned_twice_leaves_the_first_profile_alone(tmp_path):
    request = small_request(1)
    both = [
        worker.plan(PlanJob(request.signature, request.encoded, profile_of(request, flops=flops).encoded))
        for flops in (1, 2)
    ]

    async def use(store):
        first = [(await store_planned(store, planned, CAUSE))[2] for planned in both]
        async with store.read() as connection:
            kept = list(await connection.scalars(select(profiles.c.digest)))
            num_events = await connection.scalar(select(func.count()).select_from(events))
        return first, kept, num_events, (await verify(store, None)).findings

    assert both[0].profile_digest != both[1].profile_digest
    assert with_store(tmp_path, use) == ([True, False], [both[0].profile_digest], 1, ())


def test_a_page_of_events_ends_with_the_bytes_and_always_goes_on(tmp_path):
    sizes = [10, MOST_BODY_BYTES // 2, MOST_BODY_BYTES // 2 + 1, 2 * MOST_BODY_BYTES, 10, 10]

    async def use(store):
        for size in sizes:
            async with store.write() as connection:
                await append_event(connection, "token.created", CAUSE, at_ns=1, body={"name": "x" * size})
        after, pages = 0, []
        while found := await load_events(store, after=after, limit=1_000, signature=None, job=None):
            pages.append([row["seq"] for row in found])
            after = pages[-1][-1]
        return pages

    assert with_store(tmp_path, use) == [[1, 2], [3], [4], [5, 6]]


def test_overrides_of_an_adopted_epoch_are_looked_up_in_pieces(tmp_path, monkeypatch):
    request = small_request(1)
    planned = worker.plan(PlanJob(request.signature, request.encoded, None))
    overrides = {f"{number:064x}": "a" * 64 for number in range(1_200)} | {request.signature: planned.digest}
    epoch = Epoch.build(job="llama", options=request.options, topology={"fsdp": 1}, overrides=overrides)

    async def use(store):
        await store_planned(store, planned, CAUSE)
        reads = 0
        read = store.read

        def counted():
            nonlocal reads
            reads += 1
            return read()

        monkeypatch.setattr(store, "read", counted)
        found = []
        for only in (None, request.signature, f"{7:064x}"):
            before = reads
            found.append((len(await never_served(store, epoch, None, only=only)), reads - before))
        return found

    # The planner's own revision is always served; one that is not stored is not there to be given out.
    assert with_store(tmp_path, use) == [(1_200, 3), (0, 1), (1, 1)]


class TestReportsThatWaitToBeCompared:
    def reports(self, num_slots: int) -> list[RankReport]:
        return [
            RankReport(rank=rank, slot=f"graph {slot}", digests={"fsdp": str(rank) * 64}, members={"fsdp": (0, 1)})
            for slot in range(num_slots)
            for rank in (0, 1)
        ]

    def watched(self, folder: Path, num_slots: int, num_repeats: int) -> tuple[int, int, int]:
        async def use(store):
            metrics = Metrics()
            found = Divergences(store, metrics)
            async with found._turn:  # the store is slow
                for _ in range(num_repeats):
                    found.watch("llama", 1, self.reports(num_slots))
                    await asyncio.sleep(0)
                held = sum(map(len, found._asking.values()))
            await asyncio.gather(*found._tasks)
            assert (found._asking, found._num_asked) == ({}, 0)
            before = counted(metrics)
            found.watch("llama", 1, self.reports(num_slots))
            await asyncio.gather(*found._tasks)
            return held, before, counted(metrics)

        return with_store(folder, use)

    def test_one_that_is_repeated_waits_once(self, tmp_path):
        assert self.watched(tmp_path, 5, 40)[:2] == (10, 5)

    def test_beyond_the_bound_the_next_report_finds_it(self, tmp_path, monkeypatch):
        monkeypatch.setattr(divergence, "_MOST_ASKED", 4)
        held, before, after = self.watched(tmp_path, 5, 3)
        assert (held, before) == (4, 2)
        assert after > before


def counted(metrics: Metrics) -> int:
    return metrics.tallies["bucketplan_divergences_total", ""]


def test_lists_of_members_weigh_unless_they_are_shared():
    decoder, reports = ReportDecoder(), []
    for rank in range(64):
        report = RankReport(rank=rank, slot="joint", members={"fsdp": range(6_400)}, graph_hash=str(rank // 32))
        reports.append(decoder.decode(StoredReport(rank, pack(report.to_wire()))))
    assert decoder.num_members == 2 * 6_400
    alike = Evidence((64, 1), reports, None, decoder.num_members)
    assert _weight_of(alike) == 1 + 64 + 400
    assert _weight_of(replace(alike, num_members=0)) == 65
