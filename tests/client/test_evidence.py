"""Evidence of compilations: whoever compiles second finds a difference, and every rank hears of it."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import torch.distributed as dist

from bucketplan_client.errors import ClientError, RanksDisagree, Where
from bucketplan_client.evidence import Evidence
from bucketplan_client.failures import ABORT_STATUS
from bucketplan_client.store import JobStore
from bucketplan_core import make_plan
from tests.client.requests import small_request
from tests.client.test_cache import overriding_plan

GROUPS = {"fsdp": (0, 1)}


def evidence_of(rank: int, base: Any, heard: dict[int, ClientError], arrived: threading.Event) -> Evidence:
    def hear(error: ClientError) -> None:
        heard[rank] = error
        if len(heard) == 2:
            arrived.set()

    return Evidence(JobStore(base, prefix="job"), rank=rank, where=Where(rank=rank), on_mismatch=hear, poll_s=0.01)


def test_equal_compilations_raise_nothing_whoever_compiles():
    base, heard = dist.HashStore(), {}
    first, second = (evidence_of(rank, base, heard, threading.Event()) for rank in (0, 1))
    request = small_request()
    assert first.note("forward", request, make_plan(request), GROUPS)
    assert second.note("forward", request, make_plan(request), GROUPS)
    # One rank compiled the same again under other guards, and then what the other has not compiled yet.
    assert second.note("forward", request, make_plan(request), GROUPS)
    assert second.note("forward", small_request(num_params=2), make_plan(small_request(num_params=2)), GROUPS)
    assert first.note("forward", small_request(num_params=2), make_plan(small_request(num_params=2)), GROUPS)
    assert base.check(["job/alarm"]) is False


def test_graph_with_collectives_that_others_have_not_is_found():
    base, heard = dist.HashStore(), {}
    first, second = (evidence_of(rank, base, heard, threading.Event()) for rank in (0, 1))
    common, extra = small_request(), small_request(num_params=2)
    assert first.note("forward", common, make_plan(common), GROUPS)
    assert not second.note("forward", extra, make_plan(extra), GROUPS)


def test_rank_with_another_graph_makes_both_ranks_hear_both_sides():
    base, heard, arrived = dist.HashStore(), {}, threading.Event()
    ranks = [evidence_of(rank, base, heard, arrived) for rank in (0, 1)]
    for rank in ranks:
        rank.watch()
    one, other = small_request(), small_request(num_params=3)
    assert ranks[0].note("forward", one, make_plan(one), GROUPS)
    assert not ranks[1].note("forward", other, make_plan(other), GROUPS)
    assert arrived.wait(30)
    for rank in ranks:
        rank.close()
    for rank in (0, 1):
        error = heard[rank]
        assert isinstance(error, RanksDisagree)
        assert error.where.rank == rank
        assert "forward 0" in error.what
        assert error.difference is not None
        assert "on rank 1" in error.difference


def test_whoever_hears_of_it_may_close():
    base, closed = dist.HashStore(), threading.Event()

    def close(_: ClientError) -> None:
        heard_by.close()
        closed.set()

    heard_by = Evidence(JobStore(base, prefix="job"), rank=0, where=Where(rank=0), on_mismatch=close, poll_s=0.01)
    heard_by.watch()
    one, other = small_request(), small_request(num_params=3)
    assert heard_by.note("s", one, make_plan(one), GROUPS)
    assert not evidence_of(1, base, {}, threading.Event()).note("s", other, make_plan(other), GROUPS)
    assert closed.wait(30)


def test_other_plan_for_the_same_graph_is_found_too():
    base, heard = dist.HashStore(), {}
    first, second = (evidence_of(rank, base, heard, threading.Event()) for rank in (0, 1))
    request = small_request()
    assert first.note("s", request, make_plan(request), GROUPS)
    assert not second.note("s", request, overriding_plan(), GROUPS)


def test_groups_of_other_ranks_are_not_compared():
    base, heard = dist.HashStore(), {}
    first, second = (evidence_of(rank, base, heard, threading.Event()) for rank in (0, 2))
    one, other = small_request(), small_request(num_params=3)
    assert first.note("s", one, make_plan(one), {"fsdp": (0, 1)})
    assert second.note("s", other, make_plan(other), {"fsdp": (2, 3)})


_ABORTS = """
import threading, time
import torch.distributed as dist
from bucketplan_core import make_plan
from bucketplan_client.errors import Where
from bucketplan_client.evidence import Evidence
from bucketplan_client.store import JobStore
from tests.client.requests import small_request
base = dist.HashStore()
ranks = [Evidence(JobStore(base, prefix="job"), rank=r, where=Where(rank=r, job="llama"), poll_s=0.01) for r in (0, 1)]
ranks[0].watch()
one, other = small_request(), small_request(num_params=3)
ranks[0].note("s", one, make_plan(one), {"fsdp": (0, 1)})
ranks[1].note("s", other, make_plan(other), {"fsdp": (0, 1)})
time.sleep(60)
"""


def test_process_ends_with_the_message_instead_of_waiting():
    done = subprocess.run([sys.executable, "-c", _ABORTS], capture_output=True, text=True, check=False, timeout=50)
    assert done.returncode == ABORT_STATUS
    assert "does not agree" in done.stderr
    assert "job 'llama'" in done.stderr


def test_watcher_ends_quietly_with_the_store():
    class Gone(JobStore):
        def get(self, key: str) -> bytes | None:
            from bucketplan_client.errors import StoreFailed

            raise StoreFailed("get", "connection reset")

    heard: list[ClientError] = []
    watcher = Evidence(
        JobStore(dist.HashStore(), prefix="job"), rank=0, where=Where(rank=0), on_mismatch=heard.append, poll_s=0.01
    )
    watcher._watch(Gone(dist.HashStore(), prefix="job"))
    assert heard == []
