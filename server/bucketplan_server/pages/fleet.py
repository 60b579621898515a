"""The overview, and the lists of plans, jobs and events."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from bucketplan_core.collectives import STRATEGIES
from bucketplan_core.fields import is_digest
from bucketplan_core.wire import MAX_INT, unpack
from bucketplan_server.access import Caller, Principal, needs
from bucketplan_server.http.parameters import read_cursor, write_cursor
from bucketplan_server.http.state import AppState, State, verified
from bucketplan_server.pages.render import page
from bucketplan_server.pages.routing import (
    PageRoute,
    Refusal,
    one_of,
    one_page,
    read_form,
    see_other,
    typed_signature,
    whole_number,
    whole_signature,
)
from bucketplan_server.problems import Problem
from bucketplan_server.store.engine import StoreError
from bucketplan_server.store.listing import PlanFilter, list_plans
from bucketplan_server.store.overview import count_all, latest_events, latest_jobs

__all__ = ["router"]

router = APIRouter(route_class=PageRoute, include_in_schema=False)
KINDS = (
    "plan.created", "revision.created", "plan.activated", "plan.quarantined", "attempt.opened", "reports.received",
    "token.created", "token.revoked", "profile.stored", "reports.pruned",
)  # fmt: skip
_PAGE = 50
_JOBS_PAGE = 20
_FEW = 8
_LISTED = 20
"""Items of a list in an event that are shown one by one."""


@router.get("/", dependencies=[needs("auditor")])
async def overview(request: Request, state: State, caller: Caller) -> Response:
    namespace = caller.namespace
    try:
        counts = None if namespace is not None else await count_all(state.store)
        jobs = await latest_jobs(state.store, namespace=namespace, limit=_FEW)
        plans = await list_plans(state.store, PlanFilter(namespace=namespace), before=None, limit=_FEW)
        events = await latest_events(state.store, namespace=namespace, limit=_FEW)
    except StoreError as error:
        raise state.plans.store_unavailable(error) from None
    tallies = state.metrics.tallies
    hits = {source: tallies["bucketplan_plan_hits_total", source] for source in ("memory", "store")}
    misses = tallies["bucketplan_plan_misses_total", ""]
    looked = sum(hits.values()) + misses
    return page(
        request,
        "overview.html",
        counts=counts,
        divergences=tallies["bucketplan_divergences_total", ""],
        events=[_event(row, caller, state) for row in events],
        hits=hits,
        hit_ppm=None if not looked else sum(hits.values()) * 1_000_000 // looked,
        jobs=await _with_states(state, caller, jobs),
        misses=misses,
        now_ns=time.time_ns(),
        plannings={name: tallies["bucketplan_plannings_total", name] for name in ("stored", "refused", "failed")},
        plans=[_plan(row) for row in plans],
    )


@router.get("/plans", dependencies=[needs("auditor")])
async def plans(request: Request, state: State, caller: Caller) -> Response:
    given = {
        name: request.query_params.get(name, "").strip()
        for name in ("job", "parameter", "module", "group", "strategy", "since", "until")
    }
    given["signature"] = typed_signature(request, "signature")
    if is_digest(given["signature"]):
        return see_other(f"/plans/{given['signature']}")
    shared: dict[str, Any] = {"given": given, "strategies": STRATEGIES}
    try:
        wanted = _plan_filter(given, caller)
    except Problem as problem:
        refusal = Refusal(action="filter", problem=problem, typed=given)
        return page(request, "plans.html", code=problem.status, refusal=refusal, **shared)
    cursor = request.query_params.get("cursor", "")
    found = list_plans(state.store, wanted, before=_cursor(cursor), limit=_PAGE + 1)
    shown, last = await one_page(state, found, _PAGE)
    following = None if last is None else write_cursor(last["created_ns"], last["signature"])
    return page(
        request,
        "plans.html",
        cursor=cursor,
        following=following,
        in_api=_in_api(wanted, given["job"]),
        plans=[_plan(row) for row in shown],
        refusal=None,
        **shared,
    )


def _in_api(wanted: PlanFilter, job: str) -> dict[str, Any]:
    """The parameters of `GET /v1/plans` that filter like the page; that list has none for beginnings of signatures."""
    names = ("parameter", "module", "group", "strategy", "since_ns", "until_ns")
    return {"job": job} | {name: getattr(wanted, name) for name in names}


def _plan_filter(given: Mapping[str, str], caller: Principal) -> PlanFilter:
    """What the form asks for; raises `Problem` that names the field at fault."""
    if given["signature"] and not re.fullmatch("[0-9a-f]{4,63}", given["signature"]):
        raise Problem(
            "invalid-parameter",
            f"signature: {given['signature'][:80]!r} is no beginning of a signature: 4 to 64 lower-case hex characters",
            fields={"path": "signature"},
        )
    one_of(given["strategy"], "strategy", STRATEGIES)
    return PlanFilter(
        job=caller.job(given["job"]) if given["job"] else None,
        namespace=caller.namespace,
        signature_prefix=given["signature"] or None,
        parameter=given["parameter"] or None,
        module=given["module"] or None,
        group=given["group"] or None,
        strategy=given["strategy"] or None,
        since_ns=_day_ns(given["since"], "since"),
        until_ns=_day_ns(given["until"], "until"),
    )


@router.get("/jobs", dependencies=[needs("auditor")])
async def jobs(request: Request, state: State, caller: Caller) -> Response:
    part = request.query_params.get("name", "").strip()[:200]
    cursor = request.query_params.get("cursor", "")
    opened, _, name = cursor.partition("-")
    before = None if not cursor else (whole_number(opened, "cursor") or 0, name)
    found = latest_jobs(state.store, namespace=caller.namespace, part=part or None, before=before, limit=_JOBS_PAGE + 1)
    shown, last = await one_page(state, found, _JOBS_PAGE)
    following = None if last is None else f"{last.opened_ns}-{last.job}"
    return page(
        request,
        "jobs.html",
        cursor=cursor,
        following=following,
        jobs=await _with_states(state, caller, shown),
        now_ns=time.time_ns(),
        part=part,
    )


@router.get("/events", dependencies=[needs("auditor")])
async def events(request: Request, state: State, caller: Caller) -> Response:
    given = {name: request.query_params.get(name, "").strip() for name in ("job", "kind")}
    given["signature"] = typed_signature(request, "signature")
    before = whole_number(request.query_params.get("before", ""), "before")
    # It counts and names what every namespace did.
    last = None if caller.namespace is not None else getattr(request.app.state, "last_verification", None)
    shared: dict[str, Any] = {"given": given, "kinds": KINDS, "verification": last}
    try:
        job = _event_filter(given, caller)
    except Problem as problem:
        refusal = Refusal(action="filter", problem=problem, typed=given)
        return page(request, "events.html", code=problem.status, refusal=refusal, **shared)
    found = latest_events(
        state.store,
        namespace=caller.namespace,
        before=before,
        signature=given["signature"] or None,
        job=job,
        kind=given["kind"] or None,
        limit=_PAGE + 1,
    )
    shown, oldest = await one_page(state, found, _PAGE)
    return page(
        request,
        "events.html",
        before=before,
        events=[_event(row, caller, state) for row in shown],
        following=None if oldest is None else oldest["seq"],
        refusal=None,
        **shared,
    )


def _event_filter(given: Mapping[str, str], caller: Principal) -> str | None:
    """The job that the form asks for, as stored; raises `Problem` that names the field at fault."""
    if given["signature"]:
        whole_signature(given["signature"], "signature")
    one_of(given["kind"], "kind", KINDS)
    return caller.job(given["job"]) if given["job"] else None


@router.post("/events/verify", dependencies=[needs("auditor", only_reads=True)])
async def verify_log(request: Request, state: State, caller: Caller) -> Response:
    """Verification only reads, so auditors may; it is work, so one at a time, and asked for by a post."""
    caller.everything("the log is one chain over every namespace")
    form = await read_form(request)
    replay = form.get("replay") == "yes"
    found = await verified(request, state, replay=replay)
    request.app.state.last_verification = {"at_ns": time.time_ns(), "found": found, "replayed": replay}
    return see_other("/events#verification")


async def _with_states(state: AppState, caller: Principal, rows: Sequence[Any]) -> list[Mapping[str, Any]]:
    attempts = [await state.jobs.attempt(row.job, row.last_attempt) for row in rows]
    verdicts = await state.jobs.verdicts(attempts)
    return [
        {
            "job": caller.shown(row.job),
            "attempt": row.last_attempt,
            "opened_ns": row.opened_ns,
            "verdict": verdict,
        }
        for row, verdict in zip(rows, verdicts, strict=True)
    ]


def _plan(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "groups": row["groups"].split("\n")}


def _event(row: Mapping[str, Any], caller: Principal, state: AppState) -> dict[str, Any]:
    actor, reason = state.access.attribution(caller, row["actor"], row["reason"])
    body = unpack(row["body"])
    assert isinstance(body, dict)
    if isinstance(body.get("job"), str):
        body["job"] = caller.shown(str(body["job"]))
    body |= {
        name: f"{len(value)} {name}"
        for name, value in body.items()
        if isinstance(value, list) and (name == "reports" or len(value) > _LISTED)
    }
    job = row["job"] and caller.shown(row["job"])
    return {**row, "actor": actor, "body": body, "job": job, "reason": reason}


def _day_ns(text: str, name: str) -> int | None:
    if not text:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        detail = f"{name}: {text[:80]!r} is no date; write one like 2026-12-31"
        raise Problem("invalid-parameter", detail, fields={"path": name}) from None
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    moment_ns = int(moment.timestamp()) * 1_000_000_000
    if moment_ns > MAX_INT:
        detail = f"{name}: {text[:80]!r} is later than the year 2262, where nanoseconds end; choose an earlier date"
        raise Problem("invalid-parameter", detail, fields={"path": name})
    return max(0, moment_ns)


def _cursor(cursor: str) -> tuple[int, str] | None:
    if not cursor:
        return None
    found = read_cursor(cursor)
    if found is None:
        raise Problem("invalid-parameter", f"cursor: {cursor[:120]!r} is no cursor", fields={"path": "cursor"})
    return found
