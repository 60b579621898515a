"""The server as a process: start, refusals to start, signals, caps on the wire, logs, and no torch."""

import asyncio
import contextlib
import json
import os
import re
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import time

import httpx
import pytest

from bucketplan_server.limits import prepare_limits
from bucketplan_server.settings import Settings, SettingsError, load_settings
from tests.support.documents import MSGPACK, plan_body, small_request
from tests.support.paths import ROOT
from tests.support.server import ServerFailed, running_server, wait_for_planning

SERVER = (sys.executable, "-m", "bucketplan_server")


def run_cli(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("BUCKETPLAN_")}
    return subprocess.run(
        [*SERVER, *arguments], env=clean | environment, capture_output=True, text=True, check=False, timeout=60
    )


def test_it_starts_and_answers_where_torch_cannot_be_imported(tmp_path):
    blocked = os.pathsep.join([str(ROOT / "tests" / "support" / "no_torch"), str(ROOT)])
    probe = subprocess.run(
        [sys.executable, "-c", "import torch"],
        env=os.environ | {"PYTHONPATH": blocked},
        capture_output=True,
        check=False,
    )
    assert b"No module named 'torch'" in probe.stderr
    with running_server(tmp_path, environment={"PYTHONPATH": blocked}) as server:
        answer = httpx.post(f"{server.url}/v1/plans", content=plan_body(small_request()), headers=MSGPACK)
        assert answer.status_code == 201


def test_a_second_server_on_the_same_file_refuses_to_start(tmp_path):
    with running_server(tmp_path) as server:
        other = tmp_path / "other"
        other.mkdir()
        with (
            pytest.raises(ServerFailed, match="in use by another bucketplan-server") as failed,
            running_server(other, database=server.database),
        ):
            pytest.fail("two servers opened one SQLite file")
        assert str(server.pid) in str(failed.value)
        assert "PostgreSQL" in str(failed.value)
        assert httpx.get(f"{server.url}/readyz").status_code == 200


@pytest.mark.parametrize(("link", "says"), [("symlink_to", "in use by another"), ("hardlink_to", "2 names")])
def test_another_name_of_the_file_does_not_get_around_that(tmp_path, link, says):
    with running_server(tmp_path) as server:
        other = tmp_path / "other"
        other.mkdir()
        getattr(other / "plans.db", link)(server.database)
        with pytest.raises(ServerFailed, match=says), running_server(other, database=other / "plans.db"):
            pytest.fail("two servers opened one SQLite file")


def test_a_database_of_a_newer_release_is_left_alone(tmp_path):
    with running_server(tmp_path) as server:
        server.kill()
        with contextlib.closing(sqlite3.connect(server.database)) as connection:
            connection.execute("UPDATE alembic_version SET version_num = '9999'")
            connection.commit()
        with pytest.raises(ServerFailed, match="newer"):
            server.restart()


class TestSettings:
    def test_flags_win_over_the_environment_and_that_over_defaults(self, monkeypatch):
        monkeypatch.setenv("BUCKETPLAN_PORT", "1234")
        monkeypatch.setenv("BUCKETPLAN_BACKLOG", "77")
        settings = load_settings(port=4321)
        assert (settings.port, settings.backlog, settings.host) == (4321, 77, "127.0.0.1")

    @pytest.mark.parametrize(
        ("flags", "named"),
        [
            ({"port": "many"}, "BUCKETPLAN_PORT"),
            ({"port": 70000}, "--port"),
            ({"database": "mysql://host/name"}, "BUCKETPLAN_DATABASE"),
            ({"database": " "}, "--database"),
            ({"log_level": "loud"}, "--log-level"),
            ({"require_tokens": True, "allow_anonymous": True}, "BUCKETPLAN_ALLOW_ANONYMOUS"),
            ({"tls_certificate": "chain.pem"}, "--tls-key .BUCKETPLAN_TLS_KEY.: must be given"),
            ({"tls_key": "key.pem"}, "BUCKETPLAN_TLS_CERTIFICATE"),
        ],
    )
    def test_a_bad_setting_is_named(self, flags, named):
        with pytest.raises(SettingsError, match=named):
            load_settings(**flags)

    def test_a_secret_is_read_from_a_file_and_the_environment_wins(self, monkeypatch, tmp_path):
        (tmp_path / "bucketplan_database").write_text("postgresql://user:word@host/name\n")
        monkeypatch.setenv("BUCKETPLAN_SECRETS_DIR", str(tmp_path))
        assert load_settings().database == "postgresql://user:word@host/name"
        monkeypatch.setenv("BUCKETPLAN_DATABASE", "other.db")
        assert load_settings().database == "other.db"

    def test_a_folder_of_secrets_that_is_missing_is_named(self, monkeypatch, tmp_path):
        monkeypatch.setenv("BUCKETPLAN_SECRETS_DIR", str(tmp_path / "absent"))
        with pytest.raises(SettingsError, match=r"BUCKETPLAN_SECRETS_DIR: .*absent is not a folder"):
            load_settings()

    def test_other_machines_are_served_only_when_told(self):
        assert load_settings(host="0.0.0.0", allow_anonymous=True).host == "0.0.0.0"

    def test_every_setting_is_a_flag(self):
        shown = run_cli("serve", "--help", COLUMNS="200", TERM="dumb").stdout
        for name in Settings.model_fields:
            assert f"--{name.replace('_', '-')}" in shown
            assert f"BUCKETPLAN_{name.upper()}" in shown.replace("\n", "")

    def test_a_bad_setting_ends_the_command_with_one_line(self, tmp_path):
        done = run_cli("serve", BUCKETPLAN_PORT="x", BUCKETPLAN_DATABASE=str(tmp_path / "x.db"))
        assert done.returncode == 2
        assert "BUCKETPLAN_PORT" in done.stderr
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "x.db").exists()

    def test_a_missing_folder_is_named(self, tmp_path):
        done = run_cli("serve", "--database", str(tmp_path / "no" / "x.db"))
        assert done.returncode == 1
        assert str(tmp_path / "no") in done.stderr
        assert "Traceback" not in done.stderr

    @pytest.mark.parametrize("command", [["serve"], ["migrate"], ["token", "create", "me", "--role", "rank"]])
    def test_a_folder_that_cannot_be_written_is_named(self, tmp_path, command):
        # A folder in the place of the lock: root, who runs the tests of many, may write everywhere else.
        (tmp_path / "x.db.lock").mkdir()
        done = run_cli(*command, "--database", str(tmp_path / "x.db"))
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert f"{tmp_path}/x.db.lock cannot be written" in line


def test_a_new_database_is_its_owners_alone_and_an_old_one_keeps_its_mode(tmp_path):
    old = tmp_path / "old.db"
    run_cli("migrate", "--database", str(old))
    old.chmod(0o640)
    before = os.umask(0o022)
    try:
        for database, mode in ((tmp_path / "new.db", 0o600), (old, 0o640)):
            with running_server(tmp_path, database=database) as server:
                answer = httpx.post(f"{server.url}/v1/plans", content=plan_body(small_request()), headers=MSGPACK)
                assert answer.status_code == 201
                files = [database, *(database.with_name(f"{database.name}{end}") for end in ("-wal", "-shm"))]
                assert {path.stat().st_mode & 0o777 for path in files} == {mode}
                assert database.with_name(f"{database.name}.lock").stat().st_mode & 0o777 == 0o600
                assert database.with_name(f"{database.name}.inbox").stat().st_mode & 0o777 == 0o700
        assert run_cli("backup", str(tmp_path / "copy.db"), "--database", str(old)).returncode == 0
        assert (tmp_path / "copy.db").stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)


def test_migrate_and_version_say_what_they_did(tmp_path):
    database = tmp_path / "new.db"
    assert "at migration" in run_cli("migrate", "--database", str(database)).stdout
    with contextlib.closing(sqlite3.connect(database)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert "bucketplan-server" in run_cli("version").stdout


class TestLimits:
    def test_a_low_limit_of_open_files_is_raised(self, tmp_path):
        def lower() -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

        code = (
            "import resource; from bucketplan_server.limits import prepare_limits;"
            "prepare_limits(expected_connections=10, backlog=1);"
            "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], preexec_fn=lower, capture_output=True, text=True, check=True
        )
        soft, hard = done.stdout.strip().splitlines()[-1].strip("()").split(", ")
        assert soft == hard

    def test_limits_that_stay_too_low_are_said(self, tmp_path):
        somaxconn = tmp_path / "somaxconn"
        somaxconn.write_text("128\n")
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        said = prepare_limits(expected_connections=hard + 1, backlog=4096, somaxconn=somaxconn)
        assert "LimitNOFILE" in said[0]
        assert "net.core.somaxconn=4096" in said[1]
        assert prepare_limits(expected_connections=1, backlog=128, somaxconn=somaxconn) == []


class TestStopping:
    def test_sigterm_turns_readiness_off_and_finishes_what_is_in_flight(self, tmp_path):
        with running_server(tmp_path, planning_seconds=2.0, drain_seconds=1) as server:

            async def scenario() -> tuple[httpx.Response, int]:
                async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                    body = plan_body(small_request())
                    post = asyncio.create_task(client.post("/v1/plans", content=body, headers=MSGPACK))
                    await asyncio.to_thread(wait_for_planning, server)
                    os.kill(server.pid, signal.SIGTERM)
                    ready = 200
                    while ready == 200:
                        ready = (await client.get("/readyz")).status_code
                    assert (await client.get("/healthz")).status_code == 200
                    return await post, ready

            answer, ready = asyncio.run(scenario())
            assert (answer.status_code, ready) == (201, 503)
            assert server.wait() == 0

    def test_sigterm_of_an_idle_server_ends_it_with_status_0(self, tmp_path):
        with running_server(tmp_path) as server:
            assert server.terminate() == 0


def raw_exchange(port: int, data: bytes, *, chunks: int = 0) -> bytes:
    """Send bytes and read what comes until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(data)
        answer = b""
        with contextlib.suppress(ConnectionError):
            for _ in range(chunks):
                connection.sendall(b"10000\r\n" + bytes(0x10000) + b"\r\n")
                time.sleep(0.01)
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(65536):
                answer += part
    return answer


class TestBodyCap:
    def test_a_declared_length_above_the_cap_is_refused_before_the_body_comes(self, server):
        head = (
            b"POST /v1/plans HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/msgpack\r\n"
            b"Accept: application/json\r\n"
            b"Content-Length: 1099511627776\r\nExpect: 100-continue\r\n\r\n"
        )
        answer = raw_exchange(server.port, head)
        assert answer.startswith(b"HTTP/1.1 413 "), answer
        assert b"connection: close" in answer.lower()
        assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["type"].endswith("body-too-large")

    def test_a_streamed_body_is_cut_at_the_cap(self, server):
        head = (
            b"POST /v1/plans HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/msgpack\r\n"
            b"Accept: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        # 5 chunks of 64 KiB against a cap of 256 KiB; the end of the body is never sent.
        answer = raw_exchange(server.port, head, chunks=5)
        assert answer.startswith(b"HTTP/1.1 413 "), answer

    def test_any_address_refuses_it(self, server):
        head = b"POST /nowhere HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999\r\n\r\n"
        assert raw_exchange(server.port, head).startswith(b"HTTP/1.1 413 ")


def test_logs_for_a_terminal_hold_nothing_that_it_obeys(tmp_path):
    with running_server(tmp_path, log_format="console", log_level="debug", require_tokens=True) as server:
        assert httpx.get(f"{server.url}/v1/plans/%1b%5b2J%c2%9b").status_code == 401
        server.terminate()
        log = server.log.read_text()
    assert r"\x1b[2J\x9b" in log
    assert re.sub("\x1b\\[[0-9;]*m|\n", "", log).isprintable()


def test_logs_are_one_json_object_a_line_with_the_callers_request_id(tmp_path):
    with running_server(tmp_path) as server:
        answer = httpx.post(
            f"{server.url}/v1/plans", content=plan_body(small_request()), headers=MSGPACK | {"X-Request-Id": "rank-7.1"}
        )
        assert answer.headers["x-request-id"] == "rank-7.1"
        forged = httpx.get(f"{server.url}/healthz", headers={"X-Request-Id": "a b"})
        assert forged.headers["x-request-id"] != "a b"
        httpx.get(f"{server.url}/v1/plans/{small_request().signature}", headers=MSGPACK)
        server.terminate()
        lines = [json.loads(line) for line in server.log.read_text().splitlines()]
        stored = [line for line in lines if line["event"] == "plan.stored"]
        assert [line["request_id"] for line in stored] == ["rank-7.1"]
        assert not any("GET" in json.dumps(line) for line in lines), "no access log unless asked for"
