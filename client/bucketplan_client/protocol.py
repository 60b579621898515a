"""Protocols between ranks as plain generators: they say which step of the job's store comes next, and do no I/O.

A protocol yields steps and gets their results back, so the same code runs on a real store (`bucketplan_client.store`)
and, ten thousand times with other faults, on a simulated one. Each value that decides something is written once with
`PutOnce`; whoever writes second reads what stands there and adopts it. That is the single point of decision without
which ranks whose deadlines differ by a millisecond would choose differently.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

__all__ = [
    "Exchange",
    "Get",
    "GetMany",
    "Now",
    "Protocol",
    "Put",
    "PutOnce",
    "Step",
    "Wait",
    "exchange",
    "members_digest",
]

T = TypeVar("T")

# Steps cross no wire and are never compared; a NamedTuple is made in an eighth of the time of a frozen dataclass.


class Put(NamedTuple):
    """Write `value` under `key`, over whatever stands there. Result: None."""

    key: str
    value: bytes


class PutOnce(NamedTuple):
    """Write `value` under `key` unless something stands there. Result: what stands there now."""

    key: str
    value: bytes


class Get(NamedTuple):
    """Read `key` without waiting. Result: its value, None where there is none."""

    key: str


class GetMany(NamedTuple):
    """Read `keys`, all of which are there. Result: their values in order."""

    keys: tuple[str, ...]


class Wait(NamedTuple):
    """Wait until every key is there, at most until the moment `until`. Result: the keys that are missing then."""

    keys: tuple[str, ...]
    until: float


@dataclass(frozen=True, slots=True)
class Now:
    """Result: the present moment in seconds on the clock that `Wait.until` is read on."""


Step = Put | PutOnce | Get | GetMany | Wait | Now
Protocol = Generator[Any, Any, T]
"""Yields a `Step` (or one that its driver was told of) and receives the result of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One comparison between `members`, the first of whom collects and judges.

    `key` names it in the store, the same on all members. `judge` turns the payloads by rank into a verdict, `absent`
    the ranks that were missed into one. `grace_s` is how much longer members wait for the verdict than the collector
    waits for them.
    """

    key: str
    rank: int
    members: Sequence[int]
    payload: bytes
    judge: Callable[[Mapping[int, bytes]], bytes]
    absent: Callable[[Sequence[int]], bytes]
    until: float
    grace_s: float = 2.0


def exchange(call: Exchange) -> Protocol[bytes]:
    """The one verdict of this comparison, the same on every member that gets one; ends by `until` plus `grace_s`.

    Each member writes one value and waits for one, whatever their number. Where the collector dies, the first member
    to lose patience writes the verdict.
    """
    collector = call.members[0]
    verdict = f"{call.key}/verdict"
    yield Put(_payload_key(call.key, call.rank), call.payload)
    if call.rank == collector:
        keys = tuple(_payload_key(call.key, member) for member in call.members)
        missing: tuple[str, ...] = yield Wait(keys, call.until)
        if missing:
            absent = [member for member, key in zip(call.members, keys, strict=True) if key in set(missing)]
            standing: bytes = yield PutOnce(verdict, call.absent(absent))
            return standing
        payloads: Sequence[bytes] = yield GetMany(keys)
        standing = yield PutOnce(verdict, call.judge(dict(zip(call.members, payloads, strict=True))))
        return standing
    missing = yield Wait((verdict,), call.until + call.grace_s)
    if missing:
        standing = yield PutOnce(verdict, call.absent([collector]))
        return standing
    values: Sequence[bytes] = yield GetMany((verdict,))
    return values[0]


def withdraw(key: str, rank: int, payload: bytes, verdict: bytes) -> Protocol[None]:
    """Take part in the exchange `key` without waiting for anybody: `payload`, and `verdict` unless there is one.

    For a rank that is about to leave: the others must wait neither for its value nor, where it collects, for its word.
    """
    yield Put(_payload_key(key, rank), payload)
    yield PutOnce(f"{key}/verdict", verdict)


def members_digest(members: Sequence[int]) -> str:
    """SHA-256 over ranks in group order: names one group among those of a role; 64 hex characters."""
    return hashlib.sha256(struct.pack(f"<{len(members)}q", *members)).hexdigest()


def _payload_key(key: str, rank: int) -> str:
    return f"{key}/rank/{rank}"
