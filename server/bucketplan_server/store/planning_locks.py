"""Which replica plans a signature: advisory locks of PostgreSQL, all of a replica's in one session of its own.

A lock ends with its session, so with the replica that holds it, however that ends. One that hangs says nothing on its
session, and the database ends that after `idle_seconds`. A lock that is lost costs a planning that is done twice and
nothing else: the first plan that is stored is everybody's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from sqlalchemy import ARRAY, BigInteger, bindparam, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.pool import NullPool

__all__ = ["PlanningLocks"]

_KEYS = bindparam("keys", type_=ARRAY(BigInteger))
_TRY = text("SELECT key FROM unnest(:keys) AS key WHERE pg_try_advisory_lock(key)").bindparams(_KEYS)
_RELEASE = text("SELECT pg_advisory_unlock(key) FROM unnest(:keys) AS key").bindparams(_KEYS)
# As a query of pg_settings: releases before 14 have no such setting and refuse SET.
_END_WHEN_IDLE = text(
    "SELECT set_config(name, :milliseconds, false) FROM pg_settings WHERE name = 'idle_session_timeout'"
)
_POLL_SECONDS = 0.1
"""How often locks that another replica holds are tried for, all of them in one statement."""
_BEATS = 4
"""How often a session with locks is used within the time after which the database ends it as idle."""


class PlanningLocks:
    """Locks by key; one task has the session, so that any number of callers needs one connection."""

    def __init__(self, url: URL, *, idle_seconds: float, timeout_seconds: float) -> None:
        self._engine = create_async_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
        self._idle = idle_seconds
        self._timeout = timeout_seconds
        self._session: AsyncConnection | None = None
        self._wanted: dict[int, asyncio.Future[None]] = {}
        self._held: set[int] = set()
        self._unwanted: list[int] = []
        self._changed = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def hold(self, key: int) -> AsyncIterator[None]:
        """Held by one replica at a time; who asks for what this one has goes without.

        Raises `SQLAlchemyError`, `OSError`, `TimeoutError`.
        """
        if key in self._wanted or key in self._held:
            # Another signature that begins alike: two plannings, as if they had nothing in common.
            yield
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._wanted[key] = granted
        self._wake()
        try:
            await granted
            yield
        finally:
            self._wanted.pop(key, None)
            if key in self._held:
                self._held.discard(key)
                self._unwanted.append(key)
                self._wake()

    async def close(self) -> None:
        """Give every lock back."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        await self._drop()
        await self._engine.dispose()

    def _wake(self) -> None:
        self._changed.set()
        if self._keeper is None or self._keeper.done():
            self._keeper = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        """Carry out what was asked for, and use the session meanwhile, until nobody asked for a while."""
        beat = self._idle / _BEATS
        while True:
            self._changed.clear()
            try:
                await self._carry_out()
            except Exception as error:  # whatever it is, those who wait must hear of it
                await self._drop()
                for key in list(self._wanted):
                    self._answer(key, error)
            idle = not (self._wanted or self._held)
            try:
                async with asyncio.timeout(min(_POLL_SECONDS, beat) if self._wanted else beat):
                    await self._changed.wait()
            except TimeoutError:
                if idle:
                    await self._drop()
                    if not self._changed.is_set():
                        return

    async def _carry_out(self) -> None:
        """One round on the session; on another one where that was lost."""
        known = self._session is not None
        try:
            await self._round()
        except (SQLAlchemyError, OSError):
            if not known:
                raise
            await self._drop()
            await self._round()

    async def _round(self) -> None:
        async with asyncio.timeout(self._timeout):
            if self._session is None:
                self._unwanted.clear()
                self._session = await self._engine.connect()
                await self._session.execute(_END_WHEN_IDLE, {"milliseconds": str(max(1, int(self._idle * 1000)))})
            released, self._unwanted = self._unwanted, []
            if released:
                await self._session.execute(_RELEASE, {"keys": released})
            # Also with no key: that the session is used is what keeps its locks.
            granted = await self._session.execute(_TRY, {"keys": list(self._wanted)})
        for key in granted.scalars():
            if key in self._wanted:
                self._held.add(key)
                self._answer(key, None)
            else:
                # Its caller left while the database was asked.
                self._unwanted.append(key)
                self._changed.set()

    def _answer(self, key: int, error: Exception | None) -> None:
        granted = self._wanted.pop(key)
        if granted.done():
            return
        if error is None:
            granted.set_result(None)
        else:
            granted.set_exception(error)

    async def _drop(self) -> None:
        """End the session, and every lock with it."""
        session, self._session = self._session, None
        self._held.clear()
        self._unwanted.clear()
        if session is not None:
            with contextlib.suppress(SQLAlchemyError, OSError):
                await session.invalidate()
            with contextlib.suppress(SQLAlchemyError, OSError):
                await session.close()
