"""Test helpers for those who embed the client: a planning server in memory, with or without a socket.

    server = InMemoryPlanServer()
    with server.client() as client:          # no socket at all
        plan = client.plan(request)
    with server.listening() as address:      # the same behind HTTP on loopback
        PlanClient(address)

It plans with `bucketplan_core.make_plan`, so its plans are those of a real server. It keeps nothing on disk and checks
no tokens: it is no server to train with.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from bucketplan_client.answers import content_digest
from bucketplan_client.lean_httpx import httpx
from bucketplan_client.transport import PlanClient
from bucketplan_core.attempt import AttemptRequest, RankReport
from bucketplan_core.collectives import Options
from bucketplan_core.epoch import Epoch, complete_options
from bucketplan_core.errors import BucketplanError, DecodeError, PlannerUnavailable, SchemaVersionError
from bucketplan_core.fields import Fields
from bucketplan_core.plan import Plan
from bucketplan_core.planning import make_plan
from bucketplan_core.profile import CostProfile
from bucketplan_core.request import Request
from bucketplan_core.wire import WireValue, digest_of, pack, unpack

__all__ = ["InMemoryPlanServer", "MemoryAnswer"]

_MSGPACK = "application/msgpack"
_PROBLEM = "application/problem+msgpack"
_ATTEMPTS = re.compile(r"/v1/jobs/(?P<job>[^/]+)/attempts")
_REPORTS = re.compile(r"/v1/jobs/[^/]+/attempts/\d+/reports")


@dataclass(frozen=True, slots=True)
class MemoryAnswer:
    """What the server answers: status, headers, body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(kw_only=True)
class InMemoryPlanServer:
    """A planning server in memory; threads may share it.

    `calls` lists what it was asked as ``"GET /v1/plans/..."``, `num_plannings` counts plans that it made. `available`
    set to False makes it refuse connections. `num_busy` answers of 202 come before each new plan. `activate` overrides
    a plan for later attempts of a job; `reports` are those of ranks.
    """

    available: bool = True
    num_busy: int = 0
    num_plannings: int = 0
    calls: list[str] = field(default_factory=list)
    plans: dict[str, Plan] = field(default_factory=dict)
    profiles: dict[str, bytes] = field(default_factory=dict)
    overrides: dict[str, dict[str, Plan]] = field(default_factory=dict)
    reports: list[RankReport] = field(default_factory=list)
    defaults: Options = field(default_factory=lambda: Options(strategy="size", planner="size/1"))
    _attempts: dict[str, list[tuple[str, Epoch]]] = field(default_factory=dict)
    _epochs: dict[str, Epoch] = field(default_factory=dict)
    _busy_left: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def client(self, **options: Any) -> PlanClient:
        """A client whose calls end in this object; `options` as for `PlanClient`."""
        return PlanClient("http://in-memory", transport=self.transport(), **options)

    def transport(self) -> httpx.BaseTransport:
        """An httpx transport that ends in this object."""
        return _MemoryTransport(self)

    @contextmanager
    def listening(self) -> Iterator[str]:
        """Serve over HTTP on a free port of loopback; gives the address."""
        httpd = _Listener(("127.0.0.1", 0), _Handler)
        httpd.plan_server = self
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{httpd.server_address[1]}"
        finally:
            httpd.shutdown()
            thread.join()
            httpd.server_close()

    def activate(self, job: str, plan: Plan) -> None:
        """Make `plan` what its signature has in attempts of `job` that open from now on."""
        with self._lock:
            self.overrides.setdefault(job, {})[plan.decision.signature] = plan

    def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> MemoryAnswer:
        """What the server says to one call."""
        with self._lock:
            self.calls.append(f"{method} {path}")
            route = urlsplit(path).path
            if route == "/v1/plans" and method == "POST":
                return self._post_plan(body)
            if route.startswith("/v1/plans/") and method == "GET":
                return self._get_plan(route.removeprefix("/v1/plans/"), _header(headers, "Bucketplan-Epoch"))
            found = _ATTEMPTS.fullmatch(route)
            if found is not None and method == "POST":
                return self._open(unquote(found["job"]), body)
            found = _REPORTS.fullmatch(route)
            if found is not None and method == "POST":
                return self._report(body)
            if route in ("/healthz", "/readyz"):
                return MemoryAnswer(200, {"Content-Type": _MSGPACK}, pack({"status": "ok"}))
            return _problem(404, "not-found", f"{method} {path} is not served here")

    def _open(self, job: str, body: bytes) -> MemoryAnswer:
        try:
            request = AttemptRequest.read(Fields(unpack(body), "attempt"))
            options = complete_options(request.options, self.defaults)
        except BucketplanError as error:
            return _problem(422, "invalid-body", str(error))
        attempts = self._attempts.setdefault(job, [])
        number = next((number for number, (key, _) in enumerate(attempts, 1) if key == request.key), None)
        overrides = self.overrides.get(job, {})
        if number is None:
            epoch = request.held_epoch or Epoch.build(
                job=job,
                options=options,
                topology=request.topology,
                overrides={signature: plan.digest for signature, plan in overrides.items()},
            )
            attempts.append((request.key, epoch))
            self._epochs[epoch.id] = epoch
            number = len(attempts)
        epoch = attempts[number - 1][1]
        tree: dict[str, WireValue] = {
            "attempt": number,
            "epoch": epoch.to_wire(),
            "epoch_id": epoch.id,
            "overrides": [
                {
                    "digest": override.digest,
                    "plan": overrides[override.signature].encoded,
                    "signature": override.signature,
                }
                for override in epoch.overrides
            ],
        }
        return MemoryAnswer(201, {"Content-Type": _MSGPACK}, pack(tree))

    def _report(self, body: bytes) -> MemoryAnswer:
        listed = Fields(unpack(body), "body").array("reports", limit=20_000)
        self.reports += [RankReport.read(Fields(value, f"body.reports[{i}]")) for i, value in enumerate(listed)]
        return MemoryAnswer(200, {"Content-Type": _MSGPACK}, pack({"reports": len(listed)}))

    def _get_plan(self, signature: str, epoch_id: str | None) -> MemoryAnswer:
        plan = self.plans.get(signature)
        epoch = self._epochs.get(epoch_id) if epoch_id is not None else None
        if epoch is not None and epoch.digest_for(signature) is not None:
            plan = self.overrides[epoch.job][signature]
        if plan is None:
            return _problem(404, "unknown-signature", f"no plan of {signature}")
        return _plan_answer(200, plan)

    def _post_plan(self, body: bytes) -> MemoryAnswer:
        try:
            request, profile = _read_post(body)
        except SchemaVersionError as error:
            return _problem(422, "schema-version", str(error), path=error.path)
        except DecodeError as error:
            return _problem(422, "invalid-body", str(error), path=error.path)
        except _WrongName as error:
            return _problem(422, "signature-mismatch", str(error))
        signature = request.signature
        known = self.plans.get(signature)
        if known is not None:
            return _plan_answer(200, known)
        left = self._busy_left.setdefault(signature, self.num_busy)
        if left:
            self._busy_left[signature] = left - 1
            return MemoryAnswer(202, {"Retry-After": "0", "Content-Type": _MSGPACK}, pack({"status": "planning"}))
        try:
            plan = make_plan(request, profile)
        except PlannerUnavailable as error:
            return _problem(422, "unknown-planner", str(error))
        except BucketplanError as error:
            return _problem(422, "cannot-plan", str(error))
        self.num_plannings += 1
        self.plans[signature] = plan
        if profile is not None:
            self.profiles[signature] = profile.encoded
        return _plan_answer(201, plan)


def _header(headers: Mapping[str, str], name: str) -> str | None:
    return next((value for key, value in headers.items() if key.lower() == name.lower()), None)


class _WrongName(Exception):
    pass


def _read_post(body: bytes) -> tuple[Request, CostProfile | None]:
    tree = unpack(body)
    if not isinstance(tree, dict) or sorted(tree) != ["profile", "request", "signature"]:
        raise DecodeError(
            "$", sorted(tree) if isinstance(tree, dict) else tree, "must hold profile, request, signature"
        )
    encoded, profile = tree["request"], tree["profile"]
    if not isinstance(encoded, bytes):
        raise DecodeError("request", encoded, "must be bytes")
    if digest_of(encoded) != tree["signature"]:
        raise _WrongName(f"the request hashes to {digest_of(encoded)}, but was sent as {tree['signature']}")
    request = Request.decode(encoded)
    if profile is None:
        return request, None
    if not isinstance(profile, bytes):
        raise DecodeError("profile", profile, "must be bytes or null")
    return request, CostProfile.decode(profile, request)


def _plan_answer(status: int, plan: Plan) -> MemoryAnswer:
    headers = {
        "Content-Type": _MSGPACK,
        "ETag": f'"{plan.digest}"',
        "Cache-Control": "no-cache",
        "Vary": "Accept, Bucketplan-Epoch",
        "Bucketplan-Revision": "1",
    }
    return MemoryAnswer(status, headers, plan.encoded)


def _problem(status: int, slug: str, detail: str, **extra: WireValue) -> MemoryAnswer:
    body: dict[str, WireValue] = {
        "type": f"urn:bucketplan:problem:{slug}",
        "title": slug.replace("-", " "),
        "status": status,
        "detail": detail,
        **extra,
    }
    return MemoryAnswer(status, {"Content-Type": _PROBLEM}, pack(body))


class _MemoryTransport(httpx.BaseTransport):
    def __init__(self, server: InMemoryPlanServer) -> None:
        self._server = server

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if not self._server.available:
            raise httpx.ConnectError("the in-memory server is not available", request=request)
        target = request.url.raw_path.decode("ascii")
        answer = self._server.answer(request.method, target, request.headers, request.read())
        return httpx.Response(answer.status, headers=dict(answer.headers), content=answer.body)


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    plan_server: InMemoryPlanServer


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Listener

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        answer = self.server.plan_server.answer(self.command, self.path, dict(self.headers), body)
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Content-Digest", content_digest(answer.body))
        self.end_headers()
        self.wfile.write(answer.body)

    do_GET = _serve  # noqa: N815  (the base class looks for this name)
    do_POST = _serve  # noqa: N815  (the same)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (the base class names it so)
        """Say nothing: tests read what the client says."""
