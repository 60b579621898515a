"""Whether a SQLite file is whole: SQLite's own check of its pages, indexes and foreign keys.

A damaged index is no error when it is read: rows are just not found. Only this check tells, so it runs before a server
starts and in every verification. It reads on a connection of its own, so that neither the store's deadline nor a caller
that waits for the store's one connection is concerned.
"""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from urllib.parse import quote

__all__ = ["file_damage", "foreign_key_damage"]

_SHOWN = 100


def file_damage(path: Path) -> list[str]:
    """What `PRAGMA integrity_check` finds in the file, at most 100 sentences; empty for a whole or a new file.

    `PRAGMA quick_check` would not do: it skips whether indexes agree with their tables.
    """
    if not path.is_file() or not path.stat().st_size:
        return []
    try:
        with contextlib.closing(_reading(path)) as connection:
            found = [str(row[0]) for row in connection.execute(f"PRAGMA integrity_check({_SHOWN})")]
    except sqlite3.DatabaseError as error:
        return [str(error)]
    return [] if found == ["ok"] else found


def foreign_key_damage(path: Path) -> list[tuple[str, str]]:
    """Rows that name a missing one, at most 100: which row (``table[rowid N]``), and what is wrong with it."""
    try:
        with contextlib.closing(_reading(path)) as connection:
            found = connection.execute("PRAGMA foreign_key_check").fetchmany(_SHOWN)
    except sqlite3.DatabaseError as error:
        return [("database", f"its foreign keys cannot be checked: {error}")]
    return [
        (f"{table}[rowid {rowid}]", f"names a row of {parent} that is missing") for table, rowid, parent, _ in found
    ]


def _reading(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True, timeout=30)
