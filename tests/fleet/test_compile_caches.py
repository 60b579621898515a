"""Inductor's caches on two gloo ranks: whichever rank finds its cache warm, both run the plan of their attempt.

A warm cache calls no hook, so nothing that a rank does while it compiles can be counted on. One job is started again
and again; each start opens an attempt at a real server and trains a step, compared with the same step run eagerly.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.gloo_pool import gloo_pool
from tests.support.server import RunningServer, running_server

pytestmark = pytest.mark.timeout(900)

START_S = 800.0
FUSED = {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}
Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("compile-server")) as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("compile-caches"))


def start(server: RunningServer, folder: str, **fields: Any) -> Results:
    given = {"folder": folder, "address": server.url, "job": "compiled", **fields}
    results = gloo_pool(2).run("tests.support.compile_ranks:start", given, timeout_s=START_S)
    assert results[0]["uuid"] == results[1]["uuid"]
    assert all(result["worst_gradient"] < 1e-5 for result in results)
    assert results[0]["launches"] == results[1]["launches"]
    return results


@pytest.fixture(scope="module")
def cold(server: RunningServer, folder: str) -> Results:
    return start(server, folder)


@pytest.fixture(scope="module")
def plans(cold: Results) -> dict[str, tuple[str, str]]:
    """Signature and plan of each graph, as the ranks compiled them in the first start."""
    return dict(cold[0]["plans"])


def test_both_cold(cold):
    assert set(cold[0]["plans"]) == {"forward", "backward"}
    assert cold[0]["plans"] == cold[1]["plans"]
    for result in cold:
        assert result["launches"] == FUSED
        assert result["hits"] == 0


def test_both_warm(server, folder, cold):
    for result in start(server, folder):
        assert result["plans"] == {}, "a cache hit calls no hook"
        assert result["hits"] > 0
        assert result["launches"] == FUSED
        assert result["uuid"] == cold[0]["uuid"]


def test_one_warm_and_one_cold_at_another_length(server, folder, cold, plans):
    warm, emptied = start(server, folder, without=1, length=12)
    assert warm["plans"] == {}
    assert warm["hits"] > 0
    assert emptied["plans"] == plans
    assert warm["launches"] == emptied["launches"] == FUSED


def test_server_killed_between_the_compilations_of_two_ranks(server, folder, cold, plans, tmp_path):
    """Another job, so nothing of it is cached: rank 0 has its first plan from the server, rank 1 none yet."""

    def kill_between() -> None:
        deadline = time.monotonic() + START_S
        while not (tmp_path / "first").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        server.kill()
        (tmp_path / "go").touch()

    killer = threading.Thread(target=kill_between)
    killer.start()
    try:
        first, second = start(server, folder, job="interrupted", between=str(tmp_path))
    finally:
        killer.join()
        server.restart()
    assert first["taken"]["server"] >= 1
    assert "server" not in second["taken"]
    assert first["plans"] == second["plans"] == plans
    assert first["launches"] == second["launches"] == FUSED


def test_override_activated_between_two_attempts_is_not_undone_by_a_warm_cache(server, folder, cold, plans):
    signature, digest = plans["forward"]
    with httpx.Client(base_url=server.url) as operator:
        small = {"bucket_cap_bytes": 1, "first_bucket_cap_bytes": 1}
        added = operator.post(f"/v1/plans/{signature}/revisions", json={"options": small, "reason": "smaller buckets"})
        assert added.status_code == 201, added.text
        body = {"revision": added.json()["revision"], "reason": "smaller buckets"}
        assert operator.post(f"/v1/plans/{signature}/activate", json=body).status_code == 200
    overridden = start(server, folder)
    for result in overridden:
        assert result["uuid"] != cold[0]["uuid"]
        assert result["hits"] == 0
        assert result["taken"]["override"] == 1
        assert result["plans"]["forward"][1] != digest
        assert result["plans"]["backward"] == plans["backward"]
        assert result["launches"] == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 1}
    assert overridden[0]["plans"] == overridden[1]["plans"]
    with httpx.Client(base_url=server.url) as operator:
        back = {"revision": 1, "reason": "roll back"}
        assert operator.post(f"/v1/plans/{signature}/activate", json=back).status_code == 200
    for result in start(server, folder):
        assert result["launches"] == FUSED, "the plan of before the override, from the cache of before it"
        assert result["hits"] > 0
