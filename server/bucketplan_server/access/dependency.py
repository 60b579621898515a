"""`needs("rank")`, `needs("auditor")`, `needs("operator")`: what every route says of who may call it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends
from starlette.requests import Request

from bucketplan_server.access.principal import NOBODY, Principal, Role
from bucketplan_server.problems import Problem

__all__ = ["SAFE_METHODS", "Caller", "needs", "needs_nothing", "principal_of", "unauthorized"]

SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))
"""Methods that change nothing (RFC 9110, section 9.2.1), as far as this server takes them."""


def principal_of(request: Request) -> Principal:
    """Who makes this call, as the front found out; nobody where the front was left out."""
    found = getattr(request.state, "principal", NOBODY)
    return found if isinstance(found, Principal) else NOBODY


Caller = Annotated[Principal, Depends(principal_of)]
"""A route's parameter for who calls it."""


def needs(role: Role, *, only_reads: bool = False) -> Any:
    """A dependency for `dependencies=[needs("auditor")]`; raises ``unauthorized`` or ``forbidden``.

    `only_reads` says of a post that it changes nothing that is stored.
    """

    async def check(request: Request) -> None:
        principal = principal_of(request)
        if principal.role is None:
            raise unauthorized("this call needs a token", presented=False)
        changes = request.method not in SAFE_METHODS and not only_reads
        if not principal.has(role, changes=changes):
            raise Problem(
                "forbidden",
                f"token {principal.name!r} has the role {principal.role!r}; {request.method} {request.url.path} needs "
                f"{role!r}. Use a token of that role (bucketplan-server token create NAME --role {role})",
                fields={"needs": role, "role": principal.role, "token": principal.name},
            )

    check.role = role  # type: ignore[attr-defined]  # read by the test that walks all routes
    return Depends(check)


def needs_nothing() -> Any:
    """The declaration of a route that anybody may call."""

    async def check() -> None:
        return None

    check.role = None  # type: ignore[attr-defined]  # read by the test that walks all routes
    return Depends(check)


def unauthorized(why: str, *, presented: bool) -> Problem:
    """401 with what to do; `presented` says whether there was a token, which then is not valid."""
    challenge = 'Bearer realm="bucketplan"' + (', error="invalid_token"' if presented else "")
    return Problem(
        "unauthorized",
        f"{why}; send a valid one as 'Authorization: Bearer TOKEN' (bucketplan and ranks: BUCKETPLAN_TOKEN). An "
        "operator makes one with bucketplan-server token create",
        headers={"WWW-Authenticate": challenge},
    )
