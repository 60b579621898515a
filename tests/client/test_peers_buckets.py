"""What users of other bucketing passes ran into, part 3: who shares a bucket, and what is in it.

Reproduced against torch's own passes:

| case | test |
|---|---|
| odd bf16 sizes before fp32 in one byte bucket | test_odd_sizes_of_narrow_types_share_a_bucket_with_wide_ones |
| mode not passed to the planner | test_mixed_dtypes_change_the_plan_and_not_only_the_rewrite |

Reported by users (repository#number):

| report | test |
|---|---|
| DeepSpeed#8038 | test_gradients_are_bucketed_by_their_own_dtype |
| pytorch#175812 | test_reductions_of_two_kinds_never_share_a_bucket |
| autoparallel#481, #412 | test_interleaved_groups_and_dtypes_fill_their_buckets |
| pytorch#177688, #184710 | test_erased_casts_leave_a_valid_graph |
| torchtitan#3590, #3617 | test_payload_is_in_registration_order |
| pytorch#167853, #162470 | test_one_cast_serves_the_bucket |
| pytorch#188472, torchtitan#3821 | test_replicated_gradients_are_bucketed |
| torchtitan#4443 | test_gathered_members_are_contiguous_in_storage_of_their_own |
| torchtitan#3354 | test_only_plain_operators_are_created |
| openxla/xla#21966 | test_forward_and_backward_gathers_never_share_a_bucket |

Not here: pytorch#166324 and #190343 (overlap and transient peaks are the simulator's matter: a plan is judged there,
not in a rewrite), pytorch#183551 and its kin (growth is measured by the benchmarks), pytorch#118497 (nothing here
swallows an error to skip an estimate), pytorch#186084 and #196621 (generated kernels, which need a GPU), and reports
about protocols between ranks, which belong to agreement.
"""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from tests.support.fxgraphs import GraphBuilder, aten, c10d, prims
from tests.support.peer_cases import (
    GRID,
    RANKS,
    WORLD,
    copy_of,
    gathered,
    many_groups,
    module_of,
    parameters,
    plain,
    read,
)
from tests.support.rewriting import assert_same_results, created_nodes, launches, rewrite


def mixed_gathers() -> tuple[GraphBuilder, fx.GraphModule]:
    build = GraphBuilder()
    odd = build.tensor("odd", (1, 3), torch.bfloat16)
    wide = build.tensor("wide", (2, 3), torch.float32)
    single = build.tensor("single", (5,), torch.int8)
    double = build.tensor("double", (1, 1), torch.float64)
    waits = [gathered(build, param) for param in (odd, wide, single, double)]
    return build, build.module(*read(build, *waits))


def test_odd_sizes_of_narrow_types_share_a_bucket_with_wide_ones() -> None:
    build, gm = mixed_gathers()
    original = copy_of(gm)
    done = rewrite(gm, mixed_dtype=True)
    assert done.sizes == [4]
    (bucket,) = done.plan.decision.buckets
    assert [done.description.request.candidates[member].dtype for member in bucket.members] == [
        "float64",
        "float32",
        "bfloat16",
        "int8",
    ]
    assert_same_results(original, gm, build.draw_inputs(RANKS, 4), WORLD)


def test_mixed_dtypes_change_the_plan_and_not_only_the_rewrite() -> None:
    assert rewrite(mixed_gathers()[1], mixed_dtype=False).sizes == [1, 1, 1, 1]
    assert rewrite(mixed_gathers()[1], mixed_dtype=True).sizes == [4]


def test_gradients_are_bucketed_by_their_own_dtype() -> None:
    build = GraphBuilder()
    params = parameters(build, 4)
    waits = [gathered(build, param) for param in params]
    outputs = []
    for index, wait in enumerate(waits):
        gradient = build.call(aten.mul.Tensor, wait, 2)
        if index % 2:
            gradient = build.call(aten._to_copy.default, gradient, dtype=torch.bfloat16)
        outputs.append(build.wait(build.reduce_scatter(gradient, "sum", RANKS, "dp")))
    gm = build.module(*outputs)
    original = copy_of(gm)
    done = rewrite(gm)
    assert done.sizes == [4, 2, 2]
    for launch in launches(gm):
        dtypes = {value.meta["val"].dtype for value in launch.all_input_nodes}
        assert dtypes == {launch.meta["fsdp_bucket_spec"]["dtype"]}
    assert_same_results(original, gm, build.draw_inputs(RANKS, 6), WORLD)


def test_reductions_of_two_kinds_never_share_a_bucket() -> None:
    build = GraphBuilder()
    params = [build.tensor(f"w{index}", (2, 3)) for index in range(4)]
    waits = [gathered(build, param) for param in params]
    grads = read(build, *waits)
    outputs = [build.wait(build.reduce_scatter(grad, "sum", RANKS, "dp")) for grad in grads[:2]]
    outputs += [build.wait(build.all_reduce(grad, "sum", "dp")) for grad in grads[2:]]
    gm = build.module(*outputs)
    original = copy_of(gm)
    assert rewrite(gm).sizes == [4, 2, 2]
    assert_same_results(original, gm, build.draw_inputs(RANKS, 9), WORLD)


def test_interleaved_groups_and_dtypes_fill_their_buckets() -> None:
    assert rewrite(many_groups(16)[1]).sizes == [4] * 8


def test_erased_casts_leave_a_valid_graph() -> None:
    build = GraphBuilder()
    first, second, third = parameters(build, 3)
    casts = [build.call(aten._to_copy.default, param, dtype=torch.bfloat16) for param in (first, second)]
    inner = [gathered(build, cast, "row", 2) for cast in casts]
    shared = build.call(aten._to_copy.default, third, dtype=torch.bfloat16)
    launches_outer = [build.all_gather(build.call(aten.view.default, wait, [-1]), 2, "column") for wait in inner]
    for launch, param in zip(launches_outer, ("first", "second"), strict=True):
        launch.meta |= {"comm_type": "fsdp_all_gather", "comm_group": "column", "fsdp_degree": 2, "param_name": param}
    waits = [build.wait(launch) for launch in launches_outer]
    gm = build.module(*read(build, *waits, gathered(build, shared), shared))
    original = copy_of(gm)
    done = rewrite(gm)
    assert done.sizes == [2, 2, 1]
    assert not any(cast in gm.graph.nodes for cast in casts)
    assert shared in gm.graph.nodes
    assert_same_results(original, gm, build.draw_inputs(RANKS, 12), GRID)


def test_payload_is_in_registration_order() -> None:
    build = GraphBuilder()
    params = parameters(build, 4)
    for param in params:
        param.meta["param_name"] = param.name
    order = [2, 0, 3, 1]
    waits = [gathered(build, params[index]) for index in order]
    grads = read(build, *waits)
    reduced = {
        index: build.wait(build.reduce_scatter(grad, "sum", RANKS, "dp"))
        for index, grad in zip(order, grads, strict=True)
    }
    gm = build.module(*[reduced[index] for index in range(4)])
    done = rewrite(gm)
    gather, scatter = launches(gm)
    assert gather.meta["fsdp_bucket_members"] == ["w0", "w1", "w2", "w3"]
    candidates = done.description.request.candidates
    (bucket,) = [bucket for bucket in done.plan.decision.buckets if bucket.rewrite == "scatter"]
    assert [candidates[member].ordinal for member in bucket.members] == [0, 1, 2, 3]
    assert scatter.meta["comm_type"] == "fsdp_reduce_scatter"


@pytest.mark.parametrize("cast", [aten._to_copy.default, prims.convert_element_type.default])
def test_one_cast_serves_the_bucket(cast: torch._ops.OpOverload) -> None:
    build = GraphBuilder()
    params = parameters(build, 4)
    keywords = {"dtype": torch.bfloat16} if cast is aten._to_copy.default else {}
    args = () if keywords else (torch.bfloat16,)
    waits = [gathered(build, build.call(cast, param, *args, **keywords)) for param in params]
    gm = build.module(*read(build, *waits))
    original = copy_of(gm)
    assert rewrite(gm).sizes == [4]
    assert sum(node.target is cast for node in gm.graph.nodes) == 1
    assert_same_results(original, gm, build.draw_inputs(RANKS, 15), WORLD)


@pytest.mark.parametrize("order", ["before", "after"])
def test_replicated_gradients_are_bucketed(order: str) -> None:
    build = GraphBuilder()
    params = parameters(build, 3)
    outputs = []
    for grad in read(build, *[gathered(build, param, "row", 2) for param in params]):
        if order == "before":
            summed = build.wait(build.all_reduce(grad, "sum", "column"))
            outputs.append(build.wait(build.reduce_scatter(summed, "sum", 2, "row")))
        else:
            shard = build.wait(build.reduce_scatter(grad, "sum", 2, "row"))
            outputs.append(build.wait(build.all_reduce(shard, "sum", "column")))
    # The size of a group that only reduces is not in the graph: an annotation or a live group tells it.
    for launch in build.graph.nodes:
        if launch.target is c10d.all_reduce.default:
            launch.meta["fsdp_degree"] = 2
    gm = build.module(*outputs)
    original = copy_of(gm)
    done = rewrite(gm)
    assert done.sizes == [3, 3, 3]
    assert done.applied.statistics["dp_ar_bucketing"]["ar_collectives_after"] == 1
    assert_same_results(original, gm, build.draw_inputs(RANKS, 17), GRID)


def test_gathered_members_are_contiguous_in_storage_of_their_own() -> None:
    build = plain(4)
    gm = module_of(build)
    rewrite(gm)
    members = [node for node in gm.graph.nodes if "param_name" in node.meta and node.target is aten.view.default]
    values = [node.meta["val"] for node in members]
    assert len(values) == 4
    assert all(value.is_contiguous() and value.storage_offset() == 0 for value in values)
    assert len({value.untyped_storage()._cdata for value in values}) == 4


def test_only_plain_operators_are_created() -> None:
    _, gm = many_groups()
    before = list(gm.graph.nodes)
    rewrite(gm, mixed_dtype=True)
    created = created_nodes(gm, before)
    assert created
    for node in created:
        assert node.op == "call_function"
        is_plain = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in (
            "aten",
            "_c10d_functional",
        )
        assert is_plain or node.target is operator.getitem, node.target


def test_forward_and_backward_gathers_never_share_a_bucket() -> None:
    build = GraphBuilder()
    params = parameters(build, 2)
    forward = read(build, *[gathered(build, param) for param in params])
    again = [gathered(build, param) for param in params]
    backward = read(build, *again)
    for node in (*again, *[wait.all_input_nodes[0] for wait in again], *backward):
        node.meta["autograd_backward"] = True
    gm = build.module(*forward, *backward)
    original = copy_of(gm)
    done = rewrite(gm, placement="scheduled")
    assert done.sizes == [2, 2]
    kinds = [launch.meta["comm_type"] for launch in launches(gm)]
    assert kinds == ["fsdp_all_gather", "fsdp_all_gather_backward"]
    assert forward[-1] < launches(gm)[1], "gathered for the backward while the forward still ran"
    assert_same_results(original, gm, build.draw_inputs(RANKS, 19), WORLD)
