"""Opening with a stored hardware profile that the options name, against a real server and without it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bucketplan_client.cache import PlanCache
from bucketplan_client.opening_protocol import odd_option
from bucketplan_client.testing import InMemoryPlanServer
from bucketplan_client.transport import PlanClient
from bucketplan_core.collectives import Options
from bucketplan_core.hardware import CollectiveCost, Hardware, Protocol
from bucketplan_core.presets import GroupShape, MeasuredProfile
from tests.client.test_opening import GIVEN, RANKS, one_text, open_all
from tests.support.server import RunningServer, running_server

FIGURES = Hardware(
    flops_per_us=(("matmul:bfloat16", 1_000_000),),
    memory_bytes_per_us=1_000_000,
    copy_bytes_per_us=1_000_000,
    launch_ns=1_000,
    slowdown_permille=0,
    collectives=(CollectiveCost("measured", "all_gather", (Protocol(10_000, 100_000),)),),
)

RESOLVED = replace(FIGURES, collectives=(CollectiveCost("fsdp", "all_gather", (Protocol(10_000, 100_000),)),))
PROFILE = MeasuredProfile(name="rack-7", shape=GroupShape(len(RANKS), 1), backend="gloo", device="cpu", figures=FIGURES)


class _Clients:
    """What gives each rank a client of its own of a real server."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self.opened: list[PlanClient] = []

    def client(self, **options: Any) -> PlanClient:
        self.opened.append(PlanClient(self.server.url, **options))
        return self.opened[-1]


@pytest.fixture
def clients(server: RunningServer) -> Iterator[Any]:
    clients = _Clients(server)
    yield clients
    for client in clients.opened:
        client.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    with running_server(tmp_path) as running, PlanClient(running.url) as client:
        client.put("/v1/profiles/rack-7", {"profile": PROFILE.to_wire(), "reason": "measured"})
        yield running


@pytest.mark.parametrize(("mode", "named"), [("leader", "rack-7"), ("every_rank", "rack-7"), ("leader", ("rack-7",))])
def test_attempt_has_the_figures_of_the_profile_that_is_named_with_the_server_and_without_it(
    tmp_path, clients, mode, named
):
    arguments: dict[str, Any] = {
        "caches": {rank: PlanCache(tmp_path / "caches" / str(rank)) for rank in RANKS},
        "mode": mode,
        "options": {**GIVEN, "hardware": named},
        "use": lambda attempt: (attempt.source, attempt.uuid, attempt.options.hardware),
    }
    first = open_all(clients, server_s=60.0, **arguments)
    (source, uuid, hardware) = first[0]
    assert set(first.values()) == {(source, uuid, hardware)}, first
    assert source == "server"
    assert hardware == RESOLVED

    clients.server.kill()
    second = open_all(clients, on_unavailable="error", **arguments)
    assert set(second.values()) == {("cache", uuid, hardware)}, second


def test_double_has_the_figures_of_a_server():
    server = InMemoryPlanServer(measured={"rack-7": PROFILE})
    attempts = open_all(server, options={**GIVEN, "hardware": "rack-7"})
    assert {attempt.options.hardware for attempt in attempts.values()} == {RESOLVED}


def test_named_profile_without_the_server_and_without_an_epoch_says_who_holds_it(clients):
    clients.server.kill()
    text = one_text(open_all(clients, options={**GIVEN, "hardware": "rack-7"}, on_unavailable="local"))
    assert "the figures of 'rack-7' (option hardware) are stored there alone" in text
    assert "could not be reached" in text


def test_unknown_profile_is_named_on_all_ranks(clients):
    assert "'rack-9'" in one_text(open_all(clients, server_s=60.0, options={**GIVEN, "hardware": "rack-9"}))


@pytest.mark.parametrize(
    ("given", "odd"),
    [
        ({}, None),
        ({"hardware": FIGURES.to_wire(), "prefetch": 1}, None),
        ({"hardware": "rack-7"}, None),
        ({"hardware": ["rack-7", "rack-8"]}, None),
        ({"hardware": replace(FIGURES, launch_ns=2).to_wire()}, "hardware"),
        ({"hardware": None}, "hardware"),
        ({"hardware": []}, "hardware"),
        ({"hardware": ["rack-7", 8]}, "hardware"),
        ({"hardware": "rack-7", "prefetch": 2}, "prefetch"),
        ({"no_such_option": None}, "no_such_option"),
    ],
)
def test_only_a_name_stands_for_figures(given, odd):
    held = Options(strategy="size", planner="size/1", hardware=FIGURES)
    assert odd_option(held, given) == odd


def test_name_does_not_stand_for_no_figures():
    assert odd_option(Options(strategy="size", planner="size/1"), {"hardware": "rack-7"}) == "hardware"
