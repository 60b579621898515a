"""Functions that gloo ranks run: the demo's model traced, sharded and trained beside plain eager training."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.fsdp_model import (
    SMALL,
    VIEWS,
    FsdpPolicy,
    RankGroup,
    ShardedGraph,
    Trainer,
    Transformer,
    TransformerConfig,
    read_corpus,
    sample_batch,
    shard_graph,
    shards_of,
    trace_joint,
)

BATCH = 2


@lru_cache
def group_over(ranks: tuple[tuple[int, ...], ...], role: str) -> RankGroup:
    """This rank's group among `ranks`, one new group a tuple; made once and kept. All ranks call in one order."""
    mine: RankGroup | None = None
    for members in ranks:
        group = dist.new_group(list(members), group_desc=role)
        if dist.get_rank() in members:
            mine = RankGroup(role=role, name=group.group_name, size=len(members))
    assert mine is not None
    return mine


def policy_of(layout: str) -> tuple[FsdpPolicy, dict[str, tuple[int, int]]]:
    """A sharding policy by name, and by role (rank, size) of this rank in its group.

    ``two_groups``: dense and expert parameters over all ranks, each in a group of its own. ``hybrid``: experts over
    pairs of neighbours, replicated across the pairs.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    everyone = tuple(range(world))
    dense = group_over((everyone,), "fsdp")
    if layout == "two_groups":
        expert = group_over((everyone,), "fsdp_expert")
        return (
            FsdpPolicy(
                group_of=lambda name: expert if ".experts." in name else dense,
                reshard=lambda name: name.startswith("blocks."),
            ),
            {"fsdp": (rank, world), "fsdp_expert": (rank, world)},
        )
    assert layout == "hybrid"
    expert = group_over(tuple((a, a + 1) for a in range(0, world, 2)), "fsdp_expert")
    replicas = group_over(tuple(tuple(range(a, world, 2)) for a in (0, 1)), "expert_replicas")
    return (
        FsdpPolicy(
            group_of=lambda name: expert if ".experts." in name else dense,
            replicas_of=lambda name: replicas if ".experts." in name else None,
            reshard=lambda name: name.startswith("blocks."),
            reduce_last=True,
        ),
        {"fsdp": (rank, world), "fsdp_expert": (rank % 2, 2)},
    )


def batch_of(config: TransformerConfig, step: int, rank: int) -> tuple[Tensor, Tensor]:
    corpus = read_corpus() % config.vocab_size
    return sample_batch(corpus, step=step, rank=rank, batch=BATCH, num_tokens=config.max_tokens)


def sharded_job(config: TransformerConfig, layout: str) -> tuple[Transformer, ShardedGraph, Trainer]:
    """One rank's whole job: the model it started from, its sharded graph, and a trainer over its shards."""
    torch.manual_seed(0)
    model = Transformer(config)
    policy, ranks = policy_of(layout)
    graph = shard_graph(trace_joint(model, *batch_of(config, 0, 0)), policy)
    rank_of = {name: ranks[policy.group_of(name).role] for name in graph.param_names}
    trainer = Trainer(graph=graph, shards=shards_of(model, graph, rank_of), buffers=list(model.buffers()))
    return model, graph, trainer


def train_beside_eager(config: TransformerConfig, layout: str, num_steps: int) -> dict[str, Any]:
    """Losses of this rank under sharded training and under plain eager training on all ranks' batches."""
    model, graph, trainer = sharded_job(config, layout)
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0, foreach=False)
    sharded, eager = [], []
    for step in range(num_steps):
        sharded.append(trainer.step(*batch_of(config, step, rank)).item())
        losses = [model(*batch_of(config, step, other)) for other in range(world)]
        eager.append(losses[rank].item())
        optimizer.zero_grad()
        (torch.stack(losses).sum() / world).backward()
        optimizer.step()
    launches = [node for node in graph.gm.graph.nodes if "comm_type" in node.meta]
    return {
        "sharded": sharded,
        "eager": eager,
        "params": graph.param_names,
        "launches": [(node.meta["comm_type"], node.meta["param_name"], node.meta["comm_group"]) for node in launches],
        "readers": [_readers_of(node) for node in launches],
    }


def _readers_of(launch: Any) -> tuple[str, str, set[str]]:
    """Kind and parameter of a collective, and in which part of the graph its result is read, views looked through."""
    (wait,) = launch.users
    seen = [wait]
    for node in seen:
        seen.extend(user for user in node.users if user.target in VIEWS and user not in seen)
    readers = {user for node in seen for user in node.users if user not in seen}
    parts = {
        "output" if user.op == "output" else "backward" if user.meta.get("autograd_backward") else "forward"
        for user in readers
    }
    return launch.meta["comm_type"], launch.meta["param_name"], parts


def small_beside_eager(layout: str, tied_head: bool, num_steps: int) -> dict[str, Any]:
    from dataclasses import replace

    return train_beside_eager(replace(SMALL, tied_head=tied_head), layout, num_steps)
