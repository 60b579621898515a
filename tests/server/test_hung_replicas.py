"""A replica that hangs (SIGSTOP: it keeps its connections and says nothing) holds the others up for a bounded time."""

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import asyncpg
import httpx
import pytest

from bucketplan_core.wire import unpack
from tests.server.test_attempts import open_attempt
from tests.server.test_postgres import two_replicas
from tests.support.documents import MSGPACK, plan_body, small_request
from tests.support.postgres import PostgresAddress, running_postgres
from tests.support.server import RunningServer

pytestmark = pytest.mark.postgres
STORE_SECONDS = 3


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresAddress]:
    with running_postgres() as address:
        yield address


@contextlib.contextmanager
def stopped(server: RunningServer) -> Iterator[None]:
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_what_a_replica_that_hangs_was_planning_is_planned_by_another(tmp_path, postgres):
    request = small_request()
    body = plan_body(request)
    settings = {"planning_seconds": 1.5, "plan_wait_seconds": 1, "store_timeout_seconds": STORE_SECONDS}
    with two_replicas(tmp_path, postgres, **settings) as (one, two):

        def post(server: RunningServer) -> httpx.Response:
            return httpx.post(f"{server.url}/v1/plans", content=body, headers=MSGPACK, timeout=60)

        calling = threading.Thread(target=post, args=(one,))
        calling.start()
        locked = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted"
        with asyncio.Runner() as runner:
            other = runner.run(asyncpg.connect(one.database))
            eventually(lambda: runner.run(other.fetchval(locked)) == 1, "it never took the lock")
            runner.run(other.close())
        with stopped(one):
            assert post(two).status_code == 202, "the other one has the lock"
            eventually(lambda: post(two).status_code == 200, "the lock never ended")
        calling.join()
        # It finds its session closed and its plan stored by another.
        eventually(lambda: post(one).status_code == 200, "the replica that went on never answered")
        assert post(one).content == post(two).content
        assert sum(server.metric("bucketplan_plannings_total", outcome="stored") for server in (one, two)) == 1
        new = small_request(2)
        for server in (one, two):
            again = httpx.post(f"{server.url}/v1/plans", content=plan_body(new), headers=MSGPACK, timeout=60)
            assert again.status_code in (200, 201, 202)
        assert httpx.get(f"{one.url}/v1/events/verify").json()["findings"] == []


def test_a_replica_that_hangs_in_a_write_keeps_the_others_from_writing_for_a_bounded_time(tmp_path, postgres):
    with (
        two_replicas(tmp_path, postgres, store_timeout_seconds=STORE_SECONDS) as (one, two),
        asyncio.Runner() as runner,
        httpx.Client(base_url=one.url, timeout=60) as here,
        httpx.Client(base_url=two.url, timeout=60) as there,
    ):
        other = runner.run(asyncpg.connect(one.database))

        def asked(query: str) -> int:
            return runner.run(other.fetchval(query))

        # A statement that takes as long as we want, so that the replica hangs in the middle of its transaction.
        runner.run(
            other.execute(
                "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
                "WHILE NOT pg_try_advisory_xact_lock_shared(42) LOOP PERFORM pg_sleep(0.01); END LOOP; "
                "RETURN NEW; END $$; "
                "CREATE TRIGGER slow BEFORE INSERT ON events FOR EACH ROW EXECUTE FUNCTION wait(); "
                "SELECT pg_advisory_lock(42)"
            )
        )
        answers: list[httpx.Response] = []
        calling = threading.Thread(target=lambda: answers.append(open_attempt(here, "job", "a")))
        calling.start()
        inserting = "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query LIKE 'INSERT INTO events%'"
        eventually(lambda: asked(inserting) == 1, "it never wrote")
        with stopped(one):
            asked("SELECT 1 FROM pg_advisory_unlock(42)")

            def is_written() -> bool:
                answer = open_attempt(there, "job", "b")
                assert answer.status_code == 201 or "nothing was changed" in unpack(answer.content)["detail"]
                return answer.status_code == 201

            eventually(is_written, "nobody can write")
        calling.join()
        assert answers[0].status_code == 503
        assert "nothing was changed" in unpack(answers[0].content)["detail"]
        eventually(lambda: open_attempt(here, "job", "a").status_code == 201, "the replica that went on cannot write")
        runner.run(other.execute("DROP TRIGGER slow ON events; DROP FUNCTION wait"))
        runner.run(other.close())
        attempts = here.get("/v1/jobs/job/attempts").json()["attempts"]
        assert [attempt["attempt"] for attempt in attempts] == [2, 1]
        assert there.get("/v1/events/verify").json()["findings"] == []
