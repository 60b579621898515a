"""Where launches and waits go, in which order, and that no tangle of dependencies stops a plan from being made."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from bucketplan_core import schedule
from bucketplan_core.collectives import Candidate, FixedCollective, Group, Options
from bucketplan_core.groups import group_digests
from bucketplan_core.legality import check_decision
from bucketplan_core.plan import Decision, Plan, Step, StepOp
from bucketplan_core.planning import make_plan
from bucketplan_core.request import Request
from bucketplan_core.schedule import (
    Placement,
    Unschedulable,
    arrange,
    decide,
    legalize,
    place_original,
    place_scheduled,
)
from tests.core.test_planners import check_plan, gathers
from tests.support.counts import count, seeds
from tests.support.requests import random_options, random_request, requests

L, W, FL, FW = StepOp.LAUNCH, StepOp.WAIT, StepOp.FIXED_LAUNCH, StepOp.FIXED_WAIT


def gather(group: str, **fields: Any) -> Candidate:
    """A gather with every window open over four gaps."""
    defaults: dict[str, Any] = {
        "kind": "fsdp_all_gather",
        "group": group,
        "group_size": 2,
        "dtype": "bfloat16",
        "device_type": "cuda",
        "input_shape": (8,),
        "output_shape": (16,),
        "earliest_launch": 0,
        "launch": 0,
        "latest_launch": 4,
        "wait": 0,
        "latest_wait": 4,
        "first_use": 4,
        "last_use": 4,
    }
    return Candidate(**(defaults | fields))


def reduction(group: str, **fields: Any) -> Candidate:
    shapes = {"kind": "dp_all_reduce", "reduce_op": "sum", "input_shape": (8,), "output_shape": (8,)}
    return gather(group, **(shapes | fields))


def request_of(candidates: list[Candidate], fixed: list[FixedCollective] | None = None, **options: Any) -> Request:
    return Request.build(
        num_segments=4,
        groups=[Group(role="a", size=2), Group(role="b", size=2)],
        candidates=candidates,
        fixed=fixed or [],
        options=replace(Options(strategy="size", planner="size/1"), **options),
    )


def crossed(**options: Any) -> Request:
    """a1 feeds b1 and b2 feeds a2, without compute between: {a1, a2} and {b1, b2} would wait for each other."""
    return request_of(
        [
            gather("a", launch_order=0, wait_order=1),
            gather("b", launch_order=2, wait_order=3, depends_on=(0,)),
            gather("b", launch_order=4, wait_order=5),
            gather("a", launch_order=6, wait_order=7, depends_on=(2,)),
        ],
        **options,
    )


PLACES = (place_original, place_scheduled)


@pytest.mark.parametrize("placement", ["original", "scheduled"])
def test_groups_that_would_wait_for_each_other_are_split_not_deadlocked(placement: str) -> None:
    request = crossed(placement=placement)
    plan = make_plan(request)
    check_plan(request, plan)
    members = {bucket.members for bucket in plan.decision.buckets}
    assert members == {(0,), (3,), (1,), (2,)}
    with pytest.raises(Unschedulable) as conflict:
        place_original(request, [(0, 3), (1, 2)])
    assert conflict.value.buckets == {0, 1}


def test_one_bucket_of_a_crossed_pair_may_stay() -> None:
    request = crossed()
    placements = legalize(request, [(0, 3), (1,), (2,)], place_original)
    assert [placement.members for placement in placements] == [(0, 3), (1,), (2,)]
    check_decision(request, decide(request, "size/1", placements))
    straight = request_of(
        [
            gather("a", launch_order=0, wait_order=1),
            gather("a", launch_order=2, wait_order=3),
            gather("b", launch_order=4, wait_order=5, depends_on=(0,)),
            gather("b", launch_order=6, wait_order=7, depends_on=(1,)),
        ]
    )
    assert [b.members for b in make_plan(straight).decision.buckets] == [(0, 1), (2, 3)]


def test_only_what_is_on_a_circle_is_split() -> None:
    """What hangs behind a circle keeps its bucket."""
    candidates = [*crossed().candidates]
    tail = [
        reduction("a", launch_order=8, wait_order=9, depends_on=(1,)),
        reduction("a", launch_order=10, wait_order=11, depends_on=(3,)),
    ]
    plan = make_plan(request_of([*candidates, *tail]))
    assert (4, 5) in {bucket.members for bucket in plan.decision.buckets}


@pytest.mark.parametrize("place", PLACES)
def test_a_bucket_around_a_fixed_collective_that_it_feeds_and_needs_is_split(place: Any) -> None:
    request = request_of(
        [
            gather("a", launch_order=0, wait_order=1),
            gather("a", launch_order=4, wait_order=5, depends_on=(2,)),
        ],
        [
            FixedCollective(
                kind="all_to_all", group="b", launch=0, wait=0, launch_order=2, wait_order=3, depends_on=(0,)
            )
        ],
    )
    placements = legalize(request, [(0, 1)], place)
    assert [placement.members for placement in placements] == [(0,), (1,)]
    check_decision(request, decide(request, "size/1", placements))


def test_original_launches_where_the_first_member_did_when_all_inputs_are_ready() -> None:
    request = request_of(
        [
            gather("a", launch=1, wait=1, launch_order=0, wait_order=1),
            gather("a", launch=2, wait=2, launch_order=2, wait_order=3),
        ]
    )
    assert make_plan(request).decision.steps == (Step(1, L, 0), Step(1, W, 0))


def test_original_launches_right_behind_the_latest_input_else() -> None:
    late = {"earliest_launch": 3, "launch": 3, "wait": 3}
    request = request_of(
        [
            reduction("a", launch=1, wait=1, launch_order=0, wait_order=1),
            gather("b", launch=3, wait=3, launch_order=2, wait_order=3),
            reduction("a", **late, launch_order=4, wait_order=5),
        ]
    )
    # Before everything else of the gap, launch and wait together.
    assert make_plan(request).decision.steps == (Step(3, L, 0), Step(3, W, 0), Step(3, L, 1), Step(3, W, 1))


def test_original_waits_right_behind_each_launch_where_several_buckets_moved_to_one_gap() -> None:
    late = {"earliest_launch": 3, "launch": 3, "wait": 3}
    request = request_of(
        [
            reduction("a", launch=1, wait=1, launch_order=0, wait_order=1),
            reduction("b", launch=1, wait=1, launch_order=2, wait_order=3),
            reduction("a", **late, launch_order=4, wait_order=5),
            reduction("b", **late, launch_order=6, wait_order=7),
        ]
    )
    assert make_plan(request).decision.steps == (Step(3, L, 0), Step(3, W, 0), Step(3, L, 1), Step(3, W, 1))


def test_original_leaves_lone_candidates_where_they_were() -> None:
    request = request_of(
        [
            gather("a", launch=1, wait=3, launch_order=0, wait_order=3),
            gather("b", launch=2, wait=2, launch_order=1, wait_order=2),
        ]
    )
    decision = make_plan(request).decision
    assert decision.steps == (Step(1, L, 0), Step(2, L, 1), Step(2, W, 1), Step(3, W, 0))


def test_original_moves_a_lone_candidate_only_as_far_as_what_feeds_it() -> None:
    late = {"earliest_launch": 3, "launch": 3, "wait": 3}
    request = request_of(
        [
            reduction("a", launch=1, wait=1, launch_order=0, wait_order=1),
            gather("b", launch=1, wait=1, launch_order=2, wait_order=3, depends_on=(0,)),
            reduction("a", **late, launch_order=4, wait_order=5),
        ]
    )
    assert make_plan(request).decision.steps == (Step(3, L, 0), Step(3, W, 0), Step(3, L, 1), Step(3, W, 1))


def test_scheduled_issues_gathers_as_many_buckets_ahead_as_asked() -> None:
    def launches(prefetch: int) -> list[int]:
        request = gathers(4, placement="scheduled", prefetch=prefetch, bucket_cap_bytes=1, first_bucket_cap_bytes=1)
        steps = make_plan(request).decision.steps
        assert [step.gap for step in steps if step.op is W] == [0, 1, 2, 3]
        return [step.gap for step in steps if step.op is L]

    assert launches(0) == [0, 1, 2, 3]
    assert launches(1) == [0, 0, 1, 2]
    assert launches(2) == [0, 0, 0, 1]
    assert launches(9) == [0, 0, 0, 0]


def test_scheduled_launches_a_gather_behind_the_wait_that_frees_its_place() -> None:
    request = gathers(3, placement="scheduled", bucket_cap_bytes=1, first_bucket_cap_bytes=1)
    steps = [(step.gap, step.op, step.target) for step in make_plan(request).decision.steps]
    assert steps == [(0, L, 0), (0, W, 0), (0, L, 1), (1, W, 1), (1, L, 2), (2, W, 2)]


def test_scheduled_issues_a_reduction_when_ready_and_waits_at_the_end() -> None:
    request = request_of(
        [
            reduction("a", earliest_launch=1, launch=2, wait=2, launch_order=0, wait_order=1),
            reduction("a", dtype="float32", earliest_launch=2, launch=3, wait=3, launch_order=2, wait_order=3),
        ],
        placement="scheduled",
    )
    assert make_plan(request).decision.steps == (Step(1, L, 0), Step(2, L, 1), Step(4, W, 0), Step(4, W, 1))


def test_scheduled_does_not_hold_a_result_past_the_last_launch_that_needs_it() -> None:
    request = request_of(
        [
            reduction("a", launch_order=0, wait_order=1),
            reduction("a", earliest_launch=3, launch=3, wait=3, launch_order=4, wait_order=5),
            reduction("b", latest_launch=1, launch_order=2, wait_order=3, depends_on=(0,)),
        ],
        placement="scheduled",
        bucket_cap_bytes=1,
        first_bucket_cap_bytes=1,
    )
    plan = make_plan(request)
    check_plan(request, plan)
    (fed,) = (i for i, bucket in enumerate(plan.decision.buckets) if request.lanes[bucket.lane].group == "b")
    assert Step(1, L, fed) in plan.decision.steps


def test_scheduled_waits_before_a_fixed_collective_that_reads_the_result() -> None:
    request = request_of(
        [gather("a", launch_order=0, wait_order=1)],
        [FixedCollective(kind="all_to_all", group="b", launch=2, launch_order=2, depends_on=(0,))],
        placement="scheduled",
    )
    assert make_plan(request).decision.steps == (Step(0, L, 0), Step(2, W, 0), Step(2, FL, 0))


def test_wishes_that_form_a_circle_with_dependencies_are_dropped() -> None:
    """Each lane wants its first bucket waited for before its second launches, but that feeds the other's first."""
    request = request_of(
        [
            gather("a", launch_order=0, wait_order=1, first_use=4),
            gather("b", launch_order=2, wait_order=3, first_use=4),
            gather("b", launch_order=4, wait_order=5, first_use=3, latest_wait=3, depends_on=(0,)),
            gather("a", launch_order=6, wait_order=7, first_use=3, latest_wait=3, depends_on=(1,)),
        ],
        placement="scheduled",
        bucket_cap_bytes=1,
        first_bucket_cap_bytes=1,
    )
    plan = make_plan(request)
    check_plan(request, plan)
    assert plan.decision.num_fused == 0


def test_events_of_one_gap_run_by_key_then_launches_first_then_by_position() -> None:
    request = request_of([gather("a", launch_order=2 * k, wait_order=2 * k + 1) for k in range(3)])
    placements = [
        Placement((0,), 1, 1, launch_key=5, wait_key=7),
        Placement((1,), 1, 1, launch_key=5, wait_key=6),
        Placement((2,), 1, 1, launch_key=9, wait_key=0),
    ]
    assert [(step.op, step.target) for step in arrange(request, placements)] == [
        (L, 0),
        (L, 1),
        (W, 1),
        (W, 0),
        (L, 2),
        (W, 2),
    ]


def test_placements_that_contradict_dependencies_are_named() -> None:
    request = request_of(
        [
            gather("a", launch_order=0, wait_order=1),
            gather("b", launch_order=2, wait_order=3, depends_on=(0,)),
        ]
    )
    with pytest.raises(Unschedulable, match="waited for after a launch that needs it") as conflict:
        arrange(request, [Placement((1,), 1, 2), Placement((0,), 1, 2)])
    assert conflict.value.buckets == {0, 1}
    with pytest.raises(Unschedulable) as conflict:
        arrange(request, [Placement((0,), 2, 1), Placement((1,), 3, 3)])
    assert conflict.value.buckets == {0}


@given(requests(max_collectives=20, edge_probability=0.8))
@settings(max_examples=count(test=150, soak=20_000))
def test_all_alone_has_an_order_in_both_placements(request: Request) -> None:
    alone = [(index,) for index in range(len(request.candidates))]
    for place in PLACES:
        placements = place(request, alone)
        check_decision(request, decide(request, "none/1", placements))
    original = [(step.op, step.gap) for step in arrange(request, place_original(request, alone))]
    events = sorted(
        [(c.launch_order, L, c.launch) for c in request.candidates]
        + [(c.wait_order, W, c.wait) for c in request.candidates]
        + [(f.launch_order, FL, f.launch) for f in request.fixed]
        + [(f.wait_order, FW, f.wait) for f in request.fixed if f.wait is not None and f.wait_order is not None]
    )
    assert original == [(op, gap) for _, op, gap in events]


@pytest.mark.soak
def test_any_buckets_of_a_lane_become_legal_in_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole lanes as single buckets, across tangled dependencies."""
    rounds = 0

    def counted(place: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            nonlocal rounds
            rounds += 1
            return place(*arguments)

        return run

    fused = 0
    for seed in seeds("whole lanes", test=150, soak=20_000):
        rng = random.Random(seed)
        request = random_request(
            rng, options=random_options(rng, strategies=["size"]), max_collectives=40, edge_probability=rng.random()
        )
        for place in PLACES:
            rounds = 0
            placements = legalize(request, [lane.members for lane in request.lanes], counted(place))
            assert rounds <= 2 + schedule._ROUNDS_OF_HALVING + schedule._ROUNDS_OF_SPLITTING
            decision = decide(request, "size/1", placements)
            check_decision(request, decision)
            fused += decision.num_fused
    assert fused


def test_a_tangle_that_halving_does_not_resolve_is_split_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "_ROUNDS_OF_HALVING", 0)
    monkeypatch.setattr(schedule, "_ROUNDS_OF_SPLITTING", 0)
    request = crossed()
    placements = legalize(request, [(0, 3), (1, 2)], place_original)
    assert sorted(placement.members for placement in placements) == [(0,), (1,), (2,), (3,)]


def work_of(run: Callable[[], object]) -> int:
    """How many bytecodes `run` executes: work that no other load of the machine changes."""
    executed = 0

    def trace(frame: Any, event: str, argument: object) -> Any:
        nonlocal executed
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        executed += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return executed


def identical(num: int, **options: Any) -> Request:
    """`num` equal gathers in one gap."""
    return request_of([gather("a", launch_order=2 * k, wait_order=2 * k + 1) for k in range(num)], **options)


def chained(num: int, **options: Any) -> Request:
    """Reductions over two groups in turn, each fed by the one before, all in one gap: nothing can be fused."""
    return request_of(
        [
            reduction("ab"[k % 2], launch_order=2 * k, wait_order=2 * k + 1, depends_on=(k - 1,) if k else ())
            for k in range(num)
        ],
        **options,
    )


def scattered(num: int, **options: Any) -> Request:
    """Every gather in a group and lane of its own, with a fixed collective beside it that reads the result."""
    roles = [f"g{k % 900:04}" for k in range(num)]
    return Request.build(
        num_segments=4,
        groups=[Group(role=role, size=2) for role in dict.fromkeys(roles)],
        candidates=[gather(roles[k], launch_order=3 * k, wait_order=3 * k + 1) for k in range(num)],
        fixed=[
            FixedCollective(kind="send", group=roles[k], launch=0, launch_order=3 * k + 2, depends_on=(k,))
            for k in range(num)
        ],
        options=replace(Options(strategy="size", planner="size/1"), **options),
    )


MAKERS = (identical, chained, scattered)


@pytest.mark.parametrize("placement", ["original", "scheduled"])
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("cap", [1, 64, 10**9])
def test_planning_grows_in_proportion_to_candidates(make: Callable[..., Request], placement: str, cap: int) -> None:
    def work(num: int) -> int:
        request = make(num, placement=placement, bucket_cap_bytes=cap, first_bucket_cap_bytes=cap)
        return work_of(lambda: make_plan(request))

    assert work(400) < 2.5 * work(200)


@pytest.mark.parametrize("make", MAKERS)
def test_reading_checking_and_digests_grow_in_proportion_to_candidates(make: Callable[..., Request]) -> None:
    def work(num: int) -> int:
        data = make(num).encoded
        plan = make_plan(make(num))

        def run() -> None:
            request = Request.decode(data)
            decision = Plan.decode(plan.encoded).decision
            check_decision(request, decision)
            group_digests(request, decision)

        return work_of(run)

    assert work(400) < 2.5 * work(200)


@pytest.mark.parametrize("placement", ["original", "scheduled"])
def test_ten_thousand_equal_candidates_are_planned_and_checked(placement: str) -> None:
    request = identical(10_000, placement=placement, bucket_cap_bytes=320, first_bucket_cap_bytes=320)
    plan = make_plan(request)
    assert [len(bucket.members) for bucket in plan.decision.buckets] == [10] * 1_000
    assert Decision.decode(plan.decision.encoded) == plan.decision
