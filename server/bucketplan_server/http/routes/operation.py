"""What operators and load balancers call: `/healthz`, `/readyz`, `/metrics`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from bucketplan_core.planners import PLANNERS
from bucketplan_core.request import CAPTURE_VERSION, SCHEMA_VERSION
from bucketplan_core.wire import WireValue
from bucketplan_server import __version__
from bucketplan_server.access import needs_nothing
from bucketplan_server.http.answers import answer
from bucketplan_server.http.describe import obj, problems
from bucketplan_server.http.negotiation import preferred
from bucketplan_server.http.state import State
from bucketplan_server.metrics import CONTENT_TYPE_LATEST
from bucketplan_server.problems import Problem
from bucketplan_server.store.engine import StoreError

__all__ = ["router"]

router = APIRouter()
_TEXT = {"type": "string"}
_OFFERED = {
    "capture": {"type": "integer"},
    "planners": {"type": "array", "items": _TEXT},
    "schema": {"type": "integer"},
}
_STATE = {"application/json": {"schema": obj({"status": _TEXT, "version": _TEXT}, _OFFERED)}}


@router.get(
    "/healthz",
    dependencies=[needs_nothing()],
    summary="Whether the process is alive",
    responses={200: {"description": "it is", "content": _STATE}, **problems(public=True)},
)
async def healthz(request: Request) -> Response:
    return _state(request, "ok")


@router.get(
    "/readyz",
    dependencies=[needs_nothing()],
    summary="Whether new work should be sent here",
    responses={200: {"description": "yes", "content": _STATE}, **problems("busy", "store-unavailable", public=True)},
)
async def readyz(request: Request, state: State) -> Response:
    if state.draining:
        raise Problem("busy", "the server is stopping and finishes what it has", headers={"Retry-After": "5"})
    try:
        await state.store.ping()
    except StoreError as error:
        raise state.plans.store_unavailable(error) from None
    if state.tokens.is_stale:
        raise Problem(
            "store-unavailable",
            "the tokens cannot be read, so tokens that were revoked meanwhile are still let in; the log says why",
            headers={"Retry-After": str(state.settings.retry_after_seconds)},
        )
    return _state(request, "ready")


@router.get(
    "/metrics",
    dependencies=[needs_nothing()],
    summary="Prometheus metrics",
    responses={
        200: {"description": "text exposition format", "content": {"text/plain": {"schema": {"type": "string"}}}},
        **problems(public=True),
    },
)
async def metrics(state: State) -> Response:
    return Response(state.metrics.render(), media_type=CONTENT_TYPE_LATEST)


def _state(request: Request, status: str) -> Response:
    encoding = preferred(request.headers.get("accept")) or "json"
    state: dict[str, WireValue] = {
        "capture": CAPTURE_VERSION,
        "planners": [planner.version for planner in PLANNERS],
        "schema": SCHEMA_VERSION,
        "status": status,
        "version": __version__,
    }
    return answer(state, encoding, headers={"Cache-Control": "no-store"})
