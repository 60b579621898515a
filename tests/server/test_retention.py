"""Old reports go in pieces: an event each, and whatever happens between two of them."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from sqlalchemy import func, select, text

from bucketplan_core.attempt import AttemptRequest, RankReport
from bucketplan_core.wire import unpack
from bucketplan_server.store import retention
from bucketplan_server.store.engine import Store, StoreError
from bucketplan_server.store.events import Cause
from bucketplan_server.store.jobs import load_pruned
from bucketplan_server.store.tables import events, reports
from tests.server.test_audit import check
from tests.support.inprocess import InProcess, in_process

CAUSE = Cause("test", "report")
NUM_REPORTS = 10


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch) -> None:
    monkeypatch.setattr(retention, "REPORTS_PER_PIECE", 3)


@pytest.fixture
def database(tmp_path) -> str:
    return str(tmp_path / "store.db")


@pytest.fixture
def servers(database) -> Iterator[InProcess]:
    with in_process([database]) as opened:
        opened.run(_filled(opened))
        yield opened


async def _filled(servers: InProcess) -> None:
    jobs = servers.states[0].jobs
    for job in ("a", "b"):
        await jobs.open(job, AttemptRequest(key="a", participants={}), CAUSE)
        graphs = [RankReport(rank=rank, slot="joint", signature=str(rank % 4) * 64) for rank in range(NUM_REPORTS)]
        await jobs.report(job, 1, [*graphs, RankReport(rank=0, slot="open", uuid="u")], CAUSE)


async def pruned_events(store: Store) -> list[tuple[str, int]]:
    query = select(events.c.job, events.c.body).where(events.c.kind == "reports.pruned").order_by(events.c.seq)
    async with store.read() as connection:
        return [(row.job, unpack(row.body)["num_reports"]) for row in await connection.execute(query)]


async def left(store: Store, job: str) -> int:
    async with store.read() as connection:
        return await connection.scalar(select(func.count()).select_from(reports).where(reports.c.job == job)) or 0


async def pieces(store: Store, job: str) -> AsyncIterator[int]:
    async for number in retention._prune(store, job, 1, time.time_ns(), lambda *_: None):
        yield number


def test_an_attempt_goes_in_pieces_with_an_event_each(servers, database):
    store = servers.states[0].store
    assert servers.run(retention.prune_reports(store, time.time_ns())) == 2 * NUM_REPORTS
    assert servers.run(pruned_events(store)) == [(job, number) for job in "ab" for number in (3, 3, 3, 1)]
    pruned = servers.run(load_pruned(store, "a", 1))
    assert pruned is not None
    assert pruned.num_reports == NUM_REPORTS
    assert servers.run(left(store, "a")) == 1, "the opening stays"
    assert check(database).findings == ()


def test_an_attempt_that_is_half_gone_when_the_server_ends_is_sound_and_goes_on(servers, database):
    store = servers.states[0].store

    async def half() -> None:
        found = pieces(store, "a")
        assert [await anext(found), await anext(found)] == [3, 3]
        await found.aclose()

    servers.run(half())
    assert check(database).findings == ()
    assert servers.run(retention.prune_reports(store, time.time_ns())) == 2 * NUM_REPORTS - 6
    assert servers.run(load_pruned(store, "a", 1)).num_reports == NUM_REPORTS
    assert check(database).findings == ()


def test_two_that_prune_at_once_delete_and_count_each_report_once(servers, database):
    store = servers.states[0].store

    async def both() -> list[int]:
        return await asyncio.gather(*(retention.prune_reports(store, time.time_ns()) for _ in range(2)))

    assert sum(servers.run(both())) == 2 * NUM_REPORTS
    logged = servers.run(pruned_events(store))
    assert sum(number for _, number in logged) == 2 * NUM_REPORTS
    assert all(number for _, number in logged), "nothing that was not done is logged"
    assert check(database).findings == ()


def test_a_report_that_comes_while_its_attempt_goes_stays(servers):
    store, jobs = servers.states[0].store, servers.states[0].jobs

    async def scenario() -> int:
        found = pieces(store, "a")
        await anext(found)
        again = [RankReport(rank=rank, slot="joint", signature="9" * 64) for rank in (0, 100)]
        await jobs.report("a", 1, again, CAUSE)
        return 3 + sum([number async for number in found])

    assert servers.run(scenario()) == NUM_REPORTS
    assert servers.run(left(store, "a")) == 3


def test_an_attempt_that_cannot_be_pruned_does_not_keep_the_others(servers):
    store = servers.states[0].store

    async def refuse() -> None:
        async with store.write() as connection:
            await connection.execute(
                text(
                    "CREATE TRIGGER refuse BEFORE DELETE ON reports WHEN old.job = 'a' "
                    "BEGIN SELECT RAISE(ABORT, 'it stays'); END"
                )
            )

    servers.run(refuse())
    with pytest.raises(StoreError, match="it stays"):
        servers.run(retention.prune_reports(store, time.time_ns()))
    assert servers.run(pruned_events(store)) == [("b", number) for number in (3, 3, 3, 1)]
    assert servers.run(left(store, "a")) == NUM_REPORTS + 1
