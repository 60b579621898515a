"""Timing on live ranks: collectives over sizes, packing copies, launches, compute with and without communication.

Every rank runs the same sequence. A time is the median over repetitions of the slowest rank's, since a collective is
done when its last rank is. On an accelerator the device is waited for before and after; on a CPU calls are synchronous.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from bucketplan_client.calibrate.fit import Sample

# torch 2.13 renamed them and warns at the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

__all__ = ["OPS", "collective_samples", "compute_rates", "copy_rate", "launch_ns", "slowdown_permille"]

OPS = ("all_gather", "reduce_scatter", "all_reduce")


def _sync(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def _once(device: torch.device, call: Callable[[], object]) -> int:
    _sync(device)
    begun = time.perf_counter_ns()
    call()
    _sync(device)
    return time.perf_counter_ns() - begun


def _slowest(times: Sequence[int], device: torch.device, group: dist.ProcessGroup | None) -> list[int]:
    """Of each repetition the slowest rank's time."""
    shared = torch.tensor(list(times), dtype=torch.int64, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
    return [int(value) for value in shared.tolist()]


def _timed(call: Callable[[], object], repeats: int, device: torch.device, group: dist.ProcessGroup | None) -> int:
    """Median over repetitions, each begun together by all ranks, after two that are not counted."""
    times = []
    for number in range(repeats + 2):
        dist.barrier(group=group)
        elapsed = _once(device, call)
        if number >= 2:
            times.append(elapsed)
    return int(median(_slowest(times, device, group)))


def _collective(
    op: str, full_bytes: int, device: torch.device, group: dist.ProcessGroup | None
) -> tuple[int, Callable[[], object]]:
    """A call of `op` and the bytes of its full tensor, the next multiple of the group size of float32."""
    ranks = dist.get_world_size(group)
    shard = max(full_bytes // (4 * ranks), 1)
    whole = torch.ones(shard * ranks, device=device)
    part = torch.ones(shard, device=device)
    if op == "all_gather":
        return 4 * shard * ranks, lambda: _all_gather(whole, part, group=group)
    if op == "reduce_scatter":
        return 4 * shard * ranks, lambda: _reduce_scatter(part, whole, group=group)
    return 4 * shard * ranks, lambda: dist.all_reduce(whole, group=group)


def collective_samples(
    op: str, sizes: Sequence[int], repeats: int, device: torch.device, group: dist.ProcessGroup | None
) -> list[Sample]:
    """One sample a size, small to large; rounds go through all sizes, so that what drifts falls on all alike."""
    calls = [_collective(op, size, device, group) for size in sizes]
    times: list[list[int]] = [[] for _ in sizes]
    for number in range(repeats + 1):
        for (_, call), measured in zip(calls, times, strict=True):
            dist.barrier(group=group)
            elapsed = _once(device, call)
            if number:
                measured.append(elapsed)
    return [
        Sample(full_bytes, int(median(_slowest(measured, device, group))))
        for (full_bytes, _), measured in zip(calls, times, strict=True)
    ]


def copy_rate(num_bytes: int, repeats: int, device: torch.device, group: dist.ProcessGroup | None) -> float:
    """Bytes read plus written a microsecond by the concatenation that packs a bucket of eight members."""
    parts = [torch.ones(max(num_bytes // 32, 1), device=device) for _ in range(8)]
    moved = 2 * sum(part.numel() * 4 for part in parts)
    return moved * 1_000 / max(_timed(lambda: torch.cat(parts), repeats, device, group), 1)


def launch_ns(repeats: int, device: torch.device, group: dist.ProcessGroup | None) -> int:
    """The host's time of issuing one small asynchronous collective, its completion not included."""
    tensor = torch.ones(64, device=device)
    times = []
    for number in range(repeats + 2):
        dist.barrier(group=group)
        _sync(device)
        begun = time.perf_counter_ns()
        work = dist.all_reduce(tensor, group=group, async_op=True)
        issued = time.perf_counter_ns() - begun
        if work is not None:
            work.wait()
        if number >= 2:
            times.append(issued)
    return int(median(_slowest(times, device, group)))


def _attend(query: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query, query, query)


def compute_rates(
    repeats: int, device: torch.device, group: dist.ProcessGroup | None, *, size: int
) -> tuple[dict[str, float], float]:
    """Operations a microsecond by work class, and bytes moved a microsecond by a pointwise addition."""
    rates: dict[str, float] = {}
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        a = torch.ones(size, size, device=device, dtype=dtype)
        elapsed = _timed(partial(torch.matmul, a, a), repeats, device, group)
        rates[f"matmul:{name}"] = 2 * size**3 * 1_000 / max(elapsed, 1)
        length = max(size // 2, 16)
        query = torch.ones(1, 8, length, 64, device=device, dtype=dtype)
        elapsed = _timed(partial(_attend, query), repeats, device, group)
        rates[f"attention:{name}"] = 4 * 8 * length * length * 64 * 1_000 / max(elapsed, 1)
    b = torch.ones(4 * size * size, device=device)
    out = torch.empty_like(b)
    elapsed = _timed(lambda: torch.add(b, b, out=out), repeats, device, group)
    return rates, 2 * b.numel() * 4 * 1_000 / max(elapsed, 1)


def slowdown_permille(
    repeats: int, device: torch.device, group: dist.ProcessGroup | None, *, full_bytes: int, size: int
) -> int:
    """How much longer a matrix product takes while an all-gather that outlasts it is in flight, in thousandths."""
    a = torch.ones(size, size, device=device)
    ranks = dist.get_world_size(group)
    part = torch.ones(max(full_bytes // (4 * ranks), 1), device=device)
    whole = torch.ones(part.numel() * ranks, device=device)
    alone: list[int] = []
    beside: list[int] = []
    for number in range(repeats + 2):
        dist.barrier(group=group)
        quiet = _once(device, lambda: a @ a)
        dist.barrier(group=group)
        _sync(device)
        work = _all_gather(whole, part, group=group, async_op=True)
        begun = time.perf_counter_ns()
        _ = a @ a
        if device.type != "cpu":
            torch.accelerator.current_stream().synchronize()
        busy = time.perf_counter_ns() - begun
        if work is not None:
            work.wait()
        if number >= 2:
            alone.append(quiet)
            beside.append(busy)
    quiet_ns = median(_slowest(alone, device, group))
    return max(round((median(_slowest(beside, device, group)) / max(quiet_ns, 1) - 1) * 1_000), 0)
