"""What ranks must agree on: the collectives of one fx graph, what constrains them, and the planning options.

A `Request` holds structure only. Whatever may differ between ranks of one job (durations, sizes from hints, live bytes)
is the cost profile (`bucketplan_core.profile`), a document of its own.

Positions are *gaps*. The compute nodes of a graph are cut into `num_segments` segments; gap g is the place right before
segment g, gap `num_segments` the place before the output. Collectives are numbered in one space: candidates first, in the
order of their launches, then fixed collectives: index ``len(candidates) + k`` is fixed collective k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from bucketplan_core.collectives import (
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
from bucketplan_core.errors import DecodeError
from bucketplan_core.fields import Fields
from bucketplan_core.wire import MAX_INT, WireValue, digest_of, pack, unpack

__all__ = ["CAPTURE_VERSION", "SCHEMA_VERSION", "Request"]

SCHEMA_VERSION = 1
CAPTURE_VERSION = 1
"""Raised whenever `describe_graph` would describe the same graph otherwise; part of every signature."""
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

        `depends_on` refers to positions in the sequences as given and is renumbered. Raises `DecodeError` as `decode` does.
        """
        num_candidates = len(candidates)
        order = sorted(
            range(num_candidates), key=lambda index: candidates[index].launch_order
        )
        fixed_order = sorted(
            range(len(fixed)), key=lambda index: fixed[index].launch_order
        )
        renumbered = {old: new for new, old in enumerate(order)}
        renumbered |= {
            num_candidates + old: num_candidates + new
            for new, old in enumerate(fixed_order)
        }

        def edges(depends_on: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(sorted({renumbered[index] for index in depends_on}))

        request = cls(
            num_segments=num_segments,
            groups=tuple(sorted(groups, key=lambda group: group.role)),
            candidates=tuple(
                replace(candidates[i], depends_on=edges(candidates[i].depends_on))
                for i in order
            ),
            fixed=tuple(
                replace(fixed[i], depends_on=edges(fixed[i].depends_on))
                for i in fixed_order
            ),
            options=options,
            phase=phase,
            capture=capture,
        )
        request.validate()
        return request

    @cached_property
    def encoded(self) -> bytes:
        """The canonical bytes that `signature` hashes."""
        return pack(_request_to_wire(self))

    @cached_property
    def signature(self) -> str:
        return digest_of(self.encoded)

    @classmethod
    def decode(cls, data: bytes) -> Request:
        """Read canonical bytes; raises `DecodeError` with the offending field's path."""
        request = cls.from_wire(unpack(data))
        request.__dict__["encoded"] = data
        return request

    @classmethod
    def from_wire(cls, tree: WireValue, path: str = "request") -> Request:
        """Read a decoded tree; raises `DecodeError` with the offending field's path below `path`."""
        request = _request_from_wire(Fields(tree, path))
        request.validate(path)
        return request

    def to_wire(self) -> dict[str, WireValue]:
        return _request_to_wire(self)

    def validate(self, path: str = "request") -> None:
        """Check what fields must hold together; raises `DecodeError` naming the field."""
        _validate(self, path)

    def with_options(self, options: Options) -> Request:
        """The same graph under other options (another signature)."""
        changed = replace(self, options=options)
        changed.validate()
        return changed

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
        return tuple(
            Lane(*key, members=tuple(sorted(found, key=self.lane_position)))
            for key, found in members.items()
        )

    def lane_position(self, index: int) -> tuple[int, int]:
        """Sort key of lane order: gathers by first use, reductions by readiness, then as launched."""
        candidate = self.candidates[index]
        at = candidate.first_use if candidate.is_gather else candidate.earliest_launch
        return (at, candidate.launch_order)

    def payload_position(self, index: int) -> tuple[int, int, int, int]:
        """Sort key of payload order: parameters in registration order, nameless ones last, in lane order.

        Byte offsets decide how a ring reduces bf16, so the order is part of the plan (torchtitan#3590).
        """
        candidate = self.candidates[index]
        rank = (
            candidate.ordinal if candidate.ordinal is not None else candidate.state_idx
        )
        return (
            (0, rank, *self.lane_position(index))
            if rank is not None
            else (1, 0, *self.lane_position(index))
        )


def _request_to_wire(request: Request) -> dict[str, WireValue]:
    return {
        "candidates": candidates_to_wire(request.candidates),
        "capture": request.capture,
        "fixed": fixed_to_wire(request.fixed),
        "groups": [group.to_wire() for group in request.groups],
        "num_segments": request.num_segments,
        "options": request.options.to_wire(),
        "phase": request.phase,
        "schema": request.schema,
    }


def _request_from_wire(fields: Fields) -> Request:
    schema = fields.schema((SCHEMA_VERSION,))
    num_segments = fields.integer("num_segments")
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


def _validate(request: Request, path: str) -> None:
    sizes: dict[str, int] = {}
    for index, group in enumerate(request.groups):
        at = f"{path}.groups[{index}].role"
        if index and group.role <= request.groups[index - 1].role:
            raise DecodeError(
                at, group.role, "groups must be sorted by role, each role once"
            )
        sizes[group.role] = group.size
    _validate_orders(request, path)
    for index, candidate in enumerate(request.candidates):
        _validate_candidate(candidate, index, sizes, request, path)
    for index, fixed in enumerate(request.fixed):
        at = f"{path}.fixed"
        if fixed.group is not None and fixed.group not in sizes:
            raise DecodeError(
                f"{at}.group[{index}]", fixed.group, "is not a role in groups"
            )
        if (fixed.wait is None) != (fixed.wait_order is None):
            raise DecodeError(
                f"{at}.wait_order[{index}]",
                fixed.wait_order,
                "must be null exactly where wait is",
            )
        if fixed.wait is not None and fixed.wait < fixed.launch:
            raise DecodeError(
                f"{at}.wait[{index}]",
                fixed.wait,
                f"must not come before launch {fixed.launch}",
            )
        _validate_edges(
            fixed.depends_on, fixed.launch_order, f"{at}.depends_on[{index}]", request
        )


def _validate_candidate(
    c: Candidate, index: int, sizes: dict[str, int], request: Request, path: str
) -> None:
    def wrong(field: str, reason: str) -> DecodeError:
        return DecodeError(
            f"{path}.candidates.{field}[{index}]", getattr(c, field), reason
        )

    if sizes.get(c.group) is None:
        raise wrong("group", "is not a role in groups")
    if not c.earliest_launch <= c.launch <= c.latest_launch:
        raise wrong(
            "launch",
            f"must lie in [earliest_launch {c.earliest_launch}, latest_launch {c.latest_launch}]",
        )
    if not c.launch <= c.wait <= c.latest_wait:
        raise wrong(
            "wait", f"must lie in [launch {c.launch}, latest_wait {c.latest_wait}]"
        )
    if c.latest_wait > c.first_use:
        raise wrong("latest_wait", f"must not come after first_use {c.first_use}")
    if c.first_use > c.last_use:
        raise wrong("last_use", f"must not come before first_use {c.first_use}")
    if (c.reduce_op is None) != c.is_gather:
        raise wrong(
            "reduce_op", "is required for reductions and must be null for gathers"
        )
    factor_in, factor_out = _shard_factors(c)
    if c.input_numel * factor_in != c.output_numel * factor_out:
        raise wrong(
            "output_shape",
            f"does not fit input_shape {c.input_shape} at group_size {c.group_size}",
        )
    if c.full_bytes > MAX_INT >> 8:
        raise wrong(
            "input_shape" if not c.is_gather else "output_shape",
            "tensor is larger than 2**55 bytes",
        )
    if c.scope is not None and request.options.strategy != "module":
        raise wrong("scope", "must be null unless the strategy is module")
    _validate_edges(
        c.depends_on, c.launch_order, f"{path}.candidates.depends_on[{index}]", request
    )


def _shard_factors(c: Candidate) -> tuple[int, int]:
    if c.is_gather:
        return c.group_size, 1
    return (1, c.group_size) if c.kind == "fsdp_reduce_scatter" else (1, 1)


def _validate_edges(
    edges: tuple[int, ...], launch_order: int, path: str, request: Request
) -> None:
    num_candidates = len(request.candidates)
    for at, edge in enumerate(edges):
        if at and edge <= edges[at - 1]:
            raise DecodeError(f"{path}[{at}]", edge, "must be sorted, each index once")
        if edge >= request.num_collectives:
            raise DecodeError(
                f"{path}[{at}]",
                edge,
                f"there are only {request.num_collectives} collectives",
            )
        source: Candidate | FixedCollective = (
            request.candidates[edge]
            if edge < num_candidates
            else request.fixed[edge - num_candidates]
        )
        if source.wait_order is None or source.wait_order >= launch_order:
            raise DecodeError(
                f"{path}[{at}]",
                edge,
                "the result it depends on must be waited for before the launch",
            )


def _validate_orders(request: Request, path: str) -> None:
    """Launches and waits are numbered 0, 1, 2 ... without holes, in step with their gaps, candidates and fixed sorted."""
    events: list[tuple[int, int, str, int]] = []
    sequences: tuple[tuple[str, Sequence[Candidate | FixedCollective]], ...] = (
        ("candidates", request.candidates),
        ("fixed", request.fixed),
    )
    for name, collectives in sequences:
        previous = -1
        for index, collective in enumerate(collectives):
            at = f"{path}.{name}"
            if collective.launch_order <= previous:
                raise DecodeError(
                    f"{at}.launch_order[{index}]",
                    collective.launch_order,
                    f"{name} must be sorted by launch_order",
                )
            previous = collective.launch_order
            events.append(
                (
                    collective.launch_order,
                    collective.launch,
                    f"{at}.launch_order",
                    index,
                )
            )
            if collective.wait_order is not None and collective.wait is not None:
                if collective.wait_order <= collective.launch_order:
                    raise DecodeError(
                        f"{at}.wait_order[{index}]",
                        collective.wait_order,
                        "must come after launch_order",
                    )
                events.append(
                    (collective.wait_order, collective.wait, f"{at}.wait_order", index)
                )
    events.sort()
    gap = 0
    for expected, (number, at_gap, field, index) in enumerate(events):
        if number != expected:
            raise DecodeError(
                f"{field}[{index}]",
                number,
                f"orders must count 0, 1, 2 ...: {expected} expected",
            )
        if at_gap < gap:
            raise DecodeError(
                f"{field}[{index}]",
                number,
                f"stands at gap {at_gap}, after an event at gap {gap}",
            )
        gap = at_gap
