"""The live process groups of a graph: which ranks issue its collectives together, whatever the groups are called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import fx

from bucketplan_client.capture.groups import GroupRoles, live_group
from bucketplan_client.capture.parse import Collective, parse_collective

__all__ = ["GroupLike", "groups_of_graph", "is_distributed", "members_of", "this_rank"]

GroupLike = Sequence[int] | dist.ProcessGroup | str
"""A process group: the group itself, its name, or its global ranks in group order."""


def is_distributed() -> bool:
    """Whether torch.distributed is there and initialised."""
    return dist.is_available() and dist.is_initialized()


def this_rank() -> int:
    """The global rank of this process, 0 without torch.distributed."""
    return dist.get_rank() if is_distributed() else 0


def members_of(group: GroupLike) -> tuple[int, ...]:
    """Global ranks of `group` in group order; raises `LookupError` for a name that this process does not know."""
    if isinstance(group, str):
        named = live_group(group)
        if named is None:
            raise LookupError(f"no process group is called {group!r}")
        group = named
    if isinstance(group, dist.ProcessGroup):
        return tuple(dist.get_process_group_ranks(group))
    return tuple(group)


def groups_of_graph(graph: fx.Graph, roles: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Members of every group that a collective of `graph` runs on, by role, as far as this process can tell.

    Works on graphs that cannot be described, so that a rank that fails there still finds those it must tell.
    """
    collectives = [found for found in map(parse_collective, graph.nodes) if found is not None]
    names = GroupRoles(collectives, roles)
    found: dict[str, tuple[int, ...]] = {}
    for collective in collectives:
        role = names.role(collective)
        if role not in found:
            members = _members(collective)
            if members:
                found[role] = members
    return found


def _members(collective: Collective) -> tuple[int, ...]:
    group: Any = collective.group
    if not isinstance(group, str | dist.ProcessGroup):
        group = getattr(group, "meta", {}).get("val")
    try:
        return members_of(group) if isinstance(group, str | dist.ProcessGroup) else ()
    except LookupError:
        return ()
