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
from torch._subclasses.fake_tensor import FakeTensor

from bucketplan_client.capture.ops import argument_nodes, attribute_of, changes_device, target_info
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
        reshaped: list[tuple[int, fx.Node]] = []
        for index, node in enumerate(nodes):
            self._parent[node] = node
            if node.op == "placeholder":
                self._join_aliased_input(node, by_fake_storage)
                continue
            if node.op == "get_attr":
                for key in _attribute_keys(node):
                    self._join(node, by_attribute.setdefault(key, node))
                self._join_aliased_input(node, by_fake_storage)
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
            if info.reshapes:
                reshaped.extend((index, source) for source in node.all_input_nodes)
        self._writes = self._by_root(writes)
        self._reshaped = self._by_root(reshaped)

    def _by_root(self, events: Sequence[tuple[int, fx.Node]]) -> dict[fx.Node, list[int]]:
        by_root: dict[fx.Node, list[int]] = {}
        for index, source in events:
            found = by_root.setdefault(self.root(source), [])
            if not found or found[-1] != index:
                found.append(index)
        return by_root

    def _join_aliased_input(self, node: fx.Node, by_fake_storage: dict[int, fx.Node]) -> None:
        value = node.meta.get("val")
        storage = _storage_of(value) if isinstance(value, torch.Tensor) else None
        if storage is not None:
            self._join(node, by_fake_storage.setdefault(storage._cdata, node))

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
        return _first_from(self._writes.get(self.root(node), ()), position)

    def first_reshape_from(self, node: fx.Node, position: int) -> int | None:
        """Position of the first call at or after `position` that may give a tensor on `node`'s storage another shape,
        offset or storage in place.
        """
        return _first_from(self._reshaped.get(self.root(node), ()), position)

    def last_barrier_before(self, position: int) -> int | None:
        at = bisect_left(self.barriers, position)
        return self.barriers[at - 1] if at else None

    def first_barrier_from(self, position: int) -> int | None:
        return _first_from(self.barriers, position)


def _first_from(positions: Sequence[int], position: int) -> int | None:
    at = bisect_left(positions, position)
    return positions[at] if at < len(positions) else None


def _storage_of(value: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of a tensor; none for those without (sparse, wrapper subclasses), which cannot be told apart."""
    try:
        return value.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return None


def _attribute_keys(node: fx.Node) -> list[Any]:
    """What makes two `get_attr` one: their path, the live object, its storage, the memory behind its storage."""
    keys: list[Any] = [node.target]
    value = attribute_of(node)
    if not isinstance(value, torch.Tensor):
        return keys
    keys.append(("object", id(value)))
    storage = _storage_of(value)
    if storage is not None:
        keys.append(("storage", storage._cdata))
        if value.device.type != "meta" and not isinstance(value, FakeTensor) and storage.data_ptr():
            keys.append(("memory", value.device, storage.data_ptr()))
    return keys
