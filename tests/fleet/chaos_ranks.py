"""What one gloo rank does in one chaos schedule: open, bucket, train a step; run by `tests.support.gloo_pool`."""

from __future__ import annotations

import copy
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bucketplan_client import store as store_module
from bucketplan_client.cache import PlanCache
from bucketplan_client.errors import ClientError
from bucketplan_client.opening import open_attempt
from bucketplan_client.passes import FsdpBucketingPass
from bucketplan_client.transport import PlanClient
from bucketplan_core.collectives import ALL_GATHER_KINDS
from tests.client.pass_ranks import sharded_model

OPTIONS = {"bucket_cap_bytes": 20_000, "first_bucket_cap_bytes": 20_000}
_prepared: dict[str, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One seeded schedule; everything that can differ between ranks is said by rank."""

    seed: int
    address: str
    folder: str
    mode: str
    on_unavailable: str
    late_s: dict[int, float]
    dies_at: dict[int, int]
    restarts: tuple[int, ...]
    odd_graph: int | None
    odd_options: int | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Killed(BaseException):
    """The rank is gone: nothing of what it held is told to anyone."""


class _Mortal(store_module.JobStore):
    """A store whose user dies at a given operation."""

    operations_left: int | None = None

    def _typed(self, operation: str) -> Any:
        cls = type(self)
        if cls.operations_left is not None:
            cls.operations_left -= 1
            if cls.operations_left < 0:
                raise _Killed
        return super()._typed(operation)


def run_schedule(fields: dict[str, Any]) -> dict[str, Any]:
    """This rank's part in one schedule, and how it ended."""
    schedule = Schedule(**fields)
    rank = dist.get_rank()
    graph, inputs, before = _prepare()
    time.sleep(schedule.late_s.get(rank, 0.0))
    started = time.monotonic()
    lives = 2 if rank in schedule.restarts else 1
    ended: dict[str, Any] = {}
    for life in range(lives):
        _Mortal.operations_left = schedule.dies_at.get(rank) if life == 0 else None
        try:
            ended = _live(schedule, rank, copy.deepcopy(graph.gm), graph.roles)
        except _Killed:
            ended = {"kind": "killed"}
        if ended["kind"] != "killed":
            break
    ended["elapsed_s"] = time.monotonic() - started
    gm = ended.pop("gm", None)
    # Collectives run only once every rank has said that it trains, so that a bug shows as a report and not as a hang.
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, ended["kind"])
    if set(everyone) <= {"applied"} and gm is not None:
        with torch.no_grad():
            after = gm(*inputs)
        ended["bitwise"] = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return ended


def _live(schedule: Schedule, rank: int, gm: Any, roles: dict[str, str]) -> dict[str, Any]:
    random.seed(schedule.seed * 1_000 + rank)
    world = dist.get_world_size()
    options = {**OPTIONS, "prefetch": 2} if rank == schedule.odd_options else dict(OPTIONS)
    if rank == schedule.odd_graph:
        gather = next(node for node in gm.graph.nodes if node.meta.get("comm_type") == "fsdp_all_gather")
        gather.meta["param_name"] = "renamed.weight"
    original = store_module.JobStore
    with PlanClient(
        schedule.address, rank=rank, job="chaos", deadline_s=2.0, read_timeout_s=1.0, plan_timeout_s=1.5
    ) as client:
        try:
            _replace_store(_Mortal)
            attempt = open_attempt(
                client,
                groups={"fsdp": tuple(range(world))},
                job="chaos",
                options=options,
                mode=schedule.mode,  # type: ignore[arg-type]  # a str from JSON
                on_unavailable=schedule.on_unavailable,  # type: ignore[arg-type]  # a str from JSON
                deadline_s=4.0,
                server_s=2.0,
                grace_s=1.0,
                plan_s=2.0,
                cache=PlanCache(Path(schedule.folder) / str(rank)),
                name=str(schedule.seed),
                disabled=False,
            )
            with attempt:
                if not attempt.bucketed:
                    return {"kind": "unbucketed", "uuid": attempt.uuid}
                bucketing = FsdpBucketingPass.for_attempt(
                    attempt, roles=roles, kinds=None if world == 2 else ALL_GATHER_KINDS, deadline_s=6.0, grace_s=1.0
                )
                bucketing(gm)
                return {
                    "kind": "applied",
                    "uuid": attempt.uuid,
                    "statistics": {key: dict(value) for key, value in gm.meta.items() if key.endswith("_bucketing")},
                    "gm": gm,
                }
        except ClientError as error:
            return {"kind": "error", "type": type(error).__name__, "message": error.message, "remedy": error.remedy}
        finally:
            _replace_store(original)


def _replace_store(kind: type[store_module.JobStore]) -> None:
    from bucketplan_client import opening, passes

    store_module.JobStore = kind  # type: ignore[misc]  # a store with faults in its place
    opening.JobStore = kind  # type: ignore[misc]  # a store with faults in its place
    passes.JobStore = kind  # type: ignore[misc]  # a store with faults in its place


def _prepare() -> tuple[Any, Any, Any]:
    """The sharded model, this rank's inputs, and what they give without buckets; made once a process."""
    if not _prepared:
        graph, inputs = sharded_model()
        with torch.no_grad():
            before = graph.gm(*inputs)
        _prepared["parts"] = (graph, inputs, before)
    parts: tuple[Any, Any, Any] = _prepared["parts"]
    return parts
