"""Candidates and fixed collectives as columns, one array a field: half the bytes of maps, a quarter of the decoding time."""

from __future__ import annotations

from collections.abc import Sequence

from bucketplan_core.collectives import (
    DTYPE_BYTES,
    KINDS,
    REDUCE_OPS,
    Candidate,
    FixedCollective,
)
from bucketplan_core.errors import DecodeError
from bucketplan_core.fields import Fields
from bucketplan_core.wire import WireValue

__all__ = [
    "MAX_CANDIDATES",
    "MAX_FIXED",
    "candidates_from_wire",
    "candidates_to_wire",
    "fixed_from_wire",
    "fixed_to_wire",
]

MAX_CANDIDATES = 20_000
MAX_FIXED = 100_000
_MAX_DIMENSIONS = 64
_MAX_DEPENDENCIES = 1_000


def candidates_to_wire(candidates: Sequence[Candidate]) -> dict[str, WireValue]:
    return {
        "backward": [c.backward for c in candidates],
        "depends_on": [list(c.depends_on) for c in candidates],
        "device_type": [c.device_type for c in candidates],
        "dtype": [c.dtype for c in candidates],
        "earliest_launch": [c.earliest_launch for c in candidates],
        "first_use": [c.first_use for c in candidates],
        "group": [c.group for c in candidates],
        "group_size": [c.group_size for c in candidates],
        "input_shape": [list(c.input_shape) for c in candidates],
        "kind": [c.kind for c in candidates],
        "last_use": [c.last_use for c in candidates],
        "latest_launch": [c.latest_launch for c in candidates],
        "latest_wait": [c.latest_wait for c in candidates],
        "launch": [c.launch for c in candidates],
        "launch_order": [c.launch_order for c in candidates],
        "module_fqns": [list(c.module_fqns) for c in candidates],
        "ordinal": [c.ordinal for c in candidates],
        "output_shape": [list(c.output_shape) for c in candidates],
        "param_name": [c.param_name for c in candidates],
        "reduce_op": [c.reduce_op for c in candidates],
        "scope": [c.scope for c in candidates],
        "state_idx": [c.state_idx for c in candidates],
        "wait": [c.wait for c in candidates],
        "wait_order": [c.wait_order for c in candidates],
    }


def fixed_to_wire(fixed: Sequence[FixedCollective]) -> dict[str, WireValue]:
    return {
        "depends_on": [list(f.depends_on) for f in fixed],
        "group": [f.group for f in fixed],
        "kind": [f.kind for f in fixed],
        "launch": [f.launch for f in fixed],
        "launch_order": [f.launch_order for f in fixed],
        "skipped": [f.skipped for f in fixed],
        "wait": [f.wait for f in fixed],
        "wait_order": [f.wait_order for f in fixed],
    }


def _length(fields: Fields, key: str, limit: int) -> int:
    value = fields.peek(key)
    if len(value) > limit:
        raise DecodeError(
            fields.path, f"{len(value)} entries", f"at most {limit} are allowed"
        )
    return len(value)


def candidates_from_wire(fields: Fields, num_segments: int) -> tuple[Candidate, ...]:
    n = _length(fields, "kind", MAX_CANDIDATES)
    columns = (
        fields.column_str("kind", n, choices=KINDS),
        fields.column_str("group", n),
        fields.column_int("group_size", n, low=1),
        fields.column_str("dtype", n, choices=DTYPE_BYTES),
        fields.column_str("device_type", n),
        fields.column_ints("input_shape", n, limit=_MAX_DIMENSIONS),
        fields.column_ints("output_shape", n, limit=_MAX_DIMENSIONS),
        fields.column_int("earliest_launch", n, high=num_segments),
        fields.column_int("launch", n, high=num_segments),
        fields.column_int("latest_launch", n, high=num_segments),
        fields.column_int("wait", n, high=num_segments),
        fields.column_int("latest_wait", n, high=num_segments),
        fields.column_int("first_use", n, high=num_segments),
        fields.column_int("last_use", n, high=num_segments),
        fields.column_int("launch_order", n),
        fields.column_int("wait_order", n),
        fields.column_optional_str("reduce_op", n, choices=REDUCE_OPS),
        fields.column_optional_str("param_name", n),
        fields.column_optional_int("ordinal", n),
        fields.column_optional_int("state_idx", n),
        fields.column_strs("module_fqns", n, limit=_MAX_DEPENDENCIES),
        fields.column_bool("backward", n),
        fields.column_optional_str("scope", n),
        fields.column_ints("depends_on", n, limit=_MAX_DEPENDENCIES),
    )
    fields.finish()
    return tuple(
        Candidate(
            kind=kind,
            group=group,
            group_size=group_size,
            dtype=dtype,
            device_type=device_type,
            input_shape=input_shape,
            output_shape=output_shape,
            earliest_launch=earliest_launch,
            launch=launch,
            latest_launch=latest_launch,
            wait=wait,
            latest_wait=latest_wait,
            first_use=first_use,
            last_use=last_use,
            launch_order=launch_order,
            wait_order=wait_order,
            reduce_op=reduce_op,
            param_name=param_name,
            ordinal=ordinal,
            state_idx=state_idx,
            module_fqns=module_fqns,
            backward=backward,
            scope=scope,
            depends_on=depends_on,
        )
        for (
            kind,
            group,
            group_size,
            dtype,
            device_type,
            input_shape,
            output_shape,
            earliest_launch,
            launch,
            latest_launch,
            wait,
            latest_wait,
            first_use,
            last_use,
            launch_order,
            wait_order,
            reduce_op,
            param_name,
            ordinal,
            state_idx,
            module_fqns,
            backward,
            scope,
            depends_on,
        ) in zip(*columns, strict=True)
    )


def fixed_from_wire(fields: Fields, num_segments: int) -> tuple[FixedCollective, ...]:
    n = _length(fields, "kind", MAX_FIXED)
    columns = (
        fields.column_str("kind", n),
        fields.column_optional_str("group", n),
        fields.column_int("launch", n, high=num_segments),
        fields.column_int("launch_order", n),
        fields.column_optional_int("wait", n, high=num_segments),
        fields.column_optional_int("wait_order", n),
        fields.column_ints("depends_on", n, limit=_MAX_DEPENDENCIES),
        fields.column_optional_str("skipped", n),
    )
    fields.finish()
    return tuple(
        FixedCollective(
            kind=kind,
            group=group,
            launch=launch,
            launch_order=launch_order,
            wait=wait,
            wait_order=wait_order,
            depends_on=depends_on,
            skipped=skipped,
        )
        for kind, group, launch, launch_order, wait, wait_order, depends_on, skipped in zip(
            *columns, strict=True
        )
    )
