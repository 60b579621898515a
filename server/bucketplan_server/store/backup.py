"""A copy of a SQLite store beside a running server, whole and on disk before it has its name."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
from pathlib import Path
from urllib.parse import quote

from bucketplan_server.store.engine import StoreDamaged, StoreError, is_file

__all__ = ["back_up"]


def back_up(source: Path, target: Path) -> int:
    """Copy `source` to `target`, which must not exist; answers the copy's size in bytes.

    The copy is one consistent state, taken in one step by SQLite's online backup, and readable by its owner alone.
    Raises `StoreError`; `target` then does not exist.
    """
    if not is_file(source):
        raise StoreError(f"there is no file {source}; name another with --database (BUCKETPLAN_DATABASE)")
    if target.exists() or target.is_symlink():
        raise StoreError(f"{target} exists; name a new file")
    folder = target.absolute().parent
    if not folder.is_dir():
        raise StoreError(f"the folder {folder} does not exist; make it, or name another file")
    try:
        partial = _new_file(folder, target.name)
    except OSError as error:
        raise StoreError(f"the backup cannot be written to {folder}: {error.strerror}; name another file") from None
    try:
        with (
            contextlib.closing(sqlite3.connect(f"file:{quote(str(source.absolute()))}?mode=ro", uri=True)) as reading,
            contextlib.closing(sqlite3.connect(partial)) as writing,
        ):
            reading.backup(writing)
            # A backup in one file: without a log beside it that somebody could forget to copy.
            writing.execute("PRAGMA journal_mode=DELETE")
            (found,) = writing.execute("PRAGMA integrity_check").fetchone()
        if found != "ok":
            raise StoreDamaged(found)
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.rename(target)
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
    except (sqlite3.Error, OSError) as error:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_NOTADB:
            raise StoreError(f"{source} is no SQLite database; name another with --database") from None
        raise StoreError(
            f"the backup of {source} to {target} failed: {error}. See that the one can be read and the other's folder "
            "written and that its disk has room, then repeat it"
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    return target.stat().st_size


def _new_file(folder: Path, name: str) -> Path:
    file, path = tempfile.mkstemp(prefix=f".{name}.", suffix=".partial", dir=folder)
    os.close(file)
    return Path(path)
