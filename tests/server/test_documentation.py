"""server/README.md names every endpoint, setting, metric, problem type and command, or this fails."""

import re

import httpx
import pytest

from bucketplan_server.cli import app
from bucketplan_server.metrics import METRICS
from bucketplan_server.problems import PROBLEMS
from bucketplan_server.settings import SECRETS_VARIABLE, Settings
from tests.support.paths import ROOT
from tests.support.server import RunningServer

README = (ROOT / "server" / "README.md").read_text()


def test_every_endpoint_is_documented(server: RunningServer):
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    missing = [
        f"{method.upper()} {path}"
        for path, methods in paths.items()
        for method in methods
        if f"`{method.upper()} {path}`" not in README
    ]
    assert not missing


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_is_documented_with_its_default(name):
    field = Settings.model_fields[name]
    (line,) = [line for line in README.splitlines() if line.startswith(f"| `BUCKETPLAN_{name.upper()}` ")]
    assert f"| `{field.default}` |" in line
    assert field.description in line


def test_every_other_variable_that_the_server_reads_is_documented():
    sources = "".join(path.read_text() for path in (ROOT / "server" / "bucketplan_server").rglob("*.py"))
    read = set(re.findall(r"""environ(?:\.get\(|\[)["'](\w+)["']""", sources)) | {SECRETS_VARIABLE}
    assert "FORWARDED_ALLOW_IPS" in read
    assert {name for name in read if f"`{name}`" not in README} == set()


@pytest.mark.parametrize("name", [*METRICS, "bucketplan_planning_seconds"])
def test_every_metric_is_documented(name):
    assert f"`{name}`" in README


def test_the_metrics_that_are_documented_exist(server: RunningServer):
    served = httpx.get(f"{server.url}/metrics").text
    for name in METRICS:
        assert f"# TYPE {name} " in served


@pytest.mark.parametrize("slug", PROBLEMS)
def test_every_problem_type_is_documented(slug):
    assert f"| `{slug}` | {PROBLEMS[slug].status} |" in README


def test_every_command_is_documented():
    for command in app.registered_commands:
        assert command.callback is not None
        assert f"`bucketplan-server {command.name or command.callback.__name__}" in README


def test_the_openapi_description_is_valid(server: RunningServer):
    from openapi_spec_validator import validate

    validate(httpx.get(f"{server.url}/openapi.json").json())
