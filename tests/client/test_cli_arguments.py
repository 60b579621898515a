"""Arguments, variables and files that no request can hold: each is named, and nothing is sent or waited for."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from bucketplan_client.arguments import BadArgument
from bucketplan_client.cli.main import app
from bucketplan_client.cli.output import Command
from bucketplan_client.environment import job_from_environment, token_from_environment
from bucketplan_client.errors import BadAddress, BadToken
from bucketplan_client.transport import PlanClient
from bucketplan_core.presets import GroupShape, MeasuredProfile, resolve_preset

SIGNATURE = "a" * 64
NOBODY = ("--server", "http://127.0.0.1:9", "--timeout", "0.1")
NO_TEXT = os.fsdecode(b"\xff")
TOO_LARGE = "9" * 23


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BUCKETPLAN_CACHE", str(tmp_path / "cache"))
    for name in ("BUCKETPLAN_DISABLE", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "BUCKETPLAN_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def error_of(*arguments: str, status: int = 2) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == status, result.output
    error: dict[str, Any] = json.loads(result.stdout)["error"]
    assert error["exit_status"] == status
    return error


@pytest.mark.parametrize(
    ("arguments", "named", "value"),
    [
        (("show", SIGNATURE[:-1] + "\n"), "SIGNATURE", r"a\n"),
        (("show", "../" + "a" * 61), "SIGNATURE", "../"),
        (("show", NO_TEXT), "SIGNATURE", r"\udcff"),
        (("plans", "--job", NO_TEXT), "--job", r"\udcff"),
        (("plans", "--parameter", NO_TEXT), "--parameter", r"\udcff"),
        (("job", NO_TEXT), "JOB", r"\udcff"),
        (("job", "."), "JOB", "'.'"),
        (("job", ".."), "JOB", "'..'"),
        (("events", "--after", TOO_LARGE), "--after", TOO_LARGE),
        (("activate", SIGNATURE, "--reason", "r", "--revision", TOO_LARGE), "--revision", TOO_LARGE),
        (("activate", SIGNATURE, "--reason", NO_TEXT, "--revision", "1"), "--reason", r"\udcff"),
        (("replan", SIGNATURE, "--reason", NO_TEXT, "--set", "a=1"), "--reason", r"\udcff"),
        (("replan", SIGNATURE, "--reason", "r", "--set", f"a={NO_TEXT}"), "--set", r"a=\udcff"),
        (("replan", SIGNATURE, "--reason", "r", "--set", f"a={TOO_LARGE}"), "--set", TOO_LARGE),
        (("replan", SIGNATURE, "--reason", "r", "--set", f"a=-{TOO_LARGE}"), "--set", TOO_LARGE),
        (("replan", SIGNATURE, "--reason", "r", "--set", "a=" + "9" * 5_000), "--set", TOO_LARGE),
    ],
)
def test_what_cannot_be_sent_is_wrong_usage(arguments, named, value):
    message = error_of(*NOBODY, *arguments)["message"]
    assert named in message
    assert value in message


def test_address_that_is_no_text_is_wrong_usage():
    assert "--server" in error_of("--server", f"http://h/{NO_TEXT}", "plans")["message"]


def test_token_that_is_no_text_is_not_shown():
    error = error_of(*NOBODY, "--token", f"secret{NO_TEXT}", "plans")
    assert error["type"].endswith("BadToken")
    assert "secret" not in error["message"]


def test_every_command_refuses_what_cannot_be_sent():
    group: Any = typer.main.get_command(app)
    assert {name for name, command in group.commands.items() if not isinstance(command, Command)} == set()


class TestAddresses:
    @pytest.mark.parametrize(
        "address",
        [
            "http://h:99999",
            "http://h:-1",
            "http://a..b",
            f"http://{'a' * 70}",
            f"http://{'a' * 70}.example",
            "http://xn--a",
            f"http://h/{NO_TEXT}",
        ],
    )
    def test_address_that_no_socket_takes_is_named(self, address):
        with pytest.raises(BadAddress, match="is no address of a planning server"):
            PlanClient(address)

    @pytest.mark.parametrize("address", ["http://h:99999", "http://h:-1", "http://a..b", "http://xn--a"])
    def test_doctor_says_so(self, address):
        result = CliRunner().invoke(app, ["--server", address, "doctor", "--json"])
        assert result.exit_code == 1, result.output
        checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
        assert not checks["server"]["ok"]
        assert "BUCKETPLAN_SERVER" in checks["server"]["remedy"]
        assert "cache" in checks

    @pytest.mark.parametrize(
        "address", ["http://h.", "http://[::1]:9", "http://10.0.0.1", "https://\u00fc.example:8400/base", "http://a_b"]
    )
    def test_other_addresses_are_taken(self, address):
        with PlanClient(address) as client:
            assert client.address == address


class TestJobs:
    @pytest.mark.parametrize("job", [".", "..", NO_TEXT])
    def test_name_of_the_environment_that_no_url_holds_is_named_with_its_variable(self, monkeypatch, job):
        monkeypatch.setenv("BUCKETPLAN_JOB", job)
        with pytest.raises(BadArgument, match="BUCKETPLAN_JOB is") as caught:
            job_from_environment()
        assert caught.value.value == repr(job)
        with socket.create_server(("127.0.0.1", 0)) as store:
            launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.getsockname()[1])}
            for name, value in {**launched, "RANK": "0", "WORLD_SIZE": "1"}.items():
                monkeypatch.setenv(name, value)
            result = CliRunner().invoke(app, [*NOBODY, "doctor", "--json"])
        checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
        assert "BUCKETPLAN_JOB" in checks["group"]["found"]
        assert not checks["group"]["ok"]


class TestPaths:
    @pytest.mark.parametrize("job", [".", ".."])
    def test_name_that_a_url_leaves_out_is_refused(self, job):
        with PlanClient("http://127.0.0.1:9") as client, pytest.raises(BadArgument) as caught:
            client.post(f"/v1/jobs/{job}/attempts", {})
        assert caught.value.value == repr(job)
        assert f"/v1/jobs/{job}/attempts" in str(caught.value)

    @pytest.mark.parametrize(("path", "params"), [("/v1/plans/a\n", {}), ("/v1/plans", {"job": NO_TEXT})])
    def test_what_no_url_holds_is_refused(self, path, params):
        with PlanClient("http://127.0.0.1:9") as client, pytest.raises(BadArgument, match="path is"):
            client.get(path, params=params)


class TestFiles:
    @pytest.fixture
    def pipe(self, tmp_path: Path) -> Path:
        os.mkfifo(tmp_path / "pipe")
        return tmp_path / "pipe"

    def test_token_is_read_of_a_regular_file_alone(self, monkeypatch, tmp_path, pipe):
        large = tmp_path / "large"
        large.write_bytes(b"a" * (2**16 + 1))
        for path, said in (("/dev/zero", "no regular file"), (pipe, "no regular file"), (large, "larger than 65536")):
            monkeypatch.setenv("BUCKETPLAN_TOKEN_FILE", str(path))
            with pytest.raises(BadToken, match=said) as caught:
                token_from_environment()
            assert str(path) in str(caught.value)

    def test_link_to_a_token_is_followed(self, monkeypatch, tmp_path):
        (tmp_path / "held").write_text("secret\n")
        (tmp_path / "token").symlink_to("held")
        monkeypatch.setenv("BUCKETPLAN_TOKEN_FILE", str(tmp_path / "token"))
        assert token_from_environment() == "secret"

    def test_profile_is_read_of_a_regular_file_alone(self, pipe):
        for path in ("/dev/zero", str(pipe)):
            error = error_of(*NOBODY, "calibrate", "--store", "x", "--from", path)
            assert path in error["message"]
            assert "no regular file" in error["message"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--output", "/nonexistent/folder/x.json"], "--output"),
        (["--plot", "/nonexistent/folder/x.png"], "--plot"),
        (["--min-bytes", "4096", "--max-bytes", "8192"], "--max-bytes"),
    ],
)
def test_calibration_that_could_not_end_well_is_not_begun(arguments, named):
    result = CliRunner().invoke(app, ["calibrate", "--name", "x", *arguments, "--json"])
    assert result.exit_code == 2
    assert named in json.loads(result.stdout)["error"]["message"]


def test_measurement_of_any_name_is_kept_in_one_file_here(tmp_path, monkeypatch):
    from bucketplan_client.cli.calibrate import _keep

    monkeypatch.chdir(tmp_path)
    figures = resolve_preset("gloo-loopback", {"measured": GroupShape(2, 1)})
    profile = MeasuredProfile(name="we/ird", shape=GroupShape(2, 1), backend="gloo", device="cpu", figures=figures)
    assert _keep(profile).resolve().parent == tmp_path
