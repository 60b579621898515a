"""Memory budgets of `auto` on requests with edges, narrow windows, waits away from launches and several groups."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from bucketplan_core.collectives import ALL_GATHER_KINDS, REDUCE_KINDS, Candidate, FixedCollective, Group, Options
from bucketplan_core.cost import CostModel
from bucketplan_core.errors import PlanningError
from bucketplan_core.planning import make_plan
from bucketplan_core.profile import CostProfile, WorkClass
from bucketplan_core.request import Request
from bucketplan_core.simulate import simulate
from tests.core.planner_cases import hardware, least_named
from tests.support.counts import seeds

Orders = tuple[dict[int, int], dict[int, int]]


def random_orders(rng: random.Random, spans: list[tuple[int, int]]) -> Orders:
    """Launch and wait orders of collectives launched and waited for at these gaps, at random inside a gap."""
    events = []
    for index, (launch, wait) in enumerate(spans):
        first, second = sorted((rng.random(), rng.random()))
        events.append((launch, first, 0, index))
        events.append((wait, second if launch == wait else rng.random(), 1, index))
    launched: dict[int, int] = {}
    waited: dict[int, int] = {}
    for number, (_, _, which, index) in enumerate(sorted(events)):
        (waited if which else launched)[index] = number
    return launched, waited


def random_edges(rng: random.Random, index: int, orders: Orders) -> tuple[int, ...]:
    launched, waited = orders
    done = [other for other, order in waited.items() if order < launched[index]]
    return tuple(sorted(rng.sample(done, min(len(done), rng.choice((0, 1, 1, 2))))))


def random_candidate(
    rng: random.Random, span: tuple[int, int], segments: int, unit: int, sizes: dict[str, int], wide: float
) -> dict[str, object]:
    launch, wait = span
    kind = rng.choice((*ALL_GATHER_KINDS, *REDUCE_KINDS))
    group = rng.choice(list(sizes))
    elements = rng.choice((0, 1, rng.randrange(7), rng.randrange(60))) * unit
    gather = kind in ALL_GATHER_KINDS
    earliest = launch if rng.random() < 0.7 else rng.randint(0, launch)
    latest_wait = wait if rng.random() < 0.5 else rng.randint(wait, segments)
    if rng.random() < wide:
        earliest, latest_wait = (0, latest_wait) if gather else (earliest, segments)
    first_use = latest_wait if rng.random() < 0.7 else rng.randint(latest_wait, segments)
    return {
        "kind": kind,
        "group": group,
        "group_size": sizes[group],
        "dtype": rng.choice(("uint8", "bfloat16")),
        "device_type": "cuda",
        "input_shape": (elements * sizes[group],) if kind == "fsdp_reduce_scatter" else (elements,),
        "output_shape": (elements * sizes[group],) if gather else (elements,),
        "reduce_op": None if gather else "sum",
        "earliest_launch": earliest,
        "launch": launch,
        "latest_launch": max(launch, latest_wait) if rng.random() < 0.7 else rng.randint(launch, segments),
        "wait": wait,
        "latest_wait": latest_wait,
        "first_use": first_use,
        "last_use": rng.randint(first_use, segments),
    }


def odd_case(rng: random.Random) -> tuple[Request, CostProfile]:
    """Up to six candidates; half of the cases have edges, and windows go from none to the whole graph."""
    segments = rng.randint(1, 12)
    sizes = {f"g{number}": rng.choice((1, 2, 3, 8)) for number in range(rng.choice((1, 1, 2, 3)))}
    unit = rng.choice((1, 1, 100, 5_000_000))
    num_candidates, num_fixed = rng.randint(1, 6), rng.choice((0, 0, 0, 1, 2))
    spans = []
    for _ in range(num_candidates + num_fixed):
        launch = rng.randint(0, segments)
        spans.append((launch, launch if rng.random() < 0.6 else rng.randint(launch, segments)))
    orders = random_orders(rng, spans)
    with_edges = rng.random() < 0.5
    edges = [random_edges(rng, index, orders) if with_edges else () for index in range(len(spans))]
    wide = rng.choice((0, 0.3, 0.7, 1))
    request = Request.build(
        num_segments=segments,
        groups=[Group(role=role, size=size) for role, size in sizes.items()],
        candidates=[
            Candidate(
                **random_candidate(rng, spans[i], segments, unit, sizes, wide), launch_order=orders[0][i],
                wait_order=orders[1][i], param_name=f"layers.{i // 3}.p{i}", ordinal=i, depends_on=edges[i],
            )
            for i in range(num_candidates)
        ],
        fixed=[
            FixedCollective(
                kind="all_to_all", group=rng.choice(list(sizes)), launch=spans[i][0], launch_order=orders[0][i],
                wait=spans[i][1], wait_order=orders[1][i], depends_on=edges[i],
            )
            for i in range(num_candidates, len(spans))
        ],
        options=Options(
            strategy="auto", planner="auto/1", placement=rng.choice(("scheduled", "scheduled", "original")),
            hardware=hardware(
                alpha_ns=rng.choice((0, 20, 1_000, 50_000)), bytes_per_us=1_000 * unit,
                copy_bytes_per_us=rng.choice((2**50, 8_000 * unit)), launch_ns=rng.choice((0, 3, 5_000)),
                slowdown_permille=rng.choice((0, 0, 150)), groups=list(sizes),
            ),
        ),
    )  # fmt: skip
    scale = rng.choice((1, 20, 2_000, 10**6))
    profile = CostProfile(
        work=(
            WorkClass(
                name="memory",
                flops=(0,) * segments,
                bytes_moved=tuple(rng.choice((0, rng.randrange(scale))) for _ in range(segments)),
            ),
        ),
        live_bytes=tuple(rng.randrange(50 * unit + 1) for _ in range(segments)),
        fixed_bytes=tuple(rng.randrange(60 * unit) for _ in range(num_fixed)),
    )
    return request, profile


def peak_under(request: Request, profile: CostProfile, budget: int) -> tuple[int | None, int | None]:
    """The peak of the plan made under this budget, or the least one that the refusal names; `make_plan` has checked
    the plan's legality.
    """
    tight = request.with_options(replace(request.options, memory_budget_bytes=budget))
    try:
        plan = make_plan(tight, profile)
    except PlanningError as refused:
        if refused.option != "memory_budget_bytes":
            raise
        return None, least_named(refused)
    return simulate(CostModel.build(tight, profile), plan.decision).peak_bytes, None


@pytest.mark.soak
def test_plans_under_a_budget_are_legal_and_keep_it_and_nothing_fits_below_the_least_named():
    for seed in seeds("odd budgets", test=120, soak=3_000):
        request, profile = odd_case(random.Random(seed))
        peak, least = peak_under(request, profile, 0)
        if least is None:
            assert peak == 0, seed
            continue
        assert peak_under(request, profile, least - 1)[0] is None, f"seed {seed}: {least} bytes are not the least"
        for budget in (least, least * 5 // 4, least * 3 // 2, least * 2):
            peak, _ = peak_under(request, profile, budget)
            assert peak is not None, f"seed {seed}: the least named, {least}, fits and {budget} does not"
            assert peak <= budget, seed


@pytest.mark.soak
def test_the_default_budget_is_kept():
    for seed in seeds("odd default budgets", test=120, soak=3_000):
        request, profile = odd_case(random.Random(seed))
        plan = make_plan(request, profile)
        peak = simulate(CostModel.build(request, profile), plan.decision).peak_bytes
        assert peak == plan.assessment["simulated"]["peak_bytes"]
        assert peak <= plan.assessment["memory_budget_bytes"], seed
