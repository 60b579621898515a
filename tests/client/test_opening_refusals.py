"""An opening that one rank cannot go through with: it says why, and the others learn of it without a wait."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from bucketplan_client import opening
from bucketplan_client.arguments import BadArgument
from bucketplan_client.cache import PlanCache
from bucketplan_client.opening import open_attempt
from bucketplan_client.opening_protocol import Hello
from bucketplan_client.store import JobStore
from bucketplan_client.testing import InMemoryPlanServer
from bucketplan_core.wire import pack, unpack
from tests.client.requests import small_epoch
from tests.client.test_opening import one_text, open_all

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "on_unavailable": ({"on_unavailable": "locl"}, "on_unavailable"),
    "mode": ({"mode": "every-rank"}, "mode"),
    "not a time": ({"deadline_s": float("nan")}, "deadline_s"),
    "endless": ({"server_s": float("inf")}, "server_s"),
    "negative": ({"grace_s": -1.0}, "grace_s"),
    "no time": ({"plan_s": "1"}, "plan_s"),
    "empty group": ({"groups": {"fsdp": ()}}, "groups['fsdp']"),
    "unknown group": ({"groups": {"fsdp": "nobody"}}, "groups['fsdp']"),
    "repeated member": ({"groups": {"fsdp": (0, 1, 1)}}, "groups['fsdp']"),
    "another's group": ({"groups": {"fsdp": (5, 6)}}, "groups['fsdp']"),
    "no group": ({"groups": {"fsdp": 3}}, "groups['fsdp']"),
    "role": ({"groups": {"\udcff": (0, 1, 2, 3)}}, "a role of groups"),
    "float option": ({"options": {"bucket_cap_bytes": 1.5}}, "options.bucket_cap_bytes"),
    "options": ({"options": "prefetch"}, "options"),
    "cache": ({"cache": "/cache"}, "cache"),
}
PLACE: dict[str, tuple[dict[str, Any], str]] = {
    "no participants": ({"participants": ()}, "participants"),
    "repeated participant": ({"participants": (0, 0)}, "participants"),
    "rank outside": ({"rank": 7, "groups": {"fsdp": (0, 7)}, "participants": (0, 1)}, "rank"),
    "rank": ({"rank": -1}, "rank"),
    "job": ({"job": "\udcff"}, "job"),
    "name": ({"name": "\udcff"}, "name"),
}
LONG = {"deadline_s": 600.0, "server_s": 60.0, "grace_s": 10.0}
"""A rank that waits for any of these runs into the limit of the test."""


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("odd", [0, 2])
def test_wrong_argument_of_one_rank_is_named_on_all_at_once(case, odd):
    wrong, option = BAD[case]
    server = InMemoryPlanServer()
    outcomes = open_all(server, vary=lambda rank: wrong if rank == odd else LONG)
    error = outcomes.pop(odd)
    assert isinstance(error, BadArgument)
    assert error.option == option
    assert error.where.rank == odd
    assert "one release" not in str(error)
    assert f"rank {odd} left it: {option} is" in one_text(outcomes)
    assert {other.odd for other in outcomes.values()} == {(odd,)}
    assert server.calls == []


@pytest.mark.parametrize("case", PLACE)
def test_rank_without_a_place_is_refused_before_anything_is_sent(case):
    wrong, option = PLACE[case]
    arguments: dict[str, Any] = {"groups": {"fsdp": (0,)}, "job": "j", "rank": 0, "store": dist.HashStore(), **LONG}
    with pytest.raises(BadArgument) as caught:
        open_attempt(None, **{**arguments, **wrong})
    assert caught.value.option == option
    assert all(fact in str(caught.value) for fact in ([] if case == "rank" else ["rank "]))
    # But for word of why, which those read who miss this rank.
    assert arguments["store"].num_keys() == (0 if case == "rank" else 1)


@pytest.mark.parametrize("odd", [0, 2])
def test_hello_that_cannot_be_read_is_named_on_all(monkeypatch, odd):
    """As a client without these checks sends it."""
    encoded = Hello.encoded

    def damaged(hello: Hello) -> bytes:
        tree = dict(unpack(encoded(hello)))
        return pack({**tree, "on_unavailable": "locl"} if hello.rank == odd else tree)

    monkeypatch.setattr(Hello, "encoded", damaged)
    outcomes = open_all(InMemoryPlanServer(), **LONG)
    assert f"what rank {odd} brought cannot be read: hello.on_unavailable" in one_text(outcomes)
    assert outcomes[1].odd == (odd,)


@pytest.mark.parametrize("what", [KeyboardInterrupt("stop"), SystemExit(3), ValueError("a fault")])
def test_leader_that_fails_while_it_decides_tells_the_others(monkeypatch, what):
    def failing(*_: object, **__: object) -> None:
        raise what

    monkeypatch.setattr(opening, "ask_server", failing)
    outcomes = caught_on_all(LONG)
    assert outcomes.pop(0) is what
    assert f"rank 0 left it: {type(what).__name__}: {what}" in one_text(outcomes)


def test_rank_that_is_interrupted_before_the_outcome_tells_the_others(monkeypatch):
    wait, put = JobStore.wait, JobStore.put

    def interrupted(store: JobStore, keys: Any, until: float) -> Any:
        if store.where.rank == 2:
            raise KeyboardInterrupt
        return wait(store, keys, until)

    def late(store: JobStore, key: str, value: bytes) -> None:
        if key.endswith("/hello/3"):
            # Without it the leader decides, and the interrupt may come too late to matter.
            outcome = key.replace("/hello/3", "/outcome")
            assert wait(store, [outcome], time.monotonic() + 60.0) == ()
        put(store, key, value)

    monkeypatch.setattr(JobStore, "wait", interrupted)
    monkeypatch.setattr(JobStore, "put", late)
    outcomes = caught_on_all(LONG)
    assert isinstance(outcomes.pop(2), KeyboardInterrupt)
    assert "rank 2 left it: KeyboardInterrupt" in one_text(outcomes)


@pytest.mark.parametrize("odd", [0, 2])
def test_first_participants_mode_counts_where_ranks_differ(odd):
    outcomes = open_all(InMemoryPlanServer(), vary=lambda rank: {**LONG, "mode": "every_rank"} if rank == odd else LONG)
    assert len({attempt.uuid for attempt in outcomes.values()}) == 1
    assert {attempt.bucketed for attempt in outcomes.values()} == {True}


def test_refusal_in_mode_every_rank_reaches_all_without_a_draft():
    odd = {"options": {"bucket_cap_bytes": 7}}
    outcomes = open_all(
        InMemoryPlanServer(), mode="every_rank", vary=lambda rank: {**LONG, **(odd if rank == 1 else {})}
    )
    assert "rank 1 holds" in one_text(outcomes)


class TestCache:
    def test_foreign_files_among_the_epochs_are_not_held(self, tmp_path: Path):
        cache = PlanCache(tmp_path)
        epoch = small_epoch()
        cache.keep_epoch(epoch)
        folder = cache._epochs(epoch.job)
        for name in (b"\xff.epoch", b"not-a-digest.epoch", b"A" * 64 + b".epoch"):
            (folder / os.fsdecode(name)).write_bytes(b"x")
        assert cache.epochs(epoch.job) == [epoch.id]

    def test_job_opens_beside_foreign_files(self, tmp_path: Path):
        cache = PlanCache(tmp_path)
        folder = cache._epochs("llama")
        folder.mkdir(parents=True)
        (folder / os.fsdecode(b"\xff.epoch")).write_bytes(b"x")
        attempts = open_all(None, ranks=[0], caches={0: cache})
        assert attempts[0].bucketed

    def test_name_of_a_job_that_is_no_unicode_has_no_epochs(self, tmp_path: Path):
        assert PlanCache(tmp_path).epochs("\udcff") == []


def caught_on_all(arguments: dict[str, Any]) -> dict[int, Any]:
    """What every rank raised, what is no `Exception` too."""
    store = dist.HashStore()
    outcomes: dict[int, Any] = {}

    def run(rank: int) -> None:
        try:
            open_attempt(
                InMemoryPlanServer().client(rank=rank, deadline_s=0.3),
                groups={"fsdp": (0, 1, 2, 3)},
                job="llama",
                rank=rank,
                store=store,
                name="0",
                **arguments,
            )
        except BaseException as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(isinstance(error, BaseException) for error in outcomes.values())
    return outcomes
