"""Fake values of created nodes, built directly: shape, stride, dtype, device and storage sharing as execution would
give them.

Running each operator under the fake mode costs several times more than building its result, and a rewrite makes
thousands. Views are taken of one meta tensor, so that nodes which share storage at run time share it here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    unset_fake_temporarily,
)
from torch.utils._mode_utils import no_dispatch

__all__ = ["FakeValues"]


class FakeValues:
    """Makes fake values like those of a graph's own nodes, or none where the graph has none.

    `meta_of` keeps the meta tensor behind each value made here, so that views can be taken of it.
    """

    def __init__(self, like: FakeTensor | None) -> None:
        self._mode: FakeTensorMode | None = like.fake_mode if like is not None else None
        self._device = like.device if like is not None else None
        self._meta_of: dict[fx.Node, torch.Tensor] = {}

    @classmethod
    def like(cls, nodes: Sequence[fx.Node]) -> FakeValues:
        """For a graph in which every one of `nodes` has a fake value; else values are left out."""
        values = [node.meta.get("val") for node in nodes]
        if values and all(isinstance(value, FakeTensor) for value in values):
            return cls(values[0])
        return cls(None)

    @property
    def enabled(self) -> bool:
        return self._mode is not None

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Meta tensors made inside are plain, whatever fake mode the caller runs under."""
        with unset_fake_temporarily(), torch.no_grad():
            yield

    def set(self, node: fx.Node, meta: torch.Tensor) -> None:
        """Give `node` the fake value of `meta`."""
        assert self._mode is not None
        self._meta_of[node] = meta
        node.meta["val"] = FakeTensor(self._mode, meta, self._device)

    def set_list(self, node: fx.Node, metas: Sequence[torch.Tensor]) -> None:
        assert self._mode is not None
        node.meta["val"] = [FakeTensor(self._mode, meta, self._device) for meta in metas]

    def meta(self, node: fx.Node) -> torch.Tensor:
        return self._meta_of[node]

    def behind(self, node: fx.Node) -> torch.Tensor | None:
        """The meta tensor of `node`'s value, sharing its storage: of a node made here, or of one that was there
        before.
        """
        made = self._meta_of.get(node)
        if made is not None:
            return made
        value = node.meta.get("val")
        if self._mode is None or not isinstance(value, FakeTensor):
            return None
        with in_kernel_invocation_manager(self._mode), no_dispatch():
            return value.as_strided(value.size(), value.stride(), value.storage_offset())

    def refresh_views(self, base: fx.Node, views: Sequence[fx.Node], replaced: fx.Node) -> list[tuple[fx.Node, Any]]:
        """Recompute the values of pure views of `base`, which took the place of `replaced`; returns what they were."""
        before: list[tuple[fx.Node, Any]] = []
        lists: dict[fx.Node, Sequence[torch.Tensor]] = {}
        for view in views:
            if not isinstance(view.meta.get("val"), torch.Tensor | list | tuple):
                continue

            def value_of(node: fx.Node) -> Any:
                node = base if node is replaced else node
                return lists[node] if node in lists else self._meta_of[node]

            try:
                args = fx.map_arg(view.args, value_of)
                kwargs = fx.map_arg(view.kwargs, value_of)
            except KeyError:
                continue
            assert callable(view.target)
            result = view.target(*args, **kwargs)
            before.append((view, view.meta["val"]))
            if isinstance(result, torch.Tensor):
                self.set(view, result)
            else:
                lists[view] = list(result)
                self.set_list(view, lists[view])
        return before


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous meta tensor with storage of its own."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")
