"""Other plans of a stored signature, inside a planning process: with other options, by hand, and again for audits."""

from __future__ import annotations

from dataclasses import replace

from bucketplan_core import planning
from bucketplan_core.assess import assess
from bucketplan_core.collectives import Options
from bucketplan_core.errors import BucketplanError, DecodeError, IllegalPlan, PlannerUnavailable
from bucketplan_core.fields import Fields, has_controls
from bucketplan_core.legality import check_decision
from bucketplan_core.plan import Decision, Plan
from bucketplan_core.profile import CostProfile
from bucketplan_core.request import Request
from bucketplan_core.schedule import Unschedulable, decide, place_original, place_scheduled
from bucketplan_core.wire import digest_of, unpack
from bucketplan_server.planner.planned import Revised, RevisionJob

__all__ = ["MANUAL_PLANNER", "make_revision", "replay"]

MANUAL_PLANNER = "manual/1"


def make_revision(job: RevisionJob) -> Revised:
    """The plan that `job` asks for; raises core's errors."""
    request = Request.decode(job.request)
    profile = CostProfile.decode(job.profile, request)
    options = Options.read(Fields(unpack(job.options), "options"))
    made = _by_hand(request, profile, job) if job.origin == "manual" else _planned(request, profile, options)
    check_decision(request, made.decision)
    read = Plan.decode(made.encoded, expected_signature=job.signature)
    return Revised(
        plan=made.encoded,
        plan_sha256=digest_of(made.encoded),
        digest=read.digest,
        planner=made.decision.planner,
        options=job.options,
    )


def replay(job: RevisionJob, stored: bytes) -> str | None:
    """What is wrong with the stored plan bytes of a revision, None if it is what `job` gives today.

    Plans of planners are planned again and compared by decision; plans by hand are checked for legality. A planner
    version that this build no longer holds cannot be replayed, which the text says with the word ``unavailable``.
    """
    try:
        request = Request.decode(job.request)
        plan = Plan.decode(stored, expected_signature=job.signature)
        check_decision(request, plan.decision)
        if job.origin == "manual":
            return None
        again = make_revision(job)
    except PlannerUnavailable as error:
        return f"unavailable: {error}"
    except BucketplanError as error:
        return f"the plan does not hold: {error}"
    if again.digest != plan.digest:
        return f"planning it again gives decision {again.digest}, stored is {plan.digest}"
    return None


def _planned(request: Request, profile: CostProfile, options: Options) -> Plan:
    if options == request.options:
        return planning.make_plan(request, profile)
    made = planning.make_plan(request.with_options(options), profile)
    # The plan answers for the signature that ranks ask for; which options made it is part of the revision.
    return Plan(decision=replace(made.decision, signature=request.signature), assessment=made.assessment)


def _by_hand(request: Request, profile: CostProfile, job: RevisionJob) -> Plan:
    if job.decision is not None:
        decision = Decision.decode(job.decision)
        if has_controls(decision.planner, lines=False):
            raise DecodeError("decision.planner", decision.planner, "must hold no control characters")
    else:
        decision = _placed_by_hand(request, job.buckets or ())
    check_decision(request, decision)
    return Plan(decision=decision, assessment=assess(request, profile, decision))


def _placed_by_hand(request: Request, buckets: tuple[tuple[int, ...], ...]) -> Decision:
    num_candidates = len(request.candidates)
    named: set[int] = set()
    for number, bucket in enumerate(buckets):
        for member in bucket:
            if member >= num_candidates:
                raise IllegalPlan(
                    "complete", f"there are {num_candidates} candidates", bucket=str(number), members=[member]
                )
            if member in named:
                raise IllegalPlan("complete", "the candidate is in two buckets", bucket=str(number), members=[member])
            named.add(member)
            if request.lane_of[member] != request.lane_of[bucket[0]]:
                raise IllegalPlan(
                    "lane", "the members are of two lanes", bucket=str(number), members=[bucket[0], member]
                )
    every = [*buckets, *((member,) for member in range(num_candidates) if member not in named)]
    place = place_scheduled if request.options.placement == "scheduled" else place_original
    try:
        return decide(request, MANUAL_PLANNER, place(request, every))
    except Unschedulable as conflict:
        blamed = min(conflict.buckets, default=None)
        raise IllegalPlan(
            "dependency",
            f"the buckets have no order as they are: {conflict.reason}",
            bucket=None if blamed is None else str(blamed),
            members=() if blamed is None else every[blamed],
        ) from None
