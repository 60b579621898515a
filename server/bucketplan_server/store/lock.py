"""One server a SQLite file: a second one that opens the same file could corrupt it, so it refuses to start."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from bucketplan_server.store.errors import CannotOpen

__all__ = ["FileLock", "LockHeld", "SeveralNames"]


class LockHeld(CannotOpen):
    """Another process holds the lock of `database`; `holder` is its process id where it could be read."""

    def __init__(self, database: Path, holder: str) -> None:
        self.database = database
        self.holder = holder
        super().__init__(
            f"{database} is in use by another bucketplan-server (process {holder or 'unknown'}): a SQLite file has one "
            "server. Stop that one, use another file, or use PostgreSQL for several replicas"
        )


class SeveralNames(CannotOpen):
    """`database` is one of `num_names` hard links to a file: SQLite keeps a log beside each, which corrupts it."""

    def __init__(self, database: Path, num_names: int) -> None:
        self.database = database
        self.num_names = num_names
        super().__init__(
            f"{database} has {num_names} names (hard links), and SQLite would keep one log beside each of them. "
            "Remove the other names, or copy the file with bucketplan-server backup"
        )


class FileLock:
    """An advisory lock on ``<database>.lock``, held until `release` or the end of the process, however that comes.

    Symbolic links lead to the lock of the file itself; a file of several names is refused.
    """

    def __init__(self, database: Path) -> None:
        self._database = database
        self._file = -1

    def acquire(self) -> None:
        """Raises `LockHeld` at once if another process has it, and `SeveralNames` for a file with hard links."""
        database = self._database.resolve()
        num_names = database.stat().st_nlink if database.exists() else 1
        if num_names > 1:
            raise SeveralNames(database, num_names)
        path = database.with_name(database.name + ".lock")
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
