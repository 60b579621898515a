"""Rewritten graphs on real gloo ranks: the same bits out of gathers, the same gradients out of reductions."""

from __future__ import annotations

import pytest

from tests.support.counts import seeds
from tests.support.gloo_pool import gloo_pool

RANKS = "tests.support.rewrite_ranks"
CASES = "tests.support.rewrite_cases"
FP32_TOLERANCE = 1e-6
BF16_TOLERANCE = 2**-7
"""One unit in the last place: a sum of four in another order."""

both_sizes = pytest.mark.parametrize("num_ranks", [2, 4])


@pytest.mark.soak
@pytest.mark.parametrize(
    ("num_ranks", "layout", "with_values", "test", "soak"),
    [(2, "two_groups", True, 20, 1500), (2, "two_groups", False, 10, 1500), (4, "hybrid", True, 10, 1000)],
)
def test_random_legal_plans_change_nothing_but_collectives(num_ranks, layout, with_values, test, soak):
    chosen = list(seeds(f"rewrites on {num_ranks} ranks", test=test, soak=soak))
    num_fused = 0
    for start in range(0, len(chosen), 20):
        ranks = gloo_pool(num_ranks).run(f"{RANKS}:random_graphs", chosen[start : start + 20], layout, with_values)
        for result in (result for results in ranks for result in results):
            assert_same(result["comparison"], result["num_exact"], num_ranks, f"seed {result['seed']}")
            num_fused += len(result["fused"])
    assert num_fused > len(chosen) * num_ranks, "the plans must fuse something"


def assert_same(comparison, num_exact, num_ranks, name):
    """The first `num_exact` outputs and, on two ranks, all of them are equal in every bit, the others nearly so."""
    num_bitwise = len(comparison.equal) if num_ranks == 2 else num_exact
    assert all(comparison.equal[:num_bitwise]), f"{name}: outputs {comparison.equal}"
    for index in range(num_exact, len(comparison.equal)):
        bound = BF16_TOLERANCE if comparison.dtypes[index] == "torch.bfloat16" else FP32_TOLERANCE
        assert comparison.relative[index] <= bound, f"{name}: output {index} is off by {comparison.relative[index]}"


@both_sizes
@pytest.mark.parametrize("num_members", [1, 2, 25])
@pytest.mark.parametrize("with_values", [True, False], ids=["values", "no_values"])
def test_gather_bucket_moves_bytes_only(num_ranks, num_members, with_values):
    for result in gloo_pool(num_ranks).run(f"{CASES}:one_bucket", "gather", num_members, with_values):
        assert result["buckets"] == [num_members]
        assert result["num_launches"] == 1
        assert result["candidates"] == num_members
        assert result["payload"] == tuple(reversed(range(num_members)))
        assert all(result["comparison"].equal)


@both_sizes
@pytest.mark.parametrize("kind", ["scatter", "reduce"])
@pytest.mark.parametrize("num_members", [1, 2, 25])
def test_reduction_bucket_sums_what_its_members_would(num_ranks, kind, num_members):
    results = gloo_pool(num_ranks).run(f"{CASES}:one_bucket", kind, num_members, True)
    for result in results:
        assert result["buckets"] == [num_members]
        assert result["num_launches"] == 1
        assert_same(result["comparison"], 0, num_ranks, f"{num_members} members")
    # Over more than two ranks the order of a sum depends on where its value lies in the buffer, so bits may differ;
    # what may not is how far all of them together lie from the true values.
    errors = [error for result in results for error in result["comparison"].errors]
    bucketed, alone = (sum(error[index] for error in errors) ** 0.5 for index in (0, 1))
    assert alone > 0
    assert bucketed <= alone * 1.05


@both_sizes
def test_views_before_the_new_wait_move_behind_it_in_order(num_ranks):
    for result in gloo_pool(num_ranks).run(f"{CASES}:views_before_the_new_wait"):
        names, views = result["names"], result["views"]
        assert result["buckets"] == [2]
        assert len(result["waits"]) == 1
        order = [names.index(name) for name in (result["input"], result["waits"][0], *views)]
        assert order == sorted(order), "input, then wait, then the views as they stood"
        assert all(result["comparison"].equal)


@both_sizes
def test_consumers_that_compute_keep_a_bucket_from_forming(num_ranks):
    for result in gloo_pool(num_ranks).run(f"{CASES}:consumers_that_compute"):
        assert result["planned"] == [1, 1]
        assert len(result["refused"]) == result["gaps"], "a forged plan is refused wherever it puts the bucket"
        assert set(result["refused"]) <= {"launch-window", "wait-window", "dependency"}
        assert result["untouched"]


@both_sizes
@pytest.mark.parametrize("change", ["free", "overwrite", "fill"])
def test_changing_one_gathered_parameter_leaves_the_others_of_its_bucket(num_ranks, change):
    for comparison in gloo_pool(num_ranks).run(f"{CASES}:one_member_changed", change):
        assert all(comparison.equal)


@pytest.mark.parametrize(
    ("num_ranks", "layout", "strategy", "scheduled", "in_two_steps"),
    [
        (2, "two_groups", "size", False, False),
        (2, "two_groups", "size", True, False),
        (2, "two_groups", "size", False, True),
        (2, "two_groups", "none", False, False),
        (4, "hybrid", "size", False, False),
        (4, "hybrid", "size", True, False),
    ],
)
def test_dense_and_expert_groups_are_bucketed_at_once(num_ranks, layout, strategy, scheduled, in_two_steps):
    results = gloo_pool(num_ranks).run(f"{CASES}:demo_under", strategy, layout, scheduled, in_two_steps)
    assert len({result["signature"] for result in results}) == 1
    for result in results:
        assert result["violations"] == []
        # The loss depends on gathers only.
        assert_same(result["comparison"], 1, num_ranks, strategy)
        statistics = result["statistics"]
        if strategy == "none":
            assert result["fused_lanes"] == []
            assert statistics["fsdp_ag_bucketing"]["buckets"] == statistics["fsdp_rs_bucketing"]["buckets"] == 0
            continue
        assert {(kind, group) for kind in KINDS for group in ("fsdp", "fsdp_expert")} <= set(result["fused_lanes"])
        assert (("dp_all_reduce", "expert_replicas") in result["fused_lanes"]) is (layout == "hybrid")
        saved = sum(
            entry[f"{prefix}_collectives_before"] - entry[f"{prefix}_collectives_after"]
            for prefix, entry in (("ag", statistics["fsdp_ag_bucketing"]), ("rs", statistics["fsdp_rs_bucketing"]))
        )
        assert saved > result["num_params"]


KINDS = ("fsdp_all_gather", "fsdp_all_gather_backward", "fsdp_reduce_scatter")


def test_what_does_not_belong_to_the_live_graph_is_refused_before_anything_is_touched():
    for found in gloo_pool(2).run(f"{CASES}:refusals"):
        for name, (raised, untouched, same) in found.items():
            expected = {"another": "IllegalPlan: rule 'signature'", "a member": "IllegalPlan", "fault": "_Injected"}
            kind = next((error for start, error in expected.items() if name.startswith(start)), "StalePlan")
            assert raised.startswith(kind), f"{name}: {raised}"
            assert untouched, f"{name}: the graph or its metadata changed"
            assert same is not False, f"{name}: the graph computes something else"
