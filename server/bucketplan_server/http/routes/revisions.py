"""What operators call about one signature: its documents, its revisions, and which of them is served."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from bucketplan_core.columns import MAX_CANDIDATES
from bucketplan_core.errors import BucketplanError, DecodeError
from bucketplan_core.fields import Fields
from bucketplan_core.wire import WireValue, pack, unpack
from bucketplan_server.access import Caller, Principal, needs
from bucketplan_server.http.answers import answer, large_answer, wanted_encoding
from bucketplan_server.http.bodies import read_document
from bucketplan_server.http.describe import DIGEST, MAP, body_of, both, obj, problems
from bucketplan_server.http.negotiation import MSGPACK_TYPE, body_encoding
from bucketplan_server.http.parameters import Signature
from bucketplan_server.http.state import AppState, State, cause_of
from bucketplan_server.problems import refuse
from bucketplan_server.store.plans import PLANNER_REVISION
from bucketplan_server.store.revisions import Activation, RevisionRow

__all__ = ["router"]

router = APIRouter()

_COUNT = {"type": "integer"}
_READ_PROBLEMS = ("invalid-parameter", "not-acceptable", "unknown-signature", "store-unavailable")
_WRITE_PROBLEMS = (
    "invalid-body",
    "invalid-parameter",
    "not-acceptable",
    "unknown-signature",
    "unknown-revision",
    "conflict",
    "body-timeout",
    "body-too-large",
    "busy",
    "unsupported-media-type",
    "store-unavailable",
)
_REVISION_BODY = obj(
    {
        "reason": {"type": "string", "description": "why; goes into the audit log"},
    },
    {
        "parent": {"type": "integer", "description": "revision that this one was made from, 1 where left out"},
        "options": {"type": "object", "description": "replan with these; the request's own where left open"},
        "buckets": {"type": "array", "description": "by hand: candidates by index; the others stay alone"},
        "decision": {"type": "object", "description": "by hand: a whole decision with every step"},
    },
)
_ACTIVATE_BODY = obj(
    {"reason": {"type": "string"}, "revision": {"type": ["integer", "null"]}},
    {
        "job": {"type": "string", "description": "only for this job; `revision` null takes the job's own back"},
        "expected": {"type": "integer", "description": "refused with 409 unless this revision is active"},
    },
)


@router.get(
    "/v1/plans/{signature}/request",
    dependencies=[needs("auditor")],
    summary="The request that a signature stands for",
    responses={200: both(MAP, "in MessagePack the canonical bytes that hash to it"), **problems(*_READ_PROBLEMS)},
)
async def get_request(request: Request, state: State, signature: Signature) -> Response:
    return await _document(request, (await state.revisions.documents(signature)).request)


@router.get(
    "/v1/plans/{signature}/profile",
    dependencies=[needs("auditor")],
    summary="The cost profile that is bound to a signature",
    responses={200: both(MAP, "in MessagePack its canonical bytes"), **problems(*_READ_PROBLEMS)},
)
async def get_profile(request: Request, state: State, signature: Signature) -> Response:
    return await _document(request, (await state.revisions.documents(signature)).profile)


@router.get(
    "/v1/plans/{signature}/revisions",
    dependencies=[needs("auditor")],
    summary="Revisions of a signature, the planner's own first",
    responses={
        200: both(
            obj({"revisions": {"type": "array", "items": MAP}, "signature": DIGEST}),
            "at most `limit` revisions behind `after`: who, when, why",
        ),
        **problems(*_READ_PROBLEMS),
    },
)
async def list_revisions(
    request: Request,
    state: State,
    caller: Caller,
    signature: Signature,
    after: Annotated[int, Query(ge=0, le=2**31 - 1, description="only revisions behind this number")] = 0,
    limit: Annotated[int, Query(ge=1, le=1000, description="most revisions answered")] = 100,
) -> Response:
    encoding = wanted_encoding(request)
    found = await state.revisions.revisions(signature, after=after, limit=limit)
    return await large_answer(
        lambda: {"revisions": [_readable(row, caller, state) for row in found], "signature": signature}, encoding
    )


@router.post(
    "/v1/plans/{signature}/revisions",
    dependencies=[needs("operator")],
    status_code=201,
    summary="Add a revision: replan with other options, or supply buckets by hand",
    openapi_extra=body_of(_REVISION_BODY, "exactly one of options, buckets and decision"),
    responses={
        201: both(obj({"revision": _COUNT, "signature": DIGEST}), "stored, not active yet"),
        **problems(*_WRITE_PROBLEMS, "illegal-plan", "cannot-plan", "unknown-planner", "planner-failed", "unconfirmed"),
    },
)
async def add_revision(request: Request, state: State, signature: Signature) -> Response:
    encoding = wanted_encoding(request, default=body_encoding(request.headers.get("content-type")))
    fields = await read_document(request)
    try:
        parent = fields.integer("parent", low=1) if "parent" in fields.keys(limit=16) else PLANNER_REVISION
        cause = cause_of(request, fields.plain_text("reason", lines=True))
        kinds = [name for name in ("options", "buckets", "decision") if name in fields.keys(limit=16)]
        if len(kinds) != 1:
            raise DecodeError("body", ", ".join(kinds), "must hold exactly one of options, buckets and decision")
        content = fields.raw(kinds[0])
        fields.finish()
        if kinds == ["options"]:
            if not isinstance(content, dict):
                raise DecodeError("body.options", content, "must be a map")
            number = await state.revisions.replan(signature, content, parent=parent, cause=cause)
        else:
            number = await state.revisions.by_hand(
                signature,
                buckets=_buckets(content) if kinds == ["buckets"] else None,
                decision=pack(content) if kinds == ["decision"] else None,
                parent=parent,
                cause=cause,
            )
    except BucketplanError as error:
        raise refuse(error).problem() from None
    return answer({"revision": number, "signature": signature}, encoding, status=201)


@router.post(
    "/v1/plans/{signature}/activate",
    dependencies=[needs("operator")],
    summary="Serve another revision, to everyone or to one job; also how to roll back",
    openapi_extra=body_of(_ACTIVATE_BODY, "attempts that are open keep the epoch they have"),
    responses={
        200: both(obj({"before": {"type": ["integer", "null"]}, "signature": DIGEST}), "what was active before"),
        **problems(*_WRITE_PROBLEMS, "quarantined", "unconfirmed"),
    },
)
async def activate(request: Request, state: State, caller: Caller, signature: Signature) -> Response:
    encoding = wanted_encoding(request, default=body_encoding(request.headers.get("content-type")))
    fields = await read_document(request)
    try:
        job = fields.plain_text("job") if "job" in fields.keys(limit=16) else ""
        wanted = Activation(
            revision=fields.optional_integer("revision", low=1),
            job=caller.job(job) if job else "",
            expected=fields.optional_integer("expected", low=1) if "expected" in fields.keys(limit=16) else None,
        )
        cause = cause_of(request, fields.plain_text("reason", lines=True))
        fields.finish()
        if wanted.revision is None and not job:
            raise DecodeError("body.revision", None, "may be null only together with a job")
        if not job:
            caller.everything("what is activated without a job is served to every namespace")
    except BucketplanError as error:
        raise refuse(error).problem() from None
    before = await state.revisions.activate(signature, wanted, cause)
    return answer({"before": before, "job": job, "revision": wanted.revision, "signature": signature}, encoding)


async def _document(request: Request, encoded: bytes) -> Response:
    encoding = wanted_encoding(request)
    if encoding == "msgpack":
        return Response(encoded, media_type=MSGPACK_TYPE, headers={"Vary": "Accept"})

    def readable() -> dict[str, WireValue]:
        tree = unpack(encoded)
        assert isinstance(tree, dict)
        return tree

    return await large_answer(readable, encoding, headers={"Vary": "Accept"})


def _buckets(value: WireValue) -> tuple[tuple[int, ...], ...]:
    fields = Fields({"buckets": value}, "body")
    read = fields.column_ints("buckets", fields.column_length("buckets", limit=MAX_CANDIDATES), limit=MAX_CANDIDATES)
    for number, bucket in enumerate(read):
        if not bucket:
            raise DecodeError(f"body.buckets[{number}]", [], "must hold at least one candidate; leave it out")
    return tuple(read)


def _readable(row: RevisionRow, caller: Principal, state: AppState) -> dict[str, WireValue]:
    actor, reason = state.access.attribution(caller, row.actor, row.reason)
    return {
        "active_for": [caller.shown(job) for job in row.active_for if not job or caller.sees(job)],
        "actor": actor,
        "created_ns": row.created_ns,
        "digest": row.digest,
        "options": unpack(row.options),
        "origin": row.origin,
        "parent": row.parent,
        "planner": row.planner,
        "reason": reason,
        "revision": row.revision,
    }
