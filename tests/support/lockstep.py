"""Run one fx graph for all ranks of a simulated job in a single process, node by node.

Collectives are computed across the ranks' values, with the freedom that a communication stream has: a launch may
read its inputs at once or as late as its wait (`late_reads`), and its result is garbage until the wait. A rewrite
that is right must give the same outputs both ways; one that moves a wait past a write of the input does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from bucketplan_client.capture.parse import Collective, is_wait, parse_collective

__all__ = ["run_lockstep"]

_REDUCE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda stacked: stacked.sum(0),
    "avg": lambda stacked: stacked.sum(0) / stacked.shape[0],
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
}


class _InFlight:
    """A launched collective: what each rank passed, and the buffer that its result will be written to."""

    def __init__(self, collective: Collective, inputs: Sequence[torch.Tensor], late_reads: bool) -> None:
        self.collective = collective
        self.late_reads = late_reads
        self.inputs = list(inputs) if late_reads else [value.clone() for value in inputs]


def run_lockstep(
    gm: fx.GraphModule,
    inputs_by_rank: Sequence[Sequence[Any]],
    groups: Mapping[str, Sequence[Sequence[int]]],
    *,
    late_reads: bool = False,
) -> list[Any]:
    """Outputs of `gm` on each rank; `groups` maps a group name to its rank lists (a partition of the ranks)."""
    ranks = range(len(inputs_by_rank))
    values: list[dict[fx.Node, Any]] = [{} for _ in ranks]
    flying: dict[fx.Node, _InFlight] = {}
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for rank in ranks:
        values[rank] = dict(zip(placeholders, inputs_by_rank[rank], strict=True))
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            return [fx.map_arg(node.args[0], values[rank].__getitem__) for rank in ranks]
        collective = parse_collective(node)
        if collective is not None:
            _launch(node, collective, values, flying, late_reads)
            continue
        if is_wait(node) and node.all_input_nodes[0] in flying:
            _wait(node, values, flying, groups)
            continue
        for rank in ranks:
            args = fx.map_arg(node.args, values[rank].__getitem__)
            kwargs = fx.map_arg(node.kwargs, values[rank].__getitem__)
            values[rank][node] = _call(gm, node, args, kwargs)
    raise AssertionError("the graph has no output node")


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


def _launch(
    node: fx.Node,
    collective: Collective,
    values: list[dict[fx.Node, Any]],
    flying: dict[fx.Node, _InFlight],
    late_reads: bool,
) -> None:
    assert collective.input is not None
    inputs = [value[collective.input] for value in values]
    flying[node] = _InFlight(collective, inputs, late_reads)
    for rank, source in enumerate(inputs):
        shape = list(source.shape)
        if collective.op == "all_gather":
            assert collective.group_size is not None
            shape = [shape[0] * collective.group_size, *shape[1:]] if shape else [collective.group_size]
        elif collective.op == "reduce_scatter":
            assert collective.group_size is not None
            shape = [shape[0] // collective.group_size, *shape[1:]]
        result = torch.empty(shape, dtype=source.dtype)
        values[rank][node] = result.fill_(float("nan")) if result.is_floating_point() else result.fill_(77)


def _wait(
    node: fx.Node,
    values: list[dict[fx.Node, Any]],
    flying: dict[fx.Node, _InFlight],
    groups: Mapping[str, Sequence[Sequence[int]]],
) -> None:
    launch = node.all_input_nodes[0]
    work = flying.pop(launch)
    collective = work.collective
    for members in groups[collective.group]:
        inputs = [work.inputs[rank].contiguous() for rank in members]
        if collective.op == "all_gather":
            gathered = torch.cat([value.reshape(-1) for value in inputs])
            results = [gathered] * len(members)
        else:
            assert collective.reduce_op is not None
            reduced = _REDUCE[collective.reduce_op](torch.stack(inputs)).reshape(-1)
            shares = len(members) if collective.op == "reduce_scatter" else 1
            results = list(reduced.chunk(shares)) if shares > 1 else [reduced] * len(members)
        for rank, result in zip(members, results, strict=True):
            target = values[rank][launch]
            target.copy_(result.reshape(target.shape))
    for value in values:
        value[node] = value[launch]
