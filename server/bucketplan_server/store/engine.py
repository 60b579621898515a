"""Opening the store and running transactions on it; every failure of the database becomes `StoreError`.

SQLite: WAL with synchronous FULL, one connection in one process (two writers in WAL mode can corrupt files of SQLite
before 3.51.3), BEGIN IMMEDIATE. PostgreSQL: one advisory lock a write transaction, which gives the audit log its order.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sqlite3
import stat
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

from sqlalchemy import Connection, RowMapping, event, inspect, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DataError, IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncTransaction, create_async_engine

from bucketplan_server.store.integrity import file_damage
from bucketplan_server.store.lock import FileLock
from bucketplan_server.store.migrate import upgrade
from bucketplan_server.store.planning_locks import PlanningLocks

__all__ = [
    "WRITER_LOCK",
    "Store",
    "StoreDamaged",
    "StoreError",
    "StoreUnconfirmed",
    "is_file",
    "open_for_reading",
    "open_store",
    "plain_row",
    "store_url",
    "without_password",
]

WRITER_LOCK = 0x6275636B6574
"""Key of the advisory lock that orders writers on PostgreSQL: "bucket" in ASCII."""

_HARMLESS = ("host", "port", "user", "database", "ssl", "sslmode", "target_session_attrs")
"""Parameters of a database address whose values are shown."""
_PLAIN = re.compile(r"[\w .,:/%+\[\]-]*")
"""What a host, a name and a harmless value consist of: nothing that separates one part of an address from another."""
_BOUNDS = ("idle_in_transaction_session_timeout", "lock_timeout")
"""What ends the transactions of a replica that hangs, also those in which it waits for its turn to write: the time that
a transaction has anyway, but kept by the database."""
_SHOWN_DAMAGE = 3
_WHOSE = "run this as the server's user, or name another file with --database (BUCKETPLAN_DATABASE)"
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_PROBE_BYTES = 512 * 1024
_CACHE_SIZE = -2000
"""SQLite's default."""
_NOT_SYNCED = (sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_DIR_FSYNC)
_CUT_OFF = ("08", "40003", "57")
"""SQLSTATEs of lost connections, of statements whose end is unknown, and of servers that stop."""


class StoreError(Exception):
    """The store could not be read or written; nothing was changed, unless it is `StoreUnconfirmed`."""


class StoreUnconfirmed(StoreError):
    """The database did not say whether it committed: the change may be stored, now or in a moment, or not."""


class StoreDamaged(StoreError):
    """The file is no whole SQLite database; `found` is what SQLite said. Repeating a call does not help."""

    def __init__(self, found: str) -> None:
        self.found = found
        super().__init__(
            f"the database file is damaged: {found}. Stop the server, keep the file, and see what is lost with "
            "bucketplan-server verify; then restore a backup, or let sqlite3's .recover rebuild the file"
        )


class Store:
    """Transactions on the database; made by `open_store`."""

    def __init__(
        self, engine: AsyncEngine, *, timeout_seconds: float, lock: FileLock | None = None, path: Path | None = None
    ) -> None:
        self._engine = engine
        self.is_postgres = engine.dialect.name == "postgresql"
        # The begin statement carries it, so that a snapshot costs nothing.
        snapshot = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True} if self.is_postgres else {}
        self._reading = engine.execution_options(**snapshot)
        self.path = path
        self._timeout = timeout_seconds
        self._lock = lock
        self._planning = (
            PlanningLocks(engine.url, idle_seconds=timeout_seconds, timeout_seconds=timeout_seconds)
            if self.is_postgres
            else None
        )
        self._endings: set[asyncio.Task[None]] = set()
        self._in_doubt = False
        self._probe: asyncio.Task[None] | None = None
        self.errors = 0

    @contextlib.asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """One state of the database for the whole block, whatever others commit meanwhile; raises `StoreError`."""
        async with self._transaction(self._reading) as connection:
            yield connection

    @contextlib.asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """All or nothing, one writer at a time over every replica; durable when the block has ended.

        Raises `StoreUnconfirmed` where that cannot be said, any other `StoreError` where nothing was changed.
        """
        async with self._transaction(self._engine) as connection:
            await self._order_writers(connection)
            yield connection

    async def bring_up_to_date(self) -> None:
        """Run the migrations that are missing, one replica at a time; raises `StoreError`, `SchemaRefused`.

        Only reaching the database is bounded in time: a migration of large tables, here or in the replica that has the
        lock, takes as long as it takes.
        """
        async with self._transaction(self._engine, bounded=False) as connection:
            if self.is_postgres:
                for bound in _BOUNDS:
                    await connection.execute(text(f"SET LOCAL {bound} = 0"))
            await self._order_writers(connection)
            await connection.run_sync(upgrade)

    async def _order_writers(self, connection: AsyncConnection) -> None:
        if self.is_postgres:
            await connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": WRITER_LOCK})

    @contextlib.asynccontextmanager
    async def planning(self, signature: str) -> AsyncIterator[bool]:
        """Held while `signature` is planned, by one replica at a time; true where another may have planned it before.

        It ends with the replica that holds it, also when that one hangs, see `PlanningLocks`. A SQLite file has one
        server, which plans a signature once by itself.
        """
        if self._planning is None:
            yield False
            return
        key = int.from_bytes(bytes.fromhex(signature[:16]), "big", signed=True)
        async with contextlib.AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self._planning.hold(key))
            except (SQLAlchemyError, OSError, TimeoutError) as error:
                self.errors += 1
                raise StoreError(_reason(error)) from error
            yield True

    async def reach(self) -> None:
        """Connect for the first time; raises `StoreError`."""
        try:
            async with asyncio.timeout(self._timeout), self._engine.connect():
                pass
        except Exception as error:  # drivers raise anything for an address that they do not take
            if _is_damage(error):
                raise StoreDamaged(_reason(error)) from error
            raise StoreError(_reason(error)) from error

    async def ping(self) -> None:
        """Raises `StoreError` unless the database answers, and once a write has failed, unless it takes one again."""
        if self._in_doubt:
            if self._probe is None or self._probe.done():
                # One for all who ask meanwhile, however long it takes.
                self._probe = self._ending(self._try_to_write())
            await asyncio.shield(self._probe)
        async with self.read() as connection:
            await connection.execute(text("SELECT 1"))

    async def _try_to_write(self) -> None:
        with contextlib.suppress(_TakenBack):
            async with self.write() as connection:
                if self.is_postgres:
                    await connection.execute(text("UPDATE alembic_version SET version_num = version_num"))
                else:
                    await _write_and_take_back(connection)
        self._in_doubt = False

    async def close(self) -> None:
        if self._endings:
            await asyncio.wait(self._endings, timeout=self._timeout)
        await self._engine.dispose()
        if self._planning is not None:
            await self._planning.close()
        if self._lock is not None:
            self._lock.release()

    @contextlib.asynccontextmanager
    async def _transaction(self, engine: AsyncEngine, *, bounded: bool = True) -> AsyncIterator[AsyncConnection]:
        """A transaction that begins in time, and where it is `bounded` is carried out in time.

        Its end is waited for as long again: whoever gave up earlier would not know what became of it.
        """
        committing = False
        try:
            async with asyncio.timeout(self._timeout) as deadline:
                connection = await engine.connect()
                try:
                    transaction = await connection.begin()
                    if not bounded:
                        deadline.reschedule(None)
                    yield connection
                except BaseException:
                    with contextlib.suppress(SQLAlchemyError, OSError, TimeoutError):
                        await self._end(connection.close(), self._timeout)
                    raise
            committing = engine is not self._reading
            await self._end(_commit(connection, transaction), self._timeout if bounded else None)
        except (SQLAlchemyError, OSError, TimeoutError) as error:
            self.errors += 1
            if engine is not self._reading and not isinstance(error, DataError | IntegrityError):
                self._in_doubt = True
            if committing and not _is_refusal(error):
                raise StoreUnconfirmed(f"{_reason(error)}; the change may have been stored or not") from error
            if _is_damage(error):
                raise StoreDamaged(_reason(error)) from error
            raise StoreError(_reason(error)) from error

    async def _end(self, ending: Coroutine[Any, Any, None], seconds: float | None) -> None:
        """Wait for the end of a transaction, which comes also when the caller leaves; raises `TimeoutError`."""
        task = self._ending(ending)
        async with asyncio.timeout(seconds):
            await asyncio.shield(task)

    def _ending(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._endings.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._endings.discard(task)
        if not task.cancelled():
            # Seen, also where nobody waits any more.
            task.exception()


class _TakenBack(Exception):
    """Ends a transaction that was only tried."""


async def _write_and_take_back(connection: AsyncConnection) -> None:
    """Have SQLite write as much as a large plan needs, and raise `_TakenBack`: a full disk has room for a page or two.

    With a small cache the pages go to the log before the commit, which then never comes.
    """
    try:
        for statement in (
            "PRAGMA cache_size = 10",
            "CREATE TABLE probe (content BLOB)",
            f"INSERT INTO probe VALUES (randomblob({_PROBE_BYTES}))",
        ):
            await connection.exec_driver_sql(statement)
    finally:
        await connection.exec_driver_sql(f"PRAGMA cache_size = {_CACHE_SIZE}")
    raise _TakenBack


async def _commit(connection: AsyncConnection, transaction: AsyncTransaction) -> None:
    try:
        await transaction.commit()
    finally:
        await connection.close()


def _is_refusal(error: BaseException) -> bool:
    """Whether the database itself says that a commit did not happen."""
    origin = getattr(error, "orig", None)
    code = getattr(origin, "sqlite_errorcode", None)
    if code is not None:
        # What was written may be found again after a crash when it could not be synced.
        return code not in _NOT_SYNCED
    state = getattr(origin, "sqlstate", None)
    return state is not None and not state.startswith(_CUT_OFF)


def plain_row(row: RowMapping) -> dict[str, Any]:
    """The row under names that are exactly `str`: a mapping's own keys are of a subclass, which no encoder takes."""
    return {str(name): value for name, value in row.items()}


def _is_damage(error: BaseException) -> bool:
    code: int = getattr(getattr(error, "orig", None), "sqlite_errorcode", 0)
    return code & 0xFF in _DAMAGED


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "the database did not answer in time"
    # SQLAlchemy's text carries the statement and its parameters, which are no business of a caller.
    origin = getattr(error, "orig", None)
    return str(origin or error).splitlines()[0] if str(origin or error) else type(error).__name__


def store_url(database: str) -> URL:
    """The address that SQLAlchemy wants for the setting `database`."""
    if "://" not in database:
        return URL.create("sqlite+aiosqlite", database=database)
    url = make_url(database)
    if url.get_backend_name() == "sqlite":
        return url.set(drivername="sqlite+aiosqlite")
    # The driver has another name for what libpq, and so pg_dump, calls sslmode.
    query = {"ssl" if name == "sslmode" else name: value for name, value in url.query.items()}
    return url.set(drivername="postgresql+asyncpg", query=query)


def without_password(database: str) -> str:
    """The setting `database` as it may be shown: without anything in it that is, or may be a part of, a secret."""
    if "://" not in database:
        return database
    try:
        url = make_url(database)
    except (ArgumentError, ValueError):
        url = None
    is_postgres = url is not None and url.get_backend_name() == "postgresql"
    if url is None or (is_postgres and not all(_PLAIN.fullmatch(part or "") for part in (url.host, url.database))):
        # A password with an @, or a mistyped query, ends up in host or name.
        return f"{database.partition('://')[0]}://***"
    shown = {name: _shown_values(name, values) for name, values in url.normalized_query.items()}
    if url.password is None and shown == {name: list(values) for name, values in url.normalized_query.items()}:
        return database
    query = "&".join(f"{quote_plus(name)}={value}" for name, values in shown.items() for value in values)
    return url.set(query={}).render_as_string(hide_password=True) + (f"?{query}" if query else "")


def _shown_values(name: str, values: Sequence[str]) -> list[str]:
    return [value if name in _HARMLESS and _PLAIN.fullmatch(value) else "***" for value in values]


@contextlib.asynccontextmanager
async def _opening(store: Store, database: str) -> AsyncIterator[None]:
    """Closes `store` where it cannot be opened, and says of which database that is."""
    try:
        await store.reach()
        yield
    except BaseException as error:
        await store.close()
        if type(error) is not StoreError:
            raise
        what = "file and folder" if store.path is not None else "address, user, password and rights, and that it runs"
        raise StoreError(
            f"{without_password(database)} cannot be opened: {error}. Check --database (BUCKETPLAN_DATABASE): {what}"
        ) from error


async def open_store(database: str, *, timeout_seconds: float) -> Store:
    """Open `database` and bring its tables up to date.

    Raises `CannotOpen`: `LockHeld` when another server has the SQLite file, `SeveralNames` for one with hard links,
    `SchemaTooNew` when a newer release wrote it, `SchemaUnclear` when it does not say which release did; else
    `StoreDamaged` for a SQLite file that is not whole, `StoreError` when it cannot be opened.
    """
    url = store_url(database)
    lock = path = None
    if url.get_backend_name() == "sqlite":
        path = Path(url.database or "")
        lock = _lock_file(path)
        try:
            await _refuse_damage(path)
        except BaseException:
            lock.release()
            raise
        engine = _sqlite(url)
    else:
        engine = create_async_engine(
            url,
            pool_size=8,
            max_overflow=8,
            pool_pre_ping=True,
            pool_timeout=timeout_seconds,
            # A writer must see what was committed while it waited for its turn, whatever the database's own default is.
            isolation_level="READ COMMITTED",
            connect_args={"server_settings": dict.fromkeys(_BOUNDS, str(max(1, int(timeout_seconds * 1000))))},
        )
    store = Store(engine, timeout_seconds=timeout_seconds, lock=lock, path=path)
    async with _opening(store, database):
        await store.bring_up_to_date()
    return store


async def open_for_reading(database: str, *, timeout_seconds: float) -> Store:
    """Open `database` to read it only, beside a server that may have it open.

    Raises `StoreError`, also where it holds no tables of ours.
    """
    url = store_url(database)
    path = None
    if url.get_backend_name() == "sqlite":
        path = Path(url.database or "")
        engine = _read_only(url)
    else:
        engine = create_async_engine(url, pool_size=1, max_overflow=0)
    store = Store(engine, timeout_seconds=timeout_seconds, path=path)
    async with _opening(store, database):
        try:
            async with store.read() as connection:
                is_ours = await connection.run_sync(_has_our_tables)
        except StoreDamaged:
            is_ours = True  # `verify` says what is left of it
        if not is_ours:
            raise StoreError("it holds no tables of a bucketplan-server, which `bucketplan-server migrate` would make")
    return store


def _has_our_tables(connection: Connection) -> bool:
    # Either may have been lost, which is for `verify` to say.
    return any(inspect(connection).has_table(name) for name in ("alembic_version", "events"))


def _read_only(url: URL) -> AsyncEngine:
    path = Path(url.database or "").absolute()
    if not is_file(path):
        raise StoreError(f"there is no file {path}; name another with --database (BUCKETPLAN_DATABASE)")
    reading = URL.create("sqlite+aiosqlite", database=f"file:{quote(str(path))}", query={"mode": "ro", "uri": "true"})
    engine = create_async_engine(reading, pool_size=1, max_overflow=0)
    # Without BEGIN each statement would see a state of its own.
    _begin_with(engine, "BEGIN")
    return engine


async def _refuse_damage(path: Path) -> None:
    """Before the file is opened for writing, raises `StoreDamaged` unless it is whole."""
    found = await asyncio.to_thread(file_damage, path)
    if found:
        raise StoreDamaged("; ".join(found[:_SHOWN_DAMAGE]) + (" ..." if len(found) > _SHOWN_DAMAGE else ""))


def is_file(path: Path, *, writing: bool = False) -> bool:
    """Whether there is a database file, which may be read, or written; raises `StoreError` where it may not."""
    try:
        file = path.resolve()
        is_regular = stat.S_ISREG(file.stat().st_mode)
    except FileNotFoundError:
        return False
    except RuntimeError as error:
        raise StoreError(f"{path} leads nowhere: {error}; name a file with --database (BUCKETPLAN_DATABASE)") from None
    except OSError as error:
        raise StoreError(f"{path} cannot be reached: {error.strerror}; {_WHOSE}") from None
    if not is_regular:
        raise StoreError(f"{file} is no file; name one with --database (BUCKETPLAN_DATABASE)")
    if not os.access(file, os.R_OK | (os.W_OK if writing else 0)):
        raise StoreError(f"{file} cannot be {'written' if writing else 'read'}: Permission denied; {_WHOSE}")
    return True


def _lock_file(path: Path) -> FileLock:
    """The lock of the file, which is made where there is none, readable by its owner alone."""
    lock = FileLock(path.absolute())
    try:
        exists = is_file(path, writing=True)
        file = path.resolve()
        if not file.parent.is_dir():
            raise StoreError(f"the folder {file.parent} does not exist; make it, or set BUCKETPLAN_DATABASE")
        lock.acquire()
        if not exists:
            # SQLite would make it as the umask says, and gives the files beside it its mode.
            os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as error:
        lock.release()
        raise StoreError(f"{error.filename} cannot be written: {error.strerror}; {_WHOSE}") from None
    return lock


def _sqlite(url: URL) -> AsyncEngine:
    engine = create_async_engine(url, pool_size=1, max_overflow=0)

    @event.listens_for(engine.sync_engine, "connect")
    def _configure(connection: Any, _record: Any) -> None:
        cursor = connection.cursor()
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=5000"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    _begin_with(engine, "BEGIN IMMEDIATE")
    return engine


def _begin_with(engine: AsyncEngine, statement: str) -> None:
    @event.listens_for(engine.sync_engine, "connect")
    def _leave_transactions_alone(connection: Any, _record: Any) -> None:
        # The driver must not open transactions by itself: it would begin them deferred and deadlock on upgrade.
        connection.isolation_level = None

    @event.listens_for(engine.sync_engine, "begin")
    def _begin(connection: Any) -> None:
        connection.exec_driver_sql(statement)
