"""Small files that a user names: a token, a profile."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

__all__ = ["read_small_file"]


def read_small_file(path: Path, *, most_bytes: int) -> bytes:
    """The content of the regular file `path`, which holds `most_bytes` at most.

    Raises `OSError` for anything else: a device has no end, a named pipe waits for somebody who writes to it.
    """
    # Without O_NONBLOCK the opening of a named pipe would wait too.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        with os.fdopen(handle, "rb", closefd=False) as file:
            data = file.read(most_bytes + 1)
    finally:
        os.close(handle)
    if len(data) > most_bytes:
        raise OSError(errno.EINVAL, f"it is larger than {most_bytes} bytes")
    return data
