"""What operators do and what happens to them: backups, retention, a full disk."""

import asyncio
import contextlib
import resource
import shutil
import sqlite3
import subprocess
import sys
import time

import httpx

from bucketplan_core.attempt import RankReport
from bucketplan_core.wire import unpack
from bucketplan_server.store.engine import open_store
from bucketplan_server.store.retention import prune_reports
from tests.server.test_attempts import open_attempt, report, status
from tests.server.test_audit import check
from tests.server.test_revisions import known, plan, send
from tests.support.documents import MSGPACK, plan_body, small_request
from tests.support.server import running_server


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bucketplan_server", *map(str, arguments)], capture_output=True, text=True, check=False
    )


def test_a_backup_beside_a_working_server_is_restored_whole(tmp_path):
    target = tmp_path / "copy.db"
    with running_server(tmp_path) as server, httpx.Client(base_url=server.url) as client:
        first = known(client, 1)
        send(client, first.signature, "revisions", options={"strategy": "none"})
        send(client, first.signature, "activate", revision=2)
        served = plan(client, first.signature)
        done = command("backup", target, "--database", server.database)
        assert (done.returncode, done.stderr) == (0, "")
        known(client, 2)
        again = command("backup", target, "--database", server.database)
        assert again.returncode == 1
        assert "exists" in again.stderr
        server.terminate()
        verified = command("verify", "--database", target)
        assert (verified.returncode, verified.stderr) == (0, "")
        head = verified.stdout.rsplit(" ", 1)[1].strip()
        assert command("verify", "--database", server.database, "--expect-head", head).returncode == 0
        for suffix in ("", "-wal", "-shm"):
            (tmp_path / f"bucketplan.db{suffix}").unlink(missing_ok=True)
        shutil.copyfile(target, server.database)
        server.restart()
        restored = plan(client, first.signature)
        assert (restored.digest, restored.encoded) == (served.digest, served.encoded)
        assert client.get("/v1/events/verify?replay=true").json()["findings"] == []
        assert len(client.get("/v1/plans").json()["plans"]) == 1


def test_a_backup_that_cannot_be_made_leaves_nothing_behind(tmp_path):
    target = tmp_path / "copy.db"
    missing = command("backup", target, "--database", tmp_path / "none.db")
    assert (missing.returncode, "Traceback" in missing.stderr) == (1, False)
    (tmp_path / "text.db").write_text("no database " * 100)
    damaged = command("backup", target, "--database", tmp_path / "text.db")
    assert damaged.returncode == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.db"]
    assert command("backup", target, "--database", "postgresql://nobody@/none").returncode == 2


def test_old_reports_go_with_an_event_and_epochs_stay_as_they_are(tmp_path):
    with running_server(tmp_path) as server, httpx.Client(base_url=server.url) as client:
        request = known(client, 1)
        open_attempt(client, "old", "a")
        for rank in range(4):
            report(client, "old", 1, RankReport(rank=rank, slot="open", uuid="u"))
            report(client, "old", 1, RankReport(rank=rank, slot="joint", signature=request.signature))
        send(client, request.signature, "revisions", options={"strategy": "none"})
        send(client, request.signature, "activate", revision=2)
        before = unpack(open_attempt(client, "old", "b").content)["epoch_id"]
        # Numbers that begin alike must not be taken for one another.
        for number in range(3, 12):
            open_attempt(client, "old", f"later {number}")
        report(client, "old", 11, RankReport(rank=0, slot="joint", signature=request.signature))
        found = client.get("/v1/jobs/old/attempts/1")
        opening = found.json()["opening"]
        assert (found.json()["num_reports"], found.json()["pruned"]) == (8, None)
        server.terminate()
        cut = time.time_ns()

        async def prune(before_ns: int) -> int:
            store = await open_store(server.database, timeout_seconds=30)
            try:
                return await prune_reports(store, before_ns)
            finally:
                await store.close()

        assert asyncio.run(prune(1)) == 0
        assert asyncio.run(prune(cut)) == 5
        assert asyncio.run(prune(cut)) == 0
        assert check(server.database, plan_again=True).findings == ()
        server.restart()
        logged = client.get("/v1/events?job=old&limit=100").json()["events"]
        event, other = (each for each in logged if each["kind"] == "reports.pruned")
        assert other["body"]["attempt"] == 11
        assert event["body"] == {"attempt": 1, "num_reports": 4, "signatures": [request.signature]}
        assert unpack(open_attempt(client, "old", "c").content)["epoch_id"] == before
        after = status(client, "old", 1)
        assert all(group["slots"] == [] for group in after["groups"])
        assert after["opening"].keys() == opening.keys()
        assert (after["num_reports"], {group["state"] for group in after["groups"]}) == (4, {"pruned"})
        assert after["pruned"] == {"num_reports": 4, "since_ns": event["at_ns"]}
        assert (status(client, "old", 11)["pruned"] or {})["num_reports"] == 1
        assert status(client, "old", 2)["pruned"] is None
        page = client.get("/jobs/old/attempts/1")
        assert "4 deleted by retention" in page.text
        # Late ranks report again until there are as many as before: that is another state all the same.
        for rank in range(4):
            report(client, "old", 1, RankReport(rank=rank, slot="joint", signature=request.signature))
        again = client.get("/v1/jobs/old/attempts/1", headers={"If-None-Match": found.headers["etag"]})
        assert again.status_code == 200
        assert (again.json()["num_reports"], again.json()["pruned"]) == (8, after["pruned"])
        server.kill()
        with contextlib.closing(sqlite3.connect(server.database)) as connection:
            connection.execute("DELETE FROM job_signatures")
            connection.commit()
        assert any("job_signatures" in finding.where for finding in check(server.database).findings)


def test_a_full_disk_refuses_new_plans_serves_known_ones_and_recovers(tmp_path):
    requests = [small_request(number, num_candidates=40) for number in range(60)]
    with running_server(tmp_path) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        answered: dict[str, bytes] = {}

        def post(request) -> httpx.Response:
            return client.post("/v1/plans", content=plan_body(request), headers=MSGPACK)

        first = requests[0]
        answered[first.signature] = post(first).raise_for_status().content
        # What the kernel says of a file at its limit is what it says of a full disk, for this process alone.
        wal = tmp_path / "bucketplan.db-wal"
        unlimited = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (wal.stat().st_size + 20_000, unlimited[1]))
        refused = []
        for request in requests[1:]:
            answer = post(request)
            if answer.status_code == 201:
                answered[request.signature] = answer.content
                continue
            assert answer.status_code == 503
            assert unpack(answer.content)["type"] == "urn:bucketplan:problem:store-unavailable"
            assert "retry-after" in answer.headers
            refused.append(request)
            if len(refused) == 5:
                break
        assert len(refused) == 5, "the disk was never full"
        for signature, body in answered.items():
            assert client.get(f"/v1/plans/{signature}", headers=MSGPACK).content == body
        assert client.get(f"/v1/plans/{refused[0].signature}", headers=MSGPACK).status_code in (404, 503)
        assert server.metric("bucketplan_store_errors_total") >= 5
        for _ in range(3):
            assert client.get("/readyz").status_code == 503
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, unlimited)
        assert client.get("/readyz").status_code == 200
        for request in refused:
            assert post(request).status_code == 201
        assert client.get("/v1/events/verify").json()["findings"] == []
        server.kill()
        server.restart()
        for signature, body in answered.items():
            assert client.get(f"/v1/plans/{signature}", headers=MSGPACK).content == body
    with contextlib.closing(sqlite3.connect(server.database)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
