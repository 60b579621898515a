"""Audit reads: list plans, say why one is as it is, and how two differ."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from bucketplan_core.wire import MAX_INT, WireValue
from bucketplan_server.access import Caller, needs
from bucketplan_server.access.principal import JOB_PATTERN
from bucketplan_server.http.answers import large_answer, plan_answer, wanted_encoding
from bucketplan_server.http.describe import MAP, PLAN, PLAN_READ_PROBLEMS, both, obj, problems
from bucketplan_server.http.parameters import CURSOR_PATTERN, DIGEST_PATTERN, Signature, read_cursor, write_cursor
from bucketplan_server.http.state import State
from bucketplan_server.http.waiting import while_connected
from bucketplan_server.problems import Problem
from bucketplan_server.store.engine import StoreError
from bucketplan_server.store.listing import PlanFilter, list_plans

__all__ = ["router"]

router = APIRouter()
_LIST: dict[str, Any] = {"type": "array", "items": MAP}
_NAME_CHARACTERS = 1_000
Revision = Annotated[int | None, Query(ge=1, le=2**31 - 1, description="revision; the active one where left out")]
Part = Annotated[str | None, Query(max_length=_NAME_CHARACTERS, description="part of a name")]
Exact = Annotated[str | None, Query(max_length=_NAME_CHARACTERS)]
Time = Annotated[int | None, Query(ge=0, le=MAX_INT, description="nanoseconds since 1970")]


@router.get(
    "/v1/plans",
    dependencies=[needs("auditor")],
    summary="Stored plans, the newest first",
    responses={
        200: both(
            obj({"next": {"type": ["string", "null"]}, "plans": _LIST}), "`next` is the cursor of the following page"
        ),
        **problems("invalid-parameter", "not-acceptable", "store-unavailable"),
    },
)
async def get_plans(
    request: Request,
    state: State,
    caller: Caller,
    job: Annotated[str | None, Query(pattern=JOB_PATTERN, description="plans that this job has reported")] = None,
    parameter: Part = None,
    module: Part = None,
    group: Exact = None,
    strategy: Exact = None,
    since_ns: Time = None,
    until_ns: Time = None,
    cursor: Annotated[str | None, Query(pattern=CURSOR_PATTERN, description="`next` of a page")] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="most plans answered")] = 100,
) -> Response:
    encoding = wanted_encoding(request)
    wanted = PlanFilter(
        job=None if job is None else caller.job(job),
        namespace=caller.namespace,
        parameter=parameter,
        module=module,
        group=group,
        strategy=strategy,
        since_ns=since_ns,
        until_ns=until_ns,
    )
    try:
        rows = await list_plans(state.store, wanted, before=_read_cursor(cursor), limit=limit)
    except StoreError as error:
        raise state.plans.store_unavailable(error) from None
    listed: list[WireValue] = [
        {
            **row,
            "actor": state.access.attribution(caller, row["actor"], "")[0],
            "groups": row["groups"].split("\n"),
        }
        for row in rows
    ]
    following = write_cursor(rows[-1]["created_ns"], rows[-1]["signature"]) if len(rows) == limit else None
    return await large_answer(lambda: {"next": following, "plans": listed}, encoding)


@router.get(
    "/v1/plans/{signature}/revisions/{revision}",
    dependencies=[needs("auditor")],
    summary="One revision of a plan",
    responses={
        200: both(PLAN, "the plan"),
        304: {"description": "the caller has this plan"},
        **problems(*PLAN_READ_PROBLEMS),
    },
)
async def get_revision(request: Request, state: State, signature: Signature, revision: int) -> Response:
    encoding = wanted_encoding(request)
    return await plan_answer(request, await state.revisions.served(signature, revision), encoding)


@router.get(
    "/v1/plans/{signature}/explain",
    dependencies=[needs("auditor")],
    summary="Why each bucket is as it is, and what limits the step",
    responses={200: both(MAP, "needs hardware figures in the request's options"), **problems(*PLAN_READ_PROBLEMS)},
)
async def explain(request: Request, state: State, signature: Signature, revision: Revision = None) -> Response:
    encoding = wanted_encoding(request)
    stored = await state.revisions.stored(signature, revision)
    found = await while_connected(request, state.pool.explain(stored))
    return await large_answer(lambda: found, encoding)


@router.get(
    "/v1/diff",
    dependencies=[needs("auditor")],
    summary="How two plans differ: candidates and options of the requests, buckets of the decisions",
    responses={200: both(obj({"decision": MAP, "request": MAP}), "from `a` to `b`"), **problems(*PLAN_READ_PROBLEMS)},
)
async def diff(
    request: Request,
    state: State,
    a: Annotated[str, Query(pattern=DIGEST_PATTERN, description="signature")],
    b: Annotated[str, Query(pattern=DIGEST_PATTERN, description="signature; may be the same one")],
    revision_a: Revision = None,
    revision_b: Revision = None,
) -> Response:
    encoding = wanted_encoding(request)
    sides = [await state.revisions.stored(a, revision_a), await state.revisions.stored(b, revision_b)]
    found = await while_connected(request, state.pool.diff(*sides))
    return await large_answer(lambda: found, encoding)


def _read_cursor(cursor: str | None) -> tuple[int, str] | None:
    if cursor is None:
        return None
    found = read_cursor(cursor)
    if found is None:
        raise Problem("invalid-parameter", f"query.cursor: {cursor!r} is no cursor", fields={"path": "query.cursor"})
    return found
