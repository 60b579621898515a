"""Test helpers for those who embed the client: a planning server in memory, with or without a socket.

    server = InMemoryPlanServer()
    with server.client() as client:          # no socket at all
        plan = client.plan(request)
    with server.listening() as address:      # the same behind HTTP on loopback
        PlanClient(address)

It plans with `bucketplan_core.make_plan`, so its plans are those of a real server. It answers the calls of ranks as one
does, with its problems, in MessagePack alone. It keeps nothing on disk and checks no tokens: it is no server to train
with.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from bucketplan_client.answers import content_digest
from bucketplan_client.lean_httpx import httpx
from bucketplan_client.transport import PlanClient
from bucketplan_core.attempt import MAX_RANK, AttemptRequest, RankReport
from bucketplan_core.collectives import Options
from bucketplan_core.epoch import Epoch, complete_options
from bucketplan_core.errors import (
    BucketplanError,
    DecodeError,
    PlannerUnavailable,
    PlanningError,
    SchemaVersionError,
    SignatureMismatch,
)
from bucketplan_core.fields import Fields, is_digest
from bucketplan_core.plan import Plan
from bucketplan_core.planners import PLANNERS, find_planner
from bucketplan_core.planning import make_plan
from bucketplan_core.presets import GroupShape, MeasuredProfile, resolve_measured
from bucketplan_core.profile import CostProfile
from bucketplan_core.request import CAPTURE_VERSION, SCHEMA_VERSION, Request
from bucketplan_core.wire import WireValue, digest_of, pack, to_json, unpack

__all__ = ["InMemoryPlanServer", "MemoryAnswer"]

_MSGPACK = "application/msgpack"
_MOST_REPORTS = 20_000
_MOST_DOCUMENT_BYTES = 2**20
_MOST_PLAN_BYTES = 32 * 2**20
_PROBLEMS: Mapping[str, tuple[int, str]] = {
    "invalid-body": (400, "The body is not what this call takes"),
    "invalid-parameter": (400, "A parameter of the address or a header is not valid"),
    "not-found": (404, "There is nothing at this address"),
    "unknown-signature": (404, "No plan is stored for this signature"),
    "unknown-epoch": (404, "No such epoch is stored"),
    "unknown-attempt": (404, "No such attempt of this job was opened"),
    "unknown-profile": (404, "No hardware profile of this name is stored"),
    "method-not-allowed": (405, "The address does not take this method"),
    "not-acceptable": (406, "None of the accepted media types can be answered"),
    "conflict": (409, "The call contradicts what is stored"),
    "body-too-large": (413, "The body is larger than this server takes"),
    "unsupported-media-type": (415, "The body's media type or encoding is not taken"),
    "signature-mismatch": (422, "The content does not hash to the name it was sent under"),
    "schema-version": (422, "The document's schema version is not one that this server reads"),
    "unknown-planner": (422, "This server does not hold the planner version"),
    "cannot-plan": (422, "The request cannot be planned as its options ask"),
}
"""Status and title of each problem, as a real server has them."""
_JOB = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9._-]{0,99}~)?[A-Za-z0-9][A-Za-z0-9._:-]{0,199}")
_PARAMETERS: Mapping[str, Callable[[str], bool]] = {
    "attempt": lambda text: text.isdecimal() and len(text) <= 10 and 1 <= int(text) <= MAX_RANK,
    "epoch": is_digest,
    "job": lambda text: _JOB.fullmatch(text) is not None,
    "signature": is_digest,
}


@dataclass(frozen=True, slots=True)
class MemoryAnswer:
    """What the server answers: status, headers, body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class _Refused(Exception):
    """A call that is answered with the problem `slug`."""

    def __init__(self, slug: str, detail: str, *, headers: Mapping[str, str] | None = None, **extra: WireValue) -> None:
        self.slug = slug
        self.detail = detail
        self.headers = dict(headers or {})
        self.extra = extra
        super().__init__(detail)


@dataclass(frozen=True, slots=True)
class _Call:
    """One call: parameters of its address, headers by lower-case name, body."""

    named: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class _Opened:
    """An attempt: the body that opened it, without its held epoch, and the epoch that it has."""

    request: AttemptRequest
    epoch: Epoch


@dataclass(kw_only=True)
class InMemoryPlanServer:
    """A planning server in memory; threads may share it.

    `calls` lists what it was asked as ``"GET /v1/plans/..."``, `num_plannings` counts plans that it made. `available`
    set to False makes it refuse connections. `num_busy` answers of 202 come before each new plan. `activate` overrides
    a plan for later attempts of a job; `reports` are those of ranks, each once; `measured` are the hardware profiles
    that attempts may name.
    """

    available: bool = True
    num_busy: int = 0
    num_plannings: int = 0
    calls: list[str] = field(default_factory=list)
    plans: dict[str, Plan] = field(default_factory=dict)
    profiles: dict[str, bytes] = field(default_factory=dict)
    measured: dict[str, MeasuredProfile] = field(default_factory=dict)
    overrides: dict[str, dict[str, Plan]] = field(default_factory=dict)
    reports: list[RankReport] = field(default_factory=list)
    defaults: Options = field(default_factory=lambda: Options(strategy="size", planner="size/1"))
    _attempts: dict[str, list[_Opened]] = field(default_factory=dict)
    _reported: dict[tuple[str, str, int, str, int], RankReport] = field(default_factory=dict)
    _epochs: dict[str, Epoch] = field(default_factory=dict)
    _overriding: dict[str, Plan] = field(default_factory=dict)
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
            try:
                handle, named = _route(method, urlsplit(path).path)
                lowered = {name.lower(): value for name, value in headers.items()}
                if not _takes_msgpack(lowered.get("accept", "*/*")):
                    said = f"Accept is {lowered['accept']!r}; this server answers {_MSGPACK}"
                    raise _Refused("not-acceptable", said, path="Accept")
                return handle(self, _Call(named, lowered, body))
            except _Refused as refused:
                return _problem(refused)
            except BucketplanError as error:
                return _problem(_refusal_of(error))

    def _open(self, call: _Call) -> MemoryAnswer:
        job = call.named["job"]
        request = AttemptRequest.read(_document(call))
        held, bare = request.held_epoch, job.rpartition("~")[2]
        if held is not None and held.job != bare:
            said = f"the held epoch is that of job {held.job!r}, not of {bare!r}"
            raise _Refused("conflict", said, path="body.held_epoch.job")
        asked = replace(request, held_epoch=None)
        attempts = self._attempts.setdefault(job, [])
        number = next((number for number, opened in enumerate(attempts, 1) if opened.request.key == request.key), 0)
        status = 200 if number else 201
        if not number:
            attempts.append(_Opened(asked, self._make_epoch(job, bare, request)))
            number = len(attempts)
        opened = attempts[number - 1]
        if opened.request != asked:
            said = f"body.key: attempt {number} was opened under this key with another body"
            raise _Refused("conflict", said, path="body.key")
        if held is not None and held.id != opened.epoch.id:
            said = f"body.held_epoch: attempt {number} was opened under epoch {opened.epoch.id}"
            raise _Refused("conflict", said, path="body.held_epoch")
        tree: dict[str, WireValue] = {
            "attempt": number,
            "epoch": opened.epoch.to_wire(),
            "epoch_id": opened.epoch.id,
            "overrides": [
                {
                    "digest": override.digest,
                    "plan": self._overriding[override.digest].encoded,
                    "signature": override.signature,
                }
                for override in opened.epoch.overrides
                if override.digest in self._overriding
            ],
        }
        return _answer(tree, status=status)

    def _make_epoch(self, job: str, bare: str, request: AttemptRequest) -> Epoch:
        options = complete_options(self._with_figures(request), self.defaults, path="body.options")
        find_planner(options.planner)
        overrides = self.overrides.get(job, {})
        self._overriding.update((plan.digest, plan) for plan in overrides.values())
        epoch = request.held_epoch or Epoch.build(
            job=bare,
            options=options,
            topology=request.topology,
            overrides={signature: plan.digest for signature, plan in overrides.items()},
        )
        self._epochs[epoch.id] = epoch
        return epoch

    def _with_figures(self, request: AttemptRequest) -> Mapping[str, WireValue]:
        """The leader's options with the figures of the profiles in `measured` that they name."""
        named = request.options.get("hardware")
        if not isinstance(named, str | list):
            return request.options
        names = [named] if isinstance(named, str) else named
        for name in names:
            if not isinstance(name, str) or name not in self.measured:
                said = f"body.options.hardware names {name!r}, which is not stored"
                raise _Refused("unknown-profile", said, path="body.options.hardware")
        sizes = {role: max(map(len, groups), default=1) for role, groups in request.participants.items()}
        shapes = {role: GroupShape(size, request.topology.get(role, 1)) for role, size in sizes.items()}
        figures = resolve_measured([self.measured[str(name)] for name in names], shapes)
        return {**request.options, "hardware": figures.to_wire()}

    def _report(self, call: _Call) -> MemoryAnswer:
        job, attempt = call.named["job"], call.named["attempt"]
        fields = _document(call)
        listed = fields.array("reports", limit=_MOST_REPORTS)
        fields.finish()
        reports = [RankReport.read(Fields(value, f"body.reports[{i}]")) for i, value in enumerate(listed)]
        attempts = self._attempts.get(job, [])
        if int(attempt) > len(attempts):
            raise _Refused("unknown-attempt", f"job {job!r} has no attempt {attempt}")
        groups = attempts[int(attempt) - 1].request.participants.values()
        expected = {rank for listed_groups in groups for group in listed_groups for rank in group}
        for index, report in enumerate(reports):
            if expected and report.rank not in expected:
                said = f"rank {report.rank} is none of the {len(expected)} participants of attempt {attempt}"
                raise _Refused("conflict", said, path=f"body.reports[{index}].rank")
        first_odd: int | None = None
        for index, report in enumerate(reports):
            known = self._reported.setdefault((job, attempt, report.rank, report.slot, report.ordinal), report)
            if known is report:
                self.reports.append(report)
            elif known != report and first_odd is None:
                first_odd = index
        if first_odd is not None:
            said = f"body.reports[{first_odd}]: it was reported differently before; the first report stays"
            raise _Refused("conflict", said, path=f"body.reports[{first_odd}]")
        return _answer({"reports": len(reports)})

    def _get_epoch(self, call: _Call) -> MemoryAnswer:
        epoch = self._epochs.get(call.named["epoch"])
        if epoch is None:
            raise _Refused("unknown-epoch", f"no attempt was opened under epoch {call.named['epoch']}")
        headers = {"ETag": f'"{epoch.id}"', "Vary": "Accept", "Cache-Control": "max-age=31536000, immutable"}
        return _answer(epoch.to_wire(), headers=headers)

    def _get_plan(self, call: _Call) -> MemoryAnswer:
        signature = call.named["signature"]
        plan = self._under(signature, self.plans.get(signature), call)
        if plan is None:
            raise _Refused("unknown-signature", f"no plan of {signature}", signature=signature)
        tags = call.headers.get("if-none-match", "")
        answer = self._plan_answer(200, plan)
        if tags.strip() == "*" or answer.headers["ETag"] in tags:
            kept = {name: value for name, value in answer.headers.items() if name != "Content-Type"}
            return MemoryAnswer(HTTPStatus.NOT_MODIFIED, kept, b"")
        return answer

    def _post_plan(self, call: _Call) -> MemoryAnswer:
        signature, encoded, profile_bytes = _read_post(call)
        known = self.plans.get(signature)
        if known is None:
            request = Request.decode(encoded)
            profile = None if profile_bytes is None else CostProfile.decode(profile_bytes, request)
            left = self._busy_left.setdefault(signature, self.num_busy)
            if left:
                self._busy_left[signature] = left - 1
                headers = {"Retry-After": "0", "Cache-Control": "no-store"}
                return _answer({"signature": signature, "state": "planning"}, status=202, headers=headers)
            self.plans[signature] = make_plan(request, profile)
            self.num_plannings += 1
            if profile is not None:
                self.profiles[signature] = profile.encoded
        plan = self._under(signature, self.plans[signature], call)
        assert plan is not None, "it was planned above"
        return self._plan_answer(201 if known is None else 200, plan)

    def _under(self, signature: str, plan: Plan | None, call: _Call) -> Plan | None:
        """`plan`, or what the epoch that the call names fixed in its place when it was opened."""
        named = call.headers.get("bucketplan-epoch")
        if named is None:
            return plan
        if not is_digest(named):
            raise _Refused("invalid-parameter", "Bucketplan-Epoch must be an epoch id", path="Bucketplan-Epoch")
        epoch = self._epochs.get(named)
        if epoch is None:
            if plan is None:
                return None
            raise _Refused("unknown-epoch", f"no attempt was opened under epoch {named}")
        digest = epoch.digest_for(signature)
        return plan if digest is None else self._overriding.get(digest, plan)

    def _plan_answer(self, status: int, plan: Plan) -> MemoryAnswer:
        own = self.plans.get(plan.decision.signature)
        headers = {
            "Content-Type": _MSGPACK,
            "ETag": f'"{plan.digest}"',
            "Cache-Control": "no-cache",
            "Vary": "Accept, Accept-Encoding, Bucketplan-Epoch",
            "Bucketplan-Revision": "1" if own is not None and own.digest == plan.digest else "2",
        }
        return MemoryAnswer(status, headers, plan.encoded)

    def _healthz(self, call: _Call) -> MemoryAnswer:
        return _health("ok")

    def _readyz(self, call: _Call) -> MemoryAnswer:
        return _health("ready")


_Handle = Callable[[InMemoryPlanServer, _Call], MemoryAnswer]
_ROUTES: tuple[tuple[str, re.Pattern[str], _Handle], ...] = tuple(
    (method, re.compile(pattern), handle)
    for method, pattern, handle in (
        ("POST", "/v1/plans", InMemoryPlanServer._post_plan),
        ("GET", "/v1/plans/(?P<signature>[^/]+)", InMemoryPlanServer._get_plan),
        ("POST", "/v1/jobs/(?P<job>[^/]+)/attempts", InMemoryPlanServer._open),
        ("POST", "/v1/jobs/(?P<job>[^/]+)/attempts/(?P<attempt>[^/]+)/reports", InMemoryPlanServer._report),
        ("GET", "/v1/epochs/(?P<epoch>[^/]+)", InMemoryPlanServer._get_epoch),
        ("GET", "/healthz", InMemoryPlanServer._healthz),
        ("GET", "/readyz", InMemoryPlanServer._readyz),
    )
)


def _route(method: str, path: str) -> tuple[_Handle, dict[str, str]]:
    """What answers `path`, and the parameters in it."""
    for taken, pattern, handle in _ROUTES:
        found = pattern.fullmatch(path)
        if found is None:
            continue
        if method != taken:
            raise _Refused("method-not-allowed", f"{path} takes {taken}, not {method}", headers={"Allow": taken})
        named = {name: unquote(value) for name, value in found.groupdict().items()}
        for name, value in named.items():
            if not _PARAMETERS[name](value):
                raise _Refused("invalid-parameter", f"path.{name} is {value[:80]!r}", path=f"path.{name}")
        return handle, named
    raise _Refused("not-found", f"there is nothing at {path}", path=path)


def _takes_msgpack(accept: str) -> bool:
    kinds = {part.partition(";")[0].strip().lower() for part in accept.split(",")}
    return bool(kinds & {"", "*/*", "application/*", _MSGPACK, "application/x-msgpack", "application/vnd.msgpack"})


def _document(call: _Call, *, most_bytes: int = _MOST_DOCUMENT_BYTES) -> Fields:
    """The body, read as a real server reads it."""
    kind = call.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != _MSGPACK:
        raise _Refused("unsupported-media-type", f"Content-Type is {kind!r}; send {_MSGPACK}", path="Content-Type")
    if len(call.body) > most_bytes:
        raise _Refused("body-too-large", f"the body is larger than {most_bytes} bytes", limit_bytes=most_bytes)
    return Fields(unpack(call.body, root="body"), "body")


def _read_post(call: _Call) -> tuple[str, bytes, bytes | None]:
    """Signature, encoded request and encoded profile of a post, which are all bytes that are not decoded yet."""
    fields = _document(call, most_bytes=_MOST_PLAN_BYTES)
    signature, encoded, profile = fields.digest("signature"), fields.raw("request"), fields.raw("profile")
    if not isinstance(encoded, bytes):
        raise DecodeError("body.request", encoded, "must be bytes: the canonical encoding of the request")
    if profile is not None and not isinstance(profile, bytes):
        raise DecodeError("body.profile", profile, "must be bytes or nil: the canonical encoding of the profile")
    fields.finish()
    if digest_of(encoded) != signature:
        raise SignatureMismatch(claimed=signature, actual=digest_of(encoded))
    return signature, encoded, profile


def _refusal_of(error: BucketplanError) -> _Refused:
    match error:
        case SchemaVersionError():
            return _Refused("schema-version", str(error), path=error.path)
        case DecodeError():
            return _Refused("invalid-body", str(error), path=error.path)
        case SignatureMismatch():
            return _Refused("signature-mismatch", str(error), claimed=error.claimed, actual=error.actual)
        case PlannerUnavailable():
            available = list(error.available)
            return _Refused("unknown-planner", str(error), planner=error.planner, available=available)
        case PlanningError():
            return _Refused("cannot-plan", str(error), path=f"options.{error.option}")
    return _Refused("invalid-body", str(error))


def _health(status: str) -> MemoryAnswer:
    from importlib.metadata import version

    tree: dict[str, WireValue] = {
        "capture": CAPTURE_VERSION,
        "planners": [planner.version for planner in PLANNERS],
        "schema": SCHEMA_VERSION,
        "status": status,
        "version": version("bucketplan"),
    }
    return _answer(tree, headers={"Cache-Control": "no-store"})


def _answer(
    tree: Mapping[str, WireValue], *, status: int = 200, headers: Mapping[str, str] | None = None
) -> MemoryAnswer:
    return MemoryAnswer(status, {"Content-Type": _MSGPACK, **(headers or {})}, pack(tree))


def _problem(refused: _Refused) -> MemoryAnswer:
    status, title = _PROBLEMS[refused.slug]
    body: dict[str, WireValue] = {
        **refused.extra,
        "type": f"urn:bucketplan:problem:{refused.slug}",
        "title": title,
        "status": status,
        "detail": refused.detail,
    }
    # Who takes no MessagePack is told so in JSON, as a real server does.
    as_json = refused.slug == "not-acceptable"
    kind, encoded = ("json", to_json(body)) if as_json else ("msgpack", pack(body))
    headers = {"Content-Type": f"application/problem+{kind}", "Cache-Control": "no-store", **refused.headers}
    return MemoryAnswer(status, headers, encoded)


def _as_sent(answer: MemoryAnswer) -> dict[str, str]:
    """The headers with the digest of the body, taken last: a test may have changed the body."""
    if not answer.body:
        return dict(answer.headers)
    return {**answer.headers, "Content-Digest": content_digest(answer.body)}


class _MemoryTransport(httpx.BaseTransport):
    def __init__(self, server: InMemoryPlanServer) -> None:
        self._server = server

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if not self._server.available:
            raise httpx.ConnectError("the in-memory server is not available", request=request)
        target = request.url.raw_path.decode("ascii")
        answer = self._server.answer(request.method, target, request.headers, request.read())
        return httpx.Response(answer.status, headers=_as_sent(answer), content=answer.body)


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    plan_server: InMemoryPlanServer


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Listener

    def _serve(self) -> None:
        if not self.server.plan_server.available:
            self.close_connection = True  # nobody answers, as near to a refused connection as a listening socket comes
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        answer = self.server.plan_server.answer(self.command, self.path, dict(self.headers), body)
        self.send_response(answer.status)
        for name, value in _as_sent(answer).items():
            self.send_header(name, value)
        if answer.status != HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    do_GET = _serve  # noqa: N815  (the base class looks for this name)
    do_POST = do_PUT = do_PATCH = do_DELETE = _serve  # noqa: N815  (the same)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (the base class names it so)
        """Say nothing: tests read what the client says."""
