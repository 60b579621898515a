"""Planners by rule, on recorded graphs and random requests: legal, each candidate once, within the caps."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings

from bucketplan_core.collectives import Options
from bucketplan_core.errors import DecodeError, PlannerUnavailable, PlanningError
from bucketplan_core.groups import group_digests
from bucketplan_core.legality import check_decision
from bucketplan_core.plan import Decision, Plan, StepOp
from bucketplan_core.planners import PLANNERS, current_version, find_planner
from bucketplan_core.planning import make_plan
from bucketplan_core.profile import CostProfile
from bucketplan_core.request import Request
from tests.core.test_decoding import small_request
from tests.support.counts import count, seeds
from tests.support.decisions import is_legal
from tests.support.graphs import graph_names, load_graph
from tests.support.requests import random_options, random_profile, random_request, requests

GRAPHS = graph_names() or [
    pytest.param("", marks=pytest.mark.skip(reason="no recorded graphs; set BUCKETPLAN_GRAPHS to their folder"))
]
PLACEMENTS = ("original", "scheduled")
CAP = 200_000_000


def needs_graph(name: str) -> Any:
    return pytest.mark.skipif(
        name not in graph_names(), reason=f"no recorded graph {name}; set BUCKETPLAN_GRAPHS to their folder"
    )


def options(strategy: str, placement: str, **fields: Any) -> Options:
    fields = {"bucket_cap_bytes": CAP, "first_bucket_cap_bytes": CAP // 4} | fields
    return Options(strategy=strategy, planner=f"{strategy}/1", placement=placement, **fields)


def with_scopes(request: Request, strategy_options: Options) -> Request:
    """The request with its modules, blocks of layers, as scopes."""
    return Request.build(
        num_segments=request.num_segments,
        groups=request.groups,
        candidates=[
            replace(c, scope=".".join(c.module_fqns[0].split(".")[:2]) if c.module_fqns else None)
            for c in request.candidates
        ],
        fixed=request.fixed,
        options=strategy_options,
        phase=request.phase,
    )


def sizes_within_caps(request: Request, decision: Decision, *, first_cap_bytes: int, cap_bytes: int) -> Iterator[bool]:
    """For every bucket of several members: whether it is below the cap, one bucket of a lane below its first cap."""
    first_seen: set[int] = set()
    order = sorted(decision.buckets, key=lambda bucket: min(map(request.lane_position, bucket.members)))
    for bucket in order:
        cap = cap_bytes if bucket.lane in first_seen else first_cap_bytes
        first_seen.add(bucket.lane)
        if len(bucket.members) > 1:
            yield sum(request.candidates[m].full_bytes for m in bucket.members) <= cap


def check_plan(request: Request, plan: Plan) -> None:
    """What holds for every plan of every strategy."""
    decision = plan.decision
    check_decision(request, decision)
    assert is_legal(request, decision)
    assert Counter(m for b in decision.buckets for m in b.members) == Counter(range(len(request.candidates)))
    assert Plan.decode(plan.encoded, expected_signature=request.signature) == plan
    assert plan.assessment["num_buckets"] == len(decision.buckets)
    assert plan.assessment["num_fused_buckets"] == decision.num_fused
    launches = [step.target for step in decision.steps if step.op is StepOp.LAUNCH]
    assert launches == list(range(len(decision.buckets)))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", GRAPHS)
def test_size_on_recorded_graphs(name: str, placement: str) -> None:
    request, profile = load_graph(name, options("size", placement))
    plan = make_plan(request, profile)
    check_plan(request, plan)
    assert all(sizes_within_caps(request, plan.decision, first_cap_bytes=CAP // 4, cap_bytes=CAP))
    assert plan.decision.num_fused > 0
    assert plan.decision.profile is None
    assert plan.assessment["profile"] == profile.digest


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", GRAPHS)
def test_none_on_recorded_graphs(name: str, placement: str) -> None:
    request, profile = load_graph(name, options("none", placement))
    plan = make_plan(request, profile)
    check_plan(request, plan)
    assert plan.decision.num_fused == 0
    if placement == "original":
        original = {
            (step.op, plan.decision.buckets[step.target].members[0]): step.gap
            for step in plan.decision.steps
            if step.op <= StepOp.WAIT
        }
        for index, candidate in enumerate(request.candidates):
            assert original[(StepOp.LAUNCH, index)] == candidate.launch
            assert original[(StepOp.WAIT, index)] == candidate.wait


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", GRAPHS)
def test_module_on_recorded_graphs(name: str, placement: str) -> None:
    base, profile = load_graph(name)
    request = with_scopes(base, options("module", placement))
    if not any(candidate.scope for candidate in request.candidates):
        with pytest.raises(PlanningError, match="no candidate has a scope"):
            make_plan(request, profile)
        return
    plan = make_plan(request, profile)
    check_plan(request, plan)
    for bucket in plan.decision.buckets:
        scopes = {request.candidates[member].scope for member in bucket.members}
        assert len(scopes) == 1
        if len(bucket.members) > 1:
            assert scopes != {None}
            assert sum(request.candidates[m].full_bytes for m in bucket.members) <= CAP


@pytest.mark.parametrize("placement", PLACEMENTS)
@needs_graph("tt_llama3_8b_hsdp2x32")
def test_all_reduces_that_feed_reduce_scatters_are_fused(placement: str) -> None:
    request, profile = load_graph("tt_llama3_8b_hsdp2x32", options("size", placement))
    decision = make_plan(request, profile).decision
    kinds = Counter(request.lanes[bucket.lane].kind for bucket in decision.buckets if len(bucket.members) > 1)
    assert kinds["dp_all_reduce"] >= 30
    assert kinds["fsdp_reduce_scatter"] >= 30
    assert sum(len(candidate.depends_on) for candidate in request.candidates) > 200


@pytest.mark.parametrize("placement", PLACEMENTS)
@needs_graph("tt_llama3_4l_uneven6_r5")
def test_two_ranks_whose_shards_differ_hold_one_plan(placement: str) -> None:
    (first, profile), (last, _) = (
        load_graph(f"tt_llama3_4l_uneven6_{rank}", options("size", placement)) for rank in ("r0", "r5")
    )
    assert first.signature == last.signature
    assert first.encoded == last.encoded
    plans = [make_plan(request, profile) for request in (first, last)]
    assert plans[0].encoded == plans[1].encoded
    assert plans[0].decision.num_fused > 0
    assert group_digests(first, plans[0].decision) == group_digests(last, plans[1].decision)


@needs_graph("tt_dsv3_16b_fsdp64_ep8")
def test_dense_and_expert_groups_are_planned_at_once() -> None:
    request, profile = load_graph("tt_dsv3_16b_fsdp64_ep8", options("size", "original"))
    decision = make_plan(request, profile).decision
    fused = {request.lanes[bucket.lane].group for bucket in decision.buckets if len(bucket.members) > 1}
    assert fused == {candidate.group for candidate in request.candidates}
    assert len(fused) == 2


@given(requests(max_collectives=24))
@settings(max_examples=count(test=200, soak=20_000))
def test_every_strategy_plans_every_request(request: Request) -> None:
    if request.options.strategy == "module":
        assume(any(candidate.scope for candidate in request.candidates) or not request.candidates)
    plan = make_plan(request)
    check_plan(request, plan)
    given_options = request.options
    if given_options.strategy == "none":
        assert plan.decision.num_fused == 0
    elif given_options.strategy == "module":
        for bucket in plan.decision.buckets:
            assert len({request.candidates[member].scope for member in bucket.members}) == 1
    if given_options.strategy == "size":
        assert all(
            sum(request.candidates[m].full_bytes for m in bucket.members)
            <= max(given_options.bucket_cap_bytes, given_options.first_bucket_cap_bytes)
            for bucket in plan.decision.buckets
            if len(bucket.members) > 1
        )


@pytest.mark.soak
def test_hsdp_chains_in_both_directions_are_planned() -> None:
    """All-reduce before reduce-scatter as torchtitan has it, after it as FSDP2 has it, and fixed ones between."""
    fused = 0
    for seed in seeds("chains", test=150, soak=20_000):
        rng = random.Random(seed)
        request = random_request(
            rng,
            options=random_options(rng, strategies=["size"]),
            min_candidates=6,
            max_collectives=40,
            kinds=("fsdp_reduce_scatter", "dp_all_reduce", "dp_all_reduce", "fsdp_reduce_scatter", "fixed"),
            edge_probability=0.9,
        )
        plan = make_plan(request, random_profile(rng, request))
        check_plan(request, plan)
        fused += plan.decision.num_fused
    assert fused > 50


def test_the_first_bucket_of_a_lane_has_a_cap_of_its_own() -> None:
    request = gathers(8, bucket_cap_bytes=4 * 24, first_bucket_cap_bytes=2 * 24)
    sizes = [len(bucket.members) for bucket in make_plan(request).decision.buckets]
    assert sizes == [2, 4, 2]


def test_a_candidate_above_the_cap_stands_alone() -> None:
    request = gathers(3, bucket_cap_bytes=23, first_bucket_cap_bytes=23)
    assert make_plan(request).decision.num_fused == 0


def test_payload_order_is_registration_order_whatever_the_launch_order() -> None:
    request = gathers(4, ordinals=[3, 1, None, 0])
    (bucket,) = make_plan(request).decision.buckets
    assert bucket.members == (3, 1, 0, 2)


def test_gathers_of_several_dtypes_fuse_as_bytes_only_where_the_option_says() -> None:
    for mixed, sizes in ((False, [2, 2]), (True, [4])):
        request = gathers(4, dtypes=["bfloat16", "float32"] * 2, mixed_dtype=mixed)
        assert [len(bucket.members) for bucket in make_plan(request).decision.buckets] == sizes
        assert {lane.wire_dtype for lane in request.lanes} == ({"bytes"} if mixed else {"bfloat16", "float32"})


def test_a_request_without_candidates_has_an_empty_plan() -> None:
    request = Request.build(
        num_segments=0, groups=[], candidates=[], fixed=[], options=Options(strategy="module", planner="module/1")
    )
    assert make_plan(request).decision.buckets == ()
    assert make_plan(request).decision.steps == ()


def test_module_without_scopes_says_what_to_do() -> None:
    request = gathers(2).with_options(Options(strategy="module", planner="module/1"))
    with pytest.raises(PlanningError, match=r"option strategy='module': no candidate has a scope; give module paths"):
        make_plan(request)


def test_a_planner_of_another_build_is_named_with_those_there_are() -> None:
    with pytest.raises(PlannerUnavailable, match=r"'size/99'.*this build holds .*size/1") as refusal:
        make_plan(gathers(1, planner="size/99"))
    assert refusal.value.available == tuple(planner.version for planner in PLANNERS)


def test_versions_are_unique_and_name_their_strategy() -> None:
    versions = [planner.version for planner in PLANNERS]
    assert len(set(versions)) == len(versions)
    for strategy in ("none", "size", "module"):
        assert find_planner(current_version(strategy)).version.startswith(f"{strategy}/")
    with pytest.raises(PlannerUnavailable):
        current_version("best")


def test_a_profile_of_another_request_is_refused() -> None:
    request = small_request()
    with pytest.raises(DecodeError, match=r"profile\.live_bytes: must have 4 entries, one a segment of the request"):
        make_plan(request, CostProfile(work=(), live_bytes=(0, 0), fixed_bytes=(0, 0)))
    with pytest.raises(DecodeError, match=r"profile\.fixed_bytes: must have 2 entries, one a fixed collective"):
        make_plan(request, CostProfile(work=(), live_bytes=(0,) * 4, fixed_bytes=(0,)))


def gathers(
    num: int,
    *,
    ordinals: list[int | None] | None = None,
    dtypes: list[str] | None = None,
    wide: bool = True,
    **fields: Any,
) -> Request:
    """`num` gathers of 24 bytes, one segment apart, that may all be launched at the start (`wide`) or only in place."""
    base = small_request().candidates[0]
    candidates = [
        replace(
            base,
            dtype=dtypes[k] if dtypes else "bfloat16",
            param_name=f"p{k}",
            ordinal=ordinals[k] if ordinals else k,
            state_idx=None,
            earliest_launch=0 if wide else k,
            launch=k,
            latest_launch=k,
            wait=k,
            latest_wait=k,
            first_use=k,
            last_use=k,
            launch_order=2 * k,
            wait_order=2 * k + 1,
        )
        for k in range(num)
    ]
    return Request.build(
        num_segments=num,
        groups=small_request().groups,
        candidates=candidates,
        fixed=[],
        options=replace(Options(strategy="size", planner="size/1"), **fields),
    )
