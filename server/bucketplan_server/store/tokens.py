"""Tokens in the store: made and revoked with an event in the same transaction, never deleted."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from sqlalchemy import RowMapping, insert, inspect, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from bucketplan_core.fields import is_digest
from bucketplan_core.wire import digest_of
from bucketplan_server.access.principal import ROLES, SEPARATOR
from bucketplan_server.access.tokens import Token
from bucketplan_server.store.engine import Store
from bucketplan_server.store.events import Cause, append_event
from bucketplan_server.store.jobs import Conflict
from bucketplan_server.store.tables import tokens

__all__ = ["create_token", "load_tokens", "read_tokens", "revoke_token", "token_fingerprint"]


def token_fingerprint(hashed: bytes) -> str:
    """What the audit log holds of a token: a digest of its stored hash, so that the log's readers learn neither."""
    return digest_of(hashed)


async def load_tokens(store: Store) -> list[Token]:
    """Every token by name, revoked, expired and damaged ones too."""
    async with store.read() as connection:
        return await read_tokens(connection)


async def read_tokens(connection: AsyncConnection) -> list[Token]:
    """Every token by name; none in a database that an older release wrote."""
    if not await connection.run_sync(lambda sync: inspect(sync).has_table("tokens")):
        return []
    rows = (await connection.execute(select(tokens).order_by(tokens.c.name))).mappings()
    return [_read(row) for row in rows]


async def create_token(store: Store, token: Token, cause: Cause) -> Token:
    """Store a token; repeating it with the same hash changes nothing. `created_ns` is set here.

    Raises `Conflict` (path ``name``) where the name was used before, by a token that may be revoked: names are actors
    in the audit log and stand for one token for ever.
    """
    now = time.time_ns()
    async with store.write() as connection:
        known = (await connection.execute(select(tokens).where(tokens.c.name == token.name))).mappings().first()
        if known is not None:
            if known["hash"] == token.hash.hex():
                return _read(known)
            raise Conflict("name", f"a token {token.name!r} was made before; names are never used again")
        columns = {"role": token.role, "namespace": token.namespace, "expires_ns": token.expires_ns}
        await connection.execute(
            insert(tokens).values(name=token.name, hash=token.hash.hex(), created_ns=now, revoked_ns=None, **columns)
        )
        await append_event(
            connection,
            "token.created",
            cause,
            at_ns=now,
            body={**columns, "fingerprint": token_fingerprint(token.hash), "name": token.name},
        )
    return Token(token.name, token.hash, token.role, token.namespace, now, token.expires_ns, None)


async def revoke_token(store: Store, name: str, cause: Cause) -> Token:
    """Revoke a token for ever; repeating it changes nothing. Raises `Conflict` (path ``name``) for an unknown name."""
    now = time.time_ns()
    async with store.write() as connection:
        known = (await connection.execute(select(tokens).where(tokens.c.name == name))).mappings().first()
        if known is None:
            raise Conflict("name", f"there is no token {name!r}")
        if known["revoked_ns"] is None:
            await connection.execute(update(tokens).where(tokens.c.name == name).values(revoked_ns=now))
            await append_event(connection, "token.revoked", cause, at_ns=now, body={"name": name})
    return _read({**known, "revoked_ns": now if known["revoked_ns"] is None else known["revoked_ns"]})


def _read(row: RowMapping | Mapping[str, Any]) -> Token:
    """The token of a row; one that somebody or a disk has damaged says so and lets nobody in."""
    hashed, namespace = row["hash"], row["namespace"]
    times = [row[name] for name in ("created_ns", "expires_ns", "revoked_ns")]
    damage = None
    if type(hashed) is not str or not is_digest(hashed):
        damage = "hash: is no SHA-256 in hex"
    elif row["role"] not in ROLES:
        damage = f"role: {row['role']!r:.80} is none"
    elif namespace is not None and type(namespace) is not str:
        damage = f"namespace: {namespace!r:.80} is none"
    elif not all(time is None or type(time) is int for time in times):
        damage = f"times: {times!r:.200} are no nanoseconds"
    if damage is None:
        return Token(**{**row, "hash": bytes.fromhex(hashed)})
    # Where it names no namespace, one that nobody is in: what the token did is shown to those who see everything.
    namespace = namespace if namespace is None or type(namespace) is str else SEPARATOR
    return Token(str(row["name"]), b"", "rank", namespace, 0, None, None, damage)
