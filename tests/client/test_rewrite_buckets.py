"""Single cases of a rewrite: what storage members share, what moves along, unusual tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import fx

from bucketplan_client.capture.describe import describe_graph
from bucketplan_client.rewrite.apply import apply_plan
from bucketplan_core.collectives import DTYPE_BYTES
from bucketplan_core.errors import IllegalPlan
from bucketplan_core.plan import Plan, StepOp
from bucketplan_core.planning import make_plan
from bucketplan_core.schedule import Placement, decide
from tests.support.fxgraphs import GraphBuilder, aten, free_storage
from tests.support.lockstep import run_lockstep
from tests.support.rewriting import Rewritten, assert_same_results, launches, rewrite, size_options

RANKS = 4
GROUPS = {"dp": [[0, 1, 2, 3]]}

Build = Callable[[], tuple[GraphBuilder, fx.GraphModule]]


def gathered(build: GraphBuilder, source: fx.Node) -> fx.Node:
    return build.wait(build.all_gather(source, RANKS, "dp"))


def check(make: Build, **options: object) -> Rewritten:
    """Rewrite what `make` builds and compare with what it builds untouched."""
    build, gm = make()
    done = rewrite(gm, **options)
    assert_same_results(make()[1], gm, build.draw_inputs(RANKS, 11), GROUPS)
    return done


def three(fate: Callable[[GraphBuilder, list[fx.Node]], Sequence[fx.Node]]) -> Build:
    def make() -> tuple[GraphBuilder, fx.GraphModule]:
        build = GraphBuilder()
        params = [build.tensor(f"w{index}", (index + 1, 3)) for index in range(3)]
        waits = [gathered(build, param) for param in params]
        return build, build.module(*fate(build, waits))

    return make


def free_one(build: GraphBuilder, waits: list[fx.Node]) -> Sequence[fx.Node]:
    used = build.call(aten.mul.Tensor, waits[1], 2)
    build.call(free_storage, waits[1])
    return [used, waits[0], waits[2]]


def overwrite_one(build: GraphBuilder, waits: list[fx.Node]) -> Sequence[fx.Node]:
    build.call(aten.mul_.Tensor, waits[1], 0)
    return waits


@pytest.mark.parametrize("fate", [free_one, overwrite_one])
def test_what_happens_to_one_gathered_parameter_leaves_the_others_intact(
    fate: Callable[[GraphBuilder, list[fx.Node]], Sequence[fx.Node]],
) -> None:
    assert check(three(fate)).sizes == [3]


def test_reduced_members_are_views_of_one_buffer() -> None:
    build = GraphBuilder()
    gradients = [build.tensor(f"g{index}", (4, index + 1)) for index in range(3)]
    gm = build.module(*[build.wait(build.reduce_scatter(gradient, "sum", RANKS, "dp")) for gradient in gradients])
    assert rewrite(gm).sizes == [3]
    for outputs in run_lockstep(gm, build.draw_inputs(RANKS, 1), GROUPS):
        assert len({output.untyped_storage().data_ptr() for output in outputs}) == 1


@pytest.mark.parametrize("name", sorted(DTYPE_BYTES))
def test_every_supported_dtype_survives_a_bucket_of_bytes(name: str) -> None:
    dtype = getattr(torch, name)
    build = GraphBuilder()
    params = [build.tensor("first", (3,), dtype), build.tensor("wide", (1, 2), torch.float64)]
    params += [build.tensor("second", (1, 5), dtype), build.tensor("narrow", (3,), torch.uint8)]
    gm = build.module(*[build.call(aten.view.default, gathered(build, param), [-1]) for param in params])
    generator = torch.Generator().manual_seed(1)
    inputs = [[_random_bits(param, build, generator) for param in params] for _ in range(RANKS)]
    assert rewrite(gm, mixed_dtype=True).sizes == [4]
    outputs = run_lockstep(gm, inputs, GROUPS)
    for rank in range(RANKS):
        for index in range(len(params)):
            wanted = torch.cat([_bits(values[index]) for values in inputs])
            assert torch.equal(_bits(outputs[rank][index]), wanted)


def _random_bits(param: fx.Node, build: GraphBuilder, generator: torch.Generator) -> torch.Tensor:
    value = build.value[param]
    high = 2 if value.dtype is torch.bool else 256
    raw = torch.randint(0, high, (value.numel() * value.element_size(),), generator=generator, dtype=torch.uint8)
    return raw.view(value.dtype).reshape(value.shape)


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


def odd_shapes() -> tuple[GraphBuilder, fx.GraphModule]:
    build = GraphBuilder()
    params = [build.tensor("scalar", ()), build.tensor("empty", (0, 3)), build.tensor("plain", (2, 3))]
    return build, build.module(*[build.call(aten.mul.Tensor, gathered(build, param), 2) for param in params])


@pytest.mark.parametrize("mixed_dtype", [False, True])
def test_scalars_and_empty_shards_are_members_like_others(mixed_dtype: bool) -> None:
    assert check(odd_shapes, mixed_dtype=mixed_dtype).sizes == [3]


def images() -> tuple[GraphBuilder, fx.GraphModule]:
    """Casts that also choose a memory format, which no flat buffer has."""
    build = GraphBuilder()
    params = [build.tensor(f"kernel{index}", (2, 2, 3, 3)) for index in range(2)]
    casts = [
        build.call(aten._to_copy.default, param, dtype=torch.bfloat16, memory_format=torch.channels_last)
        for param in params
    ]
    flat = [build.call(aten.contiguous.default, cast) for cast in casts]
    waits = [gathered(build, cast) for cast in (*casts, *flat)]
    return build, build.module(*[build.call(aten.mul.Tensor, wait, 2) for wait in waits])


def plain_images() -> tuple[GraphBuilder, fx.GraphModule]:
    build = GraphBuilder()
    params = [build.tensor(f"kernel{index}", (2, 2, 3, 3)) for index in range(3)]
    casts = [
        build.call(aten._to_copy.default, param, dtype=torch.bfloat16, memory_format=torch.channels_last)
        for param in params
    ]
    return build, build.module(*[build.call(aten.mul.Tensor, gathered(build, cast), 2) for cast in casts])


@pytest.mark.parametrize("make", [images, plain_images])
def test_memory_formats_of_inputs_do_not_reach_the_bucket(make: Build) -> None:
    assert check(make).sizes[0] > 1


def formatted_gradients() -> tuple[GraphBuilder, fx.GraphModule]:
    build = GraphBuilder()
    gradients = [build.tensor(f"g{index}", (4, 2, 3, 3)) for index in range(2)]
    outputs = []
    for gradient in gradients:
        layout = build.call(
            aten.contiguous.default, build.call(aten.neg.default, gradient), memory_format=torch.channels_last
        )
        outputs.append(build.wait(build.reduce_scatter(layout, "sum", RANKS, "dp")))
    return build, build.module(*outputs)


def test_layout_nodes_keep_their_memory_format() -> None:
    done = check(formatted_gradients)
    layouts = [node for node in done.gm.graph.nodes if "fsdp_reduce_scatter_prepare" in node.meta]
    assert len(layouts) == 2
    for layout in layouts:
        value = layout.target(torch.empty(4, 2, 3, 3), *layout.args[1:], **layout.kwargs)
        assert value.stride() == layout.meta["val"].stride()


def strided_sources() -> tuple[GraphBuilder, fx.GraphModule]:
    build = GraphBuilder()
    params = [build.tensor(f"w{index}", (2, 3)) for index in range(3)]
    sources = [build.call(aten.t.default, params[0]), build.call(aten.slice.Tensor, params[1], 1, 0, 2), params[2]]
    return build, build.module(*[build.call(aten.mul.Tensor, gathered(build, source), 2) for source in sources])


def test_inputs_need_not_be_contiguous() -> None:
    assert check(strided_sources).sizes == [3]


def attributes(write: bool) -> Build:
    def make() -> tuple[GraphBuilder, fx.GraphModule]:
        build = GraphBuilder()
        hidden = build.tensor("hidden", (2,))
        first = gathered(build, build.attribute("weight", torch.ones(2, 3)))
        used = [build.call(aten.mul.Tensor, first, 2)]
        if write:
            build.call(aten.add_.Tensor, build.attribute("weight", torch.ones(2, 3)), 1)
        hidden = build.call(aten.neg.default, hidden)
        again = gathered(build, build.attribute("weight", torch.ones(2, 3)))
        other = gathered(build, build.attribute("other", torch.ones(1, 3)))
        used += [build.call(aten.mul.Tensor, wait, 2) for wait in (again, other)]
        return build, build.module(hidden, *used)

    return make


@pytest.mark.parametrize("placement", ["original", "scheduled"])
@pytest.mark.parametrize("write", [False, True])
def test_attributes_of_one_name_are_one_tensor(write: bool, placement: str) -> None:
    make = attributes(write)
    inputs = make()[0].draw_inputs(RANKS, 11)
    # The graph writes its module's buffer, so every rank and run has a module of its own.
    wanted = run_lockstep([make()[1] for _ in range(RANKS)], inputs, GROUPS)
    for late_reads in (False, True):
        done = [rewrite(make()[1], placement=placement) for _ in range(RANKS)]
        assert done[0].sizes == ([2, 1] if write else [3])
        found = run_lockstep([entry.gm for entry in done], inputs, GROUPS, late_reads=late_reads)
        for before, after in zip(wanted, found, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def late_inputs() -> tuple[GraphBuilder, fx.GraphModule]:
    build = GraphBuilder()
    first = build.tensor("first", (2, 3))
    hidden = build.call(aten.neg.default, first)
    second = build.tensor("second", (1, 3))
    waits = [gathered(build, first), gathered(build, second)]
    return build, build.module(hidden, *[build.call(aten.mul.Tensor, wait, 2) for wait in waits])


@pytest.mark.parametrize("placement", ["original", "scheduled"])
def test_no_collective_is_launched_before_its_input_is_given(placement: str) -> None:
    assert check(late_inputs, placement=placement).sizes == [2]


def own_group_nodes() -> tuple[GraphBuilder, fx.GraphModule]:
    """As tracers leave graphs that are compiled on one rank for all: each collective finds its group anew."""
    build = GraphBuilder()
    params = [build.tensor(f"w{index}", (2, 3)) for index in range(3)]
    mesh = build.opaque("mesh")
    used = []
    for param in params:
        wait = build.wait(build.all_gather(param, RANKS, build.mesh_group(mesh, 0)))
        used.append(build.call(aten.mul.Tensor, wait, 2))
    reduced = [build.wait(build.reduce_scatter(value, "avg", RANKS, build.mesh_group(mesh, 0))) for value in used]
    return build, build.module(*used, *reduced)


@pytest.mark.parametrize("placement", ["original", "scheduled"])
def test_finding_the_group_anew_does_not_keep_collectives_apart(placement: str) -> None:
    build, gm = own_group_nodes()
    assert rewrite(gm, placement=placement).sizes == [3, 3]
    key = ("_dtensor.mesh_get_process_group.default", ("mesh", "0"), ())
    assert_same_results(own_group_nodes()[1], gm, build.draw_inputs(RANKS, 15), {key: GROUPS["dp"]})


def one_attribute_node() -> tuple[GraphBuilder, fx.GraphModule]:
    """One get_attr node, right before the first of the two gathers that read it."""
    build = GraphBuilder()
    hidden, other = build.tensor("hidden", (2,)), build.tensor("other", (1, 3))
    hidden = build.call(aten.neg.default, hidden)
    used = [build.call(aten.mul.Tensor, gathered(build, other), 2)]
    hidden = build.call(aten.neg.default, hidden)
    shard = build.attribute("weight", torch.arange(6.0).reshape(2, 3))
    used += [build.call(aten.mul.Tensor, gathered(build, shard), 2) for _ in range(2)]
    return build, build.module(hidden, *used)


def test_an_attribute_that_two_launches_read_stays_before_both() -> None:
    build, gm = one_attribute_node()
    description = describe_graph(gm, options=size_options())
    other, first, second = description.request.candidates
    assert 0 < other.launch < first.launch
    placements = [
        Placement((0,), other.launch, other.wait),
        Placement((1,), 0, first.wait),
        Placement((2,), other.launch, second.wait),
    ]
    apply_plan(description, Plan(decision=decide(description.request, "size/1", placements)))
    gm.graph.lint()
    assert_same_results(one_attribute_node()[1], gm, build.draw_inputs(RANKS, 16), GROUPS)


def views_before_the_wait() -> tuple[GraphBuilder, fx.GraphModule]:
    build = GraphBuilder()
    params = [build.tensor(f"w{index}", (2, 4)) for index in range(3)]
    for param in params:
        param.meta["param_name"] = param.name
    waits = [gathered(build, param) for param in params]
    views = []
    for wait in waits:
        flat = build.call(aten.view.default, wait, [-1])
        square = build.call(aten.view.default, flat, [8, 4])
        views += [build.call(aten.t.default, square), flat]
    return build, build.module(*[build.call(aten.mul.Tensor, view, 2) for view in views])


def test_views_move_with_the_wait_in_their_order() -> None:
    build, gm = views_before_the_wait()
    order = [node.name for node in gm.graph.nodes if node.target in (aten.view.default, aten.t.default)]
    rewrite(gm)
    moved = [node.name for node in gm.graph.nodes if node.name in order]
    assert moved == order
    assert_same_results(views_before_the_wait()[1], gm, build.draw_inputs(RANKS, 12), GROUPS)


def test_a_bucket_that_would_hold_up_a_reader_is_refused() -> None:
    """A consumer that is no view stands before the new wait: the plan is illegal, and the rule says why."""
    build = GraphBuilder()
    params = [build.tensor(f"w{index}", (2, 3)) for index in range(2)]
    used = [build.call(aten.mul.Tensor, gathered(build, params[0]), 2)]
    late = build.call(aten.mul.Tensor, params[1], 3)
    launch = build.all_gather(late, RANKS, "dp")
    launch.meta |= {"comm_type": "fsdp_all_gather", "fsdp_degree": RANKS}
    used.append(build.call(aten.mul.Tensor, build.wait(launch), 2))
    gm = build.module(*used)
    description = describe_graph(gm, options=size_options())
    request = description.request
    last = max(candidate.earliest_launch for candidate in request.candidates)
    decision = decide(request, "size/1", [Placement((0, 1), last, last)])
    before = str(gm.graph)
    with pytest.raises(IllegalPlan) as refused:
        apply_plan(description, Plan(decision=decision))
    assert refused.value.rule in ("launch-window", "wait-window")
    assert refused.value.members == (0,)
    assert str(gm.graph) == before


def shared_view() -> tuple[GraphBuilder, fx.GraphModule]:
    """A view of one result that a second gather and compute read; it stands right before the second gather."""
    build = GraphBuilder()
    param, hidden = build.tensor("w", (2, 3)), build.tensor("hidden", (2,))
    wait = gathered(build, param)
    for _ in range(3):
        hidden = build.call(aten.neg.default, hidden)
    view = build.call(aten.view.default, wait, [-1])
    deeper = build.call(aten.unsqueeze.default, view, 0)
    launch = build.all_gather(deeper, RANKS, "dp")
    launch.meta |= {"comm_type": "fsdp_all_gather", "fsdp_degree": RANKS}
    used = [build.call(aten.mul.Tensor, value, 2) for value in (build.wait(launch), view, deeper)]
    return build, build.module(hidden, *used)


def test_views_that_a_launch_reads_come_along_when_it_moves_up() -> None:
    build, gm = shared_view()
    description = describe_graph(gm, options=size_options())
    first, second = description.request.candidates
    placements = [
        Placement((0,), first.launch, first.wait, first.launch_order, first.wait_order),
        Placement((1,), second.earliest_launch, second.wait),
    ]
    assert second.earliest_launch < second.launch
    apply_plan(description, Plan(decision=decide(description.request, "size/1", placements)))
    gm.graph.lint()
    assert_same_results(shared_view()[1], gm, build.draw_inputs(RANKS, 13), GROUPS)


def reinterpreted() -> tuple[GraphBuilder, fx.GraphModule]:
    """Results that are read as another dtype."""
    build = GraphBuilder()
    params = [build.tensor(f"w{index}", (1, 4), torch.uint8) for index in range(3)]
    waits = [gathered(build, param) for param in params]
    views = [build.call(aten.view.dtype, wait, torch.bfloat16) for wait in waits]
    return build, build.module(*[build.call(aten.view.dtype, view, torch.uint8) for view in views])


def test_results_may_be_read_as_another_dtype() -> None:
    assert check(reinterpreted).sizes == [3]


def reduced_and_reinterpreted(dtype: torch.dtype) -> Build:
    """Odd numbers of bf16 gradients, of which the even one is read in elements of `dtype` behind an odd one."""

    def make() -> tuple[GraphBuilder, fx.GraphModule]:
        build = GraphBuilder()
        grads = [build.tensor(f"g{count}", (RANKS, count), torch.bfloat16) for count in (3, 2, 5)]
        waits = [build.wait(build.reduce_scatter(grad, "sum", RANKS, "dp")) for grad in grads]
        return build, build.module(waits[0], build.call(aten.view.dtype, waits[1], dtype), waits[2])

    return make


def test_a_reduction_that_is_read_in_wider_elements_stays_out_of_its_bucket() -> None:
    """Behind three bf16 elements its part of the bucket starts where no fp32 view can."""
    done = check(reduced_and_reinterpreted(torch.float32))
    assert done.sizes == [2]
    assert [skipped.rule for skipped in done.description.skipped] == ["wider-view"]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_a_reduction_that_is_read_in_elements_no_wider_is_bucketed(dtype: torch.dtype) -> None:
    assert check(reduced_and_reinterpreted(dtype)).sizes == [3]


def test_waits_stand_where_the_plan_says() -> None:
    build, gm = views_before_the_wait()
    description = describe_graph(gm, options=size_options(placement="scheduled"))
    plan = make_plan(description.request)
    apply_plan(description, plan)
    steps = [step.op for step in plan.decision.steps]
    assert steps == [StepOp.LAUNCH, StepOp.WAIT]
    assert len(launches(gm)) == 1
    assert build is not None


def test_payload_order_is_the_plans() -> None:
    build, gm = views_before_the_wait()
    description = describe_graph(gm, options=size_options())
    decision = make_plan(description.request).decision
    (bucket,) = decision.buckets
    backwards = replace(decision, buckets=(replace(bucket, members=bucket.members[::-1]),))
    apply_plan(description, Plan(decision=backwards))
    (launch,) = launches(gm)
    assert launch.meta["fsdp_bucket_members"] == ["w2", "w1", "w0"]
    assert_same_results(views_before_the_wait()[1], gm, build.draw_inputs(RANKS, 14), GROUPS)
