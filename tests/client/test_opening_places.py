"""Openings of several sets of participants on one store: each has its own outcome, and who errs is told where."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist

from bucketplan_client import opening
from bucketplan_client.arguments import BadArgument
from bucketplan_client.errors import OpeningAborted
from bucketplan_client.opening import Attempt, open_attempt
from bucketplan_client.opening_documents import Outcome
from bucketplan_client.opening_places import PREFIX, Place
from bucketplan_client.store import JobStore
from tests.client.ranks import run_ranks

SHORT = {"deadline_s": 1.0, "server_s": 0.1, "grace_s": 0.2}
LONG = {"deadline_s": 600.0, "server_s": 60.0, "grace_s": 10.0}


def opened(rank: int, participants: tuple[int, ...], store: Any, **options: Any) -> Attempt:
    arguments: dict[str, Any] = {"groups": {"fsdp": participants}, "job": "llama", **LONG, **options}
    with open_attempt(None, participants=participants, rank=rank, store=store, disabled=False, **arguments) as attempt:
        return attempt


class TestSubGroups:
    @pytest.mark.parametrize("pair", [(0,), (0, 1), (2, 3), (0, 3)])
    def test_attempt_of_some_ranks_is_not_that_of_all(self, pair):
        """Whoever leads, and however many of their own some ranks open first, all of them meet in one opening."""
        store = dist.HashStore()

        def body(rank: int, _: JobStore) -> list[Attempt]:
            first = [opened(rank, pair, store, on_unavailable="unbucketed") for _ in range(2) if rank in pair]
            together = [opened(rank, (0, 1, 2, 3), store, options={"bucket_cap_bytes": 7}) for _ in range(2)]
            last = [opened(rank, pair, store, on_unavailable="unbucketed") for _ in range(1) if rank in pair]
            return [*first, *last, *together]

        outcomes = run_ranks(range(4), body)
        assert not any(isinstance(found, Exception) for found in outcomes.values()), outcomes
        for turn in (-2, -1):
            assert {attempts[turn].options.bucket_cap_bytes for attempts in outcomes.values()} == {7}
            assert len({attempts[turn].store.prefix for attempts in outcomes.values()}) == 1
        assert len({attempts[turn].store.prefix for attempts in outcomes.values() for turn in (-2, -1)}) == 2
        assert {attempt.bucketed for rank in pair for attempt in outcomes[rank][:3]} == {False}

    def test_outcome_of_other_participants_is_not_adopted(self):
        store = dist.HashStore()
        foreign = Outcome(kind="unbucketed", nonce="n", participants="ab" * 32, reason="it is of others")
        place = Place(job="llama", participants=(0, 1), name="n")
        JobStore(store, prefix=PREFIX).put_once(f"{place.key}/outcome", foreign.encoded())
        outcomes = run_ranks(range(2), lambda rank, _: opened(rank, (0, 1), store, name="n"))
        assert all(isinstance(error, OpeningAborted) for error in outcomes.values()), outcomes
        assert "outcome.participants" in str(outcomes[1])
        assert "ranks 0-1" in str(outcomes[1])


class TestOtherParticipants:
    def test_rank_with_others_ends_all_with_one_error_that_says_so(self):
        """Rank 2 forgets rank 3. It waits for rank 0 in an opening of its own, which ends with that of the others."""
        store = dist.HashStore()
        all_ranks = (0, 1, 2, 3)
        outcomes = run_ranks(
            all_ranks,
            lambda rank, _: (
                opened(rank, (0, 1, 2), store, **LONG) if rank == 2 else opened(rank, all_ranks, store, **SHORT)
            ),
        )
        assert all(isinstance(error, OpeningAborted) for error in outcomes.values()), outcomes
        (text,) = {error.message for error in outcomes.values()}
        assert "nothing came from rank 2" in text
        assert "rank 2 was last seen to open with job 'llama', participants ranks 0-2" in text
        assert "this rank opens with job 'llama', participants ranks 0-3" in text
        assert "Give the same job, participants and name" in outcomes[0].remedy
        assert {error.where.rank for error in outcomes.values()} == set(all_ranks)

    def test_leader_with_others_is_named_to_those_it_left_out(self):
        store = dist.HashStore()

        def body(rank: int, _: JobStore) -> Attempt:
            participants = (0, 1) if rank < 2 else (0, 1, 2)
            return opened(rank, participants, store, **(LONG if rank < 2 else SHORT))

        outcomes = run_ranks(range(3), body)
        assert outcomes[0].uuid == outcomes[1].uuid
        assert "rank 0 was last seen to open with job 'llama', participants ranks 0-1" in outcomes[2].message

    def test_opening_of_another_job_is_told_apart_and_left_alone(self):
        store = dist.HashStore()
        done = threading.Event()

        def body(rank: int, _: JobStore) -> Any:
            if rank == 1:
                arguments: dict[str, Any] = {"groups": {"fsdp": (0, 1)}, "rank": 1, "store": store, **LONG}
                return open_attempt(None, job="other", **arguments)
            with pytest.raises(OpeningAborted) as caught:
                opened(0, (0, 1), store, **SHORT)
            done.set()
            with open_attempt(None, job="other", groups={"fsdp": (0, 1)}, rank=0, store=store, **LONG) as attempt:
                return caught.value, attempt

        outcomes = run_ranks(range(2), body)
        error, attempt = outcomes[0]
        assert "rank 1 was last seen to open with job 'other'" in error.message
        assert attempt.uuid == outcomes[1].uuid


class TestNoPlace:
    @pytest.mark.parametrize(
        ("variable", "value"), [("BUCKETPLAN_JOB", "."), ("BUCKETPLAN_JOB", "\udcff"), ("SLURM_JOB_NAME", "..")]
    )
    def test_bad_name_of_the_job_is_refused_here_and_read_by_those_who_miss_the_rank(
        self, monkeypatch, variable, value
    ):
        for name in ("BUCKETPLAN_JOB", "TORCHELASTIC_RUN_ID", "SLURM_JOB_NAME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(variable, value)
        store = dist.HashStore()

        def body(rank: int, _: JobStore) -> Attempt:
            if rank == 0:
                return opened(rank, (0, 1), store, **SHORT)
            return open_attempt(None, groups={"fsdp": (0, 1)}, rank=1, store=store, **LONG)

        outcomes = run_ranks(range(2), body)
        assert isinstance(outcomes[1], BadArgument)
        assert outcomes[1].option == variable
        assert outcomes[1].where.rank == 1
        assert f"rank 1 could not open: {variable} is" in outcomes[0].message
        assert outcomes[0].remedy == "Correct that on rank 1"

    def test_bad_job_without_other_ranks_is_refused_without_a_store(self, monkeypatch):
        monkeypatch.setenv("BUCKETPLAN_JOB", ".")
        with pytest.raises(BadArgument, match="BUCKETPLAN_JOB"):
            open_attempt(None, groups={"fsdp": (0,)}, rank=0)


@pytest.mark.parametrize("odd", [0, 1])
def test_host_that_is_no_text_is_named_on_all_at_once(monkeypatch, odd):
    bad = threading.local()
    host = opening._host

    def named() -> str:
        # The environment is that of all threads.
        monkeypatch.setenv("BUCKETPLAN_HOST", getattr(bad, "host", "h"))
        return host()

    monkeypatch.setattr(opening, "_host", named)
    store = dist.HashStore()
    other_named = threading.Event()

    def body(rank: int, _: JobStore) -> Attempt:
        if rank == odd:
            bad.host = "h\udcff"
            assert other_named.wait(20)
        # Openings are counted by process, and those of other tests were not as many on both ranks.
        return opened(rank, (0, 1), store, job=f"host {odd}")

    def put(job_store: JobStore, key: str, value: bytes) -> None:
        write(job_store, key, value)
        if key.endswith(f"/hello/{1 - odd}"):
            other_named.set()

    write = JobStore.put
    monkeypatch.setattr(JobStore, "put", put)
    outcomes = run_ranks(range(2), body)
    assert isinstance(outcomes[odd], BadArgument)
    assert outcomes[odd].option == "BUCKETPLAN_HOST"
    other = outcomes[1 - odd]
    assert isinstance(other, OpeningAborted)
    assert f"rank {odd} left it: BUCKETPLAN_HOST is" in other.message
    assert other.odd == (odd,)
