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

    def aliases(self, replaced: fx.Node, by: fx.Node) -> Iterator[tuple[fx.Node, Any]]:
        """Every node whose value shares the storage of `replaced`, with its value in the storage of `by`.

        Views of all kinds and writes in place: whoever decides by shared storage what may be reused must see them on
        the storage that they now read. Nodes are found through users, so that others which only share a recorded
        value (rematerialised clones do) are left alone.
        """
        before, after = replaced.meta["val"], self._meta_of[by]
        storage = before.untyped_storage()._cdata
        shift = (after.storage_offset() - before.storage_offset()) * before.element_size()
        seen = {replaced}
        stack = [replaced]
        while stack:
            for user in stack.pop().users:
                value = user.meta.get("val")
                parts = value if isinstance(value, list | tuple) else (value,)
                if user in seen or not any(_is_stored_in(part, storage) for part in parts):
                    continue
                seen.add(user)
                stack.append(user)
                moved = [self._moved(part, after, shift) if _is_stored_in(part, storage) else part for part in parts]
                yield user, moved[0] if parts is not value else moved

    def _moved(self, value: FakeTensor, onto: torch.Tensor, shift: int) -> FakeTensor:
        """The same view of another storage, `shift` bytes further on."""
        start = value.storage_offset()
        if type(start) is not int or any(type(number) is not int for number in (*value.shape, *value.stride())):
            return value
        offset, rest = divmod(start * value.element_size() + shift, value.element_size())
        if rest:
            return value
        meta = torch.empty(0, dtype=value.dtype, device="meta")
        meta.set_(onto.untyped_storage(), offset, tuple(value.shape), value.stride())
        return FakeTensor(self._mode, meta, self._device)


def _is_stored_in(value: Any, storage: int) -> bool:
    return isinstance(value, FakeTensor) and value.untyped_storage()._cdata == storage


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous meta tensor with storage of its own."""
    return torch.empty(tuple(shape), dtype=dtype, device="meta")
