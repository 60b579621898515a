"""What a group's digest covers, and how ranks that disagree are named."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings

from bucketplan_core.errors import GroupPlanMismatch
from bucketplan_core.groups import group_digest, group_digests, validate_group_plans
from bucketplan_core.legality import check_decision
from bucketplan_core.plan import Decision, StepOp
from bucketplan_core.planning import make_plan
from bucketplan_core.request import Request
from tests.core.test_decoding import small_request
from tests.core.test_schedule import gather, request_of
from tests.support.counts import count
from tests.support.decisions import random_legal_decision
from tests.support.requests import randoms, requests


def two_groups(**changes: object) -> Request:
    """Two fusable gathers in each of two groups, side by side."""
    fields = [{"group": role, "param_name": f"{role}{k}", "ordinal": 2 * k} for k in range(2) for role in "ab"]
    fields[0] |= changes
    return request_of(
        [
            gather(str(c.pop("group")), launch_order=2 * k, wait_order=2 * k + 1, **c)
            for k, c in enumerate(map(dict, fields))
        ]
    )


def digests(request: Request) -> dict[str, str]:
    return group_digests(request, make_plan(request).decision)


def test_one_digest_a_group_that_has_candidates() -> None:
    request = small_request()
    found = digests(request)
    assert set(found) == {"dp"}  # tp has fixed collectives only
    assert found["dp"] == group_digest(request, make_plan(request).decision, "dp")


@pytest.mark.parametrize(
    "changes",
    [
        {"param_name": "other"},
        {"ordinal": 7},
        {"state_idx": 3},
        {"dtype": "float32"},
        {"device_type": "xpu"},
        {"input_shape": (4, 2), "output_shape": (8, 2)},
        {"kind": "fsdp_all_gather_backward"},
    ],
    ids=lambda changes: ", ".join(changes),
)
def test_a_change_in_one_group_shows_in_its_digest_alone(changes: dict[str, object]) -> None:
    before, after = digests(two_groups()), digests(two_groups(**changes))
    assert before["a"] != after["a"]
    assert before["b"] == after["b"]


def test_names_and_planner_do_not_matter_but_order_does() -> None:
    request = two_groups()
    decision = make_plan(request).decision
    named = replace(
        decision,
        planner="manual/1",
        buckets=tuple(replace(bucket, id=f"x{bucket.id}") for bucket in decision.buckets),
    )
    assert group_digests(request, named) == group_digests(request, decision)
    turned = replace(
        decision, buckets=(replace(decision.buckets[0], members=decision.buckets[0].members[::-1]), decision.buckets[1])
    )
    assert group_digests(request, turned)["a"] != group_digests(request, decision)["a"]


def test_the_order_of_fixed_collectives_of_the_group_matters() -> None:
    request = small_request()
    decision = make_plan(request).decision
    base = group_digest(request, decision, "tp")
    swapped = [step for step in decision.steps if not (step.op is StepOp.FIXED_WAIT and step.target == 0)]
    assert group_digest(request, replace(decision, steps=tuple(swapped)), "tp") != base
    assert group_digest(request, replace(decision, steps=tuple(swapped)), "dp") == group_digest(request, decision, "dp")


@given(requests(min_candidates=2), randoms())
@settings(max_examples=count(test=100, soak=10_000))
def test_ranks_that_issue_a_groups_collectives_otherwise_have_another_digest(
    request: Request, rng: random.Random
) -> None:
    """Whatever two legal decisions have a group do otherwise shows in its digest."""
    a, b = (random_legal_decision(rng, request) for _ in range(2))

    def issued(decision: Decision, role: str) -> list[object]:
        found: list[object] = []
        for step in decision.steps:
            if step.op <= StepOp.WAIT:
                bucket = decision.buckets[step.target]
                if request.lanes[bucket.lane].group == role:
                    members = [request.candidates[m] for m in bucket.members]
                    key = [(c.kind, c.dtype, c.reduce_op, c.input_shape, c.param_name, c.state_idx) for c in members]
                    found.append((step.op, key))
            elif request.fixed[step.target].group == role:
                found.append((step.op, request.fixed[step.target].kind))
        return found

    check_decision(request, a)
    for role, digest in group_digests(request, a).items():
        if issued(a, role) != issued(b, role):
            assert digest != group_digest(request, b, role)
    assert group_digests(request, a) == group_digests(request, Decision.decode(a.encoded))


def test_ranks_that_agree_pass() -> None:
    validate_group_plans("fsdp", dict.fromkeys(range(64), "d" * 64), {rank: range(64) for rank in range(64)})
    validate_group_plans("fsdp", {})


def test_the_error_lists_which_ranks_hold_which_plan_the_many_first() -> None:
    held = dict.fromkeys(range(64), "aa") | {3: "bb", 17: "cc", 18: "cc"}
    with pytest.raises(GroupPlanMismatch) as mismatch:
        validate_group_plans("fsdp", held)
    error = mismatch.value
    assert error.role == "fsdp"
    assert error.what == "plan"
    assert error.holders == {"aa": tuple(r for r in range(64) if held[r] == "aa"), "bb": (3,), "cc": (17, 18)}
    assert str(error) == (
        "group 'fsdp': its ranks do not agree on the plan: ranks 0-2, 4-16, 19-63 hold aa; ranks 17-18 hold cc; "
        "rank 3 holds bb. Applying either would hang the job; compare the graphs of the odd ranks with the others"
    )


def test_equal_plans_over_other_member_lists_are_refused_too() -> None:
    held = dict.fromkeys((0, 1, 2), "aa")
    with pytest.raises(GroupPlanMismatch, match=r"on the member list: ranks 0-1 hold 0,1,2; rank 2 holds 2,1,0"):
        validate_group_plans("fsdp", held, {0: [0, 1, 2], 1: [0, 1, 2], 2: [2, 1, 0]})
