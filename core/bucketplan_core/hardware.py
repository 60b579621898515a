"""The figures of a hardware profile as they enter a request: resolved for each group role, integers only.

Presets, measured profiles and the topology of a job are turned into this form when an attempt opens; a request holds
figures, never a profile's name, so a recalibrated profile gives new signatures instead of another plan for an old one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from bucketplan_core.errors import DecodeError
from bucketplan_core.fields import Fields
from bucketplan_core.wire import WireValue

__all__ = ["COLLECTIVE_OPS", "CollectiveCost", "Hardware", "Protocol"]

COLLECTIVE_OPS = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")
_MAX_PROTOCOLS = 8
_MAX_COSTS = 4_000
_MAX_RATES = 64
_MAX_RATE = 2**50


@dataclass(frozen=True, slots=True)
class Protocol:
    """One way a library runs a collective: a latency in ns and a rate in bytes a microsecond."""

    alpha_ns: int
    bytes_per_us: int


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """Protocols of one collective on one group role; its time is the least over them."""

    group: str
    op: str
    protocols: tuple[Protocol, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Figures of one accelerator and its links.

    `flops_per_us` maps a work class (``matmul:bfloat16``) to operations a microsecond; `memory_bytes_per_us` is memory
    traffic of compute, `copy_bytes_per_us` that of packing copies (read plus write counted); `launch_ns` the host's
    cost of one collective launch; `slowdown_permille` how much longer compute takes while a collective is in flight.
    Rates are kept sorted by class, collectives by group and op: the same figures in any order are one profile.
    """

    flops_per_us: tuple[tuple[str, int], ...]
    memory_bytes_per_us: int
    copy_bytes_per_us: int
    launch_ns: int
    slowdown_permille: int
    collectives: tuple[CollectiveCost, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "flops_per_us", tuple(sorted(self.flops_per_us)))
        object.__setattr__(self, "collectives", tuple(sorted(self.collectives, key=lambda cost: (cost.group, cost.op))))

    def to_wire(self) -> dict[str, WireValue]:
        return {
            "collectives": [
                {
                    "alpha_ns": [protocol.alpha_ns for protocol in cost.protocols],
                    "bytes_per_us": [protocol.bytes_per_us for protocol in cost.protocols],
                    "group": cost.group,
                    "op": cost.op,
                }
                for cost in self.collectives
            ],
            "copy_bytes_per_us": self.copy_bytes_per_us,
            "flops_per_us": dict(self.flops_per_us),
            "launch_ns": self.launch_ns,
            "memory_bytes_per_us": self.memory_bytes_per_us,
            "slowdown_permille": self.slowdown_permille,
        }

    @classmethod
    def read(cls, fields: Fields) -> Hardware:
        """Read one map; raises `DecodeError` with the field's path."""
        rates = fields.submap("flops_per_us")
        entries = [
            Fields(value, f"{fields.path}.collectives[{index}]")
            for index, value in enumerate(fields.array("collectives", limit=_MAX_COSTS))
        ]
        collectives = [_read_collective(entry) for entry in entries]
        for (before, cost), entry in zip(pairwise(collectives), entries[1:], strict=True):
            if (cost.group, cost.op) <= (before.group, before.op):
                raise DecodeError(entry.path, (cost.group, cost.op), "must be sorted by group and op, each pair once")
        hardware = cls(
            flops_per_us=tuple(
                (key, rates.integer(key, low=1, high=_MAX_RATE)) for key in rates.keys(limit=_MAX_RATES)
            ),
            memory_bytes_per_us=fields.integer("memory_bytes_per_us", low=1, high=_MAX_RATE),
            copy_bytes_per_us=fields.integer("copy_bytes_per_us", low=1, high=_MAX_RATE),
            launch_ns=fields.integer("launch_ns", high=_MAX_RATE),
            slowdown_permille=fields.integer("slowdown_permille", high=1_000_000),
            collectives=tuple(collectives),
        )
        fields.finish()
        return hardware


def _read_collective(fields: Fields) -> CollectiveCost:
    group = fields.name("group")
    op = fields.text("op", choices=COLLECTIVE_OPS)
    num_protocols = fields.column_length("alpha_ns", limit=_MAX_PROTOCOLS)
    alphas = fields.column_int("alpha_ns", num_protocols, high=_MAX_RATE)
    rates = fields.column_int("bytes_per_us", num_protocols, low=1, high=_MAX_RATE)
    fields.finish()
    if not num_protocols:
        raise DecodeError(f"{fields.path}.alpha_ns", [], "must name a protocol at least")
    return CollectiveCost(group=group, op=op, protocols=tuple(map(Protocol, alphas, rates)))
