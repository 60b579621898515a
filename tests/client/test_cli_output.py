"""Answers that stdout does not take: one line on stderr and a status of its own, never that of a no."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

PROGRAM = "from bucketplan_client.cli.main import main; main()"
DOCTOR = ("--server", "http://127.0.0.1:9", "--timeout", "0.2", "doctor")


def run(command: str, *, writing: int | None = None, **environment: str) -> subprocess.CompletedProcess[bytes]:
    env = {**os.environ, "BUCKETPLAN_CACHE": "/dev/null/cache", "COLUMNS": "200", **environment}
    return subprocess.run(
        ["bash", "-c", f'exec "$0" "$@" {command}', sys.executable, "-c", PROGRAM, *DOCTOR],
        env=env, cwd=ROOT, capture_output=True, check=False, pass_fds=() if writing is None else (writing,),
    )  # fmt: skip


@pytest.mark.parametrize("option", ["", "--json"])
@pytest.mark.parametrize("target", [">/dev/full", ">&-"])
def test_stdout_that_takes_nothing_is_one_line_and_status_6(option, target):
    done = run(f"{option} {target}")
    said = done.stderr.decode()
    assert done.returncode == 6, said
    assert said.startswith("error: the answer could not be written to stdout: ")
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("option", ["", "--json"])
def test_what_an_encoding_lacks_is_escaped(option):
    done = run(option, PYTHONIOENCODING="ascii", BUCKETPLAN_DISABLE="слой🚀")
    assert done.returncode == 1, done.stderr.decode()
    assert b"\\u0441" in done.stdout
    assert done.stderr == b""
    if option:
        assert json.loads(done.stdout)["checks"][0]["found"] == "BUCKETPLAN_DISABLE is слой🚀"


@pytest.mark.parametrize("option", ["", "--json"])
def test_a_reader_that_has_gone_is_no_no(option):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = run(f"{option} >&{writing}", writing=writing)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (6, b"")
