"""Where a browser is sent: back, to the sign-in page and on from there; never to another server."""

from __future__ import annotations

from urllib.parse import quote, urlsplit

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response
from starlette.types import Scope

__all__ = ["came_from", "local_path", "login_address", "login_redirect"]

_FORMS = ("/activate", "/replan", "/verify")
"""Ends of the addresses that only forms are sent to; without it they are those of the pages with the forms."""


def local_path(target: str) -> str:
    """`target` if it is a path of this server, else the overview: nobody is sent elsewhere by a link or a sign-in."""
    try:
        parts = urlsplit(target) if target.isprintable() else None
    except ValueError:
        return "/"
    if parts is None or parts.scheme or parts.netloc or "\\" in target:
        return "/"
    return target if target.startswith("/") and not target.startswith("//") else "/"


def came_from(scope: Scope) -> str | None:
    """The page of this server that led to a call, as a path that can be opened; None where it was none of ours."""
    headers = Headers(scope=scope)
    try:
        parts = urlsplit(headers.get("referer", ""))
    except ValueError:
        return None
    if parts.netloc.lower() != headers.get("host", "").lower():
        return None
    return _page(parts.path, parts.query)


def login_address(scope: Scope) -> str:
    """The sign-in page that leads on to what was asked for; where that was a form, to the page with the form."""
    if scope["method"] in ("GET", "HEAD"):
        return f"/login?next={_quoted(_page(scope['path'], scope.get('query_string', b'').decode('latin-1')))}"
    return f"/login?next={_quoted(came_from(scope) or _page(scope['path'], ''))}&unsent=yes"


def login_redirect(scope: Scope) -> Response | None:
    """Where a person without credentials is sent: the sign-in page; None for a caller that is no browser."""
    if "text/html" not in Headers(scope=scope).get("accept", ""):
        return None
    return RedirectResponse(login_address(scope), 303, headers={"Cache-Control": "no-store"})


def _page(path: str, query: str) -> str:
    for end in _FORMS:
        path = path.removesuffix(end)
    return local_path(path + (f"?{query}" if query else ""))


def _quoted(target: str) -> str:
    return quote(target, safe="")
