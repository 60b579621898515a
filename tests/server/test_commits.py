"""A commit that takes long: what is answered says what is known, and what was stored is served."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncpg
import httpx
import pytest

from bucketplan_core.wire import unpack
from tests.server.test_attempts import open_attempt
from tests.server.test_revisions import known, plan, send
from tests.support.documents import MSGPACK, plan_body, small_request
from tests.support.postgres import running_postgres
from tests.support.server import FAULTS, RunningServer, running_server
from tests.support.tools import tool

Hold = Callable[[], contextlib.AbstractContextManager[None]]
"""While the context is open, no commit ends."""


@contextlib.contextmanager
def on_sqlite(folder: Path) -> Iterator[tuple[RunningServer, Hold]]:
    library, hold = folder / "slow_sync.so", folder / "hold"
    subprocess.run(
        [tool("cc", package="gcc"), "-shared", "-fPIC", "-o", library, FAULTS / "slow_sync.c", "-ldl"], check=True
    )

    @contextlib.contextmanager
    def held() -> Iterator[None]:
        hold.touch()
        try:
            yield
        finally:
            hold.unlink()

    environment = {"LD_PRELOAD": str(library), "HOLD_SYNC": str(hold)}
    with running_server(folder, store_timeout_seconds=1, environment=environment) as server:
        yield server, held


@contextlib.contextmanager
def on_postgres(folder: Path) -> Iterator[tuple[RunningServer, Hold]]:
    with running_postgres() as postgres, asyncio.Runner() as runner:
        database = postgres.new_database()
        with running_server(folder, database=database, store_timeout_seconds=1) as server:
            other = runner.run(asyncpg.connect(database))
            # A deferred trigger runs inside COMMIT, where it asks for a lock of ours again and again: to wait for it in
            # its own queue would be bounded.
            for statement in (
                (
                    "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS "
                    "$$ BEGIN WHILE NOT pg_try_advisory_xact_lock_shared(42) LOOP PERFORM pg_sleep(0.01); END LOOP; "
                    "RETURN NULL; END $$"
                ),
                (
                    "CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON events DEFERRABLE INITIALLY DEFERRED "
                    "FOR EACH ROW EXECUTE FUNCTION wait()"
                ),
            ):
                runner.run(other.execute(statement))

            @contextlib.contextmanager
            def held() -> Iterator[None]:
                runner.run(other.execute("SELECT pg_advisory_lock(42)"))
                try:
                    yield
                finally:
                    runner.run(other.execute("SELECT pg_advisory_unlock(42)"))

            yield server, held
            runner.run(other.close())


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it was never stored"
        time.sleep(0.02)


def token_command(server: RunningServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bucketplan_server", "token", *arguments, "--database", server.database]
    environment = os.environ | {"BUCKETPLAN_STORE_TIMEOUT_SECONDS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def problem_of(answer: httpx.Response) -> tuple[int, str, str, bool]:
    problem = unpack(answer.content)
    slug = problem["type"].rpartition(":")[2]
    return answer.status_code, slug, problem["detail"], "retry-after" in answer.headers


@pytest.mark.parametrize("opened", [on_sqlite, pytest.param(on_postgres, marks=pytest.mark.postgres)])
def test_a_commit_that_is_not_confirmed_in_time_is_told_as_such(tmp_path, opened):
    unknown = "the change may have been stored or not"
    with opened(tmp_path) as (server, held), httpx.Client(base_url=server.url, timeout=60) as client:
        signature = known(client, 1).signature

        def revisions() -> list[tuple[int, bool]]:
            answer = client.get(f"/v1/plans/{signature}/revisions")
            found = answer.json()["revisions"] if answer.status_code == 200 else []
            return [(each["revision"], each["active_for"] == [""]) for each in found]

        with held():
            added = problem_of(send(client, signature, "revisions", options={"strategy": "none"}))
            assert (added[:2], added[3]) == ((500, "unconfirmed"), False)
            assert unknown in added[2]
            assert "revisions of this signature" in added[2]
            # Who waits for that commit has changed nothing, and is told so.
            status, slug, detail, again = problem_of(open_attempt(client, "job", "a"))
            assert (status, slug, again) == (503, "store-unavailable", True)
            assert "nothing was changed" in detail
        eventually(lambda: revisions() == [(1, True), (2, False)])
        with held():
            moved = problem_of(send(client, signature, "activate", revision=2, expected=1))
            assert (moved[:2], moved[3]) == ((500, "unconfirmed"), False)
            assert unknown in moved[2]
        eventually(lambda: revisions() == [(1, False), (2, True)])
        assert send(client, signature, "activate", revision=2, expected=1).status_code == 409
        eventually(lambda: plan(client, signature).decision.planner == "none/1")
        new = small_request(2)
        with held():
            status, slug, detail, again = problem_of(client.post("/v1/plans", content=plan_body(new), headers=MSGPACK))
            assert (status, slug, again) == (503, "store-unavailable", True)
            assert unknown in detail
            assert "harmless" in detail
        eventually(lambda: client.get(f"/v1/plans/{new.signature}", headers=MSGPACK).status_code == 200)
        assert client.post("/v1/plans", content=plan_body(new), headers=MSGPACK).status_code == 200
        kinds = [event["kind"] for event in client.get("/v1/events").json()["events"]]
        assert kinds == ["plan.created", "revision.created", "plan.activated", "plan.created"]
        assert client.get("/readyz").status_code == 200
        with held():
            made = token_command(server, "create", "me", "--role", "operator")
            said = " ".join(made.stderr.split())
            assert (made.returncode == 0, made.stdout) == (False, "")
            assert unknown in said
            assert "token list" in said
        eventually(lambda: "me" in token_command(server, "list").stdout)
