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
from bucketplan_core.wire import WireValue
from bucketplan_server.access import Caller, Principal, needs
from bucketplan_server.http.state import AppState, State, cause_of
from bucketplan_server.pages.plan import Signature, revision_of
from bucketplan_server.pages.render import page
from bucketplan_server.pages.routing import (
    MAX_REASON_CHARACTERS,
    PageRoute,
    read_form,
    see_other,
    text_field,
    whole_number,
)
from bucketplan_server.planner.planned import Stored
from bucketplan_server.problems import Problem
from bucketplan_server.store.revisions import Activation

__all__ = ["router"]

router = APIRouter(route_class=PageRoute, include_in_schema=False)
_WHY = "say why; it goes into the audit log"
_CHANGES = 100
_NUMBERS = ("bucket_cap_bytes", "first_bucket_cap_bytes", "memory_budget_bytes", "prefetch")
_CHOICES = {"strategy": ("auto", "module", "size", "none"), "placement": ("original", "scheduled")}


@router.get("/diff", dependencies=[needs("auditor")])
async def diff(request: Request, state: State) -> Response:
    given = {name: request.query_params.get(name, "").strip() for name in ("a", "b", "revision_a", "revision_b")}
    found = None
    if given["a"] or given["b"]:
        for name in ("a", "b"):
            if len(given[name]) != 64 or set(given[name]) - set("0123456789abcdef"):
                detail = f"{name}: {given[name][:80]!r} must be a whole signature, 64 lower-case hex characters"
                raise Problem("invalid-parameter", detail, fields={"path": name})
        sides = [await state.revisions.stored(given[n], revision_of(request, f"revision_{n}")) for n in ("a", "b")]
        found = await _compared(state, *sides)
    return page(request, "diff.html", found=found, given=given, most=_CHANGES)


@router.post("/plans/{signature}/replan", dependencies=[needs("operator")])
async def replan(request: Request, state: State, caller: Caller, signature: Signature) -> Response:
    """Step one shows what would change and stores nothing; step two, with `confirm`, stores and activates."""
    form = await read_form(request)
    options = _options(form)
    reason = text_field(form, "reason", required=_WHY, limit=MAX_REASON_CHARACTERS)
    job = text_field(form, "job")
    if form.get("confirm") != "yes":
        _may_activate(caller, job)
        effective, stored, digest = await state.revisions.preview(signature, options)
        current = await _current(state, caller, signature, job)
        return page(
            request,
            "confirm.html",
            action="replan",
            current=current,
            digest=digest,
            effective=effective.to_wire(),
            form={name: value for name, value in form.items() if name not in ("confirm", "reason", "job")},
            found=await _compared(state, await state.revisions.stored(signature, current.revision), stored),
            job=job,
            most=_CHANGES,
            reason=reason,
            signature=signature,
            target=None,
        )
    _may_activate(caller, job)
    expected = whole_number(form.get("expected", ""), "expected")
    parent = whole_number(form.get("parent", ""), "parent", low=1) or 1
    number = await state.revisions.replan(signature, options, parent=parent, cause=cause_of(request, reason))
    made = await state.revisions.served(signature, number)
    if made.row.digest != form.get("digest"):
        raise Problem("conflict", f"revision {number} is not the plan that was shown; it is stored and not active")
    await _activate(state, caller, signature, number, job=job, expected=expected, request=request, reason=reason)
    return see_other(f"/plans/{signature}?done=replanned")


@router.post("/plans/{signature}/activate", dependencies=[needs("operator")])
async def activate(request: Request, state: State, caller: Caller, signature: Signature) -> Response:
    """Step one shows what would change; step two, with `confirm`, serves the revision. Rolling back is the same."""
    form = await read_form(request)
    target = whole_number(form.get("revision", ""), "revision", low=1, high=2**31 - 1)
    reason = text_field(form, "reason", required=_WHY, limit=MAX_REASON_CHARACTERS)
    job = text_field(form, "job")
    if target is None:
        raise Problem("invalid-body", "revision: say which one", fields={"path": "revision"})
    _may_activate(caller, job)
    if form.get("confirm") != "yes":
        wanted = await state.revisions.served(signature, target)
        current = await _current(state, caller, signature, job)
        sides = [await state.revisions.stored(signature, number) for number in (current.revision, target)]
        return page(
            request,
            "confirm.html",
            action="activate",
            current=current,
            digest=wanted.row.digest,
            effective=None,
            form={"revision": str(target)},
            found=await _compared(state, *sides),
            job=job,
            most=_CHANGES,
            reason=reason,
            signature=signature,
            target=target,
        )
    expected = whole_number(form.get("expected", ""), "expected")
    await _activate(state, caller, signature, target, job=job, expected=expected, request=request, reason=reason)
    return see_other(f"/plans/{signature}?done=activated")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Current:
    """The revision that is served before a change; `expected` is 0 for a job that has none of its own."""

    revision: int
    expected: int


async def _current(state: AppState, caller: Principal, signature: str, job: str) -> _Current:
    stored_job = caller.job(job) if job else ""
    serving = {name: row.revision for row in await state.revisions.revisions(signature) for name in row.active_for}
    everyone = serving.get("", 1)
    return _Current(revision=serving.get(stored_job, everyone), expected=serving.get(stored_job, 0))


def _may_activate(caller: Principal, job: str) -> None:
    if job:
        caller.job(job)
    else:
        caller.everything("what is activated without a job is served to every namespace")


async def _activate(
    state: AppState,
    caller: Principal,
    signature: str,
    revision: int,
    *,
    job: str,
    expected: int | None,
    request: Request,
    reason: str,
) -> None:
    wanted = Activation(revision=revision, job=caller.job(job) if job else "", expected=expected)
    await state.revisions.activate(signature, wanted, cause_of(request, reason))


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


def _options(form: Mapping[str, str]) -> dict[str, WireValue]:
    options: dict[str, WireValue] = {}
    for name, allowed in _CHOICES.items():
        value = text_field(form, name)
        if value and value not in allowed:
            raise Problem("invalid-body", f"{name}: {value[:80]!r} must be one of {', '.join(allowed)}")
        if value:
            options[name] = value
    for name in _NUMBERS:
        number = whole_number(form.get(name, ""), name)
        if number is not None:
            options[name] = number
    return options
