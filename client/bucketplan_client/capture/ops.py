"""What each node of an fx graph does to storage, and which nodes nothing may be moved across.

Everything here is a property of a target, read once from its schema: which arguments it writes, which its result may
alias, whether it is a *barrier*. A barrier is whatever we cannot prove harmless: communication that we do not know,
higher-order operators that may hide collectives, Python functions, copies between devices (a blocking copy may fence
a non-blocking one, pytorch#173540). Being wrong on the careful side costs a wider bucket; on the other side it costs
a job.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

__all__ = [
    "CAST_OPS",
    "FREE_COMM_TYPES",
    "PREP_OPS",
    "VIEW_OPS",
    "TargetInfo",
    "changes_device",
    "packet_of",
    "target_info",
]

aten = torch.ops.aten
prims = torch.ops.prims

CAST_OPS = frozenset({aten._to_copy, aten.to, prims.convert_element_type})

VIEW_OPS = frozenset(
    {
        aten.view,
        aten.reshape,
        aten._unsafe_view,
        aten.permute,
        aten.transpose,
        aten.t,
        aten.squeeze,
        aten.unsqueeze,
        aten.expand,
        aten.slice,
        aten.select,
        aten.alias,
        aten.detach,
        aten.flatten,
        aten.unflatten,
        aten.narrow,
        aten.view_as,
        aten.split,
        aten.split_with_sizes,
        aten.chunk,
        aten.unbind,
        operator.getitem,
    }
)
"""Pure views: looked through behind a wait, and moved with it."""

PREP_OPS = (
    VIEW_OPS
    | CAST_OPS
    | frozenset(
        {aten.constant_pad_nd, aten.contiguous, aten.clone, aten.cat, "contiguous", "view", "reshape", "flatten"}
    )
)
"""What may stand between a shard or gradient and its launch and belong to the collective; strings are call_method
names.
"""

FREE_COMM_TYPES = frozenset({"fsdp_reshard_free", "fsdp_reshard_free_backward"})
"""`comm_type` of nodes that free the storage of a gathered parameter."""

_PURE_NAMESPACES = frozenset(
    {
        "aten",
        "prims",
        "prim",
        "inductor",
        "inductor_prims",
        "rngprims",
        "quantized",
        "quantized_decomposed",
        "mkldnn",
        "mkl",
        "onednn",
    }
)
_PURE_OPERATORS = frozenset(
    {
        "auto_functionalized",
        "auto_functionalized_v2",
        "control_deps",
        "flex_attention",
        "flex_attention_backward",
        "graphsafe_run_with_rng_state",
        "run_and_save_rng_state",
        "run_with_rng_state",
        "triton_kernel_wrapper_functional",
    }
)
_UNANNOTATED_VIEWS = frozenset({aten._unsafe_view})
_PURE_OPERATOR_NAMES = frozenset(
    {
        "abs",
        "add",
        "and_",
        "eq",
        "floordiv",
        "ge",
        "gt",
        "invert",
        "le",
        "lshift",
        "lt",
        "mod",
        "mul",
        "ne",
        "neg",
        "not_",
    }
    | {"or_", "pos", "pow", "rshift", "sub", "truediv", "truth", "xor"}
)


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """`writes` and `aliases` name arguments by (position, keyword); `everything` stands for all tensor arguments."""

    barrier: bool = False
    writes: tuple[tuple[int, str], ...] = ()
    aliases: tuple[tuple[int, str], ...] = ()
    writes_everything: bool = False
    aliases_everything: bool = False


_NOTHING = TargetInfo()
_UNKNOWN = TargetInfo(barrier=True, writes_everything=True, aliases_everything=True)
_ELEMENT = TargetInfo(aliases=((0, "a"),))
_FREE = TargetInfo(writes=((0, "tensor"),))


def packet_of(node: fx.Node) -> Any:
    """The overload packet of a call, the function itself otherwise, the name for methods: what tables are keyed by."""
    target = node.target
    return target.overloadpacket if isinstance(target, OpOverload) else target


def target_info(node: fx.Node, compute_ops: Collection[str] = ()) -> TargetInfo:
    """Effects of `node`; `compute_ops` are custom operators (``ns::name`` or ``ns::*``) that the caller vouches for."""
    if node.op == "call_function":
        if node.meta.get("comm_type") in FREE_COMM_TYPES:
            return _FREE
        return _function_info(node.target, frozenset(compute_ops))
    if node.op == "call_method":
        return _method_info(str(node.target))
    if node.op == "call_module":
        return _UNKNOWN
    return _NOTHING


@lru_cache(maxsize=4096)
def _function_info(target: Callable[..., Any], compute_ops: frozenset[str]) -> TargetInfo:
    if isinstance(target, OpOverload):
        return _schema_info(target, compute_ops)
    if isinstance(target, OpOverloadPacket):
        infos = [_schema_info(getattr(target, name), compute_ops) for name in target.overloads()]
        for info in infos:
            if info.barrier or info.writes:
                return info
        return infos[0] if infos else _UNKNOWN
    if isinstance(target, HigherOrderOperator):
        name = target.name()
        if name in _PURE_OPERATORS:
            return _NOTHING
        if name == "triton_kernel_wrapper_mutation":
            return TargetInfo(writes_everything=True)
        return _UNKNOWN
    if target is operator.getitem:
        return _ELEMENT
    module, name = getattr(target, "__module__", None), getattr(target, "__name__", "")
    if module == "_operator" and name in _PURE_OPERATOR_NAMES:
        return _NOTHING
    if module == "math" or (module in ("torch", "torch.fx.experimental.sym_node") and "sym_" in name):
        return _NOTHING
    return _UNKNOWN


def _schema_info(op: OpOverload, compute_ops: frozenset[str]) -> TargetInfo:
    schema = op._schema
    writes = []
    aliases = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None:
            continue
        key = (position, argument.name)
        aliases.append(key)
        if argument.alias_info.is_write:
            writes.append(key)
    if op.overloadpacket in _UNANNOTATED_VIEWS:
        aliases.append((0, schema.arguments[0].name))
    name = schema.name
    namespace = name.split("::", 1)[0]
    known = (
        namespace in _PURE_NAMESPACES
        or name == "_dtensor::mesh_get_process_group"
        or name in compute_ops
        or f"{namespace}::*" in compute_ops
    )
    return TargetInfo(barrier=not known, writes=tuple(writes), aliases=tuple(aliases))


def _method_info(name: str) -> TargetInfo:
    if name in PREP_OPS:
        return TargetInfo(aliases=((0, "self"),))
    return _UNKNOWN


def argument(node: fx.Node, key: tuple[int, str]) -> Any:
    """The value of the argument at (position, keyword), None where it was left out."""
    position, name = key
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)


def argument_nodes(node: fx.Node, key: tuple[int, str]) -> list[fx.Node]:
    """Nodes inside one argument (lists looked through)."""
    found: list[fx.Node] = []

    def visit(value: fx.Node) -> fx.Node:
        found.append(value)
        return value

    fx.map_arg(argument(node, key), visit)
    return found


def changes_device(node: fx.Node) -> bool:
    """Whether a call copies between devices, as far as its fake values or its arguments tell."""
    packet = packet_of(node)
    if packet is prims.device_put:
        return True
    if packet in (aten._to_copy, aten.to, aten.copy_, aten.copy):
        source_at = 1 if packet in (aten.copy_, aten.copy) else 0
        source = node.args[source_at] if len(node.args) > source_at else None
        reference = node.args[0] if packet in (aten.copy_, aten.copy) else node
        there = _device(source)
        here = _device(reference)
        if there is not None and here is not None:
            return there != here
        return packet in (aten._to_copy, aten.to) and "device" in node.kwargs
    return False


def _device(value: Any) -> torch.device | None:
    if not isinstance(value, fx.Node):
        return None
    tensor = value.meta.get("val")
    return tensor.device if isinstance(tensor, torch.Tensor) else None
