"""Small requests for the planner tests, and brute force over contiguous partitions in the simulator's own figures."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from bucketplan_core.collectives import Candidate, FixedCollective, Group, Options
from bucketplan_core.cost import CostModel
from bucketplan_core.errors import PlanningError
from bucketplan_core.hardware import CollectiveCost, Hardware, Protocol
from bucketplan_core.plan import Decision
from bucketplan_core.profile import CostProfile, WorkClass
from bucketplan_core.request import Request
from bucketplan_core.schedule import Unschedulable, decide, place_scheduled
from bucketplan_core.simulate import simulate

KINDS = ("fsdp_all_gather", "fsdp_all_gather_backward", "fsdp_reduce_scatter")


def hardware(
    *,
    alpha_ns: int = 200,
    bytes_per_us: int = 1_000,
    copy_bytes_per_us: int = 2**50,
    launch_ns: int = 0,
    slowdown_permille: int = 0,
    protocols: Sequence[tuple[int, int]] | None = None,
    groups: Sequence[str] = ("g",),
) -> Hardware:
    """Two ranks' worth of wire: with group size 2, a tensor of 2 * n bytes takes alpha + n ns at 1,000 bytes a
    microsecond.
    """
    chosen = tuple(Protocol(*p) for p in (protocols or [(alpha_ns, bytes_per_us)]))
    return Hardware(
        flops_per_us=(),
        memory_bytes_per_us=1_000,  # one byte moved is one ns of compute
        copy_bytes_per_us=copy_bytes_per_us,
        launch_ns=launch_ns,
        slowdown_permille=slowdown_permille,
        collectives=tuple(
            CollectiveCost(group=group, op=op, protocols=chosen)
            for group in groups
            for op in ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")
        ),
    )


def candidate(
    kind: str,
    size: int,
    at: int,
    segments: int,
    *,
    window: tuple[int, int] | None = None,
    group: str = "g",
    last_use: int | None = None,
) -> dict[str, object]:
    """A candidate of 2 * `size` bytes, without its orders: a gather first used at gap `at`, a reduction ready there."""
    gather = kind in ("fsdp_all_gather", "fsdp_all_gather_backward")
    reduces = kind == "fsdp_reduce_scatter"
    earliest, latest = window or ((0, at) if gather else (at, segments))
    return {
        "kind": kind,
        "group": group,
        "group_size": 2,
        "dtype": "uint8",
        "device_type": "cuda",
        "input_shape": (size,) if gather else (2 * size,),
        "output_shape": (size,) if reduces else (2 * size,),
        "reduce_op": None if gather else "sum",
        "earliest_launch": earliest,
        "launch": at,
        "latest_launch": latest,
        "wait": at,
        "latest_wait": latest,
        "first_use": latest,
        "last_use": max(latest, at if last_use is None else last_use),
    }


def build(
    candidates: Sequence[dict[str, object]],
    compute_ns: Sequence[int],
    *,
    hw: Hardware | None = None,
    fixed: Sequence[dict[str, object]] = (),
    fixed_bytes: Sequence[int] = (),
    live_bytes: Sequence[int] | None = None,
    groups: Sequence[str] = ("g",),
    **options: object,
) -> tuple[Request, CostProfile]:
    """The request of these candidates over segments that take these times; every wait stands right behind its
    launch.
    """
    events = sorted(
        [(c["launch"], 0, i) for i, c in enumerate(candidates)] + [(f["launch"], 1, i) for i, f in enumerate(fixed)],
        key=lambda e: (e[0], e[1], e[2]),
    )
    orders = {(which, index): 2 * number for number, (_, which, index) in enumerate(events)}
    settings = {"strategy": "auto", "planner": "auto/1", "placement": "scheduled", "hardware": hw or hardware()}
    request = Request.build(
        num_segments=len(compute_ns),
        groups=[Group(role=role, size=2) for role in groups],
        candidates=[
            Candidate(**c, launch_order=orders[0, i], wait_order=orders[0, i] + 1, param_name=f"p{i}", ordinal=i)
            for i, c in enumerate(candidates)
        ],
        fixed=[
            FixedCollective(**f, wait=f["launch"], launch_order=orders[1, i], wait_order=orders[1, i] + 1)
            for i, f in enumerate(fixed)
        ],
        options=Options(**(settings | options)),
    )
    profile = CostProfile(
        work=(WorkClass(name="memory", flops=(0,) * len(compute_ns), bytes_moved=tuple(compute_ns)),),
        live_bytes=tuple(live_bytes) if live_bytes is not None else (0,) * len(compute_ns),
        fixed_bytes=tuple(fixed_bytes),
    )
    return request, profile


def least_named(refused: PlanningError) -> int:
    """The least budget, in bytes, that the refusal of a smaller one names."""
    return int(str(refused).split("is ")[-1].split()[0])


def random_hardware(rng: random.Random, **overrides: object) -> Hardware:
    alpha = rng.choice([0, 5, 20, 200, 1_000])
    return hardware(
        **(
            {
                "protocols": rng.choice([[(alpha, 1_000)], [(alpha, 1_000)], [(alpha // 4, 300), (alpha, 1_000)]]),
                "copy_bytes_per_us": rng.choice([2**50, 50_000, 8_000, 2_000]),
                "launch_ns": rng.choice([0, 0, 3, 40]),
            }
            | overrides
        )
    )


def random_lane(
    rng: random.Random, kind: str, count: int, segments: int, *, group: str = "g"
) -> list[dict[str, object]]:
    ats = sorted(rng.randrange(segments + 1) for _ in range(count))
    scale = rng.choice([3, 60, 400])
    return [
        candidate(
            kind,
            rng.choice([0, 1, rng.randrange(scale), rng.randrange(10 * scale)]),
            at,
            segments,
            group=group,
            last_use=rng.randrange(at, segments + 1),
        )
        for at in ats
    ]


def partitions(members: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
    """All contiguous partitions of `members`, in lexicographic order of their cut bits."""
    for cuts in itertools.product((True, False), repeat=max(len(members) - 1, 0)):
        buckets, start = [], 0
        for at, cut in enumerate(cuts, start=1):
            if cut:
                buckets.append(tuple(members[start:at]))
                start = at
        if members:
            buckets.append(tuple(members[start:]))
        yield buckets


def placed(request: Request, profile: CostProfile, buckets: Sequence[tuple[int, ...]]) -> Decision | None:
    """The scheduled decision of exactly these buckets, None where no legal one exists."""
    try:
        return decide(request, request.options.planner, place_scheduled(request, buckets), profile=profile.digest)
    except Unschedulable:
        return None


def brute_force(request: Request, profile: CostProfile) -> list[tuple[int, int, int]]:
    """(step time, buckets, peak bytes) of every contiguous partition of every lane under the scheduled placement."""
    cost = CostModel.build(request, profile)
    results = []
    for combination in itertools.product(*(list(partitions(lane.members)) for lane in request.lanes)):
        decision = placed(request, profile, [bucket for lane in combination for bucket in lane])
        if decision is not None:
            simulation = simulate(cost, decision)
            results.append((simulation.step_ns, len(decision.buckets), simulation.peak_bytes))
    return results
