"""The figures of a hardware profile as they enter a request: resolved for each group role, integers only.

Presets, measured profiles and the topology of a job are turned into this form when an attempt opens; a request holds
figures, never a profile's name, so a recalibrated profile gives new signatures instead of another plan for an old one.
"""

from __future__ import annotations

from dataclasses import dataclass

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

    `flops_per_us` maps a work class (``matmul:bfloat16``) to operations a microsecond, sorted by class; `memory_bytes_per_us`
    is memory traffic of compute, `copy_bytes_per_us` that of packing copies (read plus write counted); `launch_ns` the host's
    cost of one collective launch; `slowdown_permille` how much longer compute takes while a collective is in flight.
    """

    flops_per_us: tuple[tuple[str, int], ...]
    memory_bytes_per_us: int
    copy_bytes_per_us: int
    launch_ns: int
    slowdown_permille: int
    collectives: tuple[CollectiveCost, ...]

    def to_wire(self) -> dict[str, WireValue]:
        return {
            "collectives": [
                {
                    "alpha_ns": [protocol.alpha_ns for protocol in cost.protocols],
                    "bytes_per_us": [
                        protocol.bytes_per_us for protocol in cost.protocols
                    ],
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
        rates = fields.submap("flops_per_us")
        collectives = []
        for index, value in enumerate(fields.array("collectives", limit=_MAX_COSTS)):
            entry = Fields(value, f"{fields.path}.collectives[{index}]")
            num_protocols = len(entry.peek("alpha_ns"))
            if not 1 <= num_protocols <= _MAX_PROTOCOLS:
                raise DecodeError(
                    f"{entry.path}.alpha_ns",
                    f"{num_protocols} entries",
                    f"1 to {_MAX_PROTOCOLS} are allowed",
                )
            collectives.append(
                CollectiveCost(
                    group=entry.text("group"),
                    op=entry.text("op", choices=COLLECTIVE_OPS),
                    protocols=tuple(
                        Protocol(alpha_ns, bytes_per_us)
                        for alpha_ns, bytes_per_us in zip(
                            entry.column_int("alpha_ns", num_protocols, high=_MAX_RATE),
                            entry.column_int(
                                "bytes_per_us", num_protocols, low=1, high=_MAX_RATE
                            ),
                            strict=True,
                        )
                    ),
                )
            )
            entry.finish()
        hardware = cls(
            flops_per_us=tuple(
                (key, rates.integer(key, low=1, high=_MAX_RATE))
                for key in rates.keys()[:_MAX_RATES]
            ),
            memory_bytes_per_us=fields.integer(
                "memory_bytes_per_us", low=1, high=_MAX_RATE
            ),
            copy_bytes_per_us=fields.integer(
                "copy_bytes_per_us", low=1, high=_MAX_RATE
            ),
            launch_ns=fields.integer("launch_ns", high=_MAX_RATE),
            slowdown_permille=fields.integer("slowdown_permille", high=1_000_000),
            collectives=tuple(collectives),
        )
        rates.finish()
        fields.finish()
        return hardware
