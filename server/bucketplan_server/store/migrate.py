"""Bringing the tables up to date with the Alembic migrations that ship in the package."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy import Connection

__all__ = ["SchemaTooNew", "current_revision", "head_revision", "upgrade"]

_SCRIPTS = Path(__file__).parent / "migrations"


class SchemaTooNew(Exception):
    """The database was written by a newer release; `found` is its migration."""

    def __init__(self, found: str) -> None:
        self.found = found
        super().__init__(
            f"the database is at migration {found!r}, which this release does not know: it was used by a newer one. "
            "Start that release, or restore a backup made before the upgrade"
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
    """Run what is missing inside the caller's transaction; raises `SchemaTooNew`."""
    found = current_revision(connection)
    if found is not None:
        try:
            ScriptDirectory.from_config(_config()).get_revision(found)
        except CommandError:
            raise SchemaTooNew(found) from None
    if found != head_revision():
        command.upgrade(_config(connection), "head")
