"""Planning processes without a server around them: what crosses the socket, and what a process may cost."""

import asyncio
import contextlib
import os
import signal
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields
from importlib import import_module
from typing import Any, Literal, Union, get_args, get_origin

import msgpack
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketplan_core.collectives import Candidate
from bucketplan_core.planning import make_plan
from bucketplan_server.pages.curve import Curve
from bucketplan_server.pages.figures import PlanQuery, view_plan
from bucketplan_server.pages.timeline import Timeline
from bucketplan_server.planner import worker
from bucketplan_server.planner.calls import (
    OPERATIONS,
    Failed,
    frame_answer,
    frame_call,
    frame_failure,
    read_answer,
    read_call,
)
from bucketplan_server.planner.child import PlanningProcess
from bucketplan_server.planner.frames import (
    HEADER_BYTES,
    FrameError,
    body_length,
    frame,
    hints_of,
    read_as,
    to_tree,
    unframe,
)
from bucketplan_server.planner.planned import Canonical, PlanJob, Planned, RevisionJob, Stored
from bucketplan_server.planner.pool import PlannerPool
from bucketplan_server.problems import Problem, Refused
from tests.support.counts import count
from tests.support.documents import small_request
from tests.support.server import FAULTS

TRAVELLING = (Candidate, Canonical, Curve, PlanJob, PlanQuery, Planned, RevisionJob, Stored, Timeline)
TREES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


def function_of(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type that crosses the socket."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in (bool, float, str, bytes, type(None)):
        return st.from_type(kind)
    if kind is int:
        return st.integers(-(2**63), 2**63 - 1)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (Union, types.UnionType):
        return st.one_of(*map(values_of, arguments))
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values_of, arguments))
    if origin in (list, Sequence):
        return st.lists(values_of(arguments[0]), max_size=3)
    if origin in (dict, Mapping):
        return st.dictionaries(st.text(max_size=8), values_of(arguments[1]), max_size=3)
    hints = hints_of(kind)
    return st.builds(kind, **{field.name: values_of(hints[field.name]) for field in fields(kind)})


def body_of(data: bytes) -> bytes:
    assert body_length(data[:HEADER_BYTES]) == len(data) - HEADER_BYTES
    return data[HEADER_BYTES:]


@pytest.mark.soak
@settings(max_examples=count(test=40, soak=3_000))
@given(st.data())
def test_what_crosses_the_socket_arrives_as_it_was(data):
    for kind in TRAVELLING:
        value = data.draw(values_of(kind))
        back = read_as(kind, unframe(body_of(frame(to_tree(value)))), path="value")
        assert repr(back) == repr(value)  # a NaN is not itself


@pytest.mark.soak
@settings(max_examples=count(test=100, soak=20_000))
@given(st.binary(max_size=64) | TREES.map(msgpack.packb), st.sampled_from([*TRAVELLING, Refused]))
def test_any_other_bytes_are_refused_as_frames(body, kind):
    for read in (
        lambda: read_as(kind, unframe(body), path="value"),
        lambda: read_call(body),
        lambda: read_answer(worker.plan, body),
    ):
        with pytest.raises(FrameError):
            read()


@pytest.mark.soak
@settings(max_examples=count(test=100, soak=20_000))
@given(st.sampled_from(sorted(OPERATIONS)), TREES, st.sampled_from(["value", "refused", "failed"]), TREES)
def test_calls_and_answers_are_read_as_they_were_written_or_refused(name, arguments, outcome, answer):
    call, answered = (body_of(frame(tree)) for tree in ({"arguments": arguments, "operation": name}, {outcome: answer}))
    with contextlib.suppress(FrameError):
        function, read = read_call(call)
        assert body_of(frame_call(function, *read)) == call
    with contextlib.suppress(FrameError, Failed, Problem):
        assert body_of(frame_answer(read_answer(function_of(name), answered))) == answered


def test_a_call_names_one_of_the_operations_and_no_other_code():
    for name in ("os:system", "bucketplan_server.planner.worker:initialize", "builtins:eval", ""):
        with pytest.raises(FrameError, match="not an operation"):
            read_call(body_of(frame({"arguments": ["true"], "operation": name})))
    with pytest.raises(ValueError, match="not an operation"):
        frame_call(os.system, "true")
    with pytest.raises(FrameError, match="extension"):
        unframe(msgpack.packb(msgpack.ExtType(4, b"")))


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_every_type_of_every_operation_can_cross_the_socket(name):
    for kind in hints_of(function_of(name)).values():
        inner = [other for other in get_args(kind) if other is not Refused] if Refused in get_args(kind) else [kind]
        for one in inner:
            with pytest.raises(FrameError):
                read_as(one, ..., path="value")


def test_refusals_and_failures_arrive_as_what_they_are():
    with pytest.raises(Problem) as caught:
        read_answer(worker.plan, body_of(frame_answer(Refused("cannot-plan", "why", {"path": "options.x"}))))
    assert (caught.value.slug, caught.value.detail, caught.value.fields) == (
        "cannot-plan",
        "why",
        {"path": "options.x"},
    )
    with pytest.raises(Failed, match="ZeroDivisionError"):
        read_answer(worker.plan, body_of(frame_failure("ZeroDivisionError: division by zero")))


@asynccontextmanager
async def pool_of(
    *,
    memory_bytes: int = 8 * 2**30,
    timeout_seconds: float = 60.0,
    grace_seconds: float = 60.0,
    wait_seconds: float = 60.0,
):
    pool = PlannerPool(
        processes=1,
        memory_bytes=memory_bytes,
        timeout_seconds=timeout_seconds,
        grace_seconds=grace_seconds,
        wait_seconds=wait_seconds,
        retry_after_seconds=1,
    )
    try:
        yield pool
    finally:
        await pool.close()


def job_of(number: int = 0) -> PlanJob:
    request = small_request(number)
    return PlanJob(request.signature, request.encoded, None)


def test_a_process_that_does_not_answer_is_ended_and_its_work_repeated():
    async def scenario() -> None:
        async with pool_of(timeout_seconds=0.2, grace_seconds=0.5) as pool:
            stopped = await pool.warm_up()
            os.kill(stopped, signal.SIGSTOP)
            assert await pool.warm_up() != stopped
            assert pool.crashes == 1
            assert not psutil.pid_exists(stopped)

    asyncio.run(scenario())


def test_a_process_that_died_while_idle_costs_the_next_call_none_of_its_attempts():
    async def scenario() -> None:
        async with pool_of() as pool:
            first = await pool.warm_up()
            os.kill(first, signal.SIGKILL)
            await asyncio.to_thread(psutil.wait_procs, [psutil.Process(first)], 10)
            assert (await pool.plan(job_of())).plan == make_plan(small_request(0)).encoded
            assert pool.crashes == 1

    asyncio.run(scenario())


def test_a_caller_that_goes_away_leaves_the_answers_of_others_alone(monkeypatch):
    monkeypatch.syspath_prepend(str(FAULTS))
    monkeypatch.setenv("TEST_PLANNING_SECONDS", "0.5")

    async def scenario() -> None:
        async with pool_of() as pool:
            process = await pool.warm_up()
            leaving = asyncio.create_task(pool.plan(job_of(1)))
            await asyncio.sleep(0.2)
            leaving.cancel()
            queued = asyncio.create_task(pool.plan(job_of(2)))
            await asyncio.sleep(0)
            queued.cancel()
            planned = await pool.plan(job_of(3))
            assert planned.signature == small_request(3).signature
            assert await pool.warm_up() == process

    asyncio.run(scenario())


def test_what_needs_too_much_memory_is_refused_and_the_process_goes_on():
    async def scenario() -> None:
        async with pool_of() as pool:
            needed = psutil.Process(await pool.warm_up()).memory_info().vms
        async with pool_of(memory_bytes=needed + 48 * 2**20) as pool:
            process = await pool.warm_up()
            for body in (bytes(64 * 2**20), b"[" + b"[]," * (3 * 2**19) + b"[]]"):
                with pytest.raises(Problem, match="more memory") as caught:
                    await pool.canonicalize(body)
                assert caught.value.slug == "cannot-plan"
            assert await pool.warm_up() == process
            assert pool.crashes == 0

    asyncio.run(scenario())


def test_an_error_that_planning_does_not_know_is_no_death(monkeypatch):
    monkeypatch.setattr(sys.modules["bucketplan_server.planner.pool"].worker, "plan", worker.canonicalize)

    async def scenario() -> None:
        async with pool_of() as pool:
            process = await pool.warm_up()
            with pytest.raises(Failed, match=r"call\.arguments\[0\]"):
                await pool.plan(job_of())
            with pytest.raises(Problem) as caught:
                await pool.read(view_plan, Stored(request=b"", profile=b"", plan=b""), PlanQuery())
            assert caught.value.slug == "invalid-body"
            assert await pool.warm_up() == process
            assert pool.crashes == 0

    asyncio.run(scenario())


def test_processes_hold_no_settings_of_the_server(monkeypatch):
    monkeypatch.setenv("BUCKETPLAN_DATABASE", "postgresql+asyncpg://planner:secret@db/plans")

    async def scenario() -> dict[str, str]:
        async with pool_of() as pool:
            return psutil.Process(await pool.warm_up()).environ()

    environment = asyncio.run(scenario())
    assert "PATH" in environment
    assert not [name for name in environment if name.startswith("BUCKETPLAN_") or "secret" in environment[name]]


def test_nobody_waits_without_limit_for_what_others_read_or_plan():
    async def scenario() -> None:
        async with pool_of(wait_seconds=0.5) as pool:
            planning = await pool.warm_up()
            while True:  # it may take longer than that to start
                with contextlib.suppress(Problem):
                    reading = await pool.read(worker.warm_up)
                    break
            assert reading != planning
            os.kill(reading, signal.SIGSTOP)
            with pytest.raises(Problem, match="not read within") as caught:
                await pool.read(worker.warm_up)
            assert (caught.value.slug, "Retry-After" in caught.value.headers) == ("busy", True)
            os.kill(reading, signal.SIGCONT)
            assert await pool.read(worker.warm_up) == reading

            os.kill(planning, signal.SIGSTOP)
            first = asyncio.create_task(pool.plan(job_of(5)))
            await asyncio.sleep(0)
            revision = RevisionJob(
                signature="0" * 64, request=b"", profile=b"", origin="replan", options=b"", buckets=None, decision=None
            )
            with pytest.raises(Problem, match="planned before this") as caught:
                await pool.revise(revision)
            assert caught.value.slug == "busy"
            # Who looks, or sends JSON, does not wait behind a planning at all.
            with pytest.raises(Problem) as caught:
                await pool.canonicalize(b"{}")
            assert caught.value.slug == "invalid-body"
            os.kill(planning, signal.SIGCONT)
            assert (await first).signature == small_request(5).signature

    asyncio.run(scenario())


def test_reads_that_wait_are_bounded_in_number():
    async def scenario() -> None:
        async with pool_of() as pool:
            reading = await pool.read(worker.warm_up)
            os.kill(reading, signal.SIGSTOP)
            waiting = [asyncio.create_task(pool.read(worker.warm_up)) for _ in range(64)]
            await asyncio.sleep(0)
            with pytest.raises(Problem, match="64 reads wait"):
                await pool.read(worker.warm_up)
            for task in waiting[1:]:
                task.cancel()
            await asyncio.gather(*waiting[1:], return_exceptions=True)
            os.kill(reading, signal.SIGCONT)
            assert await waiting[0] == await pool.read(worker.warm_up) == reading

    asyncio.run(scenario())


def test_a_failure_that_was_not_expected_is_that_of_one_call(monkeypatch):
    exchange = PlanningProcess.exchange

    async def odd(process: PlanningProcess, call: bytes) -> bytes:
        monkeypatch.setattr(PlanningProcess, "exchange", exchange)
        raise MemoryError

    async def scenario() -> None:
        async with pool_of() as pool:
            await pool.warm_up()
            monkeypatch.setattr(PlanningProcess, "exchange", odd)
            with pytest.raises(Problem) as caught:
                await pool.plan(job_of(6))
            assert caught.value.slug == "planner-failed"
            assert (await pool.plan(job_of(6))).signature == small_request(6).signature

    asyncio.run(scenario())
