"""Ranks as threads of one process over one in-memory store: agreement without processes, for many cases."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from bucketplan_client.errors import Where
from bucketplan_client.store import JobStore


def run_ranks(ranks: Sequence[int], body: Callable[[int, JobStore], Any], *, store: Any = None) -> dict[int, Any]:
    """Call `body` on every rank at once; what each returned, or the exception it raised."""
    base = dist.HashStore() if store is None else store
    outcomes: dict[int, Any] = {}

    def run(rank: int) -> None:
        try:
            outcomes[rank] = body(rank, JobStore(base, prefix="job", where=Where(rank=rank, job="test")))
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes
