"""Which collectives are candidates, and by which rule each other one is left alone."""

from __future__ import annotations

import inspect
import re
import warnings
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from bucketplan_client.capture import describe, recognize
from bucketplan_client.capture.binding import Description
from bucketplan_client.capture.describe import describe_graph
from tests.support.fxgraphs import GraphBuilder, aten, c10d, free_storage, prims, unknown_op
from tests.support.rewriting import rules, size_options

RANKS = 4


def described(gm: fx.GraphModule, **arguments: Any) -> Description:
    return describe_graph(gm, options=size_options(), **arguments)


def reduced(build: GraphBuilder, gradient: fx.Node, op: str = "sum") -> tuple[fx.Node, fx.Node]:
    launch = build.reduce_scatter(gradient, op, RANKS, "dp")
    return launch, build.wait(launch)


def set_size(build: GraphBuilder, *nodes: fx.Node) -> None:
    """Give nodes a first dimension that is known at run time only."""
    environment = ShapeEnv()
    with FakeTensorMode(shape_env=environment):
        rows = environment.create_unbacked_symint()
        for node in nodes:
            node.meta["val"] = torch.empty((rows, *build.shape(node)[1:]))


def no_wait(build: GraphBuilder) -> tuple[fx.Node, list[fx.Node]]:
    return build.all_gather(build.tensor("w", (2, 3)), RANKS, "dp"), []


def several_waits(build: GraphBuilder) -> tuple[fx.Node, list[fx.Node]]:
    launch = build.all_gather(build.tensor("w", (2, 3)), RANKS, "dp")
    return launch, [build.wait(launch), build.wait(launch)]


def read_before_wait(build: GraphBuilder) -> tuple[fx.Node, list[fx.Node]]:
    launch = build.all_gather(build.tensor("w", (2, 3)), RANKS, "dp")
    return launch, [build.call(aten.neg.default, launch), build.wait(launch)]


def dead_wait(build: GraphBuilder) -> tuple[fx.Node, list[fx.Node]]:
    launch = build.all_gather(build.tensor("w", (2, 3)), RANKS, "dp")
    build.wait(launch)
    return launch, []


def wait_of_wait(build: GraphBuilder) -> tuple[fx.Node, list[fx.Node]]:
    launch = build.all_gather(build.tensor("w", (2, 3)), RANKS, "dp")
    return launch, [build.wait(build.wait(launch))]


def barrier_inside(build: GraphBuilder) -> tuple[fx.Node, list[fx.Node]]:
    shard, hidden = build.tensor("w", (2, 3)), build.tensor("hidden", (2,))
    launch = build.all_gather(shard, RANKS, "dp")
    fence = build.call(unknown_op, hidden)
    return launch, [build.wait(launch), fence]


def group_size_mismatch(build: GraphBuilder) -> tuple[fx.Node, list[fx.Node]]:
    first, second = build.tensor("w", (2, 3)), build.tensor("v", (2, 3))
    wait = build.wait(build.all_gather(first, RANKS, "dp"))
    launch = build.all_gather(second, 2, "dp")
    return launch, [wait, build.wait(launch)]


def unknown_shape(build: GraphBuilder) -> tuple[fx.Node, list[fx.Node]]:
    launch = build.all_gather(build.tensor("w", (2, 3)), RANKS, "dp")
    wait = build.wait(launch)
    for node in build.graph.nodes:
        node.meta.pop("val", None)
    return launch, [wait]


def symbolic_size(build: GraphBuilder) -> tuple[fx.Node, list[fx.Node]]:
    shard = build.tensor("w", (2, 3))
    launch = build.all_gather(shard, RANKS, "dp")
    wait = build.wait(launch)
    set_size(build, shard, launch, wait)
    return launch, [wait]


def unsupported_dtype(build: GraphBuilder) -> tuple[fx.Node, list[fx.Node]]:
    launch = build.all_gather(build.tensor("w", (2, 3), torch.float4_e2m1fn_x2), RANKS, "dp")
    return launch, [build.wait(launch)]


def unsupported_layout(build: GraphBuilder) -> tuple[fx.Node, list[fx.Node]]:
    shard = build.tensor("w", (2, 3))
    launch = build.all_gather(shard, RANKS, "dp")
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of every sparse tensor
        shard.meta["val"] = torch.sparse_coo_tensor(size=(2, 3))
    return launch, [build.wait(launch)]


def unsupported_reduce_op(build: GraphBuilder) -> tuple[fx.Node, list[fx.Node]]:
    launch, wait = reduced(build, build.tensor("g", (8, 3)), "premul_sum")
    return launch, [wait]


def storage_changed(build: GraphBuilder) -> tuple[fx.Node, list[fx.Node]]:
    launch, wait = reduced(build, build.tensor("g", (8, 3)))
    view = build.call(aten.view.default, wait, [-1])
    build.call(free_storage, view)
    launch.meta["comm_type"] = "fsdp_reduce_scatter"
    return launch, [build.call(aten.neg.default, wait)]


def wider_view(build: GraphBuilder) -> tuple[fx.Node, list[fx.Node]]:
    launch, wait = reduced(build, build.tensor("g", (4, 6), torch.bfloat16))
    return launch, [build.call(aten.view.dtype, build.call(aten.view.default, wait, [6]), torch.float32)]


def absolute_view(build: GraphBuilder) -> tuple[fx.Node, list[fx.Node]]:
    launch, wait = reduced(build, build.tensor("g", (8, 3)))
    launch.meta["comm_type"] = "fsdp_reduce_scatter"
    return launch, [build.call(aten.as_strided.default, wait, [3], [1], 3)]


def shape_not_divisible(build: GraphBuilder) -> tuple[fx.Node, list[fx.Node]]:
    launch, wait = reduced(build, build.tensor("g", (6, 3)))
    return launch, [wait]


def shape_mismatch(build: GraphBuilder) -> tuple[fx.Node, list[fx.Node]]:
    shard = build.tensor("w", (2, 3))
    launch = build.all_gather(shard, RANKS, "dp")
    wait = build.wait(launch)
    wait.meta["val"] = FakeTensor(build.mode, torch.empty(7, 3, device="meta"), torch.device("cpu"))
    return launch, [wait]


def already_bucketed(build: GraphBuilder) -> tuple[fx.Node, list[fx.Node]]:
    launch = build.all_gather(build.tensor("w", (2, 3)), RANKS, "dp")
    launch.meta["fsdp_bucket_id"] = "dp/0/0"
    return launch, [build.wait(launch)]


def device_copy(build: GraphBuilder) -> tuple[fx.Node, list[fx.Node]]:
    moved = build.call(aten._to_copy.default, build.tensor("w", (2, 3)), dtype=torch.float32)
    moved.kwargs = {"device": torch.device("cuda")}
    moved.meta["val"] = FakeTensor(build.mode, build.value[moved], torch.device("cuda"))
    launch = build.all_gather(moved, RANKS, "dp")
    return launch, [build.wait(launch)]


def unknown_group(build: GraphBuilder) -> tuple[fx.Node, list[fx.Node]]:
    launch = build.all_reduce(build.tensor("g", (8, 3)), "sum", "replicas")
    return launch, [build.wait(launch)]


def kind_mismatch(build: GraphBuilder) -> tuple[fx.Node, list[fx.Node]]:
    wait = build.wait(build.all_gather(build.tensor("w", (2, 3)), RANKS, "dp"))
    launch = build.all_reduce(build.tensor("g", (8, 3)), "sum", "dp")
    launch.meta["comm_type"] = "fsdp_all_gather"
    return launch, [wait, build.wait(launch)]


CASES = (
    absolute_view,
    already_bucketed,
    barrier_inside,
    dead_wait,
    device_copy,
    group_size_mismatch,
    kind_mismatch,
    no_wait,
    read_before_wait,
    several_waits,
    shape_mismatch,
    shape_not_divisible,
    storage_changed,
    symbolic_size,
    unknown_group,
    unknown_shape,
    unsupported_dtype,
    unsupported_layout,
    unsupported_reduce_op,
    wait_of_wait,
    wider_view,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_what_is_not_proved_safe_is_left_alone_by_its_rule(case: Any) -> None:
    """Case names are rule names; other collectives of the graph stay candidates."""
    build = GraphBuilder()
    launch, outputs = case(build)
    description = described(build.module(*outputs))
    rule = case.__name__.replace("_", "-")
    assert rules(description) == {launch.name: rule}
    (skipped,) = description.skipped
    assert skipped.reason
    recorded = {fixed.skipped for fixed in description.request.fixed}
    assert rule in recorded, "the service is not told"


WIDER = {
    "copy": lambda build, flat: build.call(aten.view_copy.dtype, flat, torch.float32),
    "method": lambda build, flat: build.method("view", flat, torch.float32),
}


@pytest.mark.parametrize("view", WIDER)
def test_wider_elements_are_seen_in_every_kind_of_view(view: str) -> None:
    build = GraphBuilder()
    launch, wait = reduced(build, build.tensor("g", (4, 6), torch.bfloat16))
    launch.meta["comm_type"] = "fsdp_reduce_scatter"
    wide = WIDER[view](build, build.call(aten.view.default, wait, [6]))
    assert rules(described(build.module(wide))) == {launch.name: "wider-view"}


def test_every_rule_of_the_capture_has_its_case() -> None:
    """Rules are texts in the source; a new one without a case here fails."""
    found = {
        match
        for module in (recognize, describe)
        for match in re.findall(r'(?:return|= \(|= ) ?\(?"([a-z]+(?:-[a-z]+)+)",', inspect.getsource(module))
    }
    covered = {case.__name__.replace("_", "-") for case in CASES} | {"role-not-selected", "excluded"}
    assert found <= covered, found - covered
    assert len(found) > 15, found


def named(source: fx.Node) -> fx.Node:
    source.meta["param_name"] = source.name
    return source


def two_groups() -> tuple[GraphBuilder, fx.GraphModule]:
    build = GraphBuilder()
    params = [named(build.tensor(f"w{index}", (2, 3))) for index in range(4)]
    waits = [build.wait(build.all_gather(param, RANKS, ("dp", "ep")[index % 2])) for index, param in enumerate(params)]
    return build, build.module(*[build.call(aten.neg.default, wait) for wait in waits])


def test_roles_that_were_not_selected_are_left_alone() -> None:
    description = described(two_groups()[1], roles={"dp": "fsdp", "ep": "fsdp_expert"}, only_roles=["fsdp"])
    assert set(rules(description).values()) == {"role-not-selected"}
    assert {candidate.group for candidate in description.request.candidates} == {"fsdp"}


def test_excluded_parameters_are_left_alone() -> None:
    description = described(two_groups()[1], exclude=["w[12]"])
    assert set(rules(description).values()) == {"excluded"}
    assert [candidate.param_name for candidate in description.request.candidates] == ["w0", "w3"]


SOURCES = {
    "parameter": lambda build, w: w,
    "cast": lambda build, w: build.call(aten._to_copy.default, w, dtype=torch.bfloat16),
    "primitive cast": lambda build, w: build.call(prims.convert_element_type.default, w, torch.bfloat16),
    "pad": lambda build, w: build.call(aten.constant_pad_nd.default, w, [0, 0, 0, 2], 0),
    "view": lambda build, w: build.call(aten.view.default, w, [-1]),
    "transposed copy": lambda build, w: build.call(aten.clone.default, build.call(aten.t.default, w)),
    "method": lambda build, w: build.method("contiguous", w),
    "cast, view, pad": lambda build, w: build.call(
        aten.constant_pad_nd.default,
        build.call(aten.view.default, build.call(aten._to_copy.default, w, dtype=torch.bfloat16), [-1]),
        [0, 2],
    ),
}


@pytest.mark.parametrize("form", ["positional", "keyword", "packet"])
@pytest.mark.parametrize("source", SOURCES)
def test_a_gather_of_one_parameter_is_a_candidate(source: str, form: str) -> None:
    build = GraphBuilder()
    shard = build.tensor("w", (2, 4))
    wait = build.wait(build.all_gather(SOURCES[source](build, shard), RANKS, "dp", form=form))
    description = described(build.module(build.call(aten.neg.default, wait)))
    (candidate,) = description.request.candidates
    assert candidate.kind == "fsdp_all_gather"
    assert (candidate.param_name, candidate.ordinal) == (None, 0)
    assert candidate.earliest_launch == 0


def test_what_an_input_is_called_is_no_identity() -> None:
    """Tracers name inputs as they like, on each rank; the position among the inputs is the same everywhere."""

    def make(*names: str) -> Description:
        build = GraphBuilder()
        waits = [build.wait(build.all_gather(build.tensor(name, (2, 4)), RANKS, "dp")) for name in names]
        return described(build.module(*[build.call(aten.neg.default, wait) for wait in waits]))

    first, second = make("arg0_1", "arg1_1"), make("w", "v")
    assert first.signature == second.signature
    assert [(found.param_name, found.ordinal) for found in second.request.candidates] == [(None, 0), (None, 1)]


def test_metadata_of_an_input_names_its_parameter() -> None:
    build = GraphBuilder()
    shard = build.tensor("arg0_1", (2, 4))
    shard.meta["param_name"] = "layers.0.w"
    wait = build.wait(build.all_gather(shard, RANKS, "dp"))
    (candidate,) = described(build.module(build.call(aten.neg.default, wait))).request.candidates
    assert (candidate.param_name, candidate.ordinal) == ("layers.0.w", 0)


def test_a_gather_of_an_attribute_is_a_candidate() -> None:
    build = GraphBuilder()
    build.tensor("x", (2,))
    shard = build.attribute("weight", torch.ones(2, 3))
    wait = build.wait(build.all_gather(shard, RANKS, "dp"))
    description = described(build.module(build.call(aten.neg.default, wait)))
    (candidate,) = description.request.candidates
    assert (candidate.param_name, candidate.ordinal) == ("weight", 1)


NO_PARAMETERS = {
    "computed": lambda build, w, v: build.call(aten.mul.Tensor, w, 2),
    "two parameters": lambda build, w, v: build.call(aten.cat.default, [w, v]),
    "a gathered result": lambda build, w, v: build.wait(build.all_gather(build.call(aten.neg.default, w), 2, "tp")),
}


@pytest.mark.parametrize("source", NO_PARAMETERS)
def test_a_gather_of_anything_else_is_fixed(source: str) -> None:
    build = GraphBuilder()
    w, v = build.tensor("w", (2, 4)), build.tensor("v", (2, 4))
    wait = build.wait(build.all_gather(NO_PARAMETERS[source](build, w, v), RANKS, "dp"))
    description = described(build.module(build.call(aten.neg.default, wait)))
    assert description.request.candidates == ()
    assert description.skipped == ()


ENDS = {
    "output": lambda build, wait, total: [wait],
    "cast": lambda build, wait, total: [build.call(aten._to_copy.default, wait, dtype=torch.float64)],
    "view": lambda build, wait, total: [build.call(aten.slice.Tensor, wait, 0, 0, 1)],
    "accumulation": lambda build, wait, total: [build.call(aten.add.Tensor, total, wait)],
    "accumulation in place": lambda build, wait, total: [build.call(aten.add_.Tensor, total, wait)],
    "scaled": lambda build, wait, total: [build.call(aten.mul.Tensor, wait, 0.25)],
    "copied into a buffer": lambda build, wait, total: [build.call(aten.copy_.default, total, wait)],
}


@pytest.mark.parametrize("form", ["positional", "keyword", "packet"])
@pytest.mark.parametrize("end", ENDS)
def test_a_reduction_that_ends_in_the_output_is_a_candidate(end: str, form: str) -> None:
    build = GraphBuilder()
    gradient, total = build.tensor("g", (8, 3)), build.tensor("total", (2, 3))
    wait = build.wait(build.reduce_scatter(gradient, "avg", RANKS, "dp", form=form))
    (candidate,) = described(build.module(*ENDS[end](build, wait, total))).request.candidates
    assert (candidate.kind, candidate.reduce_op, candidate.ordinal) == ("fsdp_reduce_scatter", "avg", 0)


USES = {
    "sum": lambda build, wait: build.call(aten.sum.default, wait),
    "matrix product": lambda build, wait: build.call(aten.mm.default, wait, build.call(aten.t.default, wait)),
    "product of two": lambda build, wait: build.call(aten.mul.Tensor, wait, build.call(aten.neg.default, wait)),
}


@pytest.mark.parametrize("use", USES)
def test_a_reduction_that_compute_reads_is_fixed(use: str) -> None:
    build = GraphBuilder()
    _, wait = reduced(build, build.tensor("g", (8, 3)))
    description = described(build.module(wait, USES[use](build, wait)))
    assert description.request.candidates == ()
    assert [fixed.kind for fixed in description.request.fixed] == ["reduce_scatter"]


def test_annotations_win_over_recognition() -> None:
    build = GraphBuilder()
    computed = build.call(aten.mul.Tensor, build.tensor("w", (2, 4)), 2)
    launch = build.all_gather(computed, RANKS, "dp")
    launch.meta |= {
        "comm_type": "fsdp_all_gather_backward",
        "comm_group": "fsdp",
        "fsdp_degree": RANKS,
        "param_name": "layers.0.w",
        "state_idx": 7,
    }
    (candidate,) = described(build.module(build.call(aten.neg.default, build.wait(launch)))).request.candidates
    assert candidate.kind == "fsdp_all_gather_backward"
    assert candidate.backward
    assert (candidate.group, candidate.param_name, candidate.state_idx, candidate.ordinal) == (
        "fsdp",
        "layers.0.w",
        7,
        7,
    )
    assert candidate.module_fqns == ("layers.0",)
    assert candidate.earliest_launch == 1


def test_reductions_of_tensor_parallel_groups_are_fixed() -> None:
    """Norm gradients are reduced over the group that carries activations, and look like replicated gradients."""
    build = GraphBuilder()
    gradient, hidden = build.tensor("g", (8, 3)), build.tensor("hidden", (2, 3))
    activations = build.wait(build.all_gather(build.call(aten.neg.default, hidden), RANKS, "tp"))
    norm = build.wait(build.all_reduce(gradient, "sum", "tp"))
    description = described(build.module(build.call(aten.sum.default, activations), norm))
    assert description.request.candidates == ()
    assert len(description.request.fixed) == 2


def test_a_graph_without_collectives_says_why_nothing_is_bucketed() -> None:
    build = GraphBuilder()
    description = described(build.module(build.call(aten.neg.default, build.tensor("x", (2,)))))
    assert description.request.candidates == ()
    why = description.why_nothing()
    assert why is not None
    assert "FSDP2" in why
    assert "fully_shard" in why


def test_what_held_everything_back_is_named() -> None:
    build = GraphBuilder()
    _, outputs = several_waits(build)
    why = described(build.module(*outputs)).why_nothing()
    assert why is not None
    assert "several-waits" in why


def test_collectives_with_lists_and_in_place_are_never_candidates() -> None:
    build = GraphBuilder()
    first, second = build.tensor("w", (2, 3)), build.tensor("v", (8, 3))
    many = build.graph.call_function(c10d.all_gather_into_tensor_coalesced.default, ([first], RANKS, "dp"))
    in_place = build.graph.call_function(c10d.all_reduce_.default, (second, "sum", "dp"))
    description = described(build.module(many, in_place))
    assert description.request.candidates == ()
    assert [fixed.kind for fixed in description.request.fixed] == ["all_gather_coalesced"]


def test_an_all_reduce_that_comes_first_says_nothing_about_the_size_of_its_group() -> None:
    build = GraphBuilder()
    replicated = build.wait(build.all_reduce(build.tensor("r", (8, 3)), "sum", "dp"))
    _, first = reduced(build, build.tensor("g", (8, 3)))
    _, second = reduced(build, build.tensor("h", (8, 3)))
    description = described(build.module(replicated, first, second), phase="backward")
    assert [candidate.kind for candidate in description.request.candidates] == [
        "dp_all_reduce",
        "fsdp_reduce_scatter",
        "fsdp_reduce_scatter",
    ]
    assert [candidate.group_size for candidate in description.request.candidates] == [RANKS] * 3


def test_outputs_by_name_are_outputs() -> None:
    build = GraphBuilder()
    _, first = reduced(build, build.tensor("g", (8, 3)))
    _, second = reduced(build, build.tensor("h", (8, 3)))
    module = build.module(first, second)
    module.graph.output_node().args = ({"loss": None, "grads": {"w": first, "v": (second,)}},)
    assert [candidate.ordinal for candidate in described(module).request.candidates] == [1, 2]


def test_groups_resolved_by_keyword_are_as_many_as_their_dimensions() -> None:
    build = GraphBuilder()
    mesh = build.opaque("mesh")
    groups = [build.mesh_group(mesh, dim) for dim in (0, 1)]
    for dim, group in enumerate(groups):
        group.args, group.kwargs = (mesh,), {"dim": dim}
    waits = [build.wait(build.all_gather(build.tensor(f"w{n}", (2, 3)), RANKS, groups[n % 2])) for n in range(4)]
    description = described(build.module(*[build.call(aten.neg.default, wait) for wait in waits]))
    assert [candidate.group for candidate in description.request.candidates] == ["g0", "g1", "g0", "g1"]


def test_a_role_that_looks_like_a_numbered_one_stays_apart() -> None:
    build = GraphBuilder()
    waits = [build.wait(build.all_gather(build.tensor(f"w_{name}", (2, 3)), RANKS, name)) for name in "abc"]
    module = build.module(*[build.call(aten.neg.default, wait) for wait in waits])
    description = described(module, roles={"a": "fsdp", "b": "fsdp#2", "c": "fsdp"})
    assert [candidate.group for candidate in description.request.candidates] == ["fsdp", "fsdp#2", "fsdp#3"]


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("L['self'].layers.0", "layers.0"),
        ("L['self'].layers[0]", "layers.0"),
        ("self.layers.0", "layers.0"),
        ("L['self']", None),
        ("self_attn.q_proj", "self_attn.q_proj"),
        ("layers.0.self_attn", "layers.0.self_attn"),
        ("selfish", "selfish"),
    ],
)
def test_only_the_model_itself_is_taken_off_a_module_path(path: str, module: str | None) -> None:
    build = GraphBuilder()
    launch = build.all_gather(build.tensor("w", (2, 3)), RANKS, "dp")
    launch.meta["nn_module_stack"] = {"": (path, "Linear")}
    (candidate,) = described(build.module(build.call(aten.neg.default, build.wait(launch)))).request.candidates
    assert candidate.module_fqns == (() if module is None else (module,))
