"""The operator that compares a graph as it first runs: once where it agrees, every time where it does not."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import NoReturn

import pytest
import torch

from bucketplan_client.first_execution import comparing
from tests.support.gloo_pool import gloo_pool

DIGESTS = '{"fsdp": "aa"}'


class Refused(Exception):
    """What the comparison of these tests raises."""


def run_graph() -> None:
    """What a rewritten graph calls in front of its collectives."""
    torch.ops.bucketplan.first_execution(torch.empty(1, dtype=torch.uint8), DIGESTS)


def give_up(error: Exception) -> NoReturn:
    raise error


def test_graph_that_agreed_is_compared_once():
    compared: list[Mapping[str, str]] = []
    with comparing(compared.append, give_up):
        run_graph()
        run_graph()
    assert compared == [{"fsdp": "aa"}]


def test_graph_that_was_refused_is_refused_again_when_it_is_called_again():
    compared = 0

    def refuse(_: Mapping[str, str]) -> NoReturn:
        nonlocal compared
        compared += 1
        raise Refused

    with comparing(refuse, give_up):
        for _ in range(3):
            with pytest.raises(Refused):
                run_graph()
    assert compared == 3


def test_thread_that_comes_while_another_compares_waits_and_is_refused_as_well():
    entered, answered, second_is_past = threading.Event(), threading.Event(), threading.Event()
    outcomes: list[str] = []

    def refuse(_: Mapping[str, str]) -> NoReturn:
        entered.set()
        assert answered.wait(60)
        raise Refused

    def run() -> None:
        try:
            run_graph()
            outcomes.append("ran")
        except Refused:
            outcomes.append("refused")

    def run_second() -> None:
        run()
        second_is_past.set()

    with comparing(refuse, give_up):
        threads = [threading.Thread(target=run), threading.Thread(target=run_second)]
        threads[0].start()
        assert entered.wait(60)
        threads[1].start()
        # Nothing tells that a thread waits, so it is given the time in which one that does not would be past.
        went_past = second_is_past.wait(0.5)
        answered.set()
        for thread in threads:
            thread.join(60)
    assert not went_past
    assert outcomes == ["refused", "refused"]


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("when", ["before it said anything", "while it waited"])
def test_interrupt_during_the_comparison_is_told_to_the_others(when, odd):
    outcomes = gloo_pool(2).run("tests.client.pass_ranks:interrupted_first_execution", when, odd)
    assert outcomes[odd] == {"kind": "KeyboardInterrupt", "text": ""}
    assert outcomes[1 - odd]["kind"] == "RankFailed"
    assert f"rank {odd} said: it was interrupted before graph 0 ran: KeyboardInterrupt" in outcomes[1 - odd]["text"]
