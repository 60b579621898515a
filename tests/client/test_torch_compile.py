"""The torch.compile hook without compiling: what it refuses, what its cache key covers, what it leaves behind."""

from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo.config as dynamo_config
import torch._inductor.config as inductor_config
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils.checkpoint import CheckpointPolicy

from bucketplan_client.capture.ops import packet_of
from bucketplan_client.errors import PassFailed
from bucketplan_client.inductor_options import INDUCTOR_SETTINGS
from bucketplan_client.passes import LocalPlans
from bucketplan_client.reshard import mark_gathers
from bucketplan_client.testing import InMemoryPlanServer
from bucketplan_client.torch_compile import BucketingPass, CompileConflict, graph_phase, install
from bucketplan_core.collectives import Options
from tests.support.paths import ROOT

c10d = torch.ops._c10d_functional
aten = torch.ops.aten
SIZE = Options(strategy="size", planner="size/1", placement="scheduled")


def gathers(num_params: int = 4, *, size: int = 2) -> fx.GraphModule:
    """`num_params` gathered parameters, each read by one product."""
    graph = fx.Graph()
    value = graph.placeholder("primals_1")
    value.meta["val"] = torch.empty(4, 4, device="meta")
    params = [graph.placeholder(f"primals_{index + 2}") for index in range(num_params)]
    for param in params:
        param.meta["val"] = torch.empty(2, 4, device="meta")
        cast = graph.call_function(aten._to_copy.default, (param,), {"dtype": torch.bfloat16})
        launch = graph.call_function(c10d.all_gather_into_tensor.default, (cast, size, "0"))
        wait = graph.call_function(c10d.wait_tensor.default, (launch,))
        transposed = graph.call_function(aten.t.default, (wait,))
        value = graph.call_function(aten.mm.default, (value, transposed))
        cast.meta["val"] = torch.empty(2, 4, dtype=torch.bfloat16, device="meta")
        for node in (launch, wait, transposed, value):
            node.meta["val"] = torch.empty(4, 4, dtype=torch.bfloat16, device="meta")
    graph.output((value,))
    return fx.GraphModule(torch.nn.Module(), graph)


def launches(gm: fx.GraphModule) -> int:
    return sum(packet_of(node) is c10d.all_gather_into_tensor for node in gm.graph.nodes)


class OtherPass(CustomGraphPass):
    def __call__(self, graph):
        self.seen = graph

    def uuid(self):
        return "other"


class TestInstall:
    def test_every_option_is_put_back(self):
        names = [*INDUCTOR_SETTINGS, "post_grad_custom_post_pass", "joint_custom_post_pass"]
        before = [getattr(inductor_config, name) for name in names]
        limit = dynamo_config.fail_on_recompile_limit_hit
        with install(options=SIZE, reshard_after_forward=True):
            assert all(getattr(inductor_config, name) is value for name, value in INDUCTOR_SETTINGS.items())
            assert dynamo_config.fail_on_recompile_limit_hit is True
            assert inductor_config.joint_custom_post_pass is not None
        assert [getattr(inductor_config, name) for name in names] == before
        assert dynamo_config.fail_on_recompile_limit_hit == limit

    def test_a_pass_that_is_installed_runs_first(self):
        other = OtherPass()
        with inductor_config.patch(post_grad_custom_post_pass=other):
            with install(options=SIZE) as installed:
                assert tuple(inductor_config.post_grad_custom_post_pass) == (other, installed.bucketing)
            assert inductor_config.post_grad_custom_post_pass is other

    def test_copies_of_the_options_hold_the_same_pass(self):
        with InMemoryPlanServer().client() as client, install(client, options=SIZE, epoch="e") as installed:
            assert copy.deepcopy(inductor_config.post_grad_custom_post_pass) is installed.bucketing

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("bucket_all_gathers_fx", "all"),
            ("bucket_reduce_scatters_fx", "all"),
            ("bucket_all_reduces_fx", "all"),
            ("dedup_reduce_scatters", True),
            ("_fuse_ddp_communication", True),
            ("aten_distributed_optimizations.enable_overlap_scheduling", True),
            ("aten_distributed_optimizations.collective_bucketing", True),
        ],
    )
    def test_inductors_own_bucketing_is_refused(self, option, value):
        with inductor_config.patch({option: value}):
            with pytest.raises(CompileConflict) as caught:
                install(options=SIZE)
            assert caught.value.option == f"torch._inductor.config.{option}"
            assert caught.value.value == value
        assert inductor_config.post_grad_custom_post_pass is None

    def test_suppressed_errors_are_refused(self):
        with dynamo_config.patch(suppress_errors=True), pytest.raises(CompileConflict, match="suppress_errors"):
            install(options=SIZE)

    def test_plans_from_outside_need_an_epoch(self):
        with InMemoryPlanServer().client() as client, pytest.raises(CompileConflict, match="epoch"):
            install(client, options=SIZE)

    def test_an_option_set_back_later_fails_the_pass(self):
        gm = gathers()
        with install(options=SIZE, on_error="raise") as installed:
            with inductor_config.patch(allow_buffer_reuse=True), pytest.raises(CompileConflict, match="set after"):
                installed.bucketing(gm.graph)
            assert launches(gm) == 4
            installed.bucketing(gm.graph)
            assert launches(gm) == 1


class TestCacheKey:
    def key(self, **changes):
        arguments = {"options": SIZE, "epoch": "e1", "roles": {"0": "fsdp"}} | changes
        return BucketingPass(LocalPlans(), **arguments)

    @pytest.mark.parametrize(
        "changes",
        [
            {"epoch": "e2"},
            {"options": replace(SIZE, bucket_cap_bytes=1)},
            {"mode": "unbucketed"},
            {"roles": {"0": "dense"}},
            {"scopes": [SimpleNamespace(name="a", param_names=frozenset({"a.weight"}))]},
            {"only_roles": ["fsdp"]},
            {"exclude": ["*.bias"]},
            {"compute_ops": ["mine::*"]},
            {"reshard": ()},
        ],
        ids=lambda changes: next(iter(changes)),
    )
    def test_whatever_changes_the_result_changes_the_key(self, changes):
        assert self.key().uuid() == self.key().uuid()
        assert self.key().fingerprint != self.key(**changes).fingerprint
        assert self.key().uuid() != self.key(**changes).uuid()

    @pytest.mark.parametrize("version", ["CAPTURE_VERSION", "REWRITER_VERSION", "SCHEMA_VERSION"])
    def test_versions_are_in_the_key(self, version, monkeypatch):
        before = self.key().uuid()
        monkeypatch.setattr(f"bucketplan_client.torch_compile.{version}", 99)
        assert self.key().uuid() != before

    def test_ranks_agree_although_torch_names_their_groups_differently(self):
        one, other = self.key(roles={"133": "fsdp"}), self.key(roles={"134": "fsdp"})
        assert one.fingerprint == other.fingerprint
        assert one.uuid() != other.uuid(), "a cache shared by ranks must tell their groups apart"

    def test_the_order_of_unordered_options_does_not_matter(self):
        one = self.key(exclude=["a", "b"], roles={"1": "x", "2": "y"})
        other = self.key(exclude=["b", "a"], roles={"2": "y", "1": "x"})
        assert one.uuid() == other.uuid()


class TestPass:
    def test_unbucketed_attempts_leave_graphs_alone(self):
        gm = gathers()
        with install(options=SIZE, mode="unbucketed") as installed:
            installed.bucketing(gm.graph)
        assert launches(gm) == 4
        assert list(installed.graphs) == []

    def test_disabling_by_environment_is_part_of_the_key(self, monkeypatch):
        with install(options=SIZE) as installed:
            before = installed.bucketing.uuid()
        monkeypatch.setenv("BUCKETPLAN_DISABLE", "1")
        with install(options=SIZE) as installed:
            assert installed.bucketing.uuid() != before

    def test_a_failing_plan_source_leaves_the_graph_and_says_at_which_step(self):
        class Broken:
            def plan(self, request, profile=None):
                raise RuntimeError("no plan today")

        gm = gathers()
        installed = install(Broken(), options=SIZE, epoch="e", on_error="raise")
        with installed, pytest.raises(PassFailed, match="no plan today") as caught:
            installed.bucketing(gm.graph)
        assert caught.value.step == "plan"
        assert launches(gm) == 4

    def test_graphs_are_told_apart_by_their_tangents(self):
        gm = gathers()
        assert graph_phase(gm.graph) == "forward"
        with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
            gm.graph.placeholder("tangents_1")
        assert graph_phase(gm.graph) == "backward"

    def test_what_was_done_is_recorded(self):
        done = []
        with install(options=SIZE, on_error="raise", on_graph=done.append) as installed:
            installed.bucketing(gathers().graph)
        (graph,) = installed.graphs
        assert done == [graph]
        assert (graph.num_candidates, graph.num_launches) == (4, 1)
        assert graph.plan is not None
        assert graph.plan.decision.signature == graph.signature
        assert graph.slot.endswith("/forward")
        assert graph.statistics["fsdp_ag_bucketing"]["buckets"] == 1


def test_gathers_are_marked_with_their_casts_and_views():
    gm = gathers(2)
    assert mark_gathers(gm.graph, keep_gathered=("primals_3",)) == 1
    marked = [node for node in gm.graph.nodes if node.meta.get("recompute") is CheckpointPolicy.MUST_RECOMPUTE]
    assert [packet_of(node) for node in marked] == [
        aten._to_copy,
        c10d.all_gather_into_tensor,
        c10d.wait_tensor,
        aten.t,
    ]
    assert marked[0].all_input_nodes[0].name == "primals_2", "the other parameter is kept gathered"
    assert len({node.meta["ac_graph_id"] for node in marked}) == 1


FAILING_RANK = """
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
from bucketplan_client.torch_compile import install
from tests.client.test_torch_compile import SIZE, gathers
class Broken:
    def plan(self, request, profile=None):
        raise RuntimeError("no plan today")
try:
    with install(Broken(), options=SIZE, epoch="e") as installed:
        installed.bucketing(gathers().graph)
except Exception:
    print("the rank went on")
"""


def test_a_rank_whose_pass_fails_ends_instead_of_training_alone():
    ended = subprocess.run(
        [sys.executable, "-c", FAILING_RANK], capture_output=True, text=True, cwd=ROOT, timeout=300, check=False
    )
    assert ended.returncode == 70, ended.stderr
    assert "no plan today" in ended.stderr
    assert "rank 1" in ended.stderr
    assert "the rank went on" not in ended.stdout
