"""The planning processes, seen from the service: submit work, get data back, survive their death."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

import structlog

from bucketplan_core.wire import WireValue
from bucketplan_server.planner import worker
from bucketplan_server.planner.planned import Canonical, PlanJob, Planned, Revised, RevisionJob, Stored
from bucketplan_server.problems import Problem, Refused

__all__ = ["PlannerPool"]

T = TypeVar("T")
_ATTEMPTS = 2
"""A planner that dies takes the work of its neighbours with it, so each piece of work gets a second try."""


class PlannerPool:
    """Processes that plan. Spawned, not forked: a fork would copy threads' locks and the database connection."""

    def __init__(self, *, processes: int, memory_bytes: int, timeout_seconds: float, retry_after_seconds: int) -> None:
        self._processes = processes
        self._limits = (memory_bytes, timeout_seconds)
        self._retry_after = str(retry_after_seconds)
        self._executor = self._start()
        self.crashes = 0
        self._readers: PlannerPool | None = None

    async def warm_up(self) -> None:
        """Returns when a process has started and imported what planning needs."""
        await self._run(worker.warm_up)

    async def plan(self, job: PlanJob) -> Planned:
        """Raises `Problem`: what is wrong with the request, or ``planner-failed`` when the process died twice."""
        return await self._checked(worker.plan, job)

    async def canonicalize(self, body: bytes) -> Canonical:
        """The canonical form of a JSON body; raises `Problem`."""
        return await self._checked(worker.canonicalize, body)

    async def revise(self, job: RevisionJob) -> Revised:
        """Another plan of a stored signature; raises `Problem`."""
        return await self._checked(worker.revise, job)

    async def replay(self, job: RevisionJob, stored: bytes) -> str | None:
        """What an audit finds wrong with a stored plan, None if nothing; raises `Problem`."""
        return await self._checked(worker.replay_revision, job, stored)

    async def explain(self, stored: Stored) -> dict[str, WireValue]:
        """Why a plan is as it is; raises `Problem`."""
        return await self._checked(worker.explain_plan, stored)

    async def diff(self, a: Stored, b: Stored) -> dict[str, WireValue]:
        """How two revisions differ in request and decision; raises `Problem`."""
        return await self._checked(worker.diff_plans, a, b)

    async def read(self, function: Callable[..., T], *arguments: object) -> T:
        """What `function`, which must be one of a module, makes of stored documents; raises `Problem`.

        It runs in a process of its own, started at the first call, so that who looks does not wait behind plannings.
        """
        if self._readers is None:
            memory_bytes, timeout_seconds = self._limits
            self._readers = PlannerPool(
                processes=1,
                memory_bytes=memory_bytes,
                timeout_seconds=timeout_seconds,
                retry_after_seconds=int(self._retry_after),
            )
        result: T = await self._readers._checked(worker.read, function, *arguments)
        return result

    def close(self) -> None:
        if self._readers is not None:
            self._readers.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _checked(self, function: Callable[..., T | Refused], *arguments: object) -> T:
        result = await self._run(function, *arguments)
        if isinstance(result, Refused):
            raise result.problem()
        return result

    async def _run(self, function: Callable[..., T], *arguments: object) -> T:
        for attempt in range(1, _ATTEMPTS + 1):
            executor = self._executor
            try:
                return await asyncio.wrap_future(executor.submit(function, *arguments))
            except BrokenProcessPool:
                self._replace(executor)
                structlog.get_logger("bucketplan_server").warning("planner.died", attempt=attempt)
        raise Problem(
            "planner-failed",
            "the planning process died twice on this request; nothing was stored. Repeat the call; if it fails "
            "again, the server's log says why",
            headers={"Retry-After": self._retry_after},
        )

    def _replace(self, broken: ProcessPoolExecutor) -> None:
        # Every piece of work of the broken pool comes here; the first one replaces it.
        if self._executor is broken:
            self.crashes += 1
            self._executor = self._start()
            broken.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            max_workers=self._processes,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=worker.initialize,
            initargs=self._limits,
        )
