"""Lockstep comparison: every rank of a group gets the same verdict, and it names who is odd, missing or failed."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from bucketplan_client.agreement import GroupView, Lockstep, Report, describe_difference
from bucketplan_client.errors import AgreementError, RankFailed, RanksDisagree, RanksMissing
from bucketplan_client.store import JobStore
from tests.client.ranks import run_ranks
from tests.client.requests import small_request

Groups = Mapping[str, Sequence[int]]


def report_of(
    rank: int,
    groups: Groups,
    *,
    digest: str = "d",
    request: Any = None,
    failure: str | None = None,
    decision: str | None = None,
) -> Report:
    described = request or small_request()
    return Report(
        rank=rank,
        groups=tuple(
            GroupView(role=role, members=tuple(members), digest=None if failure else digest)
            for role, members in groups.items()
        ),
        signature=None if failure else described.signature,
        decision=decision,
        failure=failure,
        request=None if failure else lambda: described.encoded,
    )


def agree_all(
    reports: Sequence[Report], *, deadline_s: float = 20.0, absent: Sequence[int] = ()
) -> dict[int, Exception | None]:
    by_rank = {report.rank: report for report in reports}

    def body(rank: int, store: JobStore) -> None:
        Lockstep(store, deadline_s=deadline_s, grace_s=0.5, name="pass").agree(by_rank[rank])

    return run_ranks([rank for rank in by_rank if rank not in absent], body)


def messages(outcomes: Mapping[int, Exception | None]) -> set[str]:
    return {"" if error is None else getattr(error, "message", repr(error)) for error in outcomes.values()}


class TestOneGroup:
    def test_equal_digests_agree(self):
        outcomes = agree_all([report_of(rank, {"fsdp": range(8)}) for rank in range(8)])
        assert set(outcomes.values()) == {None}

    def test_odd_rank_is_named_on_every_rank_alike(self):
        odd = small_request(num_params=3)
        outcomes = agree_all(
            [
                report_of(
                    rank, {"fsdp": range(6)}, digest="x" if rank == 4 else "d", request=odd if rank == 4 else None
                )
                for rank in range(6)
            ]
        )
        assert len(messages(outcomes)) == 1
        error = outcomes[0]
        assert isinstance(error, RanksDisagree)
        assert error.odd_ranks == (4,)
        assert error.role == "fsdp"
        assert "rank 4 holds x" in str(error)
        assert "candidates" in (error.difference or "")
        assert "on rank 4" in (error.difference or "")

    def test_two_plans_for_one_graph_say_so(self):
        outcomes = agree_all([report_of(rank, {"fsdp": range(2)}, digest=str(rank)) for rank in range(2)])
        error = outcomes[1]
        assert isinstance(error, RanksDisagree)
        assert "different plans for one graph" in str(error)

    def test_two_orders_of_two_groups_are_two_plans_although_each_group_is_the_same(self):
        groups = {"fsdp": range(2), "fsdp_expert": range(2)}
        outcomes = agree_all([report_of(rank, groups, decision="dense first" if rank else "x") for rank in range(2)])
        assert len(messages(outcomes)) == 1
        error = outcomes[0]
        assert isinstance(error, RanksDisagree)
        assert "different plans for one graph" in str(error)

    def test_ranks_of_other_graphs_may_hold_other_plans(self):
        stages = (small_request(), small_request(num_params=3))
        reports = [
            report_of(rank, {"dp": range(2)}, request=stages[rank], decision=f"stage {rank}") for rank in range(2)
        ]
        assert set(agree_all(reports).values()) == {None}

    def test_member_lists_must_be_equal(self):
        members = {0: (0, 1, 2), 1: (0, 2, 1), 2: (0, 1, 2)}
        reports = [report_of(rank, {"fsdp": members[rank]}) for rank in range(3)]
        # Another order is another group instance, so this is found as ranks that never came.
        outcomes = agree_all(reports, deadline_s=0.5)
        assert all(isinstance(error, AgreementError) for error in outcomes.values())

    def test_failed_rank_takes_part_and_is_named_with_its_reason(self):
        reports = [
            report_of(rank, {"fsdp": range(4)}, failure="ValueError: bad scope" if rank == 2 else None)
            for rank in range(4)
        ]
        outcomes = agree_all(reports)
        assert len(messages(outcomes)) == 1
        error = outcomes[0]
        assert isinstance(error, RankFailed)
        assert error.failures == {2: "ValueError: bad scope"}

    @pytest.mark.parametrize("absent", [0, 3], ids=["the collector", "a member"])
    def test_rank_that_never_comes_is_named_at_the_deadline(self, absent):
        reports = [report_of(rank, {"fsdp": range(4)}) for rank in range(4)]
        outcomes = agree_all(reports, deadline_s=0.3, absent=[absent])
        assert len(messages(outcomes)) == 1
        error = outcomes[1]
        assert isinstance(error, RanksMissing)
        assert error.missing == (absent,)

    def test_late_rank_adopts_the_verdict(self):
        """The collector had given up on it; when it comes it must not think that all is well."""
        late = threading.Event()

        def body(rank: int, store: JobStore) -> None:
            if rank == 1:
                late.wait()
            try:
                Lockstep(store, deadline_s=0.2, name="pass").agree(report_of(rank, {"fsdp": range(2)}))
            finally:
                late.set()

        outcomes = run_ranks(range(2), body)
        assert len(messages(outcomes)) == 1
        assert isinstance(outcomes[1], RanksMissing)

    def test_calls_are_counted(self):
        def body(rank: int, store: JobStore) -> list[str]:
            lockstep = Lockstep(store, deadline_s=20.0, name="pass")
            seen = []
            for call in range(5):
                digest = "x" if rank == 1 and call == 3 else "d"
                try:
                    lockstep.agree(report_of(rank, {"fsdp": range(3)}, digest=digest))
                    seen.append("agreed")
                except RanksDisagree as error:
                    seen.append(f"odd {error.odd_ranks}")
            return seen

        outcomes = run_ranks(range(3), body)
        assert set(map(tuple, outcomes.values())) == {("agreed", "agreed", "agreed", "odd (1,)", "agreed")}


class TestSeveralGroups:
    def test_dense_and_expert_groups_with_other_members_agree(self):
        outcomes = agree_all(
            [report_of(rank, {"fsdp": range(8), "fsdp_expert": (rank % 4, rank % 4 + 4)}) for rank in range(8)]
        )
        assert set(outcomes.values()) == {None}

    def test_two_roles_with_the_same_members_are_compared_each(self):
        def report(rank: int) -> Report:
            digest = "odd" if rank == 1 else "d"
            views = (
                GroupView(role="fsdp", members=(0, 1), digest="d"),
                GroupView(role="fsdp_expert", members=(0, 1), digest=digest),
            )
            return Report(rank=rank, groups=views, signature="s")

        outcomes = agree_all([report(rank) for rank in range(2)])
        assert {error.role for error in outcomes.values()} == {"fsdp_expert"}

    def test_failure_in_one_expert_group_stops_every_rank_of_the_dense_group(self):
        reports = [
            report_of(
                rank,
                {"fsdp": range(8), "fsdp_expert": (rank % 4, rank % 4 + 4)},
                failure="out of memory" if rank == 5 else None,
            )
            for rank in range(8)
        ]
        outcomes = agree_all(reports)
        assert all(isinstance(error, RankFailed) for error in outcomes.values())
        assert all("out of memory" in str(error) for error in outcomes.values())

    def test_failure_in_a_column_reaches_the_whole_mesh(self):
        """Two rows of three: rank 4 differs in its column only, and ranks 0 and 5 share no group with it but a rank."""
        rows, columns = ((0, 1, 2), (3, 4, 5)), ((0, 3), (1, 4), (2, 5))
        reports = []
        for rank in range(6):
            row = next(members for members in rows if rank in members)
            column = next(members for members in columns if rank in members)
            views = (
                GroupView(role="fsdp", members=row, digest="d"),
                GroupView(role="replicate", members=column, digest="odd" if rank == 4 else "d"),
            )
            reports.append(Report(rank=rank, groups=views, signature="s"))
        outcomes = agree_all(reports)
        assert all(isinstance(error, AgreementError) for error in outcomes.values())

    def test_pipeline_stages_do_not_meet(self):
        stages = ((0, 1), (2, 3))
        reports = [
            report_of(rank, {"fsdp": stage}, digest=f"stage {number}", request=small_request(num_params=number + 2))
            for number, stage in enumerate(stages)
            for rank in stage
        ]
        assert set(agree_all(reports).values()) == {None}


class TestDifference:
    def test_first_field_is_named_with_both_values(self):
        text = describe_difference(small_request().encoded, small_request(dtype="bfloat16").encoded, 0, 3)
        assert "candidates.dtype[0]" in text
        assert "'float32' on rank 0, 'bfloat16' on rank 3" in text

    def test_equal_descriptions_differ_nowhere(self):
        assert describe_difference(small_request().encoded, small_request().encoded, 0, 1) == ""

    def test_unreadable_description_is_no_crash(self):
        assert "cannot be read" in describe_difference(small_request().encoded, b"\xc1", 0, 1)
