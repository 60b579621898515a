"""Plans in memory as answers: headers and bytes, plain and gzipped, prepared when a plan is stored or loaded."""

from __future__ import annotations

import base64
import gzip
import hashlib
from dataclasses import dataclass, field
from typing import Literal

from bucketplan_core.epoch import Epoch
from bucketplan_server.http.negotiation import MSGPACK_TYPE
from bucketplan_server.recent import Recent
from bucketplan_server.store.plans import Damaged, PlanRow

__all__ = [
    "Entry",
    "EpochMemory",
    "PlanMemory",
    "Prepared",
    "Served",
    "build_entry",
    "content_digest",
    "fixed_key",
    "plan_headers",
    "serve",
]

_WORTH_COMPRESSING_BYTES = 1024
"""Below this a gzip header and the work of inflating cost more than the bytes that are saved."""
VARY = "Accept, Accept-Encoding, Bucketplan-Epoch"


@dataclass(frozen=True, slots=True)
class Prepared:
    """One answer as it is sent; `lines` are its `headers` as bytes, since a known plan is answered without a loop."""

    status: Literal[200, 304]
    headers: list[tuple[bytes, bytes]]
    body: bytes
    lines: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lines", b"".join(b"%b: %b\r\n" % header for header in self.headers))


@dataclass(frozen=True, slots=True)
class Served:
    """One revision with its answers: `plain`, `gzipped` (None where not worth it) and two that hold no body.

    A 304 carries the tag of the answer that it stands for: `not_modified` of `plain`, `not_modified_weak` of others.
    """

    row: PlanRow
    etag: bytes
    plain: Prepared
    gzipped: Prepared | None
    not_modified: Prepared
    not_modified_weak: Prepared

    @property
    def signature(self) -> str:
        return self.row.signature

    @property
    def size_bytes(self) -> int:
        packed = 0 if self.gzipped is None else len(self.gzipped.body)
        return len(self.row.plan) + packed


@dataclass(frozen=True, slots=True)
class Entry:
    """What is served for a signature: the active revision, and the planner's own (one object where that is active).

    A `Damaged` stands for one whose bytes in the store were not as they were written when they were read.
    """

    active: Served | Damaged
    first: Served | Damaged

    @property
    def size_bytes(self) -> int:
        different = {id(served): served for served in (self.active, self.first)}.values()
        return sum(served.size_bytes for served in different if isinstance(served, Served))


def build_entry(active: PlanRow | Damaged, first: PlanRow | Damaged) -> Entry:
    """Prepare the answers of one signature; compresses, so large plans belong in a thread."""
    served = serve(active) if isinstance(active, PlanRow) else active
    if first == active:
        return Entry(active=served, first=served)
    return Entry(active=served, first=serve(first) if isinstance(first, PlanRow) else first)


def content_digest(body: bytes) -> str:
    """The value of `Content-Digest` (RFC 9530) for a body as it is sent, content coding included."""
    return f"sha-256=:{base64.b64encode(hashlib.sha256(body).digest()).decode()}:"


def plan_headers(row: PlanRow, *, weak: bool) -> list[tuple[bytes, bytes]]:
    """Headers that every answer with this plan carries.

    Only the plain MessagePack body has a strong tag: JSON and gzip are other bytes of the same plan (RFC 9110, 8.8.3).
    """
    tag = f'"{row.digest}"'
    return [
        (b"etag", (f"W/{tag}" if weak else tag).encode()),
        (b"cache-control", b"no-cache"),
        (b"vary", VARY.encode()),
        (b"bucketplan-revision", str(row.revision).encode()),
    ]


def serve(row: PlanRow) -> Served:
    """Prepare the answers of one revision; compresses, so large plans belong in a thread."""
    plain = _with_body(row, row.plan, encoding=None)
    gzipped = None
    if len(row.plan) >= _WORTH_COMPRESSING_BYTES:
        gzipped = _with_body(row, gzip.compress(row.plan, mtime=0), encoding=b"gzip")
    return Served(
        row=row,
        etag=f'"{row.digest}"'.encode(),
        plain=plain,
        gzipped=gzipped,
        not_modified=_not_modified(row, weak=False),
        not_modified_weak=_not_modified(row, weak=True),
    )


def _not_modified(row: PlanRow, *, weak: bool) -> Prepared:
    return Prepared(304, plan_headers(row, weak=weak), b"")


def _with_body(row: PlanRow, body: bytes, *, encoding: bytes | None) -> Prepared:
    headers = [
        (b"content-type", MSGPACK_TYPE.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"content-digest", content_digest(body).encode()),
        *plan_headers(row, weak=encoding is not None),
    ]
    if encoding is not None:
        headers.append((b"content-encoding", encoding))
    return Prepared(200, headers, body)


class PlanMemory(Recent[str, Entry]):
    """Entries by signature within a budget of bytes, the least recently read leaving first."""

    def __init__(self, budget_bytes: int) -> None:
        super().__init__(budget_bytes, weigh=lambda entry: entry.size_bytes)

    @property
    def size_bytes(self) -> int:
        return self.weight


def fixed_key(signature: str, digest: str) -> str:
    """Where the revision that an epoch fixed is kept, beside the entries of signatures."""
    return f"{signature}:{digest}"


class EpochMemory:
    """The epochs read last, by id, each with the namespaces (None: all) that may be answered whatever it fixes."""

    def __init__(self, most: int = 4096) -> None:
        self._epochs: Recent[str, tuple[Epoch, frozenset[str | None]]] = Recent(most)

    def get(self, epoch: str, namespace: str | None = None) -> Epoch | None:
        """The epoch, None where it, or that `namespace` may be answered what it fixes, is not known here."""
        kept = self._epochs.get(epoch)
        return None if kept is None or namespace not in kept[1] else kept[0]

    def put(self, epoch: Epoch, namespace: str | None = None) -> None:
        """Keep `epoch`, of which `namespace` may be answered whatever it fixes."""
        _, known = self._epochs.get(epoch.id) or (epoch, frozenset[str | None]())
        self._epochs.put(epoch.id, (epoch, known | {namespace}))
