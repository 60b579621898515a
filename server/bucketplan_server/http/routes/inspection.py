"""What people look into: the simulated step of a plan, and a decision by its digest."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import Response

from bucketplan_core.plan import Plan
from bucketplan_server.access import needs
from bucketplan_server.beside import DECODED_BYTES, beside
from bucketplan_server.http.answers import large_answer, wanted_encoding
from bucketplan_server.http.describe import DIGEST, MAP, PLAN_READ_PROBLEMS, both, obj, problems
from bucketplan_server.http.negotiation import MSGPACK_TYPE, names_tag
from bucketplan_server.http.parameters import DIGEST_PATTERN, Signature
from bucketplan_server.http.routes.audit import Revision
from bucketplan_server.http.state import State
from bucketplan_server.http.waiting import while_connected
from bucketplan_server.memory import content_digest
from bucketplan_server.planner.trace import trace_step

__all__ = ["router"]

router = APIRouter()


@router.get(
    "/v1/plans/{signature}/trace",
    dependencies=[needs("auditor")],
    summary="The simulated step before and after, as a Chrome trace for ui.perfetto.dev",
    responses={
        200: both(
            obj({"displayTimeUnit": {"type": "string"}, "otherData": MAP, "traceEvents": {"type": "array"}}),
            "needs hardware figures in the request's options; times in microseconds, exact ones in `args`",
        ),
        **problems(*PLAN_READ_PROBLEMS),
    },
)
async def trace(request: Request, state: State, signature: Signature, revision: Revision = None) -> Response:
    encoding = wanted_encoding(request)
    stored = await state.revisions.stored(signature, revision)
    found = await while_connected(request, state.pool.read(trace_step, stored))
    return await large_answer(lambda: found, encoding)


@router.get(
    "/v1/decisions/{digest}",
    dependencies=[needs("rank")],
    summary="A decision by its digest, for ever the same",
    responses={
        200: both({**MAP, "properties": {"signature": DIGEST}}, "in MessagePack the canonical bytes that hash to it"),
        304: {"description": "the caller has this decision"},
        **problems("invalid-parameter", "not-acceptable", "unknown-revision", "quarantined", "store-unavailable"),
    },
)
async def get_decision(
    request: Request,
    state: State,
    digest: Annotated[str, Path(pattern=DIGEST_PATTERN, description="digest of the decision")],
) -> Response:
    encoding = wanted_encoding(request)
    row = await state.plans.decision(digest)
    headers = {
        "Cache-Control": "max-age=31536000, immutable",
        "ETag": f'"{digest}"' if encoding == "msgpack" else f'W/"{digest}"',
        "Vary": "Accept",
    }
    if names_tag(request.headers.getlist("if-none-match"), digest):
        return Response(status_code=304, headers=headers)
    plan = await beside(len(row.plan) > DECODED_BYTES, Plan.decode, row.plan)
    if encoding == "json":
        return await large_answer(plan.decision.to_wire, encoding, headers=headers)
    encoded = plan.decision.encoded
    headers["Content-Digest"] = content_digest(encoded)
    return Response(encoded, media_type=MSGPACK_TYPE, headers=headers)
