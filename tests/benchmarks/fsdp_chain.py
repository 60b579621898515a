"""A synthetic FSDP step of any size: shard > cast > all-gather > wait > mm forward, mm > cast > reduce-scatter
backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = ["fsdp_chain"]

_c10d = torch.ops._c10d_functional
_aten = torch.ops.aten


def fsdp_chain(num_params: int, *, ranks: int = 8, width: int = 1024, reduce: bool = True) -> fx.GraphModule:
    """13 nodes a parameter (7 without reduce-scatters), fake values on all; each parameter `width` x `width` in
    bf16.
    """
    graph, mode = fx.Graph(), FakeTensorMode()

    def call(target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = graph.call_function(target, args, kwargs)

        def value(argument: fx.Node) -> Any:
            return argument.meta["val"]

        with mode:
            node.meta["val"] = target(*fx.map_arg(args, value), **fx.map_arg(kwargs, value))
        return node

    def placeholder(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> fx.Node:
        node = graph.placeholder(name)
        with mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    shards = [placeholder(f"p{i}", (width // ranks, width), torch.float32) for i in range(num_params)]
    value = placeholder("x", (16, width), torch.bfloat16)
    activations = []
    for shard in shards:
        cast = call(_aten._to_copy.default, shard, dtype=torch.bfloat16)
        gathered = call(_c10d.wait_tensor.default, call(_c10d.all_gather_into_tensor.default, cast, ranks, "0"))
        activations.append(value)
        value = call(_aten.relu.default, call(_aten.mm.default, value, call(_aten.t.default, gathered)))
    outputs = [value]
    gradient = value
    for activation in reversed(activations) if reduce else ():
        weight = call(_aten.mm.default, call(_aten.t.default, gradient), activation)
        wide = call(_aten._to_copy.default, weight, dtype=torch.float32)
        outputs.append(
            call(_c10d.wait_tensor.default, call(_c10d.reduce_scatter_tensor.default, wide, "avg", ranks, "0"))
        )
        gradient = call(_aten.mul.Tensor, gradient, activation)
    graph.output(tuple(outputs))
    return fx.GraphModule(torch.nn.Module(), graph)
