"""The exact lane planners against brute force over every contiguous partition, in the simulator's own figures."""

import random

import pytest

from bucketplan_core.cost import CostModel
from bucketplan_core.planners.auto_gather import exact_gather_conditions, exact_gather_lane
from bucketplan_core.planners.auto_reduce import exact_reduce_conditions, exact_reduce_lane
from bucketplan_core.simulate import simulate
from tests.core.planner_cases import brute_force, build, candidate, hardware, placed, random_hardware, random_lane
from tests.support.counts import seeds

AG, RS = "fsdp_all_gather", "fsdp_reduce_scatter"


def reduce_lane(cost, lane_index):
    buckets, exact = exact_reduce_lane(cost, lane_index)
    assert exact
    return buckets


def figures(request, profile, buckets):
    decision = placed(request, profile, buckets)
    found = simulate(CostModel.build(request, profile), decision)
    return found.step_ns, len(decision.buckets), found.peak_bytes


def random_case(rng, kind):
    segments = rng.randrange(1, 9)
    lane = random_lane(rng, kind, rng.randrange(1, 9 if rng.random() < 0.9 else 11), segments)
    scale = rng.choice([1, 40, 600])
    return build(
        lane,
        [rng.choice([0, rng.randrange(scale), rng.randrange(4 * scale)]) for _ in range(segments)],
        hw=random_hardware(rng),
        live_bytes=[rng.randrange(2_000) for _ in range(segments)],
    )


@pytest.mark.soak
def test_gather_lane_matches_brute_force():
    for seed in seeds("gather lanes", test=150, soak=3_000):
        rng = random.Random(seed)
        request, profile = random_case(rng, AG)
        cost = CostModel.build(request, profile)
        assert not exact_gather_conditions(cost, 0)
        every = brute_force(request, profile)
        best = min(every)[:2]
        assert figures(request, profile, exact_gather_lane(cost, 0))[:2] == best, seed
        # Under a budget drawn from the peaks that exist, and one byte below the least of them.
        budget = rng.choice(every)[2]
        within = min(e for e in every if e[2] <= budget)
        found = figures(request, profile, exact_gather_lane(cost, 0, budget))
        assert found[:2] == within[:2], seed
        assert found[2] <= budget, seed
        assert exact_gather_lane(cost, 0, min(e[2] for e in every) - 1) is None, seed


@pytest.mark.soak
def test_reduce_lane_matches_brute_force():
    for seed in seeds("reduce lanes", test=150, soak=3_000):
        rng = random.Random(seed)
        request, profile = random_case(rng, RS)
        cost = CostModel.build(request, profile)
        assert not exact_reduce_conditions(cost, 0)
        best = min(brute_force(request, profile))[:2]
        assert figures(request, profile, reduce_lane(cost, 0))[:2] == best, seed


def lane_of(sizes, gaps, *, alpha=200, **kwargs):
    """Reductions ready one after the other: gap k stands before member k."""
    scatters = [candidate(RS, size, at + 1, len(gaps)) for at, size in enumerate(sizes)]
    return build(scatters, gaps, hw=hardware(alpha_ns=alpha, **kwargs))


def test_the_counter_example_to_greedy_merging():
    request, profile = lane_of([185, 55, 179], [94, 163, 71])
    buckets = reduce_lane(CostModel.build(request, profile), 0)
    assert buckets == [(0,), (1, 2)]
    assert figures(request, profile, buckets)[0] == 913


def test_packing_makes_the_earliest_finish_the_wrong_choice():
    # Fusing the first two would free the stream earlier and hold compute up for longer.
    request, profile = lane_of([5, 20, 60], [1, 10, 200], alpha=20, copy_bytes_per_us=16_000)
    buckets = reduce_lane(CostModel.build(request, profile), 0)
    assert buckets == [(0,), (1,), (2,)]
    assert figures(request, profile, buckets)[0] == 291


@pytest.mark.parametrize(("kind", "plan"), [(AG, exact_gather_lane), (RS, reduce_lane)])
def test_latency_free_and_copies_cost_something_leaves_every_candidate_alone(kind, plan):
    lane = [candidate(kind, 100 + at, at, 6) for at in range(6)]
    request, profile = build(lane, [50] * 6, hw=hardware(alpha_ns=0, copy_bytes_per_us=2_000))
    assert [len(bucket) for bucket in plan(CostModel.build(request, profile), 0)] == [1] * 6


@pytest.mark.parametrize(("kind", "plan"), [(AG, exact_gather_lane), (RS, reduce_lane)])
def test_latency_only_and_free_copies_make_one_bucket(kind, plan):
    lane = [candidate(kind, 100, at, 6) for at in range(6)]
    request, profile = build(lane, [1] * 6, hw=hardware(alpha_ns=1_000_000, bytes_per_us=2**50))
    assert [len(bucket) for bucket in plan(CostModel.build(request, profile), 0)] == [6]


@pytest.mark.parametrize(("kind", "plan"), [(AG, exact_gather_lane), (RS, reduce_lane)])
def test_of_equally_fast_plans_the_one_with_fewest_buckets_is_taken(kind, plan):
    lane = [candidate(kind, 0, at, 4) for at in range(4)]
    request, profile = build(lane, [100] * 4, hw=hardware(alpha_ns=0))
    buckets = plan(CostModel.build(request, profile), 0)
    assert figures(request, profile, buckets)[:2] == (400, 1)


@pytest.mark.parametrize(("kind", "plan"), [(AG, exact_gather_lane), (RS, reduce_lane)])
def test_zero_sizes_equal_ready_times_and_one_candidate(kind, plan):
    request, profile = build([candidate(kind, 0, 1, 2)], [5, 5])
    assert plan(CostModel.build(request, profile), 0) == [(0,)]
    request, profile = build([candidate(kind, 0, 1, 2) for _ in range(5)], [5, 5])
    assert plan(CostModel.build(request, profile), 0) == [(0, 1, 2, 3, 4)]
