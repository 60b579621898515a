"""Who shares storage with whom, who writes it and when: the facts that bound how far a collective may move.

Storage is keyed by the node that produced it, never by the fake tensor in ``meta["val"]``: rematerialised clones
share their original's fake value, and a key by fake storage would make two buffers one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from bucketplan_client.capture.ops import argument_nodes, changes_device, target_info
from bucketplan_client.capture.parse import is_functional_collective, is_wait

__all__ = ["StorageMap"]


class StorageMap:
    """Alias classes of all nodes of a graph, with the positions that write each, and the positions of barriers.

    Positions are indices into `nodes`.
    """

    def __init__(self, nodes: Sequence[fx.Node], compute_ops: Collection[str]) -> None:
        self.position = {node: index for index, node in enumerate(nodes)}
        self._parent: dict[fx.Node, fx.Node] = {}
        self.barriers: list[int] = []
        writes: list[tuple[int, fx.Node]] = []
        by_fake_storage: dict[int, fx.Node] = {}
        by_attribute: dict[Any, fx.Node] = {}
        for index, node in enumerate(nodes):
            self._parent[node] = node
            if node.op == "placeholder":
                self._join_aliased_input(node, by_fake_storage)
                continue
            if node.op == "get_attr":
                self._join(node, by_attribute.setdefault(node.target, node))
                continue
            if node.op == "output":
                continue
            if is_functional_collective(node):
                continue
            if is_wait(node):
                for source in node.all_input_nodes:
                    self._join(node, source)
                continue
            info = target_info(node, compute_ops)
            if info.barrier or changes_device(node):
                self.barriers.append(index)
            for source in node.all_input_nodes if info.aliases_everything else ():
                self._join(node, source)
            for key in info.aliases:
                for source in argument_nodes(node, key):
                    self._join(node, source)
            for source in node.all_input_nodes if info.writes_everything else ():
                writes.append((index, source))
            for key in info.writes:
                writes.extend((index, source) for source in argument_nodes(node, key))
        self._writes: dict[fx.Node, list[int]] = {}
        for index, source in writes:
            found = self._writes.setdefault(self.root(source), [])
            if not found or found[-1] != index:
                found.append(index)

    def _join_aliased_input(self, node: fx.Node, by_fake_storage: dict[int, fx.Node]) -> None:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return
        try:
            key = value.untyped_storage()._cdata
        except (RuntimeError, NotImplementedError):
            # Tensors without storage (sparse, wrapper subclasses) cannot be told apart this way.
            return
        self._join(node, by_fake_storage.setdefault(key, node))

    def root(self, node: fx.Node) -> fx.Node:
        """The representative of the nodes that may share `node`'s storage."""
        parent = self._parent
        found = node
        while parent[found] is not found:
            found = parent[found]
        while parent[node] is not found:
            parent[node], node = found, parent[node]
        return found

    def _join(self, node: fx.Node, source: fx.Node) -> None:
        if source in self._parent:
            self._parent[self.root(node)] = self.root(source)

    def last_write_before(self, node: fx.Node, position: int) -> int | None:
        """Position of the last write of `node`'s storage before `position`, if any."""
        writes = self._writes.get(self.root(node))
        if not writes:
            return None
        at = bisect_left(writes, position)
        return writes[at - 1] if at else None

    def first_write_from(self, node: fx.Node, position: int) -> int | None:
        """Position of the first write of `node`'s storage at or after `position`, if any."""
        writes = self._writes.get(self.root(node))
        if not writes:
            return None
        at = bisect_left(writes, position)
        return writes[at] if at < len(writes) else None

    def last_barrier_before(self, position: int) -> int | None:
        at = bisect_left(self.barriers, position)
        return self.barriers[at - 1] if at else None

    def first_barrier_from(self, position: int) -> int | None:
        at = bisect_left(self.barriers, position)
        return self.barriers[at] if at < len(self.barriers) else None
