"""Where an opening stands in the job's store, and where each rank was last seen to open one.

An opening is one of a job, of exactly these participants, and the n-th (or the one of that name) that a rank opens of
them. All of that is in its key, so that a sub-group that opens an attempt of its own meets nobody else's, and whoever
was in it still meets the others in theirs. A rank that comes under another key than the others, which never meet it,
leaves word under a key that depends on nothing but its rank: they find it when they miss that rank.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from bucketplan_client.arguments import printable
from bucketplan_client.protocol import GetMany, Now, Protocol, Put, Wait, members_digest
from bucketplan_core.errors import DecodeError, describe_ranks
from bucketplan_core.fields import Fields
from bucketplan_core.wire import pack, unpack

__all__ = ["PREFIX", "Openings", "Place", "Seen", "leave_word", "seen_elsewhere"]

PREFIX = "bucketplan.openings"
"""Where everything of openings stands in the job's store."""
_MAX_ASKED = 32
"""Of so many ranks that are missing an error says where they were seen: more than anybody reads of."""
_LONGEST_REASON = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One opening: its `job`, its `participants` in ascending order, and its number or name among those of these."""

    job: str
    participants: tuple[int, ...]
    number: int = 0
    name: str | None = None

    @property
    def digest(self) -> str:
        """What the participants are called in keys; 64 hex characters."""
        return members_digest(self.participants)

    @property
    def key(self) -> str:
        """What the keys of this opening begin with."""
        own = str(self.number) if self.name is None else f"name/{quote(self.name, safe='')}"
        return f"job/{quote(self.job, safe='')}/{self.digest}/{own}"


class Openings:
    """Counts the openings of this process, of each job and participants apart."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, tuple[int, ...], int]] = Counter()
        self._lock = threading.Lock()

    def place(self, job: str, participants: tuple[int, ...], *, rank: int, name: str | None) -> Place:
        """The place of the next opening; one with a name is not counted."""
        if name is not None:
            return Place(job=job, participants=participants, name=name)
        with self._lock:
            # Ranks that are threads of one process count apart, as processes do.
            number = self._counts[job, participants, rank]
            self._counts[job, participants, rank] += 1
        return Place(job=job, participants=participants, number=number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Where a rank last began to open: `key` of the opening, `text` what it is of, in words.

    Or `failure`: why it has no place at all, and `key` is empty.
    """

    key: str = ""
    text: str = ""
    failure: str = ""

    @classmethod
    def at(cls, place: Place) -> Seen:
        named = "" if place.name is None else f" and name {place.name!r}"
        return cls(key=place.key, text=f"job {place.job!r}, participants {describe_ranks(place.participants)}{named}")

    def encoded(self) -> bytes:
        failure = printable(self.failure[:_LONGEST_REASON])
        return pack({"failure": failure, "key": self.key, "text": self.text})

    @classmethod
    def decode(cls, data: bytes) -> Seen:
        fields = Fields(unpack(data), "seen")
        return cls(key=fields.text("key"), text=fields.text("text"), failure=fields.text("failure"))

    def is_apart_from(self, key: str) -> bool:
        """Whether it cannot be on its way to the opening `key`: another number among the same is an earlier one."""
        return self.key.rpartition("/")[0] != key.rpartition("/")[0]

    def is_of_job_of(self, key: str) -> bool:
        return self.key.split("/")[:2] == key.split("/")[:2]


def _seen_key(rank: int) -> str:
    return f"seen/{rank}"


def leave_word(rank: int, seen: Seen) -> Protocol[None]:
    """Say where `rank` is, for whoever misses it."""
    yield Put(_seen_key(rank), seen.encoded())


def seen_elsewhere(ranks: Sequence[int], key: str) -> Protocol[Mapping[int, Seen]]:
    """Where those of `ranks` were last seen that opened something else than `key`; waits for nobody."""
    asked = {_seen_key(rank): rank for rank in ranks[:_MAX_ASKED]}
    now: float = yield Now()
    missing: tuple[str, ...] = yield Wait(tuple(asked), now)
    there = {name: rank for name, rank in asked.items() if name not in missing}
    if not there:
        return {}
    values: Sequence[bytes] = yield GetMany(tuple(there))
    found: dict[int, Seen] = {}
    for rank, value in zip(there.values(), values, strict=True):
        try:
            seen = Seen.decode(value)
        except DecodeError:
            continue
        if seen.is_apart_from(key):
            found[rank] = seen
    return found
