"""Resharding after forward for compiled graphs: gathers are made again in the backward instead of being kept.

Left alone, AOTAutograd's partitioner saves every gathered parameter for the backward, so that the whole model stays
unsharded between the two. Marked for recomputation, a gather and what only reshapes its result are repeated where the
backward reads them, from the shard. The partitioner obeys such marks on collectives only where they look like those of
an activation checkpoint, hence the region id.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from bucketplan_client.capture.names import module_of, parameter_name
from bucketplan_client.capture.ops import PREP_OPS, changes_device, packet_of
from bucketplan_client.capture.parse import parse_collective
from bucketplan_client.capture.recognize import Recognised, recognise
from bucketplan_client.capture.storage import StorageMap
from bucketplan_core.collectives import ALL_GATHER_KINDS

__all__ = ["REGION_ID", "mark_gathers"]

REGION_ID = 2**31
"""Above the ids that `torch.utils.checkpoint` counts up: the partitioner saves what a region with a higher id reads."""


def mark_gathers(graph: fx.Graph, *, keep_gathered: Sequence[str] = (), compute_ops: Collection[str] = ()) -> int:
    """Mark every parameter gather of a joint graph for recomputation; returns how many were marked.

    A gather whose parameter or module path matches one of `keep_gathered` (``*`` wildcards) keeps its result between
    forward and backward, as one does for the layers that the backward reads first.
    """
    nodes = list(graph.nodes)
    collectives = [found for found in map(parse_collective, nodes) if found is not None]
    found, _ = recognise(
        collectives,
        StorageMap(nodes, compute_ops),
        nodes[-1],
        phase="joint",
        compute_ops=compute_ops,
    )
    num_marked = 0
    for entry in found:
        if entry.kind not in ALL_GATHER_KINDS or _is_kept(entry, keep_gathered):
            continue
        for node in (*_preparation(entry), entry.collective.node, entry.wait, *_reconstruction(entry.wait)):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = REGION_ID
        num_marked += 1
    return num_marked


def _is_kept(entry: Recognised, patterns: Sequence[str]) -> bool:
    names = [name for name in (parameter_name(entry), module_of(entry)) if name is not None]
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _preparation(entry: Recognised) -> list[fx.Node]:
    """Casts and pads between the shard and the launch."""
    found: list[fx.Node] = []
    stack = list(entry.collective.node.all_input_nodes)
    while stack:
        node = stack.pop()
        if node.op == "call_function" and node not in found:
            found.append(node)
            stack.extend(node.all_input_nodes)
    return found


def _reconstruction(wait: fx.Node) -> list[fx.Node]:
    """What only brings the gathered bytes into the parameter's shape: views, casts, the cat of a split dimension."""
    found = {wait}
    stack = [wait]
    while stack:
        for user in stack.pop().users:
            if (
                user not in found
                and user.op == "call_function"
                and packet_of(user) in PREP_OPS
                and not changes_device(user)
                and all(source in found or _is_size(source) for source in user.all_input_nodes)
            ):
                found.add(user)
                stack.append(user)
    return list(found - {wait})


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)
