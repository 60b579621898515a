"""A divergence is counted and logged whichever servers its two sides reach."""

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest

from bucketplan_core.attempt import AttemptRequest, RankReport
from bucketplan_server.jobs.divergence import Divergences
from bucketplan_server.jobs.status import attempt_status
from bucketplan_server.store.events import Cause
from tests.server.test_attempts import open_attempt, report
from tests.support.inprocess import in_process
from tests.support.paths import ROOT
from tests.support.postgres import PostgresAddress, running_postgres
from tests.support.server import RunningServer, running_server

COUNTER = "bucketplan_divergences_total"
CAUSE = Cause("test", "report")
NUM_GROUPS = 40


def compiled(rank: int, digest: str, members: tuple[int, ...] = (0, 1), slot: str = "joint") -> RankReport:
    return RankReport(rank=rank, slot=slot, digests={"fsdp": digest * 64}, members={"fsdp": members})


def counted(*servers: RunningServer, least: int = 1) -> int:
    """What the servers have counted together, once that is `least`."""
    deadline = time.monotonic() + 60
    while (found := sum(int(server.metric(COUNTER)) for server in servers)) < least:
        assert time.monotonic() < deadline, f"{found} divergences are counted, not {least}"
        time.sleep(0.01)
    return found


def logged(server: RunningServer) -> list[dict]:
    lines = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == "attempt.diverged"]


def say(server: RunningServer, job: str, *reports: RankReport) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        assert report(client, job, 1, *reports).status_code == 200


def opened(server: RunningServer, job: str, groups: tuple[tuple[int, ...], ...] = ((0, 1),)) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        assert open_attempt(client, job, "a", participants={"fsdp": groups}).status_code == 201


def test_a_restart_between_the_two_sides(tmp_path):
    with running_server(tmp_path) as server:
        opened(server, "restarted")
        say(server, "restarted", compiled(0, "1"))
        server.restart()
        say(server, "restarted", compiled(1, "2"))
        assert counted(server) == 1
        (line,) = logged(server)
        assert (line["job"], line["attempt"], line["rank"]) == ("restarted", 1, 1)
        assert (line["digest"], line["others"]) == ("2" * 64, "1" * 64)
        alerts = (ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text()
        assert line["event"] in alerts, "whom the alert calls is told which line has the job"


def test_a_report_that_is_repeated_to_the_server_that_started_again_is_looked_at(tmp_path):
    with running_server(tmp_path) as server:
        opened(server, "repeated")
        say(server, "repeated", compiled(0, "1"), compiled(1, "2"))
        counted(server)
        server.restart()
        say(server, "repeated", compiled(1, "2"))
        assert counted(server) == 1


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresAddress]:
    with running_postgres() as address:
        yield address


@pytest.mark.postgres
def test_the_two_sides_reach_two_replicas(tmp_path, postgres):
    database = postgres.new_database()
    groups = tuple((2 * n, 2 * n + 1) for n in range(NUM_GROUPS))
    with ExitStack() as stack:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
        one, two = (stack.enter_context(running_server(tmp_path / name, database=database)) for name in ("one", "two"))
        opened(one, "apart", groups)
        say(one, "apart", compiled(0, "1"))
        say(two, "apart", compiled(1, "2"))
        assert counted(one, two) == 1
        assert [line["rank"] for line in logged(two)] == [1]
        # At once: whoever stores last finds the other's, and both may.
        calls = [
            (server, compiled(g[side], str(side + 1), g)) for g in groups[1:] for side, server in enumerate((one, two))
        ]
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda call: say(call[0], "apart", call[1]), calls))
        deadline = time.monotonic() + 60
        while (found := {line["rank"] // 2 for line in logged(one) + logged(two)}) != set(range(NUM_GROUPS)):
            assert time.monotonic() < deadline, f"only {sorted(found)} are told"
            time.sleep(0.01)
        counted(one, two, least=NUM_GROUPS)


@pytest.fixture
def asked(monkeypatch) -> list[int]:
    """How many groups the store is asked for, a number each time."""
    numbers: list[int] = []
    inner = Divergences._stored

    async def counting(self, groups):
        numbers.append(len(groups))
        return await inner(self, groups)

    monkeypatch.setattr(Divergences, "_stored", counting)
    return numbers


def count_of(database: str, reports: list[RankReport]) -> int:
    """What a server counts when these reports come one after the other."""
    with in_process([database]) as servers:
        jobs = servers.states[0].jobs

        async def scenario() -> None:
            await jobs.open("told", AttemptRequest(key="a", participants={}), CAUSE)
            for one in reports:
                await jobs.report("told", 1, [one], CAUSE)
                await asyncio.gather(*jobs._divergences._tasks)

        servers.run(scenario())
        return servers.states[0].metrics.tallies[COUNTER, ""]


@pytest.mark.parametrize("members", [{"fsdp": (0, 1, 2, 3)}, {}])
def test_what_agrees_is_not_counted_and_the_store_is_asked_once_a_group(tmp_path, asked, members):
    database = str(tmp_path / "store.db")

    def reports(first: int, digests: str) -> list[RankReport]:
        return [
            RankReport(rank=rank, slot="joint", digests={"fsdp": digest * 64}, members=members)
            for rank, digest in enumerate(digests, first)
        ]

    assert (count_of(database, reports(0, "11")), asked) == (0, [1])
    assert (count_of(database, reports(2, "12")), asked) == (1, [1, 1])


def test_graphs_that_come_at_once_are_asked_for_one_after_the_other(tmp_path, monkeypatch):
    reading: list[int] = []
    most = 0
    inner = Divergences._stored

    async def watched(self, groups):
        nonlocal most
        reading.append(1)
        most = max(most, len(reading))
        try:
            return await inner(self, groups)
        finally:
            reading.pop()

    monkeypatch.setattr(Divergences, "_stored", watched)
    with in_process([str(tmp_path / "store.db")]) as servers:
        jobs = servers.states[0].jobs

        async def scenario() -> None:
            await jobs.open("many", AttemptRequest(key="a", participants={}), CAUSE)
            await jobs.report("many", 1, [compiled(0, "1", slot=f"graph {number}") for number in range(50)], CAUSE)
            await asyncio.gather(*jobs._divergences._tasks)

        servers.run(scenario())
    assert most == 1


def test_other_members_are_other_groups(tmp_path):
    reports = [compiled(0, "1", (0, 1, 2)), compiled(1, "2"), compiled(2, "1", (0, 1, 2))]
    assert count_of(str(tmp_path / "store.db"), reports) == 0


@pytest.mark.parametrize(
    "odd",
    [
        compiled(1, "1", (1, 0)),
        RankReport(rank=1, slot="joint", members={"fsdp": (0, 1)}, signature="3" * 64),
        RankReport(rank=1, slot="joint", members={"fsdp": (0, 1)}),
    ],
    ids=["order of members", "signature", "neither"],
)
def test_what_the_state_calls_diverged_is_counted(tmp_path, odd):
    reports = [compiled(0, "1"), odd]
    assert count_of(str(tmp_path / "store.db"), reports) == 1
    assert slot_states(reports) == {"diverged"}


def test_ranks_of_a_role_without_collectives_are_compared_by_signature(tmp_path):
    silent = [RankReport(rank=rank, slot="joint", members={"fsdp": (0, 1)}, signature="3" * 64) for rank in (0, 1)]
    assert count_of(str(tmp_path / "store.db"), silent) == 0
    assert slot_states(silent) == {"agreed"}


def slot_states(reports: list[RankReport]) -> set[str]:
    status = attempt_status(
        {"fsdp": ((0, 1),)}, reports, pruned=None, opened_ns=0, now_ns=1, stall_ns=9, difference=lambda *_: None
    )
    return {slot["state"] for group in status["groups"] for slot in group["slots"]}
