"""What a collective, a copy and a segment of compute take, in integer nanoseconds.

Collective time is the least over protocols of ``alpha + bytes * (N - 1) / N / rate`` (ring all-gather and
reduce-scatter; twice the byte term for all-reduce, which does both), the alpha-beta model of Thakur, Rabenseifner and
Gropp (2005) with the protocol choice of NCCL's tuner. It is monotone and subadditive in bytes: one launch never takes
longer than two of the same total. A bucket of several members also pays packing copies on the compute stream: a
gather reads and writes its shards once before the launch and the gathered tensors once after the wait, a reduction
reads and writes its inputs once before the launch; its outputs are views. A lone member pays neither.

Every quotient is rounded up. Nothing here is a float, so plans do not depend on a machine's arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bucketplan_core.collectives import Candidate, Lane
from bucketplan_core.errors import PlanningError
from bucketplan_core.hardware import CollectiveCost, Hardware, Protocol
from bucketplan_core.profile import CostProfile
from bucketplan_core.request import Request

__all__ = [
    "MAX_STEP_NS",
    "MAX_TOTAL_BYTES",
    "BucketCost",
    "CollectiveModel",
    "CostModel",
    "ceil_div",
    "collective_op",
    "segment_times_ns",
]

Int64Array = NDArray[np.int64]

MAX_TOTAL_BYTES = 2**60
"""Most bytes that all candidates of a request may have together; sums of four such totals still fit into int64."""
MAX_STEP_NS = 2**48
"""Longest step (78 hours) that is planned, everything one after the other; times a count of buckets it still fits
into int64.
"""
_INT64_SAFE = 2**62
_OPS = {
    "fsdp_all_gather": "all_gather",
    "fsdp_all_gather_backward": "all_gather",
    "fsdp_reduce_scatter": "reduce_scatter",
    "dp_all_reduce": "all_reduce",
}


def ceil_div(numerator: int, denominator: int) -> int:
    """The quotient rounded up; both non-negative, `denominator` positive."""
    return -(-numerator // denominator)


def collective_op(kind: str) -> str:
    """The operation that a candidate kind or a fixed collective runs, as `Hardware.collectives` names it."""
    return _OPS.get(kind, kind)


@dataclass(frozen=True, slots=True)
class CollectiveModel:
    """Time of one collective on one group: the least over protocols of alpha plus the byte term."""

    protocols: tuple[Protocol, ...]
    numerator: int
    denominator: int

    @classmethod
    def of(cls, op: str, group_size: int, protocols: Sequence[Protocol]) -> CollectiveModel:
        """Ring traffic of `op`: (N - 1) / N of the full tensor, twice that for an all-reduce."""
        steps = 2 if op == "all_reduce" else 1
        return cls(tuple(protocols), steps * (group_size - 1), group_size)

    def time_ns(self, full_bytes: int) -> int:
        """Nanoseconds for a full tensor of `full_bytes`."""
        scaled = full_bytes * self.numerator * 1_000
        best = -1
        for protocol in self.protocols:
            time = protocol.alpha_ns - (-scaled // (self.denominator * protocol.bytes_per_us))
            if best < 0 or time < best:
                best = time
        return best

    def times_ns(self, full_bytes: Int64Array) -> Int64Array:
        """`time_ns` of each entry, exactly: the byte count is split so that no product leaves int64."""
        best: Int64Array | None = None
        for protocol in self.protocols:
            factor = self.numerator * 1_000
            divisor = self.denominator * protocol.bytes_per_us
            if factor * divisor < _INT64_SAFE:
                whole, rest = np.divmod(full_bytes, divisor)
                times = protocol.alpha_ns + whole * factor + -(-(rest * factor) // divisor)
            else:
                exact = [protocol.alpha_ns + ceil_div(int(b) * factor, divisor) for b in full_bytes]
                times = np.array(exact, dtype=np.int64)
            best = times if best is None else np.minimum(best, times)
        assert best is not None
        return best


@dataclass(frozen=True, slots=True)
class BucketCost:
    """One bucket's times: `comm_ns` on its group's stream, `launch_ns` (host launch and packing) and `wait_ns`
    (unpacking) on the compute stream."""

    comm_ns: int
    launch_ns: int
    wait_ns: int


@dataclass(frozen=True)
class CostModel:
    """Every figure that the simulator and the planners use, resolved for one request, profile and hardware.

    `prefix_ns[g]` is the compute before gap g; `streams` numbers the groups that have a communication stream;
    `lane_models`, `lane_streams` go by lane, `fixed_ns`, `fixed_streams` by fixed collective (stream -1: no known
    group).
    """

    request: Request
    hardware: Hardware
    segment_ns: tuple[int, ...]
    prefix_ns: tuple[int, ...]
    live_bytes: tuple[int, ...]
    streams: tuple[str, ...]
    lane_models: tuple[CollectiveModel, ...]
    lane_streams: tuple[int, ...]
    lane_of: tuple[int, ...]
    fixed_ns: tuple[int, ...]
    fixed_streams: tuple[int, ...]
    uncosted: tuple[str, ...]
    bounds: dict[str, int] = field(default_factory=dict, compare=False, repr=False)
    """What others computed from this model once and look up again."""

    @classmethod
    def build(cls, request: Request, profile: CostProfile, hardware: Hardware | None = None) -> CostModel:
        """Resolve the figures; `hardware` defaults to that of the request's options.

        Raises `PlanningError` (option ``hardware``) when there is none, when it lacks a candidate's group and
        operation or a work class of the profile, or when the request's bytes leave the integers that planners work
        in. A fixed collective without a figure of its own is costed like an all-gather of its group, without any
        figure as free; `uncosted` names the latter.
        """
        found = hardware if hardware is not None else request.options.hardware
        if found is None:
            raise PlanningError(
                "hardware", None, "there are no figures to cost with; name a preset or measure a profile"
            )
        total = sum(c.full_bytes for c in request.candidates) + sum(profile.fixed_bytes)
        if total > MAX_TOTAL_BYTES:
            raise PlanningError(
                "hardware", total, f"tensors of more than {MAX_TOTAL_BYTES} bytes together cannot be planned"
            )
        streams = tuple(group.role for group in request.groups)
        stream_of = {role: index for index, role in enumerate(streams)}
        table = {(cost.group, cost.op): cost for cost in found.collectives}
        segment_ns = segment_times_ns(profile, found, request.num_segments)
        lane_of = [0] * len(request.candidates)
        for number, lane in enumerate(request.lanes):
            for member in lane.members:
                lane_of[member] = number
        fixed_ns, fixed_streams, uncosted = _fixed_costs(request, profile, table, stream_of)
        model = cls(
            request=request,
            hardware=found,
            segment_ns=segment_ns,
            prefix_ns=(0, *accumulate(segment_ns)),
            live_bytes=profile.live_bytes,
            streams=streams,
            lane_models=tuple(_lane_model(lane, table) for lane in request.lanes),
            lane_streams=tuple(stream_of[lane.group] for lane in request.lanes),
            lane_of=tuple(lane_of),
            fixed_ns=fixed_ns,
            fixed_streams=fixed_streams,
            uncosted=uncosted,
        )
        serial = model.compute_ns + sum(fixed_ns)
        for index, candidate in enumerate(request.candidates):
            serial += (
                model.alone_ns(index) + found.launch_ns + model.copy_ns(candidate.input_bytes + candidate.output_bytes)
            )
        if serial * (1_000 + found.slowdown_permille) > MAX_STEP_NS * 1_000:
            raise PlanningError(
                "hardware", serial, f"a step of more than {MAX_STEP_NS} ns cannot be planned; check the figures"
            )
        return model

    @property
    def compute_ns(self) -> int:
        """All compute of the step, without copies and launches."""
        return self.prefix_ns[-1]

    @cached_property
    def input_bytes(self) -> tuple[int, ...]:
        """Bytes of each candidate's input; shapes are multiplied out once."""
        return tuple(c.input_bytes for c in self.request.candidates)

    @cached_property
    def output_bytes(self) -> tuple[int, ...]:
        return tuple(c.output_bytes for c in self.request.candidates)

    @cached_property
    def full_bytes(self) -> tuple[int, ...]:
        """Bytes of each candidate's unsharded tensor."""
        return self.request.full_bytes

    @cached_property
    def live_at_gap(self) -> Int64Array:
        """Activations alive at each gap: what both neighbouring segments hold, at most the lesser."""
        live = as_int64(self.live_bytes)
        if not len(live):
            return np.zeros(1, dtype=np.int64)
        least: Int64Array = np.minimum(np.append(live, live[-1]), np.insert(live, 0, live[0]))
        return least

    @cached_property
    def static_bytes(self) -> Int64Array:
        """Bytes by gap of what no plan moves: inputs of reductions appear when ready, results go after their last
        use.
        """
        num_segments = self.request.num_segments
        changes = [0] * (num_segments + 2)
        for index, candidate in enumerate(self.request.candidates):
            if held_inputs(candidate):
                changes[candidate.earliest_launch] += self.input_bytes[index]
            changes[min(candidate.last_use, num_segments) + 1] -= self.output_bytes[index]
        held: Int64Array = np.cumsum(as_int64(changes))
        return held

    def copy_ns(self, num_bytes: int) -> int:
        """A copy that reads and writes `num_bytes` once each."""
        return ceil_div(2 * num_bytes * 1_000, self.hardware.copy_bytes_per_us)

    def bucket(self, members: Sequence[int]) -> BucketCost:
        """The times of the bucket of these candidates, all of one lane."""
        model = self.lane_models[self.lane_of[members[0]]]
        if len(members) == 1:
            return BucketCost(model.time_ns(self.full_bytes[members[0]]), self.hardware.launch_ns, 0)
        full = sum([self.full_bytes[m] for m in members])
        comm = model.time_ns(full)
        packed = sum([self.input_bytes[m] for m in members])
        unpacked = full if self.request.candidates[members[0]].is_gather else 0
        return BucketCost(comm, self.hardware.launch_ns + self.copy_ns(packed), self.copy_ns(unpacked))

    def copies_ns(self, num_bytes: Int64Array) -> Int64Array:
        """`copy_ns` of each entry; exact, since a request's bytes are bounded by `MAX_TOTAL_BYTES`."""
        rate = self.hardware.copy_bytes_per_us
        whole, rest = np.divmod(2 * num_bytes, rate)
        result: Int64Array = whole * 1_000 + -(-(rest * 1_000) // rate)
        return result

    def alone_ns(self, candidate: int) -> int:
        """Communication time of one candidate launched by itself."""
        return self.lane_models[self.lane_of[candidate]].time_ns(self.full_bytes[candidate])


def segment_times_ns(profile: CostProfile, hardware: Hardware, num_segments: int) -> tuple[int, ...]:
    """Each segment's time: the sum over work classes of max(flops / rate, bytes moved / memory rate), each rounded up.

    A class with FLOPs needs a rate: its own, else ``matmul`` of its dtype. Where there is neither, none is guessed: a
    `PlanningError` says which rate is missing.
    """
    totals = [0] * num_segments
    rates = dict(hardware.flops_per_us)
    memory = hardware.memory_bytes_per_us
    for work in profile.work:
        rate = rates.get(work.name) or rates.get("matmul:" + work.name.partition(":")[2])
        if rate is None and any(work.flops):
            raise PlanningError(
                "hardware", work.name, "the profile has work of this class, the hardware no rate for it"
            )
        for index, (flops, moved) in enumerate(zip(work.flops, work.bytes_moved, strict=True)):
            if flops or moved:
                arithmetic = ceil_div(flops * 1_000, rate) if rate else 0
                totals[index] += max(arithmetic, ceil_div(moved * 1_000, memory))
    return tuple(totals)


def _lane_model(lane: Lane, table: dict[tuple[str, str], CollectiveCost]) -> CollectiveModel:
    op = collective_op(lane.kind)
    cost = table.get((lane.group, op))
    if lane.group_size == 1:
        return CollectiveModel.of(op, 1, (Protocol(0, 1),) if cost is None else cost.protocols)
    if cost is None:
        raise PlanningError(
            "hardware", lane.group, f"the figures lack {op} on this group; measure with `bucketplan calibrate`"
        )
    return CollectiveModel.of(op, lane.group_size, cost.protocols)


def _fixed_costs(
    request: Request,
    profile: CostProfile,
    table: dict[tuple[str, str], CollectiveCost],
    stream_of: dict[str, int],
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...]]:
    sizes = {group.role: group.size for group in request.groups}
    times: list[int] = []
    streams: list[int] = []
    uncosted: set[str] = set()
    for fixed, num_bytes in zip(request.fixed, profile.fixed_bytes, strict=True):
        op = collective_op(fixed.kind)
        role = fixed.group
        cost = None if role is None else table.get((role, op)) or table.get((role, "all_gather"))
        if role is None or cost is None:
            uncosted.add(f"{fixed.kind} on {role}")
            times.append(0)
            streams.append(-1)
        else:
            times.append(CollectiveModel.of(op, sizes[role], cost.protocols).time_ns(num_bytes))
            streams.append(stream_of[role])
    return tuple(times), tuple(streams), tuple(sorted(uncosted))


def held_inputs(candidate: Candidate) -> bool:
    """Whether a reduction's input is a tensor of its own: one that another collective delivers is counted there."""
    return not candidate.is_gather and not candidate.depends_on


def as_int64(values: Sequence[int]) -> Int64Array:
    """An int64 array of Python ints; an entry outside int64 raises `OverflowError` instead of wrapping."""
    array: NDArray[Any] = np.array(values, dtype=np.int64)
    return array
