"""Connections whose caller sends no request are closed: each costs a descriptor, and needs no token."""

from __future__ import annotations

import asyncio
from asyncio.events import TimerHandle
from typing import cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

__all__ = ["HEAD_SECONDS", "HeadTimeoutProtocol"]

HEAD_SECONDS = 10.0
"""Time for a complete request head, from the connection or from the first byte behind an answer. Ranks and probes send
theirs at once; browsers also open connections that they may never use, and open others when they need them."""
_GRACE_SECONDS = 1.0


class HeadTimeoutProtocol(HttpToolsProtocol):
    """uvicorn's HTTP over httptools, which by itself only closes connections that are silent behind an answer.

    A connection has one timer, which its first complete head ends; a request costs none.
    """

    _head_timer: TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # Behind an answer the first byte ends uvicorn's own timer, whatever follows it.
        cycle: RequestResponseCycle | None = self.cycle
        if self._head_timer is None and cycle is not None and cycle.response_complete:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._look_again)

    def _look_again(self) -> None:
        # Timers run before what has arrived is read: of a loop that was held up, the head may be there by now.
        self._head_timer = self.loop.call_later(_GRACE_SECONDS, self._close)

    def _close(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
