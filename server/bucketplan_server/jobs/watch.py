"""One watcher an attempt for all who wait for its state to change: what they cost the store does not grow with them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from bucketplan_server.problems import Problem

__all__ = ["Key", "Reading", "Watchers"]

Key = tuple[str, int]
"""Job and number of an attempt."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What the store held of an attempt: `version` changes whenever its state does, `mark` with its reports."""

    version: str
    mark: tuple[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    """`joined` is the number of readings that had begun when it came; those are too old to tell it anything."""

    seen: str
    joined: int
    done: asyncio.Future[Reading | None]


class Watchers:
    """Watchers by attempt; each begins with the first waiter and ends with the last.

    `most` waiters are taken over all attempts. `stopping` says that the server ends, which ends every wait.
    """

    def __init__(self, *, refresh_seconds: float, most: int, stopping: Callable[[], bool]) -> None:
        self._refresh_seconds = refresh_seconds
        self._most = most
        self._stopping = stopping
        self._watchers: dict[Key, _Watcher] = {}
        self.num_waiters = 0

    def __len__(self) -> int:
        return len(self._watchers)

    @property
    def is_full(self) -> bool:
        return self.num_waiters >= self._most

    def changed(self, key: Key) -> None:
        """Have the attempt read again at once, where somebody waits for it."""
        watcher = self._watchers.get(key)
        if watcher is not None:
            watcher.look.set()

    async def wait(self, key: Key, seen: str, seconds: float, read: Callable[[], Awaitable[Reading]]) -> Reading | None:
        """The first reading whose version is not `seen`, else the last one after `seconds` or as the server ends.

        None where nothing was read yet. `read` is that of the first who waits; a `Problem` that it raises is raised for
        everybody who waits.
        """
        watcher = self._watchers.get(key)
        if watcher is None:
            watcher = self._watchers[key] = _Watcher(read, self._refresh_seconds, self._stopping)
            watcher.start(lambda: self._watchers.pop(key, None))
        self.num_waiters += 1
        waiter = watcher.join(seen)
        try:
            async with asyncio.timeout(seconds):
                return await waiter.done
        except TimeoutError:
            return watcher.latest
        finally:
            self.num_waiters -= 1
            watcher.leave(waiter)


class _Watcher:
    def __init__(
        self, read: Callable[[], Awaitable[Reading]], refresh_seconds: float, stopping: Callable[[], bool]
    ) -> None:
        self._read = read
        self._refresh_seconds = refresh_seconds
        self._stopping = stopping
        self._waiters: set[_Waiter] = set()
        self._begun = 0
        self._task: asyncio.Task[None] | None = None
        self.latest: Reading | None = None
        self.look = asyncio.Event()

    def start(self, ended: Callable[[], object]) -> None:
        self._task = asyncio.create_task(self._run(ended))

    def join(self, seen: str) -> _Waiter:
        waiter = _Waiter(seen, self._begun, asyncio.get_running_loop().create_future())
        self._waiters.add(waiter)
        if self.latest is not None and self.latest.version != seen:
            # Either of the two may be the older one; a new reading tells.
            self.look.set()
        return waiter

    def leave(self, waiter: _Waiter) -> None:
        self._waiters.discard(waiter)
        if not self._waiters:
            self.look.set()

    async def _run(self, ended: Callable[[], object]) -> None:
        try:
            while self._waiters and not self._stopping():
                self.look.clear()
                self._begun += 1
                self.latest = await self._read()
                self._tell(self.latest)
                try:
                    # Reports that reach another replica are seen at the next look.
                    async with asyncio.timeout(self._refresh_seconds):
                        await self.look.wait()
                except TimeoutError:
                    pass
        except Exception as error:
            # Nobody awaits this task: even what it did not expect must reach those who wait, or they wait in vain.
            self._end(error)
        finally:
            ended()
            self._end(None)

    def _tell(self, reading: Reading) -> None:
        for waiter in self._waiters:
            if waiter.done.done() or waiter.seen == reading.version:
                continue
            if waiter.joined >= self._begun:
                self.look.set()
            else:
                waiter.done.set_result(reading)

    def _end(self, failure: Exception | None) -> None:
        for waiter in self._waiters:
            if waiter.done.done():
                continue
            if failure is None:
                waiter.done.set_result(self.latest)
            else:
                waiter.done.set_exception(_copy(failure))


def _copy(failure: Exception) -> Exception:
    """One exception a waiter, where it can be: each that is raised collects a traceback of its own."""
    if isinstance(failure, Problem):
        return Problem(failure.slug, failure.detail, fields=failure.fields, headers=failure.headers)
    return failure
