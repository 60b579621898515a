"""The client's README names every command, every variable and every way to end."""

from __future__ import annotations

import re

import pytest
import typer.main

from bucketplan_client.cli.main import app
from bucketplan_client.cli.output import EXIT_CODES
from tests.support.paths import ROOT

README = (ROOT / "client" / "README.md").read_text()
SOURCES = "\n".join(path.read_text() for path in (ROOT / "client" / "bucketplan_client").rglob("*.py"))
READ_FROM_ENVIRONMENT = re.findall(
    r"(?:environ\.get\(|envvar=|_VARIABLE = |_VARIABLES = \()\"(BUCKETPLAN_[A-Z_]+)\"", SOURCES
)


@pytest.mark.parametrize("name", sorted(typer.main.get_command(app).commands))  # type: ignore[attr-defined]  # the application is a group
def test_command_is_there(name):
    assert name in README.partition("## Command line")[2]


@pytest.mark.parametrize("name", sorted(set(READ_FROM_ENVIRONMENT)))
def test_variable_is_there(name):
    assert f"`{name}`" in README.partition("## Environment")[2]


def test_variables_are_found_in_the_sources():
    assert {"BUCKETPLAN_SERVER", "BUCKETPLAN_TOKEN", "BUCKETPLAN_DISABLE", "BUCKETPLAN_JOB"} <= set(
        READ_FROM_ENVIRONMENT
    )


def test_exit_status_is_explained_in_the_same_words():
    assert " ".join(EXIT_CODES.split()) in " ".join(README.split())
