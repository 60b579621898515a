"""Connections as this server keeps them: bounded in time without a request, closed without a reset, quick where bytes
are stored."""

from __future__ import annotations

import asyncio
from asyncio.events import TimerHandle
from collections.abc import Callable, Iterable
from typing import Literal, cast

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

__all__ = ["HEAD_SECONDS", "LINGER_SECONDS", "ServerProtocol", "write_stored"]

HEAD_SECONDS = 10.0
"""Time for a complete request head, from the connection or from the first byte behind an answer. Ranks and probes send
theirs at once; browsers also open connections that they may never use, and open others when they need them."""
_GRACE_SECONDS = 1.0
LINGER_SECONDS = 2.0
"""How long what still comes behind an early answer is read and dropped: 32 MiB at 16 MB/s. A caller that reads while
it sends has the answer by then, and one that stalls holds its descriptor no longer."""
_CYCLE = "bucketplan.cycle"
_STATUS_LINES = {200: b"HTTP/1.1 200 OK\r\n", 304: b"HTTP/1.1 304 Not Modified\r\n"}


class ServerProtocol(HttpToolsProtocol):
    """uvicorn's HTTP over httptools, which by itself only closes connections that are silent behind an answer.

    A connection has one timer, which its first complete head ends; a request costs none. One that is closed while its
    caller still sends is read on for `LINGER_SECONDS`: closing it at once would reset it, and a reset may take the
    answer with it before the caller has read that (RFC 9112, section 9.6).
    """

    _head_timer: TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._closing = _LingeringClose(self, self.transport)
        self.transport = cast(asyncio.Transport, self._closing)
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
        # The call runs when the loop is back, so it finds this in its scope.
        self.scope["extensions"] = {_CYCLE: self.cycle}  # type: ignore[dict-item]  # one of our own, which is no map

    def send_400_response(self, msg: str) -> None:
        self._closing.is_cut_short = True
        super().send_400_response(msg)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    @property
    def is_owed_more(self) -> bool:
        """Whether the caller has not sent all of what it announced, or has sent more calls than were answered."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and (cycle.more_body or bool(self.pipeline))

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


class _LingeringClose:
    """What uvicorn uses of a transport, closed without a reset where its caller still sends."""

    __slots__ = (
        "_is_lingering",
        "_protocol",
        "_transport",
        "get_extra_info",
        "is_cut_short",
        "pause_reading",
        "resume_reading",
        "write",
        "writelines",
    )

    def __init__(self, protocol: ServerProtocol, transport: asyncio.Transport) -> None:
        self._protocol = protocol
        self._transport = transport
        self._is_lingering = False
        self.is_cut_short = False
        self.get_extra_info = transport.get_extra_info
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading
        self.write: Callable[[bytes], None] = transport.write
        self.writelines: Callable[[Iterable[bytes]], None] = transport.writelines

    def is_closing(self) -> bool:
        return self._is_lingering or self._transport.is_closing()

    def close(self) -> None:
        if self.is_closing():
            return
        # TLS has a closing handshake of its own, which reads on until the caller takes part in it.
        if self._transport.can_write_eof() and (self.is_cut_short or self._protocol.is_owed_more):
            self._is_lingering = True
            # An earlier call of this connection may still be worked on, and its answer has no place any more.
            self.write = self.writelines = _drop
            _Dropping(self._protocol, self._transport)
        else:
            self._transport.close()


def _drop(_data: object) -> None:
    """Write nothing."""


class _Dropping(asyncio.Protocol):
    """Drops what a caller sends behind its answer, until it ends or `LINGER_SECONDS` are over."""

    def __init__(self, protocol: ServerProtocol, transport: asyncio.Transport) -> None:
        self._protocol = protocol
        self._timer = protocol.loop.call_later(LINGER_SECONDS, transport.close)
        transport.set_protocol(self)
        transport.write_eof()
        protocol.flow.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._protocol.connection_lost(exc)


def write_stored(scope: Scope, status: Literal[200, 304], lines: bytes, body: bytes) -> bool:
    """Write a whole answer whose header `lines` were built here; False where the call is not the plain case.

    uvicorn looks at each header of an answer with two patterns, which costs more than everything else that a known plan
    needs. What is False is left to `send`, which also knows the calls that this does not.
    """
    cycle: RequestResponseCycle | None = scope.get("extensions", {}).get(_CYCLE)
    if (
        cycle is None
        or not cycle.keep_alive
        or cycle.response_started
        or cycle.disconnected
        or cycle.waiting_for_100_continue
        or cycle.access_log
        or cycle.flow.write_paused
    ):
        return False
    cycle.response_started = cycle.response_complete = True
    # uvicorn makes these once a second: the date.
    of_server = b"".join(b"%b: %b\r\n" % header for header in cycle.default_headers)
    cycle.transport.writelines((_STATUS_LINES[status], of_server, lines, b"\r\n", body))
    cycle.on_response()
    return True
