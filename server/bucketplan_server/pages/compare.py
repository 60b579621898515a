"""Comparing two plans: of two signatures, or two revisions of one."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from bucketplan_core.plan import Plan
from bucketplan_server.access import needs
from bucketplan_server.http.state import AppState, State
from bucketplan_server.pages.plan import revision_of
from bucketplan_server.pages.render import page
from bucketplan_server.pages.routing import PageRoute, Refusal, typed_signature, whole_signature
from bucketplan_server.planner.planned import Stored
from bucketplan_server.problems import Problem

__all__ = ["MOST_CHANGES", "compared", "router"]

router = APIRouter(route_class=PageRoute, include_in_schema=False)
MOST_CHANGES = 100
"""Rows of a list of differences."""


@router.get("/diff", dependencies=[needs("auditor")])
async def diff(request: Request, state: State) -> Response:
    given = {name: typed_signature(request, name) for name in ("a", "b")}
    given |= {name: request.query_params.get(name, "").strip() for name in ("revision_a", "revision_b")}
    found, refusal = None, None
    if given["a"] or given["b"]:
        try:
            found = await compared(state, *[await _side(request, state, name, given[name]) for name in ("a", "b")])
        except Problem as problem:
            if problem.status >= 500:
                raise
            refusal = Refusal(action="filter", problem=problem, typed=given)
    code = 200 if refusal is None else refusal.problem.status
    return page(request, "diff.html", code=code, found=found, given=given, most=MOST_CHANGES, refusal=refusal)


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


async def compared(state: AppState, a: Stored, b: Stored) -> dict[str, Any]:
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
