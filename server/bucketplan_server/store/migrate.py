"""Bringing the tables up to date with the Alembic migrations that ship in the package."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from bucketplan_server.store.errors import CannotOpen

__all__ = ["SchemaRefused", "SchemaTooNew", "SchemaUnclear", "current_revision", "head_revision", "upgrade"]

_SCRIPTS = Path(__file__).parent / "migrations"


class SchemaRefused(CannotOpen):
    """This release cannot bring the tables of the database up to date."""


class SchemaTooNew(SchemaRefused):
    """The database was written by a newer release; `found` is its migration."""

    def __init__(self, found: str) -> None:
        self.found = found
        super().__init__(
            f"the database is at migration {found!r}, which this release does not know: it was used by a newer one. "
            "Start that release, or restore a backup made before the upgrade"
        )


class SchemaUnclear(SchemaRefused):
    """The table `alembic_version` does not say what the other tables are; `found` is the migration that it names."""

    def __init__(self, found: str | None, detail: str) -> None:
        self.found = found
        says = "names no migration" if found is None else f"says {found!r}"
        super().__init__(
            f"the table alembic_version {says}, but the tables of a later migration are there ({detail}): it was "
            "changed or emptied. Check the database with bucketplan-server verify and restore a backup; where only "
            "that table was lost, write the migration that `bucketplan-server migrate` prints for a new database of "
            "the release that last served it into its column version_num"
        )


def _config(connection: Connection | None = None) -> Config:
    config = Config()
    config.set_main_option("script_location", str(_SCRIPTS).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def head_revision() -> str:
    """The migration that this release brings a database to."""
    head = ScriptDirectory.from_config(_config()).get_current_head()
    assert head is not None
    return head


def current_revision(connection: Connection) -> str | None:
    """The migration that the database is at, None for an empty one."""
    return MigrationContext.configure(connection).get_current_revision()


def upgrade(connection: Connection) -> None:
    """Run what is missing inside the caller's transaction; raises `SchemaTooNew`, `SchemaUnclear`."""
    try:
        found = current_revision(connection)
    except CommandError as error:
        raise SchemaUnclear(None, str(error)) from None
    if not isinstance(found, str | None):
        raise SchemaUnclear(repr(found), "it is no text")
    if found is not None:
        try:
            ScriptDirectory.from_config(_config()).get_revision(found)
        except CommandError:
            raise SchemaTooNew(found) from None
    if found != head_revision():
        try:
            command.upgrade(_config(connection), "head")
        except DBAPIError as error:
            detail = str(error.orig).splitlines()[0]
            if not any(said in detail for said in ("already exists", "duplicate column")):
                raise
            raise SchemaUnclear(found, detail) from None
