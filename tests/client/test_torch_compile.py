"""The torch.compile hook without compiling: what it refuses, what its cache key covers, what it leaves behind."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo.config as dynamo_config
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch.utils.checkpoint import CheckpointPolicy

from bucketplan_client.capture.ops import packet_of
from bucketplan_client.errors import PassFailed
from bucketplan_client.inductor_options import INDUCTOR_SETTINGS, hook_without, passes_of
from bucketplan_client.passes import LocalPlans
from bucketplan_client.reshard import mark_gathers
from bucketplan_client.testing import InMemoryPlanServer
from bucketplan_client.torch_compile import (
    BucketingPass,
    CompileConflict,
    ReshardPass,
    graph_phase,
    install,
)
from bucketplan_core.groups import group_digests
from tests.support.hook_graphs import SIZE, OtherPass, gathers, launches
from tests.support.paths import ROOT

c10d = torch.ops._c10d_functional
aten = torch.ops.aten


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

    def test_reshard_marks_run_behind_what_the_joint_hook_holds(self):
        other = OtherPass()
        with inductor_config.patch(joint_custom_post_pass=other):
            with install(options=SIZE, reshard_after_forward=True):
                first, second = inductor_config.joint_custom_post_pass
                assert first is other
                assert isinstance(second, ReshardPass)
            assert inductor_config.joint_custom_post_pass is other

    def test_the_hook_before_inductors_passes_is_left_alone(self):
        other = OtherPass()
        with inductor_config.patch(post_grad_custom_pre_pass=other), install(options=SIZE) as installed:
            assert inductor_config.post_grad_custom_pre_pass is other
            assert inductor_config.post_grad_custom_post_pass is installed.bucketing

    def test_several_passes_that_are_installed_keep_their_order(self):
        others = (OtherPass(), OtherPass())
        with inductor_config.patch(post_grad_custom_post_pass=others), install(options=SIZE) as installed:
            assert tuple(inductor_config.post_grad_custom_post_pass) == (*others, installed.bucketing)

    def test_inductor_runs_the_installed_pass_and_then_ours(self):
        """On the graph that Inductor itself hands to its hooks."""
        seen = []

        class Recording(OtherPass):
            def __call__(self, graph):
                seen.append(("theirs", len(graph.nodes)))

        with (
            inductor_config.patch(post_grad_custom_post_pass=Recording(), fx_graph_cache=False),
            functorch_config.patch(enable_autograd_cache=False),
            install(options=SIZE, on_error="raise", on_graph=lambda graph: seen.append(("ours", graph.num_candidates))),
        ):
            torch._dynamo.reset()
            torch.compile(lambda x: x.sin() + 1, backend="inductor")(torch.ones(4))
        torch._dynamo.reset()
        assert [name for name, _ in seen] == ["theirs", "ours"]

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


class TestInTurn:
    """How passes are chained where torch takes a single one only."""

    @pytest.fixture
    def chained(self, monkeypatch):
        monkeypatch.setattr("bucketplan_client.torch_compile.custom_graph_pass", SimpleNamespace())

        with contextlib.ExitStack() as until_the_end:

            def chain(first):
                until_the_end.enter_context(inductor_config.patch(post_grad_custom_post_pass=first))
                installed = until_the_end.enter_context(install(options=SIZE))
                return inductor_config.post_grad_custom_post_pass, installed.bucketing

            yield chain

    def test_one_pass_alone_needs_no_chain(self, chained):
        hook, ours = chained(None)
        assert hook is ours

    def test_both_run_the_installed_one_on_the_graph_as_it_was(self, chained):
        counted = []

        class Counting(OtherPass):
            def __call__(self, graph):
                counted.append(launches(graph.owning_module))

        hook, _ = chained(Counting())
        gm = gathers()
        hook(gm.graph)
        assert counted == [4]
        assert launches(gm) == 1

    def test_the_key_is_that_of_both(self, chained):
        hook, ours = chained(OtherPass())
        assert hook.uuid() == ("other", ours.uuid())

    def test_a_pass_without_identity_keeps_graphs_out_of_the_cache(self, chained):
        hook, _ = chained(lambda graph: None)
        assert hook.uuid() is None

    def test_a_second_installation_is_seen_within_the_chain(self, chained):
        hook, ours = chained(OtherPass())
        assert passes_of(hook)[1] is ours
        contextvars.Context().run(self.refuse_beside, hook)

    def refuse_beside(self, hook):
        """In a context without an installation, where only the hook tells."""
        with inductor_config.patch(post_grad_custom_post_pass=hook), pytest.raises(CompileConflict, match="BucketingP"):
            install(options=SIZE)

    def test_a_chain_that_was_put_back_is_rid_of_what_was_removed(self, chained):
        other = OtherPass()
        hook, ours = chained(other)
        ours.removed = True
        assert hook_without(hook, lambda one: one is ours) is other
        assert hook_without((hook, ours), lambda one: one is ours) == (other,)
        ours.removed = False

    def test_it_stays_itself_in_copies_of_the_options(self, chained):
        hook, _ = chained(OtherPass())
        assert copy.deepcopy(hook) is hook


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
            {"topology": {"fsdp": 2}},
            {"compare": lambda digests: None},
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


class TestFirstExecution:
    """The operator that compares; that compiled graphs run it is tested on gloo ranks."""

    def rewritten(self, compare):
        """A rewritten graph without its collectives' results, so that it runs without ranks."""
        gm = gathers()
        with install(options=SIZE, on_error="raise", compare=compare) as installed:
            installed.bucketing(gm.graph)
        return gm, installed.graphs[0]

    def test_it_stands_before_everything_that_the_graph_calls(self):
        gm, done = self.rewritten(lambda digests: None)
        called = [node for node in gm.graph.nodes if node.op == "call_function"]
        assert called[1].target is torch.ops.bucketplan.first_execution.default
        assert json.loads(called[1].args[1]) == group_digests(done.request, done.plan.decision)
        gm.graph.eliminate_dead_code()
        assert called[1] in gm.graph.nodes, "nothing reads it, and it must stay all the same"

    def test_each_graph_is_compared_once(self):
        met = []
        operator = torch.ops.bucketplan.first_execution.default
        witness = torch.zeros(1, dtype=torch.uint8)
        operator(witness, '{"fsdp": "nobody is installed"}')
        with install(options=SIZE, compare=met.append):
            for digest in ("a", "b", "a"):
                operator(witness, json.dumps({"fsdp": digest}))
        operator(witness, '{"fsdp": "c"}')
        assert met == [{"fsdp": "a"}, {"fsdp": "b"}]

    def test_what_the_comparison_raises_reaches_the_caller(self):
        def differ(digests):
            raise PassFailed("compare", ValueError("others hold another plan"))

        with install(options=SIZE, compare=differ, on_error="raise"), pytest.raises(PassFailed, match="another plan"):
            torch.ops.bucketplan.first_execution(torch.zeros(1, dtype=torch.uint8), '{"fsdp": "a"}')


def test_requests_say_how_many_hosts_groups_span():
    class Plans(LocalPlans):
        topology = {"fsdp": 1, "other": 7}  # noqa: RUF012  (a constant of the test)

    def nodes(plans, **arguments):
        with install(plans, options=SIZE, epoch="e", roles={"0": "fsdp"}, on_error="raise", **arguments) as installed:
            installed.bucketing(gathers().graph)
        return [(group.role, group.nodes) for group in installed.graphs[0].request.groups]

    assert nodes(Plans()) == [("fsdp", 1)]
    assert nodes(Plans(), topology={"fsdp": 2}) == [("fsdp", 2)]
    assert nodes(Plans(), topology={"fsdp": 5}) == [("fsdp", 2)], "two ranks cannot span more hosts"
    assert nodes(LocalPlans()) == [("fsdp", 0)]


def test_gathers_are_marked_with_their_casts_and_views():
    gm = gathers(2)
    next(node for node in gm.graph.nodes if node.name == "primals_3").meta["param_name"] = "head.weight"
    assert mark_gathers(gm.graph, keep_gathered=("head.*",)) == 1
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
