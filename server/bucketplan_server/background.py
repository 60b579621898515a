"""Work that a running server repeats for as long as it runs, whatever it meets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from bucketplan_server.store.engine import Store, StoreError

__all__ = ["Background"]

_SAY_EVERY_SECONDS = 60.0
"""A store that is away fails every second; its log must stay readable."""


class Background:
    """Repeated pieces of work, each a task of its own that only `close` ends.

    What fails is logged, at the first time and then once a minute until it works again, and counted in the store's
    errors: whatever a server repeats, it does to its store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tasks: list[asyncio.Task[None]] = []
        self._log = structlog.get_logger("bucketplan_server")

    def repeat(self, name: str, work: Callable[[], Awaitable[object]], *, every_seconds: float) -> None:
        """Call `work` now and again `every_seconds` after it has ended; `name` is what the log calls it."""
        self._tasks.append(asyncio.create_task(self._repeat(name, work, every_seconds), name=name))

    async def close(self) -> None:
        """End everything, and wait until it has ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _repeat(self, name: str, work: Callable[[], Awaitable[object]], every_seconds: float) -> None:
        num_failures, said_s = 0, 0.0
        while True:
            try:
                await work()
            except Exception as error:
                num_failures += 1
                if not isinstance(error, StoreError):  # which counted itself
                    self._store.errors += 1
                if num_failures == 1 or time.monotonic() - said_s >= _SAY_EVERY_SECONDS:
                    said_s = time.monotonic()
                    self._say(name, error, num_failures)
            else:
                if num_failures:
                    self._log.info("background.recovered", task=name, failures=num_failures)
                num_failures = 0
            await asyncio.sleep(every_seconds)

    def _say(self, name: str, error: Exception, num_failures: int) -> None:
        expected = isinstance(error, StoreError | OSError)
        self._log.error(
            "background.failed",
            task=name,
            failures=num_failures,
            detail=str(error) or type(error).__name__,
            exc_info=None if expected else error,
        )
