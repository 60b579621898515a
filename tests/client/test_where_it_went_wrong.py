"""Every way on which an error reaches a user: it says rank, job, signature and server as far as that way has them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from typer.testing import CliRunner

from bucketplan_client.cli.main import app
from bucketplan_client.compiled_attempt import install_attempt
from bucketplan_client.errors import ClientError, StoreFailed, Where
from bucketplan_client.evidence import Evidence
from bucketplan_client.hyperparallel import BucketingPass as HyperParallelPass
from bucketplan_client.opening import Attempt, open_attempt
from bucketplan_client.passes import FsdpBucketingPass
from bucketplan_client.reports import Reporter
from bucketplan_client.store import JobStore
from bucketplan_client.testing import InMemoryPlanServer
from bucketplan_client.torch_compile import current_installation, install
from bucketplan_client.torchtitan import register
from bucketplan_client.transport import PlanClient
from bucketplan_core import Options, make_plan
from bucketplan_core.attempt import RankReport
from bucketplan_core.errors import describe_ranks
from tests.client.requests import small_request
from tests.support.hook_graphs import SIZE, gathers

JOB = "llama-70b"
AWAY = "http://127.0.0.1:9"
"""The discard port, on which nothing listens."""


class Broken:
    """A source of plans that has none; it knows no more than `where`."""

    def __init__(self, where: Where | None = None) -> None:
        self.where = where

    def plan(self, request: Any, profile: Any = None) -> Any:
        raise RuntimeError("no plan today")


def away() -> PlanClient:
    return PlanClient(AWAY, rank=3, job=JOB, deadline_s=0.2)


def opening(client: PlanClient | None, **changes: Any) -> Attempt:
    """An attempt of rank 3 alone."""
    given: dict[str, Any] = {
        "cache": None,
        "deadline_s": 10.0,
        "groups": {"fsdp": (3,)},
        "job": JOB,
        "participants": (3,),
        "rank": 3,
        "server_s": 0.5,
        "store": dist.HashStore(),
        **changes,
    }
    return open_attempt(client, **given)


@pytest.fixture
def server() -> InMemoryPlanServer:
    return InMemoryPlanServer()


@pytest.fixture
def attempt(server: InMemoryPlanServer) -> Iterator[Attempt]:
    with opening(server.client(rank=3, deadline_s=0.3), plan_s=0.2) as opened:
        yield opened


@contextmanager
def one_of_two() -> Iterator[None]:
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def raised(action: Callable[[], Any]) -> ClientError:
    with pytest.raises(ClientError) as caught:
        action()
    return caught.value


def check(error: ClientError, where: Where) -> None:
    assert error.where == where
    text = str(error)
    for fact in filter(None, (where.job, where.server, where.signature and where.signature[:12])):
        assert fact in text
    assert describe_ranks([where.rank or 0]) in text
    assert text.endswith(error.remedy)


SIGNATURE = small_request().signature
HERE = Where(rank=3, job=JOB, server=AWAY)


@pytest.mark.parametrize(
    ("call", "where"),
    [
        (lambda client: client.plan(small_request()), HERE.at(signature=SIGNATURE)),
        (lambda client: client.known_plan(SIGNATURE), HERE.at(signature=SIGNATURE)),
        (lambda client: client.get(f"/v1/plans/{SIGNATURE}/revisions"), HERE.at(signature=SIGNATURE)),
        (lambda client: client.post("/v1/jobs/mixtral%208x7b/attempts", {}), HERE.at(job="mixtral 8x7b")),
        (lambda client: client.get("/v1/plans"), HERE),
        (lambda client: client.put(f"/v1/plans/{SIGNATURE}/active", {}), HERE.at(signature=SIGNATURE)),
        (lambda client: client.get("/v1/jobs/.."), HERE.at(job="..")),
        (lambda client: client.get("/v1/events", params={"job": "\ud800"}), HERE),
    ],
    ids=["plan", "known plan", "revisions", "attempts", "plans", "active", "dots", "no unicode"],
)
def test_a_call_of_the_client(call: Callable[[PlanClient], Any], where: Where) -> None:
    check(raised(lambda: call(away())), where)


@pytest.mark.parametrize("address", ["", "plans", "ftp://plans", "http://"])
def test_a_client_with_a_wrong_address(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BUCKETPLAN_SERVER", raising=False)
    error = raised(lambda: PlanClient(address, rank=3, job=JOB))
    assert error.where == Where(rank=3, job=JOB, server=address.rstrip("/") or None)


def test_a_client_with_a_wrong_certificate_file(tmp_path: Any) -> None:
    error = raised(lambda: PlanClient("https://plans", rank=3, job=JOB, ca_file=str(tmp_path / "none.pem")))
    check(error, Where(rank=3, job=JOB, server="https://plans"))


@pytest.mark.parametrize(
    "changes",
    [{"on_unavailable": "error"}, {"mode": "crowd"}, {"deadline_s": -1.0}, {"participants": (1, 2)}],
    ids=["no server", "bad mode", "bad deadline", "no participant"],
)
def test_an_opening(changes: dict[str, Any]) -> None:
    check(raised(lambda: opening(away(), **changes)), HERE)


def test_an_opening_that_others_do_not_come_to() -> None:
    changes = {"groups": {"fsdp": (3, 4)}, "participants": (3, 4), "deadline_s": 0.5, "grace_s": 0.5}
    check(raised(lambda: opening(away(), **changes)), HERE)


def test_plans_of_an_attempt_whose_server_went_away(server: InMemoryPlanServer) -> None:
    client = server.client(rank=3, deadline_s=0.3)
    with opening(client, plan_s=0.2, options={"strategy": "auto"}) as attempt:
        assert attempt.plans is not None
        assert attempt.options is not None
        request = small_request().with_options(attempt.options)
        server.available = False
        error = raised(lambda: attempt.plans.plan(request))
    check(error, Where(rank=3, job=JOB, signature=request.signature, server=client.address))


class TestTheHookOfTorchCompile:
    @pytest.mark.parametrize("step", ["describe", "plan", "apply", "on_graph"])
    def test_a_graph(self, step: str, attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
        where = attempt.where
        with install_attempt(attempt, on_error="raise") as installed:
            gm = gathers()
            installed.bucketing(gathers().graph)
            signature: str | None = installed.graphs[0].signature
            if step == "describe":
                signature = None
                next(iter(gm.graph.nodes)).meta["val"] = "no tensor"
                monkeypatch.setattr("bucketplan_client.torch_compile.describe_graph", broken)
            elif step == "plan":
                monkeypatch.setattr(attempt.plans, "plan", broken)
            elif step == "apply":
                monkeypatch.setattr("bucketplan_client.torch_compile.apply_plan", broken)
            else:
                monkeypatch.setattr(attempt.evidence, "note", store_lost)
            error = raised(lambda: installed.bucketing(gm.graph))
        check(error, where.at(signature=signature))

    def test_the_joint_graph(self, attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("bucketplan_client.torch_compile.mark_gathers", broken)
        with install_attempt(attempt, on_error="raise", reshard_after_forward=True):
            joint = inductor_config.joint_custom_post_pass
            check(raised(lambda: joint(gathers().graph)), attempt.where)

    def test_plans_of_no_attempt(self) -> None:
        with install(Broken(HERE), options=SIZE, epoch="e", on_error="raise") as installed:
            error = raised(lambda: installed.bucketing(gathers().graph))
        assert error.where.signature is not None
        check(error, HERE.at(signature=error.where.signature))

    def test_a_source_that_knows_nothing(self) -> None:
        with one_of_two(), install(Broken(), options=SIZE, epoch="e", on_error="raise") as installed:
            error = raised(lambda: installed.bucketing(gathers().graph))
        check(error, Where(rank=1, signature=error.where.signature))

    def test_the_rank_is_that_of_the_moment(self) -> None:
        """The process group may come after the installation."""
        with install(Broken(), options=SIZE, epoch="e", on_error="raise") as installed, one_of_two():
            error = raised(lambda: installed.bucketing(gathers().graph))
        assert error.where.rank == 1

    @pytest.mark.parametrize(
        "changes", [{"epoch": None}, {"on_error": "x"}, {"exclude": "*.bias"}, {"keep_gathered": 5}], ids=str
    )
    def test_an_installation(self, changes: dict[str, Any]) -> None:
        given = {"options": SIZE, "epoch": "e", **changes}
        check(raised(lambda: install(Broken(HERE), **given)), HERE)
        assert current_installation() is None

    def test_an_installation_of_an_attempt(self, attempt: Attempt) -> None:
        check(raised(lambda: install_attempt(attempt, exclude="*.bias")), attempt.where)
        check(raised(lambda: install_attempt(attempt, reshard_after_forward=True, keep_gathered=5)), attempt.where)

    def test_the_first_execution(self, attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
        """What a compile cache replays names no signature: the graph carries its digests alone."""
        monkeypatch.setattr(attempt, "compare_first_execution", store_lost)
        with install_attempt(attempt, on_error="raise", compare_first_execution=True):
            operator = torch.ops.bucketplan.first_execution.default
            error = raised(lambda: operator(torch.zeros(1), json.dumps({"fsdp": "ab"})))
        check(error, attempt.where)


class TestPassesInLockstep:
    @pytest.mark.parametrize("step", ["describe", "plan", "check", "apply"])
    def test_a_graph(self, step: str, attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
        bucketing = FsdpBucketingPass.for_attempt(attempt, compare=False, phase="forward")
        name = {"describe": "describe_graph", "check": "check_decision", "apply": "apply_plan"}.get(step)
        if name is None:
            monkeypatch.setattr(attempt.plans, "plan", broken)
        else:
            monkeypatch.setattr(f"bucketplan_client.passes.{name}", broken)
        with one_of_two():
            error = raised(lambda: bucketing(gathers()))
        assert (error.where.signature is None) == (step == "describe")
        check(error, attempt.where.at(signature=error.where.signature))

    def test_a_comparison(self, attempt: Attempt) -> None:
        bucketing = FsdpBucketingPass.for_attempt(
            attempt, groups={"fsdp": (1, 3)}, phase="forward", deadline_s=0.3, grace_s=0.3
        )
        with one_of_two():
            error = raised(lambda: bucketing(gathers()))
        assert error.where.signature is not None
        check(error, attempt.where.at(signature=error.where.signature))

    def test_arguments(self, attempt: Attempt) -> None:
        check(raised(lambda: FsdpBucketingPass.for_attempt(attempt, exclude="*.bias")), attempt.where)
        check(raised(lambda: FsdpBucketingPass(Broken(HERE), options=SIZE, kinds="gather")), HERE)

    def test_torchtitan(self) -> None:
        check(raised(lambda: register(Broken(HERE))), HERE)

    def test_hyperparallel(self, attempt: Attempt) -> None:
        config = SimpleNamespace(fsdp_bucket_modules=["layers"], dp_mode="fsdp")
        bucketing = HyperParallelPass(attempt, options=Options(strategy="module", planner="module/1"))
        check(raised(lambda: bucketing.run(gathers(), config)), attempt.where)


def test_a_mismatch_between_compiled_graphs() -> None:
    base, heard = dist.HashStore(), {}
    request = small_request()
    plans = [make_plan(request), make_plan(small_request(rows=16))]
    for rank in (0, 1):
        where = Where(rank=rank, job=JOB, server=AWAY)
        store = JobStore(base, prefix="evidence", where=where)
        heard[rank] = Evidence(store, rank=rank, where=where, on_mismatch=lambda error: None)
    requests = [request, small_request(rows=16)]
    assert heard[0].note("forward", requests[0], plans[0], {"fsdp": (0, 1)})
    alarms: list[ClientError] = []
    heard[1]._on_mismatch = alarms.append
    assert not heard[1].note("forward", requests[1], plans[1], {"fsdp": (0, 1)})
    heard[1]._poll_s = 0.01
    heard[1].watch()
    assert heard[1]._thread is not None
    heard[1]._thread.join(10)
    check(alarms[0], Where(rank=1, job=JOB, server=AWAY, signature=requests[1].signature))


def test_a_report_that_the_server_refuses(server: InMemoryPlanServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "bucketplan_client.reports")
    client = server.client()
    reporter = Reporter(client, job=JOB, attempt=7, where=Where(rank=3, job=JOB, server=client.address))
    reporter.send(RankReport(rank=3, slot="forward"))
    reporter.close()
    assert f"(rank 3, job {JOB!r}, server {client.address})" in caplog.text


def test_the_command_line() -> None:
    """Its JSON names them by field."""
    for arguments, where in [
        (("show", SIGNATURE), {"server": AWAY, "signature": SIGNATURE}),
        (("job", JOB, "1"), {"server": AWAY, "job": JOB}),
        (("plans",), {"server": AWAY}),
    ]:
        result = CliRunner().invoke(app, ["--server", AWAY, "--timeout", "0.2", *arguments, "--json"])
        assert json.loads(result.stdout)["error"]["where"] == where, result.output


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("out of order")


def store_lost(*_: Any, **__: Any) -> Any:
    raise StoreFailed("set", "connection lost")
