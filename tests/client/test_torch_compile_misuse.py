"""The torch.compile hook in hands that err: installed twice, passed by unsaid, given arguments of other kinds or
scopes of another graph."""

from __future__ import annotations

import logging

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config

from bucketplan_client.arguments import BadArgument
from bucketplan_client.capture.ops import packet_of
from bucketplan_client.errors import PassFailed
from bucketplan_client.passes import FsdpBucketingPass, LocalPlans
from bucketplan_client.scopes import ModuleScope
from bucketplan_client.torch_compile import (
    CompileConflict,
    current_installation,
    install,
)
from bucketplan_core.collectives import Options
from tests.support.gloo_pool import gloo_pool
from tests.support.hook_graphs import SIZE, OtherPass, c10d, gathers, launches


def compile_something(**arguments):
    """A graph without collectives, compiled anew."""
    torch._dynamo.reset()
    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        torch.compile(lambda x: x.sin() + 1, backend="inductor", **arguments)(torch.ones(4))
    torch._dynamo.reset()


@pytest.fixture
def warnings(caplog):
    """The warnings of the hook, one text each."""
    caplog.set_level(logging.INFO, "bucketplan_client.torch_compile")
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


class TestSecondInstallation:
    def test_it_is_refused_and_says_where_the_first_was_made(self):
        with install(options=SIZE) as installed:
            hook = inductor_config.post_grad_custom_post_pass
            with pytest.raises(CompileConflict) as caught:
                install(options=SIZE, reshard_after_forward=True)
            assert f"{__file__}:" in str(caught.value)
            assert current_installation() is installed
            assert inductor_config.post_grad_custom_post_pass is hook
            assert inductor_config.joint_custom_post_pass is None
        assert current_installation() is None
        assert inductor_config.post_grad_custom_post_pass is None

    def test_one_after_the_other_is_fine(self):
        for _ in range(2):
            with install(options=SIZE) as installed:
                assert inductor_config.post_grad_custom_post_pass is installed.bucketing

    def test_one_whose_hook_was_overwritten_is_refused_too(self):
        with (
            install(options=SIZE),
            inductor_config.patch(post_grad_custom_post_pass=None),
            pytest.raises(CompileConflict, match="current_installation"),
        ):
            install(options=SIZE)

    def test_uninstalling_twice_takes_nothing_of_a_later_one(self):
        first = install(options=SIZE)
        first.uninstall()
        with install(options=SIZE) as second:
            first.uninstall()
            assert inductor_config.post_grad_custom_post_pass is second.bucketing
            assert current_installation() is second

    def test_a_pass_that_a_patch_puts_back_stays_out(self):
        """The user's own patch is left after ours and restores what it found, our pass among it."""
        installed = install(options=SIZE, on_error="raise", reshard_after_forward=True)
        key = installed.bucketing.uuid()
        with inductor_config.patch(post_grad_custom_post_pass=OtherPass(), joint_custom_post_pass=OtherPass()):
            installed.uninstall()
        try:
            assert inductor_config.post_grad_custom_post_pass is installed.bucketing
            gm = gathers()
            inductor_config.post_grad_custom_post_pass(gm.graph)
            inductor_config.joint_custom_post_pass(gm.graph)
            assert launches(gm) == 4
            assert not any("recompute" in node.meta for node in gm.graph.nodes)
            assert installed.bucketing.uuid() != key, "a cache must not replay it as bucketed"
            with install(options=SIZE) as later:
                assert inductor_config.post_grad_custom_post_pass is later.bucketing
        finally:
            inductor_config.post_grad_custom_post_pass = None
            inductor_config.joint_custom_post_pass = None

    def test_a_pass_that_was_added_since_stays(self):
        first, added = OtherPass(), OtherPass()
        with inductor_config.patch(post_grad_custom_post_pass=first):
            with install(options=SIZE):
                inductor_config.post_grad_custom_post_pass = (*inductor_config.post_grad_custom_post_pass, added)
            assert inductor_config.post_grad_custom_post_pass == (first, added)

    def test_an_installation_that_fails_leaves_no_trace(self):
        with pytest.raises(CompileConflict):
            install(LocalPlansElsewhere(), options=SIZE)
        with pytest.raises(BadArgument):
            install(options=SIZE, on_error="x")
        assert current_installation() is None
        assert inductor_config.post_grad_custom_post_pass is None


class LocalPlansElsewhere:
    def plan(self, request, profile=None):
        raise AssertionError("nobody asks")


class TestPassedBy:
    """What an uninstallation says when graphs may have been compiled without the pass."""

    def test_a_hook_set_later_is_named(self, warnings):
        with install(options=SIZE):
            inductor_config.post_grad_custom_post_pass = OtherPass()
            compile_something()
        inductor_config.post_grad_custom_post_pass = None
        (warning,) = warnings()
        assert "post_grad_custom_post_pass was set to" in warning
        assert "OtherPass" in warning
        assert f"{__file__}:" in warning

    def test_a_hook_among_the_options_of_one_model_is_thought_of(self, warnings):
        with install(options=SIZE):
            compile_something(options={"post_grad_custom_post_pass": OtherPass()})
        (warning,) = warnings()
        assert "torch.compile's options" in warning

    def test_nothing_compiled_is_no_error_but_said(self, warnings):
        with install(options=SIZE):
            pass
        (warning,) = warnings()
        assert "nothing went through" in warning
        assert "compiled before" in warning

    @pytest.mark.parametrize("mode", ["bucketed", "unbucketed"])
    def test_a_graph_that_came_by_is_enough(self, mode, warnings):
        with install(options=SIZE, mode=mode):
            compile_something()
        assert warnings() == []

    def test_an_unbucketed_installation_has_nothing_to_miss(self, warnings):
        with install(options=SIZE, mode="unbucketed"):
            pass
        assert warnings() == []

    def test_graphs_from_a_compile_cache_are_no_fault(self, warnings, caplog, tmp_path, monkeypatch):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        called = []
        for _ in range(2):
            torch._dynamo.reset()
            with inductor_config.patch(fx_graph_cache=True), install(options=SIZE, on_error="raise") as installed:
                torch.compile(lambda x: x.cos() * 3, backend="inductor")(torch.ones(4))
            called.append(installed.bucketing.called)
        torch._dynamo.reset()
        assert called == [True, False]
        assert warnings() == []
        assert "a compile cache was asked" in caplog.text

    def test_an_error_inside_is_not_drowned(self, warnings):
        with pytest.raises(KeyError), install(options=SIZE):
            raise KeyError
        assert warnings() == []


BAD_ARGUMENTS = [
    ({"exclude": "*.bias"}, "exclude", "Write exclude=['*.bias']"),
    ({"only_roles": "fsdp"}, "only_roles", "Write only_roles=['fsdp']"),
    ({"compute_ops": "ns::*"}, "compute_ops", "Write compute_ops=['ns::*']"),
    ({"exclude": [1]}, "exclude", "patterns of parameter names"),
    ({"exclude": None}, "exclude", "patterns of parameter names"),
    ({"roles": {"a": 1}}, "roles", "a mapping of torch's group names to roles"),
    ({"roles": "fsdp"}, "roles", "a mapping of torch's group names to roles"),
    ({"topology": {"fsdp": -3}}, "topology", "a mapping of roles to numbers of hosts"),
    ({"scopes": ["layers"]}, "scopes", "build_module_bucket_plans"),
    ({"scopes": "layers"}, "scopes", "build_module_bucket_plans"),
    ({"scopes": (scope for scope in [])}, "scopes", "build_module_bucket_plans"),
]


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "option", "said"),
        [
            *BAD_ARGUMENTS,
            ({"mode": "x"}, "mode", "'bucketed' or 'unbucketed'"),
            ({"mode": ""}, "mode", "'bucketed' or 'unbucketed'"),
            ({"on_error": "x"}, "on_error", "'abort' or 'raise'"),
            ({"epoch": 7}, "epoch", "a text"),
            ({"keep_gathered": "embed.weight"}, "keep_gathered", "Write keep_gathered=['embed.weight']"),
        ],
    )
    def test_installing_refuses_what_it_would_misread(self, arguments, option, said):
        with pytest.raises(BadArgument) as caught:
            install(options=SIZE, **arguments)
        assert caught.value.option == option
        assert said in str(caught.value)
        assert inductor_config.post_grad_custom_post_pass is None

    @pytest.mark.parametrize(
        ("arguments", "option", "said"),
        [
            *BAD_ARGUMENTS,
            ({"kinds": "fsdp_all_gather"}, "kinds", "Write kinds=['fsdp_all_gather']"),
            ({"phase": "banana"}, "phase", "'joint' or 'forward' or 'backward'"),
        ],
    )
    def test_the_pass_of_all_ranks_refuses_the_same(self, arguments, option, said):
        with pytest.raises(BadArgument) as caught:
            FsdpBucketingPass(LocalPlans(), options=SIZE, **arguments)
        assert caught.value.option == option
        assert said in str(caught.value)


MODULE = Options(strategy="module", planner="module/1", placement="scheduled")


class TestOutsideAllScopes:
    """Graph breaks cut fragments out of a model, and some hold nothing of any scope."""

    def gathers_of(self, name):
        gm = gathers()
        for node in gm.graph.nodes:
            if packet_of(node) is c10d.all_gather_into_tensor:
                node.meta |= {"comm_type": "fsdp_all_gather", "param_name": f"{name}.{node.name}"}
        return gm, ModuleScope(name, frozenset(f"{name}.{node.name}" for node in gm.graph.nodes))

    def test_such_a_graph_is_left_alone_and_the_others_are_planned(self, warnings):
        fragment, _ = self.gathers_of("embedding")
        block, scope = self.gathers_of("blocks.0")
        with install(options=MODULE, scopes=[scope], on_error="raise") as installed:
            installed.bucketing(fragment.graph)
            installed.bucketing(block.graph)
        assert [launches(gm) for gm in (fragment, block)] == [4, 1]
        assert [(graph.num_candidates, graph.num_launches) for graph in installed.graphs] == [(4, 4), (4, 1)]
        assert "no collective of this graph is in a scope" in installed.graphs[0].reason
        assert installed.graphs[0].plan is None
        assert warnings() == []

    def test_scopes_that_fit_no_graph_at_all_are_a_warning(self, warnings):
        fragment, _ = self.gathers_of("embedding")
        with install(options=MODULE, scopes=[self.gathers_of("blocks.0")[1]], on_error="raise") as installed:
            installed.bucketing(fragment.graph)
        (warning,) = warnings()
        assert "blocks.0" in warning

    def test_without_scopes_it_stays_an_error(self):
        fragment, _ = self.gathers_of("embedding")
        installed = install(options=MODULE, on_error="raise")
        with installed, pytest.raises(PassFailed, match="no candidate has a scope"):
            installed.bucketing(fragment.graph)

    @pytest.mark.parametrize(
        ("odd", "kinds"),
        [("outside", ["none", "none"]), ("no scopes", ["RankFailed"] * 2), ("inside", ["RanksDisagree"] * 2)],
    )
    def test_ranks_in_lockstep_decide_alike(self, odd, kinds):
        outcomes = gloo_pool(2).run("tests.client.scope_ranks:outside_all_scopes", odd)
        assert [outcome["kind"] for outcome in outcomes] == kinds
        assert all(outcome["intact"] for outcome in outcomes)
        if odd == "outside":
            assert all("no collective of this graph is in a scope" in outcome["said"] for outcome in outcomes)
