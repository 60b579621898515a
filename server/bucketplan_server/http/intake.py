"""Bodies on their way in: what all of them hold together is bounded in bytes, and each of them in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request
from starlette.types import Scope

from bucketplan_server.problems import Problem

__all__ = ["Intake"]

_WHOLE_BODY_WAITS = 10
"""How many waits for its next part a whole body may take: with the default, 32 MiB at 110 KB/s arrive in time."""
_HELD = "held_body_bytes"


class Intake:
    """Counts the bytes of the bodies that calls hold, from their arrival until `release`, the front's at the latest.

    A body of which no part comes for `timeout_seconds`, or that is not whole after ten times that, is refused.
    """

    def __init__(self, *, most_bytes: int, timeout_seconds: float, retry_after_seconds: int) -> None:
        self._most_bytes = most_bytes
        self._timeout_seconds = timeout_seconds
        self._retry_after_seconds = retry_after_seconds
        self._waits: set[asyncio.Timeout] = set()
        self._stops_at: float | None = None
        self.held_bytes = 0

    def take(self, scope: Scope, num_bytes: int) -> None:
        """Count bytes that a call holds from now on; raises ``busy`` where all calls together would hold too many."""
        if self.held_bytes + num_bytes > self._most_bytes:
            raise Problem(
                "busy",
                f"the bodies of all calls hold {self._most_bytes} bytes, the most that this server takes at once "
                "(BUCKETPLAN_MAX_BODIES_BYTES); repeat the call",
                fields={"limit": self._most_bytes},
                headers={"Retry-After": str(self._retry_after_seconds), "Connection": "close"},
            )
        self.held_bytes += num_bytes
        state = scope.setdefault("state", {})
        state[_HELD] = state.get(_HELD, 0) + num_bytes

    def release(self, scope: Scope) -> None:
        """The call holds its body no longer: it was handed over, or the call has ended."""
        self.held_bytes -= scope.get("state", {}).pop(_HELD, 0)

    async def parts(self, request: Request) -> AsyncIterator[bytes]:
        """The parts of a body as they arrive; raises ``body-timeout``, and ``busy`` where the server stops before."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + _WHOLE_BODY_WAITS * self._timeout_seconds
        stream = request.stream()
        while True:
            try:
                async with self._wait_until(min(loop.time() + self._timeout_seconds, ends_at)):
                    part = await anext(stream)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise self._ends(loop.time() < ends_at) from None
            if part:
                yield part

    def stop(self, seconds: float) -> None:
        """Wait at most `seconds` more for any body, and for the next ones."""
        if self._stops_at is None:
            self._stops_at = asyncio.get_running_loop().time() + seconds
            for wait in self._waits:
                wait.reschedule(min(wait.when() or self._stops_at, self._stops_at))

    def _ends(self, has_stalled: bool) -> Problem:
        if self._stops_at is not None and asyncio.get_running_loop().time() >= self._stops_at:
            return Problem(
                "busy",
                "the server is stopping, and the body was not whole in time; repeat the call, which another replica "
                "may answer",
                headers={"Retry-After": str(self._retry_after_seconds), "Connection": "close"},
            )
        seconds = self._timeout_seconds * (1 if has_stalled else _WHOLE_BODY_WAITS)
        what = "no part of the body came" if has_stalled else "the body was not whole"
        return Problem(
            "body-timeout",
            f"{what} within {seconds:g} s (BUCKETPLAN_BODY_TIMEOUT_SECONDS is {self._timeout_seconds:g}); repeat the "
            "call over a better connection",
            headers={"Connection": "close"},
        )

    @asynccontextmanager
    async def _wait_until(self, when: float) -> AsyncIterator[None]:
        async with asyncio.timeout_at(when if self._stops_at is None else min(when, self._stops_at)) as wait:
            self._waits.add(wait)
            try:
                yield
            finally:
                self._waits.discard(wait)
