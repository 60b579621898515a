"""What users of other bucketing passes ran into, part 1: what is taken for a candidate, and what is left alone.

Reproduced against torch's own passes:

| case | test |
|---|---|
| two waits on one gather | test_two_waits_on_one_gather_leave_it_alone |
| collectives with keyword arguments | test_keyword_collectives_are_bucketed |
| casts that also change the device | test_a_cast_that_changes_the_device_is_no_preparation |
| one group name with two sizes | test_one_group_with_two_sizes_is_left_alone |
| dimension 0 not divisible by the ranks | test_a_reduction_that_does_not_divide_is_left_alone |
| second run on a bucketed graph | test_a_second_run_changes_nothing |

Reported by users (repository#number):

| report | test |
|---|---|
| pytorch#181529 | test_a_group_may_be_a_node |
| autoparallel#364 | test_groups_that_cannot_be_looked_up_need_no_look_up |
| pytorch#158632 | test_several_groups_are_split_by_their_own_ranks |
| pytorch#180579 | test_describing_leaves_no_trace |
| pytorch#172905 | test_a_reduction_that_compute_reads_is_left_alone |
| pytorch#183676, #183544, #183679, #183495 | test_symbolic_sizes_are_left_alone_and_stay_symbolic |
| torchtitan#4536 | test_an_annotation_stands_in_for_a_known_chain |
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from bucketplan_client.capture.describe import describe_graph
from bucketplan_client.capture.parse import group_key
from tests.support.fxgraphs import GraphBuilder, aten
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
from tests.support.rewriting import assert_same_results, launches, rewrite, rules, size_options


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


def test_a_second_run_changes_nothing() -> None:
    build = plain()
    gm = module_of(build)
    rewrite(gm)
    before = str(gm.graph)
    again = rewrite(gm)
    assert again.sizes == []
    assert set(rules(again.description).values()) == {"already-bucketed"}
    assert str(gm.graph) == before


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
    assert_same_results(original, gm, build.draw_inputs(RANKS, 7), {group_key(group): WORLD["dp"]})


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
