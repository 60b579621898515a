"""What one gloo rank does in the tests of the bucketing pass; run by `tests.support.gloo_pool`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from bucketplan_client import passes
from bucketplan_client.errors import ClientError
from bucketplan_client.opening import open_attempt
from bucketplan_client.passes import FsdpBucketingPass, LocalPlans
from bucketplan_client.transport import PlanClient
from bucketplan_core import Options, Plan, Request
from bucketplan_core.profile import CostProfile
from tests.support.fsdp_model import (
    SMALL,
    FsdpPolicy,
    RankGroup,
    ShardedGraph,
    Transformer,
    read_corpus,
    sample_batch,
    shard_graph,
    shards_of,
    trace_joint,
)

_groups: dict[tuple[str, tuple[int, ...]], RankGroup] = {}


def _group(role: str, partitions: Sequence[Sequence[int]]) -> RankGroup:
    """This rank's group of `role`; every rank makes every group, as torch.distributed wants it."""
    rank = dist.get_rank()
    for members in partitions:
        key = (role, tuple(members))
        if key not in _groups:
            made = dist.new_group(list(members))
            name = made.group_name if rank in members else "not a member"
            _groups[key] = RankGroup(role=role, name=name, size=len(members))
    return next(_groups[(role, tuple(members))] for members in partitions if rank in members)


def sharded_model(*, expert_size: int | None = None) -> tuple[ShardedGraph, list[Any]]:
    """The small model sharded over the world, experts over groups of `expert_size`, and this rank's inputs."""
    world, rank = dist.get_world_size(), dist.get_rank()
    size = expert_size or world
    dense = _group("fsdp", [range(world)])
    expert = _group("fsdp_expert", [range(start, start + size) for start in range(0, world, size)])
    torch.manual_seed(0)
    model = Transformer(SMALL)
    batch = sample_batch(read_corpus(), step=0, rank=rank, batch=2, num_tokens=SMALL.max_tokens)
    graph = shard_graph(
        trace_joint(model, *batch), FsdpPolicy(group_of=lambda name: expert if ".experts." in name else dense)
    )
    rank_of = {
        name: (rank % size, size) if ".experts." in name else (rank, world) for name, _ in model.named_parameters()
    }
    inputs = [*shards_of(model, graph, rank_of), *(buffer.clone() for buffer in model.buffers()), *batch]
    return graph, inputs


def _options(cap_bytes: int = 20_000) -> Options:
    return Options(strategy="size", planner="size/1", bucket_cap_bytes=cap_bytes, first_bucket_cap_bytes=cap_bytes)


def _nodes(gm: fx.GraphModule) -> list[str]:
    return [node.format_node() or "" for node in gm.graph.nodes]


class _Broken:
    def __init__(self, message: str = "no space left on this rank") -> None:
        self._message = message

    def plan(self, request: Request, profile: CostProfile | None = None) -> Plan:
        raise OSError(self._message)


class _Interrupted:
    def plan(self, request: Request, profile: CostProfile | None = None) -> Plan:
        raise KeyboardInterrupt


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def apply_from_server(address: str) -> dict[str, Any]:
    """One pass with plans of the server at `address`; what it did and whether results stayed as they were."""
    graph, inputs = sharded_model()
    with torch.no_grad():
        before = graph.gm(*inputs)
    lines = _Lines()
    logging.getLogger("bucketplan_client.passes").addHandler(lines)
    logging.getLogger("bucketplan_client.passes").setLevel(logging.INFO)
    try:
        with PlanClient(address, rank=dist.get_rank()) as client:
            result = FsdpBucketingPass(client, options=_options(), roles=graph.roles)(graph.gm)
    finally:
        logging.getLogger("bucketplan_client.passes").removeHandler(lines)
    with torch.no_grad():
        after = result(*inputs)
    return {
        "same_module": result is graph.gm,
        "statistics": {key: dict(value) for key, value in result.meta.items() if key.endswith("_bucketing")},
        "bitwise": all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
        "lines": lines.lines,
    }


def disagree(case: str, odd: int, expert_size: int | None = None) -> dict[str, Any]:
    """One pass in which rank `odd` differs as `case` says; what this rank raised, and whether its graph is intact."""
    graph, _ = sharded_model(expert_size=expert_size)
    before = _nodes(graph.gm)
    is_odd = dist.get_rank() == odd
    plans: Any = LocalPlans()
    options, apply_plan = _options(), passes.apply_plan
    kinds: Any = None
    if is_odd and case == "options":
        options = _options(cap_bytes=7_000)
    elif is_odd and case == "planning":
        plans = _Broken()
    elif is_odd and case == "interrupted while planning":
        plans = _Interrupted()
    elif is_odd and case == "interrupted while applying":

        def interrupt(*_: Any, **__: Any) -> Any:
            raise KeyboardInterrupt

        passes.apply_plan = interrupt  # type: ignore[assignment]  # replaced, to be interrupted there
    elif is_odd and case == "kinds":
        kinds = ["fsdp_all_gather"]
    elif is_odd and case == "file name":
        plans = _Broken("no such file: 'plan\udcff'")
    elif is_odd and case == "graph":
        gather = next(n for n in graph.gm.graph.nodes if n.meta.get("comm_type") == "fsdp_all_gather")
        gather.meta["param_name"] = "renamed.weight"
    elif is_odd and case == "describing":
        options = "no options at all"  # type: ignore[assignment]  # the fault that is injected
    elif is_odd and case == "applying":

        def fail(*_: Any, **__: Any) -> Any:
            raise RuntimeError("rewriter broke")

        passes.apply_plan = fail  # type: ignore[assignment]  # the fault that is injected
    bucketing = FsdpBucketingPass(plans, options=options, roles=graph.roles, kinds=kinds, deadline_s=30.0, job="test")
    try:
        bucketing(graph.gm)
    except KeyboardInterrupt:
        return {"kind": "KeyboardInterrupt", "intact": _nodes(graph.gm) == before}
    except ClientError as error:
        facts = {key: value for key, value in vars(error).items() if key not in ("where", "cause")}
        return {
            "kind": type(error).__name__,
            "facts": facts,
            "text": str(error),
            "rank": error.where.rank,
            "intact": _nodes(graph.gm) == before,
        }
    finally:
        passes.apply_plan = apply_plan
    return {"kind": "none"}


def skip_alone() -> bool:
    """In a world of one rank the pass returns the graph as it is."""
    gm = fx.symbolic_trace(torch.nn.Linear(2, 2))
    before = _nodes(gm)
    result = FsdpBucketingPass(_Broken(), options=_options())(gm)
    return result is gm and _nodes(gm) == before


def interrupted_first_execution(when: str, odd: int) -> dict[str, str]:
    """The comparison of one graph that is about to run, in which rank `odd` gets Ctrl-C."""
    members = tuple(range(dist.get_world_size()))
    with open_attempt(None, groups={"fsdp": members}, job="first", on_mismatch=lambda error: None) as attempt:
        if dist.get_rank() == odd:

            def interrupt(*_: Any, **__: Any) -> Any:
                raise KeyboardInterrupt

            step = "put" if when == "before it said anything" else "wait"
            setattr(attempt.store, step, interrupt)
        try:
            attempt.compare_first_execution("0", {"fsdp": "aa"}, deadline_s=20.0)
        except (ClientError, KeyboardInterrupt) as error:
            return {"kind": type(error).__name__, "text": str(error)}
    return {"kind": "none", "text": ""}
