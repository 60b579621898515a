"""Which collectives are candidates, by annotation or by the shape of their neighbourhood, and why others are not.

    parameter gather     placeholder | get_attr  >  [casts, pads, views, contiguous]*  >  all_gather  >  wait  >  uses
    gradient reduction   compute  >  [prep]*  >  reduce_scatter | all_reduce  >  wait
                         >  [views, casts, accumulation]*  >  output
                         (an all_reduce may feed a reduce_scatter of the same gradient, or the reverse)

A collective that looks like neither stays fixed. One that does look so but cannot be proved safe stays fixed too,
and is listed with the rule that held it back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from bucketplan_client.capture.ops import (
    ABSOLUTE_VIEW_OPS,
    CAST_OPS,
    FREE_COMM_TYPES,
    PREP_OPS,
    VIEW_OPS,
    argument,
    argument_nodes,
    changes_device,
    packet_of,
    target_info,
)
from bucketplan_client.capture.parse import Collective, group_key, is_functional_collective, is_wait
from bucketplan_client.capture.shapes import TensorFacts, facts_of
from bucketplan_client.capture.storage import StorageMap
from bucketplan_core.collectives import ALL_GATHER_KINDS, DTYPE_BYTES, KINDS, REDUCE_OPS

__all__ = ["Recognised", "recognise"]

aten = torch.ops.aten
_ACCUMULATION_OPS = frozenset({aten.add, aten.add_})
_SCALING_OPS = frozenset({aten.mul, aten.mul_, aten.div, aten.div_})
_COPYING_OPS = frozenset({aten.clone, aten.contiguous})
_ELEMENT_VIEWS = frozenset({aten.view, aten.view_copy, "view"})
_STORAGE_CHANGING = ("resize", "set_", "free")
_KIND_OF_OP = {"reduce_scatter": "fsdp_reduce_scatter", "all_reduce": "dp_all_reduce"}
_OP_OF_KIND = dict.fromkeys(ALL_GATHER_KINDS, "all_gather") | {kind: op for op, kind in _KIND_OF_OP.items()}


@dataclass(frozen=True, slots=True)
class Recognised:
    """One eligible collective: `source` is the parameter it gathers, `output_slot` the graph output its gradient
    ends in.
    """

    collective: Collective
    wait: fx.Node
    kind: str
    annotated: bool
    source: fx.Node | None
    output_slot: int | None
    input_facts: TensorFacts
    output_facts: TensorFacts


def recognise(
    collectives: Sequence[Collective],
    storage: StorageMap,
    output: fx.Node,
    *,
    phase: str,
    compute_ops: Collection[str],
) -> tuple[list[Recognised], dict[fx.Node, tuple[str, str]]]:
    """Split `collectives` into candidates and (launch -> rule, reason) for those that look eligible but are not
    safe.
    """
    slots = _output_slots(output)
    inputs_are_described = any("desc" in node.meta for node in storage.position if node.op == "placeholder")
    kinds: dict[fx.Node, tuple[str, bool, fx.Node | None, int | None]] = {}
    skipped: dict[fx.Node, tuple[str, str]] = {}
    for collective in collectives:
        annotated = collective.node.meta.get("comm_type")
        if annotated in KINDS:
            source = _gather_source(collective.input)[0] if annotated in ALL_GATHER_KINDS else None
            kinds[collective.node] = (annotated, True, source, _gradient_slot(collective, slots)[0])
        elif collective.op == "all_gather":
            source, reason = _gather_source(collective.input)
            if source is None:
                if reason is not None:
                    skipped[collective.node] = ("device-copy", reason)
                continue
            if inputs_are_described and not _may_be_parameter(source):
                continue
            backward = phase == "backward" or is_backward_node(collective.node)
            kinds[collective.node] = (ALL_GATHER_KINDS[backward], False, source, None)
        elif collective.op in _KIND_OF_OP and phase != "forward":
            slot, is_gradient = _gradient_slot(collective, slots)
            if is_gradient:
                kinds[collective.node] = (_KIND_OF_OP[collective.op], False, None, slot)
    _drop_activation_groups(collectives, kinds)
    found: list[Recognised] = []
    sizes: dict[Any, int | None] = {}
    for collective in collectives:
        if collective.node not in kinds:
            continue
        kind, annotated_here, source, slot = kinds[collective.node]
        key = group_key(collective.group)
        if sizes.get(key) is None:
            sizes[key] = _group_size(collective)  # none of an all-reduce, which does not say it
        expected = sizes[key]
        verdict = _why_unsafe(collective, kind, storage, expected, compute_ops)
        if isinstance(verdict, tuple):
            skipped[collective.node] = verdict
            continue
        found.append(
            Recognised(
                collective=collective,
                wait=collective.waits[0],
                kind=kind,
                annotated=annotated_here,
                source=source,
                output_slot=slot,
                input_facts=verdict.input,
                output_facts=verdict.output,
            )
        )
    return found, skipped


def is_backward_node(node: fx.Node) -> bool:
    """Whether a node belongs to the backward pass of a joint graph, by any of the marks that tracers leave."""
    return bool(
        node.meta.get("autograd_backward")
        or node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")
        or "_recomputed" in node.name
    )


def _may_be_parameter(source: fx.Node) -> bool:
    """Whether the tracer's description of an input allows for a parameter: not for a saved activation or a gradient.

    AOTAutograd describes every input of a graph that the user's program has; what it saves for the backward itself
    has no description.
    """
    described = source.meta.get("desc")
    return source.op == "get_attr" or (described is not None and "Tangent" not in type(described).__name__)


def _gather_source(start: fx.Node | None) -> tuple[fx.Node | None, str | None]:
    """The one parameter-like node that `start` derives from, else None, with a reason where only a device copy
    stands between.
    """
    if start is None:
        return None, None
    leaves: set[fx.Node] = set()
    seen = {start}
    stack = [start]
    copied = None
    while stack:
        node = stack.pop()
        if node.op in ("placeholder", "get_attr"):
            leaves.add(node)
            continue
        if node.op not in ("call_function", "call_method") or (
            packet_of(node) not in PREP_OPS and packet_of(node) is not torch.ops.prims.device_put
        ):
            return None, None
        if changes_device(node):
            copied = node.name
        for source in node.all_input_nodes:
            if source not in seen and not isinstance(source.meta.get("val"), torch.SymInt):
                seen.add(source)
                stack.append(source)
    if len(leaves) != 1:
        return None, None
    if copied is not None:
        return None, f"{copied!r} copies the parameter between devices before it is gathered"
    return leaves.pop(), None


def _gradient_slot(collective: Collective, slots: dict[fx.Node, int]) -> tuple[int | None, bool]:
    """(first output slot that the result reaches, whether every path from it ends in the output or an accumulation)."""
    slot: int | None = None
    reaches_end = False
    seen: set[fx.Node] = set(collective.waits)
    stack = list(collective.waits)
    while stack:
        node = stack.pop()
        for user in node.users:
            if user.op == "output":
                reaches_end = True
                found = slots[node]
                slot = found if slot is None else min(slot, found)
                continue
            if user in seen:
                continue
            seen.add(user)
            if user.op not in ("call_function", "call_method"):
                return slot, False
            packet = packet_of(user)
            if packet is aten.copy_ and user.args[1:2] == (node,):
                reaches_end = True
                if not user.users:
                    continue
            elif is_functional_collective(user):
                if packet is torch.ops._c10d_functional.all_gather_into_tensor:
                    return slot, False
            elif packet in _SCALING_OPS:
                if len(user.all_input_nodes) > 1 and not _is_scalar(user, node):
                    return slot, False
            elif not (
                is_wait(user)
                or packet in _ACCUMULATION_OPS
                or packet in VIEW_OPS
                or packet in CAST_OPS
                or packet in _COPYING_OPS
                or "fsdp_bucket_id" in user.meta  # packing and splitting by an earlier rewrite
            ):
                return slot, False
            stack.append(user)
    return slot, reaches_end


def _is_scalar(user: fx.Node, node: fx.Node) -> bool:
    others = [source for source in user.all_input_nodes if source is not node]
    facts = [facts_of(source) for source in others]
    return all(fact is not None and fact.shape == () for fact in facts)


def _output_slots(output: fx.Node) -> dict[fx.Node, int]:
    """The first position of each node among the graph's flattened outputs."""
    slots: dict[fx.Node, int] = {}
    count = 0
    stack: list[Any] = [output.args]
    while stack:
        value = stack.pop()
        if isinstance(value, list | tuple):
            stack.extend(reversed(value))
            continue
        if isinstance(value, Mapping):
            stack.extend(reversed(list(value.values())))
            continue
        if isinstance(value, fx.Node):
            slots.setdefault(value, count)
        count += 1
    return slots


def _drop_activation_groups(
    collectives: Sequence[Collective], kinds: dict[fx.Node, tuple[str, bool, fx.Node | None, int | None]]
) -> None:
    """Forget reductions recognised by shape on groups that carry activations: tensor parallelism reduces norm
    gradients too.
    """
    carries_activations = {group_key(c.group) for c in collectives if c.node not in kinds}
    gathers_parameters = {
        group_key(c.group) for c in collectives if c.node in kinds and kinds[c.node][0] in ALL_GATHER_KINDS
    }
    for collective in collectives:
        kind, annotated, _, _ = kinds.get(collective.node, ("", True, None, None))
        if annotated or kind in ALL_GATHER_KINDS:
            continue
        key = group_key(collective.group)
        if key in carries_activations and not (kind == "fsdp_reduce_scatter" and key in gathers_parameters):
            del kinds[collective.node]


@dataclass(frozen=True, slots=True)
class _Facts:
    input: TensorFacts
    output: TensorFacts


def _group_size(collective: Collective) -> int | None:
    if collective.group_size is not None:
        return collective.group_size
    degree = collective.node.meta.get("fsdp_degree")
    return degree if type(degree) is int else None


def _why_unsafe(
    collective: Collective,
    kind: str,
    storage: StorageMap,
    expected_size: int | None,
    compute_ops: Collection[str],
) -> _Facts | tuple[str, str]:
    node = collective.node
    if collective.op != _OP_OF_KIND[kind]:
        return "kind-mismatch", f"it is annotated as {kind!r}, but it is an operation {collective.op!r}"
    if "fsdp_bucket_id" in node.meta:
        return "already-bucketed", f"belongs to bucket {node.meta['fsdp_bucket_id']!r}"
    if not collective.waits:
        return "no-wait", "its result is never waited for"
    if len(collective.waits) > 1:
        return "several-waits", f"{len(collective.waits)} waits on one launch"
    wait = collective.waits[0]
    if len(node.users) > 1:
        return "read-before-wait", "its result is read without a wait"
    if not wait.users:
        return "dead-wait", "nothing reads the result"
    if any(is_wait(user) for user in wait.users):
        return "wait-of-wait", "its wait is waited for again"
    barrier = storage.first_barrier_from(storage.position[node])
    if barrier is not None and barrier < storage.position[wait]:
        return "barrier-inside", "something that nothing may be moved across stands between its launch and its wait"
    size = _group_size(collective)
    if collective.op != "all_reduce" and (size is None or size != expected_size):
        return "group-size-mismatch", f"group size {size}, the group has {expected_size} elsewhere in the graph"
    facts = facts_of(collective.input) if collective.input is not None else None
    result = facts_of(wait)
    if facts is None or result is None:
        return "unknown-shape", "neither fake values nor metadata tell its shape"
    if facts.is_symbolic or result.is_symbolic:
        return "symbolic-size", f"shape {facts.shape_text} is symbolic; requests hold integers"
    if facts.dtype_name not in DTYPE_BYTES or facts.dtype_name != result.dtype_name:
        return "unsupported-dtype", f"dtype {facts.dtype_name} in, {result.dtype_name} out"
    if not facts.is_strided:
        return "unsupported-layout", "the input is not a strided tensor"
    if kind not in ALL_GATHER_KINDS:
        if collective.reduce_op not in REDUCE_OPS:
            return "unsupported-reduce-op", f"reduce op {collective.reduce_op!r}"
        conflict = _storage_conflict(wait, result.dtype, storage, compute_ops)
        if conflict is not None:
            return conflict
    return _fits(kind, facts, result, size or 1) or _Facts(facts, result)


def _fits(kind: str, facts: TensorFacts, result: TensorFacts, size: int) -> tuple[str, str] | None:
    if kind in ALL_GATHER_KINDS:
        fits = facts.numel * size == result.numel
    elif kind == "fsdp_reduce_scatter":
        if facts.shape and facts.shape[0] % size:
            return "shape-not-divisible", f"dimension 0 of {facts.shape_text} is not divisible by {size} ranks"
        fits = facts.numel == result.numel * size
    else:
        fits = facts.numel == result.numel
    if not fits:
        return "shape-mismatch", f"{facts.shape_text} in, {result.shape_text} out on {size} ranks"
    return None


def _storage_conflict(
    wait: fx.Node, dtype: torch.dtype, storage: StorageMap, compute_ops: Collection[str]
) -> tuple[str, str] | None:
    """Why the result cannot be a part of a bucket's storage, as members of reductions are."""
    root = storage.root(wait)
    seen = {wait}
    stack = [wait]
    while stack:
        for user in stack.pop().users:
            if user in seen or user.op == "output":
                continue
            seen.add(user)
            if _changes_storage(user, root, storage, compute_ops):
                return "storage-changed", f"{user.name!r} resizes, frees or replaces the result's storage"
            if _reads_wider(user, dtype):
                return "wider-view", f"{user.name!r} views the result in wider elements, unaligned inside a bucket"
            if _reads_at_offset(user):
                return "absolute-view", f"{user.name!r} reads the result's storage at an offset from its beginning"
            if user in storage.position and storage.root(user) is root:
                stack.append(user)
    return None


def _reads_wider(user: fx.Node, dtype: torch.dtype) -> bool:
    """Whether `user` is a view in elements wider than `dtype`, whose offset must be a multiple of their width."""
    packet = packet_of(user)
    if packet is aten.view_as_complex:
        return True
    wanted = [value for value in (*user.args, *user.kwargs.values()) if isinstance(value, torch.dtype)]
    return packet in _ELEMENT_VIEWS and any(found.itemsize > dtype.itemsize for found in wanted)


def _reads_at_offset(user: fx.Node) -> bool:
    """Whether `user` counts elements from the beginning of storage, where inside a bucket its first member lies."""
    packet = packet_of(user)
    if packet not in ABSOLUTE_VIEW_OPS:
        return False
    overloads = (
        [user.target] if isinstance(user.target, OpOverload) else [getattr(packet, o) for o in packet.overloads()]
    )
    offsets = [
        (position, name.name)
        for overload in overloads
        for position, name in enumerate(overload._schema.arguments)
        if name.name == "storage_offset"
    ]
    if not offsets:
        return packet in (aten.storage_offset, aten.sym_storage_offset)
    return any(argument(user, key) is not None for key in offsets)


def _changes_storage(user: fx.Node, root: fx.Node, storage: StorageMap, compute_ops: Collection[str]) -> bool:
    info = target_info(user, compute_ops)
    if not info.writes and not info.writes_everything:
        return False
    is_free = user.meta.get("comm_type") in FREE_COMM_TYPES
    name = str(user.target).rsplit("::", 1)[-1].rsplit("aten.", 1)[-1]
    if not (is_free or info.writes_everything or any(name.startswith(word) for word in _STORAGE_CHANGING)):
        return "resize" in name or "free" in name
    written = (
        user.all_input_nodes
        if info.writes_everything
        else [source for key in info.writes for source in argument_nodes(user, key)]
    )
    return any(storage.root(source) is root for source in written)
