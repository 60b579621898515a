"""One signature is planned once, whoever asks at the same time, and nobody waits without bound."""

import asyncio
import os
import signal

import httpx
import psutil
import pytest

from bucketplan_core.planning import make_plan
from bucketplan_core.wire import unpack
from tests.support.documents import MSGPACK, plan_body, profile_of, small_request
from tests.support.server import RunningServer, running_server, wait_for_gauge, wait_for_planning


async def post_all(server: RunningServer, bodies: list[bytes]) -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=len(bodies))
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
        return await asyncio.gather(*(client.post("/v1/plans", content=body, headers=MSGPACK) for body in bodies))


def planners_of(server: RunningServer) -> list[psutil.Process]:
    """The planning processes: a server has no other children."""
    return psutil.Process(server.pid).children()


def test_fifty_concurrent_first_posts_plan_once_and_get_equal_bodies(tmp_path):
    request = small_request()
    profiles = [profile_of(request, flops=number) for number in range(50)]
    with running_server(tmp_path, planning_seconds=1.0) as server:
        answers = asyncio.run(post_all(server, [plan_body(request, profile) for profile in profiles]))
        assert {answer.content for answer in answers} <= {make_plan(request, p).encoded for p in profiles}
        assert len({answer.content for answer in answers}) == 1
        assert sorted(answer.status_code for answer in answers) == [200] * 49 + [201]
        assert server.metric("bucketplan_plannings_total", outcome="stored") == 1
        assert server.metric("bucketplan_planning_seconds_count") == 1
        assert server.metric("bucketplan_single_flight_waits_total") == 49


def test_health_and_known_plans_are_answered_while_another_is_planned(tmp_path):
    known = small_request(1)
    with running_server(tmp_path, planning_seconds=2.0) as server:
        httpx.post(f"{server.url}/v1/plans", content=plan_body(known), headers=MSGPACK).raise_for_status()

        async def scenario() -> list[int]:
            slow = asyncio.create_task(post_all(server, [plan_body(small_request(2))]))
            async with httpx.AsyncClient(base_url=server.url) as client:
                await asyncio.to_thread(wait_for_planning, server)
                paths = ("/healthz", "/readyz", f"/v1/plans/{known.signature}")
                statuses = [(await client.get(path)).status_code for path in paths]
                assert not slow.done(), "planning ended before the other answers came"
            return statuses + [answer.status_code for answer in await slow]

        assert asyncio.run(scenario()) == [200, 200, 200, 201]


def test_a_post_that_waited_long_enough_gets_202_and_repeating_it_gets_the_plan(tmp_path):
    request = small_request()
    with running_server(tmp_path, planning_seconds=1.5, plan_wait_seconds=0.2) as server:
        url = f"{server.url}/v1/plans"
        first = httpx.post(url, content=plan_body(request), headers=MSGPACK)
        assert first.status_code == 202
        assert int(first.headers["retry-after"]) >= 1
        assert unpack(first.content) == {"signature": request.signature, "state": "planning"}
        assert httpx.get(f"{url}/{request.signature}", headers=MSGPACK).status_code == 202
        for _ in range(100):
            again = httpx.post(url, content=plan_body(request), headers=MSGPACK)
            if again.status_code != 202:
                break
        assert again.content == make_plan(request).encoded
        assert server.metric("bucketplan_planning_seconds_count") == 1


def test_a_get_may_wait_for_somebody_elses_post(tmp_path):
    request = small_request()
    with running_server(tmp_path, planning_seconds=0.5) as server:

        async def scenario() -> tuple[httpx.Response, list[httpx.Response]]:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                path = f"/v1/plans/{request.signature}?wait=30"
                waiting = asyncio.create_task(client.get(path, headers=MSGPACK))
                await asyncio.to_thread(wait_for_gauge, server, "bucketplan_post_waiters")
                assert not waiting.done()
                posted = await post_all(server, [plan_body(request)])
                return await waiting, posted

        got, answers = asyncio.run(scenario())
        assert got.status_code == 200
        assert got.content == answers[0].content
        unknown = httpx.get(f"{server.url}/v1/plans/{'0' * 64}?wait=1", headers=MSGPACK)
        assert unknown.status_code == 404


def test_too_many_plannings_and_waiters_are_refused_with_retry_after(tmp_path):
    with running_server(tmp_path, planning_seconds=1.0, max_queued_plannings=2) as server:
        answers = asyncio.run(post_all(server, [plan_body(small_request(number)) for number in range(6)]))
        statuses = sorted(answer.status_code for answer in answers)
        assert statuses == [201, 201, 503, 503, 503, 503]
        for answer in answers:
            if answer.status_code == 503:
                assert unpack(answer.content)["type"] == "urn:bucketplan:problem:busy"
                assert "retry-after" in answer.headers
    with running_server(tmp_path, planning_seconds=1.0, max_waiters=3) as server:
        answers = asyncio.run(post_all(server, [plan_body(small_request(9))] * 8))
        assert sorted(answer.status_code for answer in answers) == [200, 200, 201] + [503] * 5


def test_a_killed_planner_is_replaced_and_its_work_repeated(tmp_path):
    with running_server(tmp_path, planning_seconds=1.5) as server:

        async def scenario() -> list[httpx.Response]:
            posts = asyncio.create_task(post_all(server, [plan_body(small_request())]))
            await asyncio.to_thread(wait_for_planning, server)
            await asyncio.sleep(0.3)
            for planner in planners_of(server):
                planner.kill()
            return await posts

        answers = asyncio.run(scenario())
        assert [answer.status_code for answer in answers] == [201]
        assert answers[0].content == make_plan(small_request()).encoded
        assert server.metric("bucketplan_planner_crashes_total") == 1


def test_a_request_whose_planner_dies_twice_is_503_and_the_server_goes_on(tmp_path):
    with running_server(tmp_path, planning_seconds=2.0) as server:

        async def scenario() -> list[httpx.Response]:
            posts = asyncio.create_task(post_all(server, [plan_body(small_request())]))
            await asyncio.to_thread(wait_for_planning, server)
            while not posts.done():
                for planner in planners_of(server):
                    planner.kill()
                await asyncio.sleep(0.2)
            return await posts

        (answer,) = asyncio.run(scenario())
        assert answer.status_code == 503
        assert unpack(answer.content)["type"] == "urn:bucketplan:problem:planner-failed"
        assert "retry-after" in answer.headers
        again = httpx.post(f"{server.url}/v1/plans", content=plan_body(small_request()), headers=MSGPACK, timeout=60)
        assert again.status_code == 201


def test_a_planning_without_end_is_given_up(tmp_path):
    with running_server(tmp_path, planning_seconds=3600, planner_timeout_seconds=0.5) as server:
        answer = httpx.post(f"{server.url}/v1/plans", content=plan_body(small_request()), headers=MSGPACK, timeout=60)
        assert answer.status_code == 422
        assert "BUCKETPLAN_PLANNER_TIMEOUT_SECONDS" in unpack(answer.content)["detail"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_planners_end_with_their_server(tmp_path, number):
    with running_server(tmp_path) as server:
        planners = planners_of(server)
        assert planners
        os.kill(server.pid, number)
        _, alive = psutil.wait_procs(planners, timeout=30)
        assert not alive
