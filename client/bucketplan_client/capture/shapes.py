"""Shape, dtype and device of a node's value, from its fake value, tensor metadata, or the collective that makes it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from bucketplan_client.capture.ops import CAST_OPS, packet_of
from bucketplan_client.capture.parse import is_wait, parse_collective

__all__ = ["TensorFacts", "facts_of"]

_MAX_INFERENCE_DEPTH = 64


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What is known of one tensor; `shape` entries are integers unless `is_symbolic`."""

    shape: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device | None
    is_strided: bool = True

    @property
    def is_symbolic(self) -> bool:
        return any(type(size) is not int for size in self.shape)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def shape_text(self) -> str:
        return "(" + ", ".join(str(size) for size in self.shape) + ")"


def facts_of(node: fx.Node, depth: int = 0) -> TensorFacts | None:
    """Facts of `node`'s tensor; graphs whose inserted nodes carry no fake value are inferred through collectives and
    casts.
    """
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return TensorFacts(
            shape=tuple(value.shape),
            dtype=value.dtype,
            device=value.device,
            is_strided=value.layout is torch.strided,
        )
    metadata = node.meta.get("tensor_meta")
    if metadata is not None and hasattr(metadata, "shape") and hasattr(metadata, "dtype"):
        return TensorFacts(shape=tuple(metadata.shape), dtype=metadata.dtype, device=None)
    if depth > _MAX_INFERENCE_DEPTH or node.op not in ("call_function", "call_method"):
        return None
    return _infer(node, depth + 1)


def _infer(node: fx.Node, depth: int) -> TensorFacts | None:
    if is_wait(node):
        return facts_of(node.all_input_nodes[0], depth)
    collective = parse_collective(node)
    if collective is not None and collective.input is not None:
        source = facts_of(collective.input, depth)
        if source is None:
            return None
        if collective.op == "all_reduce":
            return source
        if collective.group_size is None or not source.shape:
            return None
        first = source.shape[0]
        if collective.op == "all_gather":
            first = first * collective.group_size
        elif collective.op == "reduce_scatter":
            first = first // collective.group_size
        else:
            return None
        return TensorFacts((first, *source.shape[1:]), source.dtype, source.device)
    packet = packet_of(node)
    if packet in (torch.ops.aten.contiguous, torch.ops.aten.clone, torch.ops.aten.alias, "contiguous"):
        return facts_of(node.all_input_nodes[0], depth)
    if packet in CAST_OPS:
        source = facts_of(node.all_input_nodes[0], depth)
        dtype = node.kwargs.get("dtype") or next((arg for arg in node.args if isinstance(arg, torch.dtype)), None)
        if source is None or not isinstance(dtype, torch.dtype):
            return None
        return TensorFacts(source.shape, dtype, source.device)
    return None
