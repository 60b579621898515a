"""The pass in HyperParallel's pipeline: its graphs, rewritten on real gloo ranks, train to the same bits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import fx, nn

from bucketplan_client.errors import ScopeError
from bucketplan_client.hyperparallel import BucketingPass, options_of, run
from tests.support.gloo_pool import gloo_pool

MODULE = "tests.support.hyperparallel_ranks"
RANKS = f"{MODULE}:bucket"
EXPERTS = {"expert_param_names": ("blocks.1.experts",)}


def test_overload_packets_missing_values_and_frees_are_read_as_they_stand():
    for result in gloo_pool(2).run(RANKS, "two_groups", {}, EXPERTS):
        assert result["losses"][0] == result["losses"][1]
        assert result["shards"], "a parameter differs after two steps"
        before, after = result["before"], result["after"]
        assert before["fsdp_all_gather@fsdp"] > 5
        assert all(after[key] < before[key] or before[key] == 1 for key in before)
        assert after["fsdp_all_gather@fsdp"] <= 2
        assert result["frees"][0] > 0
        assert result["frees"][1] == result["frees"][0], "every parameter is freed as before"
        assert result["frees_name_launches"]
        assert result["statistics"]["fsdp_ag_bucketing"]["buckets"] > 0
        assert result["statistics"]["fsdp_rs_bucketing"]["buckets"] > 0


def test_the_expert_group_is_left_alone_without_expert_parameters():
    for result in gloo_pool(2).run(RANKS, "two_groups", {}, {}):
        assert result["losses"][0] == result["losses"][1]
        assert result["after"]["fsdp_all_gather@fsdp"] < result["before"]["fsdp_all_gather@fsdp"]
        for kind in ("fsdp_all_gather", "fsdp_reduce_scatter"):
            assert result["after"][f"{kind}@fsdp_expert"] == result["before"][f"{kind}@fsdp_expert"]


def test_module_buckets_follow_fsdp_bucket_modules():
    config = {"fsdp_bucket_modules": ["blocks.*", ["embedding", "norm"]], "dp_mode": "fsdp"}
    for result in gloo_pool(2).run(RANKS, "two_groups", config, EXPERTS):
        assert result["losses"][0] == result["losses"][1]
        # One bucket a block, one for embedding and norm.
        assert result["after"]["fsdp_all_gather@fsdp"] == 3


@pytest.mark.parametrize(
    "config", [{"fsdp_bucketing": False}, {"fsdp_enabled": False}, {"dp_mode": "ddp"}], ids=lambda config: str(config)
)
def test_what_is_switched_off_changes_nothing(config):
    for result in gloo_pool(2).run(RANKS, "two_groups", config, EXPERTS):
        assert result["after"] == result["before"]
        assert result["statistics"] == {}


def test_hybrid_sharding_is_bucketed_within_each_replica():
    for result in gloo_pool(4).run(RANKS, "hybrid", {"dp_mode": "hsdp"}, EXPERTS):
        assert result["losses"][0] == pytest.approx(result["losses"][1], rel=1e-6)
        assert result["after"]["fsdp_reduce_scatter@fsdp"] < result["before"]["fsdp_reduce_scatter@fsdp"]


@pytest.mark.parametrize("case", ["at the opening", "no server"])
def test_an_attempt_without_buckets_has_none_on_any_rank(case):
    for result in gloo_pool(2).run(f"{MODULE}:bucket_in_attempt", case, "attempt"):
        assert result == {"bucketed": False, "unchanged": True}


def test_plans_that_an_attempt_does_not_have_are_refused_and_not_made_here():
    for result in gloo_pool(2).run(f"{MODULE}:bucket_in_attempt", "at the opening", "plans"):
        assert result == {"option": "plans", "unchanged": True}


@pytest.mark.parametrize("given", ["attempt", "plans"])
def test_a_kill_switch_of_one_rank_changes_nothing_once_the_attempt_is_open(given):
    for result in gloo_pool(2).run(f"{MODULE}:bucket_in_attempt", "afterwards", given):
        assert result == {"bucketed": True, "unchanged": False}


def test_without_torch_distributed_the_graph_comes_back_untouched():
    gm = fx.symbolic_trace(nn.Linear(2, 2))
    code = gm.code
    assert run(gm, SimpleNamespace()) is gm
    assert gm.code == code


def test_module_buckets_without_a_model_are_refused_in_words():
    config = SimpleNamespace(fsdp_bucket_modules=["blocks.*"])
    assert options_of(config).strategy == "module"
    with pytest.raises(ScopeError, match="need the live model"):
        BucketingPass().run(fx.GraphModule(torch.nn.Module(), fx.Graph()), config)
