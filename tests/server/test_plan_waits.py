"""Waits for plans end when the caller leaves and when the server stops, and the planning behind them goes on."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator

import httpx
import pytest

from bucketplan_core.planning import make_plan
from bucketplan_server.http.state import AppState
from tests.server.test_watch import served, until
from tests.support.documents import MSGPACK, plan_body, small_request
from tests.support.inprocess import InProcess, in_process
from tests.support.postgres import running_postgres
from tests.support.server import running_server, wait_for_gauge

REQUEST = small_request()
UNPOSTED = f"/v1/plans/{'0' * 64}?wait=600"
LONG = {"plan_wait_seconds": 600}


@contextlib.contextmanager
def held(tmp_path, monkeypatch, **settings: int) -> Iterator[tuple[InProcess, AppState, asyncio.Event]]:
    """A server whose plannings wait for the event before they end."""
    with in_process([str(tmp_path / "store.db")], **(LONG | settings)) as servers:
        state, go_on = servers.states[0], asyncio.Event()
        plan = state.pool.plan

        async def held_plan(job):
            planned = await plan(job)
            await go_on.wait()
            return planned

        monkeypatch.setattr(state.pool, "plan", held_plan)
        yield servers, state, go_on


@contextlib.asynccontextmanager
async def callers(port: int, head: str, body: bytes, number: int, waits: Callable[[], bool]) -> AsyncIterator[None]:
    """That many callers on connections of their own, once `waits` says that they wait; at the end they go away."""
    lines = (head, "Host: 127.0.0.1", f"Content-Length: {len(body)}", "Content-Type: application/msgpack", "", "")
    writers = [(await asyncio.open_connection("127.0.0.1", port))[1] for _ in range(number)]
    for writer in writers:
        writer.write("\r\n".join(lines).encode() + body)
    await until(waits)
    yield
    for writer in writers:
        writer.close()


@pytest.mark.parametrize("head", ["POST /v1/plans HTTP/1.1", f"GET /v1/plans/{REQUEST.signature} HTTP/1.1"])
def test_who_leaves_makes_room_and_the_planning_goes_on(tmp_path, monkeypatch, head):
    body = plan_body(REQUEST)
    with held(tmp_path, monkeypatch, max_waiters=3) as (servers, state, go_on):
        plans = state.plans

        async def scenario() -> httpx.Response:
            async with served(state) as (client, port):
                first = asyncio.create_task(client.post("/v1/plans", content=body, headers=MSGPACK))
                await until(lambda: plans._waiters == 1)
                sent = body if head.startswith("POST") else b""
                async with callers(port, head, sent, 2, lambda: plans._waiters == 3):
                    assert (await client.get(f"/v1/plans/{REQUEST.signature}")).status_code == 503
                await until(lambda: plans._waiters == 1)
                assert len(plans._flights) == 1
                go_on.set()
                return await first

        answer = servers.run(scenario())
        assert (answer.status_code, answer.content) == (201, make_plan(REQUEST).encoded)


def test_a_planning_that_everybody_left_is_stored(tmp_path, monkeypatch):
    with held(tmp_path, monkeypatch) as (servers, state, go_on):
        plans = state.plans

        async def scenario() -> httpx.Response:
            async with served(state) as (client, port):
                head = "POST /v1/plans HTTP/1.1"
                async with callers(port, head, plan_body(REQUEST), 1, lambda: plans._waiters == 1):
                    pass
                await until(lambda: plans._waiters == 0)
                go_on.set()
                return await client.get(f"/v1/plans/{REQUEST.signature}", headers=MSGPACK)

        answer = servers.run(scenario())
        assert (answer.status_code, answer.content) == (200, make_plan(REQUEST).encoded)


def test_waits_for_a_post_are_bounded_and_end_with_their_callers(tmp_path):
    with in_process([str(tmp_path / "store.db")], max_waiters=2, **LONG) as servers:
        state = servers.states[0]
        plans = state.plans

        async def scenario() -> None:
            async with served(state) as (client, port):
                full = lambda: plans._num_expecting == 2  # noqa: E731  # a shorthand
                async with callers(port, f"GET {UNPOSTED} HTTP/1.1", b"", 2, full):
                    refused = await client.get(UNPOSTED)
                assert (refused.status_code, refused.json()["limit"]) == (503, 2)
                assert "retry-after" in refused.headers
                await until(lambda: plans._num_expecting == 0)
                assert plans._arrivals == {}

        servers.run(scenario())


def test_a_server_that_stops_waits_for_its_plannings_alone(tmp_path, monkeypatch):
    with held(tmp_path, monkeypatch) as (servers, state, go_on):
        plans = state.plans

        async def scenario() -> list[httpx.Response]:
            post = asyncio.create_task(servers.call("POST", "/v1/plans", content=plan_body(REQUEST), **MSGPACK))
            await until(lambda: plans._waiters == 1)
            joined = asyncio.create_task(servers.call("GET", f"/v1/plans/{REQUEST.signature}?wait=600", **MSGPACK))
            vain = asyncio.create_task(servers.call("GET", UNPOSTED))
            await until(lambda: (plans._waiters, plans._num_expecting) == (2, 1))
            plans.stop()
            answers = [await vain, await servers.call("GET", UNPOSTED), await servers.call("GET", UNPOSTED[:-9])]
            assert not post.done()
            assert not joined.done()
            go_on.set()
            return [*answers, await post, await joined]

        *stopped, unknown, posted, joined = servers.run(scenario())
        for answer in stopped:
            assert (answer.status_code, answer.json()["type"]) == (503, "urn:bucketplan:problem:busy")
            assert (answer.headers["retry-after"], answer.headers["connection"]) == ("1", "close")
        assert unknown.status_code == 404
        assert (posted.status_code, joined.status_code) == (201, 200)
        assert posted.content == joined.content


def test_sigterm_ends_a_wait_for_a_post(tmp_path):
    # Without that the wait would last 600 s, and 60 s are how long the exit is waited for.
    with running_server(tmp_path, **LONG) as server:

        async def scenario() -> httpx.Response:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                call = asyncio.create_task(client.get(UNPOSTED))
                await asyncio.to_thread(wait_for_gauge, server, "bucketplan_post_waiters")
                os.kill(server.pid, signal.SIGTERM)
                return await call

        assert asyncio.run(scenario()).status_code == 503
        assert server.wait() == 0


@pytest.mark.postgres
def test_a_wait_ends_with_what_another_replica_stored(monkeypatch):
    with running_postgres() as postgres:
        database = postgres.new_database()
        with in_process([database, database]) as servers:
            waits, arrives = asyncio.Event(), servers.states[0].plans._arrival

            async def arrival(signature: str, seconds: float) -> None:
                waits.set()
                await arrives(signature, seconds)

            monkeypatch.setattr(servers.states[0].plans, "_arrival", arrival)

            async def scenario() -> tuple[httpx.Response, httpx.Response]:
                path = f"/v1/plans/{REQUEST.signature}?wait=5"
                waiting = asyncio.create_task(servers.call("GET", path, accept=MSGPACK["Accept"]))
                await waits.wait()
                posted = await servers.call("POST", "/v1/plans", replica=1, content=plan_body(REQUEST), **MSGPACK)
                return posted, await waiting

            posted, found = servers.run(scenario())
            assert (posted.status_code, found.status_code) == (201, 200)
            assert found.content == posted.content
