"""What the front asks once a call: who is this, and may it come in at all."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import lru_cache
from http.cookies import CookieError, SimpleCookie
from ipaddress import ip_address
from urllib.parse import urlsplit

import structlog
from starlette.types import Scope

from bucketplan_server.access.dependency import SAFE_METHODS, unauthorized
from bucketplan_server.access.principal import ANYONE, NOBODY, Principal
from bucketplan_server.access.tokens import TokenTable, bearer
from bucketplan_server.metrics import Metrics
from bucketplan_server.problems import Problem

__all__ = ["COOKIE", "PUBLIC_PATHS", "PUBLIC_PREFIX", "Access", "is_public", "refusal_reason"]

COOKIE = "bucketplan_token"
PUBLIC_PATHS = frozenset(("/healthz", "/readyz", "/metrics", "/openapi.json", "/login", "/favicon.ico"))
"""What probes, scrapers and people without a session call; none of it names a job, a plan or a person."""
PUBLIC_PREFIX = "/static/"


class Access:
    """Authentication of calls against a table of tokens.

    A server that needs none because it is `on_loopback` takes calls for loopback names and addresses only: a page whose
    own name its owner lets point at 127.0.0.1 (DNS rebinding) would else be one of ours to the browser.
    """

    def __init__(self, table: TokenTable, metrics: Metrics, *, on_loopback: bool = False) -> None:
        self.table = table
        self._on_loopback = on_loopback
        self._metrics = metrics
        self._log = structlog.get_logger("bucketplan_server")

    def authenticate(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Principal:
        """Who makes this call; raises `Problem` where it may not come in.

        Without a token: anyone where none is needed, nobody on public paths. A cookie counts for a change only where
        the browser says that the call comes from our own pages.
        """
        changes = scope["method"] not in SAFE_METHODS
        authorization = headers.get(b"authorization")
        if changes and authorization is None and _is_foreign(headers):
            raise self._cross_site(scope, headers)
        public = is_public(scope["path"])
        if not self.table.required:
            if not public and self.refuses_host(headers.get(b"host")):
                raise self._foreign_host(scope, headers[b"host"])
            return ANYONE
        secret, cookie = _credentials(headers)
        if secret is None:
            if public:
                return NOBODY
            raise self.refused(scope, "no-token", unauthorized("this call needs a token", presented=False))
        principal = self.table.valid(secret)
        if principal is None:
            if public:
                return NOBODY
            raise self._invalid(scope, secret)
        if cookie is not None and changes and not _is_own(headers):
            if public:
                return NOBODY
            raise self._cross_site(scope, headers)
        return principal

    def refuses_host(self, host: bytes | None) -> bool:
        """Whether a call without a token may not name this host; asked only where no token is needed."""
        return self._on_loopback and host is not None and not _is_loopback(host)

    def check_again(self, scope: Scope) -> None:
        """Raises ``unauthorized`` where the token that let a call in no longer would: after the call has waited.

        Whoever waited for a caller, its body included, asks this before it does something for that caller.
        """
        if not self.table.required or is_public(scope["path"]):
            return
        secret, _ = _credentials(dict(scope["headers"]))
        if secret is None or self.table.valid(secret) is None:
            raise unauthorized("the token was revoked or has expired while the call waited", presented=True)

    def attribution(self, caller: Principal, actor: str, reason: str) -> tuple[str, str]:
        """Who did something to a shared plan and why, as `caller` may know it: not what another namespace wrote."""
        theirs = self.table.namespace_of(actor)
        if caller.namespace is None or theirs is None or theirs == caller.namespace:
            return actor, reason
        return "another namespace", "not shown outside that namespace"

    def refused(self, scope: Scope, reason: str, problem: Problem, *, token: str | None = None) -> Problem:
        """Log and count a refusal; answers `problem`. Neither secrets nor query strings are logged."""
        self._metrics.count("bucketplan_access_refused_total", reason)
        client = scope.get("client")
        self._log.warning(
            "access.refused",
            reason=reason,
            status=problem.status,
            token=token,
            method=scope["method"],
            path=scope["path"],
            client=client[0] if client else None,
        )
        return problem

    def _invalid(self, scope: Scope, secret: bytes) -> Problem:
        known = self.table.known(secret)
        if known is None:
            problem = unauthorized("the token is not one of this server's", presented=True)
            return self.refused(scope, "unknown-token", problem)
        state = known.state(time.time_ns())
        said = f"token {known.name!r} was revoked" if state == "revoked" else f"token {known.name!r} has expired"
        return self.refused(scope, f"{state}-token", unauthorized(said, presented=True), token=known.name)

    def _foreign_host(self, scope: Scope, host: bytes) -> Problem:
        named = host.decode("latin-1")[:200]
        problem = Problem(
            "forbidden",
            f"Host is {named!r}: a server on loopback that needs no token takes calls for loopback names and addresses "
            "only. Call it as localhost; behind a proxy make a token, or set BUCKETPLAN_ALLOW_ANONYMOUS=true",
            fields={"path": "Host", "value": named},
        )
        return self.refused(scope, "host", problem)

    def _cross_site(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Problem:
        origin = headers.get(b"origin", b"").decode("latin-1")[:200]
        problem = Problem(
            "forbidden",
            f"a browser sent this change from another site ({origin or 'unknown'}); use this server's own pages, or a "
            "bearer token",
            fields={"path": "Origin", "value": origin},
        )
        return self.refused(scope, "cross-site", problem)


def refusal_reason(problem: Problem) -> str:
    """The metric's label for a refusal that a route raised."""
    if problem.status == 401:
        return "ended-token" if "invalid_token" in problem.headers.get("WWW-Authenticate", "") else "no-token"
    return "role" if "needs" in problem.fields else "namespace"


def is_public(path: str) -> bool:
    return path in PUBLIC_PATHS or path.startswith(PUBLIC_PREFIX)


def _credentials(headers: Mapping[bytes, bytes]) -> tuple[bytes | None, bytes | None]:
    """The secret that a call brings, and the same again where it is from a cookie. A header outweighs the cookie."""
    authorization = headers.get(b"authorization")
    if authorization is not None:
        return bearer(authorization), None
    cookie = _cookie(headers.get(b"cookie"))
    return cookie, cookie


def _cookie(header: bytes | None) -> bytes | None:
    if header is None or COOKIE.encode() not in header:
        return None
    try:
        morsel = SimpleCookie(header.decode("latin-1")).get(COOKIE)
    except CookieError:
        return None
    return None if morsel is None or not morsel.value else morsel.value.encode("latin-1", "replace")


def _is_own(headers: Mapping[bytes, bytes]) -> bool:
    """Whether the browser says that one of our own pages made the call (Fetch Metadata, else the Origin header)."""
    site = headers.get(b"sec-fetch-site")
    if site is not None:
        return site == b"same-origin"
    return b"origin" in headers and _host(headers[b"origin"]) == headers.get(b"host", b"").lower()


def _is_foreign(headers: Mapping[bytes, bytes]) -> bool:
    """Whether the browser says that another site's page made the call; programs say nothing."""
    site = headers.get(b"sec-fetch-site")
    if site is not None:
        return site not in (b"same-origin", b"none")
    return b"origin" in headers and _host(headers[b"origin"]) != headers.get(b"host", b"").lower()


@lru_cache(maxsize=256)
def _is_loopback(host: bytes) -> bool:
    """Whether a Host header names this machine and no other: localhost, a name under it, or a loopback address."""
    try:
        name = (urlsplit(f"//{host.decode('ascii')}").hostname or "").rstrip(".")
    except ValueError:
        return False
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


def _host(origin: bytes) -> bytes:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return b""
