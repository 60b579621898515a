"""Waiting for an attempt to change: what it costs the store does not grow with those who wait."""

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
import uvicorn

from bucketplan_core.attempt import AttemptRequest, RankReport
from bucketplan_core.wire import from_json, pack
from bucketplan_server.jobs import evidence, service, states
from bucketplan_server.jobs.watch import Reading, Watchers
from bucketplan_server.problems import Problem
from bucketplan_server.store.engine import StoreError
from tests.support.documents import MSGPACK
from tests.support.inprocess import front_of, in_process

NUM_WAITERS = 300
NEVER = 3_600.0
KEY = ("job", 1)
PATH = "/v1/jobs/polled/attempts"


class Source:
    """What a watcher reads: `version` as it is when the reading begins, answered when `open` is set."""

    def __init__(self) -> None:
        self.version = "0"
        self.num_reads = 0
        self.failure: Exception | None = None
        self.open = asyncio.Event()
        self.open.set()

    async def read(self) -> Reading:
        self.num_reads += 1
        version = self.version
        await self.open.wait()
        if self.failure is not None:
            raise self.failure
        return Reading(version, (0, 0))


def watchers(*, refresh_seconds: float = NEVER, stopping: Callable[[], bool] = lambda: False) -> Watchers:
    return Watchers(refresh_seconds=refresh_seconds, most=NUM_WAITERS, stopping=stopping)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # what is waited for has no event, and gets none for a test
            await asyncio.sleep(0.005)


async def waiting(all_of: Watchers, source: Source, number: int, seen: str = "0") -> list[asyncio.Task]:
    tasks = [asyncio.create_task(all_of.wait(KEY, seen, NEVER, source.read)) for _ in range(number)]
    await until(lambda: all_of.num_waiters == number and source.num_reads > 0)
    return tasks


class TestWatchers:
    def test_a_change_is_read_once_for_all_who_wait(self):
        async def scenario():
            all_of, source = watchers(), Source()
            for change in ("1", "2", "3"):
                tasks = await waiting(all_of, source, NUM_WAITERS, source.version)
                before, source.version = source.num_reads, change
                all_of.changed(KEY)
                assert {found.version for found in await asyncio.gather(*tasks)} == {change}
                assert source.num_reads - before == 1
                await until(lambda: len(all_of) == 0)
                source.num_reads = 0

        asyncio.run(scenario())

    def test_a_reading_that_began_before_a_waiter_came_tells_it_nothing(self):
        async def scenario():
            all_of, source = watchers(), Source()
            source.open.clear()
            old = await waiting(all_of, source, 1)
            # The state goes on while that reading is under way; who has seen it must not be told of the one before.
            source.version = "1"
            new = asyncio.create_task(all_of.wait(KEY, "1", NEVER, source.read))
            await until(lambda: all_of.num_waiters == 2)
            source.open.set()
            assert (await old[0]).version == "1"
            assert not new.done()
            source.version = "2"
            all_of.changed(KEY)
            assert (await new).version == "2"

        asyncio.run(scenario())

    def test_a_failure_reaches_everybody_and_ends_the_watcher(self):
        async def scenario():
            all_of, source = watchers(), Source()
            tasks = await waiting(all_of, source, 5)
            source.failure = Problem("store-unavailable", "away", headers={"Retry-After": "1"})
            all_of.changed(KEY)
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert [(problem.slug, problem.headers) for problem in found] == [
                ("store-unavailable", {"Retry-After": "1"})
            ] * 5
            assert len({id(problem) for problem in found}) == 5
            assert (len(all_of), all_of.num_waiters) == (0, 0)
            source.failure = None
            assert (await all_of.wait(KEY, "before", NEVER, source.read)).version == "0"

        asyncio.run(scenario())

    def test_those_who_leave_leave_no_watcher_behind(self):
        async def scenario():
            all_of, source = watchers(), Source()
            tasks = await waiting(all_of, source, 3)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await until(lambda: len(all_of) == 0)
            assert all_of.num_waiters == 0
            assert await all_of.wait(KEY, "0", 0.05, source.read) == Reading("0", (0, 0)), "it ends with its time too"
            await until(lambda: len(all_of) == 0)

        asyncio.run(scenario())

    def test_a_server_that_stops_ends_every_wait(self):
        async def scenario():
            stopping = asyncio.Event()
            all_of, source = watchers(refresh_seconds=0.01, stopping=stopping.is_set), Source()
            tasks = await waiting(all_of, source, 3)
            stopping.set()
            assert await asyncio.gather(*tasks) == [Reading("0", (0, 0))] * 3

        asyncio.run(scenario())


@contextlib.asynccontextmanager
async def served(state) -> AsyncIterator[tuple[httpx.AsyncClient, int]]:
    """A client of `state` over real connections, and the port."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        server = uvicorn.Server(uvicorn.Config(front_of(state), lifespan="off", log_config=None))
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        port = listening.getsockname()[1]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            yield client, port
        server.should_exit = True
        await serving


class Poll:
    """One long poll on a connection of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def send(cls, port: int, tag: str) -> "Poll":
        poll = cls(*await asyncio.open_connection("127.0.0.1", port))
        lines = (
            f"GET {PATH}/1?wait=600 HTTP/1.1",
            "Host: 127.0.0.1",
            f"If-None-Match: {tag}",
            "Connection: close",
            "",
            "",
        )
        poll.writer.write("\r\n".join(lines).encode())
        return poll

    async def answer(self) -> tuple[int, bytes]:
        head, _, body = (await self.reader.read()).partition(b"\r\n\r\n")
        self.writer.close()
        return int(head.split()[1]), body


def opened(rank: int) -> bytes:
    return pack({"reports": [RankReport(rank=rank, slot="open", uuid="u").to_wire()]})


def test_hundreds_of_connections_wait_at_the_cost_of_one(tmp_path, monkeypatch):
    calls: Counter[str] = Counter()

    def counted(module, name: str) -> None:
        inner = getattr(module, name)

        def call(*arguments):
            calls[name] += 1
            return inner(*arguments)

        monkeypatch.setattr(module, name, call)

    counted(service, "load_attempt")
    counted(states, "mark_of_reports")
    counted(evidence, "load_reports")
    counted(evidence, "load_pruned")

    settings = {"refresh_seconds": NEVER, "stall_seconds": NEVER, "max_status_waiters": NUM_WAITERS}
    with in_process([str(tmp_path / "store.db")], **settings) as servers:
        state = servers.states[0]
        waiters = state.jobs.watchers

        async def scenario() -> None:
            async with served(state) as (client, port):
                body = pack(AttemptRequest(key="a", participants={"fsdp": ((0, 1, 2),)}).to_wire())
                assert (await client.post(PATH, content=body, headers=MSGPACK)).status_code == 201
                for rank in range(2):
                    tag = (await client.get(f"{PATH}/1")).headers["etag"]
                    polls = [await Poll.send(port, tag) for _ in range(NUM_WAITERS)]
                    await until(lambda: waiters.num_waiters == NUM_WAITERS)
                    await until(lambda: [each.latest is not None for each in waiters._watchers.values()] == [True])
                    full = await client.get(f"{PATH}/1?wait=600", headers={"If-None-Match": tag})
                    assert (full.status_code, "retry-after" in full.headers) == (503, True)
                    assert (full.json()["type"], full.json()["limit"]) == ("urn:bucketplan:problem:busy", NUM_WAITERS)
                    calls.clear()
                    posted = await client.post(f"{PATH}/1/reports", content=opened(rank), headers=MSGPACK)
                    assert posted.status_code == 200
                    answers = await asyncio.gather(*(poll.answer() for poll in polls))
                    assert {status for status, _ in answers} == {200}
                    (body,) = {body for _, body in answers}
                    assert from_json(body)["opening"]["num_opened"] == rank + 1
                    assert calls == {"mark_of_reports": 1, "load_reports": 1, "load_pruned": 1}
                tag = (await client.get(f"{PATH}/1")).headers["etag"]
                polls = [await Poll.send(port, tag) for _ in range(NUM_WAITERS)]
                await until(lambda: waiters.num_waiters == NUM_WAITERS)
                for poll in polls:
                    poll.writer.close()
                await until(lambda: (waiters.num_waiters, len(waiters)) == (0, 0))

        servers.run(scenario())


@pytest.mark.parametrize("num_waiters", [1, 50])
def test_a_store_that_fails_is_told_to_all_who_wait(tmp_path, monkeypatch, num_waiters):
    async def away(*_) -> tuple[int, int]:
        raise StoreError("away")

    with in_process([str(tmp_path / "store.db")], refresh_seconds=NEVER, stall_seconds=NEVER) as servers:
        jobs = servers.states[0].jobs

        async def scenario() -> list[httpx.Response]:
            body = pack(AttemptRequest(key="a", participants={}).to_wire())
            await servers.call("POST", PATH, content=body, **MSGPACK)
            tag = (await servers.call("GET", f"{PATH}/1")).headers["etag"]
            call = lambda: servers.call("GET", f"{PATH}/1?wait=600", if_none_match=tag)  # noqa: E731  # a shorthand
            tasks = [asyncio.create_task(call()) for _ in range(num_waiters)]
            await until(lambda: jobs.watchers.num_waiters == num_waiters)
            monkeypatch.setattr(states, "mark_of_reports", away)
            jobs.watchers.changed(("polled", 1))
            return await asyncio.gather(*tasks)

        answers = servers.run(scenario())
        assert {(answer.status_code, answer.headers["retry-after"]) for answer in answers} == {(503, "1")}
        assert len(jobs.watchers) == 0
