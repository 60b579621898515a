"""Calls with reports that come at once share transactions, which are bounded, and so is what waits for one."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from sqlalchemy import select

from bucketplan_core.attempt import AttemptRequest, RankReport
from bucketplan_core.wire import unpack
from bucketplan_server.jobs import batches
from bucketplan_server.problems import Problem
from bucketplan_server.store.events import Cause
from bucketplan_server.store.tables import events
from tests.support.inprocess import InProcess, in_process

CAUSE = Cause("test", "report")
ONE = RankReport(rank=0, slot="joint", signature="1" * 64)


def call(rank: int, num_reports: int, **more: object) -> list[RankReport]:
    return [replace(ONE, rank=rank, ordinal=ordinal, **more) for ordinal in range(num_reports)]


def sent_at_once(servers: InProcess, calls: Sequence[tuple[str, Sequence[RankReport]]]) -> list[object]:
    """What each call of its job's first attempt raised, None where it was answered."""
    jobs = servers.states[0].jobs

    async def scenario() -> list[object]:
        for job in sorted({job for job, _ in calls}):
            await jobs.open(job, AttemptRequest(key="a", participants={}), CAUSE)
        batches_of = jobs._batches
        async with batches_of._writing:
            made = [asyncio.create_task(jobs.report(job, 1, reports, CAUSE)) for job, reports in calls]
            while sum(map(len, batches_of._waiting.values())) + sum(task.done() for task in made) < len(made):  # noqa: ASYNC110  # nothing tells
                await asyncio.sleep(0.001)
        return await asyncio.gather(*made, return_exceptions=True)

    return servers.run(scenario())


def transactions(servers: InProcess) -> list[tuple[str, int]]:
    """Job and number of reports of each transaction that stored some."""

    async def read() -> list[tuple[str, int]]:
        query = select(events.c.job, events.c.body).where(events.c.kind == "reports.received").order_by(events.c.seq)
        async with servers.states[0].store.read() as connection:
            rows = (await connection.execute(query)).all()
        return [(row.job, len(unpack(row.body)["reports"])) for row in rows]

    return servers.run(read())


def test_a_transaction_takes_two_thousand_reports_and_leaves_the_rest(tmp_path):
    with in_process([str(tmp_path / "store.db")]) as servers:
        calls = [("large", call(rank, 500)) for rank in range(18)]
        assert sent_at_once(servers, calls) == [None] * 18
        assert transactions(servers) == [("large", batches.MOST_REPORTS)] * 4 + [("large", 1_000)]


def test_a_transaction_takes_so_many_bytes(tmp_path):
    with in_process([str(tmp_path / "store.db")]) as servers:
        calls = [("wide", call(rank, 1, skipped=["x" * 3 * 2**20])) for rank in range(5)]
        assert sent_at_once(servers, calls) == [None] * 5
        assert transactions(servers) == [("wide", 2), ("wide", 2), ("wide", 1)]


def test_one_call_with_more_is_stored_alone_and_attempts_take_turns(tmp_path):
    with in_process([str(tmp_path / "store.db")]) as servers:
        large = [one for rank in range(3) for one in call(rank, 1_000)]
        calls = [("large", call(7, 1)), ("large", call(8, 1)), ("small", call(0, 1)), ("large", large)]
        assert sent_at_once(servers, calls) == [None] * 4
        assert transactions(servers) == [("large", 2), ("small", 1), ("large", 3_000)]


@pytest.mark.parametrize("limit", ["MOST_WAITING", "_MOST_WAITING_BYTES"])
def test_what_is_more_than_may_wait_is_busy_and_taken_later(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(batches, limit, 100)
    with in_process([str(tmp_path / "store.db")]) as servers:
        calls = [("full", call(rank, 60)) for rank in range(4)]
        first, *others = sent_at_once(servers, calls)
        assert first is None
        refused = [problem for problem in others if problem is not None]
        assert len(refused) == (2 if limit == "MOST_WAITING" else 3)
        assert all(isinstance(problem, Problem) and problem.kind.slug == "busy" for problem in refused)
        assert all("Retry-After" in problem.headers for problem in refused)
        for rank in range(4):
            assert sent_at_once(servers, [("full", call(rank, 60))]) == [None]
        assert sum(number for _, number in transactions(servers)) == 240


def test_no_body_is_read_while_too_many_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "MOST_WAITING", 0)
    with in_process([str(tmp_path / "store.db")]) as servers:
        headers = {"content_type": "application/json"}
        answer = servers.run(servers.call("POST", "/v1/jobs/a/attempts/1/reports", content=b"{", **headers))
        assert (answer.status_code, answer.json()["type"]) == (503, "urn:bucketplan:problem:busy")
        assert "retry-after" in answer.headers
