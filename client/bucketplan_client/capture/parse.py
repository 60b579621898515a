"""Functional collectives as they stand in graphs: positional or keyword arguments, overloads or packets, any group
argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from bucketplan_client.capture.ops import packet_of

__all__ = ["Collective", "group_key", "is_functional_collective", "is_wait", "parse_collective"]

_c10d = torch.ops._c10d_functional
_NAMES: dict[Any, tuple[str, tuple[str, ...]]] = {
    _c10d.all_gather_into_tensor: ("all_gather", ("input", "group_size", "group_name")),
    _c10d.reduce_scatter_tensor: ("reduce_scatter", ("input", "reduce_op", "group_size", "group_name")),
    _c10d.all_reduce: ("all_reduce", ("input", "reduce_op", "group_name")),
    _c10d.all_to_all_single: ("all_to_all", ("input", "output_split_sizes", "input_split_sizes", "group_name")),
    _c10d.broadcast: ("broadcast", ("input", "src", "group_name")),
    _c10d.all_gather_into_tensor_coalesced: ("all_gather_coalesced", ("inputs", "group_size", "group_name")),
    _c10d.reduce_scatter_tensor_coalesced: (
        "reduce_scatter_coalesced",
        ("inputs", "reduce_op", "group_size", "group_name"),
    ),
    _c10d.all_reduce_coalesced: ("all_reduce_coalesced", ("inputs", "reduce_op", "group_name")),
}
"""Collectives that return fresh tensors and write nothing; in-place and out variants are barriers instead."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One launch: `input` is None for list inputs, `group` is the argument as it stands (a name or an fx node)."""

    node: fx.Node
    op: str
    input: fx.Node | None
    group: Any
    group_size: int | None
    reduce_op: str | None
    waits: tuple[fx.Node, ...]


def is_wait(node: fx.Node) -> bool:
    return node.op == "call_function" and packet_of(node) is _c10d.wait_tensor


def is_functional_collective(node: fx.Node) -> bool:
    return node.op == "call_function" and packet_of(node) in _NAMES


def parse_collective(node: fx.Node) -> Collective | None:
    """Read one launch, None for any other node."""
    if node.op != "call_function":
        return None
    found = _NAMES.get(packet_of(node))
    if found is None:
        return None
    op, names = found
    values = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    source, size, reduce_op = values.get("input"), values.get("group_size"), values.get("reduce_op")
    return Collective(
        node=node,
        op=op,
        input=source if isinstance(source, fx.Node) else None,
        group=values.get("group_name"),
        group_size=size if type(size) is int else None,
        reduce_op=reduce_op if isinstance(reduce_op, str) else None,
        waits=tuple(user for user in node.users if is_wait(user)),
    )


def group_key(group: Any) -> Any:
    """What makes two group arguments the same group within one graph: the name, or the call that resolves it."""
    if isinstance(group, fx.Node):
        named = tuple((name, str(value)) for name, value in sorted(group.kwargs.items()))
        return (str(group.target), tuple(str(arg) for arg in group.args), named)
    return group
