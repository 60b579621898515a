"""Run fx graphs for all ranks of a simulated job in a single process, node by node.

Collectives are computed across the ranks' values, with the freedom that a communication stream has: a launch may
read its inputs at once or as late as its wait (`late_reads`), and its result is garbage until the wait. A rewrite
that is right must give the same outputs both ways; one that moves a wait past a write of the input does not.

Ranks may run different graphs (uneven shards); they must then issue the same collectives in the same order, as on a
real communicator.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from bucketplan_client.capture.ops import packet_of
from bucketplan_client.capture.parse import Collective, group_key, is_wait, parse_collective

__all__ = ["run_lockstep"]

_REDUCE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda stacked: stacked.sum(0),
    "avg": lambda stacked: stacked.sum(0) / stacked.shape[0],
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
    "product": lambda stacked: stacked.prod(0),
}


@dataclass(eq=False, slots=True)
class _Launch:
    """One rank's part of a collective in flight: what it passed, and the buffer that its result is written to."""

    collective: Collective
    source: torch.Tensor
    result: torch.Tensor


@dataclass(eq=False, slots=True)
class _Wait:
    launch: _Launch


_Program = list[tuple[fx.Node, Collective | None]]
_Rank = Generator[_Launch | _Wait, None, Any]


def run_lockstep(
    gm: fx.GraphModule | Sequence[fx.GraphModule],
    inputs_by_rank: Sequence[Sequence[Any]],
    groups: Mapping[Any, Sequence[Sequence[int]]],
    *,
    late_reads: bool = False,
) -> list[Any]:
    """Outputs on each rank; `groups` maps a group's name (or key) to its rank lists, a partition of the ranks.

    `gm` is one graph for all ranks or one for each. Inputs are used as they are, so graphs that write them write
    the caller's tensors.
    """
    modules = [gm] * len(inputs_by_rank) if isinstance(gm, fx.GraphModule) else list(gm)
    programs: dict[fx.GraphModule, _Program] = {}
    for module in modules:
        if module not in programs:
            programs[module] = [(node, parse_collective(node)) for node in module.graph.nodes]
    ranks = [
        _run_rank(module, programs[module], inputs, late_reads)
        for module, inputs in zip(modules, inputs_by_rank, strict=True)
    ]
    outputs: list[Any] = []
    while not outputs:
        events = [_advance(rank, outputs) for rank in ranks]
        if outputs:
            assert not any(events), f"{len(outputs)} ranks are done, others wait in {events}"
        elif isinstance(events[0], _Launch):
            _assert_same([event.collective for event in events if isinstance(event, _Launch)], len(ranks))
        else:
            _complete([event.launch for event in events if isinstance(event, _Wait)], len(ranks), groups)
    return outputs


def _advance(rank: _Rank, outputs: list[Any]) -> _Launch | _Wait | None:
    try:
        return next(rank)
    except StopIteration as stop:
        outputs.append(stop.value)
        return None


def _run_rank(gm: fx.GraphModule, program: _Program, inputs: Sequence[Any], late_reads: bool) -> _Rank:
    values: dict[fx.Node, Any] = {}
    flying: dict[fx.Node, _Launch] = {}
    given = iter(inputs)
    for node, collective in program:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "output":
            return fx.map_arg(node.args[0], values.__getitem__)
        elif collective is not None:
            assert collective.input is not None
            source = values[collective.input]
            result = _garbage(source, collective)
            flying[node] = _Launch(collective, source if late_reads else source.clone(), result)
            values[node] = result
            yield flying[node]
        elif is_wait(node) and node.all_input_nodes[0] in flying:
            launch = node.all_input_nodes[0]
            yield _Wait(flying.pop(launch))
            values[node] = values[launch]
        elif node.op == "call_function" and packet_of(node) is torch.ops._dtensor.mesh_get_process_group:
            values[node] = None
        else:
            args = [_resolve(arg, values) for arg in node.args]
            kwargs = {key: _resolve(arg, values) for key, arg in node.kwargs.items()}
            values[node] = _call(gm, node, args, kwargs)
    raise AssertionError("the graph has no output node")


def _resolve(arg: Any, values: Mapping[fx.Node, Any]) -> Any:
    if isinstance(arg, fx.Node):
        return values[arg]
    return fx.map_arg(arg, values.__getitem__) if isinstance(arg, list | tuple | dict) else arg


def _call(gm: fx.GraphModule, node: fx.Node, args: Any, kwargs: Any) -> Any:
    if node.op == "get_attr":
        found: Any = gm
        for part in str(node.target).split("."):
            found = getattr(found, part)
        return found
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _garbage(source: torch.Tensor, collective: Collective) -> torch.Tensor:
    shape = list(source.shape)
    if collective.op == "all_gather":
        assert collective.group_size is not None
        shape = [shape[0] * collective.group_size, *shape[1:]] if shape else [collective.group_size]
    elif collective.op == "reduce_scatter":
        assert collective.group_size is not None
        shape = [shape[0] // collective.group_size, *shape[1:]]
    result = torch.empty(shape, dtype=source.dtype)
    if result.dtype.is_floating_point or result.dtype.is_complex:
        return result.fill_(float("nan"))
    return result.fill_(77 if result.dtype is not torch.bool else 1)


def _assert_same(collectives: Sequence[Collective], num_ranks: int) -> None:
    assert len(collectives) == num_ranks, "one rank launches where another waits"
    first = collectives[0]
    for other in collectives:
        same = (other.op, other.group_size, other.reduce_op) == (first.op, first.group_size, first.reduce_op)
        assert same, f"ranks launch different collectives: {first} and {other}"


def _complete(launches: Sequence[_Launch], num_ranks: int, groups: Mapping[Any, Sequence[Sequence[int]]]) -> None:
    assert len(launches) == num_ranks, "one rank waits where another launches"
    for members in groups[group_key(launches[0].collective.group)]:
        collective = launches[members[0]].collective
        inputs = [launches[rank].source.contiguous() for rank in members]
        if collective.op == "all_gather":
            results = [torch.cat([value.reshape(-1) for value in inputs])] * len(members)
        else:
            assert collective.reduce_op is not None
            reduced = _REDUCE[collective.reduce_op](torch.stack(inputs)).reshape(-1)
            shares = len(members) if collective.op == "reduce_scatter" else 1
            size = reduced.numel() // shares
            results = [reduced.narrow(0, share * size, size) for share in range(shares)] * (len(members) // shares)
        for rank, result in zip(members, results, strict=True):
            buffer = launches[rank].result
            buffer.copy_(result.reshape(buffer.shape))
