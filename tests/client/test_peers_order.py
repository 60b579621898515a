"""What users of other bucketing passes ran into, part 2: in which order collectives run, alike on every rank.

Reproduced against torch's own passes:

| case | test |
|---|---|
| copy_ into a parameter between its gathers | test_a_gather_of_the_old_value_stays_before_the_write |
| no memory bound given | test_no_memory_bound_is_an_answer |

Reported by users (repository#number):

| report | test |
|---|---|
| pytorch#177960 | test_ranks_with_different_graphs_issue_the_same_collectives |
| DeepSpeed#8033 | test_prefetching_gathers_no_more_than_it_says |
| Megatron-LM#2218 | test_plans_do_not_depend_on_hash_order |
| pytorch#188332, #192042 | test_nothing_of_the_rank_is_in_the_graph |
| pytorch#159983 | test_collectives_run_in_the_order_of_the_plan |
| pytorch#179935 | test_a_chain_of_uses_does_not_keep_gathers_apart |
| torchtitan#4047, #4048 | test_tensor_and_expert_parallel_graphs_stay_in_order |
| pytorch#187341 | test_a_reduction_waits_for_its_last_gradient |
| pytorch#173540 | test_nothing_moves_across_a_copy_between_devices |
| pytorch#189454, torchcomms#3095 | test_nothing_moves_across_unknown_communication |
| pytorch#178875 | test_random_numbers_are_drawn_in_the_same_order |
| pytorch#192618 | test_no_memory_bound_is_an_answer |
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
from torch._subclasses.fake_tensor import FakeTensor

from bucketplan_client.capture.describe import describe_graph
from bucketplan_client.capture.parse import parse_collective
from bucketplan_core.plan import StepOp
from bucketplan_core.planning import make_plan
from tests.support.fxgraphs import GraphBuilder, aten, c10d, prims, unknown_op
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


@pytest.mark.parametrize("budget", [None, 10**12])
def test_no_memory_bound_is_an_answer(budget: int | None) -> None:
    assert rewrite(module_of(plain()), memory_budget_bytes=budget).sizes == [3]


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


_PRINT_DIGEST = """
from tests.support.peer_cases import many_groups
from tests.support.rewriting import rewrite
done = rewrite(many_groups()[1], placement="scheduled")
print(done.description.signature, done.plan.digest)
"""


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


def test_the_same_request_gives_the_same_plan_bytes() -> None:
    description = describe_graph(many_groups()[1], options=size_options())
    assert make_plan(description.request).encoded == make_plan(description.request).encoded
