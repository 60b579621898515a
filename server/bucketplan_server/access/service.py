"""Tokens of a running server: read again every `refresh_seconds`, and commands of the command line carried out."""

from __future__ import annotations

import time

import structlog

from bucketplan_server.access.inbox import Command, Inbox
from bucketplan_server.access.principal import ROLES
from bucketplan_server.access.tokens import Token, TokenTable
from bucketplan_server.settings import Settings
from bucketplan_server.store.engine import Store, StoreError, StoreUnconfirmed
from bucketplan_server.store.events import Cause
from bucketplan_server.store.jobs import Conflict
from bucketplan_server.store.tokens import create_token, load_tokens, revoke_token

__all__ = ["TokenService", "carry_out"]

_LOST_SECRET = "the secret of one that was made now is lost, so revoke it and make one of another name"
_STALE_REFRESHES = 10


async def carry_out(store: Store, command: Command) -> None:
    """Make or revoke a token; raises `Conflict`, `StoreError`, `ValueError`."""
    try:
        await _carry_out(store, command)
    except StoreUnconfirmed as error:
        raise StoreUnconfirmed(f"{error}: see bucketplan-server token list; {_LOST_SECRET}") from error


async def _carry_out(store: Store, command: Command) -> None:
    cause = Cause(command.actor, command.reason)
    if command.expires_ns is not None and type(command.expires_ns) is not int:
        raise ValueError(f"{command.expires_ns!r} is no time")
    if command.hash is None:
        await revoke_token(store, command.name, cause)
        return
    role = next((known for known in ROLES if known == command.role), None)
    if role is None:
        raise ValueError(f"{command.role!r} is no role")
    token = Token(
        name=command.name,
        hash=bytes.fromhex(command.hash),
        role=role,
        namespace=command.namespace,
        created_ns=0,
        expires_ns=command.expires_ns,
        revoked_ns=None,
    )
    await create_token(store, token, cause)


class TokenService:
    """Keeps a `TokenTable` as the store says, at most `refresh_seconds` late while the store can be read."""

    def __init__(self, settings: Settings, store: Store, table: TokenTable) -> None:
        self._settings = settings
        self._store = store
        self._table = table
        path = settings.sqlite_path
        self._inbox = None if path is None else Inbox(path.resolve())
        self._failing_since_s: float | None = None
        self._damaged: dict[str, str] = {}
        self._log = structlog.get_logger("bucketplan_server")

    @property
    def is_stale(self) -> bool:
        """Whether the tokens could not be read for so long that revoked ones may still be let in unnoticed."""
        return self._failing_since_s is not None and (
            time.monotonic() - self._failing_since_s >= _STALE_REFRESHES * self._settings.refresh_seconds
        )

    async def refresh(self) -> None:
        """Read the tokens; raises `StoreError`. What is known stays: a database that is away locks out no fleet."""
        try:
            tokens = await load_tokens(self._store)
        except BaseException:
            self._failing_since_s = self._failing_since_s or time.monotonic()
            raise
        self._failing_since_s = None
        self._table.replace(tokens)
        damaged = {token.name: token.damage for token in tokens if token.damage is not None}
        for name in damaged.keys() - self._damaged.keys():
            self._store.errors += 1
            self._log.error("token.damaged", token=name, detail=f"{damaged[name]}; the token is refused")
        self._damaged = damaged

    async def start(self) -> None:
        """Read the tokens for the first time and say how callers come in; raises `CannotOpen`, `StoreError`."""
        if self._inbox is not None:
            self._inbox.open()
        await self.refresh()
        self._log.info("access.ready", tokens=len(self._table), required=self._table.required)
        if self._table.required and not len(self._table):
            self._log.warning(
                "access.no_tokens", detail="every call is refused until bucketplan-server token create makes a token"
            )

    async def carry_out_commands(self) -> None:
        """What the command line left in the inbox; raises `OSError` where that cannot be read."""
        if self._inbox is None:
            return
        for name, command in self._inbox.taken():
            error: str | None = "the command cannot be read; are server and command line of one release?"
            if command is not None:
                error = await self._carried_out(command)
            try:
                self._inbox.answer(name, error)
            except OSError as failed:
                # Of this command alone: the next ones may be revocations.
                self._log.error("token.command_failed", command=name, detail=str(failed))

    async def _carried_out(self, command: Command) -> str | None:
        """Why a command was not carried out, None where it was."""
        try:
            await carry_out(self._store, command)
            await self.refresh()
        except (Conflict, StoreError, ValueError) as failed:
            return failed.detail if isinstance(failed, Conflict) else str(failed)
        except Exception as failed:
            self._log.error("token.command_failed", token=command.name, exc_info=failed)
            return "the server failed; its log says why"
        kind = "token.revoked" if command.hash is None else "token.created"
        self._log.info(kind, token=command.name, role=command.role, actor=command.actor)
        return None
