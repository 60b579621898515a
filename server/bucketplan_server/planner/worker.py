"""What runs inside a planning process: decode, validate, plan, encode. No I/O, no state between calls.

Bodies of callers are decoded here and nowhere else, so what a hostile one costs is bounded by this process's limits.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from bucketplan_core import planning
from bucketplan_core.diff import diff_decisions, diff_requests
from bucketplan_core.errors import BucketplanError, SignatureMismatch
from bucketplan_core.explain import explain
from bucketplan_core.fields import Fields
from bucketplan_core.plan import Plan
from bucketplan_core.profile import CostProfile
from bucketplan_core.request import Request
from bucketplan_core.wire import WireValue, digest_of, from_json, pack
from bucketplan_server.planner.describe import request_facts
from bucketplan_server.planner.planned import Canonical, PlanJob, Planned, Revised, RevisionJob, Stored
from bucketplan_server.planner.revise import make_revision, replay
from bucketplan_server.problems import Refused, refuse

__all__ = [
    "TOO_MUCH_MEMORY",
    "canonicalize",
    "diff_plans",
    "explain_plan",
    "guarded",
    "initialize",
    "plan",
    "replay_revision",
    "revise",
    "warm_up",
]

T = TypeVar("T")
TOO_MUCH_MEMORY = Refused("cannot-plan", "the body needs more memory than one planning process may use")


class _TimeIsUp(BaseException):
    """Raised by the timer; no handler of `Exception` on the way may swallow it."""


def initialize(memory_bytes: int, timeout_seconds: float) -> None:
    """Set the limits of this process."""
    global _timeout_seconds
    _timeout_seconds = timeout_seconds
    signal.signal(signal.SIGALRM, _raise_time_is_up)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def warm_up() -> int:
    """Nothing but the imports above; answers the process id."""
    return os.getpid()


def plan(job: PlanJob) -> Planned | Refused:
    """The plan of a request, checked as it will be checked when read; or why there is none."""
    request = _decode("request", lambda: Request.decode(job.request))
    if isinstance(request, Refused):
        return request
    if request.signature != job.signature:
        return refuse(SignatureMismatch(claimed=job.signature, actual=request.signature))
    facts = request_facts(request)
    if job.profile is None:
        profile: CostProfile | Refused = CostProfile.empty(request)
    else:
        encoded = job.profile
        profile = _decode("profile", lambda: CostProfile.decode(encoded, request))
    if isinstance(profile, Refused):
        return profile
    made = planning.make_plan(request, profile)
    encoded_plan = made.encoded
    read = Plan.decode(encoded_plan, expected_signature=job.signature)
    return Planned(
        signature=job.signature,
        request=job.request,
        profile=profile.encoded,
        profile_digest=profile.digest,
        plan=encoded_plan,
        plan_sha256=digest_of(encoded_plan),
        digest=read.digest,
        planner=made.decision.planner,
        options=pack(request.options.to_wire()),
        facts=facts,
    )


def revise(job: RevisionJob) -> Revised:
    """Another plan of a stored signature; raises core's errors."""
    return make_revision(job)


def replay_revision(job: RevisionJob, stored: bytes) -> str | None:
    """What an audit finds wrong with a stored plan, see `revise.replay`."""
    return replay(job, stored)


def explain_plan(stored: Stored) -> dict[str, WireValue]:
    """Why a plan is as it is: `bucketplan_core.explain` of a stored revision."""
    request = Request.decode(stored.request)
    found = Plan.decode(stored.plan)
    budget = found.assessment.get("memory_budget_bytes")
    return explain(
        request,
        CostProfile.decode(stored.profile, request),
        found.decision,
        memory_budget_bytes=budget if type(budget) is int else None,
    )


def diff_plans(a: Stored, b: Stored) -> dict[str, WireValue]:
    """How two stored revisions differ, in what was asked and in what was decided."""
    requests = [Request.decode(side.request) for side in (a, b)]
    decisions = [Plan.decode(side.plan).decision for side in (a, b)]
    return {
        "decision": diff_decisions(requests[0], decisions[0], requests[1], decisions[1]).to_wire(),
        "request": diff_requests(requests[0], requests[1]).to_wire(),
    }


def canonicalize(body: bytes) -> Canonical | Refused:
    """The canonical form of a JSON body ``{"profile", "request", "signature"}``."""
    fields = Fields(from_json(body), "body")
    claimed = fields.digest("signature")
    tree = fields.raw("request")
    profile_tree = fields.raw("profile")
    fields.finish()
    request = Request.from_wire(tree)
    if request.signature != claimed:
        return refuse(SignatureMismatch(claimed=claimed, actual=request.signature))
    profile = None if profile_tree is None else CostProfile.from_wire(profile_tree, request)
    return Canonical(request.signature, request.encoded, None if profile is None else profile.encoded)


def _decode(document: str, read: Callable[[], T]) -> T | Refused:
    try:
        return read()
    except BucketplanError as error:
        return refuse(error, document=document)


def guarded(work: Callable[[], T | Refused]) -> T | Refused:
    """What `work` returns within the limits of this process, or what is wrong with the request it is about."""
    try:
        with _time_limit():
            return work()
    except BucketplanError as error:
        return refuse(error, document="body")
    except MemoryError:
        return TOO_MUCH_MEMORY
    except _TimeIsUp:
        return Refused(
            "cannot-plan", f"planning was given up after {_timeout_seconds:g} s (BUCKETPLAN_PLANNER_TIMEOUT_SECONDS)"
        )


_timeout_seconds = 0.0


@contextmanager
def _time_limit() -> Iterator[None]:
    signal.setitimer(signal.ITIMER_REAL, _timeout_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _raise_time_is_up(_signal: int, _frame: FrameType | None) -> None:
    raise _TimeIsUp
