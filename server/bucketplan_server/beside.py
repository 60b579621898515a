"""Which work on a call's bytes leaves the event loop.

The loop answers known plans; while it decodes or hashes for one caller, all others wait. So what may hold it for more
than a few milliseconds goes to a thread. On one core of a small, busy machine the hand-over took 0.1 ms and the largest
work that stays 0.7 ms to hash, 4 ms to decode, 2 ms to read reports and 6 ms to compare them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

__all__ = ["ANSWER_BYTES", "DECODED_BYTES", "HASHED_BYTES", "READ_REPORTS", "SORTED_REPORTS", "beside", "beside_now"]

HASHED_BYTES = 2**20
"""Bytes hashed on the loop (hashlib lets the loop go on while a thread hashes)."""
DECODED_BYTES = 2**15
"""Bytes of MessagePack or JSON decoded on the loop."""
ANSWER_BYTES = 2**18
"""Bytes of a planning process's answer read on the loop: most are the bytes of a plan, which are not decoded."""
READ_REPORTS = 100
"""Reports of ranks whose fields are read on the loop."""
SORTED_REPORTS = 200
"""Reports of ranks compared on the loop with those that are known under their names."""

P = ParamSpec("P")
T = TypeVar("T")


_THREADS = ThreadPoolExecutor(2, thread_name_prefix="beside")
"""Threads share one interpreter: more are no faster, and each lengthens the loop's wait for its turn."""


async def beside(is_large: bool, work: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """What `work` answers or raises: from a thread where it is large, two at once, at once where it is not."""
    if is_large:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(_THREADS, partial(work, *arguments, **options))
    return work(*arguments, **options)


async def beside_now(is_large: bool, work: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """As `beside`, for work inside a transaction, which others wait for: it waits for no other work."""
    return await asyncio.to_thread(work, *arguments, **options) if is_large else work(*arguments, **options)
