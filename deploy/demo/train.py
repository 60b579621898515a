"""One rank of the demo's job, started by torchrun: trains one model several ways, each bucketed as the server says.

The ways take turns step by step on the same batches, so that their step times are measured side by side. Rank 0 writes
what the ranks found to ``result.json`` in the output folder.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import logging
import os
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from demojob.bucketing import Bucketed, bucket_graph
from demojob.corpus import read_corpus, sample_batch
from demojob.fsdp import FsdpPolicy, RankGroup, ShardedGraph, shard_graph
from demojob.model import Transformer, TransformerConfig
from demojob.trace import trace_joint
from demojob.training import Trainer, shards_of
from torch import Tensor

from bucketplan_client import PlanClient
from bucketplan_client.cache import PlanCache

WAYS = ("none", "size", "module")
BATCH = 4
SEED = 1
# The first steps warm up allocators and connections.
NUM_UNTIMED_STEPS = 2


@dataclass(slots=True)
class Way:
    """One way of bucketing, with the job that trains under it and what came of it."""

    bucketed: Bucketed
    trainer: Trainer
    losses: list[float] = field(default_factory=list)
    step_ns: list[int] = field(default_factory=list)


def main() -> None:
    args = _arguments()
    logging.basicConfig(level=logging.WARNING)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    try:
        _train(args)
    finally:
        dist.destroy_process_group()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", required=True, help="address of the planning server")
    parser.add_argument("--cache", type=Path, required=True, help="folder of this host's plan cache")
    parser.add_argument("--out", type=Path, required=True, help="folder for result.json")
    parser.add_argument("--steps", type=int, default=20)
    return parser.parse_args()


def _train(args: argparse.Namespace) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    config = TransformerConfig()
    torch.manual_seed(SEED)
    model = Transformer(config)
    corpus = read_corpus()

    def batch(step: int) -> tuple[Tensor, Tensor]:
        return sample_batch(corpus, step=step, rank=rank, batch=BATCH, num_tokens=config.max_tokens)

    _say(f"tracing forward and backward of {sum(p.numel() for p in model.parameters()):,} parameters")
    graph = shard_graph(trace_joint(model, *batch(0)), _policy(world))
    cache = PlanCache(args.cache)
    ways: dict[str, Way] = {}
    with PlanClient(args.server, rank=rank) as client:
        for name in WAYS:
            own = _copy_of(graph)
            bucketed = bucket_graph(own, name, model=model, client=client, cache=cache)
            shards = shards_of(model, own, dict.fromkeys(own.param_names, (rank, world)))
            ways[name] = Way(bucketed, Trainer(own, shards, list(model.buffers())))
            _say(
                f"{name:>6}: plan {bucketed.signature[:12]}, "
                f"{bucketed.num_before} collectives became {bucketed.num_after} a step"
            )
    for step in range(args.steps):
        for way in ways.values():
            dist.barrier()
            started = time.monotonic_ns()
            loss = way.trainer.step(*batch(step))
            if step >= NUM_UNTIMED_STEPS:
                way.step_ns.append(time.monotonic_ns() - started)
            dist.all_reduce(loss, op=dist.ReduceOp.AVG)
            way.losses.append(loss.item())
        if step % 5 == 0 or step == args.steps - 1:
            _say(f"step {step:>3}: " + ", ".join(f"{name} {way.losses[-1]:.4f}" for name, way in ways.items()))
    found = {name: _findings(way) for name, way in ways.items()}
    by_rank: list[Any] = [None] * world
    dist.all_gather_object(by_rank, found)
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "result.json").write_text(json.dumps(by_rank, indent=1))


def _policy(world: int) -> FsdpPolicy:
    """Experts in a group of their own; blocks are gathered again for the backward, the root's parameters are kept."""
    ranks = list(range(world))
    dense, expert = (
        RankGroup(role=role, name=dist.new_group(ranks, group_desc=role).group_name, size=world)
        for role in ("fsdp", "fsdp_expert")
    )
    return FsdpPolicy(
        group_of=lambda name: expert if ".experts." in name else dense,
        reshard=lambda name: name.startswith("blocks."),
    )


def _copy_of(graph: ShardedGraph) -> ShardedGraph:
    return ShardedGraph(
        gm=copy.deepcopy(graph.gm), param_names=graph.param_names, is_sharded=graph.is_sharded, roles=graph.roles
    )


def _findings(way: Way) -> dict[str, Any]:
    digest = hashlib.sha256()
    for shard in way.trainer.shards:
        digest.update(shard.detach().numpy().tobytes())
    return way.bucketed.facts() | {
        "losses": way.losses,
        "step_ns": way.step_ns,
        "shards_sha256": digest.hexdigest(),
    }


def _say(line: str) -> None:
    if dist.get_rank() == 0:
        print(f"    {line}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
