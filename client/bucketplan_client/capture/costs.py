"""The cost profile of a graph: work by class and live activations for each segment, from fake values.

Matrix work counts 2*m*n*k operations (multiply and add); attention 4*b*h*s_q*s_kv*d forward, 2.5 times that backward
(five matrix products against two; the count that FlashAttention's authors use). Memory work counts bytes read and
written, a pointwise value that one pointwise node reads counting as fused. Figures may differ between ranks and
never enter the signature.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from bucketplan_client.capture.binding import CandidateNodes
from bucketplan_client.capture.ops import VIEW_OPS, packet_of
from bucketplan_client.capture.parse import Collective
from bucketplan_client.capture.storage import StorageMap
from bucketplan_client.capture.timeline import Timeline
from bucketplan_core.profile import CostProfile, WorkClass

__all__ = ["cost_profile"]

aten = torch.ops.aten
_MATMULS = frozenset(
    {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._grouped_mm, aten._scaled_mm, aten._scaled_grouped_mm}
)
_ATTENTION_BACKWARD_RATIO = (5, 2)


def cost_profile(
    timeline: Timeline,
    storage: StorageMap,
    candidates: Sequence[CandidateNodes],
    fixed: Sequence[Collective],
) -> CostProfile:
    """Work and live bytes of each segment of `timeline`; nodes without fake values count as free."""
    num_segments = timeline.num_segments
    flops: dict[str, list[int]] = {}
    moved: dict[str, list[int]] = {}
    compute = timeline.segments_of_compute()
    for segment, node in compute:
        work = _work(node)
        if work is None:
            continue
        name, operations, bytes_moved = work
        if name not in flops:
            flops[name] = [0] * num_segments
            moved[name] = [0] * num_segments
        flops[name][segment] += operations
        moved[name][segment] += bytes_moved
    return CostProfile(
        work=tuple(
            WorkClass(name=name, flops=tuple(flops[name]), bytes_moved=tuple(moved[name])) for name in sorted(flops)
        ),
        live_bytes=_live_bytes(compute, storage, candidates, num_segments),
        fixed_bytes=tuple(_fixed_bytes(collective) for collective in fixed),
    )


def _bytes(value: Any) -> int:
    """Bytes of all tensors in a fake value; symbolic sizes count by their hint, unknown ones as nothing."""
    if isinstance(value, torch.Tensor):
        return _numel(value) * value.element_size()
    if isinstance(value, list | tuple):
        return sum(_bytes(item) for item in value)
    return 0


def _numel(value: torch.Tensor) -> int:
    return prod(_hint(size) for size in value.shape)


def _hint(size: Any) -> int:
    if type(size) is int:
        return size
    node = getattr(size, "node", None)
    hint = getattr(node, "_hint", None)
    return hint if type(hint) is int else 0


def _work(node: fx.Node) -> tuple[str, int, int] | None:
    packet = packet_of(node)
    if packet in VIEW_OPS or node.op != "call_function":
        return None
    value = node.meta.get("val")
    if value is None:
        return None
    if packet in _MATMULS:
        return _matmul(node, packet, value)
    name = getattr(packet, "__name__", "")
    if "attention" in name and "scaled_dot_product" in name:
        return _attention(node, name, value)
    return ("memory", 0, _memory_traffic(node, value))


def _matmul(node: fx.Node, packet: Any, value: Any) -> tuple[str, int, int] | None:
    first = 1 if packet in (aten.addmm, aten.baddbmm) else 0
    operand = node.args[first] if len(node.args) > first else None
    left = operand.meta.get("val") if isinstance(operand, fx.Node) else None
    if not isinstance(left, torch.Tensor) or not isinstance(value, torch.Tensor):
        return None
    depth = _hint(left.shape[-1])
    operations = 2 * _numel(value) * depth
    traffic = _bytes(value) + sum(_bytes(source.meta.get("val")) for source in node.all_input_nodes)
    return (f"matmul:{str(left.dtype).removeprefix('torch.')}", operations, traffic)


def _attention(node: fx.Node, name: str, value: Any) -> tuple[str, int, int] | None:
    tensors = [arg.meta.get("val") for arg in node.args if isinstance(arg, fx.Node)]
    shaped = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.dim() == 4]
    backward = "backward" in name
    at = 1 if backward else 0
    if len(shaped) < at + 2:
        return None
    query, key = shaped[at], shaped[at + 1]
    batch, heads, length, width = (_hint(size) for size in query.shape)
    operations = 4 * batch * heads * length * _hint(key.shape[-2]) * width
    if backward:
        operations = operations * _ATTENTION_BACKWARD_RATIO[0] // _ATTENTION_BACKWARD_RATIO[1]
    traffic = _bytes(value) + sum(_bytes(tensor) for tensor in tensors)
    return (f"attention:{str(query.dtype).removeprefix('torch.')}", operations, traffic)


def _is_pointwise(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and (
        torch.Tag.pointwise in target.tags
        or target.overloadpacket in (aten._to_copy, torch.ops.prims.convert_element_type)
    )


def _memory_traffic(node: fx.Node, value: Any) -> int:
    pointwise = _is_pointwise(node)
    traffic = 0
    if not (pointwise and len(node.users) == 1 and _is_pointwise(next(iter(node.users)))):
        traffic += _bytes(value)
    for source in node.all_input_nodes:
        if not (pointwise and _is_pointwise(source) and len(source.users) == 1):
            traffic += _bytes(source.meta.get("val"))
    return traffic


def _live_bytes(
    compute: Sequence[tuple[int, fx.Node]],
    storage: StorageMap,
    candidates: Sequence[CandidateNodes],
    num_segments: int,
) -> tuple[int, ...]:
    """Bytes of values that compute nodes made and that are read in or after each segment."""
    excluded = {storage.root(node) for candidate in candidates for node in (candidate.launch, candidate.input)}
    born: dict[fx.Node, tuple[int, int]] = {}
    last: dict[fx.Node, int] = {}
    for segment, node in compute:
        root = storage.root(node)
        if root is node and root not in excluded:
            born[node] = (segment, _bytes(node.meta.get("val")))
            last[node] = segment
        for source in node.all_input_nodes:
            source_root = storage.root(source)
            if source_root in born:
                last[source_root] = segment
        if any(user.op == "output" for user in node.users) and root in born:
            last[root] = num_segments - 1
    change = [0] * (num_segments + 1)
    for node, (segment, size) in born.items():
        change[segment] += size
        change[last[node] + 1] -= size
    live, total = [], 0
    for delta in change[:-1]:
        total += delta
        live.append(total)
    return tuple(live)


def _fixed_bytes(collective: Collective) -> int:
    values = [collective.node.meta.get("val")]
    values += [source.meta.get("val") for source in collective.node.all_input_nodes]
    return max((_bytes(value) for value in values), default=0)
