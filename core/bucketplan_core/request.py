"""What ranks must agree on: the collectives of one fx graph, what constrains them, and the planning options.

A `Request` holds structure only. Whatever may differ between ranks of one job (durations, sizes from hints, live bytes)
is the cost profile (`bucketplan_core.profile`), a document of its own.

Positions are *gaps*. The compute nodes of a graph are cut into `num_segments` segments; gap g is the place right before
segment g, gap `num_segments` the place before the output. Collectives are numbered in one space: candidates first, in
the order of their launches, then fixed collectives: index ``len(candidates) + k`` is fixed collective k.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from bucketplan_core.collectives import (
    DTYPE_BYTES,
    PHASES,
    Candidate,
    FixedCollective,
    Group,
    Lane,
    LaneKey,
    Options,
)
from bucketplan_core.columns import (
    candidates_from_wire,
    candidates_to_wire,
    fixed_from_wire,
    fixed_to_wire,
)
from bucketplan_core.fields import Fields
from bucketplan_core.validation import validate_request
from bucketplan_core.wire import WireValue, digest_of, pack, unpack

__all__ = ["CAPTURE_VERSION", "MAX_SEGMENTS", "SCHEMA_VERSION", "Request"]

SCHEMA_VERSION = 1
CAPTURE_VERSION = 1
"""Raised whenever `describe_graph` would describe the same graph otherwise; part of every signature."""
MAX_SEGMENTS = 1_000_000
"""Every collective marks at most 7 points, so the most collectives that are allowed cut fewer segments than this."""
_MAX_GROUPS = 1_000


@dataclass(frozen=True, kw_only=True)
class Request:
    """Graph description plus planning options; its content hash is the signature."""

    num_segments: int
    groups: tuple[Group, ...]
    candidates: tuple[Candidate, ...]
    fixed: tuple[FixedCollective, ...]
    options: Options
    phase: str = "joint"
    capture: int = CAPTURE_VERSION
    schema: int = SCHEMA_VERSION

    @classmethod
    def build(
        cls,
        *,
        num_segments: int,
        groups: Sequence[Group],
        candidates: Sequence[Candidate],
        fixed: Sequence[FixedCollective],
        options: Options,
        phase: str = "joint",
        capture: int = CAPTURE_VERSION,
    ) -> Request:
        """Make the one canonical request of these parts, whatever order they arrived in.

        `depends_on` refers to positions in the sequences as given and is renumbered. Raises `DecodeError` as `decode`
        does; indices in its path count collectives in launch order.
        """
        order = _launch_order(candidates)
        fixed_order = _launch_order(fixed)
        first_fixed = len(candidates)
        renumbered = {old: new for new, old in enumerate(order)}
        renumbered |= {first_fixed + old: first_fixed + new for new, old in enumerate(fixed_order)}

        def edges(depends_on: Iterable[int]) -> list[WireValue]:
            # What is no collective stays as it is, for the reader to name.
            found = {renumbered.get(index, index) for index in depends_on}
            return sorted(found, key=lambda index: index if isinstance(index, int) else -1)

        sorted_candidates = [candidates[i] for i in order]
        sorted_fixed = [fixed[i] for i in fixed_order]
        tree: dict[str, WireValue] = {
            "candidates": candidates_to_wire(sorted_candidates)
            | {"depends_on": [edges(c.depends_on) for c in sorted_candidates]},
            "capture": capture,
            "fixed": fixed_to_wire(sorted_fixed) | {"depends_on": [edges(f.depends_on) for f in sorted_fixed]},
            "groups": [group.to_wire() for group in sorted(groups, key=lambda group: group.role)],
            "num_segments": num_segments,
            "options": options.to_wire(),
            "phase": phase,
            "schema": SCHEMA_VERSION,
        }
        encoded = pack(tree, root="request")
        request = cls.from_wire(tree)
        request.__dict__["encoded"] = encoded
        return request

    @cached_property
    def encoded(self) -> bytes:
        """The canonical bytes that `signature` hashes."""
        return pack(self.to_wire(), root="request")

    @cached_property
    def signature(self) -> str:
        return digest_of(self.encoded)

    @classmethod
    def decode(cls, data: bytes) -> Request:
        """Read canonical bytes; raises `DecodeError` with the offending field's path."""
        request = cls.from_wire(unpack(data, root="request"))
        request.__dict__["encoded"] = data
        return request

    @classmethod
    def from_wire(cls, tree: WireValue, path: str = "request") -> Request:
        """Read a decoded tree; raises `DecodeError` with the offending field's path below `path`."""
        request = _request_from_wire(Fields(tree, path))
        request.validate(path)
        return request

    def to_wire(self) -> dict[str, WireValue]:
        return {
            "candidates": candidates_to_wire(self.candidates),
            "capture": self.capture,
            "fixed": fixed_to_wire(self.fixed),
            "groups": [group.to_wire() for group in self.groups],
            "num_segments": self.num_segments,
            "options": self.options.to_wire(),
            "phase": self.phase,
            "schema": self.schema,
        }

    def validate(self, path: str = "request") -> None:
        """Check what fields must hold together; raises `DecodeError` naming the field."""
        validate_request(self, path)

    def with_options(self, options: Options) -> Request:
        """The same graph under other options (another signature); scopes go where the strategy is not `module`.

        Raises `DecodeError` for options that a request cannot hold.
        """
        checked = Options.read(Fields(options.to_wire(), "request.options"))
        candidates = self.candidates
        if checked.strategy != "module":
            candidates = tuple(c if c.scope is None else replace(c, scope=None) for c in candidates)
        return replace(self, options=checked, candidates=candidates)

    @property
    def num_collectives(self) -> int:
        return len(self.candidates) + len(self.fixed)

    @cached_property
    def lanes(self) -> tuple[Lane, ...]:
        """Lanes in order of their first member's launch."""
        members: dict[LaneKey, list[int]] = {}
        for index, candidate in enumerate(self.candidates):
            as_bytes = self.options.mixed_dtype and candidate.is_gather
            wire_dtype = "bytes" if as_bytes else candidate.dtype
            key = (
                candidate.kind,
                candidate.group,
                candidate.group_size,
                wire_dtype,
                candidate.device_type,
                candidate.reduce_op,
            )
            members.setdefault(key, []).append(index)
        return tuple(Lane(*key, members=tuple(sorted(found, key=self.lane_position))) for key, found in members.items())

    @cached_property
    def lane_of(self) -> tuple[int, ...]:
        """The lane of every candidate, as an index into `lanes`."""
        found = [0] * len(self.candidates)
        for number, lane in enumerate(self.lanes):
            for member in lane.members:
                found[member] = number
        return tuple(found)

    @cached_property
    def full_bytes(self) -> tuple[int, ...]:
        """Bytes of each candidate's unsharded tensor; shapes are multiplied out once."""
        return tuple(candidate.full_bytes for candidate in self.candidates)

    @cached_property
    def lane_places(self) -> tuple[int, ...]:
        """Every candidate's place in the order of its lane, from 0."""
        found = [0] * len(self.candidates)
        for lane in self.lanes:
            for place, member in enumerate(lane.members):
                found[member] = place
        return tuple(found)

    def lane_position(self, index: int) -> tuple[int, int]:
        """Sort key of lane order: gathers by first use, reductions by readiness, then as launched."""
        candidate = self.candidates[index]
        at = candidate.first_use if candidate.is_gather else candidate.earliest_launch
        return (at, candidate.launch_order)

    def payload_position(self, index: int) -> tuple[int, int, int, int, int]:
        """Sort key of payload order: parameters in registration order, nameless ones last, in lane order.

        Byte offsets decide how a ring reduces bf16, so the order is part of the plan (torchtitan#3590). In a lane of
        mixed dtypes wide types come first: then every member starts at a multiple of its element size.
        """
        candidate = self.candidates[index]
        width = -DTYPE_BYTES[candidate.dtype] if self.options.mixed_dtype and candidate.is_gather else 0
        rank = candidate.ordinal if candidate.ordinal is not None else candidate.state_idx
        unnamed, known = (0, rank) if rank is not None else (1, 0)
        return (width, unnamed, known, *self.lane_position(index))

    def __repr__(self) -> str:
        return (
            f"Request({self.phase}, {len(self.candidates)} candidates in {len(self.lanes)} lanes, "
            f"{len(self.fixed)} fixed, {self.num_segments} segments, {self.options.planner} {self.options.placement}, "
            f"signature {self.signature[:12]})"
        )


def _launch_order(collectives: Sequence[Candidate] | Sequence[FixedCollective]) -> list[int]:
    def key(index: int) -> int:
        number: object = collectives[index].launch_order
        return number if isinstance(number, int) else -1

    return sorted(range(len(collectives)), key=key)


def _request_from_wire(fields: Fields) -> Request:
    schema = fields.schema((SCHEMA_VERSION,))
    num_segments = fields.integer("num_segments", high=MAX_SEGMENTS)
    groups = tuple(
        Group.read(Fields(value, f"{fields.path}.groups[{index}]"))
        for index, value in enumerate(fields.array("groups", limit=_MAX_GROUPS))
    )
    request = Request(
        schema=schema,
        capture=fields.integer("capture", low=1),
        phase=fields.text("phase", choices=PHASES),
        num_segments=num_segments,
        groups=groups,
        candidates=candidates_from_wire(fields.submap("candidates"), num_segments),
        fixed=fixed_from_wire(fields.submap("fixed"), num_segments),
        options=Options.read(fields.submap("options")),
    )
    fields.finish()
    return request
