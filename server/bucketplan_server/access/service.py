"""Tokens of a running server: read again every `refresh_seconds`, and commands of the command line carried out."""

from __future__ import annotations

import asyncio

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


async def carry_out(store: Store, command: Command) -> None:
    """Make or revoke a token; raises `Conflict`, `StoreError`, `ValueError`."""
    try:
        await _carry_out(store, command)
    except StoreUnconfirmed as error:
        raise StoreUnconfirmed(f"{error}: see bucketplan-server token list; {_LOST_SECRET}") from error


async def _carry_out(store: Store, command: Command) -> None:
    cause = Cause(command.actor, command.reason)
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
        self._log = structlog.get_logger("bucketplan_server")

    async def refresh(self) -> None:
        """Read the tokens; raises `StoreError`."""
        self._table.replace(await load_tokens(self._store))

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

    async def follow(self) -> None:
        """Read again, for ever; run as a task."""
        while True:
            await asyncio.sleep(self._settings.refresh_seconds)
            try:
                await self._carry_out_commands()
                await self.refresh()
            except (StoreError, OSError) as error:
                # What is known stays: a database that is away must not lock out a fleet.
                self._log.warning("store.failed", detail=str(error))

    async def _carry_out_commands(self) -> None:
        if self._inbox is None:
            return
        for name, command in self._inbox.taken():
            error: str | None = None
            try:
                if command is None:
                    error = "the command cannot be read; are server and command line of one release?"
                else:
                    await carry_out(self._store, command)
                    await self.refresh()
                    kind = "token.revoked" if command.hash is None else "token.created"
                    self._log.info(kind, token=command.name, role=command.role, actor=command.actor)
            except (Conflict, StoreError, ValueError) as failed:
                error = failed.detail if isinstance(failed, Conflict) else str(failed)
            self._inbox.answer(name, error)
