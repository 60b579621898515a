"""One server a SQLite file: a second one that opens the same file could corrupt it, so it refuses to start."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

__all__ = ["FileLock", "LockHeld"]


class LockHeld(Exception):
    """Another process holds the lock of `database`; `holder` is its process id where it could be read."""

    def __init__(self, database: Path, holder: str) -> None:
        self.database = database
        self.holder = holder
        super().__init__(
            f"{database} is in use by another bucketplan-server (process {holder or 'unknown'}): a SQLite file has one "
            "server. Stop that one, use another file, or use PostgreSQL for several replicas"
        )


class FileLock:
    """An advisory lock on ``<database>.lock``, held until `release` or the end of the process, however that comes."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self._file = -1

    def acquire(self) -> None:
        """Raises `LockHeld` at once if another process has it."""
        path = self._database.with_name(self._database.name + ".lock")
        # Python opens without inheritance, so planning processes do not keep the lock of a killed server.
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(file, 32, 0).decode("ascii", "replace").strip()
            os.close(file)
            raise LockHeld(self._database, holder) from None
        os.ftruncate(file, 0)
        os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
        self._file = file

    def release(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
