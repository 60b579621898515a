"""nginx, systemd, Prometheus and Grafana files: accepted by their programs, and naming only what the server has."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import typer.main
import yaml
from prometheus_client.process_collector import ProcessCollector

from bucketplan_client.cli.main import app as client_app
from bucketplan_server.cli import app as server_app
from bucketplan_server.settings import SECRETS_VARIABLE, Settings
from tests.support.deploy import DEPLOY, load_yaml, settings_of, stopping_seconds
from tests.support.documents import MSGPACK, plan_body, small_request
from tests.support.nginx import check_configuration, write_configuration
from tests.support.paths import ROOT
from tests.support.postgres import running_postgres
from tests.support.server import RunningServer, running_server
from tests.support.tools import tool

PROMETHEUS = DEPLOY / "prometheus"
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
UNIT = DEPLOY / "systemd" / "bucketplan-server.service"
# prometheus-client adds the suffixes of a histogram; `up` is Prometheus' own.
OWN_METRIC = re.compile(r"\b(?:bucketplan|process|python)_[a-z_]+\b|\bup\b(?=\{)")
MOST_EXPOSURE = 15
"""Tenths of systemd's exposure level: 1.5 of 10, where an ordinary service has 9.6."""


def run(*command: str | Path, **options) -> str:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, **options
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def served_metrics(tmp_path_factory) -> Iterator[set[str]]:
    with running_server(tmp_path_factory.mktemp("server")) as server:
        yield metric_names(server)


def metric_names(server: RunningServer) -> set[str]:
    """Every sample name of `/metrics`, those of a metric without samples yet included."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    declared = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    return declared | {re.match(r"\w+", line)[0] for line in lines if line and not line.startswith("#")}


def alert_rules() -> list[dict[str, object]]:
    return [rule for group in load_yaml(PROMETHEUS / "alerts.yaml")["groups"] for rule in group["rules"]]


def dashboard_targets() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


class TestNginx:
    def test_nginx_accepts_the_configuration(self, tmp_path):
        main, _ = write_configuration(tmp_path, port=8443, replicas=[8321, 8322])
        assert "syntax is ok" in check_configuration(main)

    def test_it_lets_pass_what_the_server_takes_and_waits_as_long(self):
        text = (DEPLOY / "nginx" / "bucketplan.conf").read_text()
        (megabytes,) = re.findall(r"client_max_body_size\s+(\d+)m;", text)
        assert int(megabytes) * 2**20 == Settings().max_body_bytes
        (wait,) = re.findall(r"proxy_read_timeout (\d+)s;", text)
        assert int(wait) > 600, "the longest ?wait= of the API"
        assert int(wait) > Settings().plan_wait_seconds


class TestSystemd:
    @pytest.fixture
    def unit(self, tmp_path) -> Path:
        """The unit with a program that exists: systemd-analyze looks for it."""
        text = UNIT.read_text()
        assert "ExecStart=/opt/bucketplan/bin/bucketplan-server serve\n" in text
        copy = tmp_path / UNIT.name
        copy.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", text, flags=re.MULTILINE))
        return copy

    def test_systemd_accepts_the_unit(self, unit):
        said = run(tool("systemd-analyze", package="systemd"), "verify", "--man=no", "--recursive-errors=yes", unit)
        assert unit.name not in said, said

    def test_systemd_finds_it_well_sandboxed(self, unit):
        run(
            tool("systemd-analyze", package="systemd"),
            "security",
            "--offline=yes",
            f"--threshold={MOST_EXPOSURE}",
            "--no-pager",
            unit,
        )

    def test_its_settings_are_valid_and_leave_time_to_drain(self):
        lines = (DEPLOY / "systemd" / "server.env").read_text().splitlines()
        settings = settings_of(dict(line.split("=", 1) for line in lines if line and not line.startswith("#")))
        (timeout,) = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT.read_text(), re.MULTILINE)
        assert int(timeout) >= stopping_seconds(settings)
        assert str(settings.sqlite_path).startswith("/var/lib/bucketplan/"), "the StateDirectory of the unit"
        (files,) = re.findall(r"^LimitNOFILE=(\d+)$", UNIT.read_text(), re.MULTILINE)
        assert int(files) > 2 * settings.expected_connections

    def test_the_guide_makes_the_user_of_the_unit_and_runs_commands_as_that_one(self):
        (user,) = re.findall(r"^User=(\w+)$", UNIT.read_text(), re.MULTILINE)
        assert "DynamicUser" not in UNIT.read_text(), "its state would lie where only root can reach it"
        guide = TestGuide.GUIDE.partition("## systemd")[2].partition("\n## ")[0]
        assert re.search(rf"useradd .* {user}$", guide, re.MULTILINE)
        commands = re.findall(r"^ +(.*--database /var/lib/.*)$", guide, re.MULTILINE)
        assert commands
        for line in commands:
            assert line.startswith(f"sudo -u {user} /opt/bucketplan/bin/bucketplan-server "), line


class TestPrometheus:
    def test_promtool_accepts_the_rules_and_the_scrape_configuration(self):
        promtool = tool("promtool", package="prometheus")
        run(promtool, "check", "rules", PROMETHEUS / "alerts.yaml")
        run(promtool, "check", "config", PROMETHEUS / "prometheus.yaml")

    def test_every_alert_fires_where_it_should_and_only_there(self):
        run(tool("promtool", package="prometheus"), "test", "rules", "alerts.test.yaml", cwd=PROMETHEUS)

    def test_every_alert_has_a_case_in_which_it_fires(self):
        cases = (PROMETHEUS / "alerts.test.yaml").read_text()
        for rule in alert_rules():
            assert f'alertname="{rule["alert"]}", alertstate="firing"' in cases, rule["alert"]

    def test_every_alert_says_what_to_do(self):
        for rule in alert_rules():
            assert rule["labels"]["severity"] in ("critical", "warning")
            assert set(rule["annotations"]) == {"summary", "description"}

    def test_alerts_use_metrics_that_are_served(self, served_metrics):
        used = {name for rule in alert_rules() for name in OWN_METRIC.findall(str(rule["expr"]))}
        assert len(used) > 10
        assert used - served_metrics - {"up"} == set()


class TestDashboard:
    def test_it_uses_metrics_that_are_served(self, served_metrics):
        used = {name for expression in dashboard_targets() for name in OWN_METRIC.findall(expression)}
        assert used - served_metrics == set()

    def test_it_shows_every_metric_of_ours(self, served_metrics):
        ours = {name for name in served_metrics if name.startswith("bucketplan_")}
        # Parts of the one histogram, of which the panel takes the buckets.
        hidden = {f"bucketplan_planning_seconds{part}" for part in ("", "_sum", "_count", "_created")}
        shown = {name for expression in dashboard_targets() for name in OWN_METRIC.findall(expression)}
        assert ours - hidden - shown == set()

    def test_prometheus_can_parse_every_query(self, tmp_path):
        rules = [
            {"record": f"panel:query{index}", "expr": re.sub(r"\$__(rate_interval|range)", "5m", expression)}
            for index, expression in enumerate(dashboard_targets())
        ]
        (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
        run(tool("promtool", package="prometheus"), "check", "rules", tmp_path / "rules.yaml")

    def test_panels_have_their_own_place_and_number(self):
        panels = DASHBOARD["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        cells = [
            (x, y)
            for panel in panels
            for place in [panel["gridPos"]]
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ]
        assert len(set(cells)) == len(cells), "two panels overlap"
        assert max(x for x, _ in cells) < 24, "Grafana has 24 columns"


def test_every_variable_in_the_files_is_one_of_the_server():
    known = {f"BUCKETPLAN_{name.upper()}" for name in Settings.model_fields} | {SECRETS_VARIABLE}
    files = [path for path in DEPLOY.rglob("*") if path.is_file() and "demo" not in path.parts and path.suffix != ".md"]
    named = {(path.name, name) for path in files for name in re.findall(r"\bBUCKETPLAN_[A-Z_]+\b", path.read_text())}
    assert len(named) > 10
    assert {pair for pair in named if pair[1] not in known} == set()


class TestGuide:
    GUIDE = (DEPLOY / "README.md").read_text()

    def test_its_variables_exist(self):
        client = (ROOT / "client" / "README.md").read_text()
        known = {f"BUCKETPLAN_{name.upper()}" for name in Settings.model_fields} | {SECRETS_VARIABLE}
        named = set(re.findall(r"\bBUCKETPLAN_[A-Z_]+\b", self.GUIDE)) - known
        assert {name for name in named if f"`{name}`" not in client} == set()

    def test_its_commands_exist(self):
        commands = set(re.findall(r"(?:`|^ {4}|srun )bucketplan ([a-z]+)", self.GUIDE, re.MULTILINE))
        assert len(commands) > 5
        assert commands - set(typer.main.get_command(client_app).commands) == set()
        server = set(re.findall(r"\bbucketplan-server (?!-)([a-z]+)", self.GUIDE))
        assert server - {"token"} - {command.callback.__name__ for command in server_app.registered_commands} == set()

    def test_its_links_lead_somewhere(self):
        for target in re.findall(r"\]\(([^)#]+)\)", self.GUIDE):
            assert (DEPLOY / target).exists(), target


SUDO = """#!/bin/sh
[ "$1" = -u ] && shift 2
exec "$@"
"""
# Asks the test to stop and start the server, and waits until it has.
SYSTEMCTL = """#!/bin/sh
echo "$1" > asked.new && mv asked.new asked
until [ -e done ]; do sleep 0.05; done
rm done
"""


def blocks(title: str) -> list[str]:
    """The blocks of commands in a section of the guide, in their order."""
    section = TestGuide.GUIDE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    found = re.findall(r"(?:^ {4}.*\n)+", section, re.MULTILINE)
    return [re.sub(r"^ {4}", "", block, flags=re.MULTILINE) for block in found]


class Shell:
    """A shell in which commands of the guide run as they are written, with other addresses."""

    def __init__(self, folder: Path, **instead: str) -> None:
        self._folder = folder
        self._instead = instead
        programs = folder / "programs"
        programs.mkdir()
        server = f'#!/bin/sh\nexec {sys.executable} -m bucketplan_server "$@"\n'
        for name, text in (("sudo", SUDO), ("systemctl", SYSTEMCTL), ("bucketplan-server", server)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        self.path = programs

    def follow(self, block: str, server: RunningServer | None = None) -> tuple[int, str]:
        """Exit status and output; `server` is stopped and started where the block says so."""
        for written, here in self._instead.items():
            block = block.replace(written, here)
        environment = {**os.environ, "PATH": f"{self.path}:{os.environ['PATH']}"}
        asked = self._folder / "asked"
        with subprocess.Popen(
            ["bash", "-c", block], cwd=self._folder, env=environment, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as shell:  # fmt: skip
            while shell.poll() is None:
                if server is not None and asked.exists():
                    if asked.read_text() == "stop\n":
                        assert server.terminate() == 0
                    else:
                        server.start()
                    asked.unlink()
                    (self._folder / "done").touch()
                time.sleep(0.01)
            return shell.returncode, shell.stdout.read()


class TestBackupAndRestore:
    """As the guide writes them, more than once."""

    @pytest.fixture
    def shell(self, tmp_path: Path) -> Shell:
        return Shell(
            tmp_path,
            **{
                "/var/lib/bucketplan": str(tmp_path),
                "/opt/bucketplan/bin/bucketplan-server": str(tmp_path / "programs" / "bucketplan-server"),
            },
        )

    def test_each_can_be_repeated_and_gives_the_same_plans(self, tmp_path, shell):
        backup, restore, _, _ = blocks("Backup and restore")
        with (
            running_server(tmp_path, database=tmp_path / "plans.db") as server,
            httpx.Client(base_url=server.url, headers=MSGPACK, timeout=60) as client,
        ):
            kept, later, last = map(small_request, range(3))

            def is_known(request) -> bool:
                return client.get(f"/v1/plans/{request.signature}").status_code == 200

            client.post("/v1/plans", content=plan_body(kept)).raise_for_status()
            served = client.get(f"/v1/plans/{kept.signature}").content
            for added in (later, last):
                assert shell.follow(backup)[0] == 0
                client.post("/v1/plans", content=plan_body(added)).raise_for_status()
            status, said = shell.follow(restore, server)
            assert status == 0, said
            assert client.get(f"/v1/plans/{kept.signature}").content == served
            assert [is_known(request) for request in (later, last)] == [True, False], "the newest backup"
            assert server.metric("bucketplan_plannings_total", outcome="stored") == 0
            client.post("/v1/plans", content=plan_body(last)).raise_for_status()
            status, said = shell.follow(restore, server)
            assert status == 0, said
            assert [is_known(request) for request in (later, last)] == [True, False]
        assert len(list(tmp_path.glob("backup-*.db"))) == 2
        assert len(list(tmp_path.glob("replaced-*/plans.db"))) == 2, "what was replaced is kept, each time"

    def test_a_backup_that_is_damaged_replaces_nothing(self, tmp_path, shell):
        _, restore, _, _ = blocks("Backup and restore")
        (tmp_path / "backup-2.db").write_text("no database " * 100)
        with running_server(tmp_path, database=tmp_path / "plans.db") as server:
            status, said = shell.follow(restore, server)
            assert (status, "findings" in said) == (1, True)
            assert server.is_running
        assert not list(tmp_path.glob("replaced-*"))

    @pytest.mark.postgres
    def test_those_of_postgresql_can_be_repeated(self, tmp_path):
        _, _, dump, restore = blocks("Backup and restore")
        with running_postgres() as postgres:
            address = postgres.new_database()
            before, parameters = address.partition("?")[::2]
            host = before.rpartition("/")[0]
            shell = Shell(
                tmp_path,
                **{
                    "postgresql://bucketplan@db.example/bucketplan": f"'{address}'",
                    "postgresql://bucketplan@db.example/postgres": f"'{host}/postgres?{parameters}'",
                    "postgresql://bucketplan@db.example/$RESTORED": f"{host}/$RESTORED?{parameters}",
                },
            )
            for name in ("createdb", "pg_dump", "pg_restore"):
                (shell.path / name).symlink_to(postgres.program(name))
            with running_server(tmp_path, database=address) as server:
                httpx.post(f"{server.url}/v1/plans", content=plan_body(small_request(1)), headers=MSGPACK)
                said = []
                for _ in range(2):
                    for block in (dump, restore):
                        status, output = shell.follow(block)
                        assert status == 0, output
                    said.append(output)
        assert len({output.splitlines()[-1] for output in said}) == 2, "two databases"
        assert all("1 signatures" in output and "0 findings" in output for output in said)


def test_the_metrics_of_the_process_are_there_in_every_deployment(served_metrics, tmp_path):
    """prometheus-client reads /proc/stat for them, which a private view of /proc may hide."""
    assert {"process_cpu_seconds_total", "process_resident_memory_bytes"} <= served_metrics
    (tmp_path / "self").symlink_to("/proc/self")
    assert list(ProcessCollector(proc=str(tmp_path), registry=None).collect()) == [], "it needs /proc/stat no longer"
    files = [path for path in DEPLOY.rglob("*") if path.is_file() and path.suffix != ".md" and "demo" not in path.parts]
    for path in files:
        # What a comment says is no setting.
        text = re.sub(r"^\s*#.*$", "", path.read_text(), flags=re.MULTILINE)
        assert not re.search(r"ProcSubset|subset=pid|hidepid|procMount|masked|/proc\b", text), path
