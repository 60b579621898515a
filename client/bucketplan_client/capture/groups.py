"""Process groups as roles: names that are the same on every rank of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import fx

from bucketplan_client.capture.parse import Collective, group_key
from bucketplan_core.collectives import Group

__all__ = ["GroupRoles", "live_group"]


class GroupRoles:
    """Roles of the groups of one graph, given out in order of first appearance.

    A role is what an annotation or the caller says, else the mesh dimension's name, else ``g0``, ``g1`` ...; a
    second group that would get a taken role gets ``role#2``. Torch's generated group names and rank lists never
    enter: they differ between ranks.
    """

    def __init__(
        self, collectives: Sequence[Collective], roles: Mapping[str, str], topology: Mapping[str, int] | None = None
    ) -> None:
        """`topology` says how many hosts the groups of a role span: one value for all ranks, never this rank's own."""
        self._topology = topology or {}
        self._role_of: dict[Any, str] = {}
        self._groups: dict[str, Group] = {}
        self.local_names: dict[str, str | None] = {}
        numbered = 0
        for collective in collectives:
            key = group_key(collective.group)
            if key in self._role_of:
                self._note_size(self._role_of[key], collective)
                continue
            wanted = (
                _annotated_role(collective)
                or _role_from_caller(collective.group, roles)
                or _mesh_role(collective.group)
            )
            strides: tuple[int, ...] = ()
            if wanted is None:
                wanted = f"g{numbered}"
                numbered += 1
                strides = _strides(collective.group)
            role, number = wanted, 1
            while role in self._groups:  # by its own name, or by a number that somebody gave out as a name
                number += 1
                role = f"{wanted}#{number}"
            self._role_of[key] = role
            self.local_names[role] = collective.group if isinstance(collective.group, str) else None
            self._groups[role] = Group(role=role, size=_known_size(collective) or 1, strides=strides)

    def _note_size(self, role: str, collective: Collective) -> None:
        group = self._groups[role]
        size = _known_size(collective)
        if group.size == 1 and size is not None and size > 1:
            self._groups[role] = replace(group, size=size)

    def role(self, collective: Collective) -> str:
        return self._role_of[group_key(collective.group)]

    def size(self, collective: Collective) -> int:
        return self._groups[self.role(collective)].size

    @property
    def groups(self) -> list[Group]:
        # Ranks whose number nobody knows count as one, and no group spans more hosts than it has ranks.
        return [
            replace(group, nodes=min(self._topology.get(role, 0), group.size)) for role, group in self._groups.items()
        ]


def _annotated_role(collective: Collective) -> str | None:
    role = collective.node.meta.get("comm_group")
    return role if isinstance(role, str) and role else None


def _role_from_caller(group: Any, roles: Mapping[str, str]) -> str | None:
    return roles.get(group) if isinstance(group, str) else None


def _known_size(collective: Collective) -> int | None:
    if collective.group_size is not None:
        return collective.group_size
    degree = collective.node.meta.get("fsdp_degree")
    if type(degree) is int:
        return degree
    process_group = live_group(collective.group)
    return process_group.size() if process_group is not None else None


def live_group(group: Any) -> dist.ProcessGroup | None:
    """The live group behind a name, None without torch.distributed or for a name that is not of this process."""
    if not (dist.is_available() and dist.is_initialized()) or not isinstance(group, str):
        return None
    try:
        return c10d._resolve_process_group(c10d.GroupName(group))  # type: ignore[attr-defined]  # private
    except (LookupError, RuntimeError, ValueError):
        return None


def _mesh_role(group: Any) -> str | None:
    if isinstance(group, fx.Node):
        return None
    process_group = live_group(group)
    described = getattr(process_group, "group_desc", "") or ""
    return described.removeprefix("mesh_") if described.startswith("mesh_") and described != "mesh_" else None


def _strides(group: Any) -> tuple[int, ...]:
    process_group = live_group(group)
    if process_group is None:
        return ()
    ranks = dist.get_process_group_ranks(process_group)
    runs: list[int] = []
    for before, after in pairwise(ranks):
        step = abs(after - before)
        if runs and runs[-2] == step:
            runs[-1] += 1
        else:
            runs += [step, 1]
    return tuple(runs)
