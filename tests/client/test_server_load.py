"""How many calls reach the server when a job starts, by number of ranks and opening mode; as in client/README.md."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from bucketplan_client.testing import InMemoryPlanServer
from tests.client.requests import small_request
from tests.client.test_opening import open_all

GRAPHS = 2


def calls_of(num_ranks: int, mode: str, *, together: bool) -> dict[str, int]:
    """Calls of a start in which each rank compiles `GRAPHS` graphs: all at one moment, or one rank after another."""
    server = InMemoryPlanServer()
    requests = [small_request(num_params=4 + index) for index in range(GRAPHS)]
    barrier = threading.Barrier(num_ranks)
    turns = [threading.Event() for _ in range(num_ranks + 1)]
    turns[0].set()

    def compile_all(attempt: Any) -> None:
        if together:
            barrier.wait(60.0)
        else:
            assert turns[attempt.rank].wait(60.0)
        for request in requests:
            attempt.plans.plan(request)
        turns[attempt.rank + 1].set()

    outcomes = open_all(server, ranks=range(num_ranks), mode=mode, use=compile_all, server_s=20.0, plan_s=20.0)
    assert set(outcomes.values()) == {None}, outcomes
    assert server.num_plannings == GRAPHS
    kinds = {"opening": 0, "lookup": 0, "planning": 0}
    for call in server.calls:
        if call.endswith("/attempts"):
            kinds["opening"] += 1
        elif call.startswith("GET"):
            kinds["lookup"] += 1
        elif call == "POST /v1/plans":
            kinds["planning"] += 1
    return kinds


@pytest.mark.parametrize("num_ranks", [2, 8, 64])
@pytest.mark.parametrize("mode", ["leader", "every_rank"])
def test_opening_costs_one_call_or_one_a_rank_and_a_plan_in_the_store_costs_none(mode, num_ranks):
    openings = 1 if mode == "leader" else num_ranks
    calls = calls_of(num_ranks, mode, together=False)
    assert calls == {"opening": openings, "lookup": GRAPHS, "planning": GRAPHS}


@pytest.mark.parametrize("num_ranks", [2, 16])
def test_ranks_that_compile_at_one_moment_cost_at_most_two_calls_each_and_graph(num_ranks):
    calls = calls_of(num_ranks, "leader", together=True)
    print(f"{num_ranks} ranks at one moment: {calls}")
    assert calls["opening"] == 1
    assert GRAPHS <= calls["planning"] <= calls["lookup"] <= GRAPHS * num_ranks
