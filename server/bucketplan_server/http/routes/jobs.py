"""Attempts of jobs: the leader opens, ranks report, people look."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Path, Query
from starlette.requests import Request
from starlette.responses import Response

from bucketplan_core.attempt import MAX_RANK, AttemptRequest, RankReport
from bucketplan_core.errors import BucketplanError
from bucketplan_core.fields import Fields
from bucketplan_core.plan import Plan
from bucketplan_core.wire import WireValue
from bucketplan_server.access import Caller, needs
from bucketplan_server.access.principal import JOB_PATTERN
from bucketplan_server.beside import READ_REPORTS, beside
from bucketplan_server.http.answers import answer, large_answer, wanted_encoding
from bucketplan_server.http.bodies import read_document
from bucketplan_server.http.describe import DIGEST, MAP, body_of, both, obj, problems
from bucketplan_server.http.negotiation import body_encoding
from bucketplan_server.http.parameters import DIGEST_PATTERN
from bucketplan_server.http.state import State, cause_of
from bucketplan_server.http.waiting import while_connected
from bucketplan_server.problems import refuse
from bucketplan_server.store.jobs import Attempt

__all__ = ["router"]

router = APIRouter()

Job = Annotated[str, Path(pattern=JOB_PATTERN, description="name of the job; NAMESPACE~JOB with an unscoped token")]
Number = Annotated[int, Path(ge=1, le=MAX_RANK, description="number of the attempt")]
_MAX_REPORTS = 20_000
_TEXT = {"type": "string"}
_COUNT = {"type": "integer"}
_RANKS = {"type": "array", "items": _COUNT}

_OPEN_BODY = obj(
    {
        "held_epoch": {
            "type": ["object", "null"],
            "description": "epoch of an attempt that runs; it is adopted",
        },
        "key": {"type": "string", "description": "nonce of this start; repeating the call with it is harmless"},
        "options": {
            "type": "object",
            "description": "planning options that the user gave; `hardware` holds figures, or names stored profiles",
        },
        "participants": {
            "type": "object",
            "description": "rank lists of each role's groups; empty where unknown",
            "additionalProperties": {"type": "array", "items": _RANKS},
        },
        "topology": {"type": "object", "additionalProperties": _COUNT, "description": "hosts that each role spans"},
        "uuid": {"type": ["string", "null"]},
    }
)
_OPENED = obj(
    {"attempt": _COUNT, "epoch": MAP, "epoch_id": DIGEST, "overrides": {"type": "array", "items": MAP}},
    description="an override is {signature, digest, plan}; plan as GET /v1/plans/{signature} answers it",
)
_REPORT = obj(
    {
        "decision": {"type": ["string", "null"]},
        "digests": {"type": "object", "description": "group digests by role"},
        "graph_hash": {"type": ["string", "null"]},
        "members": {"type": "object", "description": "ranks of this rank's group by role, in group order"},
        "ordinal": _COUNT,
        "rank": _COUNT,
        "signature": {"type": ["string", "null"]},
        "skipped": {"type": "array", "items": _TEXT},
        "slot": {"type": "string", "description": "`open` for the opening, else the graph: joint, forward, backward"},
        "statistics": {"type": "object", "description": "counts of the rewrite"},
        "uuid": {"type": ["string", "null"]},
    }
)
_STATUS = obj(
    {
        "attempt": _COUNT,
        "epoch_id": DIGEST,
        "groups": {"type": "array", "items": MAP},
        "job": _TEXT,
        "num_reports": _COUNT,
        "opening": MAP,
        "pruned": {
            "type": ["object", "null"],
            "description": "how many reports of graphs retention deleted (`num_reports`), and since when (`since_ns`)",
        },
    }
)


@router.post(
    "/v1/jobs/{job}/attempts",
    dependencies=[needs("rank")],
    status_code=200,
    summary="Open an attempt: number it and fix its epoch",
    openapi_extra=body_of(_OPEN_BODY, "sent by one rank of the job, the leader"),
    responses={
        200: both(_OPENED, "the attempt that was opened under this key"),
        201: both(_OPENED, "a new attempt"),
        **problems(
            "invalid-body",
            "invalid-parameter",
            "not-acceptable",
            "unknown-profile",
            "cannot-plan",
            "conflict",
            "body-timeout",
            "body-too-large",
            "busy",
            "unsupported-media-type",
            "schema-version",
            "unknown-planner",
            "store-unavailable",
            "quarantined",
        ),
    },
)
async def open_attempt(request: Request, state: State, caller: Caller, job: Job) -> Response:
    encoding = wanted_encoding(request, default=body_encoding(request.headers.get("content-type")))
    fields = await read_document(request)
    try:
        body = AttemptRequest.read(fields)
    except BucketplanError as error:
        raise refuse(error).problem() from None
    opened = await state.jobs.open(caller.job(job), body, cause_of(request, "attempt opened"))

    def tree() -> dict[str, WireValue]:
        return {
            "attempt": opened.attempt.attempt,
            "epoch": opened.epoch.to_wire(),
            "epoch_id": opened.epoch.id,
            "overrides": [
                {
                    "digest": row.digest,
                    "plan": row.plan if encoding == "msgpack" else Plan.decode(row.plan).to_people(),
                    "signature": row.signature,
                }
                for row in opened.overrides
            ],
        }

    return await large_answer(tree, encoding, status=201 if opened.created else 200)


@router.get(
    "/v1/jobs/{job}/attempts",
    dependencies=[needs("auditor")],
    summary="Attempts of a job, the newest first",
    responses={
        200: both(obj({"attempts": {"type": "array", "items": MAP}}), "at most `limit` of them"),
        **problems("invalid-parameter", "not-acceptable", "store-unavailable"),
    },
)
async def list_attempts(
    request: Request,
    state: State,
    caller: Caller,
    job: Job,
    before: Annotated[int | None, Query(ge=1, le=MAX_RANK, description="only attempts below this number")] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="most attempts answered")] = 100,
) -> Response:
    encoding = wanted_encoding(request)
    found = await state.jobs.attempts(caller.job(job), before=before, limit=limit)
    return await large_answer(lambda: {"attempts": [_brief(attempt) for attempt in found]}, encoding)


@router.get(
    "/v1/jobs/{job}/attempts/{attempt}",
    dependencies=[needs("auditor")],
    summary="The state of an attempt: who is missing, which groups agree, where they differ",
    responses={
        200: both(_STATUS, "the state"),
        304: {"description": "it is as the caller knows it"},
        **problems("invalid-parameter", "not-acceptable", "unknown-attempt", "busy", "store-unavailable"),
    },
)
async def get_attempt(
    request: Request,
    state: State,
    caller: Caller,
    job: Job,
    attempt: Number,
    wait: Annotated[
        int, Query(ge=0, le=600, description="seconds to wait for a change from the state that If-None-Match names")
    ] = 0,
) -> Response:
    encoding = wanted_encoding(request)
    found = await state.jobs.attempt(caller.job(job), attempt)
    seen = request.headers.get("if-none-match", "").removeprefix("W/").strip('"')
    if seen and wait:
        reading = await while_connected(request, state.jobs.wait_for_change(found, seen, wait))
    else:
        reading = await state.jobs.reading(found)
    headers = {"ETag": f'W/"{reading.version}"', "Cache-Control": "no-cache", "Vary": "Accept"}
    if seen == reading.version:
        return Response(status_code=304, headers=headers)
    shown = {**await state.jobs.status(found, reading), "job": caller.shown(found.job)}
    return await large_answer(lambda: shown, encoding, headers=headers)


@router.post(
    "/v1/jobs/{job}/attempts/{attempt}/reports",
    dependencies=[needs("rank")],
    summary="Report what ranks did; repeating a report is harmless",
    openapi_extra=body_of(
        obj({"reports": {"type": "array", "items": _REPORT, "maxItems": _MAX_REPORTS}}),
        "a report is named by rank, slot and ordinal; the first one under a name stays",
    ),
    responses={
        200: both(obj({"reports": _COUNT}), "they are stored"),
        **problems(
            "invalid-body",
            "invalid-parameter",
            "not-acceptable",
            "unknown-attempt",
            "conflict",
            "body-timeout",
            "body-too-large",
            "busy",
            "unsupported-media-type",
            "store-unavailable",
        ),
    },
)
async def post_reports(request: Request, state: State, caller: Caller, job: Job, attempt: Number) -> Response:
    encoding = wanted_encoding(request, default=body_encoding(request.headers.get("content-type")))
    state.jobs.refuse_more_reports()
    fields = await read_document(request)
    try:
        listed = fields.array("reports", limit=_MAX_REPORTS)
        fields.finish()
        reports = await beside(len(listed) > READ_REPORTS, _read_reports, listed)
    except BucketplanError as error:
        raise refuse(error).problem() from None
    await state.jobs.report(caller.job(job), attempt, reports, cause_of(request, "report"))
    return answer({"reports": len(reports)}, encoding)


@router.get(
    "/v1/epochs/{epoch}",
    dependencies=[needs("rank")],
    summary="The content of an epoch",
    responses={
        200: both(MAP, "the epoch; its canonical encoding hashes to its id"),
        **problems("invalid-parameter", "not-acceptable", "unknown-epoch", "store-unavailable"),
    },
)
async def get_epoch(
    request: Request,
    state: State,
    caller: Caller,
    epoch: Annotated[str, Path(pattern=DIGEST_PATTERN, description="id of the epoch")],
) -> Response:
    encoding = wanted_encoding(request)
    found = await state.jobs.epoch(epoch, namespace=caller.namespace)
    headers = {"ETag": f'"{epoch}"' if encoding == "msgpack" else f'W/"{epoch}"', "Vary": "Accept"}
    headers["Cache-Control"] = "max-age=31536000, immutable"
    return await large_answer(found.to_wire, encoding, headers=headers)


def _read_reports(listed: Sequence[WireValue]) -> list[RankReport]:
    return [RankReport.read(Fields(value, f"body.reports[{index}]")) for index, value in enumerate(listed)]


def _brief(attempt: Attempt) -> dict[str, WireValue]:
    return {
        "attempt": attempt.attempt,
        "epoch_id": attempt.epoch,
        "opened_by": attempt.actor,
        "opened_ns": attempt.opened_ns,
    }
