"""One planning process, seen from the server: started with a socket of its own, spoken to, ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from dataclasses import dataclass

from bucketplan_server.planner.frames import HEADER_BYTES, body_length

__all__ = ["Limits", "PlanningProcess"]

_SETTINGS_PREFIX = "BUCKETPLAN_"
_START_SECONDS = 60.0
"""What the first call may take longer: a process answers when it has imported what planning needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one planning process: address space, time of one call, and what it gets beyond that before it is ended."""

    memory_bytes: int
    timeout_seconds: float
    grace_seconds: float


class PlanningProcess:
    """A running planning process; it ends with this one, since nobody else holds the other end of its socket."""

    def __init__(
        self, process: Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limits: Limits
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._limits = limits
        self._has_answered = False

    @classmethod
    async def start(cls, limits: Limits) -> PlanningProcess:
        """Returns as soon as the process runs; raises `OSError` when the system has no room for it."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",  # no module from the directory that the server happens to run in
                    "-m",
                    "bucketplan_server.planner",
                    str(theirs.fileno()),
                    str(limits.memory_bytes),
                    repr(limits.timeout_seconds),
                    stdin=DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env=_environment(),
                )
        except BaseException:
            ours.close()
            raise
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return cls(process, reader, writer, limits)

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None or self._reader.at_eof()

    async def exchange(self, call: bytes) -> bytes:
        """The body of the answer to a framed call; the process is of no more use after an error.

        Raises `EOFError` or `ConnectionError` when the process died, `TimeoutError` when it does not end by itself.
        """
        seconds = self._limits.timeout_seconds + self._limits.grace_seconds
        async with asyncio.timeout(seconds if self._has_answered else seconds + _START_SECONDS):
            self._writer.write(call)
            await self._writer.drain()
            num_bytes = body_length(await self._reader.readexactly(HEADER_BYTES))
            if num_bytes > self._limits.memory_bytes:
                raise ConnectionError(f"an answer of {num_bytes} bytes is more than the process may hold")
            body = await self._reader.readexactly(num_bytes)
        self._has_answered = True
        return body

    async def close(self) -> int:
        """End the process, whatever it does; its exit status (minus the number of the signal)."""
        self._writer.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        return await self._process.wait()


def _environment() -> dict[str, str]:
    """Where this process finds its modules, and no settings: the address of a database may hold a password."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_SETTINGS_PREFIX)}
    return kept | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path and os.pathsep not in path)}
