"""HTTP under one absolute deadline: no peer can hold a call longer, not even by sending a byte now and then.

httpx bounds each socket operation, so an answer that drips lives as long as it drips, a body that is read slowly as
long as it is read, and a name with dead addresses as long as there are more of them. Here one deadline holds over
resolving the name, all its addresses, and every read and write, each of which asks how much is left.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeAlias

import httpcore

from bucketplan_client import lean_httpx
from bucketplan_client.background import in_background

if TYPE_CHECKING:
    import httpx
else:
    httpx = lean_httpx.load()

__all__ = ["DeadlineTransport", "deadline", "resolve"]

_SLICE_BYTES = 64 * 1024
_LEAST_SHARE_S = 0.25
"""A connection to another continent takes that long; with many addresses the last ones then go untried."""
_UNBOUNDED_S = 3_600.0

_Address: TypeAlias = tuple[Any, Any, int, str, Any]

_deadline: ContextVar[float | None] = ContextVar("bucketplan_deadline", default=None)


@contextmanager
def deadline(at: float) -> Iterator[None]:
    """Bound every socket operation of this thread inside the block by the moment `at` (`time.monotonic`)."""
    token = _deadline.set(at)
    try:
        yield
    finally:
        _deadline.reset(token)


def _left(timeout: float | None, expired: type[Exception]) -> float | None:
    at = _deadline.get()
    if at is None:
        return timeout
    left = at - time.monotonic()
    if left <= 0:
        raise expired("the deadline has passed")
    return left if timeout is None else min(timeout, left)


class _Stream(httpcore.NetworkStream):
    """A connected socket. httpcore's own stream gives each send of a large body the whole timeout anew."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        with _as_httpcore(httpcore.ReadTimeout, httpcore.ReadError):
            self._socket.settimeout(_left(timeout, httpcore.ReadTimeout))
            return self._socket.recv(max_bytes)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        with _as_httpcore(httpcore.WriteTimeout, httpcore.WriteError), memoryview(buffer) as rest:
            sent = 0
            while sent < len(rest):
                self._socket.settimeout(_left(timeout, httpcore.WriteTimeout))
                sent += self._socket.send(rest[sent : sent + _SLICE_BYTES])

    def close(self) -> None:
        self._socket.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        with _as_httpcore(httpcore.ConnectTimeout, httpcore.ConnectError):
            try:
                # Python's handshake keeps the socket's timeout as a whole, over all that it reads and writes.
                self._socket.settimeout(_left(timeout, httpcore.ConnectTimeout))
                return _Stream(ssl_context.wrap_socket(self._socket, server_hostname=server_hostname))
            except BaseException:
                self._socket.close()
                raise

    def get_extra_info(self, info: str) -> Any:
        match info:
            case "socket":
                return self._socket
            case "client_addr":
                return self._socket.getsockname()
            case "server_addr":
                return self._socket.getpeername()
            case "ssl_object" if isinstance(self._socket, ssl.SSLSocket):
                return self._socket
            case "is_readable":
                return _is_readable(self._socket)
        return None


def _is_readable(connected: socket.socket) -> bool:
    """Whether something, such as the end, waits to be read: an idle connection of which that is true is done for."""
    if connected.fileno() < 0:
        return True
    poller = select.poll()
    poller.register(connected, select.POLLIN)
    return bool(poller.poll(0))


class _Backend(httpcore.NetworkBackend):
    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        with _as_httpcore(httpcore.ConnectTimeout, httpcore.ConnectError):
            left = _left(timeout, httpcore.ConnectTimeout)
            until = time.monotonic() + (_UNBOUNDED_S if left is None else left)
            connected = _connect(resolve(host, port, until=until), until, local_address)
            try:
                for option in socket_options or ():
                    connected.setsockopt(*option)
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except BaseException:
                connected.close()
                raise
            return _Stream(connected)


def _connect(addresses: Sequence[_Address], until: float, local_address: str | None) -> socket.socket:
    """The first of `addresses` that takes a connection; each gets an equal share of what is left when it is tried."""
    failure: OSError = TimeoutError("the deadline has passed")
    for index, (family, kind, protocol, _, address) in enumerate(addresses):
        left = until - time.monotonic()
        if left <= 0:
            break
        candidate: socket.socket | None = None
        try:
            candidate = socket.socket(family, kind, protocol)
            candidate.settimeout(min(left, max(_LEAST_SHARE_S, left / (len(addresses) - index))))
            if local_address is not None:
                candidate.bind((local_address, 0))
            candidate.connect(address)
            return candidate
        except OSError as error:
            if candidate is not None:
                candidate.close()
            failure = error
    raise failure


_lookups: dict[tuple[str, int], Future[Sequence[_Address]]] = {}
_lookups_lock = threading.Lock()


def _forget_lookups() -> None:
    # A forked process has the table and not the threads that would answer it.
    global _lookups_lock
    _lookups.clear()
    _lookups_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_lookups)


def resolve(host: str, port: int, *, until: float) -> Sequence[_Address]:
    """The addresses of `host`, as `socket.getaddrinfo` gives them; raises `httpcore.ConnectTimeout` at `until`.

    The resolver of the C library has timeouts of its own, of half a minute and more, and cannot be interrupted. Calls
    for a name that is being looked up wait for that lookup, so that retries do not pile up threads.
    """
    key = (host, port)

    def look_up() -> Sequence[_Address]:
        try:
            return socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM)
        finally:
            with _lookups_lock:
                _lookups.pop(key, None)

    with _lookups_lock:
        future = _lookups.get(key)
        if future is None:
            future = _lookups[key] = in_background(look_up, name="bucketplan-resolve")
    try:
        return future.result(max(0.0, until - time.monotonic()))
    except TimeoutError as error:
        raise httpcore.ConnectTimeout(f"the name {host!r} was not resolved in time") from error
    except UnicodeError as error:
        raise httpcore.ConnectError(f"{host!r} is no host name: {error}") from error


@contextmanager
def _as_httpcore(timeout: type[Exception], failed: type[Exception]) -> Iterator[None]:
    """Raise what sockets raise as httpcore's exceptions."""
    try:
        yield
    except TimeoutError as error:
        raise timeout(str(error)) from error
    except OSError as error:
        raise failed(str(error)) from error


@contextmanager
def _as_httpx(request: httpx.Request | None = None) -> Iterator[None]:
    """Raise httpcore's exceptions as the httpx exceptions of the same names."""
    try:
        yield
    except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError, httpcore.ProxyError) as error:
        raise getattr(httpx, type(error).__name__)(str(error), request=request) from error
    except httpcore.UnsupportedProtocol as error:
        raise httpx.UnsupportedProtocol(str(error), request=request) from error
    except httpcore.ConnectionNotAvailable as error:
        raise httpx.ConnectError(str(error), request=request) from error


class _Body(httpx.SyncByteStream):
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        with _as_httpx():
            yield from self._stream

    def close(self) -> None:
        self._stream.close()


class DeadlineTransport(httpx.BaseTransport):
    """An httpx transport whose sockets keep to `deadline`; HTTP/1.1, kept-alive, at most `max_connections`.

    A forked process opens connections of its own: on its parent's the two would read each other's answers.
    """

    def __init__(self, *, ssl_context: ssl.SSLContext | None = None, max_connections: int = 16) -> None:
        self._ssl_context = ssl_context
        self._max_connections = max_connections
        self._inherited: list[httpcore.ConnectionPool] = []
        self._open_pool()

    def _open_pool(self) -> None:
        self._pool = httpcore.ConnectionPool(
            ssl_context=self._ssl_context,
            max_connections=self._max_connections,
            max_keepalive_connections=self._max_connections,
            keepalive_expiry=60.0,
            network_backend=_Backend(),
        )
        self._owner = os.getpid()  # last, since other threads of a fork take the pool once they see themselves here

    def _own_pool(self) -> httpcore.ConnectionPool:
        if self._owner != os.getpid():
            # Kept and never closed: its lock may be held by a thread that this process does not have.
            self._inherited.append(self._pool)
            self._open_pool()
        return self._pool

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        inner = httpcore.Request(
            method=request.method,
            url=httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
            headers=request.headers.raw,
            content=request.stream,
            extensions=self._extensions(request),
        )
        with _as_httpx(request):
            response = self._own_pool().handle_request(inner)
        return httpx.Response(
            status_code=response.status,
            headers=response.headers,
            stream=_Body(response.stream),
            extensions=response.extensions,
        )

    def _extensions(self, request: httpx.Request) -> dict[str, Any]:
        # Waiting for one of the pool's connections is no operation of a socket, so nothing else would bound it.
        timeouts = dict(request.extensions.get("timeout", {}))
        with _as_httpx(request):
            timeouts["pool"] = _left(timeouts.get("pool"), httpcore.PoolTimeout)
        return {**request.extensions, "timeout": timeouts}

    def close(self) -> None:
        self._own_pool().close()
