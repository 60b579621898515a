"""Errors as pages, for whoever looks at this server in a browser: what happened, what to do, and the way back."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from bucketplan_server.access.authenticate import PUBLIC_PATHS
from bucketplan_server.http.answers import problem_answer
from bucketplan_server.pages.places import came_from, login_address
from bucketplan_server.pages.render import page
from bucketplan_server.problems import Problem

__all__ = ["problem_page", "refusal"]

_API_PATHS = PUBLIC_PATHS - {"/login", "/favicon.ico"}
_ADVICE: Mapping[int, str] = {
    400: "Go back, correct what is named above, and send it again.",
    401: "Sign in with a valid token.",
    403: "Use this server's own pages, with a token that may do this.",
    404: "Check the address, or look for it in the lists of plans and jobs.",
    405: "This address is not one to open; go back and use the form or the link of the page.",
    409: "Somebody was faster, or it is done already. Look at what is served now, then try again.",
    413: "Send less: forms of these pages are small.",
    415: "Use the forms of this server's own pages.",
    422: "Go back, choose other options, and try again.",
    500: "Try again; if it stays, give whoever runs this server the request id above.",
    503: "Nothing was changed by this call. Wait a little, then try again.",
}


_ADVICE_FOR: Mapping[str, str] = {"unconfirmed": "Go back and look at what is served now, before you try again."}


def refusal(scope: Scope, problem: Problem) -> Response:
    """`problem` for whoever made this call: a page for a browser outside the API, else problem details."""
    headers = Headers(scope=scope)
    path, accept = scope["path"], headers.get("accept")
    if not path.startswith("/v1/") and path not in _API_PATHS and "text/html" in (accept or ""):
        return problem_page(Request(scope), problem)
    return problem_answer(problem, accept, content_type=headers.get("content-type"))


def problem_page(request: Request, problem: Problem) -> Response:
    """`problem` as a page with its status and headers, what to do about it, and a link back."""
    back = came_from(request.scope) or "/"
    return page(
        request,
        "problem.html",
        advice=_ADVICE_FOR.get(problem.slug) or _ADVICE.get(problem.status, "Go back and try again."),
        back="/" if back.partition("?")[0] == request.url.path else back,
        code=problem.status,
        headers=problem.headers,
        login=login_address(request.scope),
        problem=problem,
    )
