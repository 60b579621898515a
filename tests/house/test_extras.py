"""A program whose extra was not installed says which one, in one line."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import tomllib

import pytest

from tests.support.paths import ROOT
from tests.support.server_env import environment_of_its_own

SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
WITHOUT = textwrap.dedent(
    """
    import importlib, sys

    home, _, name = sys.argv[1].partition(":")
    refused = set(sys.argv[2].split(","))

    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in refused:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Missing())
    sys.argv[1:] = sys.argv[3:]
    getattr(importlib.import_module(home), name)()
    """
)
BARE = "alembic,fastapi,httpcore,httpx,jinja2,pydantic,pydantic_settings,rich,sqlalchemy,starlette,tenacity,torch,typer"
"""Everything that the extras bring, as it is missing after a plain `pip install bucketplan`."""


def start(program: str, refused: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT, SCRIPTS[program], refused, *arguments],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("program", "refused", "arguments", "said"),
    [
        ("bucketplan", BARE, ["--help"], "typer is not installed; pip install 'bucketplan[client]'"),
        ("bucketplan-server", BARE, ["--help"], "typer is not installed; pip install 'bucketplan[server]'"),
        (
            "bucketplan",
            "tenacity",
            ["--server", "http://127.0.0.1:9", "plans"],
            "tenacity is not installed; pip install 'bucketplan[client]'",
        ),
    ],
)
def test_program_without_its_extra_is_one_line_that_names_it(program, refused, arguments, said):
    done = start(program, refused, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{program}: {said}")


@pytest.mark.parametrize("program", SCRIPTS)
def test_program_with_its_extra_explains_itself(program):
    done = start(program, "-", "--help")
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_module_of_ours_that_is_missing_is_no_missing_extra():
    code = "from bucketplan_core.program import run_program; run_program('p', 'bucketplan_none', extra='e')"
    broken = subprocess.run(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "No module named 'bucketplan_none'" in broken.stderr


def test_client_where_only_the_server_was_installed_names_its_extra(torch_free_bin, tmp_path):
    done = subprocess.run(
        [torch_free_bin / "bucketplan", "--server", "http://127.0.0.1:9", "plans"], env=environment_of_its_own(),
        cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.endswith("pip install 'bucketplan[client]' installs it")
