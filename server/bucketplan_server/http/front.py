"""The pure-ASGI front of the application: known plans from memory, caps, request ids and the last word on errors.

A rank that asks for a known plan in MessagePack is answered here, from stored bytes, before any routing, validation or
middleware. Everything else goes on to the FastAPI application.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from urllib.parse import parse_qsl

import structlog
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from bucketplan_server.access.authenticate import Access
from bucketplan_server.access.dependency import SAFE_METHODS
from bucketplan_server.http.bodies import too_large
from bucketplan_server.http.intake import Intake
from bucketplan_server.http.negotiation import MSGPACK_TYPE
from bucketplan_server.http.protocol import write_stored
from bucketplan_server.memory import EpochMemory, PlanMemory, Prepared, fixed_key
from bucketplan_server.metrics import Metrics
from bucketplan_server.pages.places import login_redirect
from bucketplan_server.pages.problem import refusal
from bucketplan_server.problems import Problem
from bucketplan_server.store.plans import Damaged

__all__ = ["TRUSTED_PROXIES", "Front"]

TRUSTED_PROXIES = "127.0.0.1,::1"
"""Proxies on this host, as uvicorn trusts them unless told otherwise."""
_PREFIX = "/v1/plans/"
_PLAN_PATH_CHARACTERS = len(_PREFIX) + 64
_MSGPACK = MSGPACK_TYPE.encode()
_SINGLE = frozenset((b"authorization", b"bucketplan-epoch", b"host"))
_SINGLE_OF_BODIES = _SINGLE | {b"content-encoding", b"content-length", b"content-type"}
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,64}\Z")


class Front:
    """An ASGI application around another one.

    What a proxy of `trusted_proxies` says of its caller (`X-Forwarded-For`, `X-Forwarded-Proto`) is read for everything
    but known plans, whose answers depend on neither.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        access: Access,
        memory: PlanMemory,
        epochs: EpochMemory,
        metrics: Metrics,
        intake: Intake,
        max_body_bytes: int,
        trusted_proxies: str = TRUSTED_PROXIES,
    ) -> None:
        self._app = app
        self._behind_proxies = ProxyHeadersMiddleware(
            self._guarded,  # type: ignore[arg-type]  # uvicorn types the keys of ASGI's maps one by one, starlette does not
            trusted_proxies,
        )
        self._access = access
        self._tokens = access.table
        self._memory = memory
        self._epochs = epochs
        self._tallies = metrics.tallies
        self._statuses = metrics.statuses
        self._intake = intake
        self._max_body_bytes = max_body_bytes
        self._log = structlog.get_logger("bucketplan_server")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "GET":
            known = self._known_plan(scope)
            if known is not None:
                prepared, request_id = known
                self._tallies["bucketplan_plan_hits_total", "memory"] += 1
                self._statuses[prepared.status] += 1
                lines = prepared.lines
                if request_id is not None:
                    lines += b"x-request-id: %b\r\n" % request_id
                if not write_stored(scope, prepared.status, lines, prepared.body):
                    headers = list(prepared.headers)
                    if request_id is not None:
                        headers.append((b"x-request-id", request_id))
                    await send({"type": "http.response.start", "status": prepared.status, "headers": headers})
                    await send({"type": "http.response.body", "body": prepared.body})
                return
        await self._behind_proxies(scope, receive, send)  # type: ignore[arg-type]  # the same difference of types

    def _known_plan(self, scope: Scope) -> tuple[Prepared, bytes | None] | None:
        """The stored answer and the request id to repeat, or None where anything is not the plain case."""
        path = scope["path"]
        if len(path) != _PLAN_PATH_CHARACTERS or not path.startswith(_PREFIX):
            return None
        wants_msgpack = False
        gzip: bool | None = None
        known = b""
        epoch_id: bytes | None = None
        authorization: bytes | None = None
        host: bytes | None = None
        request_id: bytes | None = None
        namespace: str | None = None
        for name, value in scope["headers"]:
            if name == b"accept":
                if value != _MSGPACK:
                    return None
                wants_msgpack = True
            elif name == b"accept-encoding":
                if gzip is not None or b"q=" in value:
                    return None
                gzip = b"gzip" in value
            elif name == b"if-none-match":
                known = known + b", " + value if known else value
            elif name == b"bucketplan-epoch":
                if epoch_id is not None:
                    return None
                epoch_id = value
            elif name == b"authorization":
                if authorization is not None:
                    return None
                authorization = value
            elif name == b"host":
                if host is not None:
                    return None
                host = value
            elif name == b"x-request-id":
                if request_id is not None or _REQUEST_ID.match(value) is None:
                    return None
                request_id = value
        if not wants_msgpack:
            return None
        # Every valid token may read plans.
        if self._tokens.required:
            if authorization is None or not self._tokens.admits(authorization):
                return None
            namespace = self._tokens.namespace_admitted(authorization)
        elif self._access.refuses_host(host):
            return None
        signature = path[len(_PREFIX) :]
        entry = self._memory.get(signature)
        if entry is None:
            return None
        served = entry.active
        if epoch_id is not None:
            epoch = self._epochs.get(epoch_id.decode("latin-1"), namespace)
            if epoch is None:
                return None
            served = entry.first
            digest = epoch.digest_for(signature)
            if digest is not None:
                fixed = self._memory.get(fixed_key(signature, digest))
                if fixed is None:
                    return None
                served = fixed.active
        if isinstance(served, Damaged):
            return None
        is_known = known and (served.etag in known or known == b"*")
        if gzip and served.gzipped is not None:
            return (served.not_modified_weak if is_known else served.gzipped), request_id
        return (served.not_modified if is_known else served.plain), request_id

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if _REQUEST_ID.match(given) else secrets.token_hex(8).encode()
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._statuses[message["status"]] += 1
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id.decode()):
            try:
                declared = headers.get(b"content-length", b"0")
                # The server before us has refused lengths that are no numbers.
                if int(declared) > self._max_body_bytes:
                    raise too_large(self._max_body_bytes)
                _refuse_nul(scope)
                if scope["method"] == "HEAD":
                    # Load balancers probe with HEAD; the protocol server drops the body of the answer.
                    scope = {**scope, "method": "GET"}
                _refuse_repeated(scope)
                scope.setdefault("state", {})["principal"] = self._access.authenticate(scope, headers)
                await self._app(scope, receive, send_with_id)
            except ClientDisconnect:
                return
            except (Exception, asyncio.CancelledError) as error:
                problem = self._problem_of(error, scope, request_id)
                if started:
                    raise
                redirect = login_redirect(scope) if problem.status == 401 else None
                response = redirect or refusal(scope, problem)
                await response(scope, receive, send_with_id)
            finally:
                self._intake.release(scope)

    def _problem_of(self, error: BaseException, scope: Scope, request_id: bytes) -> Problem:
        if isinstance(error, Problem):
            return error
        if isinstance(error, asyncio.CancelledError):
            # The protocol server cancels the calls that are left when its time to stop is up, and only those.
            return Problem(
                "busy",
                "the server has stopped before this call was done; repeat it, another replica may answer",
                headers={"Retry-After": "1", "Connection": "close"},
            )
        return self._unexpected(error, scope, request_id)

    def _unexpected(self, error: BaseException, scope: Scope, request_id: bytes) -> Problem:
        self._log.error("request.failed", method=scope["method"], path=scope["path"], exc_info=error)
        return Problem(
            "internal",
            f"the server failed; its log says why under request id {request_id.decode()}",
            fields={"request_id": request_id.decode()},
        )


def _refuse_nul(scope: Scope) -> None:
    """Raises `Problem` for U+0000 in the address: no name has it, and PostgreSQL takes no text with it."""
    where = "path" if "\0" in scope["path"] else None
    if b"%00" in scope.get("query_string", b""):
        pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        where = next((name for name, value in pairs if "\0" in value), "query")
    if where is not None:
        raise Problem("invalid-parameter", f"{where}: must not hold U+0000 (%00)", fields={"path": where})


def _refuse_repeated(scope: Scope) -> None:
    """Raises `Problem` for two headers of a kind that has one value: parts of a deployment might believe one, parts the
    other."""
    single = _SINGLE if scope["method"] in SAFE_METHODS else _SINGLE_OF_BODIES
    names = [name for name, _ in scope["headers"] if name in single]
    for name in set(names) if len(names) > len(set(names)) else ():
        if names.count(name) > 1:
            shown = name.decode().title()
            raise Problem("invalid-parameter", f"{shown}: the call has several, send one", fields={"path": shown})
