"""Random legal plans: any grouping inside the lanes, any payload order, launches and waits anywhere they may stand."""

from __future__ import annotations

import random
from dataclasses import replace

from bucketplan_core.legality import check_decision
from bucketplan_core.plan import Decision, Plan
from bucketplan_core.request import Request
from bucketplan_core.schedule import Placement, Unschedulable, arrange, decide, legalize, place_original

__all__ = ["random_plan"]

_PLANNER = "none/1"


def random_plan(request: Request, seed: int) -> Plan:
    """A legal plan that depends on the request and the seed only."""
    rng = random.Random(seed)
    grouping = []
    for lane in request.lanes:
        members = list(lane.members)
        if rng.random() < 0.5:
            rng.shuffle(members)
        while members:
            size = rng.choice((1, 2, 3, len(members)))
            grouping.append(tuple(members[:size]))
            members = members[size:]
    placements = legalize(request, grouping, place_original)
    for index in rng.sample(range(len(placements)), len(placements)):
        moved = [*placements]
        moved[index] = _moved(rng, request, placements[index])
        try:
            arrange(request, moved)
        except Unschedulable:
            continue
        placements = moved
    decision = decide(request, _PLANNER, placements)
    shuffled = Decision(
        signature=decision.signature,
        planner=decision.planner,
        buckets=tuple(
            replace(bucket, members=tuple(rng.sample(bucket.members, len(bucket.members))))
            for bucket in decision.buckets
        ),
        steps=decision.steps,
    )
    check_decision(request, shuffled)
    return Plan(decision=shuffled)


def _moved(rng: random.Random, request: Request, placement: Placement) -> Placement:
    members = [request.candidates[member] for member in placement.members]
    first = max(candidate.earliest_launch for candidate in members)
    last = min(min(candidate.latest_launch, candidate.latest_wait) for candidate in members)
    launch = rng.randint(first, last)
    wait = rng.randint(launch, min(candidate.latest_wait for candidate in members))
    return Placement(placement.members, launch, wait)
