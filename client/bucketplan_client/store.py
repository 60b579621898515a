"""The job's rendezvous store, with deadlines, values of any size, and typed errors.

Ranks agree through the store of torch.distributed rather than through a collective: it names who is missing, needs no
device, and a rank that waits on it blocks nobody else.
"""

from __future__ import annotations

import logging
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from bucketplan_client.background import in_background
from bucketplan_client.errors import StoreFailed, Where
from bucketplan_client.protocol import Get, GetMany, Now, Protocol, Put, PutOnce, Wait

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

__all__ = ["LONGEST_CALL_S", "JobStore", "default_store", "drive", "drive_apart"]

T = TypeVar("T")
_LOG = logging.getLogger(__name__)

_CHUNK_BYTES = 4 * 2**20
"""TCPStore drops the connection of whoever sends a value above 8 MiB (seen in torch 2.13)."""
_WHOLE, _CHUNKED = b"=", b"#"
LONGEST_CALL_S = 60.0
"""Longest call that waits for no other rank: it takes milliseconds, but many ranks may read large values at once."""
_SLACK_S = 5.0
"""How long after its own time a wait of the store may still end by itself."""
_APART_S = 3.0
"""How long a rank that is leaving still talks to the store; its few writes take milliseconds."""


def default_store() -> Store:
    """The store that `torch.distributed.init_process_group` made; raises `ValueError` before that."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


class JobStore:
    """A part of the job's store: everything under `prefix`. Raises `StoreFailed`, never waits past a deadline.

    A call that waits for no other rank has `call_s`: a store whose host stands still (stopped, swapped out, behind a
    network that swallows packets) answers nothing and closes nothing. One object serves one thread; `separate` gives
    another thread its own connection.
    """

    def __init__(
        self, store: Store, *, prefix: str, where: Where | None = None, call_s: float = LONGEST_CALL_S
    ) -> None:
        from torch.distributed.distributed_c10d import PrefixStore

        self.prefix = prefix
        self.where = where or Where()
        self._base = store
        self._call_s = call_s
        self._store = PrefixStore(prefix, store)

    def scoped(self, name: str, *, call_s: float | None = None) -> JobStore:
        """The part of this part under `name`, with calls of `call_s` where that is given."""
        most_s = self._call_s if call_s is None else call_s
        return JobStore(self._base, prefix=f"{self.prefix}/{name}", where=self.where, call_s=most_s)

    def separate(self) -> JobStore:
        """The same part over a connection of its own."""
        copy = self._call("clone", self._base.clone)  # type: ignore[attr-defined]  # torch's stubs lag behind
        return JobStore(copy, prefix=self.prefix, where=self.where, call_s=self._call_s)

    def put(self, key: str, value: bytes) -> None:
        self._call(f"set {key}", lambda: self._set(key, self._packed(key, value)))

    def put_once(self, key: str, value: bytes) -> bytes:
        """Write unless something stands there; what stands there now."""

        def write() -> bytes:
            mine = self._packed(key, value)
            standing = self._store.compare_set(key, b"", mine)  # type: ignore[arg-type]  # as for set below
            if standing == mine:
                # A TCPStore without libuv wakes those who wait for a key only when it is set.
                self._set(key, mine)
            return value if standing == mine else self._unpacked(key, standing)

        return self._call(f"compare_set {key}", write)

    def get(self, key: str) -> bytes | None:
        """The value, None where there is none; never waits."""
        return self._call(
            f"get {key}", lambda: self._unpacked(key, self._store.get(key)) if self._store.check([key]) else None
        )

    def get_many(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys that are there, in one round trip."""

        def read() -> list[bytes]:
            values = self._store.multi_get(list(keys))
            return [self._unpacked(key, value) for key, value in zip(keys, values, strict=True)]

        return self._call(f"multi_get of {len(keys)} keys", read)

    def wait(self, keys: Sequence[str], until: float) -> tuple[str, ...]:
        """Wait for `keys` until the moment `until` (`time.monotonic`); those that are missing then."""
        left_s = until - time.monotonic()
        if left_s > 0:
            operation = f"wait for {len(keys)} keys"
            try:
                self._within(
                    operation,
                    lambda: self._store.wait(list(keys), timedelta(seconds=left_s)),
                    max(0.0, until - time.monotonic()) + _SLACK_S,
                )
            except RuntimeError as error:
                # A timeout and a lost store raise the same class on some stores; only the clock tells them apart.
                if time.monotonic() < until - 0.05:
                    raise StoreFailed(operation, _first_line(error), where=self.where) from error
            else:
                return ()
        return self._call(
            "check",
            lambda: () if self._store.check(list(keys)) else tuple(k for k in keys if not self._store.check([k])),
        )

    def _call(self, operation: str, call: Callable[[], T]) -> T:
        with self._typed(operation):
            return self._within(operation, call, self._call_s)

    def _within(self, operation: str, call: Callable[[], T], most_s: float) -> T:
        """What `call` returns or raises; raises `StoreFailed` where it does neither for `most_s`.

        Nothing interrupts a call of the store, and Python sees Ctrl-C only between its own instructions: so it is made
        on a thread of its own, and left behind where it does not end.
        """
        future = in_background(call, name="bucketplan-store")
        try:
            return future.result(most_s)
        except TimeoutError:
            if future.done():
                raise
            silent = f"the store did not answer for {most_s:.0f} s; is the process that hosts it stopped?"
            raise StoreFailed(operation, silent, where=self.where) from None

    def _set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]  # annotated as str, bytes are taken as they are

    def _packed(self, key: str, value: bytes) -> bytes:
        if len(value) <= _CHUNK_BYTES:
            return _WHOLE + value
        name = f"{key}/chunks/{uuid.uuid4().hex}"
        data = zlib.compress(value, 6)
        count = -(-len(data) // _CHUNK_BYTES)
        for index in range(count):
            self._set(f"{name}/{index}", data[index * _CHUNK_BYTES : (index + 1) * _CHUNK_BYTES])
        return _CHUNKED + f"{count}:{name}".encode()

    def _unpacked(self, key: str, value: bytes) -> bytes:
        kind, rest = value[:1], value[1:]
        if kind == _WHOLE:
            return rest
        if kind != _CHUNKED:
            raise StoreFailed(f"get {key}", f"a value that is not ours stands there: {value[:20]!r}", where=self.where)
        count, _, name = rest.decode().partition(":")
        return zlib.decompress(b"".join(self._store.get(f"{name}/{index}") for index in range(int(count))))

    @contextmanager
    def _typed(self, operation: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise StoreFailed(operation, _first_line(error), where=self.where) from error


def drive(protocol: Protocol[T], store: JobStore, *, other: Callable[[Any], Any] | None = None) -> T:
    """Run `protocol` on `store` to its end; `other` carries out steps that are none of the store's.

    What a step raises is raised inside the protocol, which may handle it.
    """
    try:
        step = next(protocol)
        while True:
            try:
                result = _perform(step, store, other)
            except Exception as error:
                step = protocol.throw(error)
            else:
                step = protocol.send(result)
    except StopIteration as done:
        value: T = done.value
        return value


def drive_apart(protocol: Protocol[None], store: JobStore, *, told: str) -> None:
    """Run `protocol` on a connection of its own for a few seconds at most, whatever the store does; raises nothing.

    For ranks that leave while something else is being raised. `told` is what the others do not learn where it fails.
    """
    future = in_background(lambda: drive(protocol, store.separate()), name="bucketplan-leave")
    try:
        future.result(_APART_S)
    except Exception as error:
        _LOG.warning("the other ranks could not be told that this one %s: %s", told, error)


def _perform(step: Any, store: JobStore, other: Callable[[Any], Any] | None) -> Any:
    match step:
        case Put(key, value):
            return store.put(key, value)
        case PutOnce(key, value):
            return store.put_once(key, value)
        case Get(key):
            return store.get(key)
        case GetMany(keys):
            return store.get_many(keys)
        case Wait(keys, until):
            return store.wait(keys, until)
        case Now():
            return time.monotonic()
    assert other is not None, f"nobody carries out {step!r}"
    return other(step)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
