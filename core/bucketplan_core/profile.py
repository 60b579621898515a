"""The cost profile: what ranks of one job may measure or guess differently, kept out of the signature.

Work and live bytes come from size hints, token counts and local shards. The first profile that reaches the store for a
signature is bound to it for ever, and every rank gets plans made from that one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from bucketplan_core.errors import DecodeError
from bucketplan_core.fields import Fields
from bucketplan_core.request import Request
from bucketplan_core.wire import WireValue, digest_of, pack, unpack

__all__ = ["CostProfile", "WorkClass"]

_SCHEMA = 1
_MAX_CLASSES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkClass:
    """Work of one class, one entry a segment: floating-point operations and bytes moved.

    Class names are ``matmul:<dtype>``, ``attention:<dtype>`` and ``memory``. A segment's time is the sum over classes
    of max(flops / rate, bytes_moved / bandwidth).
    """

    name: str
    flops: tuple[int, ...]
    bytes_moved: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class CostProfile:
    """Work and live bytes of each segment, bytes of each fixed collective.

    `live_bytes[k]` are activations alive during segment k, candidates' own tensors excluded; `fixed_bytes[k]` is the
    full (largest) buffer of fixed collective k, from hints where its size is symbolic. Classes are kept sorted by name.
    """

    work: tuple[WorkClass, ...]
    live_bytes: tuple[int, ...]
    fixed_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "work", tuple(sorted(self.work, key=lambda work: work.name)))

    @classmethod
    def empty(cls, request: Request) -> CostProfile:
        """A profile that knows nothing: every segment free, no activations."""
        return cls(
            work=(),
            live_bytes=(0,) * request.num_segments,
            fixed_bytes=(0,) * len(request.fixed),
        )

    @cached_property
    def encoded(self) -> bytes:
        return pack(self.to_wire(), root="profile")

    @cached_property
    def digest(self) -> str:
        return digest_of(self.encoded)

    def to_wire(self) -> dict[str, WireValue]:
        return {
            "fixed_bytes": list(self.fixed_bytes),
            "live_bytes": list(self.live_bytes),
            "schema": _SCHEMA,
            "work": {
                work.name: {"bytes_moved": list(work.bytes_moved), "flops": list(work.flops)} for work in self.work
            },
        }

    def check(self, request: Request) -> None:
        """Raise `DecodeError` unless this is a profile of `request`: one entry a segment, one a fixed collective."""
        for before, work in pairwise(self.work):
            if before.name == work.name:
                raise DecodeError("profile.work", work.name, "each class may appear once")
        CostProfile.from_wire(self.to_wire(), request)

    @classmethod
    def decode(cls, data: bytes, request: Request) -> CostProfile:
        """Read canonical bytes of the profile of `request`; raises `DecodeError` with the field's path."""
        profile = cls.from_wire(unpack(data, root="profile"), request)
        profile.__dict__["encoded"] = data
        return profile

    @classmethod
    def from_wire(cls, tree: WireValue, request: Request, path: str = "profile") -> CostProfile:
        """Read a decoded tree; raises `DecodeError` with the field's path below `path`."""
        fields = Fields(tree, path)
        fields.schema((_SCHEMA,))
        segments = request.num_segments
        classes = fields.submap("work")
        work = []
        for name in classes.keys(limit=_MAX_CLASSES):
            entry = classes.submap(name)
            work.append(
                WorkClass(
                    name=name,
                    flops=_per_segment(entry, "flops", segments),
                    bytes_moved=_per_segment(entry, "bytes_moved", segments),
                )
            )
            entry.finish()
        profile = cls(
            work=tuple(work),
            live_bytes=_per_segment(fields, "live_bytes", segments),
            fixed_bytes=_per_segment(fields, "fixed_bytes", len(request.fixed), what="one a fixed collective"),
        )
        fields.finish()
        return profile


def _per_segment(
    fields: Fields, key: str, length: int, *, what: str = "one a segment of the request"
) -> tuple[int, ...]:
    found = len(fields.peek(key))
    if found and found != length:
        raise DecodeError(f"{fields.path}.{key}", f"{found} entries", f"must have {length} entries, {what}")
    return tuple(fields.column_int(key, length))
