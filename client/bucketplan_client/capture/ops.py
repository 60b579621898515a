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
    "ABSOLUTE_VIEW_OPS",
    "CAST_OPS",
    "COPYING_VIEW_OPS",
    "FREE_COMM_TYPES",
    "PREP_OPS",
    "VIEW_OPS",
    "TargetInfo",
    "attribute_of",
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

COPYING_VIEW_OPS = frozenset({aten.reshape, aten.flatten})
"""Views that copy where the strides allow for no view: what they return is what they read when they ran."""

ABSOLUTE_VIEW_OPS = frozenset(
    {
        aten.as_strided,
        aten.as_strided_,
        aten.as_strided_copy,
        aten.as_strided_scatter,
        aten.set,
        aten.set_,
        aten.storage_offset,
        aten.sym_storage_offset,
        prims.as_strided,
        prims.as_strided_scatter,
    }
)
"""What reads storage at an offset from its beginning, or the offset itself, rather than relative to the tensor."""

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
_RUNS_OTHER_OPERATORS = _PURE_OPERATORS - {
    "flex_attention",
    "flex_attention_backward",
    "triton_kernel_wrapper_functional",
}
_FUNCTIONALIZING = frozenset({"auto_functionalized", "auto_functionalized_v2"})
"""Clone what the wrapped operator would write, so that of its effects only communication is left."""

_UNMARKED_ALIASES: dict[str, tuple[str, ...]] = {
    "aten::_lazy_clone": ("self",),
    "aten::_unsafe_view": ("self",),
    "aten::lift": ("self",),
    "aten::native_dropout": ("input",),
    "aten::set": ("source",),
    "aten::set_": ("source",),
    "aten::unsafe_split": ("self",),
    "aten::unsafe_split_with_sizes": ("self",),
    "inductor::_alloc_from_pool": ("self",),
    "inductor::_reinterpret_tensor": ("self",),
    "inductor::accumulate_grad_": ("variable", "variable_grad", "new_grad"),
}
"""Arguments whose storage results share without saying so in the schema."""

_RUNNING_STATISTICS = ("running_mean", "running_var")
_UNMARKED_WRITES: dict[str, tuple[str, ...]] = {
    "aten::_batch_norm_impl_index": _RUNNING_STATISTICS,
    "aten::batch_norm": _RUNNING_STATISTICS,
    "aten::batch_norm_gather_stats": _RUNNING_STATISTICS,
    "aten::batch_norm_gather_stats_with_counts": _RUNNING_STATISTICS,
    "aten::batch_norm_update_stats": _RUNNING_STATISTICS,
    "aten::cudnn_batch_norm": _RUNNING_STATISTICS,
    "aten::instance_norm": _RUNNING_STATISTICS,
    "aten::miopen_batch_norm": _RUNNING_STATISTICS,
    "aten::native_batch_norm": _RUNNING_STATISTICS,
    "inductor::accumulate_grad_": ("variable", "variable_grad"),
    "inductor::resize_storage_bytes_": ("variable",),
}
"""Arguments that are written, resized or freed without a mark in the schema; whether in training is not asked."""

_ALLOCATING_COMPOSITES = frozenset(
    {
        "aten::_fused_rms_norm",
        "aten::argsort",
        "aten::avg_pool1d",
        "aten::bilinear",
        "aten::conv1d",
        "aten::conv2d",
        "aten::conv3d",
        "aten::conv_transpose1d",
        "aten::conv_transpose2d",
        "aten::conv_transpose3d",
        "aten::cross_entropy_loss",
        "aten::group_norm",
        "aten::layer_norm",
        "aten::linear",
        "aten::log_softmax",
        "aten::matmul",
        "aten::one_hot",
        "aten::rms_norm",
        "aten::scaled_dot_product_attention",
        "aten::softmax",
        "aten::std",
        "aten::var",
    }
)
"""Composite operators that never return an input or a view of one; any other without marks may (eval-mode dropout,
`sum_to_size`, `einsum` of one operand).
"""
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
    """`writes` and `aliases` name arguments by (position, keyword); `everything` stands for all tensor arguments.

    `reshapes` tells that a written argument may be another view afterwards, of its storage or of another's.
    """

    barrier: bool = False
    reshapes: bool = False
    writes: tuple[tuple[int, str], ...] = ()
    aliases: tuple[tuple[int, str], ...] = ()
    writes_everything: bool = False
    aliases_everything: bool = False


_NOTHING = TargetInfo()
_UNKNOWN = TargetInfo(barrier=True, reshapes=True, writes_everything=True, aliases_everything=True)
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
        if isinstance(node.target, HigherOrderOperator) and node.target.name() in _PURE_OPERATORS:
            return _higher_order_info(node, node.target.name(), frozenset(compute_ops))
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
        if name == "triton_kernel_wrapper_mutation":
            return TargetInfo(writes_everything=True)  # kernels see storage, not tensors
        return _NOTHING if name in _PURE_OPERATORS - _RUNS_OTHER_OPERATORS else _UNKNOWN
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
    name = schema.name
    marked = bool(aliases)
    unmarked_aliases = _UNMARKED_ALIASES.get(name, ())
    unmarked_writes = _UNMARKED_WRITES.get(name, ())
    for position, argument in enumerate(schema.arguments):
        key = (position, argument.name)
        if argument.name in unmarked_aliases and key not in aliases:
            aliases.append(key)
        if argument.name in unmarked_writes and key not in writes:
            writes.append(key)
    namespace = name.split("::", 1)[0]
    known = (
        namespace in _PURE_NAMESPACES
        or name == "_dtensor::mesh_get_process_group"
        or name in compute_ops
        or f"{namespace}::*" in compute_ops
    )
    return TargetInfo(
        barrier=not known,
        reshapes=torch.Tag.inplace_view in op.tags,
        writes=tuple(writes),
        aliases=tuple(aliases),
        aliases_everything=not marked and _may_return_an_input(op),
    )


def _may_return_an_input(op: OpOverload) -> bool:
    """Whether an operator without alias marks is put together of others, of which the last may be a view or none."""
    name = op._schema.name
    return (
        name.startswith("aten::")
        and name not in _ALLOCATING_COMPOSITES
        and any(isinstance(result.type, torch.TensorType | torch.ListType) for result in op._schema.returns)
        and torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
    )


def _higher_order_info(node: fx.Node, name: str, compute_ops: frozenset[str]) -> TargetInfo:
    """Effects of an operator that runs others, judged by what it runs; unknown where that cannot be seen."""
    infos = []
    for wrapped in _wrapped_targets(node):
        if isinstance(wrapped, fx.GraphModule):
            for inner in wrapped.graph.nodes:
                if changes_device(inner):
                    return _UNKNOWN
                infos.append(target_info(inner, compute_ops))
        else:
            infos.append(_function_info(wrapped, compute_ops))
    if any(info.barrier for info in infos) or (not infos and name in _RUNS_OTHER_OPERATORS):
        return _UNKNOWN
    if name in _FUNCTIONALIZING:
        return _NOTHING
    return TargetInfo(
        reshapes=any(info.reshapes for info in infos),
        writes_everything=any(info.writes or info.writes_everything for info in infos),
        aliases_everything=any(info.aliases or info.aliases_everything for info in infos),
    )


def _wrapped_targets(node: fx.Node) -> list[Any]:
    """Operators and graphs among the arguments of a higher-order operator, graphs by themselves or by attribute."""
    found: list[Any] = []

    def visit(value: Any) -> Any:
        if isinstance(value, OpOverload | OpOverloadPacket | HigherOrderOperator | fx.GraphModule):
            found.append(value)
        elif isinstance(value, fx.Node) and value.op == "get_attr":
            graph = attribute_of(value)
            if isinstance(graph, fx.GraphModule):
                found.append(graph)
        return value

    fx.node.map_aggregate((node.args, node.kwargs), visit)
    return found


def attribute_of(node: fx.Node) -> Any:
    """What a `get_attr` reads from the live module, None where there is no module or no such attribute."""
    found: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        found = getattr(found, part, None)
    return found


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
