"""Real gloo ranks for tests: processes that import torch once and then run one function after another.

    pool = gloo_pool(2)
    values = pool.run("tests.fleet.ranks:add_up", 3)   # one value a rank, in rank order

A function is named by module and name, so that nothing but plain data is pickled. It runs on every rank at once, inside
one process group that lives as long as the pool. A rank that raises fails the call with every rank's traceback; a call
that takes longer than its time limit kills the ranks, and the next call starts new ones.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

__all__ = ["GlooPool", "RankFailure", "gloo_pool"]


class RankFailure(Exception):
    """What the failing ranks raised; `tracebacks` by rank."""

    def __init__(self, tracebacks: dict[int, str]) -> None:
        self.tracebacks = tracebacks
        super().__init__("\n".join(f"--- rank {rank}\n{text}" for rank, text in sorted(tracebacks.items())))


class GlooPool:
    """`size` processes in one gloo process group."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []

    def run(self, function: str, *args: Any, timeout_s: float = 180.0) -> list[Any]:
        """Call `function` (``module:name``) with `args` on every rank; the values they return, in rank order."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        values: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        waiting = dict(enumerate(self._pipes))
        while waiting:
            ready = wait(list(waiting.values()), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                failures |= dict.fromkeys(waiting, f"no answer to {function} within {timeout_s} s")
                break
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                pipe = waiting.pop(rank)
                try:
                    succeeded, value = pipe.recv()
                except EOFError:
                    self._processes[rank].join(15.0)  # its pipe closes a little earlier than it ends
                    succeeded, value = False, f"the process ended with {self._processes[rank].exitcode}"
                if succeeded:
                    values[rank] = value
                else:
                    failures[rank] = value
                    # The others may wait for this one inside a collective.
                    deadline = min(deadline, time.monotonic() + 15.0)
        if failures:
            self.close()
            raise RankFailure(failures)
        return [values[rank] for rank in range(self.size)]

    def close(self) -> None:
        """End the ranks; a later `run` starts new ones."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.support.gloo_ranks"])
        folder = tempfile.mkdtemp(prefix="bucketplan-gloo-")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.size, f"{folder}/store", theirs), daemon=True, name=f"gloo-rank-{rank}"
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            os._exit(0)
        module, _, name = function.partition(":")
        try:
            answer = (True, getattr(importlib.import_module(module), name)(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)


_pools: dict[int, GlooPool] = {}


def gloo_pool(size: int) -> GlooPool:
    """The pool of `size` ranks that all tests of this session share."""
    if size not in _pools:
        _pools[size] = GlooPool(size)
        atexit.register(_pools[size].close)
    return _pools[size]
