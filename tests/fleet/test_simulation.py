"""The opening and the lockstep comparison, simulated: no seed ends with two plans, or with a wait without end."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from bucketplan_client.agreement import GroupView, Report, agree
from bucketplan_client.errors import (
    AgreementError,
    DeadlineExceeded,
    Problem,
    ServerRefused,
    ServerUnreachable,
    StoreFailed,
    Where,
)
from bucketplan_client.opening_protocol import AskServer, Hello, LoadEpoch, Opened, Setup, Sleep, open_protocol
from bucketplan_core import Options
from bucketplan_core.epoch import Epoch, complete_options
from tests.fleet.simulation import Ended, Simulation
from tests.support.counts import seeds

DEFAULTS = Options(strategy="size", planner="size/1")
DEADLINE_S, SERVER_S, GRACE_S = 30.0, 10.0, 2.0
LONGEST_S = DEADLINE_S + SERVER_S + GRACE_S + 1.0
"""The promise of `open_protocol`, and a second for the steps themselves."""


class Server:
    """A server that may be slow, away, or lose its answer after it has recorded the attempt; it may change its mind
    about the epoch at any moment, as when an operator activates another plan."""

    def __init__(self, rng: random.Random, job: str) -> None:
        self._rng = rng
        self._job = job
        self._by_key: dict[str, Opened] = {}
        self.available = rng.random() < 0.7
        self.flaky = rng.random() < 0.4
        self.num_calls = 0

    def ask(self, step: AskServer, now: float) -> tuple[float, Any]:
        self.num_calls += 1
        budget = max(0.0, step.until - now)
        if not self.available:
            return budget, ServerUnreachable("connection refused")
        if self.flaky and self._rng.random() < 0.3:
            return budget, DeadlineExceeded("timed out")
        if self.flaky and self._rng.random() < 0.1:
            problem = Problem(type="urn:bucketplan:problem:forbidden", title="forbidden", status=403)
            return 0.1, ServerRefused(problem)
        opened = self._by_key.get(step.request.key)
        if opened is None:
            epoch = Epoch.build(
                job=self._job,
                options=complete_options(step.request.options, DEFAULTS),
                topology=dict(step.request.topology),
                overrides={self._rng.choice("abc") * 64: self._rng.choice("def") * 64},
            )
            opened = self._by_key[step.request.key] = Opened(epoch=epoch, attempt=len(self._by_key) + 1)
        if self.flaky and self._rng.random() < 0.2:
            return budget, DeadlineExceeded("the answer was lost")
        return self._rng.uniform(0.0, min(budget, 3.0)), opened


def held_epoch(job: str) -> Epoch:
    return Epoch.build(job=job, options=DEFAULTS, topology={"fsdp": 1}, overrides={})


def simulate_opening(seed: int, num_ranks: int) -> tuple[Simulation, Server, list[int]]:
    rng = random.Random(seed)
    server = Server(rng, "job")
    members = tuple(range(num_ranks))
    held = held_epoch("job")
    everyone_holds = rng.random() < 0.3
    mode = rng.choice(["leader", "leader", "every_rank"])
    on_unavailable = rng.choice(["local", "unbucketed", "error"])
    odd = rng.randrange(num_ranks) if rng.random() < 0.15 else None

    def perform(rank: int, step: Any, now: float) -> tuple[float, Any]:
        if isinstance(step, AskServer):
            return server.ask(step, now)
        if isinstance(step, Sleep):
            return rng.uniform(0.0, step.most_s), None
        assert isinstance(step, LoadEpoch)
        # A damaged cache gives nothing, even what its index promised.
        return 0.01, None if rng.random() < 0.2 else Opened(epoch=held)

    simulation = Simulation(rng, perform)

    def protocol_of(rank: int, life: int) -> Callable[[], Any]:
        cap = 1_000 if rank == odd else 2_000
        hello = Hello(
            rank=rank,
            capture=1,
            rewriter=1,
            schema=1,
            options={"bucket_cap_bytes": cap} if odd is not None else {},
            on_unavailable=on_unavailable,
            disabled=seed % 29 == 0 and rank == 1,
            host="one",
            groups={"fsdp": members},
            held=(held.id,) if everyone_holds or rng.random() < 0.5 else (),
        )
        setup = Setup(
            job="job",
            participants=members,
            hello=hello,
            nonce=f"{seed}-{rank}-{life}",
            defaults=DEFAULTS,
            mode=mode,
            deadline_s=DEADLINE_S,
            server_s=SERVER_S,
            grace_s=GRACE_S,
            jitter_s=1.0,
        )
        return lambda: open_protocol(setup)

    troubled = rng.random() < 0.6
    for rank in members:
        late = rng.random() < (0.1 if troubled else 0.0)
        begins = rng.uniform(20.0, 60.0) if late else rng.uniform(0.0, 3.0)
        simulation.start(rank, protocol_of(rank, 0), begins)
        if troubled and rng.random() < 2 / num_ranks:
            dies = begins + rng.uniform(0.0, 45.0)
            simulation.kill(rank, dies)
            if rng.random() < 0.6:
                simulation.start(rank, protocol_of(rank, 1), dies + rng.uniform(0.0, 20.0))
        if troubled and rng.random() < 1 / num_ranks:
            simulation.store_breaks_at[rank] = begins + rng.uniform(0.0, 45.0)
    simulation.run()
    return simulation, server, list(members)


def check_opening(simulation: Simulation) -> str:
    """What must hold of every run; gives the kind of its outcome."""
    assert simulation.unfinished == []
    for ended in simulation.ended:
        assert ended.at - ended.started <= LONGEST_S, ended
        assert ended.error is None or isinstance(ended.error, StoreFailed), ended
    outcomes = {ended.value.encoded() for ended in simulation.ended if ended.value is not None}
    assert len(outcomes) <= 1
    assert [writes for key, writes in simulation.num_writes.items() if key.endswith("/outcome")] in ([], [1])
    kinds = {ended.value.kind for ended in simulation.ended if ended.value is not None}
    return next(iter(kinds), "none")


class TestOpening:
    @pytest.mark.soak
    def test_no_schedule_of_64_ranks_ends_in_two_outcomes_or_waits_without_end(self):
        kinds: dict[str, int] = {}
        for seed in seeds("openings of 64 ranks", test=1_000, soak=10_000):
            kind = check_opening(simulate_opening(seed, 64)[0])
            kinds[kind] = kinds.get(kind, 0) + 1
        # A simulation in which nothing ever goes wrong, or right, tests nothing.
        assert min(kinds.get(kind, 0) for kind in ("commit", "unbucketed", "abort")) >= 50, kinds

    @pytest.mark.soak
    def test_no_schedule_of_4096_ranks_does(self):
        for seed in seeds("openings of 4096 ranks", test=5, soak=50):
            check_opening(simulate_opening(seed, 4096)[0])

    def test_load_of_the_server_is_one_call_from_a_leader_and_one_a_rank_otherwise(self):
        calls: dict[tuple[str, int], int] = {}
        for num_ranks in (2, 16, 128):
            for mode in ("leader", "every_rank"):
                rng = random.Random(0)
                server = Server(rng, "job")
                server.available, server.flaky = True, False
                simulation = Simulation(
                    rng,
                    lambda rank, step, now, s=server: s.ask(step, now) if isinstance(step, AskServer) else (0.1, None),
                )
                for rank in range(num_ranks):
                    hello = Hello(rank=rank, capture=1, rewriter=1, schema=1, groups={"fsdp": tuple(range(num_ranks))})
                    setup = Setup(
                        job="job",
                        participants=tuple(range(num_ranks)),
                        hello=hello,
                        nonce="n",
                        defaults=DEFAULTS,
                        mode=mode,  # type: ignore[arg-type]  # a str from the parameters of the test
                    )
                    simulation.start(rank, lambda setup=setup: open_protocol(setup), 0.0)
                simulation.run()
                assert check_opening(simulation) == "commit"
                calls[(mode, num_ranks)] = server.num_calls
        assert calls == {(mode, n): 1 if mode == "leader" else n for mode, n in calls}


def simulate_lockstep(seed: int) -> tuple[list[Ended], bool]:
    """Rows and columns of a mesh compare; some rank may hold another plan, have failed, die, or come late."""
    rng = random.Random(seed)
    height, width = rng.choice([(1, 8), (2, 4), (4, 4), (3, 5), (8, 8)])
    ranks = range(height * width)
    trouble = rng.choice(["none", "odd", "failed", "dies", "late", "broken store"])
    who = rng.choice(ranks)

    def perform(rank: int, step: Any, now: float) -> tuple[float, Any]:
        raise AssertionError(step)

    simulation = Simulation(rng, perform)
    for rank in ranks:
        row = tuple(range(rank // width * width, rank // width * width + width))
        column = tuple(range(rank % width, height * width, width))
        odd = rank == who
        digest = "x" if odd and trouble == "odd" else "d"
        report = Report(
            rank=rank,
            groups=(
                GroupView(role="shard", members=row, digest=digest),
                GroupView(role="replicate", members=column, digest=digest),
            ),
            signature="s",
            failure="broken" if odd and trouble == "failed" else None,
        )
        begins = rng.uniform(30.0, 60.0) if odd and trouble == "late" else rng.uniform(0.0, 2.0)
        simulation.start(
            rank,
            lambda report=report, begins=begins: agree(
                report, key="k", until=begins + 10.0, where=Where(rank=report.rank), grace_s=1.0
            ),
            begins,
        )
        if odd and trouble == "dies":
            simulation.kill(rank, begins + rng.uniform(0.0, 0.05))
        if odd and trouble == "broken store":
            simulation.store_breaks_at[rank] = begins + rng.uniform(0.0, 0.05)
    simulation.run()
    assert simulation.unfinished == []
    return simulation.ended, trouble == "none"


class TestLockstep:
    @pytest.mark.soak
    def test_either_all_ranks_of_a_mesh_go_on_or_all_raise(self):
        raised = 0
        for seed in seeds("lockstep comparisons", test=500, soak=5_000):
            ended, healthy = simulate_lockstep(seed)
            went_on = [end for end in ended if end.error is None and not end.killed]
            assert all(isinstance(end.error, AgreementError | StoreFailed | None) for end in ended)
            assert all(end.at - end.started <= 10.0 + 4 * 2.0 + 2.0 for end in ended)
            if healthy:
                assert len(went_on) == len(ended)
            elif any(isinstance(end.error, AgreementError) for end in ended):
                raised += 1
                # A rank whose store broke, or that died, after its part was done has told the others all they need.
                assert went_on == []
        assert raised > 100
