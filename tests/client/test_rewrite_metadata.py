"""The metadata that later passes read, key by key, on graphs as hand-written sharding passes annotate them.

Such graphs name operators by their packets, and the collectives that they insert carry no fake values.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from bucketplan_client.rewrite.errors import RewriteError
from bucketplan_core.collectives import ALL_GATHER_KINDS, REDUCE_KINDS
from tests.support.fxgraphs import GraphBuilder, aten, c10d, free_storage
from tests.support.rewriting import Rewritten, assert_same_results, created_nodes, launches, rewrite

RANKS = 4
GROUPS = {"dp": [[0, 1, 2, 3]], "rep": [[0, 1, 2, 3]]}
SHAPES = ((2, 3), (1, 5), (3,))


class Annotated:
    """A joint graph: gathers before use, storage freed after, gathered again for the backward, gradients reduced."""

    def __init__(self, *, with_values: bool = False) -> None:
        self.build = build = GraphBuilder()
        self.params = [build.tensor(f"p{index}", shape) for index, shape in enumerate(SHAPES)]
        self.collectives: list[fx.Node] = []
        forward = [self.gather(index, "fsdp_all_gather") for index in range(len(SHAPES))]
        used = [build.call(aten.mul.Tensor, wait, 2) for wait in forward]
        self.frees = [build.call(free_storage, wait) for wait in forward]
        for node, wait in zip((*used, *self.frees), (*forward, *forward), strict=True):
            node.meta["fsdp_ag_node"] = wait.all_input_nodes[0].name
        self.used = used
        backward = [self.gather(index, "fsdp_all_gather_backward") for index in range(len(SHAPES))]
        self.gradients = [build.call(aten.mul.Tensor, wait, value) for wait, value in zip(backward, used, strict=True)]
        self.layouts = [build.method("contiguous", gradient) for gradient in self.gradients]
        reduced = [self.reduce(index, layout) for index, layout in enumerate(self.layouts)]
        replicated = [self.replicate(index, value) for index, value in enumerate(reduced)]
        self.gm = build.module(*used, *replicated)
        if not with_values:
            for node in (*self.collectives, *self.layouts, *forward, *backward, *reduced, *replicated):
                node.meta.pop("val", None)

    def gather(self, index: int, kind: str) -> fx.Node:
        launch = self.build.all_gather(self.params[index], RANKS, "dp", form="packet")
        self.annotate(launch, kind, index, "fsdp")
        if kind == "fsdp_all_gather":
            launch.meta["state_idx"] = index
        else:
            launch.meta["autograd_backward"] = True
        return self.wait(launch)

    def reduce(self, index: int, gradient: fx.Node) -> fx.Node:
        launch = self.build.reduce_scatter(gradient, "avg", RANKS, "dp", form="packet")
        self.annotate(launch, "fsdp_reduce_scatter", index, "fsdp")
        launch.meta |= {"state_idx": index, "autograd_backward": True}
        return self.wait(launch)

    def replicate(self, index: int, gradient: fx.Node) -> fx.Node:
        launch = self.build.all_reduce(gradient, "avg", "rep", form="packet")
        self.annotate(launch, "dp_all_reduce", index, "replicas")
        launch.meta |= {"state_idx": index, "autograd_backward": True}
        return self.wait(launch)

    def wait(self, launch: fx.Node) -> fx.Node:
        wait = self.build.wait(launch, form="packet")
        wait.meta["wait_for"] = launch.name
        return wait

    def annotate(self, launch: fx.Node, kind: str, index: int, role: str) -> None:
        self.collectives.append(launch)
        launch.meta |= {
            "comm_type": kind,
            "comm_group": role,
            "fsdp_degree": RANKS,
            "param_name": f"layers.{index}.weight",
        }


KINDS = ("fsdp_all_gather", "fsdp_all_gather_backward", "fsdp_reduce_scatter", "dp_all_reduce")


@pytest.fixture(params=[False, True], ids=["no-values", "values"])
def case(request: pytest.FixtureRequest) -> tuple[Annotated, Rewritten, list[fx.Node]]:
    annotated = Annotated(with_values=request.param)
    before = list(annotated.gm.graph.nodes)
    done = rewrite(annotated.gm)
    assert done.sizes == [3, 3, 3, 3]
    return annotated, done, created_nodes(annotated.gm, before)


Case = tuple[Annotated, Rewritten, list[fx.Node]]


def launch_of(done: Rewritten, kind: str) -> fx.Node:
    (found,) = [launch for launch in launches(done.gm) if launch.meta["comm_type"] == kind]
    return found


def bucket_of(done: Rewritten, kind: str) -> str:
    return str(launch_of(done, kind).meta["fsdp_bucket_id"])


def created_for(case: Case, kind: str) -> list[fx.Node]:
    _, done, created = case
    bucket = bucket_of(done, kind)
    return [node for node in created if node.meta["fsdp_bucket_id"] == bucket]


def test_every_created_node_names_its_bucket_and_modules(case: Case) -> None:
    _, _, created = case
    assert len(created) > 4 * len(SHAPES)
    for node in created:
        assert isinstance(node.meta["fsdp_bucket_id"], str)
        assert node.meta["fsdp_bucket_module_fqns"] == ("layers.0", "layers.1", "layers.2")
        assert type(node.meta["autograd_backward"]) is bool
    for kind, backward in zip(KINDS, (False, True, True, True), strict=True):
        assert {node.meta["autograd_backward"] for node in created_for(case, kind)} == {backward}


def test_created_nodes_have_values_where_the_graph_has_them(case: Case) -> None:
    annotated, _, created = case
    has_values = "val" in annotated.collectives[0].meta or "val" in annotated.layouts[0].meta
    assert {"val" in node.meta for node in created} == {has_values}


@pytest.mark.parametrize("kind", KINDS)
def test_packing_nodes_are_marked_as_preparation(case: Case, kind: str) -> None:
    nodes = created_for(case, kind)
    launch = launch_of(case[1], kind)
    packing = [node for node in nodes if node < launch]
    assert len(packing) >= len(SHAPES) + 1
    assert {node.meta.get("fsdp_bucket_prepare") for node in packing} == {bucket_of(case[1], kind)}
    assert not any("fsdp_bucket_prepare" in node.meta for node in nodes if node not in packing)


@pytest.mark.parametrize("kind", KINDS)
def test_the_launch_describes_the_bucket(case: Case, kind: str) -> None:
    annotated, done, _ = case
    launch = launch_of(done, kind)
    shards = sum(torch.Size(shape).numel() for shape in SHAPES)
    sizes = {
        "fsdp_all_gather": (shards, shards * RANKS),
        "fsdp_all_gather_backward": (shards, shards * RANKS),
        "fsdp_reduce_scatter": (shards * RANKS, shards),
        "dp_all_reduce": (shards, shards),
    }
    given, result = sizes[kind]
    assert launch.meta["comm_type"] == kind
    assert launch.meta["comm_group"] == ("replicas" if kind == "dp_all_reduce" else "fsdp")
    assert launch.meta["fsdp_degree"] == RANKS
    assert launch.meta["fsdp_bucket_members"] == [f"layers.{index}.weight" for index in range(3)]
    spec = launch.meta["fsdp_bucket_spec"]
    assert (spec["input_shape"], spec["output_shape"], spec["dtype"]) == ((given,), (result,), torch.float32)
    assert spec["device"] == torch.device("cpu")
    is_gather = kind.startswith("fsdp_all_gather")
    for key in ("fsdp_unsharded_nbytes", "fsdp_bucket_workspace_nbytes"):
        assert launch.meta.get(key) == (shards * RANKS * 4 if is_gather else None)
    assert launch.target in (
        c10d.all_gather_into_tensor.default,
        c10d.reduce_scatter_tensor.default,
        c10d.all_reduce.default,
    )
    local_name = "rep" if kind == "dp_all_reduce" else "dp"
    assert launch.args[-1] == local_name
    assert annotated.gm is done.gm


@pytest.mark.parametrize("kind", KINDS)
def test_the_wait_names_its_launch(case: Case, kind: str) -> None:
    launch = launch_of(case[1], kind)
    (wait,) = launch.users
    assert wait.meta["wait_for"] == launch.name


@pytest.mark.parametrize("kind", KINDS)
def test_gathers_copy_out_and_reductions_do_not(case: Case, kind: str) -> None:
    copies = [node for node in created_for(case, kind) if "fsdp_bucket_copy_out" in node.meta]
    if not kind.startswith("fsdp_all_gather"):
        assert copies == []
        return
    assert [node.target for node in copies] == [aten.clone.default] * 3
    assert {node.meta["fsdp_bucket_copy_out"] for node in copies} == {bucket_of(case[1], kind)}


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_name_their_parameter(case: Case, kind: str) -> None:
    outputs = [node for node in created_for(case, kind) if "param_name" in node.meta]
    assert [node.meta["param_name"] for node in outputs] == [f"layers.{index}.weight" for index in range(3)]
    # Gathers for the backward carry no state index, and so does what they become.
    known = kind != "fsdp_all_gather_backward"
    assert [node.meta["state_idx"] for node in outputs] == ([0, 1, 2] if known else [None] * 3)


def test_layout_nodes_of_reductions_are_exposed(case: Case) -> None:
    annotated, done, _ = case
    launch_names = [launch.name for launch in annotated.collectives if "reduce_scatter" in launch.name]
    for layout, name in zip(annotated.layouts, launch_names, strict=True):
        assert layout.op == "call_function"
        assert layout.target in (aten.contiguous.default, aten.contiguous)
        assert layout.meta["fsdp_reduce_scatter_prepare"] == name
        assert layout.meta["fsdp_bucket_prepare"] == bucket_of(done, "fsdp_reduce_scatter")
        assert layout.meta["fsdp_bucket_id"] == bucket_of(done, "fsdp_reduce_scatter")
        assert layout.meta["autograd_backward"] is True


def test_references_to_removed_gathers_name_the_bucket(case: Case) -> None:
    annotated, done, _ = case
    launch = launch_of(done, "fsdp_all_gather")
    assert {node.meta["fsdp_ag_node"] for node in (*annotated.used, *annotated.frees)} == {launch.name}


def test_nodes_that_free_storage_free_one_member_each(case: Case) -> None:
    annotated, done, _ = case
    freed = [node.args[0] for node in annotated.frees]
    assert len(set(freed)) == 3
    assert all(node.meta["param_name"] == f"layers.{index}.weight" for index, node in enumerate(freed))
    original = Annotated().gm
    assert_same_results(original, done.gm, annotated.build.draw_inputs(RANKS, 3), GROUPS)


def test_statistics_count_what_was_done(case: Case) -> None:
    _, done, _ = case
    shards = sum(torch.Size(shape).numel() for shape in SHAPES) * 4
    assert done.gm.meta["fsdp_ag_bucketing"] == {
        "buckets": 2,
        "original_collectives": 6,
        "copy_out_bytes": 2 * shards * RANKS,
        "ag_collectives_before": 6,
        "ag_collectives_after": 2,
    }
    assert done.gm.meta["fsdp_rs_bucketing"] == {
        "buckets": 1,
        "original_collectives": 3,
        "packed_input_bytes": shards * RANKS,
        "rs_collectives_before": 3,
        "rs_collectives_after": 1,
    }
    assert done.gm.meta["dp_ar_bucketing"] == {
        "buckets": 1,
        "original_collectives": 3,
        "packed_input_bytes": shards,
        "ar_collectives_before": 3,
        "ar_collectives_after": 1,
    }


def test_statistics_of_a_plan_without_buckets_are_zero() -> None:
    gm = Annotated().gm
    rewrite(gm, bucket_cap_bytes=1, first_bucket_cap_bytes=1)
    assert gm.meta["fsdp_ag_bucketing"] == {
        "buckets": 0,
        "original_collectives": 0,
        "copy_out_bytes": 0,
        "ag_collectives_before": 6,
        "ag_collectives_after": 6,
    }


@pytest.mark.parametrize(
    ("kinds", "published"),
    [(ALL_GATHER_KINDS, {"fsdp_ag_bucketing"}), (REDUCE_KINDS, {"fsdp_rs_bucketing", "dp_ar_bucketing"})],
)
def test_a_restricted_application_publishes_its_own_statistics(kinds: Any, published: set[str]) -> None:
    gm = Annotated().gm
    rewrite(gm, kinds=kinds)
    assert {key for key in gm.meta if key.endswith("_bucketing")} == published


def test_provenance_is_one_record_for_all_nodes_of_a_bucket(case: Case) -> None:
    nodes = created_for(case, "fsdp_all_gather")
    assert len({id(node.meta["fsdp_bucket_provenance"]) for node in nodes}) == 1


def test_a_reference_may_be_the_node_itself() -> None:
    annotated = Annotated()
    annotated.used[0].meta["fsdp_ag_node"] = annotated.collectives[0]
    done = rewrite(annotated.gm)
    assert annotated.used[0].meta["fsdp_ag_node"] is launch_of(done, "fsdp_all_gather")


def test_traces_and_module_stacks_of_the_members_are_kept() -> None:
    annotated = Annotated()
    for index, launch in enumerate(annotated.collectives[:3]):
        launch.meta["stack_trace"] = f"line {index}"
        launch.meta["nn_module_stack"] = {"": (f"layers.{index}", "Linear")}
    done = rewrite(annotated.gm)
    launch = launch_of(done, "fsdp_all_gather")
    assert launch.meta["stack_trace"] == "line 0"
    assert [entry["stack_trace"] for entry in launch.meta["fsdp_bucket_provenance"]] == ["line 0", "line 1", "line 2"]
    stacks = [entry["nn_module_stack"] for entry in launch.meta["fsdp_bucket_provenance"]]
    assert stacks == [{"": (f"layers.{index}", "Linear")} for index in range(3)]


def test_half_of_a_chain_of_reductions_cannot_be_applied() -> None:
    """The reduce-scatters of the plan end where the all-reduces of the plan begin, not where the graph has them."""
    annotated = Annotated()
    before = str(annotated.gm.graph)
    with pytest.raises(RewriteError, match="undone"):
        rewrite(annotated.gm, kinds=("fsdp_reduce_scatter",))
    assert str(annotated.gm.graph) == before
    assert annotated.gm.meta == {}
