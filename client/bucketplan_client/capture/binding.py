"""The live side of a description: which nodes stand behind each candidate and each gap, and whether they still do.

Nothing here is hashed or sent: it is how one plan applies to graphs whose nodes differ between ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from bucketplan_core.profile import CostProfile
from bucketplan_core.request import Request

__all__ = ["Binding", "CandidateNodes", "Description", "GraphSnapshot", "Skipped"]

_WATCHED_META = (
    "comm_type",
    "comm_group",
    "fsdp_degree",
    "param_name",
    "state_idx",
    "fsdp_bucket_id",
    "wait_for",
    "autograd_backward",
)
_WATCHED = frozenset(_WATCHED_META)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A collective that was left as it is: the node's name, the rule, and the reason in words."""

    node: str
    rule: str
    reason: str


@dataclass(frozen=True, slots=True)
class CandidateNodes:
    """Live nodes of one candidate.

    `prep` are the nodes between its sources and the launch that nothing else reads, `result` the pure views behind the
    wait, both in graph order; `feeds` are those of `result` that another candidate's launch reads.
    """

    launch: fx.Node
    wait: fx.Node
    input: fx.Node
    group: Any
    prep: tuple[fx.Node, ...]
    result: tuple[fx.Node, ...]
    feeds: frozenset[fx.Node]
    dtype: torch.dtype
    device: torch.device | None


class GraphSnapshot:
    """The nodes of a graph with their arguments and the metadata that describing reads, by identity.

    fx replaces a node's argument tuple whenever anything in it changes, so identity tells what changed at the price of
    one comparison a node.
    """

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self.nodes = tuple(nodes)
        self._state = [(node.target, node.args, node.kwargs) for node in nodes]
        self._meta = [_watched(node) for node in nodes]

    def first_change(self, graph: fx.Graph) -> str | None:
        """What differs in `graph` since the snapshot, in words, None when nothing does."""
        count = 0
        for node in graph.nodes:
            if count >= len(self.nodes) or self.nodes[count] is not node:
                return f"node {node.name!r} stands where it did not"
            target, args, kwargs = self._state[count]
            if node.target is not target and node.target != target:
                return f"node {node.name!r} calls {node.target}, it called {target}"
            replaced = node.args is not args or node.kwargs is not kwargs
            if replaced and (node.args != args or node.kwargs != kwargs):
                return f"node {node.name!r} has other arguments"
            if _watched(node) != self._meta[count]:
                return f"node {node.name!r} has other metadata"
            count += 1
        if count != len(self.nodes):
            return f"node {self.nodes[count].name!r} is gone"
        return None

    def restore_arguments(self) -> None:
        """Give every node back the target and arguments it had."""
        for node, (target, args, kwargs) in zip(self.nodes, self._state, strict=True):
            if node.target is not target:
                node.target = target
            if node.args is not args:
                node.args = args
            if node.kwargs is not kwargs:
                node.kwargs = kwargs


def _watched(node: fx.Node) -> tuple[Any, ...] | None:
    meta = node.meta
    return None if _WATCHED.isdisjoint(meta) else tuple(map(meta.get, _WATCHED_META))


@dataclass(frozen=True, slots=True)
class Binding:
    """From the request's candidates, fixed collectives and gaps to live nodes.

    `gap_anchors[g]` is the node that gap g stands right before: the first compute node of segment g, the output for
    the last. `fixed` holds (launch, wait) of each fixed collective, wait None where the request has none.
    """

    module: fx.GraphModule
    snapshot: GraphSnapshot
    position: Mapping[fx.Node, int]
    candidates: tuple[CandidateNodes, ...]
    fixed: tuple[tuple[fx.Node, fx.Node | None], ...]
    gap_anchors: tuple[fx.Node, ...]
    arguments: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Description:
    """A graph as the planning service sees it, bound to the live graph it was made from.

    `request` and `profile` travel; `skipped` lists what was left alone and why; `local_groups` maps each role to
    this rank's name of the group (None where the graph resolves it at run time).
    """

    request: Request
    profile: CostProfile
    skipped: tuple[Skipped, ...]
    local_groups: Mapping[str, str | None]
    binding: Binding = field(repr=False)

    @property
    def signature(self) -> str:
        return self.request.signature

    def why_nothing(self) -> str | None:
        """One line that says why there is nothing to bucket, None when there is."""
        if len(self.request.candidates) > 1:
            return None
        if not self.request.candidates and not self.request.fixed:
            return (
                "nothing was bucketed: the graph holds no collective. FSDP2 (fully_shard) under torch.compile runs its "
                "collectives in hooks outside the graph"
            )
        rules = sorted({entry.rule for entry in self.skipped})
        because = f"; left alone by rule: {', '.join(rules)}" if rules else ""
        found = len(self.request.candidates)
        return f"nothing was bucketed: {found} of {found + len(self.request.fixed)} collectives may be fused{because}"
