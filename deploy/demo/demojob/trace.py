"""Traces forward and backward of a model into one joint fx graph with its parameters as leading static inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

__all__ = ["JointGraph", "trace_joint"]

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class JointGraph:
    """A traced training step.

    `gm` takes the parameters, the buffers, then the batch, and returns the loss and one gradient a parameter, in the
    order of `param_names`. Nodes after `loss` belong to the backward and carry ``autograd_backward``.
    """

    gm: fx.GraphModule
    param_names: tuple[str, ...]
    num_buffers: int
    loss: fx.Node

    @property
    def param_nodes(self) -> list[fx.Node]:
        return self.gm.graph.find_nodes(op="placeholder")[: len(self.param_names)]


def trace_joint(model: nn.Module, *batch: Tensor) -> JointGraph:
    """The joint graph of one step of `model`, which returns its loss, on a batch of these shapes.

    A parameter that modules share (a tied head) is one input and has one gradient. Raises `ValueError` for a parameter
    that the loss does not depend on.
    """
    param_names = tuple(name for name, _ in model.named_parameters())
    buffer_names = tuple(name for name, _ in model.named_buffers())
    num_params, num_static = len(param_names), len(param_names) + len(buffer_names)

    def step(*inputs: Tensor) -> tuple[Tensor, ...]:
        params = [value.requires_grad_() for value in inputs[:num_params]]
        state = dict(zip((*param_names, *buffer_names), (*params, *inputs[num_params:num_static]), strict=True))
        loss = torch.func.functional_call(model, state, inputs[num_static:])
        grads = torch.autograd.grad(loss, params, allow_unused=True)
        unused = [name for name, grad in zip(param_names, grads, strict=True) if grad is None]
        if unused:
            raise ValueError(f"the loss does not depend on {', '.join(unused)}")
        return (loss.detach(), *grads)

    static = [value.detach() for value in (*model.parameters(), *model.buffers())]
    gm = make_fx(step, tracing_mode="fake")(*static, *batch)
    _drop_detaches(gm)
    gm.graph.eliminate_dead_code()
    loss = gm.graph.output_node().args[0][0]  # type: ignore[index]  # a traced output is a list
    assert isinstance(loss, fx.Node)
    in_backward = False
    for node in gm.graph.nodes:
        if in_backward and node.op == "call_function":
            node.meta["autograd_backward"] = True
        in_backward = in_backward or node is loss
    gm.recompile()
    return JointGraph(gm=gm, param_names=param_names, num_buffers=len(buffer_names), loss=loss)


def _drop_detaches(gm: fx.GraphModule) -> None:
    """Nothing in the traced graph records gradients any more, so a detach is its input."""
    for node in gm.graph.find_nodes(op="call_function", target=_aten.detach.default):
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)
