"""Trains a sharded graph: shards and optimizer state live outside of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from demojob.fsdp import ShardedGraph

__all__ = ["Trainer", "shards_of"]


def shards_of(model: nn.Module, graph: ShardedGraph, rank_of: dict[str, tuple[int, int]]) -> list[Tensor]:
    """This rank's shard of every parameter, copied; `rank_of` gives (rank, size) within each parameter's group."""
    shards = []
    for (name, param), sharded in zip(model.named_parameters(), graph.is_sharded, strict=True):
        rank, size = rank_of[name]
        shards.append((param.detach().chunk(size)[rank] if sharded else param.detach()).clone())
    return shards


@dataclass(slots=True)
class Trainer:
    """AdamW over the shards that a graph computes gradients for."""

    graph: ShardedGraph
    shards: list[Tensor]
    buffers: list[Tensor]
    learning_rate: float = 3e-3
    _optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.shards = [nn.Parameter(shard) for shard in self.shards]
        self._optimizer = torch.optim.AdamW(self.shards, lr=self.learning_rate, weight_decay=0.0, foreach=False)

    def step(self, *batch: Tensor) -> Tensor:
        """One step on this rank's batch; returns its loss before the update."""
        with torch.no_grad():
            loss, *grads = self.graph.gm(*self.shards, *self.buffers, *batch)
        for shard, grad in zip(self.shards, grads, strict=True):
            shard.grad = grad
        self._optimizer.step()
        out: Tensor = loss
        return out
