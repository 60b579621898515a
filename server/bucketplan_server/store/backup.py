"""A copy of a SQLite store beside a running server, whole and on disk before it has its name."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

from bucketplan_server.store.engine import StoreError

__all__ = ["back_up"]


def back_up(source: Path, target: Path) -> int:
    """Copy `source` to `target`, which must not exist; answers the copy's size in bytes.

    The copy is one consistent state, taken in one step by SQLite's online backup. Raises `StoreError`; `target` then
    does not exist.
    """
    if not source.is_file():
        raise StoreError(f"there is no file {source}")
    if target.exists():
        raise StoreError(f"{target} exists; name a new file")
    partial = target.with_name(f"{target.name}.partial")
    try:
        with (
            contextlib.closing(sqlite3.connect(f"file:{source.absolute()}?mode=ro", uri=True)) as reading,
            contextlib.closing(sqlite3.connect(partial)) as writing,
        ):
            reading.backup(writing)
            # A backup in one file: without a log beside it that somebody could forget to copy.
            writing.execute("PRAGMA journal_mode=DELETE")
            (found,) = writing.execute("PRAGMA integrity_check").fetchone()
        if found != "ok":
            raise StoreError(f"the copy is damaged: {found}")
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.rename(target)
        folder = os.open(target.absolute().parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except (sqlite3.Error, OSError) as error:
        raise StoreError(f"the backup to {target} failed: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
    return target.stat().st_size
