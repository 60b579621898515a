"""Several replicas on one PostgreSQL: one plan a signature, whatever the timing and whoever dies."""

import asyncio
import contextlib
import itertools
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import asyncpg
import httpx
import pytest

from bucketplan_core.attempt import RankReport
from bucketplan_core.wire import unpack
from bucketplan_server import audit
from bucketplan_server.store.engine import WRITER_LOCK, open_store
from bucketplan_server.store.retention import prune_reports
from tests.server.test_attempts import open_attempt, report
from tests.server.test_audit import activations, check
from tests.server.test_revisions import known, plan, send
from tests.support import counts
from tests.support.documents import MSGPACK, plan_body, profile_of, small_request
from tests.support.postgres import PostgresAddress, running_postgres
from tests.support.server import RunningServer, running_server, wait_for_planning

pytestmark = pytest.mark.postgres


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresAddress]:
    with running_postgres() as address:
        yield address


@contextlib.contextmanager
def two_replicas(tmp_path, postgres: PostgresAddress, **settings) -> Iterator[tuple[RunningServer, RunningServer]]:
    database = postgres.new_database()
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    with (
        running_server(folders[0], database=database, refresh_seconds=0.1, **settings) as one,
        running_server(folders[1], database=database, refresh_seconds=0.1, **settings) as two,
    ):
        yield one, two


async def post_both(servers: tuple[RunningServer, ...], bodies: list[bytes]) -> list[httpx.Response | Exception]:
    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=200)) as client:
        calls = [
            client.post(f"{servers[index % len(servers)].url}/v1/plans", content=body, headers=MSGPACK)
            for index, body in enumerate(bodies)
        ]
        return await asyncio.gather(*calls, return_exceptions=True)


def test_two_replicas_plan_once_and_answer_one_plan(tmp_path, postgres):
    request = small_request()
    bodies = [plan_body(request, profile_of(request, flops=number)) for number in range(40)]
    with two_replicas(tmp_path, postgres, planning_seconds=0.5) as servers:
        answers = asyncio.run(post_both(servers, bodies))
        assert len({answer.content for answer in answers}) == 1
        assert sorted(answer.status_code for answer in answers) == [200] * 39 + [201]
        assert sum(server.metric("bucketplan_plannings_total", outcome="stored") for server in servers) == 1
        assert sum(server.metric("bucketplan_planning_seconds_count") for server in servers) == 1


def test_a_replica_that_dies_while_planning_does_not_block_the_other(tmp_path, postgres):
    request = small_request()
    with two_replicas(tmp_path, postgres, planning_seconds=2.0) as (one, two):

        async def scenario() -> list[httpx.Response | Exception]:
            first = asyncio.create_task(post_both((one,), [plan_body(request)]))
            await asyncio.to_thread(wait_for_planning, one)
            second = asyncio.create_task(post_both((two,), [plan_body(request)]))
            await asyncio.to_thread(wait_for_planning, two)
            one.kill()
            return [*await first, *await second]

        lost, answered = asyncio.run(scenario())
        assert isinstance(lost, httpx.TransportError)
        assert answered.status_code == 201
        one.restart()
        with httpx.Client(base_url=one.url) as client:
            assert plan(client, request.signature).encoded == answered.content


def test_an_activation_reaches_the_other_replica_and_epochs_never_change(tmp_path, postgres):
    with (
        two_replicas(tmp_path, postgres) as (one, two),
        httpx.Client(base_url=one.url) as here,
        httpx.Client(base_url=two.url) as there,
    ):
        request = known(here, 1)
        before = plan(there, request.signature)
        send(here, request.signature, "revisions", options={"strategy": "none"})
        open_attempt(here, "shared", "a")
        report(there, "shared", 1, RankReport(rank=0, slot="joint", signature=request.signature))
        epoch = unpack(open_attempt(there, "shared", "b").content)["epoch_id"]
        send(here, request.signature, "activate", revision=2)
        deadline = time.monotonic() + 30
        while plan(there, request.signature).digest == before.digest:
            assert time.monotonic() < deadline, "the other replica never saw the activation"
        for client in (here, there):
            assert plan(client, request.signature, **{"Bucketplan-Epoch": epoch}).encoded == before.encoded
        assert unpack(open_attempt(here, "shared", "b").content)["epoch_id"] == epoch
        assert [open_attempt(client, "shared", key).status_code for client, key in ((here, "c"), (there, "c"))] == [
            201,
            200,
        ]
        listing = there.get("/v1/plans?parameter=layers.1&group=fsdp&job=shared").json()["plans"]
        assert [found["signature"] for found in listing] == [request.signature]
        found = there.get("/v1/events/verify?replay=true").json()
        assert (found["holds"], found["findings"]) == (True, [])


@pytest.mark.soak
def test_sigkill_at_a_random_moment_loses_no_answered_plan(tmp_path, postgres):
    answered: dict[str, bytes] = {}
    database = postgres.new_database()
    with running_server(tmp_path, database=database) as server:
        for seed in counts.seeds("sigkill-postgres", test=10, soak=100):
            killer = threading.Timer(random.Random(seed).uniform(0.0, 0.5), server.kill)
            killer.start()
            number = seed * 10_000
            with contextlib.suppress(httpx.TransportError), httpx.Client(base_url=server.url) as client:
                while True:
                    number += 1
                    request = small_request(number)
                    answer = client.post("/v1/plans", content=plan_body(request), headers=MSGPACK)
                    assert answer.status_code == 201
                    answered[request.signature] = answer.content
            killer.join()
            server.restart()
            with httpx.Client(base_url=server.url) as client:
                for signature, body in answered.items():
                    assert client.get(f"/v1/plans/{signature}", headers=MSGPACK).content == body
        with httpx.Client(base_url=server.url, timeout=120) as client:
            assert client.get("/v1/events/verify").json()["holds"]
    assert check(database).holds
    assert answered


def test_known_plans_are_served_and_new_ones_refused_while_the_database_is_away(tmp_path, postgres):
    database = postgres.new_database()
    with (
        running_server(tmp_path, database=database, store_timeout_seconds=2) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        request, new = known(client, 1), small_request(2)
        body = client.get(f"/v1/plans/{request.signature}", headers=MSGPACK).content
        with postgres.away(database):
            assert client.get(f"/v1/plans/{request.signature}", headers=MSGPACK).content == body
            refused = client.post("/v1/plans", content=plan_body(new), headers=MSGPACK)
            assert refused.status_code == 503
            assert unpack(refused.content)["type"] == "urn:bucketplan:problem:store-unavailable"
            assert "retry-after" in refused.headers
            assert client.get("/readyz").status_code == 503
            assert client.get("/healthz").status_code == 200
        deadline = time.monotonic() + 30
        while client.post("/v1/plans", content=plan_body(new), headers=MSGPACK).status_code != 201:
            assert time.monotonic() < deadline, "the server did not recover"
        assert client.get("/v1/events/verify").json()["findings"] == []


def test_a_verification_beside_activations_finds_nothing(tmp_path, postgres):
    with running_server(tmp_path, database=postgres.new_database()) as server:
        with activations(server), httpx.Client(base_url=server.url, timeout=60) as client:
            found = [client.get("/v1/events/verify").json()["findings"] for _ in range(12)]
        assert found == [[]] * 12


def test_a_server_that_cannot_write_is_not_ready_until_it_can(tmp_path, postgres):
    database = postgres.new_database()
    with (
        running_server(tmp_path, database=database, store_timeout_seconds=1) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
        asyncio.Runner() as runner,
    ):
        assert client.get("/readyz").status_code == 200
        other = runner.run(asyncpg.connect(database))
        runner.run(other.execute(f"SELECT pg_advisory_lock({WRITER_LOCK})"))
        assert open_attempt(client, "job", "a").status_code == 503
        assert client.get("/readyz").status_code == 503
        assert client.get("/healthz").status_code == 200
        runner.run(other.execute(f"SELECT pg_advisory_unlock({WRITER_LOCK})"))
        assert client.get("/readyz").status_code == 200
        assert open_attempt(client, "job", "a").status_code == 201
        runner.run(other.close())


def test_two_hundred_queued_plannings_fit_a_database_of_a_hundred_connections(tmp_path, postgres):
    requests = [small_request(number) for number in range(200)]
    with two_replicas(tmp_path, postgres, planning_seconds=0.02, plan_wait_seconds=0.5) as (one, two):

        async def scenario() -> tuple[list[httpx.Response | Exception], int]:
            other = await asyncpg.connect(one.database)
            posts = asyncio.create_task(post_both((one,), [plan_body(request) for request in requests]))
            most = 0
            while not posts.done() or one.metric("bucketplan_plannings_in_progress"):
                query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
                most = max(most, await other.fetchval(query))
                await asyncio.sleep(0.05)
            await other.close()
            return await posts, most

        answers, most = asyncio.run(scenario())
        assert {answer.status_code for answer in answers} <= {201, 202}
        # Those of two replicas as deploy/README.md says, and the one that counts.
        assert most <= 2 * 17 + 1
        assert httpx.get(f"{two.url}/readyz").status_code == 200
        assert one.metric("bucketplan_plannings_total", outcome="stored") == len(requests)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("CREATE TRIGGER evil AFTER INSERT ON events EXECUTE FUNCTION suppress_redundant_updates_trigger()", "evil"),
        ("CREATE RULE evil AS ON DELETE TO events DO INSTEAD NOTHING", "evil"),
        ("DROP INDEX ix_events_signature", "ix_events_signature"),
        ("ALTER TABLE tokens ADD COLUMN extra TEXT", "extra"),
    ],
)
def test_a_schema_that_the_migrations_did_not_make_is_found(postgres, change, found):
    async def findings() -> list[str]:
        database = postgres.new_database()
        store = await open_store(database, timeout_seconds=30)
        try:
            assert (await audit.verify(store, None)).findings == ()
            async with store.write() as connection:
                # Others may have tables beside ours.
                await connection.exec_driver_sql("CREATE TABLE of_somebody_else (x INTEGER)")
                await connection.exec_driver_sql(change)
            return [f"{finding.where} {finding.detail}" for finding in (await audit.verify(store, None)).findings]
        finally:
            await store.close()

    (only,) = asyncio.run(findings())
    assert found in only


def run_program(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)


def verify(database: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return run_program(sys.executable, "-m", "bucketplan_server", "verify", "--database", database, *flags)


def test_a_dump_beside_a_working_server_is_restored_whole(tmp_path, postgres):
    source, target = postgres.new_database(), postgres.new_database()
    dump = tmp_path / "plans.dump"
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
    with running_server(old, database=source) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        request = known(client, 1)
        send(client, request.signature, "revisions", options={"strategy": "none"}).raise_for_status()
        send(client, request.signature, "activate", revision=2).raise_for_status()
        opened = open_attempt(client, "restored", "a")
        report(client, "restored", 1, RankReport(rank=0, slot="open", uuid="u")).raise_for_status()
        epoch = unpack(opened.content)["epoch_id"]
        served = {request.signature: plan(client, request.signature).encoded}
        stop = threading.Event()

        def write_on() -> None:
            # One transaction after the other, so that the dump is taken amid them.
            with httpx.Client(base_url=server.url, timeout=60) as writer:
                for number in itertools.count(2):
                    if stop.is_set():
                        return
                    later = known(writer, number)
                    served[later.signature] = plan(writer, later.signature).encoded

        writing = threading.Thread(target=write_on)
        writing.start()
        try:
            while len(served) < 4 and writing.is_alive():
                time.sleep(0.01)
            dumped = run_program(postgres.program("pg_dump"), "--format=custom", f"--file={dump}", source)
        finally:
            stop.set()
            writing.join()
        assert (dumped.returncode, dumped.stderr) == (0, "")
        known(client, 100_000)
    restored = run_program(postgres.program("pg_restore"), "--exit-on-error", f"--dbname={target}", dump)
    assert (restored.returncode, restored.stderr) == (0, "")
    checked = verify(target)
    assert (checked.returncode, checked.stderr) == (0, "")
    head = checked.stdout.rsplit(" ", 1)[1].strip()
    assert verify(source, "--expect-head", head).returncode == 0, "the source's log holds the restored one"
    with running_server(new, database=target) as server, httpx.Client(base_url=server.url) as client:
        listed = {entry["signature"] for entry in client.get("/v1/plans?limit=200").json()["plans"]}
        assert request.signature in listed
        assert listed <= served.keys()
        assert {signature: plan(client, signature).encoded for signature in listed} == {
            signature: served[signature] for signature in listed
        }
        assert plan(client, request.signature).decision.planner == "none/1", "the pointer was restored too"
        assert unpack(open_attempt(client, "restored", "a").content)["epoch_id"] == epoch
        # What was written after the dump is new here, and numbers go on where the dump ends.
        known(client, 100_000)
        send(client, request.signature, "activate", revision=1).raise_for_status()
        assert unpack(open_attempt(client, "restored", "b").content)["attempt"] == 2
        assert client.get("/v1/events/verify?replay=true").json()["findings"] == []


def test_the_state_of_an_attempt_says_what_retention_deleted(tmp_path, postgres):
    database = postgres.new_database()
    with running_server(tmp_path, database=database) as server, httpx.Client(base_url=server.url) as client:
        request = known(client, 1)
        for key in ("a", "b"):
            open_attempt(client, "old", key)
        report(client, "old", 1, RankReport(rank=0, slot="joint", signature=request.signature)).raise_for_status()

        async def prune() -> int:
            store = await open_store(database, timeout_seconds=30)
            try:
                return await prune_reports(store, time.time_ns())
            finally:
                await store.close()

        assert asyncio.run(prune()) == 1
        first, second = (client.get(f"/v1/jobs/old/attempts/{number}").json()["pruned"] for number in (1, 2))
        assert (first["num_reports"], second) == (1, None)
