"""What the routes of pages share: problems as pages, forms read within bounds, posts from our own pages only."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qsl

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BeforeValidator
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from bucketplan_core.fields import has_controls, is_digest
from bucketplan_server.access.authenticate import refusal_reason
from bucketplan_server.access.dependency import principal_of
from bucketplan_server.http.bodies import read_body
from bucketplan_server.http.parameters import Signature
from bucketplan_server.http.state import AppState
from bucketplan_server.http.waiting import while_connected
from bucketplan_server.pages.problem import problem_page
from bucketplan_server.pages.render import PAGE_HEADERS
from bucketplan_server.problems import Problem
from bucketplan_server.store.engine import StoreError

__all__ = [
    "MAX_REASON_CHARACTERS",
    "AnySignature",
    "PageRoute",
    "Refusal",
    "number_field",
    "numbered_page",
    "one_of",
    "one_page",
    "page_number",
    "read_form",
    "see_other",
    "text_field",
    "typed_signature",
    "whole_number",
    "whole_signature",
]

_T = TypeVar("_T")
AnySignature = Annotated[str, BeforeValidator(str.lower), Signature]
"""A signature in the address of a page, capitals too."""
_MAX_FORM_BYTES = 64 * 1024
_MAX_FIELDS = 64
MAX_REASON_CHARACTERS = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A form of a page that was not taken: which one, what was typed into it, and why it was refused."""

    action: str
    problem: Problem
    typed: Mapping[str, str]

    @property
    def field(self) -> str:
        """The name of the field at fault, as in the form; of none where it is the whole that was refused."""
        return str(self.problem.fields.get("path", "")).rpartition(".")[2]


class PageRoute(APIRoute):
    """A route whose problems are answered as pages; the application sends who must sign in to do so."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        inner = super().get_route_handler()

        async def handler(request: Request) -> Response:
            try:
                if request.method != "GET":
                    return await inner(request)
                return await while_connected(request, inner(request))
            except Problem as problem:
                if problem.slug in ("unauthorized", "forbidden"):
                    # The application logs and counts refusals, and sends who has no token to the sign-in page.
                    if problem.status == 401:
                        raise
                    state = request.app.state.parts
                    token = principal_of(request).name
                    state.access.refused(request.scope, refusal_reason(problem), problem, token=token)
                return problem_page(request, problem)
            except RequestValidationError as error:
                first = error.errors()[0]
                name = str(first["loc"][-1])
                detail = f"{name}: {first['msg']} (got {str(first.get('input'))[:200]!r})"
                # What cannot be the name of a page leads nowhere, like a name that nothing has.
                slug = "not-found" if first["loc"][0] == "path" else "invalid-parameter"
                return problem_page(request, Problem(slug, detail, fields={"path": name}))
            except HTTPException as error:
                if error.status_code < 400:
                    raise
                return problem_page(request, Problem("invalid-body", str(error.detail), status=error.status_code))

        return handler


def see_other(location: str) -> Response:
    """303: the next page after a post."""
    return RedirectResponse(location, status_code=303, headers=dict(PAGE_HEADERS))


async def read_form(request: Request) -> Mapping[str, str]:
    """The fields of a form that was posted; raises `Problem`. Posts from other sites were refused by the front."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/x-www-form-urlencoded":
        raise Problem("unsupported-media-type", f"Content-Type is {media_type!r}; a form of these pages is expected")
    body = await read_body(request, most=_MAX_FORM_BYTES)
    try:
        pairs = parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=_MAX_FIELDS, errors="strict")
    except ValueError as error:
        raise Problem("invalid-body", f"the form cannot be read: {error}") from None
    return dict(pairs)


def text_field(
    form: Mapping[str, str], name: str, *, required: str | None = None, limit: int = 200, lines: bool = False
) -> str:
    """A field without blanks around it; `required` is what to tell whoever left it empty.

    It must pass `has_controls`; with `lines` it may have several lines and tabs. Raises `Problem`.
    """
    value = form.get(name, "").strip()
    if not value and required is not None:
        raise Problem("invalid-body", f"{name}: {required}", fields={"path": name})
    if has_controls(value, lines=lines):
        raise Problem("invalid-body", f"{name}: must hold no control characters", fields={"path": name})
    if len(value) > limit:
        raise Problem(
            "invalid-body", f"{name}: {len(value)} characters, at most {limit} are taken", fields={"path": name}
        )
    return value


def number_field(form: Mapping[str, str], name: str, *, low: int = 0, high: int = 2**63 - 1) -> int | None:
    """The number in a field of a form, None where it is empty; raises `Problem`."""
    return whole_number(form.get(name, ""), name, low=low, high=high, slug="invalid-body")


async def one_page(state: AppState, load: Awaitable[Sequence[_T]], size: int) -> tuple[Sequence[_T], _T | None]:
    """At most `size` of the rows that `load` reads (one more than that), and the last of them if more follow."""
    try:
        rows = await load
    except StoreError as error:
        raise state.plans.store_unavailable(error) from None
    shown = rows[:size]
    return shown, shown[-1] if len(rows) > size else None


def numbered_page(request: Request, rows: Sequence[_T], size: int, *, name: str) -> tuple[Sequence[_T], int, int]:
    """The rows of the page that parameter `name` asks for, its number, and how many pages there are.

    Beyond the last page it is the last one.
    """
    num_pages = max(1, -(-len(rows) // size))
    number = min(page_number(request, name), num_pages)
    return rows[(number - 1) * size : number * size], number, num_pages


def page_number(request: Request, name: str) -> int:
    """The number of the page that parameter `name` asks for, the first where it is not given; raises `Problem`."""
    return whole_number(request.query_params.get(name, ""), name, low=1, high=100_000) or 1


def typed_signature(request: Request, name: str) -> str:
    """What was typed as a signature or its beginning, in lower case: programs and people also write capitals."""
    return request.query_params.get(name, "").strip().lower()


def one_of(value: str, name: str, allowed: Sequence[str], *, slug: str = "invalid-parameter") -> str:
    """The choice that a field holds, or nothing; raises `Problem` for a choice that there is not."""
    if value and value not in allowed:
        detail = f"{name}: {value[:80]!r} must be one of {', '.join(allowed)}"
        raise Problem(slug, detail, fields={"path": name})
    return value


def whole_signature(value: str, name: str) -> str:
    """The signature that a field holds; raises `Problem` for anything else."""
    if not is_digest(value):
        detail = f"{name}: {value[:80]!r} must be a whole signature, 64 lower-case hex characters"
        raise Problem("invalid-parameter", detail, fields={"path": name})
    return value


def whole_number(
    value: str, name: str, *, low: int = 0, high: int = 2**63 - 1, slug: str = "invalid-parameter"
) -> int | None:
    """The number that a parameter holds, None where it is empty; raises `Problem`."""
    text = value.strip().replace("_", "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and low <= int(text) <= high):
        raise Problem(
            slug,
            f"{name}: {value[:80]!r} must be a whole number from {low} to {high}",
            fields={"path": name, "value": value[:80]},
        )
    return int(text)
