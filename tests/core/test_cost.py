"""Costs are integers, exact however large, and what the formulas say."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketplan_core.cost import CollectiveModel, CostModel, ceil_div
from bucketplan_core.errors import PlanningError
from bucketplan_core.hardware import Protocol
from bucketplan_core.profile import CostProfile, WorkClass
from tests.core.planner_cases import build, candidate, hardware

PROTOCOLS = st.lists(st.builds(Protocol, st.integers(0, 10**7), st.integers(1, 2**50)), min_size=1, max_size=4)


@given(
    protocols=PROTOCOLS,
    op=st.sampled_from(["all_gather", "reduce_scatter", "all_reduce"]),
    ranks=st.integers(1, 100_000),
    sizes=st.lists(st.integers(0, 2**40), min_size=1, max_size=8),
)
def test_vector_and_scalar_times_are_the_same_number(protocols, op, ranks, sizes):
    model = CollectiveModel.of(op, ranks, protocols)
    assert model.times_ns(np.array(sizes, dtype=np.int64)).tolist() == [model.time_ns(size) for size in sizes]


@given(protocols=PROTOCOLS, ranks=st.integers(1, 4_096), a=st.integers(0, 2**40), b=st.integers(0, 2**40))
def test_one_launch_never_takes_longer_than_two(protocols, ranks, a, b):
    model = CollectiveModel.of("all_gather", ranks, protocols)
    assert max(model.time_ns(a), model.time_ns(b)) <= model.time_ns(a + b) <= model.time_ns(a) + model.time_ns(b)


def test_ring_traffic_is_n_minus_1_of_n_and_twice_that_for_all_reduce():
    protocol = [Protocol(7, 1_000)]
    assert CollectiveModel.of("all_gather", 4, protocol).time_ns(4_000) == 7 + 3_000
    assert CollectiveModel.of("reduce_scatter", 4, protocol).time_ns(4_001) == 7 + 3_001
    assert CollectiveModel.of("all_reduce", 4, protocol).time_ns(4_000) == 7 + 6_000


def test_the_faster_protocol_is_taken_at_every_size():
    model = CollectiveModel.of("all_gather", 2, [Protocol(10, 100), Protocol(500, 10_000)])
    assert model.time_ns(2) == 10 + 10
    assert model.time_ns(2_000) == 500 + 100


def test_packing_costs_reads_and_writes_of_what_is_copied():
    gathers = [candidate("fsdp_all_gather", 500, 1, 2), candidate("fsdp_all_gather", 300, 2, 2)]
    scatters = [candidate("fsdp_reduce_scatter", 500, 1, 2), candidate("fsdp_reduce_scatter", 300, 2, 2)]
    request, profile = build([*gathers, *scatters], [10, 10], hw=hardware(copy_bytes_per_us=1_000, launch_ns=9))
    cost = CostModel.build(request, profile)
    by_kind = {lane.kind: lane.members for lane in request.lanes}
    fused = cost.bucket(by_kind["fsdp_all_gather"])
    assert (fused.launch_ns, fused.wait_ns) == (9 + 2 * 800, 2 * 1_600)
    fused = cost.bucket(by_kind["fsdp_reduce_scatter"])
    assert (fused.launch_ns, fused.wait_ns) == (9 + 2 * 1_600, 0)
    alone = cost.bucket(by_kind["fsdp_all_gather"][:1])
    assert (alone.comm_ns, alone.launch_ns, alone.wait_ns) == (200 + 500, 9, 0)
    assert cost.copies_ns(np.array([0, 1, 800], dtype=np.int64)).tolist() == [cost.copy_ns(n) for n in (0, 1, 800)]


def test_segment_time_adds_classes_and_takes_the_slower_of_arithmetic_and_memory():
    request, _ = build([], [0, 0])
    profile = CostProfile(
        work=(
            WorkClass(name="matmul:bfloat16", flops=(3_000, 10), bytes_moved=(5, 2_000)),
            WorkClass(name="memory", flops=(0, 0), bytes_moved=(1, 0)),
        ),
        live_bytes=(0, 0),
    )
    hw = replace(hardware(), flops_per_us=(("matmul:bfloat16", 7),), memory_bytes_per_us=100)
    cost = CostModel.build(request, profile, hw)
    assert cost.segment_ns == (ceil_div(3_000_000, 7) + 10, 20_000)
    assert cost.prefix_ns == (0, cost.segment_ns[0], sum(cost.segment_ns))


def test_missing_figures_are_errors_that_say_which():
    request, profile = build([candidate("fsdp_all_gather", 5, 1, 1)], [1])
    with pytest.raises(PlanningError, match="lack all_gather on this group; measure with `bucketplan calibrate`"):
        CostModel.build(request, profile, replace(hardware(), collectives=()))
    with pytest.raises(PlanningError, match="no figures"):
        CostModel.build(request.with_options(replace(request.options, hardware=None)), profile)
    work = CostProfile(work=(WorkClass(name="matmul:int4", flops=(9,), bytes_moved=(0,)),), live_bytes=(0,))
    with pytest.raises(PlanningError, match="matmul:int4"):
        CostModel.build(request, work)


def test_figures_that_would_leave_int64_are_refused_before_anything_is_planned():
    request, profile = build([candidate("fsdp_all_gather", 2**50, 1, 1)], [1], hw=hardware(bytes_per_us=1))
    with pytest.raises(PlanningError, match="cannot be planned"):
        CostModel.build(request, profile)
