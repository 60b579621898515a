"""A call in a thread of its own, for calls that nothing can interrupt: whoever waits for one can give up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["in_background"]

T = TypeVar("T")


def in_background(call: Callable[[], T], *, name: str) -> Future[T]:
    """Start `call`; its result or what it raised. The thread is a daemon: a process that ends does not wait for it."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = call()
        except BaseException as error:  # whatever it is, the one who waits is to see it
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
