"""`bucketplan-server token create|list|revoke`: who may call; on the database itself or beside its server."""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bucketplan_core.fields import escaped
from bucketplan_core.wire import MAX_INT
from bucketplan_server.access.inbox import Command, Inbox, NotTaken
from bucketplan_server.access.principal import NAMESPACE_PATTERN, ROLES
from bucketplan_server.access.tokens import Token, hash_token, new_token

if TYPE_CHECKING:
    from bucketplan_server.settings import Settings

__all__ = ["TokenError", "app", "create", "list_tokens", "print_tokens", "revoke", "write_secret"]

app = typer.Typer(
    name="token", help="Tokens: who may call, in what role and namespace.", no_args_is_help=True, add_completion=False
)
_UNBROKEN_COLUMNS = 10_000
_RESERVED = frozenset(("anonymous", "nobody", "server"))
_DURATION = re.compile(r"([0-9]{1,6})([smhdw])")
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_BEYOND_REFRESH_SECONDS = 15.0


class TokenError(Exception):
    """A token command cannot be carried out; the message says what to change."""


def create(settings: Settings, name: str, *, role: str, namespace: str | None, expires: str | None, reason: str) -> str:
    """Make a token and answer its secret, which is stored nowhere; raises `TokenError`, `CannotOpen`, `StoreError`."""
    for what, value in (("name", name), ("namespace", namespace)):
        if value is not None and (re.fullmatch(NAMESPACE_PATTERN, value) is None or value in _RESERVED):
            raise TokenError(f"{what} {value!r}: take 1 to 100 letters, digits and ._- , no reserved word")
    if role not in ROLES:
        raise TokenError(f"--role: {role!r} is none of {', '.join(ROLES)}")
    secret = new_token()
    command = _command(
        name=name,
        actor=_actor(),
        reason=reason,
        hash=hash_token(secret.encode()).hex(),
        role=role,
        namespace=namespace,
        expires_ns=None if expires is None else _read_expiry(expires),
    )
    _send(settings, command)
    return secret


def revoke(settings: Settings, name: str, *, reason: str) -> None:
    """Revoke a token for ever; raises as `create` does."""
    _send(settings, _command(name=name, actor=_actor(), reason=reason))


def list_tokens(settings: Settings) -> list[Token]:
    """Every token, without its secret; raises `StoreError`."""
    from bucketplan_server.store.engine import open_for_reading
    from bucketplan_server.store.tokens import load_tokens

    async def read() -> list[Token]:
        store = await open_for_reading(settings.database, timeout_seconds=settings.store_timeout_seconds)
        try:
            return await load_tokens(store)
        finally:
            await store.close()

    return asyncio.run(read())


def write_secret(path: Path, secret: str) -> None:
    """A new file that only its owner can read; raises `OSError`."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "w") as opened:
        opened.write(f"{secret}\n")


def print_tokens(tokens: list[Token], *, as_json: bool) -> None:
    now = time.time_ns()
    if as_json:
        rows = [
            {
                "created_ns": token.created_ns,
                "expires_ns": token.expires_ns,
                "name": token.name,
                "namespace": token.namespace,
                "revoked_ns": token.revoked_ns,
                "role": token.role,
                "state": token.state(now),
            }
            for token in tokens
        ]
        typer.echo(json.dumps(rows, indent=1))
        return
    table = Table("name", "role", "namespace", "state", "created (UTC)", "expires (UTC)")
    for token in tokens:
        row = (
            token.name,
            token.role,
            token.namespace or "all",
            token.state(now),
            _moment(token.created_ns),
            "never" if token.expires_ns is None else _moment(token.expires_ns),
        )
        table.add_row(*(Text(escaped(value)) for value in row))
    console = Console()
    # A program that reads the table finds every name on one line.
    console.print(table, width=None if console.is_terminal else _UNBROKEN_COLUMNS)


def _send(settings: Settings, command: Command) -> None:
    """Carry a command out on the database; where a server has the SQLite file, have that one do it."""
    from bucketplan_server.access.service import carry_out
    from bucketplan_server.store.engine import open_store
    from bucketplan_server.store.jobs import Conflict
    from bucketplan_server.store.lock import LockHeld

    async def here() -> None:
        store = await open_store(settings.database, timeout_seconds=settings.store_timeout_seconds)
        try:
            await carry_out(store, command)
        finally:
            await store.close()

    try:
        asyncio.run(here())
    except Conflict as conflict:
        raise TokenError(conflict.detail) from None
    except LockHeld:
        path = settings.sqlite_path
        assert path is not None, "only SQLite files are locked"
        try:
            error = Inbox(path.resolve()).submit(
                command, timeout_seconds=settings.refresh_seconds + _BEYOND_REFRESH_SECONDS
            )
        except NotTaken as failed:
            raise TokenError(str(failed)) from None
        if error is not None:
            raise TokenError(error) from None


def _command(**fields: Any) -> Command:
    try:
        return Command(**fields)
    except ValueError as error:
        raise TokenError(str(error)) from None


def _actor() -> str:
    try:
        return f"{getpass.getuser()}@command-line"
    except (KeyError, OSError):
        return "command-line"


def _read_expiry(text: str) -> int:
    """Nanoseconds since 1970 of a duration from now (``90d``) or a moment (``2027-01-31T12:00:00+00:00``)."""
    now = time.time_ns()
    found = _DURATION.fullmatch(text)
    if found is not None:
        at = now + int(found[1]) * _UNIT_SECONDS[found[2]] * 10**9
    else:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise TokenError(
                f"--expires: {text!r} is no duration (90d, 12h) and no moment (2027-01-31T12:00)"
            ) from None
        at = int(moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()) * 10**9
    if at <= now:
        raise TokenError(f"--expires: {text} is in the past; name a moment after now, and before the year 2262")
    if at > MAX_INT:
        raise TokenError(
            f"--expires: {text} is beyond the year 2262, where nanoseconds end; "
            f"name an earlier moment, or leave it out for a token that never expires"
        )
    return at


def _moment(at_ns: int) -> str:
    return datetime.fromtimestamp(at_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S")


Name = Annotated[str, typer.Argument(help="Name of the token: the actor in the audit log. Never used again.")]
Reason = Annotated[str, typer.Option(help="Why; goes into the audit log.")]
SecretFile = Annotated[
    Path | None, typer.Option("--output", help="Write the secret to this new file, readable by you alone.")
]
