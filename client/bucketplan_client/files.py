"""Small files that somebody else may have put there: a token, a profile, what a cache holds."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

__all__ = ["UnfitFile", "read_small_file"]


class UnfitFile(OSError):
    """A file that is not read, for `reason`: it is no regular file, or too large."""

    def __init__(self, path: Path, reason: str) -> None:
        self.reason = reason
        super().__init__(errno.EINVAL, reason, str(path))


def read_small_file(path: Path, *, most_bytes: int) -> bytes:
    """The content of the regular file `path`, which holds `most_bytes` at most.

    Raises `UnfitFile` for anything else: a device has no end, a named pipe waits for somebody who writes to it. And
    `OSError` for what the system refuses.
    """
    # Without O_NONBLOCK the opening of a named pipe would wait too.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise UnfitFile(path, "it is no regular file")
        with os.fdopen(handle, "rb", closefd=False) as file:
            data = file.read(most_bytes + 1)
    finally:
        os.close(handle)
    if len(data) > most_bytes:
        raise UnfitFile(path, f"it is larger than {most_bytes} bytes")
    return data
