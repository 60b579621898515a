"""Comparing two plans, and changing which one is served: preview first, then confirm, always with a reason."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from bucketplan_core.plan import Plan
from bucketplan_core.wire import unpack
from bucketplan_server.access import Caller, Principal, needs
from bucketplan_server.http.parameters import Signature
from bucketplan_server.http.state import AppState, State, cause_of
from bucketplan_server.pages.options import FORM_FIELDS, changed_options, typed_options
from bucketplan_server.pages.plan import plan_page, revision_of, shown_revision
from bucketplan_server.pages.render import page
from bucketplan_server.pages.routing import (
    MAX_REASON_CHARACTERS,
    PageRoute,
    Refusal,
    number_field,
    read_form,
    see_other,
    text_field,
    whole_signature,
)
from bucketplan_server.planner.planned import Stored
from bucketplan_server.problems import Problem
from bucketplan_server.store.engine import StoreError
from bucketplan_server.store.events import Cause
from bucketplan_server.store.overview import latest_events
from bucketplan_server.store.revisions import Activation

__all__ = ["router"]

router = APIRouter(route_class=PageRoute, include_in_schema=False)
_WHY = "say why; it goes into the audit log"
_CHANGES = 100
_RECENT = 20


@router.get("/diff", dependencies=[needs("auditor")])
async def diff(request: Request, state: State) -> Response:
    given = {name: request.query_params.get(name, "").strip() for name in ("a", "b", "revision_a", "revision_b")}
    found, refusal = None, None
    if given["a"] or given["b"]:
        try:
            found = await _compared(state, *[await _side(request, state, name, given[name]) for name in ("a", "b")])
        except Problem as problem:
            if problem.status >= 500:
                raise
            refusal = Refusal(action="filter", problem=problem, typed=given)
    code = 200 if refusal is None else refusal.problem.status
    return page(request, "diff.html", code=code, found=found, given=given, most=_CHANGES, refusal=refusal)


async def _side(request: Request, state: AppState, name: str, signature: str) -> Stored:
    """One side of a comparison; raises `Problem` that names the field at fault."""
    whole_signature(signature, name)
    revision = revision_of(request, f"revision_{name}")
    try:
        return await state.revisions.stored(signature, revision)
    except Problem as problem:
        at = {"unknown-signature": name, "unknown-revision": f"revision_{name}"}.get(problem.slug)
        if at is None:
            raise
        raise Problem(
            problem.slug, f"{at}: {problem.detail}; choose one of the list of plans", fields={"path": at}
        ) from None


@router.post("/plans/{signature}/replan", dependencies=[needs("operator")])
async def replan(request: Request, state: State, caller: Caller, signature: Signature) -> Response:
    """Step one shows what would change and stores nothing; step two, with `confirm`, stores and serves, or neither."""
    form = await read_form(request)
    try:
        return await _replan(request, state, caller, signature, form)
    except Problem as problem:
        return await _form_again(
            request, state, caller, signature, Refusal(action="replan", problem=problem, typed=form)
        )


async def _replan(
    request: Request, state: AppState, caller: Principal, signature: str, form: Mapping[str, str]
) -> Response:
    options = typed_options(form)
    base = await shown_revision(request, state, signature)
    asked = _asked(form, caller)
    if form.get("confirm") != "yes":
        effective, stored, digest = await state.revisions.preview(signature, options, base=base)
        before = await state.revisions.options(signature, base)
        current = await _current(state, caller, signature, asked.job)
        return page(
            request,
            "confirm.html",
            action="replan",
            base=base,
            current=current,
            digest=digest,
            form={name: value for name, value in form.items() if name in FORM_FIELDS},
            found=await _compared(state, await state.revisions.stored(signature, current.revision), stored),
            job=asked.job,
            most=_CHANGES,
            options=changed_options(before.to_wire(), effective.to_wire()),
            reason=asked.reason,
            shown=base,
            signature=signature,
            target=None,
        )
    digest, expected = _shown(form)
    cause = cause_of(request, asked.reason)
    try:
        await state.revisions.replan_and_serve(
            signature, options, base=base, digest=digest, job=asked.stored_job, expected=expected, cause=cause
        )
    except Problem as problem:
        if await _was_done(state, signature, problem, cause, digest=digest, job=asked.stored_job, expected=expected):
            return see_other(f"/plans/{signature}?done=already")
        raise
    return see_other(f"/plans/{signature}?done=replanned")


@router.post("/plans/{signature}/activate", dependencies=[needs("operator")])
async def activate(request: Request, state: State, caller: Caller, signature: Signature) -> Response:
    """Step one shows what would change; step two, with `confirm`, serves the revision. Rolling back is the same."""
    form = await read_form(request)
    try:
        return await _activate(request, state, caller, signature, form)
    except Problem as problem:
        refusal = Refusal(action="activate", problem=problem, typed=form)
        return await _form_again(request, state, caller, signature, refusal)


async def _activate(
    request: Request, state: AppState, caller: Principal, signature: str, form: Mapping[str, str]
) -> Response:
    target = number_field(form, "revision", low=1, high=2**31 - 1)
    asked = _asked(form, caller)
    if target is None:
        raise Problem("invalid-body", "revision: say which one", fields={"path": "revision"})
    wanted = await state.revisions.served(signature, target)
    if form.get("confirm") != "yes":
        current = await _current(state, caller, signature, asked.job)
        before, after = [await state.revisions.options(signature, number) for number in (current.revision, target)]
        sides = [await state.revisions.stored(signature, number) for number in (current.revision, target)]
        return page(
            request,
            "confirm.html",
            action="activate",
            base=current.revision,
            current=current,
            digest=wanted.row.digest,
            form={"revision": str(target)},
            found=await _compared(state, *sides),
            job=asked.job,
            most=_CHANGES,
            options=changed_options(before.to_wire(), after.to_wire()),
            reason=asked.reason,
            shown=await shown_revision(request, state, signature),
            signature=signature,
            target=target,
        )
    digest, expected = _shown(form)
    if wanted.row.digest != digest:
        raise Problem("conflict", f"revision {target} is not the plan that was shown", fields={"path": "digest"})
    cause = cause_of(request, asked.reason)
    try:
        activation = Activation(revision=target, job=asked.stored_job, expected=expected)
        await state.revisions.activate(signature, activation, cause)
    except Problem as problem:
        if await _was_done(state, signature, problem, cause, digest=digest, job=asked.stored_job, expected=expected):
            return see_other(f"/plans/{signature}?done=already")
        raise
    return see_other(f"/plans/{signature}?done=activated")


async def _form_again(
    request: Request, state: AppState, caller: Principal, signature: str, refusal: Refusal
) -> Response:
    """The page of the plan with the form as it was filled in; raises what no other entry would mend."""
    problem = refusal.problem
    if problem.status not in (400, 409, 422) and problem.slug != "unknown-revision":
        raise problem
    return await plan_page(request, state, caller, signature, refusal=refusal)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What both forms ask for: for which job, "" for everyone, and why."""

    job: str
    stored_job: str
    reason: str


def _asked(form: Mapping[str, str], caller: Principal) -> _Asked:
    reason = text_field(form, "reason", required=_WHY, limit=MAX_REASON_CHARACTERS)
    job = text_field(form, "job")
    if not job:
        caller.everything("what is activated without a job is served to every namespace")
    try:
        stored_job = caller.job(job) if job else ""
    except Problem as problem:
        if problem.status != 400:
            raise
        raise Problem("invalid-body", problem.detail, fields={**problem.fields, "path": "job"}) from None
    return _Asked(job=job, stored_job=stored_job, reason=reason)


def _shown(form: Mapping[str, str]) -> tuple[str, int]:
    """The digest and the active revision that the preview showed: nobody confirms what they have not seen."""
    expected = number_field(form, "expected")
    digest = text_field(form, "digest")
    for name, value in (("expected", expected), ("digest", digest or None)):
        if value is None:
            detail = f"{name}: missing, so this is no confirmation of a preview; look at the preview first"
            raise Problem("invalid-body", detail, fields={"path": name})
    return digest, expected or 0


async def _was_done(
    state: AppState, signature: str, refused: Problem, cause: Cause, *, digest: str, job: str, expected: int
) -> bool:
    """Whether the same person made the very change that was refused as stale: a confirmation that was sent twice."""
    if refused.slug != "conflict":
        return False
    try:
        last = await latest_events(state.store, signature=signature, kind="plan.activated", limit=_RECENT)
    except StoreError as error:
        raise state.plans.store_unavailable(error) from None
    made = next((event for event in last if (event["job"] or "") == job), None)
    if made is None or (made["actor"], made["reason"]) != (cause.actor, cause.reason):
        return False
    body: Any = unpack(made["body"])
    if (body["before"] or 0) != expected or body["revision"] is None:
        return False
    return (await state.revisions.served(signature, body["revision"])).row.digest == digest


@dataclass(frozen=True, slots=True, kw_only=True)
class _Current:
    """The revision that is served before a change; `expected` is 0 for a job that has none of its own."""

    revision: int
    expected: int


async def _current(state: AppState, caller: Principal, signature: str, job: str) -> _Current:
    stored_job = caller.job(job) if job else ""
    serving = await state.revisions.serving(signature, job=stored_job)
    everyone = serving.get("", 1)
    return _Current(revision=serving.get(stored_job, everyone), expected=serving.get(stored_job, 0))


async def _compared(state: AppState, a: Stored, b: Stored) -> dict[str, Any]:
    """The structural difference with the simulated figures of both sides."""
    tree: dict[str, Any] = dict(await state.pool.diff(a, b))
    plans = await asyncio.to_thread(lambda: [Plan.decode(side.plan) for side in (a, b)])
    simulated = [plan.assessment.get("simulated") for plan in plans]
    tree["simulated"] = simulated if all(isinstance(found, dict) for found in simulated) else None
    tree["num_buckets"] = [len(plan.decision.buckets) for plan in plans]
    tree["planners"] = [plan.decision.planner for plan in plans]
    counts: dict[str, int] = {}
    for change in tree["decision"]["changes"]:
        counts[change["kind"]] = counts.get(change["kind"], 0) + 1
    tree["counts"] = counts
    return tree
