"""The presets by name, and their resolution into the figures of a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bucketplan_core.errors import PlanningError
from bucketplan_core.hardware import CollectiveCost, Hardware
from bucketplan_core.presets.fabrics import (
    Fabric,
    GroupShape,
    a100_hdr,
    a100_nvlink,
    gloo_loopback,
    h100_ndr,
    h100_nvlink,
    one_nic_a_rank,
)

__all__ = ["PRESETS", "UNMEASURED", "Preset", "find_preset", "preset_fits", "preset_names", "resolve_preset"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """Rates of one device in operations, respectively bytes, a microsecond; `source` says where each comes from."""

    flops_per_us: tuple[tuple[str, int], ...]
    memory_bytes_per_us: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One shipped profile. `trust` is high (measured by several), medium, or low (line rates); `covers` names the
    shapes.

    `launch_ns` and `slowdown_permille` are 0 in every preset: both depend on the host and the kernels, and no public
    figure exists. `bucketplan calibrate` measures them.
    """

    name: str
    accelerator: Accelerator
    fabric: Fabric
    trust: str
    covers: str
    source: str


def _gpu_rates(*, attention: int, half: int, full: int) -> tuple[tuple[str, int], ...]:
    """Operations a microsecond: attention and matmul in both 16-bit types, matmul in float32 and float64."""
    both = ("bfloat16", "float16")
    return (
        *((f"attention:{dtype}", attention) for dtype in both),
        *((f"matmul:{dtype}", half) for dtype in both),
        *((f"matmul:{dtype}", full) for dtype in ("float32", "float64")),
    )


_H100 = Accelerator(
    flops_per_us=_gpu_rates(attention=511_000_000, half=692_300_000, full=46_900_000),
    memory_bytes_per_us=2_345_000,
    source=(
        "NVIDIA H100 SXM data sheet: 989 TFLOP/s bf16 dense, 67 TFLOP/s fp32, 3.35 TB/s; 70% of each, the share that a "
        "roofline of real training graphs reaches; attention 511 TFLOP/s, fitted to recorded compute times "
        "of Llama 3 8B and a 16B mixture of experts (837, 532, 474 ms) within 1%"
    ),
)
_A100 = Accelerator(
    flops_per_us=_gpu_rates(attention=161_000_000, half=218_400_000, full=13_600_000),
    memory_bytes_per_us=1_427_000,
    source=(
        "NVIDIA A100 SXM 80 GB data sheet: 312 TFLOP/s bf16 dense, 19.5 TFLOP/s fp32 and fp64 tensor, 2.039 TB/s; 70% "
        "of each; attention at the H100's share of peak, 52%"
    ),
)
_TWO_CPU_CORES = Accelerator(
    flops_per_us=(
        ("attention:bfloat16", 37_000),
        ("attention:float32", 24_000),
        ("matmul:bfloat16", 600),
        ("matmul:float16", 600),
        ("matmul:float32", 27_000),
        ("matmul:float64", 13_000),
    ),
    memory_bytes_per_us=9_400,
    source="`bucketplan calibrate` on one busy 2-core x86 virtual machine; for tests and demonstrations only",
)

PRESETS: tuple[Preset, ...] = (
    Preset(
        name="h100-nvlink",
        accelerator=_H100,
        fabric=h100_nvlink,
        trust="high",
        covers="2 to 8 ranks of one node (2, 4, 8 fitted, the others by formula)",
        source="published NVLink measurements fitted for 2, 4 and 8 ranks; NCCL's closed form else",
    ),
    Preset(
        name="h100-ndr",
        accelerator=_H100,
        fabric=h100_ndr,
        trust="high at 8 ranks a node on 8 and 32 nodes, medium elsewhere",
        covers="groups inside a node, and equal numbers (1 to 8) of ranks on each of several nodes",
        source="NCCL's closed form with the bandwidths that AutoParallel published from NCCL 2.27.5 logs",
    ),
    Preset(
        name="ndr-1-per-node",
        accelerator=_H100,
        fabric=one_nic_a_rank,
        trust="medium",
        covers="2 to 64 ranks, each on a node of its own (8, 16, 32 fitted)",
        source="latency 3 + 10.9 N us and 48 GB/s, fitted to published measurements on 8, 16 and 32 hosts",
    ),
    Preset(
        name="a100-nvlink",
        accelerator=_A100,
        fabric=a100_nvlink,
        trust="medium",
        covers="8 ranks of one node",
        source="NCCL's closed form; 208 GB/s as reported for all-reduce (240 by formula, 149 to 178 in other runs)",
    ),
    Preset(
        name="a100-hdr",
        accelerator=_A100,
        fabric=a100_hdr,
        trust="low",
        covers="8 ranks of one node, and 8 ranks on each of several nodes",
        source="NCCL's closed form; 25 GB/s line rate a 200G NIC",
    ),
    Preset(
        name="gloo-loopback",
        accelerator=_TWO_CPU_CORES,
        fabric=gloo_loopback,
        trust="low: measure yours",
        covers="2 to 8 processes of one host",
        source="all-gather of 2 ranks as `bucketplan calibrate` measured it on that machine; more ranks scaled by hops",
    ),
)

UNMEASURED: dict[str, str] = {
    "ascend-910b": "no public figure for an HCCL collective exists",
    "ascend-a3": "no public figure for an HCCL collective exists",
    "b200-nvlink": "only formula values are public, no measurement",
}
"""Hardware that people ask for by name and that nobody may guess, with the reason."""

_OPS = (("all_gather", 1), ("all_reduce", 2), ("all_to_all", 1), ("reduce_scatter", 1))


def preset_names() -> tuple[str, ...]:
    """Names that `resolve_preset` accepts, in the order of the table."""
    return tuple(preset.name for preset in PRESETS)


def find_preset(name: str) -> Preset:
    """The preset of this name; raises `PlanningError` saying which exist, or why this one cannot."""
    for preset in PRESETS:
        if preset.name == name:
            return preset
    for unmeasured, reason in UNMEASURED.items():
        if name.startswith(unmeasured):
            raise PlanningError("hardware", name, f"{reason}; measure it with `bucketplan calibrate`")
    raise PlanningError("hardware", name, f"there is no such preset; known are {', '.join(preset_names())}")


def resolve_preset(name: str, shapes: Mapping[str, GroupShape]) -> Hardware:
    """The figures of preset `name` for these group roles, as `Options.hardware` takes them.

    A role of one rank needs no fabric. An all-to-all is costed like an all-gather: every rank sends (N-1)/N of its
    buffer. Raises `PlanningError` naming the role whose shape the preset does not cover.
    """
    preset = find_preset(name)
    collectives = []
    for role in sorted(shapes):
        shape = shapes[role]
        if shape.size == 1:
            continue
        if shape.nodes < 1:
            raise PlanningError(
                "hardware", name, f"say on how many nodes the {shape.size} ranks of group {role!r} stand"
            )
        for op, passes in _OPS:
            protocols = preset.fabric(shape, passes)
            if protocols is None:
                raise PlanningError(
                    "hardware",
                    name,
                    f"it covers {preset.covers}, not the {shape.size} ranks on {shape.nodes} nodes of group {role!r}; "
                    "measure with `bucketplan calibrate`",
                )
            collectives.append(CollectiveCost(group=role, op=op, protocols=protocols))
    return Hardware(
        flops_per_us=preset.accelerator.flops_per_us,
        memory_bytes_per_us=preset.accelerator.memory_bytes_per_us,
        copy_bytes_per_us=preset.accelerator.memory_bytes_per_us,
        launch_ns=0,
        slowdown_permille=0,
        collectives=tuple(collectives),
    )


def preset_fits(name: str, shapes: Mapping[str, GroupShape]) -> bool:
    """Whether `resolve_preset` has figures for all of these roles."""
    try:
        resolve_preset(name, shapes)
    except PlanningError:
        return False
    return True
