"""What users of other bucketing passes ran into: here each comes out right, or is left alone with the reason.

Reproduced against torch's own passes:

| case | test |
|---|---|
| two waits on one gather | test_two_waits_on_one_gather_leave_it_alone |
| collectives with keyword arguments | test_keyword_collectives_are_bucketed |
| copy_ into a parameter between its gathers | test_a_gather_of_the_old_value_stays_before_the_write |
| casts that also change the device | test_a_cast_that_changes_the_device_is_no_preparation |
| odd bf16 sizes before fp32 in one byte bucket | test_odd_sizes_of_narrow_types_share_a_bucket_with_wide_ones |
| mode not passed to the planner | test_mixed_dtypes_change_the_plan_and_not_only_the_rewrite |
| one group name with two sizes | test_one_group_with_two_sizes_is_left_alone |
| dimension 0 not divisible by the ranks | test_a_reduction_that_does_not_divide_is_left_alone |
| no memory bound given | test_no_memory_bound_is_an_answer |
| second run on a bucketed graph | test_a_second_run_changes_nothing |

Reported by users (repository#number):

| report | test |
|---|---|
| pytorch#177960 | test_ranks_with_different_graphs_issue_the_same_collectives |
| DeepSpeed#8033 | test_prefetching_gathers_no_more_than_it_says |
| DeepSpeed#8038 | test_gradients_are_bucketed_by_their_own_dtype |
| Megatron-LM#2218 | test_plans_do_not_depend_on_hash_order |
| pytorch#188332, #192042 | test_nothing_of_the_rank_is_in_the_graph |
| pytorch#181529 | test_a_group_may_be_a_node |
| autoparallel#364 | test_groups_that_cannot_be_looked_up_need_no_look_up |
| pytorch#158632 | test_several_groups_are_split_by_their_own_ranks |
| pytorch#175812 | test_reductions_of_two_kinds_never_share_a_bucket |
| pytorch#159983 | test_collectives_run_in_the_order_of_the_plan |
| autoparallel#481, #412 | test_interleaved_groups_and_dtypes_fill_their_buckets |
| pytorch#179935 | test_a_chain_of_uses_does_not_keep_gathers_apart |
| pytorch#177688, #184710 | test_erased_casts_leave_a_valid_graph |
| torchtitan#4047, #4048 | test_tensor_and_expert_parallel_graphs_stay_in_order |
| pytorch#187341 | test_a_reduction_waits_for_its_last_gradient |
| pytorch#180579 | test_describing_leaves_no_trace |
| pytorch#172905 | test_a_reduction_that_compute_reads_is_left_alone |
| torchtitan#3590, #3617 | test_payload_is_in_registration_order |
| pytorch#183676, #183544, #183679, #183495 | test_symbolic_sizes_are_left_alone_and_stay_symbolic |
| pytorch#167853, #162470 | test_one_cast_serves_the_bucket |
| pytorch#173540 | test_nothing_moves_across_a_copy_between_devices |
| pytorch#189454, torchcomms#3095 | test_nothing_moves_across_unknown_communication |
| pytorch#178875 | test_random_numbers_are_drawn_in_the_same_order |
| pytorch#192618 | test_no_memory_bound_is_an_answer |
| pytorch#188472, torchtitan#3821 | test_replicated_gradients_are_bucketed |
| torchtitan#4536 | test_an_annotation_stands_in_for_a_known_chain |
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
import os
import re
import subprocess
import sys

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from bucketplan_client.capture.describe import describe_graph
from bucketplan_client.capture.parse import parse_collective
from bucketplan_core.plan import StepOp
from bucketplan_core.planning import make_plan
from tests.support.fxgraphs import GraphBuilder, aten, c10d, prims, unknown_op
from tests.support.rewriting import assert_same_results, created_nodes, launches, rewrite, rules, size_options

RANKS = 4
WORLD = {"dp": [list(range(RANKS))]}
GRID = {"row": [[0, 1], [2, 3]], "column": [[0, 2], [1, 3]], "dp": [[0, 1, 2, 3]]}


def parameters(build: GraphBuilder, count: int, dtype: torch.dtype = torch.float32) -> list[fx.Node]:
    return [build.tensor(f"w{index}", (1 + index % 3, 3), dtype) for index in range(count)]


def gathered(build: GraphBuilder, source: fx.Node, group: str = "dp", size: int = RANKS) -> fx.Node:
    return build.wait(build.all_gather(source, size, group))


def read(build: GraphBuilder, *nodes: fx.Node) -> list[fx.Node]:
    return [build.call(aten.mul.Tensor, node, 2) for node in nodes]


def plain(count: int = 3) -> GraphBuilder:
    """All gathers first, then their uses, so that everything can be fused."""
    build = GraphBuilder()
    waits = [gathered(build, param) for param in parameters(build, count)]
    build.module(*read(build, *waits))
    return build


def module_of(build: GraphBuilder) -> fx.GraphModule:
    return fx.GraphModule(build.root, build.graph)


def copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, graph)


def test_two_waits_on_one_gather_leave_it_alone() -> None:
    build = GraphBuilder()
    first, second, third = parameters(build, 3)
    launch = build.all_gather(first, RANKS, "dp")
    waits = [build.wait(launch), build.wait(launch), gathered(build, second), gathered(build, third)]
    gm = build.module(*read(build, *waits))
    original = copy_of(gm)
    done = rewrite(gm)
    assert rules(done.description) == {launch.name: "several-waits"}
    assert done.sizes == [2]
    assert_same_results(original, gm, build.draw_inputs(RANKS, 1), WORLD)


def test_keyword_collectives_are_bucketed() -> None:
    build = GraphBuilder()
    params = parameters(build, 3)
    waits = [build.wait(build.all_gather(param, RANKS, "dp", form="keyword")) for param in params]
    grads = [build.call(aten.mul.Tensor, wait, 3) for wait in waits]
    reduced = [build.wait(build.reduce_scatter(grad, "sum", RANKS, "dp", form="keyword")) for grad in grads]
    gm = build.module(*reduced)
    original = copy_of(gm)
    assert rewrite(gm).sizes == [3, 3]
    assert_same_results(original, gm, build.draw_inputs(RANKS, 2), WORLD)


@pytest.mark.parametrize("placement", ["original", "scheduled"])
def test_a_gather_of_the_old_value_stays_before_the_write(placement: str) -> None:
    build = GraphBuilder()
    first, second = parameters(build, 2)
    old = gathered(build, first)
    build.call(aten.copy_.default, first, build.call(aten.neg.default, first))
    new, other = gathered(build, first), gathered(build, second)
    gm = build.module(*read(build, old, new, other))
    original = copy_of(gm)
    done = rewrite(gm, placement=placement)
    assert done.sizes == [2, 1]
    assert_same_results(original, gm, build.draw_inputs(RANKS, 3), WORLD)


def test_a_cast_that_changes_the_device_is_no_preparation() -> None:
    build = GraphBuilder()
    offloaded, resident, other = parameters(build, 3)
    cuda = torch.device("cuda")
    moved = build.call(aten._to_copy.default, offloaded, dtype=torch.bfloat16)
    moved.kwargs = {"dtype": torch.bfloat16, "device": cuda}
    launch = build.all_gather(moved, RANKS, "dp")
    wait = build.wait(launch)
    for node in (moved, launch, wait):
        node.meta["val"] = FakeTensor(build.mode, build.value[node], cuda)
    rest = [gathered(build, resident), gathered(build, other)]
    gm = build.module(*read(build, wait, *rest))
    done = rewrite(gm)
    assert rules(done.description) == {launch.name: "device-copy"}
    assert moved in gm.graph.nodes, "the copy was erased"
    assert done.sizes == [2]


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


def test_one_group_with_two_sizes_is_left_alone() -> None:
    build = GraphBuilder()
    first, second, third = parameters(build, 3)
    waits = [gathered(build, first), gathered(build, second)]
    odd = build.all_gather(third, 2, "dp")
    gm = build.module(*read(build, *waits, build.wait(odd)))
    done = rewrite(gm)
    assert rules(done.description) == {odd.name: "group-size-mismatch"}
    assert done.sizes == [2]


def test_a_reduction_that_does_not_divide_is_left_alone() -> None:
    build = GraphBuilder()
    gradients = [build.tensor(f"g{index}", (8, 3)) for index in range(2)]
    odd = build.tensor("odd", (6, 3))
    waits = [build.wait(build.reduce_scatter(grad, "sum", RANKS, "dp")) for grad in gradients]
    launch = build.reduce_scatter(odd, "sum", RANKS, "dp")
    done = rewrite(build.module(*waits, build.wait(launch)))
    assert rules(done.description) == {launch.name: "shape-not-divisible"}
    assert done.sizes == [2]


@pytest.mark.parametrize("budget", [None, 10**12])
def test_no_memory_bound_is_an_answer(budget: int | None) -> None:
    assert rewrite(module_of(plain()), memory_budget_bytes=budget).sizes == [3]


def test_a_second_run_changes_nothing() -> None:
    build = plain()
    gm = module_of(build)
    rewrite(gm)
    before = str(gm.graph)
    again = rewrite(gm)
    assert again.sizes == []
    assert set(rules(again.description).values()) == {"already-bucketed"}
    assert str(gm.graph) == before


def uneven(rank: int) -> tuple[GraphBuilder, fx.GraphModule]:
    """Rows 0 to 6 of a parameter on four ranks: three hold two, the last holds one and pads it."""
    build = GraphBuilder()
    rows = 1 if rank == RANKS - 1 else 2
    shard = build.tensor("uneven", (rows, 3))
    even = build.tensor("even", (1, 3))
    source = build.call(prims.convert_element_type.default, shard, torch.bfloat16)
    if rows == 1:
        source = build.call(aten.constant_pad_nd.default, source, [0, 0, 0, 1], 0)
    full = build.call(aten.slice.Tensor, gathered(build, source), 0, 0, 7)
    other = gathered(build, build.call(prims.convert_element_type.default, even, torch.bfloat16))
    used = read(build, full, other)
    gradient = build.call(aten._to_copy.default, used[0], dtype=torch.float32)
    pieces = build.call(aten.split.Tensor, gradient, 2)
    parts = [build.call(operator.getitem, pieces, index) for index in range(4)]
    parts[3] = build.call(aten.constant_pad_nd.default, parts[3], [0, 0, 0, 1], 0)
    reduced = build.wait(build.reduce_scatter(build.call(aten.cat.default, parts), "avg", RANKS, "dp"))
    if rows == 1:
        reduced = build.call(aten.slice.Tensor, reduced, 0, 0, 1)
    second = build.call(aten._to_copy.default, used[1], dtype=torch.float32)
    return build, build.module(*used, reduced, build.wait(build.reduce_scatter(second, "avg", RANKS, "dp")))


@pytest.mark.parametrize("placement", ["original", "scheduled"])
def test_ranks_with_different_graphs_issue_the_same_collectives(placement: str) -> None:
    ranks = [uneven(rank) for rank in range(RANKS)]
    originals = [uneven(rank)[1] for rank in range(RANKS)]
    done = [rewrite(gm, placement=placement) for _, gm in ranks]
    assert len({len(gm.graph.nodes) for gm in originals}) > 1
    assert len({entry.description.signature for entry in done}) == 1
    assert len({entry.plan.digest for entry in done}) == 1
    assert done[0].sizes == [2, 2]
    inputs = [build.draw_inputs(1, 5 + rank)[0] for rank, (build, _) in enumerate(ranks)]
    assert_same_results(originals, [gm for _, gm in ranks], inputs, WORLD)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_prefetching_gathers_no_more_than_it_says(prefetch: int) -> None:
    build = GraphBuilder()
    params = parameters(build, 6)
    outputs = [read(build, gathered(build, param))[0] for param in params]
    done = rewrite(
        build.module(*outputs), placement="scheduled", prefetch=prefetch, bucket_cap_bytes=1, first_bucket_cap_bytes=1
    )
    flying = most = 0
    for node in done.gm.graph.nodes:
        flying += parse_collective(node) is not None
        most = max(most, flying)
        flying -= node.target is c10d.wait_tensor.default
    assert most == max(1, prefetch)


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


_PRINT_DIGEST = """
from tests.client.test_peers_regressions import many_groups
from tests.support.rewriting import rewrite
done = rewrite(many_groups()[1], placement="scheduled")
print(done.description.signature, done.plan.digest)
"""


def many_groups(count: int = 8) -> tuple[GraphBuilder, fx.GraphModule]:
    """Gathers and reductions that alternate between groups and dtypes."""
    build = GraphBuilder()
    params = [
        build.tensor(f"w{index}", (1 + index % 3, 2), (torch.float32, torch.bfloat16)[index // 2 % 2])
        for index in range(count)
    ]
    groups = ("row", "column")
    waits = [gathered(build, param, groups[index % 2], 2) for index, param in enumerate(params)]
    used = read(build, *waits)
    reduced = [build.wait(build.reduce_scatter(value, "sum", 2, groups[index % 2])) for index, value in enumerate(used)]
    return build, build.module(*reduced)


def test_plans_do_not_depend_on_hash_order() -> None:
    answers = {
        subprocess.run(
            [sys.executable, "-c", _PRINT_DIGEST],
            env=os.environ | {"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(answers) == 1


def test_nothing_of_the_rank_is_in_the_graph() -> None:
    texts = set()
    for rank in range(2):
        name = str(133 + rank)
        build = GraphBuilder()
        waits = [gathered(build, param, name) for param in parameters(build, 3)]
        grads = [build.wait(build.reduce_scatter(value, "avg", RANKS, name)) for value in read(build, *waits)]
        done = rewrite(build.module(*grads))
        assert done.sizes == [3, 3]
        texts.add(re.sub(rf"\b{name}\b", "GROUP", str(done.gm.graph)))
    assert len(texts) == 1


def test_a_group_may_be_a_node() -> None:
    build = GraphBuilder()
    params = parameters(build, 3)
    mesh = build.opaque("mesh")
    group = build.mesh_group(mesh, 0)
    waits = [gathered(build, param, group) for param in params]
    gm = build.module(*read(build, *waits))
    original = copy_of(gm)
    done = rewrite(gm)
    assert done.sizes == [3]
    assert done.description.local_groups == {"g0": None}
    (launch,) = launches(gm)
    assert launch.args[2] is group
    key = (str(group.target), ("mesh", "0"))
    assert_same_results(original, gm, build.draw_inputs(RANKS, 7), {key: WORLD["dp"]})


def test_groups_that_cannot_be_looked_up_need_no_look_up() -> None:
    build = GraphBuilder()
    gradients = [build.tensor(f"g{index}", (4, 3)) for index in range(2)]
    waits = [gathered(build, param, "flattened mesh") for param in parameters(build, 2)]
    reduced = [build.wait(build.all_reduce(gradient, "sum", "other mesh")) for gradient in gradients]
    done = rewrite(build.module(*read(build, *waits), *reduced))
    assert done.sizes == [2]
    assert set(rules(done.description).values()) == {"unknown-group"}, "an all-reduce alone tells no size"


def test_several_groups_are_split_by_their_own_ranks() -> None:
    build, gm = many_groups()
    original = copy_of(gm)
    assert rewrite(gm).sizes == [2] * 8
    assert_same_results(original, gm, build.draw_inputs(RANKS, 8), GRID)


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


@pytest.mark.parametrize("placement", ["original", "scheduled"])
def test_collectives_run_in_the_order_of_the_plan(placement: str) -> None:
    build, gm = many_groups()
    original = copy_of(gm)
    done = rewrite(gm, placement=placement, bucket_cap_bytes=50, first_bucket_cap_bytes=50)
    planned = [
        done.plan.decision.buckets[step.target].id for step in done.plan.decision.steps if step.op is StepOp.LAUNCH
    ]
    lanes = {bucket.id: bucket for bucket in done.plan.decision.buckets}
    issued = [launch.meta.get("fsdp_bucket_id") for launch in launches(gm)]
    fused = [bucket for bucket in planned if len(lanes[bucket].members) > 1]
    assert [bucket for bucket in issued if bucket is not None] == fused
    assert len(issued) == len(planned)
    assert_same_results(original, gm, build.draw_inputs(RANKS, 10), GRID)


def test_interleaved_groups_and_dtypes_fill_their_buckets() -> None:
    assert rewrite(many_groups(16)[1]).sizes == [4] * 8


def test_a_chain_of_uses_does_not_keep_gathers_apart() -> None:
    build = GraphBuilder()
    hidden = build.tensor("hidden", (2, 3))
    params = [build.tensor(f"w{index}", (1, 3)) for index in range(50)]
    for param in params:
        cast = build.call(prims.convert_element_type.default, param, torch.bfloat16)
        full = build.call(aten._to_copy.default, gathered(build, cast), dtype=torch.float32)
        hidden = build.call(aten.add.Tensor, hidden, build.call(aten.sum.default, full))
    gm = build.module(hidden)
    original = copy_of(gm)
    assert rewrite(gm).sizes == [50]
    assert_same_results(original, gm, build.draw_inputs(RANKS, 11), WORLD)


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


def test_tensor_and_expert_parallel_graphs_stay_in_order() -> None:
    build = GraphBuilder()
    params = parameters(build, 4)
    hidden = build.tensor("hidden", (4, 3))
    outputs = []
    for index, param in enumerate(params):
        full = gathered(build, param, ("dp", "row")[index % 2], (RANKS, 2)[index % 2])
        outputs += read(build, full)
        local = build.call(aten.add.Tensor, hidden, build.call(aten.sum.default, full))
        tensor_parallel = build.wait(build.all_gather(local, 2, "column"))
        split = build.wait(build.reduce_scatter(tensor_parallel, "sum", 2, "column"))
        hidden = build.call(aten.remainder.Scalar, build.wait(build.all_reduce(split, "sum", "row")), 5)
    grads = [build.call(aten.mul.Tensor, value, build.call(aten.sum.default, hidden)) for value in outputs]
    outputs += [
        build.wait(build.reduce_scatter(grad, "sum", (RANKS, 2)[index % 2], ("dp", "row")[index % 2]))
        for index, grad in enumerate(grads)
    ]
    gm = build.module(hidden, *outputs)
    for placement in ("original", "scheduled"):
        rewritten = copy_of(gm)
        for old, new in zip(gm.graph.nodes, rewritten.graph.nodes, strict=True):
            new.meta = dict(old.meta)
        done = rewrite(rewritten, placement=placement)
        assert done.sizes[0] == 2
        assert_same_results(gm, rewritten, build.draw_inputs(RANKS, 13), GRID)


def test_a_reduction_waits_for_its_last_gradient() -> None:
    build = GraphBuilder()
    gradients = [build.tensor(f"g{index}", (4, 3)) for index in range(3)]
    outputs = []
    late = gradients[0]
    for gradient in gradients:
        late = build.call(aten.add.Tensor, late, gradient)
        outputs.append(build.wait(build.reduce_scatter(late, "sum", RANKS, "dp")))
    gm = build.module(*outputs)
    original = copy_of(gm)
    done = rewrite(gm)
    assert done.sizes == [3]
    (launch,) = launches(gm)
    assert all(source < launch for source in launch.all_input_nodes)
    assert late < launch
    assert_same_results(original, gm, build.draw_inputs(RANKS, 14), WORLD)


def test_describing_leaves_no_trace() -> None:
    _, gm = many_groups()
    before = [(node, node.args, dict(node.meta)) for node in gm.graph.nodes]
    first, second = (describe_graph(gm, options=size_options()) for _ in range(2))
    assert first.request == second.request
    assert [(node, node.args, dict(node.meta)) for node in gm.graph.nodes] == before


def test_a_reduction_that_compute_reads_is_left_alone() -> None:
    build = GraphBuilder()
    gradients = [build.tensor(f"g{index}", (4, 3)) for index in range(3)]
    waits = [build.wait(build.reduce_scatter(gradient, "sum", RANKS, "dp")) for gradient in gradients]
    norm = build.call(aten.sum.default, waits[0])
    gm = build.module(*waits, norm)
    done = rewrite(gm)
    names = [launch.name for launch in launches(gm)]
    assert waits[0].all_input_nodes[0].name in names
    assert done.description.request.fixed[0].kind == "reduce_scatter"


def test_payload_is_in_registration_order() -> None:
    build = GraphBuilder()
    params = parameters(build, 4)
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


def test_symbolic_sizes_are_left_alone_and_stay_symbolic() -> None:
    environment = ShapeEnv()
    with FakeTensorMode(shape_env=environment):
        size = environment.create_unbacked_symint()
        environment.pending_fresh_unbacked_symbols.clear()
        ambient = environment.create_unbacked_symint()
    pending = list(environment.pending_fresh_unbacked_symbols)
    build = GraphBuilder()
    params = parameters(build, 3)
    launch = build.all_gather(params[0], RANKS, "dp")
    wait = build.wait(launch)
    with FakeTensorMode(shape_env=environment):
        for node, rows in ((params[0], size), (launch, size * RANKS), (wait, size * RANKS)):
            node.meta["val"] = torch.empty((rows, 3))
    gm = build.module(*read(build, wait, gathered(build, params[1]), gathered(build, params[2])))
    done = rewrite(gm)
    assert rules(done.description) == {launch.name: "symbolic-size"}
    assert done.sizes == [2]
    assert isinstance(launch.meta["val"].shape[0], torch.SymInt)
    assert environment.pending_fresh_unbacked_symbols == pending
    assert pending == [ambient.node.expr]


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


def sides(gm: fx.GraphModule, fence: fx.Node) -> tuple[int, int]:
    found = [launch < fence for launch in launches(gm)]
    return sum(found), len(found) - sum(found)


@pytest.mark.parametrize("placement", ["original", "scheduled"])
def test_nothing_moves_across_a_copy_between_devices(placement: str) -> None:
    build = GraphBuilder()
    params = parameters(build, 4)
    hidden = build.tensor("hidden", (2,))
    before = [gathered(build, param) for param in params[:2]]
    fence = build.call(aten._to_copy.default, hidden, dtype=torch.float32)
    fence.kwargs = {"device": torch.device("cuda"), "non_blocking": False}
    fence.meta["val"] = FakeTensor(build.mode, build.value[fence], torch.device("cuda"))
    after = [gathered(build, param) for param in params[2:]]
    gm = build.module(*read(build, *before, *after), fence)
    done = rewrite(gm, placement=placement)
    assert done.sizes == [2, 2]
    assert sides(gm, fence) == (1, 1)


@pytest.mark.parametrize("placement", ["original", "scheduled"])
def test_nothing_moves_across_unknown_communication(placement: str) -> None:
    build = GraphBuilder()
    params = parameters(build, 5)
    hidden = build.tensor("hidden", (2,))
    before = [gathered(build, param) for param in params[:2]]
    across = build.all_gather(params[4], RANKS, "dp")
    fence = build.call(unknown_op, hidden)
    wait = build.wait(across)
    after = [gathered(build, param) for param in params[2:4]]
    gm = build.module(*read(build, *before, *after, wait), fence)
    original = copy_of(gm)
    done = rewrite(gm, placement=placement)
    assert rules(done.description) == {across.name: "barrier-inside"}
    assert done.sizes == [2, 2]
    assert sides(gm, fence) == (2, 1)
    assert across < fence < wait
    assert_same_results(original, gm, build.draw_inputs(RANKS, 16), WORLD)


def test_random_numbers_are_drawn_in_the_same_order() -> None:
    build = GraphBuilder()
    params = parameters(build, 3)
    outputs = []
    for param in params:
        full = gathered(build, param)
        outputs.append(build.call(aten.add.Tensor, build.call(aten.bernoulli.p, full, 0.5), full))
    gm = build.module(*outputs)
    drawn = [node.name for node in gm.graph.nodes if node.target is aten.bernoulli.p]
    done = rewrite(gm)
    assert done.sizes == [3]
    assert [node.name for node in gm.graph.nodes if node.target is aten.bernoulli.p] == drawn


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


def test_an_annotation_stands_in_for_a_known_chain() -> None:
    build = GraphBuilder()
    params = parameters(build, 3)
    waits = []
    for index, param in enumerate(params):
        quantised = build.call(aten.round.default, build.call(aten.mul.Tensor, param, 4))
        launch = build.all_gather(build.call(aten._to_copy.default, quantised, dtype=torch.int8), RANKS, "dp")
        launch.meta |= {"comm_type": "fsdp_all_gather", "comm_group": "fsdp", "param_name": f"w{index}"}
        waits.append(build.wait(launch))
    gm = build.module(*read(build, *waits))
    original = copy_of(gm)
    assert rewrite(gm).sizes == [3]
    assert_same_results(original, gm, build.draw_inputs(RANKS, 18), WORLD)


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


def test_the_same_request_gives_the_same_plan_bytes() -> None:
    description = describe_graph(many_groups()[1], options=size_options())
    assert make_plan(description.request).encoded == make_plan(description.request).encoded
