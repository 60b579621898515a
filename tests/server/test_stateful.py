"""Operators and job starts in any order and at once, against a model: no attempt sees two plans or two epochs."""

import asyncio
import itertools
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from bucketplan_core.attempt import AttemptRequest, RankReport
from bucketplan_core.epoch import Epoch
from bucketplan_core.plan import Plan
from bucketplan_core.wire import pack, unpack
from tests.support import counts
from tests.support.documents import MSGPACK, plan_body, profile_of, small_request
from tests.support.inprocess import InProcess, in_process
from tests.support.postgres import running_postgres

_numbers = itertools.count(1)
JOBS = ("one", "two")
EVERYONE = ""
CHANGES = ({"prefetch": 2}, {"strategy": "none"}, {"bucket_cap_bytes": 1_000_000})


class Fleet(RuleBasedStateMachine):
    """One run: two signatures and two jobs that no other run touches."""

    servers: InProcess

    @initialize()
    def begin(self) -> None:
        number = next(_numbers)
        self.requests = [small_request(2 * number), small_request(2 * number + 1)]
        self.jobs = [f"{job}-{number}" for job in JOBS]
        self.digests: list[list[str]] = [[], []]
        self.active: list[dict[str, int]] = [{}, {}]
        self.reported: dict[str, set[int]] = {job: set() for job in self.jobs}
        self.attempts: list[tuple[str, str, Epoch]] = []
        self.replica = 0
        for index in range(2):
            self.add(index, self.run(self.post(index, 0)))

    def run(self, work):
        self.replica += 1
        return self.servers.run(work)

    async def call(self, method: str, path: str, tree: object = None, *, status: tuple[int, ...] = (200, 201), **more):
        content = more.pop("content", None) or (None if tree is None else pack(tree))
        replica = more.pop("replica", self.replica)
        answer = await self.servers.call(method, path, replica=replica, content=content, **MSGPACK, **more)
        assert answer.status_code in status, (path, answer.status_code, answer.content[:500])
        return answer

    async def both(self, *work):
        return await asyncio.gather(*work)

    def add(self, index: int, plan: str) -> None:
        self.digests[index].append(plan)
        self.active[index][EVERYONE] = 1

    async def post(self, index: int, flops: int, *, replica: int = 0) -> str:
        request = self.requests[index]
        body = plan_body(request, profile_of(request, flops=flops))
        answer = await self.call("POST", "/v1/plans", content=body, replica=replica)
        return Plan.decode(answer.content, expected_signature=request.signature).digest

    async def replan(self, index: int, change: int) -> int:
        path = f"/v1/plans/{self.requests[index].signature}/revisions"
        answer = await self.call("POST", path, {"options": CHANGES[change], "reason": "try"})
        return unpack(answer.content)["revision"]

    async def digest_of(self, index: int, revision: int) -> str:
        answer = await self.call("GET", f"/v1/plans/{self.requests[index].signature}/revisions/{revision}")
        return Plan.decode(answer.content).digest

    async def activate(self, index: int, job: str, revision: int | None, *, expected: int | None = None) -> bool:
        tree = {"reason": "decided", "revision": revision}
        tree |= {"job": job} if job else {}
        tree |= {} if expected is None else {"expected": expected}
        path = f"/v1/plans/{self.requests[index].signature}/activate"
        return (await self.call("POST", path, tree, status=(200, 409))).status_code == 200

    async def open(self, job: str, key: str, *, replica: int = 0) -> Epoch:
        tree = AttemptRequest(key=key, participants={"fsdp": ((0, 1),)}).to_wire()
        answer = await self.call("POST", f"/v1/jobs/{job}/attempts", tree, replica=replica)
        read = unpack(answer.content)
        epoch = Epoch.from_wire(read["epoch"])
        assert epoch.id == read["epoch_id"]
        return epoch

    def expected_overrides(self, job: str) -> dict[str, str]:
        found = {}
        for index, request in enumerate(self.requests):
            if index in self.reported[job] or job in self.active[index]:
                revision = self.active[index].get(job, self.active[index][EVERYONE])
                if self.digests[index][revision - 1] != self.digests[index][0]:
                    found[request.signature] = self.digests[index][revision - 1]
        return found

    def opened(self, job: str, key: str, epoch: Epoch, *possible: dict[str, str]) -> None:
        assert {each.signature: each.digest for each in epoch.overrides} in possible
        self.attempts.append((job, key, epoch))

    @rule(index=st.integers(0, 1), change=st.integers(0, 2))
    def an_operator_replans(self, index: int, change: int) -> None:
        number = self.run(self.replan(index, change))
        assert number == len(self.digests[index]) + 1
        self.digests[index].append(self.run(self.digest_of(index, number)))

    @rule(index=st.integers(0, 1), job=st.sampled_from([EVERYONE, *JOBS]), data=st.data())
    def an_operator_activates(self, index: int, job: str, data: st.DataObject) -> None:
        name = self.named(job)
        revision = data.draw(st.integers(1, len(self.digests[index])), label="revision")
        assert self.run(self.activate(index, name, revision))
        self.active[index][name] = revision

    @rule(index=st.integers(0, 1), job=st.sampled_from(JOBS))
    def an_operator_takes_a_choice_back(self, index: int, job: str) -> None:
        assert self.run(self.activate(index, self.named(job), None))
        self.active[index].pop(self.named(job), None)

    @rule(index=st.integers(0, 1), data=st.data())
    def two_operators_activate_at_once(self, index: int, data: st.DataObject) -> None:
        before = self.active[index][EVERYONE]
        others = [each for each in range(1, len(self.digests[index]) + 1) if each != before]
        if not others:
            return
        wanted = [data.draw(st.sampled_from(others)) for _ in range(2)]
        done = self.run(self.both(*(self.activate(index, EVERYONE, each, expected=before) for each in wanted)))
        assert sorted(done) == [False, True]
        self.active[index][EVERYONE] = wanted[done.index(True)]

    @rule(job=st.sampled_from(JOBS))
    def a_job_starts(self, job: str) -> None:
        name, key = self.named(job), f"k{len(self.attempts)}"
        epoch = self.run(self.open(name, key))
        self.opened(name, key, epoch, self.expected_overrides(name))

    @rule(job=st.sampled_from(JOBS))
    def every_rank_opens_at_once(self, job: str) -> None:
        name, key = self.named(job), f"k{len(self.attempts)}"
        epochs = self.run(self.both(*(self.open(name, key, replica=number) for number in range(4))))
        assert len({epoch.id for epoch in epochs}) == 1
        self.opened(name, key, epochs[0], self.expected_overrides(name))

    @rule(index=st.integers(0, 1), job=st.sampled_from(JOBS), own=st.booleans(), data=st.data())
    def a_job_starts_during_an_activation(self, index: int, job: str, own: bool, data: st.DataObject) -> None:
        name, key = self.named(job), f"k{len(self.attempts)}"
        revision = data.draw(st.integers(1, len(self.digests[index])), label="revision")
        before = self.expected_overrides(name)
        first = data.draw(st.booleans(), label="activation first")
        # A draw may end the run, and what was prepared before it would never be awaited.
        work = [self.open(name, key), self.activate(index, name if own else EVERYONE, revision)]
        done = self.run(self.both(*(reversed(work) if first else work)))
        self.active[index][name if own else EVERYONE] = revision
        self.opened(name, key, done[1 if first else 0], before, self.expected_overrides(name))

    @rule(index=st.integers(0, 1), job=st.sampled_from(JOBS), change=st.integers(0, 2))
    def a_job_starts_during_a_replan(self, index: int, job: str, change: int) -> None:
        name, key = self.named(job), f"k{len(self.attempts)}"
        number, epoch = self.run(self.both(self.replan(index, change), self.open(name, key)))
        self.digests[index].append(self.run(self.digest_of(index, number)))
        self.opened(name, key, epoch, self.expected_overrides(name))

    @rule(index=st.integers(0, 1), flops=st.integers(1, 9), data=st.data())
    def a_rank_binds_another_profile_during_an_activation(self, index: int, flops: int, data: st.DataObject) -> None:
        revision = data.draw(st.integers(1, len(self.digests[index])), label="revision")
        work = [self.post(index, flops, replica=number) for number in range(2)]
        *found, done = self.run(self.both(*work, self.activate(index, EVERYONE, revision)))
        assert done
        assert set(found) <= set(self.digests[index])
        self.active[index][EVERYONE] = revision

    @rule(index=st.integers(0, 1), data=st.data())
    def a_rank_reports(self, index: int, data: st.DataObject) -> None:
        if not self.attempts:
            return
        job, key, _ = data.draw(st.sampled_from(self.attempts), label="attempt")
        number = [each for each in self.attempts if each[0] == job].index((job, key, _)) + 1
        signature = self.requests[index].signature
        tree = {"reports": [RankReport(rank=0, slot=f"graph{index}", signature=signature).to_wire()]}
        self.run(self.call("POST", f"/v1/jobs/{job}/attempts/{number}/reports", tree))
        self.reported[job].add(index)

    @invariant()
    def every_attempt_sees_what_it_was_promised(self) -> None:
        for job, key, epoch in self.attempts[-3:]:
            again = self.run(self.open(job, key))
            assert again.id == epoch.id
            for index, request in enumerate(self.requests):
                path = f"/v1/plans/{request.signature}"
                answer = self.run(self.call("GET", path, Bucketplan_Epoch=epoch.id))
                promised = epoch.digest_for(request.signature) or self.digests[index][0]
                assert Plan.decode(answer.content).digest == promised

    def named(self, job: str) -> str:
        return EVERYONE if job == EVERYONE else self.jobs[JOBS.index(job)]


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def servers(request, tmp_path_factory) -> Iterator[InProcess]:
    """One server on SQLite, or two on one PostgreSQL."""
    if request.param == "sqlite":
        with in_process([str(tmp_path_factory.mktemp("stateful") / "store.db")]) as opened:
            yield opened
    else:
        with running_postgres() as postgres:
            database = postgres.new_database()
            with in_process([database, database], refresh_seconds=0.05) as opened:
                yield opened


@pytest.mark.soak
def test_whatever_operators_do_an_attempt_keeps_its_epoch_and_its_plans(servers):
    class Here(Fleet):
        pass

    Here.servers = servers
    run_state_machine_as_test(
        Here,
        settings=settings(
            max_examples=counts.count(test=30, soak=1_000),
            stateful_step_count=12,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
