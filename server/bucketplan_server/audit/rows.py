"""Reading tables for the verification: every value has its column's type, and a row with another one is a finding.

SQLite stores any type in any column, so nothing about a row can be taken from the schema. Values are read as bytes
beside their storage class, which works for every content, and become Python values only after that class is checked.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import (
    Column,
    ColumnElement,
    Integer,
    LargeBinary,
    Select,
    Table,
    Text,
    and_,
    case,
    cast,
    func,
    inspect,
    literal,
    not_,
    select,
    text,
    tuple_,
)
from sqlalchemy.ext.asyncio import AsyncConnection

from bucketplan_server.audit.schema import schema_differences
from bucketplan_server.store.engine import Store
from bucketplan_server.store.migrate import head_revision

__all__ = ["Find", "TypedRows"]

Find = Callable[[str, str], None]
"""Notes a finding: where, and what."""

_PAGE = 200
_CLASS = "class of "


class TypedRows:
    """Rows of a store, each with exactly the types that its table names; what is left out was noted by `find`."""

    def __init__(self, store: Store, find: Find) -> None:
        self._store = store
        self._find = find

    async def pages(self, table: Table) -> AsyncIterator[list[dict[str, Any]]]:
        """Rows in the order of the primary key, a page a transaction, so that writers are never held up for long."""
        if not self._store.is_postgres:
            await self._note_wrong_keys(table)
        after: tuple[Any, ...] | None = None
        while True:
            async with self._store.read() as connection:
                raw = await self._page(connection, table, after, limit=_PAGE)
            if not raw:
                return
            after = self._key(table, raw[-1])
            yield self._typed(table, raw)

    async def all(self, connection: AsyncConnection, table: Table) -> list[dict[str, Any]]:
        """Every row in one transaction; none where a database of an older release lacks the table."""
        if not await connection.run_sync(lambda sync: inspect(sync).has_table(table.name)):
            return []
        if not self._store.is_postgres:
            await self._note_wrong_keys(table, connection)
        return self._typed(table, await self._page(connection, table, None, limit=None))

    async def last(self, connection: AsyncConnection, column: Column[int]) -> int:
        """The highest integer in `column`, 0 where there is none."""
        query = select(func.max(column))
        if not self._store.is_postgres:
            query = query.where(func.typeof(column) == "integer")
        return int(await connection.scalar(query) or 0)

    async def note_migration(self, connection: AsyncConnection) -> None:
        """A finding unless `alembic_version` names this release's migration alone, and the schema is its own."""
        where = "alembic_version.version_num"
        if not await connection.run_sync(lambda sync: inspect(sync).has_table("alembic_version")):
            self._find(where, "the table is missing: no release can tell which tables these are")
            return
        read = "version_num" if self._store.is_postgres else "quote(CAST(version_num AS BLOB)), typeof(version_num)"
        rows = (await connection.execute(text(f"SELECT {read} FROM alembic_version"))).all()
        found = [row[0] if self._store.is_postgres else _version(*row) for row in rows]
        if found != [head_revision()]:
            self._find(
                where,
                f"is {', '.join(map(repr, found)) or 'empty'}, these tables are those of {head_revision()!r}. If an "
                "older release wrote the database, run bucketplan-server migrate; else it was changed",
            )
            return
        for differs, detail in await connection.run_sync(lambda sync: list(schema_differences(sync))):
            self._find(differs, detail)

    async def _page(
        self, connection: AsyncConnection, table: Table, after: tuple[Any, ...] | None, *, limit: int | None
    ) -> list[Mapping[str, Any]]:
        key = list(table.primary_key.columns)
        query: Select[Any] = select(table) if self._store.is_postgres else select(*_raw(table.columns))
        query = query.order_by(*key).limit(limit)
        if not self._store.is_postgres:
            query = query.where(and_(*map(_has_its_type, key)))
        if after is not None:
            query = query.where(tuple_(*key) > tuple_(*after))
        return [dict(row) for row in (await connection.execute(query)).mappings()]

    def _key(self, table: Table, row: Mapping[str, Any]) -> tuple[Any, ...]:
        """The primary key of a row as it is compared: text as the bytes it is, which need be no UTF-8."""
        values = [row[column.name] for column in table.primary_key.columns]
        return tuple(cast(literal(value, LargeBinary), Text) if isinstance(value, bytes) else value for value in values)

    def _typed(self, table: Table, raw: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        if self._store.is_postgres:
            return [{str(name): value for name, value in row.items()} for row in raw]
        rows = (self._typed_row(table, row) for row in raw)
        return [row for row in rows if row is not None]

    def _typed_row(self, table: Table, raw: Mapping[str, Any]) -> dict[str, Any] | None:
        row: dict[str, Any] = {}
        for column in table.columns:
            value, found = raw[column.name], raw[_CLASS + column.name]
            wanted = _storage_class(column)
            if found == "null" and column.nullable:
                row[column.name] = None
            elif found != wanted:
                self._find(f"{_name(table, raw)}.{column.name}", f"is of type {found}, must be {wanted}")
                return None
            elif wanted == "text":
                try:
                    row[column.name] = value.decode()
                except UnicodeDecodeError as error:
                    self._find(f"{_name(table, raw)}.{column.name}", f"is no UTF-8: {error.reason}")
                    return None
            else:
                row[column.name] = value
        return row

    async def _note_wrong_keys(self, table: Table, connection: AsyncConnection | None = None) -> None:
        key = list(table.primary_key.columns)
        query = select(*_raw(key)).where(not_(and_(*map(_has_its_type, key)))).limit(_PAGE)
        if connection is not None:
            found = (await connection.execute(query)).mappings().all()
        else:
            async with self._store.read() as own:
                found = (await own.execute(query)).mappings().all()
        for row in map(dict, found):
            for column in key:
                kind, wanted = row[_CLASS + column.name], _storage_class(column)
                if kind != wanted:
                    self._find(f"{_name(table, row)}.{column.name}", f"is of type {kind}, must be {wanted}")


def _version(quoted: str, kind: str) -> str:
    """A text as it is; anything else as its type and content."""
    if kind != "text":
        return f"{kind} {quoted}"
    return bytes.fromhex(quoted[2:-1]).decode("utf-8", "backslashreplace")


def _raw(columns: Sequence[Column[Any]] | Any) -> list[ColumnElement[Any]]:
    """Each column as an integer or as bytes, whatever it holds, and its storage class."""
    raw: list[ColumnElement[Any]] = []
    for column in columns:
        kind: ColumnElement[str] = func.typeof(column)
        if _storage_class(column) == "integer":
            raw.append(case((kind == "integer", column)).label(column.name))
        else:
            raw.append(cast(column, LargeBinary).label(column.name))
        raw.append(kind.label(_CLASS + column.name))
    return raw


def _has_its_type(column: Column[Any]) -> ColumnElement[bool]:
    return func.typeof(column) == _storage_class(column)


def _storage_class(column: Column[Any]) -> str:
    if isinstance(column.type, Integer):
        return "integer"
    return "blob" if isinstance(column.type, LargeBinary) else "text"


def _name(table: Table, raw: Mapping[str, Any]) -> str:
    """``table[key, key]``, readable for any content."""
    shown = []
    for column in table.primary_key.columns:
        value = raw[column.name]
        shown.append(value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value))
    return f"{table.name}[{', '.join(shown)}]"
