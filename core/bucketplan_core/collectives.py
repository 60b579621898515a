"""The parts of a request: groups, candidates, fixed collectives, options and lanes.

Positions are *gaps*: gap g is the place right before compute segment g. Collectives are numbered in one space,
candidates first in the order of their launches, then fixed collectives.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from bucketplan_core.errors import DecodeError
from bucketplan_core.fields import Fields
from bucketplan_core.hardware import Hardware
from bucketplan_core.wire import WireValue

__all__ = [
    "ALL_GATHER_KINDS",
    "DTYPE_BYTES",
    "KINDS",
    "PHASES",
    "PLACEMENTS",
    "REDUCE_KINDS",
    "REDUCE_OPS",
    "STRATEGIES",
    "Candidate",
    "FixedCollective",
    "Group",
    "Lane",
    "LaneKey",
    "Options",
]

LaneKey = tuple[str, str, int, str, str, str | None]

ALL_GATHER_KINDS = ("fsdp_all_gather", "fsdp_all_gather_backward")
REDUCE_KINDS = ("fsdp_reduce_scatter", "dp_all_reduce")
KINDS = (*ALL_GATHER_KINDS, *REDUCE_KINDS)
PHASES = ("joint", "forward", "backward")
STRATEGIES = ("auto", "module", "none", "size")
PLACEMENTS = ("original", "scheduled")
REDUCE_OPS = ("avg", "max", "min", "product", "sum")

DTYPE_BYTES = {
    "bfloat16": 2,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
}
"""Bytes an element, by torch's name of the dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group by its role.

    `strides` is the pattern of its ranks relative to the first, as run lengths (step, repeats, step, repeats ...):
    ranks 0, 8, 16 give (8, 2), ranks 0, 1, 8, 9 give (1, 1, 7, 1, 1, 1), nothing where unknown. `nodes` and `link` come
    from the epoch, one value a role; 0 and None where nobody said.
    """

    role: str
    size: int
    strides: tuple[int, ...] = ()
    nodes: int = 0
    link: str | None = None

    def to_wire(self) -> dict[str, WireValue]:
        return {
            "link": self.link,
            "nodes": self.nodes,
            "role": self.role,
            "size": self.size,
            "strides": list(self.strides),
        }

    @classmethod
    def read(cls, fields: Fields) -> Group:
        group = cls(
            role=fields.name("role"),
            size=fields.integer("size", low=1),
            strides=tuple(fields.column_int("strides", len(fields.peek("strides")))),
            nodes=fields.integer("nodes"),
            link=fields.optional_text("link"),
        )
        fields.finish()
        return group


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One FSDP collective that may be fused.

    `ordinal` is the position of its parameter among the job's parameters (None when it has none); `depends_on` holds
    the collectives whose results feed its input with no compute between. All positions are gaps except `last_use`, the
    last segment that reads the result (`num_segments` for an output of the graph). `launch_order` and `wait_order`
    number the launches and waits of all collectives as they stood in the graph.
    """

    kind: str
    group: str
    group_size: int
    dtype: str
    device_type: str
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    earliest_launch: int
    launch: int
    latest_launch: int
    wait: int
    latest_wait: int
    first_use: int
    last_use: int
    launch_order: int
    wait_order: int
    reduce_op: str | None = None
    param_name: str | None = None
    ordinal: int | None = None
    state_idx: int | None = None
    module_fqns: tuple[str, ...] = ()
    backward: bool = False
    scope: str | None = None
    depends_on: tuple[int, ...] = ()

    @property
    def is_gather(self) -> bool:
        return self.kind in ALL_GATHER_KINDS

    @property
    def input_numel(self) -> int:
        return prod(self.input_shape)

    @property
    def output_numel(self) -> int:
        return prod(self.output_shape)

    @property
    def input_bytes(self) -> int:
        return self.input_numel * DTYPE_BYTES[self.dtype]

    @property
    def output_bytes(self) -> int:
        return self.output_numel * DTYPE_BYTES[self.dtype]

    @property
    def full_bytes(self) -> int:
        """Bytes of the unsharded tensor: what a gather returns, what a reduction takes."""
        return self.output_bytes if self.is_gather else self.input_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedCollective:
    """A collective that stays where it is; it occupies its group's stream and nothing moves it.

    `group` is None where the group is unknown, `wait` and `wait_order` where there is no wait or more than one.
    `skipped` names the rule that kept an otherwise eligible collective from being a candidate.
    """

    kind: str
    group: str | None
    launch: int
    launch_order: int
    wait: int | None = None
    wait_order: int | None = None
    depends_on: tuple[int, ...] = ()
    skipped: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to plan; complete before it is hashed. Sizes in bytes of the unsharded tensors.

    `prefetch` is how many buckets a gather is issued ahead under placement `scheduled`; `planner` is the name and
    version of the strategy's algorithm (``size/1``); `hardware` the figures of the hardware profile, None when unknown.
    `memory_budget_bytes` bounds live bytes plus collectives' buffers; None leaves it to the planner's stated default.
    """

    strategy: str
    planner: str
    placement: str = "original"
    bucket_cap_bytes: int = 500_000_000
    first_bucket_cap_bytes: int = 500_000_000
    memory_budget_bytes: int | None = None
    prefetch: int = 1
    mixed_dtype: bool = False
    hardware: Hardware | None = None

    def to_wire(self) -> dict[str, WireValue]:
        return {
            "bucket_cap_bytes": self.bucket_cap_bytes,
            "first_bucket_cap_bytes": self.first_bucket_cap_bytes,
            "hardware": None if self.hardware is None else self.hardware.to_wire(),
            "memory_budget_bytes": self.memory_budget_bytes,
            "mixed_dtype": self.mixed_dtype,
            "placement": self.placement,
            "planner": self.planner,
            "prefetch": self.prefetch,
            "strategy": self.strategy,
        }

    @classmethod
    def read(cls, fields: Fields) -> Options:
        hardware = fields.optional_submap("hardware")
        options = cls(
            strategy=fields.text("strategy", choices=STRATEGIES),
            planner=fields.name("planner"),
            placement=fields.text("placement", choices=PLACEMENTS),
            bucket_cap_bytes=fields.integer("bucket_cap_bytes", low=1),
            first_bucket_cap_bytes=fields.integer("first_bucket_cap_bytes", low=1),
            memory_budget_bytes=fields.optional_integer("memory_budget_bytes"),
            prefetch=fields.integer("prefetch", high=10_000),
            mixed_dtype=fields.flag("mixed_dtype"),
            hardware=None if hardware is None else Hardware.read(hardware),
        )
        fields.finish()
        if options.planner.split("/", 1)[0] != options.strategy:
            raise DecodeError(
                f"{fields.path}.planner",
                options.planner,
                f"must be a version of strategy {options.strategy!r}",
            )
        return options


@dataclass(frozen=True, slots=True)
class Lane:
    """Candidates that may ever share a collective, in lane order: gathers by first use, reductions by readiness."""

    kind: str
    group: str
    group_size: int
    wire_dtype: str
    device_type: str
    reduce_op: str | None
    members: tuple[int, ...]

    @property
    def key(self) -> LaneKey:
        return (
            self.kind,
            self.group,
            self.group_size,
            self.wire_dtype,
            self.device_type,
            self.reduce_op,
        )
