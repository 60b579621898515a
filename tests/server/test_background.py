"""What a server repeats beside its calls goes on, whatever it meets, and says what it met."""

import asyncio
import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from bucketplan_core.attempt import RankReport
from bucketplan_server import cli_tokens
from bucketplan_server.access.inbox import inbox_of
from bucketplan_server.background import Background
from bucketplan_server.settings import load_settings
from bucketplan_server.store.engine import StoreError, open_store
from tests.server.test_attempts import open_attempt, report
from tests.support.guarded import REFRESH_SECONDS, make_token, wait_until
from tests.support.server import RunningServer, running_server

DAY_NS = 86_400 * 10**9


def change(database: str, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(database, isolation_level=None, timeout=30)) as connection:
        connection.execute(statement, values)


def logged(server: RunningServer, event: str) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event]


def test_reports_that_cannot_be_read_hold_up_no_retention(tmp_path):
    with running_server(tmp_path) as server:
        with httpx.Client(base_url=server.url, timeout=30) as client:
            for job in ("a", "b", "c"):
                open_attempt(client, job, "key")
                report(client, job, 1, RankReport(rank=0, slot="joint", signature="1" * 64)).raise_for_status()
        server.kill()
        change(server.database, "update reports set received_ns = received_ns - ?", 3 * DAY_NS)
        change(server.database, "update reports set report = x'c1' where job = 'a'")
        change(server.database, "update reports set report = 'text' where job = 'b'")
        server.restart(report_retention_days=1)
        wait_until(lambda: logged(server, "reports.pruned"))
        assert logged(server, "reports.pruned")[0]["reports"] == 1
        assert [line["job"] for line in logged(server, "reports.damaged")] == ["a", "b"]
        assert server.metric("bucketplan_store_errors_total") == 2
        with closing(sqlite3.connect(f"file:{server.database}?mode=ro", uri=True)) as connection:
            left = connection.execute("select job from reports order by job").fetchall()
        assert left == [("a",), ("b",)]


@pytest.mark.parametrize(
    ("column", "value"),
    [("hash", "zz"), ("hash", b"\x00"), ("role", "king"), ("expires_ns", "soon"), ("namespace", b"a")],
)
def test_a_damaged_token_is_refused_alone(tmp_path, column, value):
    database = str(tmp_path / "bucketplan.db")
    secrets = {name: make_token(database, name, "auditor") for name in ("damaged", "leaver", "stays")}
    with running_server(tmp_path, database=database, refresh_seconds=REFRESH_SECONDS) as server:

        def status(name: str) -> int:
            bearer = {"Authorization": f"Bearer {secrets[name]}"}
            return httpx.get(f"{server.url}/v1/plans", headers=bearer).status_code

        assert {status(name) for name in secrets} == {200}
        change(database, "pragma ignore_check_constraints = on")
        change(database, f"update tokens set {column} = ? where name = 'damaged'", value)
        wait_until(lambda: status("damaged") == 401)
        cli_tokens.revoke(load_settings(database=database), "leaver", reason="test")
        wait_until(lambda: status("leaver") == 401)
        assert status("stays") == 200
        (line,) = logged(server, "token.damaged")
        assert line["token"] == "damaged"
        assert str(line["detail"]).startswith(("times" if column == "expires_ns" else column) + ":")
        assert secrets["damaged"] not in server.log.read_text()
        tokens = cli_tokens.list_tokens(load_settings(database=database))
        listed = {token.name: token.state(time.time_ns()) for token in tokens}
        assert listed == {"damaged": "damaged", "leaver": "revoked", "stays": "valid"}
        server.restart()
        assert (status("damaged"), status("stays")) == (401, 200)


def test_a_server_whose_only_token_is_damaged_stays_closed(tmp_path):
    database = str(tmp_path / "bucketplan.db")
    make_token(database, "only", "operator")
    change(database, "update tokens set hash = 'zz'")
    with running_server(tmp_path, database=database) as server:
        assert httpx.get(f"{server.url}/v1/plans").status_code == 401


def test_tokens_that_cannot_be_read_for_long_end_readiness(tmp_path):
    database = str(tmp_path / "bucketplan.db")
    secret = make_token(database, "stays", "auditor")
    with running_server(tmp_path, database=database, refresh_seconds=REFRESH_SECONDS) as server:
        ready = f"{server.url}/readyz"
        change(database, "alter table tokens rename column role to part")
        wait_until(lambda: httpx.get(ready).status_code == 503)
        assert "tokens cannot be read" in httpx.get(ready).json()["detail"]
        # What is known stays: a database that fails locks out no fleet.
        bearer = {"Authorization": f"Bearer {secret}"}
        assert httpx.get(f"{server.url}/v1/plans", headers=bearer).status_code == 200
        assert [line["task"] for line in logged(server, "background.failed")] == ["tokens"]
        change(database, "alter table tokens rename column part to role")
        wait_until(lambda: httpx.get(ready).status_code == 200)
        assert [line["task"] for line in logged(server, "background.recovered")] == ["tokens"]


def test_a_command_that_cannot_be_answered_holds_up_no_revocation(tmp_path):
    database = str(tmp_path / "bucketplan.db")
    secret = make_token(database, "leaver", "auditor")
    with running_server(tmp_path, database=database, refresh_seconds=REFRESH_SECONDS) as server:
        # No file, so it can be neither read nor taken away; and older than what follows.
        (inbox_of(Path(database)) / "0.command").mkdir()
        cli_tokens.revoke(load_settings(database=database), "leaver", reason="test")
        bearer = {"Authorization": f"Bearer {secret}"}
        wait_until(lambda: httpx.get(f"{server.url}/v1/plans", headers=bearer).status_code == 401)


def test_work_that_fails_in_any_way_is_repeated_counted_and_said_once(tmp_path, capsys):
    async def run() -> tuple[int, int]:
        store = await open_store(str(tmp_path / "store.db"), timeout_seconds=5)
        background, calls, done = Background(store), 0, asyncio.Event()

        async def work() -> None:
            nonlocal calls
            calls += 1
            if calls <= 4:
                raise (ValueError("odd"), StoreError("away"), RuntimeError(), KeyError("x"))[calls - 1]
            if calls == 6:
                done.set()

        background.repeat("odd work", work, every_seconds=0)
        async with asyncio.timeout(30):
            await done.wait()
        await background.close()
        errors = store.errors
        await store.close()
        return calls, errors

    calls, errors = asyncio.run(run())
    assert calls >= 6
    assert errors == 3  # the store counts its own
    written = capsys.readouterr().out
    assert (written.count("background.failed"), written.count("background.recovered")) == (1, 1)
