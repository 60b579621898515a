"""Every change that a rewrite makes to a graph goes through here, so that a failure can take all of them back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from bucketplan_client.capture.binding import GraphSnapshot

__all__ = ["Journal"]

_ABSENT = object()


class Journal:
    """Creates, moves and relabels nodes of one graph; `roll_back` restores nodes, order, arguments and metadata.

    Nodes to be erased are only noted: `commit` erases them, once nothing else can fail.
    """

    def __init__(self, graph: fx.Graph, snapshot: GraphSnapshot) -> None:
        self.graph = graph
        self._snapshot = snapshot
        self.created: list[fx.Node] = []
        self.moved: list[fx.Node] = []
        self._operations: list[tuple[fx.Node, str]] = []
        self._meta: list[tuple[fx.Node, str, Any]] = []
        self._obsolete: list[fx.Node] = []

    def create(
        self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> fx.Node:
        """A new call at the graph's insertion point."""
        node = self.graph.create_node("call_function", target, args, kwargs or {})
        self.created.append(node)
        return node

    def move_before(self, anchor: fx.Node, node: fx.Node) -> None:
        anchor.prepend(node)
        self.moved.append(node)

    def retarget(self, node: fx.Node, target: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Turn `node` into a call of `target`."""
        self._operations.append((node, node.op))
        node.op = "call_function"
        node.target = target
        node.args = args
        node.kwargs = {}

    def set_meta(self, node: fx.Node, key: str, value: Any) -> None:
        self.note_meta(node, key, node.meta.get(key, _ABSENT))
        node.meta[key] = value

    def note_meta(self, node: fx.Node, key: str, before: Any) -> None:
        """Remember what metadata was before a change made elsewhere."""
        self._meta.append((node, key, before))

    def replace_uses(self, old: fx.Node, new: fx.Node) -> None:
        old.replace_all_uses_with(new)

    def obsolete(self, node: fx.Node) -> None:
        """Erase `node` at commit, after those noted before it."""
        self._obsolete.append(node)

    @property
    def to_erase(self) -> frozenset[fx.Node]:
        return frozenset(self._obsolete)

    def commit(self) -> None:
        for node in self._obsolete:
            self.graph.erase_node(node)

    def roll_back(self) -> None:
        self._snapshot.restore_arguments()
        for node, operation in reversed(self._operations):
            node.op = operation
        for node, key, before in reversed(self._meta):
            if before is _ABSENT:
                node.meta.pop(key, None)
            else:
                node.meta[key] = before
        for node in reversed(self.created):
            self.graph.erase_node(node)
        nodes = self._snapshot.nodes
        for node, following in zip(reversed(nodes[:-1]), reversed(nodes[1:]), strict=True):
            if node.next is not following:
                following.prepend(node)
