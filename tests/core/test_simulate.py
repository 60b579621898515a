"""The simulator's figures, worked out by hand, and what must hold for every decision."""

import random

import pytest

from bucketplan_core.cost import CostModel
from bucketplan_core.schedule import Placement, decide, place_original, place_scheduled
from bucketplan_core.simulate import simulate
from tests.core.planner_cases import KINDS, build, candidate, hardware, random_hardware, random_lane
from tests.support.counts import seeds

AG, RS = "fsdp_all_gather", "fsdp_reduce_scatter"


def run(request, profile, placements, **kwargs):
    return simulate(CostModel.build(request, profile), decide(request, "auto/1", placements), **kwargs)


def test_a_gather_hides_behind_compute_as_far_as_it_was_issued_ahead():
    request, profile = build([candidate(AG, 50, 2, 3)], [100, 60, 10])
    late = run(request, profile, [Placement((0,), 2, 2)])
    assert (late.step_ns, late.exposed_ns) == (170 + 250, 250)
    early = run(request, profile, [Placement((0,), 1, 2)])
    assert (early.step_ns, early.exposed_ns) == (170 + 190, 190)
    assert early.buckets[0].started_ns == 100
    assert early.buckets[0].finished_ns == 350
    assert early.buckets[0].waited_ns == 160


def test_one_stream_is_first_in_first_out_and_two_run_side_by_side():
    same = [candidate(AG, 50, 1, 1), candidate(RS, 50, 0, 1)]
    request, profile = build(same, [10])
    by_kind = {lane.kind: lane.members for lane in request.lanes}
    both = [Placement(by_kind[RS], 0, 1), Placement(by_kind[AG], 0, 1)]
    assert run(request, profile, both).step_ns == 500
    other = [candidate(AG, 50, 1, 1), candidate(RS, 50, 0, 1, group="h")]
    request, profile = build(other, [10], groups=("g", "h"), hw=hardware(groups=("g", "h")))
    by_kind = {lane.kind: lane.members for lane in request.lanes}
    both = [Placement(by_kind[RS], 0, 1), Placement(by_kind[AG], 0, 1)]
    assert run(request, profile, both).step_ns == 250


def test_packing_holds_compute_and_delays_the_launch():
    hw = hardware(copy_bytes_per_us=4_000, launch_ns=7)
    request, profile = build([candidate(RS, 100, 0, 2), candidate(RS, 100, 1, 2)], [1_000, 10], hw=hw)
    found = run(request, profile, [Placement((0, 1), 1, 2)])
    assert found.copies_ns == 200  # 2 * 400 bytes at 4 bytes a ns
    assert found.buckets[0].started_ns == 1_000 + 7 + 200
    assert found.step_ns == 1_207 + 400
    assert found.launches_ns == 7
    alone = run(request, profile, [Placement((0,), 0, 2), Placement((1,), 1, 2)])
    assert alone.copies_ns == 0
    assert alone.step_ns == 7 + 1_000 + 7 + 300


def test_a_fixed_collective_occupies_its_groups_stream():
    request, profile = build(
        [candidate(AG, 50, 1, 1)], [10], fixed=[{"kind": "all_to_all", "group": "g", "launch": 0}], fixed_bytes=[200]
    )
    found = run(request, profile, [Placement((0,), 0, 1)])
    assert found.fixed[0].exposed_ns == 250 + 300  # behind the gather, which goes first at gap 0
    assert found.step_ns == 550 + 10


def test_compute_slows_down_exactly_while_communication_is_in_flight():
    hw = hardware(slowdown_permille=500)
    request, profile = build([candidate(AG, 100, 1, 2)], [600, 40], hw=hw)
    found = run(request, profile, [Placement((0,), 0, 1)])
    # 300 ns in flight do 200 ns of work, the other 400 run at full speed.
    assert found.step_ns == 300 + 400 + 40
    assert found.slowed_ns == 100


def test_a_reduction_waited_for_where_it_is_done_costs_no_time_and_frees_its_input():
    request, profile = build([candidate(RS, 100, 0, 3)], [400, 400, 400], live_bytes=[0, 0, 900])
    late = run(request, profile, [Placement((0,), 0, 3)])
    soon = run(request, profile, [Placement((0,), 0, 1)])
    assert late.step_ns == soon.step_ns == 1_200
    assert late.memory.segment_bytes.tolist() == [300, 300, 1_200]
    assert soon.memory.segment_bytes.tolist() == [300, 100, 1_000]


def test_memory_of_a_fused_gather_counts_the_flat_result_and_the_copies():
    gathers = [candidate(AG, 10, 1, 3, last_use=1), candidate(AG, 30, 2, 3, last_use=2)]
    request, profile = build(gathers, [100, 100, 100], live_bytes=[5, 5, 5])
    fused = run(request, profile, [Placement((0, 1), 0, 1)])
    assert fused.memory.segment_bytes.tolist() == [40 + 80 + 5, 80 + 5, 60 + 5]
    assert fused.peak_bytes == 40 + 80 + 80 + 5  # while unpacking
    alone = run(request, profile, [Placement((0,), 0, 1), Placement((1,), 1, 2)])
    assert alone.memory.segment_bytes.tolist() == [10 + 20 + 5, 20 + 30 + 60 + 5, 60 + 5]


@pytest.mark.soak
def test_every_figure_adds_up_for_random_decisions():
    for seed in seeds("simulated decisions", test=200, soak=5_000):
        rng = random.Random(seed)
        segments = rng.randrange(1, 7)
        lanes = [c for kind in KINDS for c in random_lane(rng, kind, rng.randrange(4), segments)]
        hw = random_hardware(rng, slowdown_permille=rng.choice([0, 0, 130, 1_000]))
        request, profile = build(
            lanes,
            [rng.randrange(300) for _ in range(segments)],
            hw=hw,
            live_bytes=[rng.randrange(1_000) for _ in range(segments)],
        )
        members = [(m,) for lane in request.lanes for m in lane.members]
        for place in (place_original, place_scheduled):
            found = run(request, profile, place(request, members), trace=True)
            parts = found.compute_ns + found.copies_ns + found.launches_ns + found.exposed_ns + found.slowed_ns
            assert found.step_ns == parts
            assert found.slowed_ns >= 0
            assert found.peak_bytes >= max(profile.live_bytes)
            by_stream: dict[str, int] = {}
            for event in sorted(found.events, key=lambda e: e.start_ns):
                assert event.start_ns >= by_stream.get(event.stream, 0)  # no stream does two things at once
                by_stream[event.stream] = event.start_ns + event.duration_ns
            assert max(by_stream.values(), default=0) <= max(
                [found.step_ns] + [t.finished_ns for t in (*found.buckets, *found.fixed)]
            )
