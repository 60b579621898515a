"""The explanation names neighbours, figures and limits that the simulator confirms, for any decision."""

import json
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from bucketplan_core.assess import gap_ppm
from bucketplan_core.bound import lower_bound_ns
from bucketplan_core.cost import CostModel
from bucketplan_core.errors import PlanningError
from bucketplan_core.explain import explain
from bucketplan_core.plan import StepOp
from bucketplan_core.planning import make_plan
from bucketplan_core.schedule import decide, place_scheduled
from bucketplan_core.simulate import simulate
from bucketplan_core.wire import pack, unpack
from tests.core.planner_cases import KINDS, build, candidate, hardware, random_hardware, random_lane

AG, _, RS = KINDS


def test_a_plan_carries_its_figures_beside_the_rules_and_the_bound():
    request, profile = build(
        [candidate(AG, 50, at, 4) for at in (1, 2, 3)], [100] * 4, hw=hardware(copy_bytes_per_us=9_000)
    )
    plan = make_plan(request, profile)
    cost = CostModel.build(request, profile)
    found = simulate(cost, plan.decision)
    assert plan.assessment["simulated"]["step_ns"] == found.step_ns
    assert plan.assessment["bound_ns"] == lower_bound_ns(cost)
    assert plan.assessment["gap_ppm"] == gap_ppm(found.step_ns, lower_bound_ns(cost))
    assert plan.assessment["baselines"]["none"]["step_ns"] == 400 + 3 * 250
    assert plan.assessment["baselines"]["none"]["placement"] == "original"
    assert plan.assessment["baselines"]["size"]["num_collectives"] == 1
    assert "no module scopes" in plan.assessment["baselines"]["module"]["unavailable"]


def test_why_a_lone_candidate_stayed_alone():
    request, profile = build(
        [candidate(AG, 5_000, at, 9) for at in (4, 8)], [10_000] * 9, hw=hardware(copy_bytes_per_us=2_000)
    )
    plan = make_plan(request, profile)
    tree = explain(request, profile, plan.decision)
    assert [len(bucket["members"]) for bucket in tree["buckets"]] == [1, 1]
    first, second = tree["buckets"]
    assert "its communication is hidden" in first["alone"]
    assert first["closed"]["stream_saved_ns"] == second["opened"]["stream_saved_ns"] == 200
    assert first["closed"]["compute_added_ns"] == 10_000 + 20_000  # 2 * 10,000 and 2 * 20,000 bytes at 2 bytes a ns
    assert first["opened"] == {"because": "there is no previous bucket in its lane"}
    assert tree["limits"]["most"] == "compute"


def test_a_merger_at_a_stall_is_simulated_and_the_simulator_agrees_with_what_is_said():
    gathers = [candidate(AG, 400, at, 6) for at in (1, 2, 3)]
    request, profile = build(gathers, [100] * 6, hw=hardware(copy_bytes_per_us=200_000))
    alone = decide(request, "none/1", place_scheduled(request, [(0,), (1,), (2,)]))
    tree = explain(request, profile, alone)
    closed = tree["buckets"][1]["closed"]
    cost = CostModel.build(request, profile)
    merged = simulate(cost, decide(request, "none/1", place_scheduled(request, [(0,), (1, 2)])))
    assert closed["step_changed_ns"] == merged.step_ns - simulate(cost, alone).step_ns
    assert closed["step_changed_ns"] < 0
    assert f"{-closed['step_changed_ns']} ns shorter" in closed["because"]


def test_what_waits_in_a_busy_stream_is_not_called_hidden():
    # The first result is long there when it is used; the second, queued behind it, is not.
    gathers = [candidate(AG, 900, 3, 4), candidate(AG, 900, 4, 4)]
    request, profile = build(gathers, [300] * 4, hw=hardware(copy_bytes_per_us=500), prefetch=2)
    alone = decide(request, "none/1", place_scheduled(request, [(0,), (1,)]))
    first, second = explain(request, profile, alone)["buckets"]
    assert second["exposed_ns"] > 0
    assert "hidden" not in first["alone"]
    assert "ns of launch and packing added" in first["alone"]


def test_a_bucket_that_delays_a_fixed_collective_of_its_stream_holds_something_up():
    # Both results are there long before they are used, but the stream is busy when the fixed collective arrives.
    gathers = [candidate(AG, 900, 6, 8), candidate(AG, 900, 6, 8)]
    fixed = [{"kind": "all_to_all", "group": "g", "launch": 2}]
    request, profile = build(gathers, [300] * 2 + [3_000] * 6, fixed=fixed, fixed_bytes=[200], prefetch=2)
    alone = decide(request, "none/1", place_scheduled(request, [(0,), (1,)]))
    found = simulate(CostModel.build(request, profile), alone)
    assert [times.exposed_ns for times in found.buckets] == [0, 0]
    assert found.fixed[0].started_ns > found.fixed[0].launched_ns
    for bucket in explain(request, profile, alone)["buckets"]:
        assert "holds up nothing" not in bucket["alone"]


def _merged_step(request, cost, decision, one, two):
    """The least step of `decision` with these buckets made one by hand, launched at either place, waited for first."""
    least = None
    wait = min(n for n, s in enumerate(decision.steps) if s.op is StepOp.WAIT and s.target in (one, two))
    members = (*decision.buckets[one].members, *decision.buckets[two].members)
    opens = max(request.candidates[m].earliest_launch for m in members)
    places = [n for n, s in enumerate(decision.steps) if s.op is StepOp.LAUNCH and s.target in (one, two)]
    for place in {min(n, wait) for n in places}:
        if decision.steps[place].gap < opens:
            continue
        steps = []
        for number, step in enumerate(decision.steps):
            if number == place:
                steps.append(replace(step, op=StepOp.LAUNCH, target=one))
            if number == wait:
                steps.append(replace(step, op=StepOp.WAIT, target=one))
            if step.op > StepOp.WAIT or step.target not in (one, two):
                steps.append(step)
        kept = [bucket for index, bucket in enumerate(decision.buckets) if index != two]
        number_of = {old: new for new, old in enumerate(i for i in range(len(decision.buckets)) if i != two)}
        kept[number_of[one]] = replace(decision.buckets[one], members=members, rewrite="")
        steps = [s if s.op > StepOp.WAIT else replace(s, target=number_of[s.target]) for s in steps]
        found = simulate(cost, replace(decision, buckets=tuple(kept), steps=tuple(steps))).step_ns
        least = found if least is None else min(least, found)
    return least


def test_every_neighbour_cost_is_the_simulators():
    """Each claimed change of the step, each ns saved and added, from decisions made anew and their simulations."""
    seen = {"longer": 0, "shorter": 0, "as long": 0, "saved": 0}
    for seed in range(60):
        rng = random.Random(seed)
        segments = rng.randrange(2, 7)
        lanes = random_lane(rng, rng.choice(KINDS), rng.randrange(2, 6), segments)
        hw = random_hardware(rng, launch_ns=rng.choice([0, 10, 40]))
        request, profile = build(lanes, [rng.choice([0, rng.randrange(800)]) for _ in range(segments)], hw=hw)
        cost = CostModel.build(request, profile)
        alone = [(m,) for lane in request.lanes for m in lane.members]
        for decision in (
            make_plan(request, profile).decision,
            decide(request, "none/1", place_scheduled(request, alone)),
        ):
            before = simulate(cost, decision).step_ns
            order = sorted(range(len(decision.buckets)), key=lambda i: min(decision.buckets[i].members))
            following = dict(pairwise(order))
            for index, bucket in enumerate(explain(request, profile, decision)["buckets"]):
                closed = bucket["closed"]
                if "step_changed_ns" not in closed:
                    continue
                other = following[index]
                one, two = decision.buckets[index].members, decision.buckets[other].members
                apart, both = [cost.bucket(one), cost.bucket(two)], cost.bucket((*one, *two))
                assert closed["stream_saved_ns"] == sum(c.comm_ns for c in apart) - both.comm_ns
                added = both.launch_ns + both.wait_ns - sum(c.launch_ns + c.wait_ns for c in apart)
                assert closed["compute_added_ns"] == added
                changed = _merged_step(request, cost, decision, index, other) - before
                assert closed["step_changed_ns"] == changed, seed
                word = "longer" if changed > 0 else "shorter" if changed < 0 else "as long"
                assert word in closed["because"]
                assert not changed or f"{abs(changed)} ns {word}" in closed["because"]
                assert (
                    f"{abs(added)} ns of launch and packing {'added' if added >= 0 else 'saved'}" in closed["because"]
                )
                seen[word] += 1
                seen["saved"] += added < 0
    assert all(seen.values()), seen


def test_what_limits_the_step_is_one_sentence_with_its_figures():
    request, profile = build([candidate(AG, 90_000, 1, 1)], [10])
    because = explain(request, profile, make_plan(request, profile).decision)["limits"]["because"]
    assert because == (
        "compute takes 10 of 90200 ns, waiting for g the most beside it, 90190 ns; "
        "no other plan could shorten this noticeably"
    )
    request, profile = build([candidate(AG, 5, 1, 2)], [1_000] * 2)
    because = explain(request, profile, make_plan(request, profile).decision)["limits"]["because"]
    assert because == "compute takes 2000 of 2000 ns: only faster compute makes this step shorter"


def test_windows_that_do_not_meet_are_named_with_their_gaps():
    scatters = [candidate(RS, 9, 0, 6, window=(0, 1)), candidate(RS, 9, 4, 6)]
    request, profile = build(scatters, [10] * 6)
    tree = explain(request, profile, make_plan(request, profile).decision)
    assert "one is ready at gap 4, another is due at gap 1" in tree["buckets"][0]["closed"]["because"]
    assert tree["buckets"][0]["alone"] == "no neighbour can be launched together with it"


def test_the_stream_that_holds_up_the_step_is_named():
    request, profile = build([candidate(AG, 90_000, 1, 1)], [10])
    tree = explain(request, profile, make_plan(request, profile).decision)
    assert tree["limits"]["most"] == "waiting for g"
    assert tree["limits"]["time_ns"]["waiting for g"] == tree["buckets"][0]["exposed_ns"] == 90_200 - 10
    assert tree["limits"]["stream_busy_ns"] == {"g": 90_200}


def test_a_budget_that_is_nearly_used_up_is_called_tight():
    request, profile = build([candidate(AG, 50, 1, 2)], [10, 10])
    decision = make_plan(request, profile).decision
    peak = explain(request, profile, decision)["limits"]["peak_bytes"]
    assert explain(request, profile, decision, memory_budget_bytes=peak)["limits"]["memory_is_tight"]
    assert not explain(request, profile, decision, memory_budget_bytes=2 * peak)["limits"]["memory_is_tight"]


@pytest.mark.parametrize("seed", range(20))
def test_any_legal_decision_is_explained_in_a_tree_that_travels(seed):
    rng = random.Random(seed)
    segments = rng.randrange(1, 6)
    lanes = [c for kind in KINDS for c in random_lane(rng, kind, rng.randrange(5), segments)]
    request, profile = build(lanes, [rng.randrange(500) for _ in range(segments)], hw=random_hardware(rng))
    alone = [(m,) for lane in request.lanes for m in lane.members]
    decision = decide(request, "none/1", place_scheduled(request, alone))
    tree = explain(request, profile, decision)
    found = simulate(CostModel.build(request, profile), decision)
    assert unpack(pack(tree)) == tree
    json.dumps(tree)
    assert sum(bucket["exposed_ns"] for bucket in tree["buckets"]) == found.exposed_ns
    assert sum(tree["limits"]["time_ns"].values()) == found.step_ns


def test_without_figures_of_hardware_there_is_nothing_to_explain_with():
    request, profile = build([], [1])
    unknown = request.with_options(type(request.options)(strategy="none", planner="none/1"))
    with pytest.raises(PlanningError, match="no figures"):
        explain(unknown, profile, make_plan(unknown, profile).decision)
    fallen_back = request.with_options(type(request.options)(strategy="auto", planner="auto/1"))
    with pytest.raises(PlanningError, match="hardware is unknown: planned as size/1 at the caps given"):
        explain(fallen_back, profile, make_plan(fallen_back, profile).decision)
