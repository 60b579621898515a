"""What was answered once is answered for ever: kills, restarts, damaged bytes, a database that is away."""

import contextlib
import random
import sqlite3
import threading
import time
from pathlib import Path

import httpx
import pytest

from bucketplan_core.attempt import RankReport
from bucketplan_core.wire import unpack
from tests.server.test_attempts import open_attempt, report
from tests.server.test_audit import check
from tests.server.test_revisions import known, plan, send
from tests.support import counts
from tests.support.documents import MSGPACK, plan_body, profile_of, small_request
from tests.support.server import running_server


def test_sigkill_between_requests_loses_no_answered_plan(tmp_path):
    answered: dict[str, bytes] = {}
    with running_server(tmp_path) as server:
        for number in range(3):
            request = small_request(number)
            answer = httpx.post(f"{server.url}/v1/plans", content=plan_body(request), headers=MSGPACK)
            assert answer.status_code == 201
            answered[request.signature] = answer.content
            server.kill()
            server.restart()
            for signature, plan in answered.items():
                assert httpx.get(f"{server.url}/v1/plans/{signature}", headers=MSGPACK).content == plan
        assert server.metric("bucketplan_planning_seconds_count") == 0


@pytest.mark.soak
def test_sigkill_at_a_random_moment_loses_no_answered_plan(tmp_path):
    answered: dict[str, bytes] = {}
    with running_server(tmp_path) as server:
        for seed in counts.seeds("sigkill", test=10, soak=100):
            moment = random.Random(seed).uniform(0.0, 0.5)
            killer = threading.Timer(moment, server.kill)
            killer.start()
            number = seed * 10_000
            with contextlib.suppress(httpx.TransportError), httpx.Client(base_url=server.url) as client:
                while True:
                    number += 1
                    request = small_request(number)
                    answer = client.post("/v1/plans", content=plan_body(request, profile_of(request)), headers=MSGPACK)
                    assert answer.status_code == 201
                    answered[request.signature] = answer.content
            killer.join()
            server.restart()
            with httpx.Client(base_url=server.url) as client:
                for signature, plan in answered.items():
                    assert client.get(f"/v1/plans/{signature}", headers=MSGPACK).content == plan
    with sqlite3.connect(server.database) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        complete = connection.execute(
            "SELECT count(*) FROM signatures s JOIN revisions USING (signature) JOIN active USING (signature)"
            " JOIN events USING (signature) JOIN profiles p ON p.digest = s.profile"
        ).fetchone()
        assert complete == connection.execute("SELECT count(*) FROM signatures").fetchone()
    assert check(Path(server.database)).findings == ()
    assert answered


DAMAGE = (
    ("plan", "CAST(substr(plan, 1, 90) || x'00' || substr(plan, 92) AS BLOB)"),
    ("plan", "x''"),
    ("plan_sha256", f"'{'0' * 64}'"),
    ("digest", f"'{'0' * 64}'"),
)


def test_a_damaged_plan_is_quarantined_and_never_served(tmp_path):
    requests = [small_request(number) for number in range(len(DAMAGE))]
    with running_server(tmp_path) as server:
        url = f"{server.url}/v1/plans"
        for request in requests:
            httpx.post(url, content=plan_body(request), headers=MSGPACK).raise_for_status()
        server.kill()
        with contextlib.closing(sqlite3.connect(server.database)) as connection:
            original = connection.execute("SELECT * FROM revisions").fetchall()
            for request, (column, change) in zip(requests, DAMAGE, strict=True):
                connection.execute(f"UPDATE revisions SET {column} = {change} WHERE signature = ?", [request.signature])
            connection.commit()
        server.restart()
        for request in requests:
            for answer in (
                httpx.get(f"{url}/{request.signature}", headers=MSGPACK),
                httpx.post(url, content=plan_body(request), headers=MSGPACK),
            ):
                assert answer.status_code == 503
                problem = unpack(answer.content)
                assert problem["type"] == "urn:bucketplan:problem:quarantined", problem
                assert (problem["signature"], problem["revision"]) == (request.signature, 1)
        server.kill()
        with contextlib.closing(sqlite3.connect(server.database)) as connection:
            kinds = [kind for (kind,) in connection.execute("SELECT kind FROM events ORDER BY seq")]
            assert kinds == ["plan.created"] * len(DAMAGE) + ["plan.quarantined"] * len(DAMAGE)
            # Bytes that come back by themselves do not end a quarantine: somebody must have looked.
            connection.execute("DELETE FROM revisions")
            marks = ", ".join("?" * len(original[0]))
            connection.executemany(f"INSERT INTO revisions VALUES ({marks})", original)
            connection.commit()
        server.restart()
        for request in requests:
            assert httpx.get(f"{url}/{request.signature}", headers=MSGPACK).status_code == 503


def flip_a_byte(database: str, revision: int) -> None:
    with contextlib.closing(sqlite3.connect(database)) as connection:
        damage = "CAST(substr(plan, 1, 90) || x'00' || substr(plan, 92) AS BLOB)"
        connection.execute(f"UPDATE revisions SET plan = {damage} WHERE revision = ?", [revision])
        connection.commit()


@pytest.mark.parametrize("damaged", [1, 2])
def test_a_damaged_revision_is_quarantined_alone_and_another_one_heals_it(tmp_path, damaged):
    whole = 3 - damaged
    with running_server(tmp_path) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        request = known(client, 1)
        signature = request.signature
        epochs = {1: unpack(open_attempt(client, "job", "a").content)["epoch_id"]}
        send(client, signature, "revisions", options={"strategy": "none"}).raise_for_status()
        send(client, signature, "activate", revision=2).raise_for_status()
        report(client, "job", 1, RankReport(rank=0, slot="joint", signature=signature)).raise_for_status()
        epochs[2] = unpack(open_attempt(client, "job", "b").content)["epoch_id"]
        plans = {number: plan(client, signature, **{"Bucketplan-Epoch": epochs[number]}).encoded for number in (1, 2)}
        send(client, signature, "activate", revision=damaged).raise_for_status()
        server.kill()
        flip_a_byte(server.database, damaged)
        server.restart()

        def is_refused(answer: httpx.Response) -> bool:
            problem = unpack(answer.content)
            assert problem["type"] == "urn:bucketplan:problem:quarantined", problem
            return (answer.status_code, problem["signature"], problem["revision"]) == (503, signature, damaged)

        # Twice: the second is answered with what the first left in memory.
        for _ in range(2):
            assert is_refused(client.get(f"/v1/plans/{signature}", headers=MSGPACK))
            assert is_refused(client.get(f"/v1/plans/{signature}/revisions/{damaged}", headers=MSGPACK))
            for number in (1, 2):
                headers = MSGPACK | {"Bucketplan-Epoch": epochs[number]}
                answer = client.get(f"/v1/plans/{signature}", headers=headers)
                assert is_refused(answer) if number == damaged else answer.content == plans[number]
        assert server.metric("bucketplan_quarantined_total") == 1
        assert send(client, signature, "activate", revision=whole).status_code == 200
        for _ in range(2):
            assert plan(client, signature).encoded == plans[whole]
        again = client.post("/v1/plans", content=plan_body(request), headers=MSGPACK)
        assert (again.status_code, again.content) == (200, plans[whole])
        assert is_refused(send(client, signature, "activate", revision=damaged))
        findings = client.get("/v1/events/verify").json()["findings"]
        assert [finding["where"] for finding in findings] == [f"revisions[{signature}, {damaged}].plan"]


def test_known_plans_are_served_and_new_ones_refused_while_the_store_is_away(tmp_path):
    known, new = small_request(1), small_request(2)
    with running_server(tmp_path, store_timeout_seconds=1) as server:
        url = f"{server.url}/v1/plans"
        answered = httpx.post(url, content=plan_body(known), headers=MSGPACK)
        with contextlib.closing(sqlite3.connect(server.database, isolation_level=None)) as other:
            # Another process that holds the write lock is what a full disk or a stuck backup looks like.
            other.execute("BEGIN IMMEDIATE")
            assert httpx.get(f"{url}/{known.signature}", headers=MSGPACK).content == answered.content
            refused = httpx.post(url, content=plan_body(new), headers=MSGPACK, timeout=30)
            assert refused.status_code == 503
            assert unpack(refused.content)["type"] == "urn:bucketplan:problem:store-unavailable"
            assert "retry-after" in refused.headers
            assert httpx.get(f"{server.url}/readyz", timeout=30).status_code == 503
            assert httpx.get(f"{server.url}/healthz").status_code == 200
            other.execute("ROLLBACK")
        assert server.metric("bucketplan_store_errors_total") >= 2
        deadline = time.monotonic() + 30
        while httpx.post(url, content=plan_body(new), headers=MSGPACK, timeout=30).status_code != 201:
            assert time.monotonic() < deadline, "the server did not recover"
        assert httpx.get(f"{server.url}/readyz").status_code == 200
