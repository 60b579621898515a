"""No plan beats the bound, and on hand-worked cases the bound is what it should be."""

import random

import pytest

from bucketplan_core.bound import lower_bound_ns
from bucketplan_core.cost import CostModel
from tests.core.planner_cases import KINDS, brute_force, build, candidate, hardware, random_hardware, random_lane
from tests.support.counts import seeds

AG, RS = "fsdp_all_gather", "fsdp_reduce_scatter"


def bound(request, profile):
    return lower_bound_ns(CostModel.build(request, profile))


def test_all_compute_when_there_is_nothing_to_communicate():
    assert bound(*build([], [40, 2])) == 42
    assert bound(*build([], [])) == 0


def test_the_first_gather_and_the_last_reduction_both_count():
    request, profile = build([candidate(AG, 50, 0, 2), candidate(RS, 70, 2, 2)], [1_000, 1_000])
    assert bound(request, profile) == 250 + 2_000 + 270


def test_compute_before_the_first_use_hides_a_gather():
    request, profile = build([candidate(AG, 50, 1, 2)], [1_000, 1_000])
    assert bound(request, profile) == 2_000


def test_bytes_of_one_stream_in_one_launch_a_lane():
    gathers = [candidate(AG, 3_000, 1, 2), candidate(AG, 4_000, 2, 2)]
    request, profile = build([*gathers, candidate(RS, 2_000, 1, 2)], [100, 100])
    assert bound(request, profile) == 200 + 7_000 + 200 + 2_000


def test_fixed_collectives_are_exposed_where_their_wait_stands():
    request, profile = build([], [10, 10], fixed=[{"kind": "all_to_all", "group": "g", "launch": 1}], fixed_bytes=[200])
    assert bound(request, profile) == 20 + 300


def test_a_launch_hides_behind_a_fixed_collective_that_runs():
    gather = {**candidate(AG, 100, 1, 1), "launch": 1, "wait": 1}
    request, profile = build(
        [gather],
        [0],
        hw=hardware(alpha_ns=10, launch_ns=50),
        fixed=[{"kind": "all_to_all", "group": "g", "launch": 0}],
        fixed_bytes=[2_000],
    )
    # Fixed launch, launch, fixed wait, wait: the host's 50 ns pass while the fixed collective occupies the stream.
    assert bound(request, profile) == 10 + 1_000 + 10 + 100


@pytest.mark.soak
def test_never_above_the_optimum_of_brute_force():
    for seed in seeds("bounds", test=150, soak=3_000):
        rng = random.Random(seed)
        segments = rng.randrange(1, 6)
        groups = ("g", "h") if rng.random() < 0.4 else ("g",)
        candidates = [
            c for kind in KINDS for c in random_lane(rng, kind, rng.randrange(5), segments, group=rng.choice(groups))
        ]
        fixed = [
            {"kind": "all_to_all", "group": rng.choice(groups), "launch": rng.randrange(segments + 1)}
            for _ in range(rng.randrange(3))
        ]
        hw = random_hardware(rng, groups=groups, slowdown_permille=rng.choice([0, 0, 200]))
        request, profile = build(
            candidates,
            [rng.randrange(400) for _ in range(segments)],
            hw=hw,
            groups=groups,
            fixed=fixed,
            fixed_bytes=[rng.randrange(600) for _ in fixed],
        )
        best = min(brute_force(request, profile))[0]
        assert bound(request, profile) <= best, seed


def test_the_bound_is_reached_where_it_can_be():
    request, profile = build(
        [candidate(AG, 50, 0, 3), candidate(AG, 10, 1, 3), candidate(RS, 60, 2, 3), candidate(RS, 20, 3, 3)],
        [900, 900, 900],
        hw=hardware(copy_bytes_per_us=1_000),
    )
    assert bound(request, profile) == min(brute_force(request, profile))[0]
