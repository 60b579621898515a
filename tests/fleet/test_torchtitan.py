"""Planned buckets in torchtitan 0.3's graph_trainer: its traced joint graphs, its pipeline, executed on gloo ranks."""

from __future__ import annotations

import pytest

from tests.support.gloo_pool import gloo_pool

RANKS = "tests.support.titan_ranks"


def members(buckets, kind, group):
    return [set(names) for found, role, names in buckets if (found, role) == (kind, group)]


def test_a_llama_trains_to_the_same_bits_with_module_buckets():
    for result in gloo_pool(2).run(f"{RANKS}:compare", "llama3", 1, "module", timeout_s=500.0):
        assert result["loss"][0] == result["loss"][1]
        assert result["worst"] == 0.0
        assert result["num_gradients"] == 17
        for kind in ("fsdp_all_gather", "fsdp_all_gather_backward", "fsdp_reduce_scatter"):
            found = members(result["buckets"], kind, "fsdp")
            for layer in (0, 1):
                # Forward, backward and reductions of a block are buckets of their own, and of nothing else.
                (bucket,) = [names for names in found if f"layers.{layer}.attention.wo.weight" in names]
                assert len(bucket) == 7
                assert all(name.startswith(f"layers.{layer}.") for name in bucket)
        assert {"norm.weight", "lm_head.weight"} in members(result["buckets"], "fsdp_all_gather", "fsdp")


def test_a_mixture_of_experts_keeps_expert_buckets_apart():
    for result in gloo_pool(4).run(f"{RANKS}:compare", "deepseek_v3", 2, "size", timeout_s=550.0):
        assert result["loss"][0] == pytest.approx(result["loss"][1], rel=1e-6)
        assert result["worst"] < 1e-5
        for kind in ("fsdp_all_gather", "fsdp_all_gather_backward", "fsdp_reduce_scatter"):
            (experts,) = members(result["buckets"], kind, "efsdp")
            assert len(experts) == 3
            assert all(".inner_experts." in name for name in experts)
            assert all(
                ".inner_experts." not in name for names in members(result["buckets"], kind, "fsdp") for name in names
            )


@pytest.mark.parametrize("disabled_rank", [None, 1])
def test_a_registered_attempt_decides_whether_there_are_buckets(disabled_rank):
    found = gloo_pool(2).run(f"{RANKS}:bucketed_by", disabled_rank, timeout_s=300.0)
    assert found == [(disabled_rank is None,) * 2] * 2


def test_one_pass_of_torchtitans_pipeline_is_exchanged():
    for theirs, ours in gloo_pool(2).run(f"{RANKS}:default_passes", "llama3", timeout_s=300.0):
        assert ours == [
            "bucketing_pass" if name == "joint_transformer_block_bucketing_reordering_pass" else name for name in theirs
        ]
        assert "bucketing_pass" in ours


def test_inductors_whole_graph_pass_keeps_the_order_of_the_plan():
    for found in gloo_pool(2).run(f"{RANKS}:keeping_order", timeout_s=300.0):
        assert found["inside"] == found["wanted"]
        assert found["inputs"] == "inputs"
        assert found["same"]
        assert found["restored"]
        assert found["name"] == "inductor_pass"
        assert found["refused"] == "torch._inductor.config.bucket_all_gathers_fx"


@pytest.mark.parametrize(
    ("option", "changes"),
    [
        ("compile.precompile_artifact_dir", {"precompile_artifact_dir": "/artifacts"}),
        ("compile.ep_overlap.enabled", {"ep_overlap": "enabled"}),
        ("compile.enable_fsdp_dense_region_overlap", {"enable_fsdp_dense_region_overlap": True}),
    ],
)
def test_passes_that_place_the_same_collectives_are_refused(option, changes):
    for found in gloo_pool(2).run(f"{RANKS}:refused", changes, timeout_s=300.0):
        assert found == option
