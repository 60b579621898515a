"""The command line against a real server, as a person and as a program reads it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from bucketplan_client.cli.doctor import _versions
from bucketplan_client.cli.main import app
from bucketplan_client.transport import PlanClient
from bucketplan_core.attempt import OPEN_SLOT, AttemptRequest, RankReport
from bucketplan_core.collectives import Options
from bucketplan_core.presets import GroupShape, MeasuredProfile, resolve_preset
from bucketplan_core.wire import from_json
from tests.client.requests import small_request
from tests.support.server import RunningServer, running_server

SERVER = (sys.executable, "-m", "bucketplan_server")
A, B = small_request(), small_request(num_params=6)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("cli-server"), stall_seconds=3600) as running:
        with PlanClient(running.url) as client:
            for request in (A, B):
                client.plan(request)
            opening = AttemptRequest(key="nonce", participants={"fsdp": ((0, 1),)}, options={})
            client.post("/v1/jobs/llama/attempts", opening.to_wire())
        yield running


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BUCKETPLAN_CACHE", str(tmp_path / "cache"))
    for name in ("BUCKETPLAN_DISABLE", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "BUCKETPLAN_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def call(server: RunningServer | str, *arguments: str, status: int = 0) -> str:
    address = server if isinstance(server, str) else server.url
    result = CliRunner().invoke(app, ["--server", address, "--timeout", "10", *arguments])
    assert result.exit_code == status, result.output
    return result.output


def call_json(server: RunningServer, *arguments: str, status: int = 0) -> Any:
    return json.loads(call(server, *arguments, "--json", status=status))


class TestReading:
    def test_plans_are_listed(self, server):
        text = call(server, "plans")
        assert A.signature[:12] in text
        assert B.signature[:12] in text
        assert {row["signature"] for row in call_json(server, "plans")["plans"]} == {A.signature, B.signature}

    def test_plans_can_be_filtered(self, server):
        found = call_json(server, "plans", "--parameter", "layers.5.weight")
        assert [row["signature"] for row in found["plans"]] == [B.signature]
        assert "no plan is stored that fits" in call(server, "plans", "--strategy", "auto")

    def test_plan_is_shown_by_the_first_characters_of_its_signature(self, server):
        text = call(server, "show", A.signature[:10])
        assert "layers.0.weight" in text
        assert "fsdp (2 ranks)" in text
        shown = call_json(server, "show", A.signature)
        assert shown["plan"]["decision"]["signature"] == A.signature
        assert shown["request"]["phase"] == "forward"

    def test_unknown_signature_says_so(self, server):
        assert "no stored plan begins with it" in call(server, "show", "ffff", status=4)
        assert "unknown-signature" in call(server, "show", "f" * 64, status=4)

    def test_equal_plans_do_not_differ_and_others_do(self, server):
        call(server, "diff", A.signature, A.signature)
        text = call(server, "diff", A.signature, B.signature, status=1)
        assert "layers.4.weight" in text or "layers.5.weight" in text
        assert call_json(server, "diff", A.signature, B.signature, status=1)["request"]

    def test_attempts_of_a_job_and_the_state_of_one(self, server):
        assert "1" in call(server, "job", "llama")
        assert call_json(server, "job", "llama")["attempts"][0]["attempt"] == 1
        assert "llama" in call(server, "job", "llama", "1")
        assert call_json(server, "job", "llama", "1")["attempt"] == 1
        assert "unknown-attempt" in call(server, "job", "llama", "7", status=4)

    def test_ranks_that_differ_are_named_with_what_differs(self, server):
        opening = AttemptRequest(key="odd", participants={"fsdp": ((0, 1),)}, options={})
        reports = [
            RankReport(
                rank=rank,
                slot="forward",
                signature=request.signature,
                digests={"fsdp": f"{rank:064x}"},
                members={"fsdp": (0, 1)},
            ).to_wire()
            for rank, request in enumerate((A, B))
        ]
        with PlanClient(server.url) as client:
            client.post("/v1/jobs/odd/attempts", opening.to_wire())
            client.post("/v1/jobs/odd/attempts/1/reports", {"reports": reports})
        text = " ".join(call(server, "job", "odd", "1", status=1).split())
        assert "rank 1 holds" in text
        assert "path" in text

    def test_opening_whose_ranks_differ_has_the_status_of_a_divergence(self, server):
        opening = AttemptRequest(key="apart", participants={"fsdp": ((0, 1),)}, options={})
        with PlanClient(server.url) as client:
            client.post("/v1/jobs/apart/attempts", opening.to_wire())
            for rank, status in ((0, 0), (1, 1)):
                report = RankReport(rank=rank, slot=OPEN_SLOT, uuid=f"{rank:064x}", members={"fsdp": (0, 1)})
                client.post("/v1/jobs/apart/attempts/1/reports", {"reports": [report.to_wire()]})
                text = " ".join(call(server, "job", "apart", "1", status=status).split())
        assert "diverged" in text
        assert "rank 1 holds uuid" in text
        assert call_json(server, "job", "apart", "1", status=1)["opening"]["state"] == "diverged"

    def test_opening_that_is_stalled_is_no_success(self, tmp_path):
        opening = AttemptRequest(key="late", participants={"fsdp": ((0, 1),)}, options={})
        with running_server(tmp_path, stall_seconds=0.001) as server, PlanClient(server.url) as client:
            client.post("/v1/jobs/late/attempts", opening.to_wire())
            text = " ".join(call(server, "job", "late", "1", status=1).split())
        assert "stalled yes" in text
        assert "ranks 0-1 did not open" in text

    def test_events_and_their_verification(self, server):
        text = call(server, "events")
        assert "plan.created" in text
        assert "first request" in text
        assert "20" in text.splitlines()[1].split()[1]
        assert call_json(server, "events")["events"]
        assert "holds" in call(server, "verify", "--replay")
        assert call_json(server, "verify")["holds"] is True


class TestChanging:
    def test_replan_activate_and_roll_back(self, server):
        made = call_json(server, "replan", A.signature, "--reason", "try", "--set", "bucket_cap_bytes=300")
        assert made["revision"] >= 2
        number = str(made["revision"])
        done = call_json(server, "activate", A.signature, "--revision", number, "--reason", "faster")
        assert done["before"] == 1
        assert "409" in call(
            server, "activate", A.signature, "--revision", "1", "--expected", "1", "--reason", "race", status=4
        )
        back = call(server, "activate", A.signature, "--revision", "1", "--reason", "roll back")
        assert "before" in back

    def test_command_that_serves_what_was_replanned_can_be_pasted(self, server):
        text = call(server, "replan", B.signature[:12], "--reason", "it's faster", "--set", "bucket_cap_bytes=400")
        (line,) = (line for line in text.splitlines() if line.startswith("to serve it"))
        program, *arguments = shlex.split(line.removeprefix("to serve it"))
        assert program == "bucketplan"
        result = CliRunner().invoke(app, [*arguments, "--json"])
        assert result.exit_code == 0, result.output
        assert json.loads(result.output)["revision"] == int(arguments[arguments.index("--revision") + 1])
        assert call_json(server, "events", "--limit", "1000")["events"][-1]["reason"] == "it's faster"

    def test_what_a_job_has_of_its_own_is_taken_back(self, server):
        change = ("activate", A.signature, "--reason", "r", "--job", "by-itself")
        call(server, *change, "--revision", "1")
        assert "as for everyone" in call(server, *change, "--as-everyone")
        last = call_json(server, "events")["events"][-1]["body"]
        assert last == {"before": 1, "job": "by-itself", "revision": None}

    @pytest.mark.parametrize(
        "arguments",
        [(), ("--job", "one"), ("--job", "one", "--as-everyone", "--revision", "1"), ("--as-everyone",)],
    )
    def test_activation_says_what_to_serve(self, server, arguments):
        before = call_json(server, "events")
        call(server, "activate", A.signature, "--reason", "r", *arguments, status=2)
        assert call_json(server, "events") == before

    def test_option_that_is_no_pair_is_wrong_usage(self, server):
        call(server, "replan", A.signature, "--reason", "x", "--set", "strategy", status=2)

    def test_bad_option_is_refused_by_its_name(self, server):
        text = call(server, "replan", A.signature, "--reason", "x", "--set", "strategy=nonsense", status=4)
        assert "nonsense" in text


class TestDoctor:
    def test_healthy_host(self, server):
        text = call(server, "doctor")
        assert "NO" not in text
        assert call_json(server, "doctor")["healthy"] is True

    @pytest.mark.parametrize(
        ("said", "odd"),
        [
            ({}, set()),
            ({"version": "7.0.0"}, set()),
            ({"schema": 2}, {"schema"}),
            ({"capture": 9}, {"capture"}),
            ({"planners": ["none/1", "size/9"]}, {"planners"}),
        ],
    )
    def test_what_decides_is_compared_and_not_the_release(self, server, said, odd):
        with PlanClient(server.url) as client:
            ready = {**dict(client.get("/readyz").body), **said}
        checks = _versions(ready)
        assert {check.name for check in checks} == {"versions", "schema", "capture", "planners"}
        assert {check.name for check in checks if not check.ok} == odd
        assert all(check.remedy for check in checks if not check.ok)

    def test_dead_server_is_named_with_what_to_do(self, server):
        text = call("http://127.0.0.1:9", "doctor", status=1)
        assert "could not be reached" in text
        assert "bucketplan-server" in text

    def test_address_that_is_none(self):
        assert "BUCKETPLAN_SERVER" in call("not an address", "doctor", status=1)

    def test_kill_switch_and_half_a_launcher_are_named(self, server, monkeypatch):
        monkeypatch.setenv("BUCKETPLAN_DISABLE", "1")
        monkeypatch.setenv("RANK", "3")
        checks = {check["name"]: check for check in call_json(server, "doctor", status=1)["checks"]}
        assert not checks["kill switch"]["ok"]
        assert "MASTER_ADDR" in checks["group"]["found"]

    def test_cache_that_cannot_be_written(self, server, monkeypatch, tmp_path):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("BUCKETPLAN_CACHE", str(tmp_path / "file" / "cache"))
        checks = {check["name"]: check for check in call_json(server, "doctor", status=1)["checks"]}
        assert "cannot be written" in checks["cache"]["found"]

    def test_disk_that_takes_empty_files_only(self, tmp_path):
        """A limit of the kernel on the size of files stands for a full disk; both let files be made."""
        run = "from bucketplan_client.cli.main import main; main()"
        command = [sys.executable, "-c", run, "--server", "http://127.0.0.1:9"]
        done = subprocess.run(
            ["bash", "-c", 'ulimit -f 0; exec "$@"', "bash", *command, "--timeout", "1", "doctor", "--json"],
            env={**os.environ, "BUCKETPLAN_CACHE": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            check=False,
        )
        checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
        assert "cannot be written" in checks["cache"]["found"]
        assert list((tmp_path / "cache").iterdir()) == []


class TestExplaining:
    def test_the_explanation_names_what_limits_the_step_and_why_each_bucket_is_as_it_is(self, tmp_path):
        hardware = resolve_preset("gloo-loopback", {"fsdp": GroupShape(2, 1)})
        request = small_request(num_params=6)
        sized = replace(request.options, hardware=hardware, bucket_cap_bytes=1, first_bucket_cap_bytes=1)
        with running_server(tmp_path) as running:
            with PlanClient(running.url) as client:
                planned = request.with_options(sized)
                client.plan(planned)
                client.plan(request.with_options(Options(strategy="auto", planner="auto/1")))
            shown = call(running, "explain", planned.signature)
            unknown = request.with_options(Options(strategy="auto", planner="auto/1")).signature
            refused = call(running, "explain", unknown, status=4)
        text = " ".join(shown.split())
        assert "limited by compute takes 0 of" in text
        assert "waiting for fsdp the most beside it" in text
        assert "alone: merged with its neighbour the simulated step would be" in text
        assert "planned as size/1 at the caps given" in " ".join(refused.split())


SMALL = ("--ranks", "2", "--max-bytes", "65536", "--repeats", "2", "--matrix-size", "64")


class TestCalibrate:
    def test_measures_two_ranks_of_this_host_without_a_server(self):
        result = CliRunner().invoke(app, ["calibrate", "--name", "laptop", *SMALL, "--json"])
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["name"] == "laptop"

    def test_what_was_measured_is_stored_by_name_and_kept_where_it_cannot_be(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        nobody = ["--server", "http://127.0.0.1:9", "--timeout", "1", "calibrate", "--store", "two-gloo", *SMALL]
        lost = CliRunner().invoke(app, nobody)
        assert lost.exit_code == 3, lost.output
        assert "bucketplan calibrate --store two-gloo --from two-gloo.profile.json" in lost.stderr
        assert "error on sizes not fitted" in lost.stdout
        document = json.loads(CliRunner().invoke(app, [*nobody, "--json"]).stdout)
        assert document["error"]["exit_status"] == 3, "an error is the one document"
        measured = MeasuredProfile.from_wire(from_json((tmp_path / "two-gloo.profile.json").read_bytes()))
        assert measured.shape == GroupShape(2, 1)
        with running_server(tmp_path) as running:
            assert "version 1" in call(running, "calibrate", "--store", "two-gloo", "--from", "two-gloo.profile.json")
            # The same content again is no new version; another name is a profile of its own.
            assert "version 1" in call(running, "calibrate", "--store", "two-gloo", "--from", "two-gloo.profile.json")
            assert "stored as other, version 1" in call(
                running, "calibrate", "--store", "other", "--from", "two-gloo.profile.json", "--reason", "a copy"
            )
            with PlanClient(running.url) as client:
                stored = client.get("/v1/profiles/two-gloo").body
                assert client.get("/v1/profiles/other").body["reason"] == "a copy"
        assert MeasuredProfile.from_wire(stored["profile"]) == measured
        assert stored["reason"] == "calibrated"

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ((), "name the profile with --name"),
            (("--name", "a", "--store", "b"), "cannot be stored as 'b'"),
            (("--from", "profile.json"), "say under which name with --store"),
            (("--store", "we/ird", *SMALL), "'we/ird' is no name of a profile"),
            (("--name", "a", *SMALL, "--output", "/nonexistent/x.json"), "there is no folder /nonexistent"),
            (("--name", "a", *SMALL, "--plot", "/"), "/ cannot be written"),
            (("--name", "a", "--ranks", "2", "--max-bytes", "8192"), "is less than 16 times --min-bytes 4096"),
            (("--store", "a", "--from", "missing.json"), "missing.json is no measured profile"),
        ],
    )
    def test_wrong_usage_is_refused_before_anything_is_measured(self, arguments, said):
        result = CliRunner().invoke(app, ["calibrate", *arguments])
        assert result.exit_code == 2
        assert said in " ".join(result.output.replace("│", " ").split())

    def test_a_job_of_torchrun_answers_in_json_too(self, tmp_path):
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
        command = [*run, sys.executable, "-c", "from bucketplan_client.cli.main import main; main()", "calibrate"]
        done = subprocess.run(
            [*command, "--name", "both", *SMALL[2:], "--json"],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["name"] == "both"


class TestForm:
    @pytest.mark.parametrize(
        "arguments",
        [
            ("show", ""),
            ("diff", A.signature, ""),
            ("job", ""),
            ("events", "--signature", ""),
            ("activate", "", "--revision", "1", "--reason", "r"),
            ("activate", A.signature, "--revision", "1", "--reason", ""),
            ("activate", A.signature, "--revision", "1", "--reason", "r", "--job", ""),
            ("replan", A.signature, "--reason", " ", "--set", "prefetch=1"),
            ("replan", "", "--reason", "r", "--set", "prefetch=1"),
            ("calibrate", "--store", "a", "--reason", " "),
        ],
    )
    def test_unset_variable_is_wrong_usage_and_never_the_only_plan(self, server, arguments):
        before = call_json(server, "events")
        assert "is a variable unset?" in " ".join(call(server, *arguments, status=2).split())
        assert call_json(server, "events") == before

    def test_unknown_job_is_not_found(self, server):
        assert "'nope' has no attempts" in call(server, "job", "nope", status=4)
        error = call_json(server, "job", "nope", status=4)["error"]
        assert (error["type"], error["exit_status"]) == ("urn:bucketplan:problem:unknown-attempt", 4)

    def test_refusal_is_json_where_json_was_asked_for(self, server):
        error = call_json(server, "show", "f" * 64, status=4)["error"]
        assert error["type"] == "urn:bucketplan:problem:unknown-signature"
        assert error["status"] == 404
        assert error["remedy"]
        unreachable = json.loads(call("http://127.0.0.1:9", "plans", "--json", status=3))["error"]
        assert unreachable["type"] == "urn:bucketplan:client:ServerUnreachable"

    @pytest.mark.parametrize(
        ("arguments", "status"),
        [
            (("show", "ffff"), 4),
            (("explain", "ffff"), 4),
            (("show",), 2),
            (("show", ""), 2),
            (("plans", "--limit", "0"), 2),
            (("plans", "--no-such-option"), 2),
            (("no-such-command",), 2),
            (("replan", A.signature, "--reason", "r", "--set", "strategy"), 2),
            (("calibrate", "--store", "a", "--reason", ""), 2),
            (("calibrate", "--store", "a", "--from", "missing.json"), 2),
            (("calibrate",), 2),
        ],
    )
    def test_every_error_is_json_where_json_was_asked_for(self, server, arguments, status):
        error = call_json(server, *arguments, status=status)["error"]
        assert error["exit_status"] == status
        assert error["type"].startswith("urn:bucketplan:")
        assert error["message"]

    def test_trace_that_cannot_be_written_says_so(self, server, tmp_path, monkeypatch):
        monkeypatch.setattr("bucketplan_client.cli.main._get", lambda *_, **__: {"traceEvents": []})
        missing = tmp_path / "missing" / "trace.json"
        assert "cannot be written" in call(server, "trace", A.signature, "--output", str(missing), status=2)

    def test_unreachable_server_has_its_status(self):
        assert "could not be reached" in call("http://127.0.0.1:9", "plans", status=3)

    def test_address_that_is_none_is_wrong_usage(self):
        call("ftp://server", "plans", status=2)

    def test_every_command_answers_in_json_and_has_help(self):
        commands: Sequence[Any] = list(typer.main.get_command(app).commands.values())  # type: ignore[attr-defined]  # the application is a group of commands
        assert len(commands) == 12
        for command in commands:
            assert any("--json" in parameter.opts for parameter in command.params), command.name
            assert command.help

    def test_names_are_text_and_never_markup(self, server, capsys):
        from bucketplan_client.cli.output import table

        table(("name",), [("[bold]x[/bold] \u202e",)], empty="")
        assert "[bold]x[/bold]" in capsys.readouterr().out
