"""Signing in and out: the token in a cookie that scripts cannot read and other sites cannot send."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from bucketplan_server.access import needs_nothing
from bucketplan_server.access.authenticate import COOKIE
from bucketplan_server.http.state import State
from bucketplan_server.pages.places import local_path
from bucketplan_server.pages.render import page, static_answer
from bucketplan_server.pages.routing import PageRoute, read_form, see_other, text_field
from bucketplan_server.problems import Problem

__all__ = ["router"]

router = APIRouter(route_class=PageRoute, include_in_schema=False, dependencies=[needs_nothing()])
_MAX_TOKEN_CHARACTERS = 500


@router.get("/login")
async def login(request: Request, state: State) -> Response:
    return page(
        request,
        "login.html",
        failed=False,
        required=state.access.table.required,
        target=local_path(request.query_params.get("next", "")),
        unsent=request.query_params.get("unsent", "") == "yes",
    )


@router.post("/login")
async def sign_in(request: Request, state: State) -> Response:
    form = await read_form(request)
    token = text_field(form, "token", limit=_MAX_TOKEN_CHARACTERS)
    target = local_path(form.get("next", ""))
    if state.access.table.valid(token.encode()) is None:
        unsent = form.get("unsent") == "yes"
        return page(request, "login.html", code=401, failed=True, required=True, target=target, unsent=unsent)
    response = see_other(target)
    response.set_cookie(COOKIE, token, httponly=True, samesite="strict", secure=_is_encrypted(request), path="/")
    return response


@router.post("/logout")
async def sign_out(request: Request) -> Response:
    await read_form(request)
    response = see_other("/login")
    response.delete_cookie(COOKIE, httponly=True, samesite="strict", path="/")
    return response


@router.get("/static/{name}")
async def static(request: Request, name: str) -> Response:
    found = static_answer(request, name)
    if found is None:
        raise Problem("not-found", f"there is nothing at {request.url.path}", fields={"path": request.url.path})
    return found


def _is_encrypted(request: Request) -> bool:
    """Whether the browser's own connection is encrypted: a chain of proxies names its first hop first.

    Whoever sends the header without a proxy only keeps the own cookie from plain connections.
    """
    first, _, _ = request.headers.get("x-forwarded-proto", "").partition(",")
    return request.url.scheme == "https" or first.strip().lower() == "https"
