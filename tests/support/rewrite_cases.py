"""Cases for rewriting on real ranks, each a function that gloo ranks run; what they return is judged by tests."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from bucketplan_client.capture.describe import describe_graph
from bucketplan_client.rewrite.apply import apply_ag_buckets, apply_plan, apply_rs_buckets
from bucketplan_client.rewrite.emit import BucketEmitter
from bucketplan_client.rewrite.errors import StalePlan
from bucketplan_core.collectives import Options
from bucketplan_core.errors import IllegalPlan
from bucketplan_core.plan import Bucket, Decision, Plan, Step, StepOp
from bucketplan_core.planning import make_plan
from bucketplan_core.request import Request
from tests.support.collective_graphs import GraphBuilder, aten, c10d, free_storage
from tests.support.demo_ranks import batch_of, sharded_job
from tests.support.fsdp_model import SMALL, ShardedGraph
from tests.support.metadata_table import violations
from tests.support.rewrite_ranks import SIZE, Comparison, agreed_plan, compare, groups_of, rewrite, roles_of

MODULE_KEYS = ("fsdp_ag_bucketing", "fsdp_rs_bucketing", "dp_ar_bucketing")


def one_bucket(kind: str, num_members: int, with_values: bool) -> dict[str, Any]:
    """`num_members` of very uneven sizes in one bucket, every other one a single element a rank, payload reversed."""
    build = GraphBuilder(groups_of(), with_values=with_values)
    ranks = build.groups["fsdp"].size
    shapes = [(ranks, *((1 + 1500 // index, 3) if index % 2 else ())) for index in range(num_members)]
    params = [build.parameter(f"p{index}", shape) for index, shape in enumerate(shapes)]
    if kind == "gather":
        waits = [build.gather(param) for param in params]
    else:
        # Gradients are inputs of their own, ready at the start, and every rank has other values.
        gradients = [build.tensor(f"g{index}", shape) for index, shape in enumerate(shapes)]
        ready = [build.call(aten.mul.Tensor, gradient, 3.0) for gradient in gradients]
        build.backward()
        waits = [
            build.reduce_scatter(gradient, param)
            if kind == "scatter"
            else build.all_reduce(gradient, param, role="fsdp", op="sum")
            for gradient, param in zip(ready, params, strict=True)
        ]
    build.output(*(build.call(aten.mul.Tensor, wait, 2.0) if kind == "gather" else wait for wait in waits))
    module = build.module()
    rewritten, plan, request = rewrite(build, module, lambda request: payload_reversed(make_plan(request)))
    inputs = build.inputs(rank=dist.get_rank(), seed=num_members, positive=True)
    return {
        "comparison": compare(module, rewritten, inputs),
        "buckets": [len(bucket.members) for bucket in plan.decision.buckets],
        "num_launches": len(launches(rewritten)),
        "payload": plan.decision.buckets[0].members,
        "candidates": len(request.candidates),
    }


def payload_reversed(plan: Plan) -> Plan:
    """The same plan with every payload back to front."""
    buckets = tuple(replace(bucket, members=bucket.members[::-1]) for bucket in plan.decision.buckets)
    decision = replace(plan.decision, buckets=buckets)
    return Plan(decision=Decision.from_wire(decision.to_wire()))


def launches(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if "comm_type" in node.meta and node.target is not free_storage]


def views_before_the_new_wait() -> dict[str, Any]:
    """The second gather's input is computed behind views of the first; the bucket waits there, so the views move."""
    build = GraphBuilder(groups_of())
    ranks = build.groups["fsdp"].size
    first = build.parameter("first", (ranks * 2, 3))
    second = build.parameter("second", (ranks, 5))
    x = build.tensor("x", (4,))
    wait = build.gather(first)
    transposed = build.call(aten.t.default, wait)
    sliced = build.call(aten.slice.Tensor, transposed, 0, 0, 2)
    expanded = build.call(aten.unsqueeze.default, sliced, 0)
    scaled = build.call(aten.mul.Tensor, second, build.call(aten.mean.default, x))
    other = build.gather(scaled, param=second)
    build.output(build.call(aten.mul.Tensor, expanded, 2.0), build.call(aten.mul.Tensor, other, 2.0))
    module = build.module()
    rewritten, plan, _ = rewrite(build, module, make_plan)
    names = [node.name for node in rewritten.graph.nodes]
    return {
        "comparison": compare(module, rewritten, build.inputs(rank=dist.get_rank(), seed=1)),
        "buckets": [len(bucket.members) for bucket in plan.decision.buckets],
        "names": names,
        "views": [transposed.name, sliced.name, expanded.name],
        "input": scaled.name,
        "waits": [node.name for node in rewritten.graph.nodes if node.target is c10d.wait_tensor.default],
    }


def consumers_that_compute() -> dict[str, Any]:
    """The second gather's input is computed from the first's result: fused, the bucket would wait for itself."""
    build = GraphBuilder(groups_of())
    ranks = build.groups["fsdp"].size
    first = build.parameter("first", (ranks * 2, 3))
    second = build.parameter("second", (ranks, 5))
    doubled = build.call(aten.mul.Tensor, build.gather(first), 2.0)
    scaled = build.call(aten.mul.Tensor, second, build.call(aten.mean.default, doubled))
    build.output(doubled, build.call(aten.mul.Tensor, build.gather(scaled, param=second), 2.0))
    module = build.module()
    description = describe_graph(module, options=SIZE, roles=roles_of(build.groups))
    planned = make_plan(description.request).decision
    before = fingerprint(module)
    refused = []
    for launch_gap in range(description.request.num_segments + 1):
        forged = replace(
            planned,
            buckets=(Bucket(id="forged", lane=0, members=(0, 1), rewrite="gather"),),
            steps=(Step(launch_gap, StepOp.LAUNCH, 0), Step(launch_gap, StepOp.WAIT, 0)),
        )
        try:
            apply_plan(description, Plan(decision=Decision.from_wire(forged.to_wire())))
        except IllegalPlan as error:
            refused.append(error.rule)
    return {
        "planned": [len(bucket.members) for bucket in planned.buckets],
        "gaps": description.request.num_segments + 1,
        "refused": refused,
        "untouched": fingerprint(module) == before,
    }


def one_member_changed(change: str) -> Comparison:
    """The first member's result is freed or overwritten once it was read; the others are read only afterwards."""
    build = GraphBuilder(groups_of())
    ranks = build.groups["fsdp"].size
    params = [build.parameter(f"p{index}", (ranks * (index + 1), 3)) for index in range(3)]
    waits = [build.gather(param) for param in params]
    build.output(build.call(aten.mul.Tensor, waits[0], 2.0))
    if change == "free":
        build.call(free_storage, waits[0]).meta["comm_type"] = "fsdp_reshard_free"
    elif change == "overwrite":
        build.call(aten.zero_.default, waits[0])
    else:
        build.call(aten.copy_.default, build.call(aten.t.default, build.call(aten.t.default, waits[0])), waits[0])
        build.call(aten.fill_.Scalar, waits[0], 7.0)
    build.output(*(build.call(aten.mul.Tensor, wait, 2.0) for wait in waits[1:]))
    module = build.module()
    rewritten, plan, _ = rewrite(build, module, make_plan)
    assert [len(bucket.members) for bucket in plan.decision.buckets] == [3]
    return compare(module, rewritten, build.inputs(rank=dist.get_rank(), seed=1))


@lru_cache
def demo_graph(layout: str) -> tuple[ShardedGraph, tuple[torch.Tensor, ...]]:
    """The demo's small model, traced and sharded, with one rank's inputs."""
    _, graph, trainer = sharded_job(SMALL, layout)
    inputs = (*trainer.shards, *trainer.buffers, *batch_of(SMALL, 0, dist.get_rank()))
    return graph, tuple(value.detach() for value in inputs)


def demo_under(strategy: str, layout: str, scheduled: bool, in_two_steps: bool) -> dict[str, Any]:
    """The demo's small model before and after its rewrite, on one batch; metadata and statistics with it."""
    graph, inputs = demo_graph(layout)
    rewritten = copy.deepcopy(graph.gm)
    before = {node.name: dict(node.meta) for node in rewritten.graph.nodes}
    options = Options(
        strategy=strategy,
        planner=f"{strategy}/1",
        bucket_cap_bytes=90_000,
        first_bucket_cap_bytes=60_000,
        placement="scheduled" if scheduled else "original",
    )
    description = describe_graph(rewritten, options=options, roles=graph.roles)
    plan = agreed_plan(description.request, make_plan)
    if in_two_steps:
        again = apply_ag_buckets(description, plan).describe_again()
        apply_rs_buckets(again, agreed_plan(again.request, make_plan))
    else:
        apply_plan(description, plan)
    rewritten.graph.lint()
    fused = [bucket for bucket in plan.decision.buckets if len(bucket.members) > 1]
    return {
        "comparison": compare(graph.gm, rewritten, inputs, with_reference=False),
        "fused_lanes": sorted({lane_name(description.request, bucket) for bucket in fused}),
        "violations": [] if in_two_steps else violations(before, rewritten, description.request, plan),
        "statistics": {key: rewritten.meta.get(key) for key in MODULE_KEYS},
        "num_launches": len(launches(rewritten)),
        "num_params": len(graph.param_names),
        "signature": description.signature,
    }


def lane_name(request: Request, bucket: Bucket) -> tuple[str, str]:
    lane = request.lanes[bucket.lane]
    return lane.kind, lane.group


def fingerprint(module: fx.GraphModule) -> list[Any]:
    """Everything that a rewrite may change: nodes, their order, calls and metadata, and the module's metadata."""
    return [
        *(
            (n.name, n.op, str(n.target), repr(n.args), repr(n.kwargs), sorted(n.meta), _plain(n.meta))
            for n in module.graph.nodes
        ),
        sorted(module.meta),
        module.code,
    ]


def _plain(meta: dict[str, Any]) -> str:
    return repr({key: value for key, value in sorted(meta.items()) if not isinstance(value, torch.Tensor)})


def refusals() -> dict[str, Any]:
    """Plans that do not belong to the graph as it stands, and a rewrite that fails half-way."""
    graph, inputs = demo_graph("two_groups")
    found: dict[str, Any] = {}

    def attempt(name: str, change: Any = None, plan: Any = None, fault: Any = None) -> None:
        module = copy.deepcopy(graph.gm)
        description = describe_graph(module, options=SIZE, roles=graph.roles)
        made = plan or make_plan(description.request)
        if change is not None:
            change(module)
            module.recompile()
        before = fingerprint(module)
        undo = fault() if fault is not None else lambda: None
        raised = "nothing"
        try:
            apply_plan(description, made)
        except (IllegalPlan, StalePlan, _Injected) as error:
            raised = f"{type(error).__name__}: {error}"
        finally:
            undo()
        module.graph.lint()
        module.recompile()
        same = compare(graph.gm, module, inputs, with_reference=False) if change is None else None
        found[name] = (raised, fingerprint(module) == before, all(same.equal) if same is not None else None)

    description = describe_graph(graph.gm, options=SIZE, roles=graph.roles)
    other = describe_graph(graph.gm, options=replace(SIZE, bucket_cap_bytes=1000), roles=graph.roles)
    attempt("another graph's plan", plan=make_plan(other.request))
    attempt("a node more", change=_insert_a_node)
    attempt("other arguments", change=_change_an_argument)
    attempt("other metadata", change=_change_metadata)
    attempt("a node less", change=_remove_a_node)
    for name in ("launch", "wait"):
        for at in (0, 1, 5):
            attempt(f"fault in {name} {at}", fault=lambda name=name, at=at: _fail_in(name, at))
    decision = make_plan(description.request).decision
    twice = replace(decision, buckets=(*decision.buckets[:-1], replace(decision.buckets[-1], members=(0,))))
    attempt("a member twice", plan=Plan(decision=Decision.from_wire(twice.to_wire())))
    return found


class _Injected(Exception):
    """The fault of a test."""


def _fail_in(name: str, at: int) -> Any:
    """Let the method of a bucket's emitter fail at its call number `at`; returns what undoes that."""
    original = getattr(BucketEmitter, name)
    calls = iter(range(1000))

    def failing(self: BucketEmitter) -> Any:
        made = original(self)
        if next(calls) == at:
            raise _Injected(f"{name} {at}")
        return made

    setattr(BucketEmitter, name, failing)
    return lambda: setattr(BucketEmitter, name, original)


def _first_launch(module: fx.GraphModule) -> fx.Node:
    return launches(module)[0]


def _insert_a_node(module: fx.GraphModule) -> None:
    launch = _first_launch(module)
    with module.graph.inserting_before(launch):
        source = module.graph.call_function(aten.neg.default, (launch.args[0],))
    launch.replace_input_with(launch.args[0], source)  # type: ignore[arg-type]  # a launch's first input is a node


def _change_an_argument(module: fx.GraphModule) -> None:
    scatter = next(node for node in launches(module) if node.meta["comm_type"] == "fsdp_reduce_scatter")
    scatter.args = (scatter.args[0], "sum", *scatter.args[2:])


def _change_metadata(module: fx.GraphModule) -> None:
    _first_launch(module).meta["param_name"] = "renamed"


def _remove_a_node(module: fx.GraphModule) -> None:
    node = next(node for node in module.graph.nodes if node.target is aten.silu.default)
    node.replace_all_uses_with(node.args[0])
    module.graph.erase_node(node)
