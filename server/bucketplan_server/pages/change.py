"""Changing which plan is served: preview first, then confirm, always with a reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from bucketplan_core.collectives import Options
from bucketplan_core.wire import unpack
from bucketplan_server.access import Caller, Principal, needs
from bucketplan_server.http.state import AppState, State, cause_of
from bucketplan_server.pages.compare import MOST_CHANGES, compared
from bucketplan_server.pages.options import FORM_FIELDS, changed_options, typed_options
from bucketplan_server.pages.plan import own_revisions, plan_page, shown_revision
from bucketplan_server.pages.render import page
from bucketplan_server.pages.routing import (
    MAX_REASON_CHARACTERS,
    AnySignature,
    PageRoute,
    Refusal,
    number_field,
    read_form,
    see_other,
    text_field,
)
from bucketplan_server.planner.planned import Stored
from bucketplan_server.problems import Problem
from bucketplan_server.store.engine import StoreError
from bucketplan_server.store.events import Cause
from bucketplan_server.store.overview import latest_events
from bucketplan_server.store.plans import PLANNER_REVISION
from bucketplan_server.store.revisions import Activation

__all__ = ["router"]

router = APIRouter(route_class=PageRoute, include_in_schema=False)
_WHY = "say why; it goes into the audit log"
_RECENT = 20
_AS_EVERYONE = "everyone"
"""What the field `revision` holds where a job is to be served what everyone is again."""


@router.post("/plans/{signature}/replan", dependencies=[needs("operator")])
async def replan(request: Request, state: State, caller: Caller, signature: AnySignature) -> Response:
    """Step one shows what would change and stores nothing; step two, with `confirm`, stores and serves, or neither."""
    form = await read_form(request)
    try:
        return await _replan(request, state, caller, signature, form)
    except Problem as problem:
        refusal = Refusal(action="replan", problem=problem, typed=form)
        return await _form_again(request, state, caller, signature, refusal)


async def _replan(
    request: Request, state: AppState, caller: Principal, signature: str, form: Mapping[str, str]
) -> Response:
    options = typed_options(form)
    base = await shown_revision(request, state, signature)
    asked = _asked(form, caller)
    if form.get("confirm") != "yes":
        effective, stored, digest = await state.revisions.preview(signature, options, base=base)
        change = _Change(
            action="replan",
            base=base,
            before=await state.revisions.options(signature, base),
            after=effective,
            digest=digest,
            fields={name: value for name, value in form.items() if name in FORM_FIELDS},
            plan=stored,
        )
        return await _preview(request, state, caller, signature, asked, change)
    digest, expected = _shown(form)
    cause = cause_of(request, asked.reason)
    try:
        number = await state.revisions.replan_and_serve(
            signature, options, base=base, digest=digest, job=asked.stored_job, expected=expected, cause=cause
        )
    except Problem as problem:
        made = await _made_before(state, signature, problem, cause, asked, expected)
        if not made or (await state.revisions.served(signature, made)).row.digest != digest:
            raise
        return _done(signature, "already", asked, made)
    return _done(signature, "replanned", asked, number)


@router.post("/plans/{signature}/activate", dependencies=[needs("operator")])
async def activate(request: Request, state: State, caller: Caller, signature: AnySignature) -> Response:
    """Step one shows what would change; step two, with `confirm`, does it. Rolling back is the same.

    The form names a revision, or ``everyone`` to take back what one job has of its own.
    """
    form = await read_form(request)
    follows = form.get("revision") == _AS_EVERYONE
    try:
        return await (_follow if follows else _activate)(request, state, caller, signature, form)
    except Problem as problem:
        refusal = Refusal(action="follow" if follows else "activate", problem=problem, typed=form)
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
        change = await _other_revision(state, signature, asked, target, action="activate")
        return await _preview(request, state, caller, signature, asked, change)
    digest, expected = _shown(form)
    if wanted.row.digest != digest:
        raise Problem("conflict", f"revision {target} is not the plan that was shown", fields={"path": "digest"})
    cause = cause_of(request, asked.reason)
    try:
        activation = Activation(revision=target, job=asked.stored_job, expected=expected)
        await state.revisions.activate(signature, activation, cause)
    except Problem as problem:
        if await _made_before(state, signature, problem, cause, asked, expected) != target:
            raise
        return _done(signature, "already", asked, target)
    return _done(signature, "activated", asked, target)


async def _follow(
    request: Request, state: AppState, caller: Principal, signature: str, form: Mapping[str, str]
) -> Response:
    """Take back what a job has of its own."""
    asked = _asked(form, caller)
    if not asked.job:
        raise Problem("invalid-body", "job: say which job is to be served as everyone", fields={"path": "job"})
    everyone = (await state.revisions.serving(signature)).get("", PLANNER_REVISION)
    if form.get("confirm") != "yes":
        if (await _current(state, signature, asked)).expected == 0:
            detail = f"job: {asked.job!r} has no revision of its own here, it is served as everyone"
            raise Problem("invalid-body", detail, fields={"path": "job"})
        change = await _other_revision(state, signature, asked, everyone, action="follow")
        return await _preview(request, state, caller, signature, asked, change)
    digest, expected = _shown(form)
    if (await state.revisions.served(signature, everyone)).row.digest != digest:
        raise Problem("conflict", "everyone is not served the plan that was shown", fields={"path": "digest"})
    cause = cause_of(request, asked.reason)
    try:
        activation = Activation(revision=None, job=asked.stored_job, expected=expected)
        await state.revisions.activate(signature, activation, cause)
    except Problem as problem:
        if await _made_before(state, signature, problem, cause, asked, expected) != 0:
            raise
        return _done(signature, "already", asked, everyone)
    return _done(signature, "followed", asked, everyone)


async def _form_again(
    request: Request, state: AppState, caller: Principal, signature: str, refusal: Refusal
) -> Response:
    """The page of the plan with the form as it was filled in; raises what no other entry would mend."""
    problem = refusal.problem
    if problem.status not in (400, 409, 422) and problem.slug != "unknown-revision":
        raise problem
    return await plan_page(request, state, caller, signature, refusal=refusal)


def _done(signature: str, what: str, asked: _Asked, revision: int) -> Response:
    query = {"revision": str(revision), "done": what} | ({"job": asked.job} if asked.job else {})
    return see_other(f"/plans/{signature}?{urlencode(query)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """What a preview shows: `plan`, made with options `after`, of which `base` has `before`; `fields` ask for it again.

    `target` is the revision that is to be served, None for one that is not stored yet.
    """

    action: str
    base: int
    before: Options
    after: Options
    digest: str
    fields: Mapping[str, str]
    plan: Stored
    target: int | None = None


async def _other_revision(state: AppState, signature: str, asked: _Asked, target: int, *, action: str) -> _Change:
    current = (await _current(state, signature, asked)).revision
    return _Change(
        action=action,
        base=current,
        before=await state.revisions.options(signature, current),
        after=await state.revisions.options(signature, target),
        digest=(await state.revisions.served(signature, target)).row.digest,
        fields={"revision": _AS_EVERYONE if action == "follow" else str(target)},
        plan=await state.revisions.stored(signature, target),
        target=target,
    )


async def _preview(
    request: Request, state: AppState, caller: Principal, signature: str, asked: _Asked, change: _Change
) -> Response:
    current = await _current(state, signature, asked)
    served = await state.revisions.stored(signature, current.revision)
    is_new = bool(asked.job) and not await state.jobs.attempts(asked.stored_job, before=None, limit=1)
    return page(
        request,
        "confirm.html",
        change=change,
        current=current,
        found=await compared(state, served, change.plan),
        is_new=is_new,
        job=asked.job,
        most=MOST_CHANGES,
        options=changed_options(change.before.to_wire(), change.after.to_wire()),
        own=None if asked.job else await own_revisions(state, caller, signature),
        reason=asked.reason,
        shown=await shown_revision(request, state, signature),
        signature=signature,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What both forms ask for: for which job, "" for everyone, and why."""

    job: str
    stored_job: str
    reason: str


def _asked(form: Mapping[str, str], caller: Principal) -> _Asked:
    reason = text_field(form, "reason", required=_WHY, limit=MAX_REASON_CHARACTERS, lines=True)
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


async def _made_before(
    state: AppState, signature: str, refused: Problem, cause: Cause, asked: _Asked, expected: int
) -> int | None:
    """The revision that the same person's first confirmation of this change serves, 0 for as everyone.

    None where `refused` is no sign of a confirmation that was sent twice.
    """
    if refused.slug != "conflict":
        return None
    try:
        last = await latest_events(state.store, signature=signature, kind="plan.activated", limit=_RECENT)
    except StoreError as error:
        raise state.plans.store_unavailable(error) from None
    made = next((event for event in last if (event["job"] or "") == asked.stored_job), None)
    if made is None or (made["actor"], made["reason"]) != (cause.actor, cause.reason):
        return None
    body: Any = unpack(made["body"])
    if (body["before"] or 0) != expected:
        return None
    return int(body["revision"] or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Current:
    """The revision that is served before a change; `expected` is 0 for a job that has none of its own."""

    revision: int
    expected: int


async def _current(state: AppState, signature: str, asked: _Asked) -> _Current:
    serving = await state.revisions.serving(signature, job=asked.stored_job)
    everyone = serving.get("", PLANNER_REVISION)
    return _Current(revision=serving.get(asked.stored_job, everyone), expected=serving.get(asked.stored_job, 0))
