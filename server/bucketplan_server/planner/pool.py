"""The planning processes, seen from the service: submit work, get data back, survive their death."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import structlog

from bucketplan_core.wire import WireValue
from bucketplan_server.beside import ANSWER_BYTES, beside
from bucketplan_server.planner import worker
from bucketplan_server.planner.calls import frame_call, read_answer
from bucketplan_server.planner.child import Limits, PlanningProcess
from bucketplan_server.planner.planned import Canonical, PlanJob, Planned, Revised, RevisionJob, Stored
from bucketplan_server.problems import Problem, Refused

__all__ = ["PlannerPool"]

T = TypeVar("T")
_ATTEMPTS = 2
"""A planner may be killed for no fault of the request (an operator, the kernel out of memory): it is tried again."""
_MOST_READS = 64
"""Reads that may wait for the process that reads: at a second each, the last one waits longer than most callers."""
_WAIT_SECONDS = 25.0
_GRACE_SECONDS = 30.0
"""What a planner gets beyond its own time limit before the server ends it: it may be stopped, or deaf inside C code."""


@dataclass(frozen=True, slots=True)
class _Work:
    """A call of a function; framed, and so copied, only when a process takes it."""

    function: Callable[..., object]
    arguments: tuple[object, ...]
    answer: asyncio.Future[bytes]
    begun: asyncio.Event


class PlannerPool:
    """`processes` processes that plan, started at the first call; each takes one piece of work at a time.

    They run programs of their own, not forks: a fork would copy threads' locks and the database connection.
    `wait_seconds` bounds waits for what others have planned or read before, see each method.
    """

    def __init__(
        self,
        *,
        processes: int,
        memory_bytes: int,
        timeout_seconds: float,
        retry_after_seconds: int,
        wait_seconds: float = _WAIT_SECONDS,
        grace_seconds: float = _GRACE_SECONDS,
    ) -> None:
        self._num_processes = processes
        self._limits = Limits(memory_bytes=memory_bytes, timeout_seconds=timeout_seconds, grace_seconds=grace_seconds)
        self._retry_after_seconds = retry_after_seconds
        self._wait_seconds = wait_seconds
        self._num_reads = 0
        self._queue: asyncio.Queue[_Work] = asyncio.Queue()
        self._runners: list[asyncio.Task[None]] = []
        self._num_crashes = 0
        self._readers: PlannerPool | None = None
        self._log = structlog.get_logger("bucketplan_server")

    @property
    def crashes(self) -> int:
        """How many processes died, those of readers with them."""
        return self._num_crashes + (0 if self._readers is None else self._readers.crashes)

    async def warm_up(self) -> int:
        """Returns when a process has started and imported what planning needs: its id."""
        return await self._checked(worker.warm_up)

    async def plan(self, job: PlanJob) -> Planned:
        """Raises `Problem`: what is wrong with the request, or ``planner-failed`` when the process died twice."""
        return await self._checked(worker.plan, job)

    async def revise(self, job: RevisionJob) -> Revised:
        """Another plan of a stored signature; raises `Problem`, ``busy`` when it has not begun in time."""
        return await self._checked(worker.revise, job, begins_in_time=True)

    async def replay(self, job: RevisionJob, stored: bytes) -> str | None:
        """What an audit finds wrong with a stored plan, None if nothing; raises `Problem`."""
        return await self._checked(worker.replay_revision, job, stored)

    async def canonicalize(self, body: bytes) -> Canonical:
        """The canonical form of a JSON body; raises `Problem`, as `read` does."""
        return await self.read(worker.canonicalize, body)

    async def explain(self, stored: Stored) -> dict[str, WireValue]:
        """Why a plan is as it is; raises `Problem`, as `read` does."""
        return await self.read(worker.explain_plan, stored)

    async def diff(self, a: Stored, b: Stored) -> dict[str, WireValue]:
        """How two revisions differ in request and decision; raises `Problem`, as `read` does."""
        return await self.read(worker.diff_plans, a, b)

    async def read(self, function: Callable[..., T | Refused], *arguments: object) -> T:
        """What `function`, one of `calls.OPERATIONS`, makes of documents; raises `Problem`, ``busy`` after a long wait.

        It runs in a process of its own, started at the first call, so that who looks does not wait behind plannings.
        """
        if self._readers is None:
            self._readers = PlannerPool(
                processes=1,
                memory_bytes=self._limits.memory_bytes,
                # Nobody waits longer, and others do wait.
                timeout_seconds=min(self._limits.timeout_seconds, self._wait_seconds),
                retry_after_seconds=self._retry_after_seconds,
                grace_seconds=self._limits.grace_seconds,
            )
        if self._num_reads >= _MOST_READS:
            raise self._busy(f"{_MOST_READS} reads wait, the most that this server takes")
        self._num_reads += 1
        try:
            async with asyncio.timeout(self._wait_seconds):
                return await self._readers._checked(function, *arguments)
        except TimeoutError:
            raise self._busy(f"this was not read within {self._wait_seconds:g} s, others are read before it") from None
        finally:
            self._num_reads -= 1

    async def close(self) -> None:
        """End the processes, whatever they are doing; work that waits for them is cancelled."""
        if self._readers is not None:
            await self._readers.close()
        for runner in self._runners:
            runner.cancel()
        await asyncio.gather(*self._runners, return_exceptions=True)
        while not self._queue.empty():
            work = self._queue.get_nowait()
            work.answer.cancel()
            work.begun.set()

    async def _checked(
        self, function: Callable[..., T | Refused], *arguments: object, begins_in_time: bool = False
    ) -> T:
        work = self._queued(function, arguments)
        if begins_in_time:
            try:
                async with asyncio.timeout(self._wait_seconds):
                    await work.begun.wait()
            except TimeoutError:
                work.answer.cancel()
                raise self._busy(f"others are planned before this, for {self._wait_seconds:g} s by now") from None
            except asyncio.CancelledError:
                work.answer.cancel()
                raise
        # Who goes away does not interrupt the exchange with the process; the answer is then dropped.
        body = await work.answer
        return await beside(len(body) > ANSWER_BYTES, read_answer, function, body)

    def _queued(self, function: Callable[..., object], arguments: tuple[object, ...]) -> _Work:
        if not self._runners:
            self._runners = [asyncio.create_task(self._run_process()) for _ in range(self._num_processes)]
        work = _Work(function, arguments, asyncio.get_running_loop().create_future(), asyncio.Event())
        self._queue.put_nowait(work)
        return work

    async def _run_process(self) -> None:
        """One process after the other, for as long as the server runs."""
        process: PlanningProcess | None = None
        work: _Work | None = None
        try:
            while True:
                if process is None:
                    process = await self._try_start()
                work = await self._queue.get()
                if not work.answer.done():
                    work.begun.set()
                    process = await self._survive(work, process)
        finally:
            if work is not None:
                work.answer.cancel()
            if process is not None:
                await process.close()

    async def _survive(self, work: _Work, process: PlanningProcess | None) -> PlanningProcess | None:
        """As `_carry_out`; what that did not expect is told to who waits for `work`, and the next one is done."""
        try:
            return await self._carry_out(work, process)
        except Exception as error:
            self._log.error("planner.failed", exc_info=error)
            if not work.answer.done():
                work.answer.set_exception(self._died_twice())
            if process is not None:
                await process.close()
            return None

    async def _carry_out(self, work: _Work, process: PlanningProcess | None) -> PlanningProcess | None:
        """Set the answer of `work`; returns the process that is there for the next one."""
        if process is not None and process.has_ended:
            await self._bury(process, "it ended while idle", attempt=0)
            process = None
        call = frame_call(work.function, *work.arguments)
        for attempt in range(1, _ATTEMPTS + 1):
            process = process or await self._try_start()
            if process is None:
                continue
            try:
                body = await process.exchange(call)
            except (EOFError, OSError) as error:
                await self._bury(process, str(error) or type(error).__name__, attempt=attempt)
                process = None
            except BaseException:
                await process.close()
                raise
            else:
                if not work.answer.done():
                    work.answer.set_result(body)
                return process
        if not work.answer.done():
            work.answer.set_exception(self._died_twice())
        return None

    async def _try_start(self) -> PlanningProcess | None:
        try:
            return await PlanningProcess.start(self._limits)
        except Exception as error:
            self._num_crashes += 1
            self._log.error("planner.not_started", error=str(error))
            return None

    async def _bury(self, process: PlanningProcess, reason: str, *, attempt: int) -> None:
        self._num_crashes += 1
        status = await process.close()
        self._log.warning("planner.died", attempt=attempt, reason=reason, status=status)

    def _busy(self, why: str) -> Problem:
        return Problem("busy", f"{why}; repeat the call", headers={"Retry-After": str(self._retry_after_seconds)})

    def _died_twice(self) -> Problem:
        return Problem(
            "planner-failed",
            "the planning process died twice on this request; nothing was stored. Repeat the call; if it fails "
            "again, the server's log says why",
            headers={"Retry-After": str(self._retry_after_seconds)},
        )
