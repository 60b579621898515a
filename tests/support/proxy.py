"""A TCP proxy that misbehaves on purpose, from a seed: it drops, delays, truncates, corrupts and resets connections."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from urllib.parse import urlsplit


class Fault(Enum):
    """What happens to one connection."""

    NONE = "pass everything on"
    DROP = "accept, read, never answer"
    RESET = "reset as soon as something was sent"
    RESET_AFTER_REQUEST = "let the server hear the request, then reset"
    TRUNCATE = "cut the answer in the middle and close"
    CORRUPT_ANSWER = "change one byte of the answer's body"
    CORRUPT_REQUEST = "change one byte of the request's body"
    DELAY = "hold the answer back for a while"
    DRIP = "pass the answer on a few bytes at a time"


ALL_FAULTS = tuple(fault for fault in Fault if fault is not Fault.NONE)
Schedule = Callable[[int], Fault]


def always(fault: Fault) -> Schedule:
    """Every connection suffers `fault`."""
    return lambda _: fault


def first(count: int, fault: Fault) -> Schedule:
    """The first `count` connections suffer `fault`, later ones none."""
    return lambda index: fault if index < count else Fault.NONE


def seeded(seed: int, *, share: float = 0.5) -> Schedule:
    """A share of the connections suffers a random fault; connection k of a seed always the same one."""

    def choose(index: int) -> Fault:
        rng = random.Random(seed * 1_000_003 + index)
        return rng.choice(ALL_FAULTS) if rng.random() < share else Fault.NONE

    return choose


@dataclass(kw_only=True)
class FaultyProxy:
    """Passes connections on to `target` (host, port) under `schedule`; `suffered` lists the fault of each connection.

    `reachable` set to False resets every new connection before a byte is read, as a dead server's port does.
    """

    target: tuple[str, int]
    schedule: Schedule = field(default=always(Fault.NONE))
    delay_s: float = 0.3
    reachable: bool = True
    suffered: list[Fault] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _open: set[socket.socket] = field(default_factory=set)
    _stopping: bool = False

    @contextmanager
    def listening(self) -> Iterator[str]:
        """Listen on a free port of loopback; gives the address as a URL."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        thread = threading.Thread(target=self._accept, args=(listener,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            self._stopping = True
            # Shutting a listening socket down wakes its accept(), which close() alone does not.
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            listener.close()
            with self._lock:
                for connection in self._open:
                    _reset(connection)

    def _accept(self, listener: socket.socket) -> None:
        while not self._stopping:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with self._lock:
                fault = self.schedule(len(self.suffered))
                self.suffered.append(fault)
                self._open.add(client)
            if not self.reachable:
                _reset(client)
                continue
            threading.Thread(target=self._serve, args=(client, fault), daemon=True).start()

    def _serve(self, client: socket.socket, fault: Fault) -> None:
        rng = random.Random(len(self.suffered))
        try:
            if fault is Fault.RESET:
                client.recv(1)
                _reset(client)
                return
            if fault is Fault.DROP:
                while client.recv(65536):
                    pass
                return
            with socket.create_connection(self.target) as server:
                upstream = threading.Thread(target=self._upstream, args=(client, server, fault, rng), daemon=True)
                upstream.start()
                self._downstream(client, server, fault, rng)
                _close(server)
                _close(client)
                upstream.join()
        except OSError:
            pass
        finally:
            _close(client)
            with self._lock:
                self._open.discard(client)

    def _upstream(self, client: socket.socket, server: socket.socket, fault: Fault, rng: random.Random) -> None:
        try:
            while data := client.recv(65536):
                # Only bodies: a header that was changed would be another call, which no client can notice.
                if fault is Fault.CORRUPT_REQUEST:
                    damaged = _flip(data, rng) if not data.startswith((b"GET", b"POST")) else _flip_body(data, rng)
                    fault = Fault.NONE if damaged != data else fault
                    data = damaged
                server.sendall(data)
        except OSError:
            pass
        finally:
            _close(server)

    def _downstream(self, client: socket.socket, server: socket.socket, fault: Fault, rng: random.Random) -> None:
        while data := server.recv(65536):
            if fault is Fault.RESET_AFTER_REQUEST:
                _reset(client)
                return
            if fault is Fault.TRUNCATE:
                client.sendall(data[: max(1, rng.randrange(len(data)))])
                return
            if fault is Fault.DELAY:
                time.sleep(self.delay_s)
            if fault is Fault.CORRUPT_ANSWER:
                damaged = _flip_body(data, rng) if data.startswith(b"HTTP/") else _flip(data, rng)
                fault = Fault.NONE if damaged != data else fault
                data = damaged
            if fault is Fault.DRIP:
                for start in range(0, len(data), 16):
                    client.sendall(data[start : start + 16])
                    time.sleep(0.02)
                continue
            client.sendall(data)


@contextmanager
def faulty_proxy(address: str, schedule: Schedule, **options: float) -> Iterator[tuple[str, FaultyProxy]]:
    """A proxy before the server at `address`; gives its own address and itself."""
    url = urlsplit(address)
    assert url.hostname is not None
    assert url.port is not None
    proxy = FaultyProxy(target=(url.hostname, url.port), schedule=schedule, **options)
    with proxy.listening() as own:
        yield own, proxy


def _flip(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def _flip_body(data: bytes, rng: random.Random) -> bytes:
    head, separator, body = data.partition(b"\r\n\r\n")
    return head + separator + _flip(body, rng) if body else data


def _reset(connection: socket.socket) -> None:
    # Linger of zero seconds makes close() send RST.
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        # Another thread may be reading; the socket is closed only after that returns.
        connection.shutdown(socket.SHUT_RD)
    connection.close()


def _close(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
