"""Opening an attempt on threads over one store: one outcome for all ranks, whatever is missing, odd or away."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketplan_client.agreement import agree_in_time
from bucketplan_client.cache import PlanCache
from bucketplan_client.errors import (
    AgreementError,
    FallbackRefused,
    OpeningAborted,
    RankFailed,
    RanksDisagree,
    RanksMissing,
    ServerRefused,
    Where,
)
from bucketplan_client.opened_epochs import read_opened
from bucketplan_client.opening import Attempt, open_attempt
from bucketplan_client.opening_protocol import Hello, Opened, Outcome
from bucketplan_client.passes import FsdpBucketingPass, LocalPlans
from bucketplan_client.store import JobStore, drive
from bucketplan_client.testing import InMemoryPlanServer
from bucketplan_client.transport import PlanClient
from bucketplan_core import Options, make_plan
from bucketplan_core.attempt import AttemptRequest
from bucketplan_core.epoch import Epoch
from bucketplan_core.errors import DecodeError
from tests.client.ranks import run_ranks
from tests.client.requests import small_epoch, small_request
from tests.client.test_cache import overriding_plan
from tests.support.counts import count

RANKS = range(4)
GIVEN = {"bucket_cap_bytes": 10_000, "first_bucket_cap_bytes": 10_000}


def open_all(
    server: InMemoryPlanServer | None,
    *,
    ranks: Sequence[int] = RANKS,
    absent: Sequence[int] = (),
    use: Callable[[Attempt], Any] = lambda attempt: attempt,
    vary: Callable[[int], dict[str, Any]] = lambda rank: {},
    caches: dict[int, PlanCache] | None = None,
    store: Any = None,
    **options: Any,
) -> dict[int, Any]:
    """Open on every rank; what `use` made of each attempt, or what was raised."""

    def body(rank: int, job_store: JobStore) -> Any:
        client = None if server is None else server.client(rank=rank, deadline_s=0.3)
        arguments: dict[str, Any] = {
            "groups": {"fsdp": tuple(ranks)},
            "job": "llama",
            "options": GIVEN,
            "participants": tuple(ranks),
            "deadline_s": 20.0,
            "server_s": 1.0,
            "plan_s": 0.5,
            "store": job_store._base,
            "cache": None if caches is None else caches[rank],
            "rank": rank,
            "name": "0",
            "disabled": False,
            **options,
            **vary(rank),
        }
        with open_attempt(client, **arguments) as attempt:
            return use(attempt)

    return run_ranks([rank for rank in ranks if rank not in absent], body, store=store)


def one_text(outcomes: dict[int, Any]) -> str:
    """The one message that all ranks raised."""
    assert all(isinstance(error, OpeningAborted) for error in outcomes.values()), outcomes
    texts = {error.message for error in outcomes.values()}
    assert len(texts) == 1
    assert all(error.where.rank == rank for rank, error in outcomes.items())
    return texts.pop()


class TestCommit:
    @pytest.mark.parametrize("mode", ["leader", "every_rank"])
    def test_all_ranks_hold_one_epoch_and_one_uuid(self, mode):
        server = InMemoryPlanServer()
        attempts = open_all(server, mode=mode)
        assert len({attempt.uuid for attempt in attempts.values()}) == 1
        assert len({attempt.epoch.id for attempt in attempts.values()}) == 1
        assert {attempt.number for attempt in attempts.values()} == {1}
        assert attempts[3].options.bucket_cap_bytes == 10_000
        opens = [call for call in server.calls if call.endswith("/attempts")]
        assert len(opens) == (1 if mode == "leader" else len(RANKS))

    def test_restart_with_the_same_epoch_keeps_the_uuid(self):
        server = InMemoryPlanServer()
        first, second = open_all(server), open_all(server)
        assert first[0].uuid == second[0].uuid
        assert (first[0].number, second[0].number) == (1, 2)

    def test_activation_between_attempts_changes_the_uuid_and_delivers_the_bytes(self):
        server = InMemoryPlanServer()
        request = small_request()
        use = lambda attempt: (attempt.uuid, attempt.plans.plan(request).digest)  # noqa: E731  (one line where it is used)
        before = open_all(server, use=use)
        server.activate("llama", overriding_plan())
        after = open_all(server, use=use)
        assert {digest for _, digest in before.values()} == {make_plan(request).digest}
        assert {digest for _, digest in after.values()} == {overriding_plan().digest}
        assert before[0][0] != after[0][0]

    def test_rank_that_restarts_alone_joins_the_attempt(self):
        import torch.distributed as dist

        store = dist.HashStore()
        server = InMemoryPlanServer()
        attempts = open_all(server, store=store)
        again = open_all(server, ranks=RANKS, absent=[0, 1, 3], store=store)
        assert again[2].uuid == attempts[0].uuid

    def test_topology_is_one_value_a_role(self):
        attempts = open_all(InMemoryPlanServer(), vary=lambda rank: {})
        assert attempts[0].topology == {"fsdp": 1}


class TestRefused:
    def test_missing_rank_is_named(self):
        outcomes = open_all(InMemoryPlanServer(), absent=[2], deadline_s=0.5)
        assert "rank 2" in one_text(outcomes)
        assert outcomes[0].missing == (2,)

    def test_missing_leader_is_named_by_the_others(self):
        outcomes = open_all(InMemoryPlanServer(), absent=[0], deadline_s=0.2, server_s=0.1, grace_s=0.2)
        assert "rank 0" in one_text(outcomes)

    def test_other_options_on_one_rank_are_named(self):
        odd = {"options": {**GIVEN, "bucket_cap_bytes": 7}}
        outcomes = open_all(InMemoryPlanServer(), vary=lambda rank: odd if rank == 1 else {})
        text = one_text(outcomes)
        assert "rank 1 holds" in text
        assert "bucket_cap_bytes=7" in text
        assert outcomes[3].odd == (1,)

    def test_other_group_members_on_one_rank_are_named(self):
        odd = {"groups": {"fsdp": (0, 2, 1, 3)}}
        text = one_text(open_all(InMemoryPlanServer(), vary=lambda rank: odd if rank == 3 else {}))
        assert "rank 3" in text
        assert "'fsdp'" in text

    def test_refusal_of_the_server_is_no_outage(self):
        text = one_text(open_all(InMemoryPlanServer(), options={"strategy": "nonsense"}, on_unavailable="unbucketed"))
        assert "nonsense" in text

    def test_error_is_what_was_asked_for_without_a_server(self):
        text = one_text(open_all(InMemoryPlanServer(available=False), on_unavailable="error"))
        assert "could not be reached" in text


class TestWithoutServer:
    def test_local_gives_the_servers_bytes(self):
        request = small_request()
        plans = open_all(InMemoryPlanServer(available=False), use=lambda attempt: attempt.plans.plan(request).encoded)
        assert set(plans.values()) == {make_plan(request).encoded}

    @pytest.mark.parametrize("mode", ["leader", "every_rank"])
    def test_transport_that_never_returns_costs_the_server_and_not_the_start(self, mode):
        """The others wait for the leader no longer than the protocol says, and would abort without its outcome."""
        released = threading.Event()

        class Hanging(httpx.BaseTransport):
            def handle_request(self, request: httpx.Request) -> httpx.Response:
                released.wait(60.0)
                raise httpx.ConnectError("released", request=request)

        def body(rank: int, job_store: JobStore) -> tuple[Any, str]:
            with open_attempt(
                PlanClient("http://server", transport=Hanging()),
                groups={"fsdp": tuple(RANKS)},
                job="llama",
                options=GIVEN,
                participants=tuple(RANKS),
                mode=mode,
                deadline_s=20.0,
                server_s=0.3,
                store=job_store._base,
                rank=rank,
                name="0",
                disabled=False,
            ) as attempt:
                return attempt.source, attempt.uuid

        try:
            outcomes = run_ranks(list(RANKS), body)
            assert not released.is_set()
        finally:
            released.set()
        assert {source for source, _ in outcomes.values()} == {"local"}
        assert len(set(outcomes.values())) == 1

    def test_unbucketed_is_decided_for_all(self):
        attempts = open_all(InMemoryPlanServer(available=False), on_unavailable="unbucketed")
        assert {attempt.bucketed for attempt in attempts.values()} == {False}
        assert len({attempt.uuid for attempt in attempts.values()}) == 1

    def test_kill_switch_of_one_rank_is_everyones(self):
        attempts = open_all(InMemoryPlanServer(), vary=lambda rank: {"disabled": rank == 2})
        assert {attempt.bucketed for attempt in attempts.values()} == {False}
        assert "rank 2" in attempts[0].reason

    def test_kill_switch_thrown_after_the_opening_decides_nothing(self, monkeypatch):
        """One rank that stays away from what all have agreed on would make the others wait for it."""
        attempt = open_all(InMemoryPlanServer(), ranks=[0])[0]
        monkeypatch.setenv("BUCKETPLAN_DISABLE", "1")
        alone = FsdpBucketingPass(LocalPlans(), options=attempt.options)
        assert "BUCKETPLAN_DISABLE" in str(alone._reason_to_skip())
        assert "BUCKETPLAN_DISABLE" not in str(FsdpBucketingPass.for_attempt(attempt)._reason_to_skip())

    def test_kill_switch_in_the_environment_is_asked_when_the_attempt_opens(self, monkeypatch):
        monkeypatch.setenv("BUCKETPLAN_DISABLE", "1")
        attempts = open_all(InMemoryPlanServer(), disabled=None)
        assert {attempt.bucketed for attempt in attempts.values()} == {False}
        skipped = FsdpBucketingPass.for_attempt(attempts[0])._reason_to_skip()
        assert "BUCKETPLAN_DISABLE" in str(skipped) or "switched off on" in str(skipped)

    def test_job_restarts_from_the_caches_of_all_ranks_with_the_server_down(self, tmp_path: Path):
        server = InMemoryPlanServer()
        server.activate("llama", overriding_plan())
        request = small_request()
        caches = {rank: PlanCache(tmp_path / str(rank)) for rank in RANKS}
        use = lambda attempt: (attempt.source, attempt.uuid, attempt.plans.plan(request).digest)  # noqa: E731  (one line where it is used)
        first = open_all(server, caches=caches, use=use)
        server.available = False
        second = open_all(server, caches=caches, use=use, on_unavailable="error")
        assert {source for source, _, _ in first.values()} == {"server"}
        assert {source for source, _, _ in second.values()} == {"cache"}
        assert {entry[1:] for entry in first.values()} == {entry[1:] for entry in second.values()}

    def test_a_restart_finds_what_the_host_kept_without_being_told_of_a_cache(self, tmp_path: Path, monkeypatch):
        monkeypatch.setenv("BUCKETPLAN_CACHE", str(tmp_path))
        server, request = InMemoryPlanServer(), small_request()
        server.activate("llama", overriding_plan())

        def start() -> tuple[str | None, str, list[str]]:
            given: dict[str, Any] = {"groups": {"fsdp": (0,)}, "job": "llama", "store": dist.HashStore(), "rank": 0}
            with open_attempt(server.client(deadline_s=0.3), options=GIVEN, server_s=0.3, **given) as attempt:
                return attempt.source, attempt.plans.plan(request).digest, [*attempt.plans.taken]

        assert start() == ("server", overriding_plan().digest, ["override"])
        server.available = False
        assert start() == ("cache", overriding_plan().digest, ["override"])
        with open_attempt(
            server.client(deadline_s=0.3),
            groups={"fsdp": (0,)},
            rank=0,
            store=dist.HashStore(),
            cache=None,
            server_s=0.3,
        ) as attempt:
            assert attempt.source == "local"

    def test_one_host_without_the_epoch_is_enough_to_fall_back(self, tmp_path: Path):
        server = InMemoryPlanServer()
        caches = {rank: PlanCache(tmp_path / str(rank)) for rank in RANKS}
        open_all(server, caches=caches)
        server.available = False
        caches[2] = PlanCache(tmp_path / "new host")
        attempts = open_all(server, caches=caches)
        assert {attempt.source for attempt in attempts.values()} == {"local"}

    def test_cached_epoch_with_other_options_is_not_used(self, tmp_path: Path):
        server = InMemoryPlanServer()
        caches = {rank: PlanCache(tmp_path / str(rank)) for rank in RANKS}
        open_all(server, caches=caches)
        server.available = False
        attempts = open_all(server, caches=caches, options={**GIVEN, "prefetch": 3})
        assert {attempt.source for attempt in attempts.values()} == {"local"}
        assert attempts[0].options.prefetch == 3


class TestPlans:
    def test_server_that_dies_after_the_opening_changes_no_plan(self):
        server = InMemoryPlanServer()
        request = small_request()

        def use(attempt: Attempt) -> tuple[str, dict[str, int]]:
            attempt.compare("opened", "yes")
            server.available = False
            return attempt.plans.plan(request).digest, dict(attempt.plans.taken)

        results = open_all(server, use=use)
        assert {digest for digest, _ in results.values()} == {make_plan(request).digest}
        assert {source for _, taken in results.values() for source in taken} <= {"local", "store"}

    def test_plan_that_stands_in_the_store_is_adopted(self):
        """One rank got another plan for the signature first: everyone uses that one, whatever they were given."""
        request, other = small_request(), overriding_plan()

        def use(attempt: Attempt) -> str:
            if attempt.rank == 0:
                attempt.plans._adopt(other, attempt.where)
            attempt.compare("written", "yes")
            return attempt.plans.plan(request).digest

        assert set(open_all(InMemoryPlanServer(), use=use).values()) == {other.digest}

    def test_foreign_planner_is_refused_without_the_server(self):
        request = dataclasses.replace(
            small_request(), options=dataclasses.replace(small_request().options, planner="size/99")
        )

        def use(attempt: Attempt) -> Any:
            try:
                attempt.plans.plan(request)
            except FallbackRefused as error:
                return error.rule
            return None

        results = open_all(InMemoryPlanServer(available=False), use=use)
        assert set(results.values()) == {"foreign-planner"}

    def test_refused_request_is_raised_not_replaced(self):
        from bucketplan_core.collectives import Options as CoreOptions

        request = small_request().with_options(CoreOptions(strategy="module", planner="module/1"))

        def use(attempt: Attempt) -> Any:
            try:
                attempt.plans.plan(request)
            except ServerRefused as error:
                return error
            return None

        for rank, error in open_all(InMemoryPlanServer(), use=use).items():
            assert error.problem.slug == "cannot-plan"
            assert error.where == Where(rank=rank, job="llama", signature=request.signature, server="http://in-memory")


class TestCompare:
    def test_equal_fingerprints_pass(self):
        outcomes = open_all(InMemoryPlanServer(), use=lambda attempt: attempt.compare("pass", "same"))
        assert set(outcomes.values()) == {None}

    def test_other_fingerprint_is_named(self):
        def use(attempt: Attempt) -> None:
            attempt.compare("pass", "odd" if attempt.rank == 2 else "same")

        outcomes = open_all(InMemoryPlanServer(), use=use)
        assert all(isinstance(error, RanksDisagree) for error in outcomes.values())
        assert outcomes[0].odd_ranks == (2,)
        assert outcomes[0].what == "pass"

    @pytest.mark.parametrize("odd", [0, 2])
    def test_rank_that_cannot_come_is_named_with_its_failure_at_once(self, odd):
        def use(attempt: Attempt) -> None:
            if attempt.rank == odd:
                attempt.withdraw("pass", ValueError("no compiler here"))
                raise ValueError("no compiler here")
            attempt.compare("pass", "same", deadline_s=600.0)

        outcomes = open_all(InMemoryPlanServer(), use=use)
        assert isinstance(outcomes.pop(odd), ValueError)
        assert all(isinstance(error, RankFailed) for error in outcomes.values()), outcomes
        assert {error.failures[odd] for error in outcomes.values()} == {
            "it left the comparison of the pass: ValueError: no compiler here"
        }

    def test_rank_that_is_interrupted_there_tells_the_others(self, monkeypatch):
        wait = JobStore.wait

        def interrupted(store: JobStore, keys: Any, until: float) -> Any:
            if store.where.rank == 2 and any(key.startswith("compare/") for key in keys):
                raise KeyboardInterrupt
            return wait(store, keys, until)

        monkeypatch.setattr(JobStore, "wait", interrupted)
        told: list[BaseException] = []

        def use(attempt: Attempt) -> None:
            try:
                attempt.compare("pass", "same", deadline_s=600.0)
            except KeyboardInterrupt as error:
                told.append(error)

        outcomes = open_all(InMemoryPlanServer(), use=use)
        assert len(told) == 1
        assert outcomes.pop(2) is None
        assert all("KeyboardInterrupt" in error.failures[2] for error in outcomes.values()), outcomes

    def test_missing_rank_costs_no_more_than_the_deadline(self):
        elapsed: dict[int, float] = {}

        def use(attempt: Attempt) -> None:
            if attempt.rank == 1:
                return
            drive_until = agree_in_time(
                attempt._report_on("same"), key="k", deadline_s=1.0, where=attempt.where, what="pass"
            )
            longest: list[float] = []
            first: list[float] = []

            def noted(store: JobStore, keys: Any, until: float) -> Any:
                longest.append(until)
                return JobStore.wait(store, keys, until)

            class Noting(JobStore):
                def wait(self, keys: Any, until: float) -> Any:
                    return noted(self, keys, until)

            first.append(time.monotonic())
            try:
                drive(drive_until, Noting(attempt.store._base, prefix=attempt.store.prefix))
            finally:
                elapsed[attempt.rank] = max(longest) - first[0]

        outcomes = open_all(InMemoryPlanServer(), use=use)
        assert isinstance(outcomes[0], RanksMissing)
        # What they were ready to wait until, and not how long it took.
        assert max(elapsed.values()) < 1.5

    def test_first_execution_compares_within_each_group(self):
        def use(attempt: Attempt) -> None:
            attempt.compare_first_execution("forward", {"fsdp": "x" if attempt.rank == 1 else "d"})

        outcomes = open_all(InMemoryPlanServer(), use=use)
        assert all(isinstance(error, AgreementError) for error in outcomes.values())


class TestDocuments:
    def test_hello_comes_back(self):
        hello = Hello(rank=0, capture=1, rewriter=1, schema=1, groups={"fsdp": (0, 1)}, held=("a",), host="h")
        found = Hello.decode(hello.encoded())
        assert (found.groups, found.held, found.host) == (hello.groups, hello.held, hello.host)

    def test_outcome_comes_back(self):
        opened = Opened(epoch=small_epoch(), attempt=3)
        outcome = Outcome(kind="commit", nonce="n", opened=opened, missing=(1,), odd=(2,))
        assert Outcome.decode(outcome.encoded()) == outcome

    @pytest.mark.soak
    @settings(max_examples=count(test=200, soak=10_000))
    @given(at=st.integers(0, 10_000), change=st.integers(1, 255), cut=st.booleans())
    def test_damaged_outcome_is_refused_with_a_decode_error(self, at, change, cut):
        data = Outcome(kind="commit", opened=Opened(epoch=small_epoch(), attempt=3), reason="because").encoded()
        at %= len(data)
        damaged = data[:at] if cut else data[:at] + bytes([data[at] ^ change]) + data[at + 1 :]
        with contextlib.suppress(DecodeError):
            Outcome.decode(damaged)

    def test_answer_whose_epoch_is_not_its_id_is_refused(self):
        tree = {"attempt": 1, "epoch": small_epoch().to_wire(), "epoch_id": "0" * 64, "overrides": []}
        with pytest.raises(DecodeError, match="hashes to"):
            read_opened(tree)

    def test_answer_without_the_bytes_of_an_override_is_refused(self):
        epoch = small_epoch(overrides={small_request().signature: overriding_plan().digest})
        tree = {"attempt": 1, "epoch": epoch.to_wire(), "epoch_id": epoch.id, "overrides": []}
        with pytest.raises(DecodeError, match="missing"):
            read_opened(tree)

    def test_defaults_without_a_server_are_complete(self):
        attempts = open_all(None)
        assert isinstance(attempts[0].options, Options)
        assert isinstance(attempts[0].epoch, Epoch)
        assert AttemptRequest  # the request document has its tests in core
