"""`make demo` as a user runs it, and that it fails when something does not hold."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.support import fsdp_model  # puts the demo's package on the path
from tests.support.paths import ROOT

SCRIPT = ROOT / "deploy" / "demo" / "run.py"


@pytest.fixture(scope="module")
def run():
    assert fsdp_model.CORPUS.is_file()
    spec = importlib.util.spec_from_file_location("bucketplan_demo_run", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def children_of(pid):
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def running(pids):
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def start_demo():
    """Starts the demo in a folder of its own; whatever becomes of the test, it is told to end."""
    demos = []

    def start(folder, *args):
        demo = subprocess.Popen(
            [sys.executable, str(SCRIPT), "--folder", "demo", *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
        )
        demos.append(demo)
        return demo

    yield start
    for demo in demos:
        with demo:
            demo.send_signal(signal.SIGTERM)


def test_demo_holds_and_leaves_no_process_behind(tmp_path, start_demo):
    demo = start_demo(tmp_path, "--steps", "8")
    started = set()
    lines = []
    for line in demo.stdout:
        lines.append(line)
        started |= set(children_of(demo.pid)) if demo.poll() is None else set()
    said = "".join(lines)
    assert demo.wait(timeout=60) == 0, said
    assert "FAILS" not in said
    assert "nothing was planned a second time (0 plannings" in said
    assert "losses equal to those without buckets, bit for bit" in said
    assert "/v1/plans/" in said
    last = said.splitlines()[-1]
    assert last.startswith("Its page, for a browser: http://127.0.0.1:"), last
    assert "/plans/" in last
    assert len(started) > 3, "the server and the ranks are processes of their own"
    assert running(started) == []
    first = json.loads((tmp_path / "demo" / "first" / "result.json").read_text())
    assert [sorted(ways) for ways in first] == [["module", "none", "size"]] * 2


def test_demo_ends_its_processes_when_it_is_interrupted(tmp_path, start_demo):
    demo = start_demo(tmp_path)
    for line in demo.stdout:
        if "tracing" in line:
            break
    started = children_of(demo.pid)
    assert len(started) > 2
    demo.send_signal(signal.SIGTERM)
    demo.stdout.read()
    assert demo.wait(timeout=60) == 130
    deadline = time.monotonic() + 10
    while running(started) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert running(started) == []


def test_job_that_cannot_reach_its_server_fails_the_demo(tmp_path, run):
    class Gone:
        address = "http://127.0.0.1:9"

    with pytest.raises(run.DemoFailed, match="status"):
        run._train(Gone(), tmp_path / "cache", tmp_path / "out", 1)
    assert not (tmp_path / "out" / "result.json").exists()


def good_ranks():
    def way(num_after, num_buckets):
        return {
            "signature": "a" * 64,
            "digest": "b" * 64,
            "losses": [5.0, 2.0],
            "shards_sha256": "c" * 64,
            "num_before": 100,
            "num_after": num_after,
            "num_buckets": num_buckets,
        }

    ways = {"none": way(100, 0), "size": way(20, 15), "module": way(30, 25)}
    return [copy.deepcopy(ways), copy.deepcopy(ways)]


def failed_checks(run, ranks):
    checks = run.Checks()
    run._check_training(checks, ranks)
    return checks.failed


def test_checks_pass_for_what_holds(run):
    assert failed_checks(run, good_ranks()) == []


@pytest.mark.parametrize(
    ("path", "value", "claim"),
    [
        ((1, "size", "losses"), [5.0, 2.0000001], "losses"),
        ((0, "module", "shards_sha256"), "d" * 64, "parameter"),
        ((1, "size", "digest"), "d" * 64, "both ranks"),
        ((1, "module", "signature"), "d" * 64, "both ranks"),
        ((0, "size", "num_after"), 100, "fewer collectives"),
    ],
)
def test_checks_fail_for_what_does_not_hold(run, path, value, claim):
    ranks = good_ranks()
    rank, way, fact = path
    ranks[rank][way][fact] = value
    assert any(claim in failed for failed in failed_checks(run, ranks))


def test_model_that_does_not_learn_fails(run):
    ranks = good_ranks()
    for rank in ranks:
        for way in rank.values():
            way["losses"] = [5.0, 4.9]
    assert failed_checks(run, ranks) == ["the model learns"]


def test_demo_needs_nothing_from_the_environment(run, tmp_path, monkeypatch):
    monkeypatch.setenv("BUCKETPLAN_SERVER", "http://elsewhere.invalid")
    seen = {}

    class Started(Exception):
        pass

    def start(command, *, env, **_):
        seen.update(env)
        raise Started

    monkeypatch.setattr(run.subprocess, "Popen", start)
    server = type("Server", (), {"address": "http://127.0.0.1:9"})()
    with pytest.raises(Started):
        run._train(server, tmp_path / "cache", tmp_path / "out", 1)
    assert not [name for name in seen if name.startswith("BUCKETPLAN_")]
    assert os.environ["BUCKETPLAN_SERVER"] == "http://elsewhere.invalid"
