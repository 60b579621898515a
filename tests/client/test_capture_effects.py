"""What calls do to storage without saying so: no collective may be moved across any of it, whatever the plan."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._inductor.fx_passes.control_dependencies as control_dependencies
import torch._inductor.inductor_prims  # registers inductor::resize_storage_bytes_
import torch._prims.rng_prims as rng_prims
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph

from bucketplan_client.capture.describe import describe_graph
from bucketplan_client.rewrite.apply import apply_plan
from tests.support.counts import count
from tests.support.fxgraphs import GraphBuilder, aten
from tests.support.fxplans import random_legal_plan
from tests.support.rewriting import assert_same_results, rewrite, rules, size_options

RANKS = 2
GROUPS = {"dp": [[0, 1]]}
NUM_PLANS = count(test=6, soak=60)

Made = tuple[GraphBuilder, fx.GraphModule]


def gathered(build: GraphBuilder, source: fx.Node, name: str | None = None) -> fx.Node:
    launch = build.all_gather(source, RANKS, "dp")
    if name is not None:
        launch.meta |= {"comm_type": "fsdp_all_gather", "comm_group": "dp", "fsdp_degree": RANKS, "param_name": name}
    return build.wait(launch)


def read(build: GraphBuilder, *nodes: fx.Node) -> list[fx.Node]:
    return [build.call(aten.add.Tensor, node, 3) for node in nodes]


def assert_right_under_any_plan(make: Callable[[], Made], *, least: int = 2) -> None:
    """At least `least` collectives may move, and under whatever legal plan they do, results stay the same."""
    for seed in range(NUM_PLANS):
        build, gm = make()
        description = describe_graph(gm, options=size_options(mixed_dtype=bool(seed % 2)))
        assert len(description.request.candidates) >= least
        apply_plan(description, random_legal_plan(description.request, seed))
        gm.graph.lint()
        assert_same_results(make()[1], gm, build.draw_inputs(RANKS, seed), GROUPS)


def copy_behind_a_write(build: GraphBuilder, wait: fx.Node) -> fx.Node:
    build.call(aten.add_.Tensor, wait, 1)
    return build.call(aten.reshape.default, build.call(aten.t.default, wait), [-1])


def flat_copy_behind_a_write(build: GraphBuilder, wait: fx.Node) -> fx.Node:
    view = build.call(aten.t.default, wait)
    build.call(aten.mul_.Tensor, wait, 3)
    return build.call(aten.flatten.using_ints, view)


def view_behind_a_copy_behind_a_write(build: GraphBuilder, wait: fx.Node) -> fx.Node:
    return build.call(aten.unsqueeze.default, copy_behind_a_write(build, wait), 0)


def view_behind_a_write(build: GraphBuilder, wait: fx.Node) -> fx.Node:
    build.call(aten.add_.Tensor, wait, 1)
    return build.call(aten.view.default, wait, [-1])


def view_behind_a_transposition_in_place(build: GraphBuilder, wait: fx.Node) -> fx.Node:
    build.call(aten.t_.default, wait)
    return build.call(aten.select.int, wait, 0, 0)


@pytest.mark.parametrize(
    "view",
    [
        copy_behind_a_write,
        flat_copy_behind_a_write,
        view_behind_a_copy_behind_a_write,
        view_behind_a_write,
        view_behind_a_transposition_in_place,
    ],
)
def test_what_reads_a_result_behind_a_write_reads_what_was_written(view: Any) -> None:
    """A second gather and compute read it, so that a rewriter may want it right behind the first gather's wait."""

    def make() -> Made:
        build = GraphBuilder()
        first, other = build.tensor("a", (2, 3)), build.tensor("c", (2, 3))
        wait, second = gathered(build, first, "a"), gathered(build, other, "c")
        viewed = view(build, wait)
        again = gathered(build, viewed, "r")
        return build, build.module(*read(build, viewed, again, second))

    assert_right_under_any_plan(make, least=3)


OFFSETS: dict[str, Callable[[GraphBuilder, fx.Node], fx.Node]] = {
    "as_strided": lambda build, wait: build.call(aten.as_strided.default, wait, [6], [1], 0),
    "as_strided by keyword": lambda build, wait: build.call(aten.as_strided.default, wait, [3], [1], storage_offset=2),
    "as_strided of a view": lambda build, wait: build.call(
        aten.as_strided.default, build.call(aten.view.default, wait, [-1]), [3], [2], 1
    ),
    "as_strided_": lambda build, wait: build.call(
        aten.as_strided_.default, build.call(aten.alias.default, wait), [6], [1], 0
    ),
    "as_strided_copy": lambda build, wait: build.call(aten.as_strided_copy.default, wait, [6], [1], 0),
}


def reduced(kind: str, view: Callable[[GraphBuilder, fx.Node], fx.Node]) -> Made:
    build = GraphBuilder()
    gradients = [build.call(aten.mul.Tensor, build.tensor(name, (4, 3)), 2) for name in "ac"]
    waits = []
    for name, gradient in zip("ac", gradients, strict=True):
        reduce_scatter = kind == "fsdp_reduce_scatter"
        launch = (
            build.reduce_scatter(gradient, "sum", RANKS, "dp")
            if reduce_scatter
            else build.all_reduce(gradient, "sum", "dp")
        )
        launch.meta |= {"comm_type": kind, "comm_group": "dp", "fsdp_degree": RANKS, "param_name": name}
        waits.append(build.wait(launch))
    return build, build.module(*[view(build, wait) for wait in waits])


@pytest.mark.parametrize("kind", ["fsdp_reduce_scatter", "dp_all_reduce"])
@pytest.mark.parametrize("view", OFFSETS)
def test_a_reduction_that_is_viewed_from_the_beginning_of_storage_stays_out_of_buckets(kind: str, view: str) -> None:
    build, gm = reduced(kind, OFFSETS[view])
    done = rewrite(gm)
    assert set(rules(done.description).values()) == {"absolute-view"}
    assert_same_results(reduced(kind, OFFSETS[view])[1], gm, build.draw_inputs(RANKS, 3), GROUPS)


@pytest.mark.parametrize("kind", ["fsdp_reduce_scatter", "dp_all_reduce"])
def test_a_reduction_that_is_viewed_from_its_own_beginning_is_bucketed(kind: str) -> None:
    def view(build: GraphBuilder, wait: fx.Node) -> fx.Node:
        return build.call(aten.as_strided.default, wait, [6], [1])

    build, gm = reduced(kind, view)
    assert rewrite(gm).sizes == [2]
    assert_same_results(reduced(kind, view)[1], gm, build.draw_inputs(RANKS, 3), GROUPS)


@pytest.mark.parametrize(
    ("call", "rule"), [("scatter", "absolute-view"), ("set", "storage-changed"), ("offset", "absolute-view")]
)
def test_other_readers_of_absolute_offsets_are_known(call: str, rule: str) -> None:
    def view(build: GraphBuilder, wait: fx.Node) -> fx.Node:
        build.call(aten.neg.default, wait)
        if call == "scatter":
            source = build.call(aten.neg.default, build.call(aten.slice.Tensor, wait, 0, 0, 1))
            return build.call(aten.as_strided_scatter.default, wait, source, [1, 3], [3, 1], 0)
        if call == "set":
            empty = build.call(aten.new_zeros.default, wait, [1])
            return build.call(aten.set_.source_Tensor_storage_offset, empty, wait, 1, [3], [1])
        build.graph.call_function(aten.sym_storage_offset.default, (wait,))
        return wait

    _, gm = reduced("fsdp_reduce_scatter", view)
    assert set(rules(describe_graph(gm, options=size_options())).values()) == {rule}


def test_a_storage_that_inductor_frees_is_read_before() -> None:
    build = GraphBuilder()
    shard, other, hidden = build.tensor("a", (2, 3)), build.tensor("c", (2, 3)), build.tensor("h", (3,))
    computed = build.call(aten.mul.Tensor, shard, 2)
    waits = gathered(build, computed, "a"), gathered(build, other, "c")
    free = build.graph.call_function(torch.ops.inductor.resize_storage_bytes_.default, (computed, 0))
    hidden = build.call(aten.mul.Tensor, build.call(aten.mul.Tensor, hidden, 2), 2)
    description = describe_graph(build.module(hidden, *read(build, *waits)), options=size_options())
    first, second = description.request.candidates
    position, anchors = description.binding.position, description.binding.gap_anchors
    assert position[anchors[first.latest_launch]] <= position[free]
    assert position[anchors[first.latest_wait]] <= position[free]
    assert position[anchors[second.latest_wait]] > position[free]


def test_a_reduction_whose_storage_inductor_resizes_stays_out_of_buckets() -> None:
    def view(build: GraphBuilder, wait: fx.Node) -> fx.Node:
        build.graph.call_function(torch.ops.inductor.resize_storage_bytes_.default, (wait, 0))
        return wait

    _, gm = reduced("dp_all_reduce", view)
    assert set(rules(describe_graph(gm, options=size_options())).values()) == {"storage-changed"}


def the_same_tensor(value: torch.Tensor) -> torch.Tensor:
    return value


def a_view_of_it(value: torch.Tensor) -> torch.Tensor:
    return value.view(3, 2)


def a_tensor_on_its_memory(value: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(value.numpy()).view(3, 2)


@pytest.mark.parametrize("tie", [the_same_tensor, a_view_of_it, a_tensor_on_its_memory])
@pytest.mark.parametrize("with_values", [False, True])
def test_attributes_of_two_names_on_one_storage_are_one(tie: Any, with_values: bool) -> None:
    def make() -> Made:
        build = GraphBuilder(with_values=with_values)
        value = torch.arange(6.0).reshape(2, 3).clone()
        written, other = build.attribute("p", value), build.tensor("c", (2, 3))
        if not with_values:
            other.meta["tensor_meta"] = torch.empty(2, 3)
        build.call(aten.mul_.Tensor, written, 0)
        tied = build.attribute("q", tie(value))
        waits = [gathered(build, tied, "q"), gathered(build, other, "c")]
        for node in [tied, *waits]:
            node.meta["tensor_meta"] = build.value[node]
        for wait in waits:
            wait.all_input_nodes[0].meta["tensor_meta"] = build.value[wait]
        return build, build.module(*read(build, *waits))

    assert_right_under_any_plan(make)


def write_to(view: Callable[[GraphBuilder, fx.Node], fx.Node]) -> Callable[[GraphBuilder, fx.Node], list[fx.Node]]:
    def write(build: GraphBuilder, shard: fx.Node) -> list[fx.Node]:
        build.call(aten.add_.Tensor, view(build, shard), 1)
        return []

    return write


def element(packet: Any, *args: Any) -> Callable[[GraphBuilder, fx.Node], fx.Node]:
    return lambda build, shard: build.call(operator.getitem, build.call(packet, shard, *args), 0)


def normalise(build: GraphBuilder, mean: fx.Node, packet: Any, *args: Any) -> list[fx.Node]:
    """Batch normalisation in training writes the running mean, whose schema says nothing of it."""
    hidden = build.tensor("x", (4, 2))
    variance = build.call(aten.new_ones.default, mean, [2])
    result = build.call(packet, hidden, None, None, mean, variance, True, 0.5, 1e-5, *args)
    return [build.call(operator.getitem, result, 0) if isinstance(build.value[result], tuple) else result]


WRITES: dict[str, tuple[tuple[int, ...], Callable[[GraphBuilder, fx.Node], list[fx.Node]]]] = {
    "dropout in evaluation": ((2, 3), write_to(lambda b, s: b.call(aten.dropout.default, s, 0.5, False))),
    "sum_to_size": ((2, 3), write_to(lambda b, s: b.call(aten.sum_to_size.default, s, [2, 3]))),
    "einsum": ((2, 3), write_to(lambda b, s: b.call(aten.einsum.default, "ij->ji", [s]))),
    "atleast_2d": ((2, 3), write_to(lambda b, s: b.call(aten.atleast_2d.default, s))),
    "type_as": ((2, 3), write_to(lambda b, s: b.call(aten.type_as.default, s, s))),
    "broadcast_tensors": (
        (2, 3),
        write_to(lambda b, s: b.call(operator.getitem, b.call(aten.broadcast_tensors.default, [s, s]), 0)),
    ),
    "unsafe_split": ((2, 3), write_to(element(aten.unsafe_split.Tensor, 1))),
    "unsafe_split_with_sizes": ((2, 3), write_to(element(aten.unsafe_split_with_sizes.default, [1, 1]))),
    "unsafe_chunk": ((2, 3), write_to(element(aten.unsafe_chunk.default, 2))),
    "set_": (
        (2, 3),
        write_to(lambda b, s: b.call(aten.set_.source_Tensor, b.call(aten.new_empty.default, s, [1]), s)),
    ),
    "native_batch_norm": ((2,), lambda build, mean: normalise(build, mean, aten.native_batch_norm.default)),
    "batch_norm": ((2,), lambda build, mean: normalise(build, mean, aten.batch_norm.default, False)),
    "instance_norm": (
        (2,),
        lambda build, mean: [
            build.call(
                aten.instance_norm.default,
                build.tensor("x", (1, 2, 4)),
                None,
                None,
                mean,
                build.call(aten.new_ones.default, mean, [2]),
                True,
                0.5,
                1e-5,
                False,
            )
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
def test_a_parameter_is_gathered_as_an_unmarked_write_left_it(name: str) -> None:
    shape, write = WRITES[name]

    def make() -> Made:
        build = GraphBuilder()
        shard, other = build.tensor("a", shape), build.tensor("c", shape)
        results = write(build, shard)
        waits = gathered(build, shard, "a"), gathered(build, other, "c")
        return build, build.module(*read(build, *waits), *results)

    assert_right_under_any_plan(make)


@contextmanager
def custom_operator() -> Iterator[Any]:
    """Communication that nobody knows: an operator of a namespace of its own that writes its output."""
    with torch.library._scoped_library("testcomm", "FRAGMENT") as library:
        library.define("exchange(Tensor x, Tensor(a!) out) -> ()")
        library.define("swap(Tensor x) -> Tensor")
        yield torch.ops.testcomm


def graph_of(target: Any) -> fx.GraphModule:
    graph = fx.Graph()
    given = graph.placeholder("x")
    graph.output((graph.call_function(target, (given,)),))
    return fx.GraphModule(torch.nn.Module(), graph)


def wrap_auto(build: GraphBuilder, ops: Any, hidden: fx.Node, known: bool) -> fx.Node:
    target = aten.add.out if known else ops.exchange.default
    return build.graph.call_function(auto_functionalized, (target,), {"x": hidden, "out": hidden})


def wrap_auto_v2(build: GraphBuilder, ops: Any, hidden: fx.Node, known: bool) -> fx.Node:
    target = aten.add.out if known else ops.exchange.default
    bases = {"x": hidden, "_out_base_index": 0, "_all_bases": [hidden]}
    return build.graph.call_function(auto_functionalized_v2, (target,), bases)


def wrap_saving(build: GraphBuilder, ops: Any, hidden: fx.Node, known: bool) -> fx.Node:
    target = aten.neg.default if known else ops.swap.default
    return build.graph.call_function(rng_prims.run_and_save_rng_state, (target, hidden))


def wrap_restoring(build: GraphBuilder, ops: Any, hidden: fx.Node, known: bool) -> fx.Node:
    target = aten.neg.default if known else ops.swap.default
    return build.graph.call_function(rng_prims.run_with_rng_state, (hidden, target, hidden))


def wrap_control(build: GraphBuilder, ops: Any, hidden: fx.Node, known: bool) -> fx.Node:
    build.root.inner = graph_of(aten.neg.default if known else ops.swap.default)
    inner = build.graph.get_attr("inner")
    return build.graph.call_function(control_dependencies.control_deps, ((hidden,), inner, hidden))


def wrap_condition(build: GraphBuilder, ops: Any, hidden: fx.Node, known: bool) -> fx.Node:
    build.root.inner = graph_of(ops.swap.default)
    inner = build.graph.get_attr("inner")
    return build.graph.call_function(torch.ops.higher_order.cond, (True, inner, inner, (hidden,)))


def wrap_loop(build: GraphBuilder, ops: Any, hidden: fx.Node, known: bool) -> fx.Node:
    build.root.inner = graph_of(ops.swap.default)
    inner = build.graph.get_attr("inner")
    return build.graph.call_function(torch.ops.higher_order.while_loop, (inner, inner, (hidden,), ()))


def wrap_subgraph(build: GraphBuilder, ops: Any, hidden: fx.Node, known: bool) -> fx.Node:
    build.root.inner = graph_of(ops.swap.default)
    return build.graph.call_function(invoke_subgraph, (build.graph.get_attr("inner"), "inner", hidden))


JUDGED = (wrap_auto, wrap_auto_v2, wrap_saving, wrap_restoring, wrap_control)
BARRIERS = (wrap_condition, wrap_loop, wrap_subgraph)


def earliest_behind(wrap: Any, *, known: bool = False, compute_ops: tuple[str, ...] = ()) -> bool:
    """Whether the gather that stands behind the wrapped call must stay behind it."""
    with custom_operator() as ops:
        build = GraphBuilder()
        shard, other, hidden = build.tensor("a", (2, 3)), build.tensor("c", (2, 3)), build.tensor("h", (3,))
        first = gathered(build, shard, "a")
        wrapped = wrap(build, ops, hidden, known)
        gm = build.module(wrapped, *read(build, first, gathered(build, other, "c")))
        description = describe_graph(gm, options=size_options(), compute_ops=compute_ops)
        _, candidate = description.request.candidates
        anchors = description.binding.gap_anchors
        position = description.binding.position
        return position[anchors[candidate.earliest_launch]] > position[wrapped]


@pytest.mark.parametrize("wrap", [*JUDGED, *BARRIERS])
def test_unknown_communication_inside_an_operator_that_runs_others_is_a_barrier(wrap: Any) -> None:
    assert earliest_behind(wrap)


@pytest.mark.parametrize("wrap", JUDGED)
def test_an_operator_that_runs_known_ones_is_none(wrap: Any) -> None:
    assert not earliest_behind(wrap, known=True)


@pytest.mark.parametrize("wrap", JUDGED)
def test_an_operator_that_runs_one_the_caller_vouches_for_is_none(wrap: Any) -> None:
    assert not earliest_behind(wrap, compute_ops=("testcomm::*",))
