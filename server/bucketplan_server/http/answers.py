"""Turning results and problems into responses, in the encoding that the caller wants."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response

from bucketplan_core.plan import Plan
from bucketplan_core.wire import WireValue, pack, to_json
from bucketplan_server.beside import DECODED_BYTES, beside
from bucketplan_server.http.negotiation import JSON_TYPE, MSGPACK_TYPE, Encoding, accepts_gzip, names_tag, preferred
from bucketplan_server.memory import Prepared, Served, plan_headers
from bucketplan_server.problems import Problem

__all__ = ["answer", "large_answer", "listed", "plan_answer", "problem_answer", "wanted_encoding"]


def listed(request: Request, name: str) -> str | None:
    """The value of a header that is a list, of all its lines (RFC 9110, section 5.3); None without any."""
    lines = request.headers.getlist(name)
    return ", ".join(lines) if lines else None


def wanted_encoding(request: Request, *, default: Encoding = "json") -> Encoding:
    """The encoding that the caller wants; raises ``not-acceptable``."""
    accept = listed(request, "accept")
    encoding = preferred(accept, default=default)
    if encoding is None:
        raise Problem(
            "not-acceptable",
            f"Accept is {accept!r}; this server answers {MSGPACK_TYPE} and {JSON_TYPE}",
            fields={"path": "Accept", "value": accept, "supported": [MSGPACK_TYPE, JSON_TYPE]},
        )
    return encoding


def answer(
    tree: Mapping[str, WireValue],
    encoding: Encoding,
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """`tree` as canonical MessagePack, or as JSON for people."""
    body, media_type = (pack(tree), MSGPACK_TYPE) if encoding == "msgpack" else (to_json(tree, indent=1), JSON_TYPE)
    return Response(body, status_code=status, headers=dict(headers or {}), media_type=media_type)


async def large_answer(
    make: Callable[[], Mapping[str, WireValue]],
    encoding: Encoding,
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """`answer` of what `make` returns, both in a thread: for trees that grow with a plan, a fleet or a list."""
    return await beside(True, lambda: answer(make(), encoding, status=status, headers=headers))


async def plan_answer(request: Request, served: Served, encoding: Encoding, *, status: int = 200) -> Response:
    """One plan as stored bytes or as a readable tree; 304 for a caller that has it, with the tag of what it has."""
    packed = served.gzipped if accepts_gzip(listed(request, "accept-encoding")) else None
    if request.method in ("GET", "HEAD") and names_tag(request.headers.getlist("if-none-match"), served.row.digest):
        is_weak = encoding == "json" or packed is not None
        return _raw(served.not_modified_weak if is_weak else served.not_modified)
    if encoding == "json":
        body = await beside(len(served.row.plan) > DECODED_BYTES, _readable_plan, served.row.plan)
        response = Response(body, status_code=status, media_type=JSON_TYPE)
        response.raw_headers.extend(plan_headers(served.row, weak=True))
        return response
    return _raw(packed or served.plain, status)


def _readable_plan(encoded: bytes) -> bytes:
    return to_json(Plan.decode(encoded).to_people(), indent=1)


def problem_answer(problem: Problem, accept: str | None, *, content_type: str | None = None) -> Response:
    """The one shape of every error, in the encoding that the caller wants, or that it sent where it does not say."""
    sent: Encoding = "msgpack" if content_type is not None and "msgpack" in content_type else "json"
    encoding = preferred(accept, default=sent) or "json"
    body = pack(problem.to_wire()) if encoding == "msgpack" else to_json(problem.to_wire(), indent=1)
    return Response(
        body,
        status_code=problem.status,
        headers={**problem.headers, "Cache-Control": "no-store"},
        media_type=f"application/problem+{encoding}",
    )


def _raw(prepared: Prepared, status: int | None = None) -> Response:
    response = Response(prepared.body, status_code=prepared.status if status is None else status)
    # The headers were built with the body; Response would add a length of its own.
    response.raw_headers = list(prepared.headers)
    return response
