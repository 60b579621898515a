"""`bucketplan doctor` says of a token and a disk what the job that starts next would find out."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bucketplan_client.cli.doctor import _cache
from bucketplan_client.cli.main import app
from bucketplan_client.transport import PlanClient
from tests.support.server import RunningServer, running_server

TOKENS = {
    "rank": ("--role", "rank"),
    "aud": ("--role", "auditor"),
    "op": ("--role", "operator"),
    "teamb": ("--role", "rank", "--namespace", "teamb"),
}


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, dict[str, str]]]:
    folder = tmp_path_factory.mktemp("doctor")
    with running_server(folder) as server:
        made = {}
        for name, options in TOKENS.items():
            command = [sys.executable, "-m", "bucketplan_server", "token", "create", name, *options]
            done = subprocess.run(
                [*command, "--database", server.database], capture_output=True, text=True, check=True, cwd=folder
            )
            made[name] = done.stdout.split()[-1]
        server.restart(require_tokens=True)
        yield server, made


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BUCKETPLAN_CACHE", str(tmp_path / "cache"))
    for name in ("BUCKETPLAN_DISABLE", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "BUCKETPLAN_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def checks_of(secrets: tuple[RunningServer, dict[str, str]], token: str, *, status: int) -> dict[str, Any]:
    server, made = secrets
    result = CliRunner().invoke(
        app, ["--server", server.url, "--token", made[token], "--timeout", "10", "doctor", "--json"]
    )
    assert result.exit_code == status, result.output
    return {check["name"]: check for check in json.loads(result.stdout)["checks"]}


def test_a_token_that_opens_no_attempt_is_not_well(secrets, monkeypatch):
    monkeypatch.setenv("BUCKETPLAN_JOB", "llama")
    token = checks_of(secrets, "aud", status=1)["token"]
    assert "'aud' has the role 'auditor'" in token["found"]
    assert "--role rank" in token["remedy"]


def test_a_job_of_another_namespace_is_not_well(secrets, monkeypatch):
    monkeypatch.setenv("BUCKETPLAN_JOB", "teama~llama")
    checks = checks_of(secrets, "teamb", status=1)
    assert "belongs to namespace 'teama', token 'teamb' to 'teamb'" in checks["job"]["found"]
    assert "BUCKETPLAN_JOB" in checks["job"]["remedy"]
    assert checks["token"]["ok"]


@pytest.mark.parametrize("job", ["a b", "\udcff"])
def test_a_job_that_the_server_takes_under_no_token_is_not_well(secrets, monkeypatch, job):
    monkeypatch.setenv("BUCKETPLAN_JOB", job)
    assert "letters, digits" in checks_of(secrets, "rank", status=1)["job"]["remedy"]


def test_role_and_namespace_of_a_token_that_does_are_said_and_nothing_is_stored(secrets, monkeypatch):
    monkeypatch.setenv("BUCKETPLAN_JOB", "llama")
    checks = checks_of(secrets, "teamb", status=0)
    assert "'teamb' has the role 'rank'" in checks["token"]["found"]
    assert "namespace 'teamb'" in checks["job"]["found"]
    assert "operator" in checks_of(secrets, "op", status=0)["token"]["found"]
    server, made = secrets
    with PlanClient(server.url, token=made["op"]) as client:
        assert client.get("/v1/jobs/teamb~llama/attempts").body["attempts"] == []


@pytest.mark.parametrize("folder", ["/dev/null", "/dev/null/below"])
def test_no_cache_by_choice_is_well_and_said(monkeypatch, folder):
    monkeypatch.setenv("BUCKETPLAN_CACHE", folder)
    check = _cache()
    assert check.ok
    assert folder in check.found
    assert "no epoch" in check.found


def test_a_cache_without_room_is_not_well_though_an_empty_file_can_be_made(tmp_path):
    limits, told = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        check = _cache()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, told)
    assert not check.ok
    assert "cannot be written" in check.found
    assert "with room" in check.remedy
    assert list((tmp_path / "cache").iterdir()) == []
