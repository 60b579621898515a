"""The node metadata that a rewrite promises (DESIGN, section 9), checked node by node."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import fx

from bucketplan_core.plan import Plan
from bucketplan_core.request import Request
from tests.support.collective_graphs import aten, c10d

__all__ = ["violations"]

EVERY_CREATED = ("autograd_backward", "fsdp_bucket_id", "fsdp_bucket_module_fqns", "val")
LAUNCH_TARGETS = {
    c10d.all_gather_into_tensor.default: "gather",
    c10d.reduce_scatter_tensor.default: "scatter",
    c10d.all_reduce.default: "reduce",
}


def violations(
    before: Mapping[str, Mapping[str, Any]], module: fx.GraphModule, request: Request, plan: Plan
) -> list[str]:
    """What of the table does not hold in `module`, whose nodes had the metadata `before` the rewrite."""
    wrong: list[str] = []

    def expect(holds: bool, node: fx.Node, what: str) -> None:
        if not holds:
            wrong.append(f"{node.name} ({node.target}): {what}; has {sorted(node.meta)}")

    created: dict[str, list[fx.Node]] = {}
    for node in module.graph.nodes:
        if node.name not in before:
            expect(all(key in node.meta for key in EVERY_CREATED), node, f"lacks one of {EVERY_CREATED}")
            created.setdefault(node.meta.get("fsdp_bucket_id", "?"), []).append(node)
    fused = {bucket.id: bucket for bucket in plan.decision.buckets if len(bucket.members) > 1}
    if set(created) != set(fused):
        wrong.append(f"nodes of buckets {sorted(created)}, the plan fuses {sorted(fused)}")
    for bucket_id, nodes in created.items():
        if bucket_id in fused:
            wrong += _of_bucket(fused[bucket_id].members, fused[bucket_id].rewrite, bucket_id, nodes, request)
    names = {node.name for node in module.graph.nodes}
    renamed = 0
    for node in module.graph.nodes:
        reference = node.meta.get("fsdp_ag_node")
        if reference is not None:
            expect(reference in names, node, f"fsdp_ag_node names {reference!r}, which is gone")
            renamed += reference != before[node.name]["fsdp_ag_node"]
    if any(bucket.rewrite == "gather" for bucket in fused.values()) and not renamed:
        wrong.append("no fsdp_ag_node was renamed although gathers were fused")
    return wrong + _statistics(module, request, plan)


def _of_bucket(
    members: tuple[int, ...], rewrite: str, bucket_id: str, nodes: list[fx.Node], request: Request
) -> list[str]:
    wrong: list[str] = []
    candidates = [request.candidates[member] for member in members]
    launch = [node for node in nodes if node.target in LAUNCH_TARGETS]
    wait = [node for node in nodes if node.target is c10d.wait_tensor.default]
    if len(launch) != 1 or len(wait) != 1 or LAUNCH_TARGETS[launch[0].target] != rewrite:
        return [f"bucket {bucket_id}: launches {launch}, waits {wait}, rewrite {rewrite}"]
    first = candidates[0]
    expected = {
        "comm_type": first.kind,
        "comm_group": first.group,
        "fsdp_degree": first.group_size,
        "fsdp_bucket_members": [candidate.param_name for candidate in candidates],
        "autograd_backward": first.backward,
        "fsdp_bucket_spec": {
            "input_shape": (sum(candidate.input_numel for candidate in candidates),),
            "output_shape": (sum(candidate.output_numel for candidate in candidates),),
            "dtype": getattr(torch, first.dtype),
            "device": torch.device("cpu"),
        },
    }
    if rewrite == "gather":
        total = sum(candidate.output_bytes for candidate in candidates)
        expected |= {"fsdp_unsharded_nbytes": total, "fsdp_bucket_workspace_nbytes": total}
    for key, value in expected.items():
        if launch[0].meta.get(key) != value:
            wrong.append(f"bucket {bucket_id}: launch has {key}={launch[0].meta.get(key)!r}, not {value!r}")
    if rewrite != "gather" and any(key in launch[0].meta for key in ("fsdp_unsharded_nbytes",)):
        wrong.append(f"bucket {bucket_id}: a reduction has the gathers' byte counts")
    if wait[0].meta.get("wait_for") != launch[0].name:
        wrong.append(f"bucket {bucket_id}: wait_for is {wait[0].meta.get('wait_for')!r}")
    at = nodes.index(launch[0])
    for node in nodes[:at]:
        if node.meta.get("fsdp_bucket_prepare") != bucket_id:
            wrong.append(f"{node.name}: packing without fsdp_bucket_prepare")
    for node in nodes[at:]:
        if "fsdp_bucket_prepare" in node.meta:
            wrong.append(f"{node.name}: fsdp_bucket_prepare behind the launch")
    copies = [node for node in nodes if node.meta.get("fsdp_bucket_copy_out") == bucket_id]
    if [node.target for node in copies] != [aten.clone.default] * (len(members) if rewrite == "gather" else 0):
        wrong.append(f"bucket {bucket_id}: fsdp_bucket_copy_out on {copies}")
    outputs = [node for node in nodes if "param_name" in node.meta and "state_idx" in node.meta]
    told = [(node.meta["param_name"], node.meta["state_idx"], tuple(node.meta["val"].shape)) for node in outputs]
    if told != [(c.param_name, c.state_idx, c.output_shape) for c in candidates]:
        wrong.append(f"bucket {bucket_id}: outputs say {told}")
    for node in nodes:
        fqns = node.meta.get("fsdp_bucket_module_fqns")
        if fqns != tuple(dict.fromkeys(fqn for c in candidates for fqn in c.module_fqns)):
            wrong.append(f"{node.name}: fsdp_bucket_module_fqns {fqns}")
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and (value.device.type != "cpu" or prod(value.shape) < 1):
            wrong.append(f"{node.name}: fake value {value}")
    return wrong


def _statistics(module: fx.GraphModule, request: Request, plan: Plan) -> list[str]:
    wrong: list[str] = []
    for key, kinds, prefix, bytes_name in (
        ("fsdp_ag_bucketing", ("fsdp_all_gather", "fsdp_all_gather_backward"), "ag", "copy_out_bytes"),
        ("fsdp_rs_bucketing", ("fsdp_reduce_scatter",), "rs", "packed_input_bytes"),
    ):
        of_kind = [b for b in plan.decision.buckets if request.lanes[b.lane].kind in kinds]
        fused = [bucket for bucket in of_kind if len(bucket.members) > 1]
        members = [request.candidates[member] for bucket in fused for member in bucket.members]
        launched = [node for node in module.graph.nodes if node.meta.get("comm_type") in kinds]
        expected = {
            "buckets": len(fused),
            "original_collectives": len(members),
            bytes_name: sum(member.full_bytes for member in members),
            f"{prefix}_collectives_before": sum(candidate.kind in kinds for candidate in request.candidates),
            f"{prefix}_collectives_after": len(launched),
        }
        if dict(module.meta.get(key, {})) != expected:
            wrong.append(f"{key}: {module.meta.get(key)}, expected {expected}")
    return wrong
