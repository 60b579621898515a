"""What the fields of a request must hold together, beyond each one's type and range."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from operator import gt, le, lt
from typing import TYPE_CHECKING

from bucketplan_core.collectives import DTYPE_BYTES, Candidate, FixedCollective, Group
from bucketplan_core.errors import DecodeError

if TYPE_CHECKING:
    from bucketplan_core.request import Request

__all__ = ["validate_request"]

_MAX_TENSOR_BYTES = 2**55
"""Sums over all candidates and products with rates must stay far below 2**127; the largest model is 2**45."""


def validate_request(request: Request, path: str) -> None:
    """Raise `DecodeError` naming the first field below `path` that contradicts another."""
    for index, group in enumerate(request.groups):
        _validate_group(group, f"{path}.groups[{index}]")
    for index, (before, group) in enumerate(pairwise(request.groups), start=1):
        if group.role <= before.role:
            raise DecodeError(
                f"{path}.groups[{index}].role", group.role, "groups must be sorted by role, each role once"
            )
    roles = frozenset(group.role for group in request.groups)
    scopes_allowed = request.options.strategy == "module"
    for index, candidate in enumerate(request.candidates):
        _validate_candidate(candidate, index, roles, scopes_allowed, f"{path}.candidates")
    for index, fixed in enumerate(request.fixed):
        _validate_fixed(fixed, index, roles, f"{path}.fixed")
    _validate_orders(request, path)
    _validate_edges(request, path)


def _validate_group(group: Group, path: str) -> None:
    if group.nodes > group.size:
        raise DecodeError(f"{path}.nodes", group.nodes, f"{group.size} ranks cannot span more hosts")
    if not group.strides:
        return
    steps, repeats = group.strides[::2], group.strides[1::2]
    if len(steps) != len(repeats):
        raise DecodeError(f"{path}.strides", group.strides, "must hold pairs of step and repeats")
    if min(group.strides) < 1 or any(a == b for a, b in pairwise(steps)):
        raise DecodeError(f"{path}.strides", group.strides, "must be run lengths of positive steps, neighbours merged")
    if sum(repeats) != group.size - 1:
        raise DecodeError(
            f"{path}.strides", group.strides, f"must lead from the first of {group.size} ranks to the last"
        )


def _validate_candidate(c: Candidate, index: int, roles: frozenset[str], scopes_allowed: bool, path: str) -> None:
    if c.group not in roles:
        raise _wrong(c, "group", index, path, "is not a role in groups")
    if not c.device_type:
        raise _wrong(c, "device_type", index, path, "must not be empty")
    launch, latest_launch, wait, latest_wait = c.launch, c.latest_launch, c.wait, c.latest_wait
    if not c.earliest_launch <= launch <= latest_launch:
        reason = f"must lie in [earliest_launch {c.earliest_launch}, latest_launch {latest_launch}]"
        raise _wrong(c, "launch", index, path, reason)
    if not launch <= wait <= latest_wait:
        raise _wrong(c, "wait", index, path, f"must lie in [launch {launch}, latest_wait {latest_wait}]")
    if latest_wait > c.first_use:
        raise _wrong(c, "latest_wait", index, path, f"must not come after first_use {c.first_use}")
    if c.first_use > c.last_use:
        raise _wrong(c, "last_use", index, path, f"must not come before first_use {c.first_use}")
    is_gather = c.is_gather
    if (c.reduce_op is None) != is_gather:
        raise _wrong(c, "reduce_op", index, path, "is required for reductions and must be null for gathers")
    num_in, num_out = prod(c.input_shape), prod(c.output_shape)
    if is_gather:
        fits = num_in * c.group_size == num_out
    elif c.kind == "fsdp_reduce_scatter":
        fits = num_in == num_out * c.group_size
    else:
        fits = num_in == num_out
    if not fits:
        reason = f"does not fit input_shape {c.input_shape} at group_size {c.group_size}"
        raise _wrong(c, "output_shape", index, path, reason)
    if (num_out if is_gather else num_in) * DTYPE_BYTES[c.dtype] > _MAX_TENSOR_BYTES:
        field = "output_shape" if is_gather else "input_shape"
        raise _wrong(c, field, index, path, "tensor is larger than 2**55 bytes")
    if c.scope is not None and not scopes_allowed:
        raise _wrong(c, "scope", index, path, "must be null unless the strategy is module")


def _validate_fixed(f: FixedCollective, index: int, roles: frozenset[str], path: str) -> None:
    if not f.kind:
        raise _wrong(f, "kind", index, path, "must not be empty")
    if f.group is not None and f.group not in roles:
        raise _wrong(f, "group", index, path, "is not a role in groups")
    if (f.wait is None) != (f.wait_order is None):
        raise _wrong(f, "wait_order", index, path, "must be null exactly where wait is")
    if f.wait is not None and f.wait < f.launch:
        raise _wrong(f, "wait", index, path, f"must not come before launch {f.launch}")


def _wrong(collective: Candidate | FixedCollective, field: str, index: int, path: str, reason: str) -> DecodeError:
    return DecodeError(f"{path}.{field}[{index}]", getattr(collective, field), reason)


def _validate_edges(request: Request, path: str) -> None:
    """Edges are sorted, and each leads from a collective that was waited for before the launch that needs it."""
    waits: list[int | None] = [c.wait_order for c in request.candidates]
    waits += [f.wait_order for f in request.fixed]
    tables: tuple[tuple[str, Sequence[Candidate | FixedCollective]], ...] = (
        ("candidates", request.candidates),
        ("fixed", request.fixed),
    )
    for name, collectives in tables:
        for index, collective in enumerate(collectives):
            previous = -1
            for at, edge in enumerate(collective.depends_on):
                where = f"{path}.{name}.depends_on[{index}][{at}]"
                if edge <= previous:
                    raise DecodeError(where, edge, "must be sorted, each index once")
                previous = edge
                if edge >= len(waits):
                    raise DecodeError(where, edge, f"there are only {len(waits)} collectives")
                waited = waits[edge]
                if waited is None or waited >= collective.launch_order:
                    reason = "the result it depends on must be waited for before the launch"
                    raise DecodeError(where, edge, reason)


def _validate_orders(request: Request, path: str) -> None:
    """Launches and waits are numbered 0, 1, 2 ... without holes, in step with their gaps, each table by launch."""
    numbers: list[int] = []
    gaps: list[int] = []
    well_ordered = True
    for collectives in (request.candidates, request.fixed):
        launches = [collective.launch_order for collective in collectives]
        waited = [c for c in collectives if c.wait is not None and c.wait_order is not None]
        waits = [c.wait_order for c in waited if c.wait_order is not None]
        well_ordered &= all(map(lt, launches, launches[1:]))
        well_ordered &= all(map(gt, waits, [c.launch_order for c in waited]))
        numbers += launches + waits
        gaps += [c.launch for c in collectives] + [c.wait for c in waited if c.wait is not None]
    if well_ordered and sorted(numbers) == list(range(len(numbers))):
        in_order = [0] * len(gaps)
        for number, gap in zip(numbers, gaps, strict=True):
            in_order[number] = gap
        if all(map(le, in_order, in_order[1:])):
            return
    _name_disorder(request, path)


def _name_disorder(request: Request, path: str) -> None:
    """Raise `DecodeError` for the first order number that breaks what `_validate_orders` checks."""
    events: list[tuple[int, int, str, int]] = []
    tables: tuple[tuple[str, Sequence[Candidate | FixedCollective]], ...] = (
        ("candidates", request.candidates),
        ("fixed", request.fixed),
    )
    for name, collectives in tables:
        at = f"{path}.{name}"
        previous = -1
        for index, c in enumerate(collectives):
            if c.launch_order <= previous:
                raise _wrong(c, "launch_order", index, at, f"{name} must be sorted by launch_order")
            previous = c.launch_order
            events.append((c.launch_order, c.launch, f"{at}.launch_order[{index}]", index))
            if c.wait_order is not None and c.wait is not None:
                if c.wait_order <= c.launch_order:
                    raise _wrong(c, "wait_order", index, at, "must come after launch_order")
                events.append((c.wait_order, c.wait, f"{at}.wait_order[{index}]", index))
    events.sort()
    gap = 0
    for expected, (number, at_gap, field, _) in enumerate(events):
        if number != expected:
            raise DecodeError(field, number, f"orders must count 0, 1, 2 ...: {expected} expected")
        if at_gap < gap:
            raise DecodeError(field, number, f"stands at gap {at_gap}, after an event at gap {gap}")
        gap = at_gap
