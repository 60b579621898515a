"""The audit log: read, and checked."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from bucketplan_core.wire import MAX_INT, WireValue, unpack
from bucketplan_server.access import Caller, needs
from bucketplan_server.access.principal import JOB_PATTERN, Principal
from bucketplan_server.http.answers import answer, large_answer, wanted_encoding
from bucketplan_server.http.describe import DIGEST, MAP, both, obj, problems
from bucketplan_server.http.parameters import DIGEST_PATTERN
from bucketplan_server.http.state import State, verified
from bucketplan_server.store.engine import StoreError
from bucketplan_server.store.events import load_events

__all__ = ["router"]

router = APIRouter()
_COUNT = {"type": "integer"}


@router.get(
    "/v1/events",
    dependencies=[needs("auditor")],
    summary="The audit log, the oldest event first",
    responses={
        200: both(obj({"events": {"type": "array", "items": MAP}}), "at most `limit` events behind `after`"),
        **problems("invalid-parameter", "not-acceptable", "store-unavailable"),
    },
)
async def list_events(
    request: Request,
    state: State,
    caller: Caller,
    after: Annotated[int, Query(ge=0, le=MAX_INT, description="only events behind this number")] = 0,
    limit: Annotated[int, Query(ge=1, le=1000, description="most events answered")] = 100,
    signature: Annotated[str | None, Query(pattern=DIGEST_PATTERN, description="only events of this plan")] = None,
    job: Annotated[str | None, Query(pattern=JOB_PATTERN, description="only events of this job")] = None,
) -> Response:
    encoding = wanted_encoding(request)
    try:
        found = await load_events(
            state.store,
            after=after,
            limit=limit,
            signature=signature,
            job=None if job is None else caller.job(job),
            namespace=caller.namespace,
        )
    except StoreError as error:
        raise state.plans.store_unavailable(error) from None

    def tree() -> dict[str, WireValue]:
        events: list[WireValue] = []
        for row in found:
            actor, reason = state.access.attribution(caller, row["actor"], row["reason"])
            job_shown = row["job"] and caller.shown(row["job"])
            events.append(
                {**row, "actor": actor, "body": _shown(caller, unpack(row["body"])), "job": job_shown, "reason": reason}
            )
        return {"events": events}

    return await large_answer(tree, encoding)


@router.get(
    "/v1/events/verify",
    dependencies=[needs("auditor")],
    summary="Walk the chain, recompute every digest, and plan every plan again",
    responses={
        200: both(
            obj(
                {
                    "findings": {"type": "array", "items": MAP},
                    "head": DIGEST,
                    "holds": {"type": "boolean"},
                    "num_events": _COUNT,
                }
            ),
            "what was checked and found",
        ),
        **problems("invalid-parameter", "not-acceptable", "busy", "planner-failed", "store-unavailable"),
    },
)
async def verify_events(
    request: Request,
    state: State,
    caller: Caller,
    replay: Annotated[
        bool, Query(description="plan every revision again; the chain and digests are checked anyway")
    ] = False,
) -> Response:
    encoding = wanted_encoding(request)
    caller.everything("the log is one chain over every namespace")
    found = await verified(request, state, replay=replay)
    return answer(found.to_wire(), encoding, headers={"Cache-Control": "no-store"})


def _shown(caller: Principal, body: WireValue) -> WireValue:
    """An event's body with its job as the caller writes it."""
    if isinstance(body, dict) and isinstance(body.get("job"), str):
        return {**body, "job": caller.shown(str(body["job"]))}
    return body
