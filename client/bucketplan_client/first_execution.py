"""A comparison inside the compiled graph: right before it runs for the first time, whoever compiled it and when.

A compile cache calls no hook, so what it replays can only be compared when it runs. Each rewritten graph gets one
operator in front of its collectives that carries the digests of what the graph will issue; it is compiled and cached
with the graph. The first time that a process meets digests it hands them to the comparison that is installed, and never
again, so a step costs one call of an operator that returns at once.

The operator claims to write a tensor of its own that nothing else reads: that is what keeps compilers from dropping it.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

__all__ = ["FirstExecution", "comparing", "insert_comparison"]

FirstExecution = Callable[[Mapping[str, str]], None]
"""Compares the group digests (by role) of a graph that is about to run with those of other ranks; raises on others."""

_library = torch.library.Library("bucketplan", "DEF")
_library.define("first_execution(Tensor(a!) witness, str digests) -> ()")


@dataclass
class _Installed:
    compare: FirstExecution
    fail: Callable[[Exception], None]
    seen: set[str] = field(default_factory=set)
    locks: dict[str, threading.Lock] = field(default_factory=dict)


_installed: list[_Installed] = []


def _first_execution(_witness: torch.Tensor, digests: str) -> None:
    if not _installed or digests in _installed[-1].seen:
        return
    current = _installed[-1]
    # A second thread that runs the graph waits for the first one's comparison. A graph that was refused is not seen:
    # whoever catches the error and runs it again is refused again.
    with current.locks.setdefault(digests, threading.Lock()):
        if digests in current.seen:
            return
        try:
            current.compare(json.loads(digests))
        except Exception as error:
            current.fail(error)
        else:
            current.seen.add(digests)


_library.impl("first_execution", _first_execution, "CompositeExplicitAutograd")
_library.impl("first_execution", lambda *_: None, "Meta")


@contextlib.contextmanager
def comparing(compare: FirstExecution, fail: Callable[[Exception], None]) -> Iterator[None]:
    """Inside, graphs of this process that carry digests are compared before they first run; `fail` gets the failure."""
    entry = _Installed(compare, fail)
    _installed.append(entry)
    try:
        yield
    finally:
        _installed.remove(entry)


def insert_comparison(graph: fx.Graph, digests: Mapping[str, str]) -> None:
    """Put the comparison of `digests` before everything that `graph` calls."""
    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    values = (node.meta.get("val") for node in graph.nodes)
    fake = next((value for value in values if isinstance(value, FakeTensor)), None)
    with graph.inserting_before(first):
        witness = graph.call_function(
            torch.ops.aten.full.default,
            ([1], 0),
            {"dtype": torch.uint8, "device": torch.device("cpu"), "pin_memory": False},
        )
        text = json.dumps(dict(sorted(digests.items())))
        call = graph.call_function(torch.ops.bucketplan.first_execution.default, (witness, text))
    call.meta["val"] = None
    if fake is not None:
        with unset_fake_temporarily():
            meta = torch.empty(1, dtype=torch.uint8, device="meta")
        witness.meta["val"] = FakeTensor(fake.fake_mode, meta, torch.device("cpu"))
