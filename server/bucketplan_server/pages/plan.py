"""One plan: its pictures, buckets and revisions; one bucket; the data behind the pictures."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from bucketplan_core.plan import Plan
from bucketplan_core.wire import unpack
from bucketplan_server.access import Caller, Principal, needs
from bucketplan_server.http.answers import large_answer
from bucketplan_server.http.state import AppState, State
from bucketplan_server.pages.draw import chart_of_memory, chart_of_sizes, drawing_of
from bucketplan_server.pages.figures import ORDERS, PlanQuery, view_bucket, view_plan
from bucketplan_server.pages.options import CHOICES, readable_options
from bucketplan_server.pages.render import page
from bucketplan_server.pages.routing import AnySignature, PageRoute, Refusal, numbered_page, page_number, whole_number
from bucketplan_server.problems import Problem
from bucketplan_server.store.plans import PLANNER_REVISION
from bucketplan_server.store.revisions import OwnRevisions, RevisionRow

__all__ = ["own_revisions", "plan_page", "revision_of", "router", "shown_revision"]

router = APIRouter(route_class=PageRoute, include_in_schema=False, dependencies=[needs("auditor")])
_BUCKETS = 50
_MEMBERS = 100
_REVISIONS = 50
_JOBS = 20
_DONE = ("activated", "already", "followed", "replanned")
_BASELINES = ("none", "size", "module")


def revision_of(request: Request, name: str = "revision") -> int | None:
    return whole_number(request.query_params.get(name, ""), name, low=1, high=2**31 - 1)


async def shown_revision(request: Request, state: AppState, signature: str) -> int:
    """The revision that the address names, else the one that is served to everyone."""
    return revision_of(request) or (await state.revisions.serving(signature)).get("", PLANNER_REVISION)


async def own_revisions(state: AppState, caller: Principal, signature: str) -> OwnRevisions:
    """Which jobs that `caller` sees are served a revision of their own, by the names that it writes."""
    found = await state.revisions.own(signature, namespace=caller.namespace, limit=_JOBS)
    return replace(found, jobs=tuple((caller.shown(job), revision) for job, revision in found.jobs))


async def _notice(request: Request, state: AppState, caller: Principal, signature: str) -> dict[str, Any] | None:
    """What the address says was done, as long as it holds: anybody may write an address."""
    done, job = (request.query_params.get(name, "").strip() for name in ("done", "job"))
    if done not in _DONE:
        return None
    stored_job = caller.job(job) if job else ""
    serving = await state.revisions.serving(signature, job=stored_job)
    follows = bool(job) and stored_job not in serving
    if done == "followed" or (done == "already" and follows):
        holds = follows
    else:
        holds = serving.get(stored_job) == revision_of(request)
    return {"follows": follows, "is_again": done == "already", "job": job} if holds else None


def _entry(state: AppState, caller: Principal, row: RevisionRow) -> dict[str, Any]:
    """A revision as the page lists it, jobs of other namespaces left out."""
    actor, reason = state.access.attribution(caller, row.actor, row.reason)
    jobs = [caller.shown(job) for job in row.active_for if job and caller.sees(job)]
    return {
        "active_for": jobs[:_JOBS],
        "num_more_jobs": len(jobs[_JOBS:]),
        "is_active": "" in row.active_for,
        "options": _options(row),
        "row": replace(row, actor=actor, reason=reason),
    }


def _options(row: RevisionRow) -> dict[str, str]:
    options = unpack(row.options)
    assert isinstance(options, dict)
    return readable_options(options)


@router.get("/plans/{signature}")
async def plan(request: Request, state: State, caller: Caller, signature: AnySignature) -> Response:
    return await plan_page(request, state, caller, signature)


async def plan_page(
    request: Request, state: AppState, caller: Principal, signature: str, *, refusal: Refusal | None = None
) -> Response:
    """The page of a plan; with `refusal`, its form as it was filled in and what is wrong beside the field."""
    wanted = revision_of(request)
    order = request.query_params.get("order", "") or "launch"
    if order not in ORDERS:
        raise Problem("invalid-parameter", f"order: {order[:80]!r} must be one of {', '.join(ORDERS)}")
    query = PlanQuery(
        find=request.query_params.get("find", "").strip()[:1_000],
        order=order,  # type: ignore[arg-type]  # checked above
        page=page_number(request, "page"),
        size=_BUCKETS,
    )
    stored = await state.revisions.stored(signature, wanted)
    last = await state.revisions.last(signature)
    numbers, at, num_pages = numbered_page(request, range(last, 0, -1), _REVISIONS, name="revisions")
    listed = await state.revisions.revisions(signature, after=numbers[-1] - 1, limit=len(numbers))
    shown = await shown_revision(request, state, signature)
    among = [row for row in listed if row.revision == shown]
    (revision,) = among or await state.revisions.revisions(signature, after=shown - 1, limit=1)
    view = await state.pool.read(view_plan, stored, replace(query, options=revision.options))
    decoded = await asyncio.to_thread(Plan.decode, stored.plan)
    return page(
        request,
        "plan.html",
        code=200 if refusal is None else refusal.problem.status,
        after=None if view.after is None else drawing_of(view.after),
        assessment=decoded.assessment,
        at=at,
        baselines=_baselines(decoded),
        choices=CHOICES,
        before=None if view.before is None else drawing_of(view.before),
        memory=chart_of_memory(view),
        notice=await _notice(request, state, caller, signature),
        options=unpack(revision.options),
        num_revision_pages=num_pages,
        orders=ORDERS,
        own=await own_revisions(state, caller, signature),
        query=query,
        refusal=refusal,
        revision=_entry(state, caller, revision),
        revisions=[_entry(state, caller, row) for row in reversed(listed)],
        signature=signature,
        sizes=chart_of_sizes(view.sizes),
        typed={} if refusal is None else refusal.typed,
        view=view,
    )


@router.get("/plans/{signature}/pictures.json")
async def pictures(request: Request, state: State, signature: AnySignature) -> Response:
    """What is drawn on the page of the plan, as data: boxes in units of the drawing, slices and curves in ns, bytes."""
    stored = await state.revisions.stored(signature, revision_of(request))
    view = await state.pool.read(view_plan, stored, PlanQuery(size=0))
    names = ("before", "after", "memory_before", "memory_after", "sizes")
    drawn = {name: getattr(view, name) for name in names}
    tree = {
        name: None if value is None else _whole(value if isinstance(value, tuple) else asdict(value))
        for name, value in drawn.items()
    }
    return await large_answer(lambda: tree, "json")


@router.get("/plans/{signature}/buckets/{index}")
async def bucket(request: Request, state: State, signature: AnySignature, index: int) -> Response:
    wanted = revision_of(request)
    if not 0 <= index < 2**31:
        raise Problem("not-found", f"there is no bucket {index}")
    stored = await state.revisions.stored(signature, wanted)
    view = await state.pool.read(view_bucket, stored, index, page_number(request, "page"), _MEMBERS)
    if view is None:
        raise Problem("not-found", f"this plan has no bucket {index}", fields={"path": "index", "value": index})
    return page(
        request,
        "bucket.html",
        index=index,
        revision=wanted,
        signature=signature,
        view=view,
    )


def _baselines(plan: Plan) -> list[tuple[str, Any]]:
    """Simulated figures beside those of the rules; the plan itself first."""
    simulated = plan.assessment.get("simulated")
    found = plan.assessment.get("baselines")
    if not isinstance(simulated, dict) or not isinstance(found, dict):
        return []
    return [("this plan", simulated), *((name, found[name]) for name in _BASELINES if name in found)]


def _whole(value: Any) -> Any:
    """Drawing units in thousandths: documents of this service hold no floats."""
    if isinstance(value, float):
        return round(value * 1_000)
    if isinstance(value, dict):
        return {key: _whole(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_whole(inner) for inner in value]
    return value
