"""`GET /v1/plans/{signature}` and `POST /v1/plans`: what ranks call."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from bucketplan_core.fields import is_digest
from bucketplan_server.access import Caller, needs
from bucketplan_server.http.answers import answer, plan_answer, wanted_encoding
from bucketplan_server.http.bodies import PlanBody, read_body, read_plan_body
from bucketplan_server.http.describe import DIGEST, PLAN, body_of, both, obj, problems
from bucketplan_server.http.negotiation import Encoding, body_encoding
from bucketplan_server.http.parameters import Signature
from bucketplan_server.http.state import State, cause_of
from bucketplan_server.http.waiting import while_connected
from bucketplan_server.planner.planned import Canonical
from bucketplan_server.problems import Problem
from bucketplan_server.service import Found, Pending, unknown_signature

__all__ = ["router"]

router = APIRouter()

_POST_BODY = obj(
    {
        "profile": {"type": ["object", "null"], "description": "cost profile; the first one of a signature is bound"},
        "request": {"type": "object", "description": "graph description and planning options"},
        "signature": DIGEST,
    },
)
_PENDING = both(
    obj({"signature": DIGEST, "state": {"type": "string", "enum": ["planning"]}}),
    "planning goes on; repeat the call after `Retry-After` seconds",
)


@router.get(
    "/v1/plans/{signature}",
    dependencies=[needs("rank")],
    summary="The stored plan of a signature",
    responses={
        200: both(PLAN, "the plan"),
        202: _PENDING,
        304: {"description": "the caller has this plan"},
        **problems(
            "invalid-parameter",
            "unknown-signature",
            "unknown-epoch",
            "unknown-revision",
            "not-acceptable",
            "busy",
            "store-unavailable",
            "quarantined",
        ),
    },
)
async def get_plan(
    request: Request,
    state: State,
    caller: Caller,
    signature: Signature,
    wait: Annotated[
        int,
        Query(
            ge=0,
            le=600,
            description="seconds to wait for an unknown signature to be posted, at most BUCKETPLAN_PLAN_WAIT_SECONDS",
        ),
    ] = 0,
) -> Response:
    encoding = wanted_encoding(request)
    try:
        found = await while_connected(request, state.plans.find(signature, wait_seconds=wait))
    except Pending:
        return _pending(signature, encoding, state)
    served = None
    if found is not None:
        served = await state.plans.under(found.entry, _epoch(request), namespace=caller.namespace)
    state.plans.count_answer(found)
    if served is None:
        raise unknown_signature(signature)
    return await plan_answer(request, served, encoding)


@router.post(
    "/v1/plans",
    dependencies=[needs("rank")],
    status_code=200,
    summary="The plan of a request, planned now where it is new",
    openapi_extra=body_of(
        _POST_BODY,
        "In MessagePack `request` and `profile` are bytes, their canonical encodings; the SHA-256 of `request` must be "
        "`signature`",
    ),
    responses={
        200: both(PLAN, "the plan, which was known"),
        201: both(PLAN, "the plan, planned for this call"),
        202: _PENDING,
        **problems(
            "invalid-body",
            "not-acceptable",
            "body-timeout",
            "body-too-large",
            "unsupported-media-type",
            "signature-mismatch",
            "schema-version",
            "unknown-planner",
            "cannot-plan",
            "unknown-epoch",
            "unknown-revision",
            "invalid-parameter",
            "busy",
            "planner-failed",
            "store-unavailable",
            "quarantined",
        ),
    },
)
async def post_plan(request: Request, state: State, caller: Caller) -> Response:
    sent = body_encoding(request.headers.get("content-type"))
    encoding = wanted_encoding(request, default=sent)
    try:
        found, created = await _posted(request, state, sent)
    except Pending as pending:
        return _pending(pending.signature, encoding, state)
    served = await state.plans.under(found.entry, _epoch(request), namespace=caller.namespace)
    state.plans.count_answer(found)
    return await plan_answer(request, served, encoding, status=201 if created else 200)


async def _posted(request: Request, state: State, sent: Encoding) -> tuple[Found, bool]:
    """As `PlanService.post`; nothing here holds the body while it waits for the plan."""
    data = await read_body(request)
    began = time.monotonic()
    if sent == "msgpack":
        body: PlanBody | Canonical = read_plan_body(data)
    else:
        body = await while_connected(request, state.pool.canonicalize(data))
    del data
    posted = state.plans.post(
        body.signature,
        body.request,
        body.profile,
        cause_of(request, "first request", is_shared=True),
        wait_seconds=max(0.0, state.settings.plan_wait_seconds - (time.monotonic() - began)),
        handed_over=partial(state.intake.release, request.scope),
    )
    del body
    return await while_connected(request, posted)


def _epoch(request: Request) -> str | None:
    epoch = request.headers.get("bucketplan-epoch")
    if epoch is not None and not is_digest(epoch):
        raise Problem(
            "invalid-parameter",
            f"Bucketplan-Epoch is {epoch[:80]!r}; it must be an epoch id, 64 lower-case hex characters",
            fields={"path": "Bucketplan-Epoch", "value": epoch[:80]},
        )
    return epoch


def _pending(signature: str, encoding: Encoding, state: State) -> Response:
    return answer(
        {"signature": signature, "state": "planning"},
        encoding,
        status=202,
        headers={"Retry-After": str(state.settings.retry_after_seconds), "Cache-Control": "no-store"},
    )
