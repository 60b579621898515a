"""The checker refuses whatever breaks a rule, by the name of that rule, and accepts everything else."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings

from bucketplan_core.errors import IllegalPlan
from bucketplan_core.legality import RULES, check_decision
from bucketplan_core.plan import Bucket, Decision, Step, StepOp
from bucketplan_core.request import Request
from tests.core.test_decoding import small_request
from tests.support.counts import count, seeds
from tests.support.decisions import BREAKS, Break, is_legal, random_legal_decision
from tests.support.requests import random_request, randoms, requests

WAYS = [(rule, way) for rule, ways in BREAKS.items() for way in ways]
KINDS = ("fsdp_all_gather", "fsdp_reduce_scatter", "fsdp_reduce_scatter", "dp_all_reduce", "fixed", "fixed")


def outcome(request: Request, decision: Decision) -> str | None:
    """The rule that `decision` breaks."""
    try:
        check_decision(request, decision)
    except IllegalPlan as refusal:
        return refusal.rule
    return None


def test_every_rule_has_a_way_to_break_it() -> None:
    assert set(BREAKS) == set(RULES)


@pytest.mark.soak
def test_legal_decisions_are_accepted() -> None:
    fused = 0
    for seed in seeds("legal decisions", test=300, soak=20_000):
        rng = random.Random(seed)
        request = random_request(rng, max_collectives=14, kinds=KINDS)
        decision = random_legal_decision(rng, request)
        assert is_legal(request, decision)
        assert outcome(request, decision) is None
        fused += decision.num_fused
    assert fused


@pytest.mark.soak
@pytest.mark.parametrize(("rule", "way"), WAYS, ids=[f"{rule} {way.__name__.strip('_')}" for rule, way in WAYS])
@given(
    request=requests(min_candidates=3, max_collectives=12, kinds=KINDS, edge_probability=0.7),
    rng=randoms(),
)
@settings(
    max_examples=count(test=60, soak=3_000),
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_each_way_to_break_a_rule_is_refused_by_its_name(
    rule: str, way: Break, request: Request, rng: random.Random
) -> None:
    decision = random_legal_decision(rng, request)
    broken = way(rng, request, decision)
    assume(broken is not None)
    assert broken is not None
    assert not is_legal(request, broken)
    assert outcome(request, broken) == rule


@pytest.mark.soak
def test_checker_and_definition_agree_on_decisions_changed_at_random() -> None:
    """Several changes at once, some of which undo each other: refused exactly where the definition says so."""
    ways = [way for _, way in WAYS]
    legal = illegal = 0
    for seed in seeds("changed decisions", test=600, soak=50_000):
        rng = random.Random(seed)
        request = random_request(rng, min_candidates=2, max_collectives=10, kinds=KINDS)
        decision = random_legal_decision(rng, request)
        if seed % 2:
            steps = list(decision.steps)
            for _ in range(rng.randint(1, 3)):
                if len(steps) > 1:
                    at = rng.randrange(len(steps) - 1)
                    a, b = steps[at], steps[at + 1]
                    steps[at], steps[at + 1] = replace(b, gap=a.gap), replace(a, gap=b.gap)
            changed = replace(decision, steps=tuple(steps))
        else:
            # A way presumes a legal decision; where another left none, one change is what is tested.
            changed = rng.choice(ways)(rng, request, decision) or decision
        expected = is_legal(request, changed)
        assert (outcome(request, changed) is None) == expected
        legal += expected
        illegal += not expected
    assert legal > 20
    assert illegal > 20


@pytest.mark.parametrize(
    ("way", "text"),
    [
        ("trade_members", "of lane"),
        ("drop_member", "candidates are in no bucket"),
        ("launch_outside", "launch at gap"),
        ("wait_outside", "comes after latest_wait"),
        ("need_unmet", "must be waited for before"),
        ("move_fixed", "was moved, reordered or left out"),
        ("drop_fixed", "fixed collective"),
        ("wait_first", "the wait is step"),
    ],
)
def test_the_error_says_where_and_what(way: str, text: str) -> None:
    request = small_request(bucket_cap_bytes=10**9)
    found = next(candidate for _, candidate in WAYS if candidate.__name__ == f"_{way}")
    for seed in range(50):
        rng = random.Random(seed)
        broken = found(rng, request, random_legal_decision(rng, request))
        if broken is None:
            continue
        with pytest.raises(IllegalPlan, match=text) as refusal:
            check_decision(request, broken)
        error = refusal.value
        assert f"rule {error.rule!r} broken" in str(error)
        assert error.members or error.bucket or error.rule in ("fixed", "complete")
        if error.bucket is not None:
            assert repr(error.bucket) in str(error)
        return
    raise AssertionError("no seed offers this way")


def test_a_bucket_that_would_wait_for_itself_is_refused() -> None:
    """The second member needs the result of the first, so no launch serves both."""
    base = small_request()
    first, second, scatter = base.candidates
    for depends_on, expected in (((), None), ((0,), "dependency")):
        request = Request.build(
            num_segments=4,
            groups=base.groups,
            candidates=[
                first,
                replace(second, depends_on=depends_on),
                replace(scatter, depends_on=(), launch_order=4, wait_order=5),
            ],
            fixed=[],
            options=base.options,
        )
        fused = Decision(
            signature=request.signature,
            planner="manual/1",
            buckets=(
                Bucket(id="a", lane=0, members=(0, 1), rewrite="gather"),
                Bucket(id="b", lane=1, members=(2,), rewrite="none"),
            ),
            steps=(
                Step(1, StepOp.LAUNCH, 0),
                Step(1, StepOp.WAIT, 0),
                Step(2, StepOp.LAUNCH, 1),
                Step(2, StepOp.WAIT, 1),
            ),
        )
        assert outcome(request, fused) == expected
