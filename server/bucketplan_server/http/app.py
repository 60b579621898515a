"""The FastAPI application: routes, and every error in the one shape."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from bucketplan_server import __version__
from bucketplan_server.access.authenticate import refusal_reason
from bucketplan_server.access.dependency import principal_of
from bucketplan_server.http.routes import audit, events, inspection, jobs, operation, plans, profiles, revisions
from bucketplan_server.http.state import AppState
from bucketplan_server.pages.places import login_redirect
from bucketplan_server.pages.problem import refusal
from bucketplan_server.pages.router import router as pages
from bucketplan_server.problems import Problem

__all__ = ["build_app"]

_DESCRIPTION = """One authoritative communication bucket plan for every rank of a compiled FSDP training fleet.

Bodies are MessagePack (`application/msgpack`) or JSON (`application/json`) by `Content-Type` and `Accept`; errors are
problem details (RFC 9457) in either encoding."""


class _Application(FastAPI):
    """FastAPI without the layer that answers an unexpected exception in plain text: the front has the last word."""

    def build_middleware_stack(self) -> ASGIApp:
        outermost = super().build_middleware_stack()
        # It would answer and then raise all the same, upon which the protocol server cuts the connection.
        assert isinstance(outermost, ServerErrorMiddleware)
        return outermost.app


def build_app(state: AppState) -> FastAPI:
    """The application behind the front; `state` carries the parts that routes use."""
    app = _Application(
        title="bucketplan",
        version=__version__,
        description=_DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.parts = state
    for module in (plans, audit, inspection, revisions, profiles, jobs, events, operation):
        app.include_router(module.router)
    app.include_router(pages)
    app.add_exception_handler(Problem, _on_problem)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    return app


async def _on_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    if error.slug in ("unauthorized", "forbidden"):
        state: AppState = request.app.state.parts
        token = principal_of(request).name
        state.access.refused(request.scope, refusal_reason(error), error, token=token)
        redirect = login_redirect(request.scope) if error.status == 401 else None
        if redirect is not None:
            return redirect
    return refusal(request.scope, error)


async def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"])
    value = str(first.get("input"))[:200]
    problem = Problem(
        "invalid-parameter", f"{path}: {first['msg']} (got {value!r})", fields={"path": path, "value": value}
    )
    return refusal(request.scope, problem)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 404:
        problem = Problem("not-found", f"there is nothing at {request.url.path}", fields={"path": request.url.path})
    elif error.status_code == 405:
        allowed = headers.get("Allow", headers.get("allow", ""))
        problem = Problem(
            "method-not-allowed",
            f"{request.url.path} takes {allowed or 'other methods'}, not {request.method}",
            headers=headers,
        )
    else:
        problem = Problem("invalid-body", str(error.detail), status=error.status_code, headers=headers)
    return refusal(request.scope, problem)
