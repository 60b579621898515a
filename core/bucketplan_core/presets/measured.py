"""A measured hardware profile: what `bucketplan calibrate` fits on one group shape, as a document of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bucketplan_core.errors import PlanningError
from bucketplan_core.fields import Fields
from bucketplan_core.hardware import CollectiveCost, Hardware
from bucketplan_core.presets.fabrics import GroupShape
from bucketplan_core.wire import WireValue

__all__ = ["MeasuredProfile", "resolve_measured"]

_SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredProfile:
    """Figures of one group shape; in `figures` the collectives' group is the placeholder ``measured``."""

    name: str
    shape: GroupShape
    backend: str
    device: str
    figures: Hardware

    def to_wire(self) -> dict[str, WireValue]:
        return {
            "backend": self.backend,
            "device": self.device,
            "hardware": self.figures.to_wire(),
            "name": self.name,
            "nodes": self.shape.nodes,
            "schema": _SCHEMA,
            "size": self.shape.size,
        }

    @classmethod
    def from_wire(cls, tree: WireValue, path: str = "profile") -> MeasuredProfile:
        """Read a decoded tree; raises `DecodeError` with the offending field's path."""
        fields = Fields(tree, path)
        fields.schema((_SCHEMA,))
        profile = cls(
            name=fields.plain_text("name"),
            shape=GroupShape(fields.integer("size", low=1), fields.integer("nodes", low=1)),
            backend=fields.plain_text("backend"),
            device=fields.plain_text("device"),
            figures=Hardware.read(fields.submap("hardware")),
        )
        fields.finish()
        return profile


def resolve_measured(profiles: Sequence[MeasuredProfile], shapes: Mapping[str, GroupShape]) -> Hardware:
    """The figures of these roles from profiles measured on their shapes; rates of the device come from the first.

    Raises `PlanningError` naming a role whose shape nobody measured.
    """
    by_shape = {profile.shape: profile for profile in profiles}
    collectives = []
    for role in sorted(shapes):
        shape = shapes[role]
        if shape.size == 1:
            continue
        if shape not in by_shape:
            raise PlanningError(
                "hardware",
                [profile.name for profile in profiles],
                f"nobody measured {shape.size} ranks on {shape.nodes} nodes, as group {role!r} has; run "
                "`bucketplan calibrate` on such a group",
            )
        collectives += [CollectiveCost(role, cost.op, cost.protocols) for cost in by_shape[shape].figures.collectives]
    if not profiles:
        raise PlanningError("hardware", None, "there is no measured profile")
    device = profiles[0].figures
    return Hardware(
        flops_per_us=device.flops_per_us,
        memory_bytes_per_us=device.memory_bytes_per_us,
        copy_bytes_per_us=device.copy_bytes_per_us,
        launch_ns=device.launch_ns,
        slowdown_permille=device.slowdown_permille,
        collectives=tuple(collectives),
    )
