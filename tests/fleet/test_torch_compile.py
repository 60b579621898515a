"""Plans under torch.compile(backend="inductor") on real gloo ranks: real graphs, compiled and run.

Each case of GRAPHS that a user brings is here: SimpleFSDP with and without resharding, beside tensor parallelism, with
replicas, with an expert group, a Hugging Face model, uneven shards, and FSDP2, in which there is nothing to plan. What
is compared is one training step: the loss, every gradient gathered whole, and how often each collective was launched
when it ran.
"""

from __future__ import annotations

from typing import Any

import pytest

from bucketplan_client.testing import InMemoryPlanServer
from bucketplan_core.collectives import Options
from bucketplan_core.planners import current_version
from tests.support.gloo_pool import gloo_pool

pytestmark = pytest.mark.timeout(900)

RANKS = "tests.support.compile_ranks"
MODULE = Options(strategy="module", planner=current_version("module"), placement="scheduled")
COMPILE_S = 800.0
"""A cold compile of these models takes half a minute alone on two cores; a busy machine takes many times that."""


def compare(num_ranks: int, case: str, **keywords: Any) -> list[dict[str, Any]]:
    results = gloo_pool(num_ranks).run(f"{RANKS}:compare", case, keywords, timeout_s=COMPILE_S)
    for result in results:
        eager, planned = result["loss"]
        assert planned == pytest.approx(eager, rel=1e-5)
        assert result["worst_gradient"] < 1e-5
        assert [graph["phase"] for graph in result["graphs"]] == ["forward", "backward"]
        signatures = result["signatures"]
        assert all(found == signatures[0] for found in signatures), "ranks describe one graph differently"
    return results


def test_forward_and_backward_are_bucketed_as_the_server_planned():
    server = InMemoryPlanServer()
    with server.listening() as address:
        results = compare(2, "dense", server=address)
    for result in results:
        eager, planned = result["launches"]
        assert eager == {"all_gather_into_tensor": 14, "reduce_scatter_tensor": 14}
        assert planned == {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}
    assert server.num_plannings == 2, "one plan for the forward and one for the backward graph, whatever the ranks"


def test_resharded_parameters_are_gathered_again_by_module():
    scopes = ("embedding", "blocks.*", "head")
    for result in compare(
        2, "dense", options=MODULE, scopes=scopes, reshard_after_forward=True, keep_gathered=("head",)
    ):
        forward, backward = result["graphs"]
        assert set(forward["scopes"]) == {"embedding", "blocks.0", "blocks.1", "head"}
        regathered = backward["kinds"]["fsdp_all_gather_backward"]
        # The backward reads no bias and no embedding again, and keeps the head.
        assert 0 < regathered < forward["candidates"] - 1
        assert backward["kinds"]["fsdp_reduce_scatter"] == 14
        eager, planned = result["launches"]
        assert eager["all_gather_into_tensor"] == 14
        # A bucket for each scope, and one more in the backward for each block.
        assert planned["all_gather_into_tensor"] == 4 + 2
        assert planned["reduce_scatter_tensor"] == 4


def test_tensor_parallel_collectives_stay_where_they_are():
    for result in compare(4, "tensor_parallel"):
        eager, planned = result["launches"]
        assert planned["all_gather_into_tensor"] == planned["reduce_scatter_tensor"] == 1
        assert planned["all_reduce"] == eager["all_reduce"] > 0


def test_gradients_of_replicas_are_reduced_in_buckets_too():
    for result in compare(4, "hybrid"):
        eager, planned = result["launches"]
        assert eager["all_reduce"] == eager["reduce_scatter_tensor"] == 8
        assert planned == {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1, "all_reduce": 1}
        assert result["graphs"][1]["kinds"] == {"dp_all_reduce": 8, "fsdp_reduce_scatter": 8}


def test_experts_have_buckets_of_their_own_group():
    for result in compare(4, "experts"):
        eager, planned = result["launches"]
        assert planned["all_gather_into_tensor"] == planned["reduce_scatter_tensor"] == 2
        assert planned["all_to_all_single"] == eager["all_to_all_single"] > 0


def test_a_hugging_face_llama_is_bucketed():
    for result in compare(2, "llama"):
        eager, planned = result["launches"]
        assert eager["all_gather_into_tensor"] > 20
        assert planned["all_gather_into_tensor"] == planned["reduce_scatter_tensor"] == 1


def test_uneven_shards_give_one_signature():
    for result in compare(4, "uneven"):
        eager, planned = result["launches"]
        assert eager["all_gather_into_tensor"] == 8
        assert planned == {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}


def test_fsdp2_is_told_to_keep_its_collectives_out_of_graphs():
    for result in gloo_pool(2).run(f"{RANKS}:fully_sharded", timeout_s=COMPILE_S):
        assert result["losses"][0] == pytest.approx(result["losses"][1], rel=1e-6)
        assert result["reasons"]
        assert all("FSDP2 (fully_shard)" in reason for reason in result["reasons"])
        assert len(result["warnings"]) == 1
        assert "no collective" in result["warnings"][0]
