"""How the command line reaches the tokens of a SQLite file that a server has open.

A SQLite file has one writer (see `store.engine`), so a command that finds a server on it leaves a file in
``<database>.inbox/``, which only the server's user may open; the server carries it out within `refresh_seconds` and
leaves the answer there. No secret is in these files: a new token travels as its hash.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bucketplan_core.fields import has_controls
from bucketplan_server.store.errors import CannotOpen

__all__ = ["Command", "Inbox", "NotTaken", "inbox_of"]

_MOST_COMMAND_BYTES = 64 * 1024


class NotTaken(Exception):
    """No server said that it carried the command out; one may be at it, or have stopped amid it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A token to be made (`hash` in hex, `role`, `namespace`, `expires_ns`) or revoked (`hash` None).

    Raises `ValueError` for a text that must not come into the audit log.
    """

    name: str
    actor: str
    reason: str
    hash: str | None = None
    role: str | None = None
    namespace: str | None = None
    expires_ns: int | None = None

    def __post_init__(self) -> None:
        for field in ("name", "actor", "reason", "namespace"):
            value = getattr(self, field)
            if value is not None and has_controls(value, lines=field == "reason"):
                raise ValueError(f"{field}: {value!r} must hold no control characters")


def inbox_of(database: Path) -> Path:
    return database.with_name(database.name + ".inbox")


class Inbox:
    """Commands in a folder; `open` makes it."""

    def __init__(self, database: Path) -> None:
        self._folder = inbox_of(database)

    def open(self) -> None:
        """Make the folder; raises `CannotOpen`."""
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            reason = None if os.access(self._folder, os.R_OK | os.W_OK | os.X_OK) else "Permission denied"
        except OSError as error:
            reason = error.strerror
        if reason is not None:
            raise CannotOpen(
                f"{self._folder} is no folder in which the command line can leave its commands: {reason}; remove it, "
                "or give it to the server's user"
            )

    def taken(self) -> Iterator[tuple[str, Command | None]]:
        """Commands that wait, by id, the oldest first; None for a file that is none."""
        for path in sorted(self._folder.glob("*.command"), key=lambda found: (found.stat().st_mtime_ns, found.name)):
            try:
                content = path.read_bytes()[: _MOST_COMMAND_BYTES + 1]
                command: Command | None = Command(**json.loads(content))
            except (OSError, ValueError, TypeError):
                command = None
            yield path.stem, command

    def answer(self, command: str, error: str | None) -> None:
        """Say that a command was carried out, or why not; it is done with."""
        self._write(f"{command}.answer", {"error": error})
        (self._folder / f"{command}.command").unlink(missing_ok=True)

    def submit(self, command: Command, *, timeout_seconds: float) -> str | None:
        """Leave a command and wait: None when it was carried out, else why it was refused. Raises `NotTaken`."""
        name = secrets.token_hex(8)
        answer = self._folder / f"{name}.answer"
        try:
            fields = {field: getattr(command, field) for field in Command.__dataclass_fields__}
            self._write(f"{name}.command", fields)
        except OSError as error:
            raise NotTaken(
                f"{self._folder} cannot be written: {error.strerror}; run this as the server's user"
            ) from None
        ends = time.monotonic() + timeout_seconds
        while not answer.exists():
            if time.monotonic() > ends:
                (self._folder / f"{name}.command").unlink(missing_ok=True)
                if not answer.exists():
                    raise NotTaken(
                        f"the server did not say within {timeout_seconds:g} s that it carried this out; look at its "
                        "log and at bucketplan-server token list before you repeat it"
                    )
            time.sleep(0.02)
        refused: str | None = json.loads(answer.read_text())["error"]
        answer.unlink()
        return refused

    def _write(self, name: str, content: dict[str, object]) -> None:
        temporary = self._folder / f"{name}.{os.getpid()}.new"
        temporary.write_text(json.dumps(content))
        with contextlib.suppress(OSError):
            temporary.chmod(0o644)
        temporary.rename(self._folder / name)
