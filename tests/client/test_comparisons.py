"""What ranks compare in an opened attempt: each call anew, whatever was compared under the same name before."""

from __future__ import annotations

from typing import Any

import pytest

from bucketplan_client.compiled_attempt import install_attempt
from bucketplan_client.errors import RankFailed, RanksDisagree
from bucketplan_client.opening import Attempt
from bucketplan_client.testing import InMemoryPlanServer, MemoryAnswer
from bucketplan_core.plan import Plan
from tests.client.test_opening import RANKS, open_all
from tests.support.hook_graphs import gathers


def outcome_of(action: Any) -> str:
    try:
        action()
    except (RanksDisagree, RankFailed) as error:
        return type(error).__name__
    return "agreed"


def test_second_comparison_is_not_answered_with_the_verdict_of_the_first() -> None:
    def use(attempt: Attempt) -> list[str]:
        odd = str(attempt.rank == 3)
        values = ["same", odd, "same", odd]
        return [outcome_of(lambda: attempt.compare("pass", value, deadline_s=20.0)) for value in values]  # noqa: B023  # called at once

    assert list(open_all(None, use=use).values()) == [["agreed", "RanksDisagree"] * 2 for _ in RANKS]


def test_a_withdrawal_ends_the_comparison_that_its_rank_does_not_come_to_and_no_later_one() -> None:
    def use(attempt: Attempt) -> list[str]:
        found = ["agreed"] if attempt.rank == 3 else []
        if attempt.rank == 3:
            attempt.withdraw("pass", ValueError("not here"))
        else:
            found.append(outcome_of(lambda: attempt.compare("pass", "same", deadline_s=20.0)))
        return [*found, outcome_of(lambda: attempt.compare("pass", "same", deadline_s=20.0))]

    outcomes = open_all(None, use=use)
    assert [outcomes[rank] for rank in (0, 1, 2)] == [["RankFailed", "agreed"]] * 3
    assert outcomes[3][1] == "agreed"


def test_first_execution_is_compared_again_under_the_same_slot() -> None:
    def use(attempt: Attempt) -> list[str]:
        given = [{"fsdp": "a" * 64}, {"fsdp": ("b" if attempt.rank else "c") * 64}]
        return [
            outcome_of(lambda: attempt.compare_first_execution("graph", digests, deadline_s=20.0))  # noqa: B023  # called at once
            for digests in given
        ]

    assert list(open_all(None, use=use).values()) == [["agreed", "RanksDisagree"] for _ in RANKS]


def test_reports_of_a_second_installation_have_numbers_of_their_own() -> None:
    """And the rank of the attempt, whatever torch.distributed calls this process."""
    server = InMemoryPlanServer()

    def use(attempt: Attempt) -> None:
        assert attempt.plans is not None
        for num_params in (3, 4, 4):
            with install_attempt(attempt, on_error="raise") as installed:
                installed.bucketing(gathers(num_params).graph)
                assert isinstance(installed.graphs[0].plan, Plan)

    outcomes = open_all(server, ranks=(5,), use=use)
    assert outcomes == {5: None}
    graphs = [report for report in server.reports if report.slot == "forward"]
    assert [(report.rank, report.ordinal) for report in graphs] == [(5, 0), (5, 1)]


@pytest.mark.parametrize("num_ranks", [64])
def test_ranks_that_each_have_another_option_are_named_in_a_reason_that_can_be_read(num_ranks: int) -> None:
    ranks = range(num_ranks)
    outcomes = open_all(
        None,
        ranks=ranks,
        vary=lambda rank: {"options": {"memory_budget_bytes": 10**9 + rank, "exclude_" + "x" * 600: "y" * 600}},
    )
    texts = {error.message for error in outcomes.values()}
    assert len(texts) == 1
    text = texts.pop()
    assert "do not agree on the options: rank 0 holds {memory_budget_bytes=1000000000}" in text
    assert "and 60 more values" in text
    assert {error.odd for error in outcomes.values()} == {tuple(range(1, num_ranks))}


def test_a_reason_longer_than_any_rank_reads_is_cut_and_the_choice_of_the_job_holds() -> None:
    """A gateway may answer with a page of any length."""

    class Talkative(InMemoryPlanServer):
        def answer(self, *arguments: Any) -> Any:
            body = b'{"title": "' + b"x" * 20_000 + b'"}'
            return MemoryAnswer(500, {"content-type": "application/problem+json"}, body)

    outcomes = open_all(Talkative(), on_unavailable="local", use=lambda attempt: (attempt.source, attempt.reason))
    assert {source for source, _ in outcomes.values()} == {"local"}
    assert "more characters]" in outcomes[0][1]
