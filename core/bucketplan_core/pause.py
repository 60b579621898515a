"""No cyclic garbage collection while thousands of long-lived objects are made at once."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["collector_paused"]


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Collect nothing inside: every full pass would walk all that the process holds, such as the model and its graph,
    and free nothing that was just made.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
