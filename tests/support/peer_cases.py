"""Graphs that the regression tests of other passes' defects start from."""

from __future__ import annotations

import torch
from torch import fx

from tests.support.fxgraphs import GraphBuilder, aten

__all__ = ["GRID", "RANKS", "WORLD", "copy_of", "gathered", "many_groups", "module_of", "parameters", "plain", "read"]

RANKS = 4
WORLD = {"dp": [list(range(RANKS))]}
GRID = {"row": [[0, 1], [2, 3]], "column": [[0, 2], [1, 3]], "dp": [[0, 1, 2, 3]]}


def parameters(build: GraphBuilder, count: int, dtype: torch.dtype = torch.float32) -> list[fx.Node]:
    return [build.tensor(f"w{index}", (1 + index % 3, 3), dtype) for index in range(count)]


def gathered(build: GraphBuilder, source: fx.Node, group: str = "dp", size: int = RANKS) -> fx.Node:
    return build.wait(build.all_gather(source, size, group))


def read(build: GraphBuilder, *nodes: fx.Node) -> list[fx.Node]:
    return [build.call(aten.mul.Tensor, node, 2) for node in nodes]


def plain(count: int = 3) -> GraphBuilder:
    """All gathers first, then their uses, so that everything can be fused."""
    build = GraphBuilder()
    waits = [gathered(build, param) for param in parameters(build, count)]
    build.module(*read(build, *waits))
    return build


def module_of(build: GraphBuilder) -> fx.GraphModule:
    return fx.GraphModule(build.root, build.graph)


def copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, graph)


def many_groups(count: int = 8) -> tuple[GraphBuilder, fx.GraphModule]:
    """Gathers and reductions that alternate between groups and dtypes."""
    build = GraphBuilder()
    params = [
        build.tensor(f"w{index}", (1 + index % 3, 2), (torch.float32, torch.bfloat16)[index // 2 % 2])
        for index in range(count)
    ]
    groups = ("row", "column")
    waits = [gathered(build, param, groups[index % 2], 2) for index, param in enumerate(params)]
    used = read(build, *waits)
    reduced = [build.wait(build.reduce_scatter(value, "sum", 2, groups[index % 2])) for index, value in enumerate(used)]
    return build, build.module(*reduced)
