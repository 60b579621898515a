"""Whether tables, indexes and triggers are those that the migrations make: a trigger could change what is served."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, bindparam, create_engine, text

from bucketplan_server.store.migrate import upgrade
from bucketplan_server.store.tables import metadata

__all__ = ["schema_differences"]

_SQLITE = text("SELECT type, name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite\\_stat%' ESCAPE '\\'")
_POSTGRES = text(
    "SELECT 'trigger', tgname, relname FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid"
    " WHERE NOT tgisinternal AND relname IN :tables AND relnamespace = current_schema()::regnamespace"
    " UNION ALL SELECT 'rule', rulename, tablename FROM pg_rules"
    " WHERE tablename IN :tables AND schemaname = current_schema()"
).bindparams(bindparam("tables", expanding=True))


def schema_differences(connection: Connection) -> Iterator[tuple[str, str]]:
    """Where the database differs from a new one of this release, and how; on PostgreSQL in its own tables."""
    if connection.dialect.name == "sqlite":
        found, expected = _objects(connection), _new_sqlite()
        for name in sorted(found.keys() | expected.keys()):
            kind = (found.get(name) or expected[name])[0]
            if name not in found:
                yield f"{kind} {name}", "is missing"
            elif name not in expected:
                yield f"{kind} {name}", "is none of this service's"
            elif found[name] != expected[name]:
                yield f"{kind} {name}", f"is {found[name][1]!r}, the migrations make {expected[name][1]!r}"
        return
    for kind, name, table in connection.execute(_POSTGRES, {"tables": [*metadata.tables, "alembic_version"]}):
        yield f"{kind} {name} on {table}", "is none of this service's"
    own = {"include_name": lambda name, kind, _: kind != "table" or name in metadata.tables}
    for difference in compare_metadata(MigrationContext.configure(connection, opts=own), metadata):
        yield "schema", f"differs from what the migrations make: {difference}"


def _objects(connection: Connection) -> dict[str, tuple[str, str]]:
    return {row.name: (row.type, " ".join((row.sql or "").split())) for row in connection.execute(_SQLITE)}


@cache
def _new_sqlite() -> dict[str, tuple[str, str]]:
    engine = create_engine("sqlite://")
    try:
        with engine.begin() as connection:
            upgrade(connection)
            return _objects(connection)
    finally:
        engine.dispose()
