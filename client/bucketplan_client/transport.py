"""`PlanClient`: how a rank talks to the planning server.

One call has one total deadline. Inside it, what may pass is tried again with full jitter (refused and reset
connections, cut and damaged bodies, 202 and 503 with `Retry-After`); what may not pass is raised at once. Every plan is
verified before it is returned: its decision hashes to its digest and names the signature that was asked for.
"""

from __future__ import annotations

import base64
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from bucketplan_client.answers import (
    Answer,
    NotOurs,
    check_content_digest,
    check_media_type,
    content_digest,
    read_document,
    read_plan,
    read_problem,
    retry_after_s,
)
from bucketplan_client.arguments import BadArgument
from bucketplan_client.bodies import ACCEPT_ENCODING, BodyRefused, read_body
from bucketplan_client.environment import split_secrets, token_from_environment
from bucketplan_client.errors import (
    FOREIGN_REMEDY,
    AccessRefused,
    BadAddress,
    BadToken,
    CorruptAnswer,
    DeadlineExceeded,
    Problem,
    ServerError,
    ServerRefused,
    ServerUnreachable,
    Where,
    located,
)
from bucketplan_client.jitter import uniform
from bucketplan_client.lean_httpx import httpx
from bucketplan_core.errors import DecodeError, SchemaVersionError, SignatureMismatch
from bucketplan_core.plan import Plan
from bucketplan_core.profile import CostProfile
from bucketplan_core.request import Request
from bucketplan_core.wire import WireValue, pack

if TYPE_CHECKING:
    import tenacity

__all__ = ["PlanClient", "schema_refused", "shared_client"]

MSGPACK = "application/msgpack"
JSON = "application/json"
DEFAULT_DEADLINE_S = 60.0
CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 10.0
PLAN_TIMEOUT_S = 40.0
"""One try to have a plan made may last longer than the 25 s that the server waits for planning, then answers 202."""
_BACKOFF_FIRST_S = 0.1
_BACKOFF_MOST_S = 5.0
_MAX_DAMAGED_REQUESTS = 3
"""Tries after which a 400 or 422 for bytes that we know to be canonical is the server's word, not the network's."""
_ONLY_AN_OPERATOR_MENDS = "store-damaged"
"""The one 503 that another try does not cure, whatever the deadline."""
_DAMAGED = ("", "body-timeout", "invalid-body", "signature-mismatch")
"""Problems, also of proxies, that speak of a body which was not as we sent it."""

_JOB_PATH = re.compile(r"/v1/jobs/([^/]+)")
_PLAN_PATH = re.compile(r"/v1/[a-z-]+/([0-9a-f]{64})(?![0-9a-f])")

T = TypeVar("T")


class _Again(Exception):
    """One try failed in a way that another may cure; `final` is what to raise when there is no time for one."""

    def __init__(
        self,
        final: Callable[[int, float], ServerError],
        *,
        retry_after_s: float = 0.0,
        by_deadline: bool = False,
    ) -> None:
        self.final = final
        self.retry_after_s = retry_after_s
        self.by_deadline = by_deadline
        super().__init__()


@dataclass(kw_only=True)
class _Call:
    """State of one call over its tries."""

    started: float
    ends: float
    num_tries: int = 0
    num_damaged: int = 0
    told: _Again | None = None
    where: Where = field(default_factory=Where)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started


class PlanClient:
    """A client of one planning server; threads may share it, and both sides of a fork.

    `address` defaults to ``BUCKETPLAN_SERVER``, `token` to ``BUCKETPLAN_TOKEN``, else to the content of the file
    that ``BUCKETPLAN_TOKEN_FILE`` names, `ca_file` to ``BUCKETPLAN_CA_FILE``. `rank` and `job` only name the caller
    in errors. `deadline_s` bounds a call, the other times one try of it. `transport` replaces the network (see
    `bucketplan_client.testing`). Raises `BadAddress`; calls raise `ServerUnreachable`, `DeadlineExceeded`,
    `ServerRefused` (`AccessRefused` for a token that does not do) and `CorruptAnswer`, `BadArgument` for a path or a
    parameter that no URL can hold, and nothing of httpx.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        token: str | None = None,
        rank: int | None = None,
        job: str | None = None,
        deadline_s: float = DEFAULT_DEADLINE_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        read_timeout_s: float = READ_TIMEOUT_S,
        plan_timeout_s: float = PLAN_TIMEOUT_S,
        ca_file: str | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        given = (address or os.environ.get("BUCKETPLAN_SERVER") or "").rstrip("/")
        self.address, userinfo = split_secrets(given)
        self.where = Where(rank=rank, job=job, server=self.address or None)
        self.deadline_s = deadline_s
        self._timeout_s = {"GET": read_timeout_s, "POST": plan_timeout_s, "PUT": plan_timeout_s}
        with located(self.where):
            _check_address(self.address)
            secret = token_from_environment() if token is None else token.strip()
            _check_token(secret)
            # What replaces the network needs no certificates.
            is_secure = transport is None and self.address.startswith("https:")
            ssl_context = _ssl_context(ca_file) if is_secure else None
        headers = {"Accept": MSGPACK, "Accept-Encoding": ACCEPT_ENCODING, "User-Agent": f"bucketplan/{_version()}"}
        if secret:
            headers["Authorization"] = f"Bearer {secret}"
        elif userinfo:
            headers["Authorization"] = f"Basic {base64.b64encode(unquote_to_bytes(userinfo)).decode('ascii')}"
        from bucketplan_client.deadline_http import DeadlineTransport

        self._transport = transport or DeadlineTransport(ssl_context=ssl_context)
        self._http = httpx.Client(
            base_url=self.address,
            headers=headers,
            timeout=httpx.Timeout(plan_timeout_s, connect=connect_timeout_s),
            transport=self._transport,
            trust_env=False,
        )

    def __enter__(self) -> PlanClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"PlanClient({self.address!r})"

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def plan(
        self,
        request: Request,
        profile: CostProfile | None = None,
        *,
        epoch: str | None = None,
        deadline_s: float | None = None,
    ) -> Plan:
        """The server's plan of `request` under `epoch`, planned now if the server does not know it yet.

        A known plan costs one small GET. `profile` is bound to the signature if it is the first to arrive.
        """
        ends = time.monotonic() + (self.deadline_s if deadline_s is None else deadline_s)
        known = self.known_plan(request.signature, epoch=epoch, deadline_s=_until(ends))
        return known if known is not None else self.post_plan(request, profile, epoch=epoch, deadline_s=_until(ends))

    def known_plan(self, signature: str, *, epoch: str | None = None, deadline_s: float | None = None) -> Plan | None:
        """The plan of `signature` under `epoch`, None when the server has none."""
        try:
            return self._send(
                "GET",
                f"/v1/plans/{signature}",
                headers=_epoch_header(epoch),
                read=lambda answer: read_plan(answer, signature),
                deadline_s=deadline_s,
                signature=signature,
            )
        except ServerRefused as refused:
            if refused.problem.slug in ("unknown-signature", "not-found") and refused.problem.status == 404:
                return None
            raise

    def post_plan(
        self,
        request: Request,
        profile: CostProfile | None = None,
        *,
        epoch: str | None = None,
        deadline_s: float | None = None,
    ) -> Plan:
        """Send `request` with `profile` and return its plan, however often the server asks to come back for it."""
        signature = request.signature
        body = pack(
            {
                "profile": None if profile is None else profile.encoded,
                "request": request.encoded,
                "signature": signature,
            }
        )
        return self._send(
            "POST",
            "/v1/plans",
            body=body,
            headers=_epoch_header(epoch),
            read=lambda answer: read_plan(answer, signature),
            deadline_s=deadline_s,
            signature=signature,
        )

    def get(
        self,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        deadline_s: float | None = None,
        accept: str = MSGPACK,
    ) -> Answer:
        """GET `path`; the answer's body decodes, whatever the server sent."""
        return self._send(
            "GET", path, params=params, headers={"Accept": accept}, read=read_document, deadline_s=deadline_s
        )

    def post(
        self,
        path: str,
        body: WireValue,
        *,
        deadline_s: float | None = None,
        repeatable: bool = True,
    ) -> Answer:
        """POST `body`; with `repeatable` a try whose fate is unknown is made again.

        That is right where the server takes a repetition as the same call.
        """
        return self._send(
            "POST",
            path,
            body=pack(body),
            headers={},
            read=read_document,
            deadline_s=deadline_s,
            repeatable=repeatable,
        )

    def put(self, path: str, body: WireValue, *, deadline_s: float | None = None) -> Answer:
        """PUT `body`; a try whose fate is unknown is made again, since a repetition changes nothing."""
        return self._send("PUT", path, body=pack(body), headers={}, read=read_document, deadline_s=deadline_s)

    def where_of(self, path: str) -> Where:
        """Where a call of `path` happens: the job or the signature that it names, beside what the client knows."""
        of_job, of_plan = _JOB_PATH.match(path), _PLAN_PATH.match(path)
        if of_job is not None:
            return self.where.at(job=unquote(of_job[1]))
        return self.where if of_plan is None else self.where.at(signature=of_plan[1])

    def _send(
        self,
        method: str,
        path: str,
        *,
        read: Callable[[Answer], T],
        body: bytes | None = None,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        deadline_s: float | None = None,
        signature: str | None = None,
        repeatable: bool = True,
    ) -> T:
        started = time.monotonic()
        call = _Call(
            started=started,
            ends=started + (self.deadline_s if deadline_s is None else deadline_s),
            where=self.where_of(path) if signature is None else self.where.at(signature=signature),
        )
        with located(call.where):
            _check_path(path)
            try:
                request = self._http.build_request(
                    method, path, params=params, headers=dict(headers or {}), content=body
                )
            except (httpx.InvalidURL, UnicodeError) as error:
                asked = path if not params else f"{path} with {dict(params)}"
                raise BadArgument("path", asked, f"what a URL can hold: {error}") from error
        if body is not None:
            request.headers["Content-Type"] = MSGPACK
            request.headers["Content-Digest"] = content_digest(body)

        def attempt() -> T:
            call.num_tries += 1
            try:
                return self._try(request, call, read, repeatable)
            except _Again as again:
                # A last try that our own deadline cuts short says less than the failure before it.
                if call.told is None or not again.by_deadline:
                    call.told = again
                raise

        import tenacity

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_Again),
            wait=_FullJitter(call),
            stop=_NoTimeLeft(call),
            reraise=True,
        )
        try:
            return retrying(attempt)
        except _Again as again:
            told = call.told or again
            raise told.final(call.num_tries, call.elapsed_s) from told.__cause__

    def _try(self, request: httpx.Request, call: _Call, read: Callable[[Answer], T], repeatable: bool) -> T:
        from bucketplan_client.deadline_http import deadline

        try_ends = min(call.ends, time.monotonic() + self._timeout_s[request.method])
        try:
            if self._http.is_closed:
                raise RuntimeError
            with deadline(try_ends):
                # Past httpx's redirects, cookies and authentication, of which we use none and which double its cost.
                response = self._transport.handle_request(request)
                try:
                    content = read_body(response.headers, _stream_of(response), ends=try_ends)
                finally:
                    response.close()
        except httpx.HTTPError as error:
            raise self._mapped(error, call, repeatable) from error
        except httpx.InvalidURL as error:
            raise BadAddress(self.address, str(error), where=call.where) from error
        except BodyRefused as error:
            raise _corrupt(call, str(error)) from error
        except httpx.StreamError as error:
            raise _corrupt(call, f"the body could not be read: {error}") from error
        except RuntimeError as error:
            if not self._http.is_closed:
                raise
            # Another thread closed the client, as a job that ends does while its reports are still being sent.
            raise ServerUnreachable("the client was closed", num_tries=call.num_tries, where=call.where) from error
        answer = Answer(
            status=response.status_code, content=content, headers=response.headers, num_tries=call.num_tries
        )
        if response.status_code in (200, 201):
            try:
                check_content_digest(answer)
                check_media_type(answer)
                return read(answer)
            except SchemaVersionError as error:
                raise schema_refused(error, num_tries=call.num_tries, where=call.where) from error
            except NotOurs as error:
                raise _corrupt(call, str(error), remedy=FOREIGN_REMEDY) from error
            except (DecodeError, SignatureMismatch) as error:
                raise _corrupt(call, str(error)) from error
        raise self._refusal(answer, call)

    def _mapped(self, error: httpx.HTTPError, call: _Call, repeatable: bool) -> Exception:
        """What an exception of httpx means: try again, or an error of ours."""
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if isinstance(error, httpx.UnsupportedProtocol | httpx.LocalProtocolError | httpx.TooManyRedirects):
            return BadAddress(self.address, said, where=call.where)
        not_sent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
        if isinstance(error, httpx.DecodingError):
            return _corrupt(call, f"its compression is damaged: {error}")
        unreachable = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
        final = _final(ServerUnreachable if unreachable else DeadlineExceeded, said, call.where)
        if not repeatable and not not_sent:
            return final(call.num_tries, call.elapsed_s)
        by_deadline = isinstance(error, httpx.TimeoutException) and time.monotonic() >= call.ends
        return _Again(final, by_deadline=by_deadline)

    def _refusal(self, answer: Answer, call: _Call) -> Exception:
        problem = read_problem(answer)
        status = answer.status
        if status == 202:
            return _Again(
                _final(DeadlineExceeded, "the server is still planning", call.where),
                retry_after_s=retry_after_s(answer.headers, 1.0),
            )
        if problem.slug == _ONLY_AN_OPERATOR_MENDS:
            return ServerRefused(problem, num_tries=call.num_tries, where=call.where)
        if status in (429, 502, 503, 504):
            return _Again(
                lambda num_tries, _: ServerRefused(problem, num_tries=num_tries, where=call.where),
                retry_after_s=retry_after_s(answer.headers, 0.0),
            )
        if status in (400, 408, 422) and problem.slug in _DAMAGED:
            # What we sent was canonical and hashed to its name, so it was damaged on the way. Unless that repeats.
            call.num_damaged += 1
            if call.num_damaged < _MAX_DAMAGED_REQUESTS:
                return _Again(lambda num_tries, _: ServerRefused(problem, num_tries=num_tries, where=call.where))
        if status in (401, 403):
            return AccessRefused(problem, num_tries=call.num_tries, where=call.where)
        return ServerRefused(problem, num_tries=call.num_tries, where=call.where)


_shared: dict[tuple[str, str | None], PlanClient] = {}
_shared_lock = threading.Lock()


def _renew_lock() -> None:
    # A thread of the parent may have held it.
    global _shared_lock
    _shared_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def shared_client(address: str | None = None, *, token: str | None = None) -> PlanClient:
    """The one client of this process for that server: making a client costs far more than a call through it."""
    key = (address or os.environ.get("BUCKETPLAN_SERVER") or "", token)
    with _shared_lock:
        client = _shared.get(key)
        if client is None:
            client = _shared[key] = PlanClient(key[0], token=token)
        return client


class _FullJitter:
    """Uniform between 0 and a doubling bound, on top of what `Retry-After` says, and never past the deadline."""

    def __init__(self, call: _Call) -> None:
        self._call = call
        import tenacity

        self._bound = tenacity.wait_exponential(multiplier=_BACKOFF_FIRST_S, max=_BACKOFF_MOST_S)

    def __call__(self, retry_state: tenacity.RetryCallState) -> float:
        left_s = self._call.ends - time.monotonic() - _asked_s(retry_state)
        jitter_s = uniform(0.0, self._bound(retry_state))
        return _asked_s(retry_state) + max(0.0, min(jitter_s, uniform(0.0, max(0.0, left_s))))


class _NoTimeLeft:
    def __init__(self, call: _Call) -> None:
        self._call = call

    def __call__(self, retry_state: tenacity.RetryCallState) -> bool:
        return time.monotonic() + _asked_s(retry_state) >= self._call.ends


def _asked_s(retry_state: tenacity.RetryCallState) -> float:
    error = retry_state.outcome.exception() if retry_state.outcome else None
    return error.retry_after_s if isinstance(error, _Again) else 0.0


def _final(
    kind: type[DeadlineExceeded] | type[ServerUnreachable], reason: str, where: Where
) -> Callable[[int, float], ServerError]:
    return lambda num_tries, elapsed_s: kind(reason, num_tries=num_tries, elapsed_s=elapsed_s, where=where)


def _corrupt(call: _Call, reason: str, *, remedy: str | None = None) -> _Again:
    return _Again(lambda num_tries, _: CorruptAnswer(reason, num_tries=num_tries, where=call.where, remedy=remedy))


def schema_refused(error: SchemaVersionError, *, num_tries: int, where: Where) -> ServerRefused:
    """An answer of another schema version: no network damage, so no further try and no fallback will cure it."""
    problem = Problem(
        type="urn:bucketplan:problem:schema-version",
        title="The answer's schema version is not one that this client reads",
        status=422,
        detail=str(error),
    )
    return ServerRefused(problem, num_tries=num_tries, where=where)


def _until(ends: float) -> float:
    return max(0.0, ends - time.monotonic())


def _epoch_header(epoch: str | None) -> dict[str, str]:
    return {} if epoch is None else {"Bucketplan-Epoch": epoch}


def _stream_of(response: httpx.Response) -> httpx.SyncByteStream:
    """What came, coded as it came: httpx undoes any number of codings, each without a bound."""
    assert isinstance(response.stream, httpx.SyncByteStream), "the transport is a synchronous one"
    return response.stream


def _check_address(address: str) -> None:
    if not address:
        raise BadAddress(address, "no address was given")
    try:
        url = httpx.URL(address)
        if "[" in address and "]" not in address:
            raise httpx.InvalidURL("the bracket of an IPv6 address is not closed")
        # What httpx leaves to the socket: a port outside 0 to 65535, and labels of a host that no DNS holds.
        _ = urlsplit(address).port
        url.raw_host.decode("ascii").encode("idna")
        host = url.host
    except (httpx.InvalidURL, TypeError, ValueError) as error:
        raise BadAddress(address, str(error)) from error
    if url.scheme not in ("http", "https"):
        raise BadAddress(address, "the scheme must be http or https")
    if not host:
        raise BadAddress(address, "it names no host")


def _check_path(path: str) -> None:
    for name in path.split("/"):
        if name in (".", ".."):
            raise BadArgument("the name", name, f"a name other than . and .., which URLs leave out ({path})")


def _check_token(token: str | None) -> None:
    # A header holds visible ASCII only (RFC 6750); what httpx says of anything else would quote the secret.
    if token and not all("!" <= letter <= "~" for letter in token):
        raise BadToken("it holds spaces, line breaks or letters that no token has")


def _ssl_context(ca_file: str | None) -> Any:
    import ssl

    path = ca_file or os.environ.get("BUCKETPLAN_CA_FILE") or None
    try:
        return ssl.create_default_context(cafile=path)
    except OSError as error:
        raise BadAddress(str(path), f"as BUCKETPLAN_CA_FILE it holds no certificates: {error}") from error


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("bucketplan")
    except PackageNotFoundError:
        return "unknown"
