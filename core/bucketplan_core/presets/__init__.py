"""Shipped hardware profiles: which exist, where each number comes from, and how a job's groups turn one into figures.

    resolve_preset("h100-ndr", {"fsdp": GroupShape(size=64, nodes=8)})  ->  Hardware

A preset covers the group shapes that its sources cover and refuses every other one; hardware without public figures
(Ascend HCCL, B200) is refused by name. A `MeasuredProfile` covers the one shape it was measured on. Both errors say
to measure with `bucketplan calibrate`.
"""

from __future__ import annotations

from bucketplan_core.presets.fabrics import GroupShape
from bucketplan_core.presets.measured import MeasuredProfile, resolve_measured
from bucketplan_core.presets.table import (
    PRESETS,
    UNMEASURED,
    Preset,
    find_preset,
    preset_fits,
    preset_names,
    resolve_preset,
)

__all__ = [
    "PRESETS",
    "UNMEASURED",
    "GroupShape",
    "MeasuredProfile",
    "Preset",
    "find_preset",
    "preset_fits",
    "preset_names",
    "resolve_measured",
    "resolve_preset",
]
