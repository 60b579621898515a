"""How good `auto`'s plans are, and what they cost to make.

`run()` plans every recorded graph at every preset that covers it and compares the simulated step with `none`, `size`
at six caps and `module` by blocks of the model, each at both placements, and with the lower bound; then it plans a
generated model of 3,400 candidates and smaller ones of the same shape to show how time grows.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bucketplan_core.bound import lower_bound_ns
from bucketplan_core.collectives import Candidate, Group, Options
from bucketplan_core.cost import CostModel
from bucketplan_core.errors import PlanningError
from bucketplan_core.planners.auto_groups import block_of
from bucketplan_core.planning import make_plan
from bucketplan_core.presets import GroupShape, preset_fits, preset_names, resolve_preset
from bucketplan_core.profile import CostProfile, WorkClass
from bucketplan_core.request import Request
from bucketplan_core.simulate import Simulation, simulate
from tests.benchmarks.harness import Result
from tests.support.graphs import graph_names, load_graph

CAPS_MB = (10, 25, 50, 100, 200, 500)
HIDDEN, FEED_FORWARD = 8_192, 28_672


def generate(num_layers: int, *, seed: int = 0, ranks: int = 64, nodes: int = 8) -> tuple[Request, CostProfile]:
    """A joint graph of a dense model of `num_layers` blocks of 14 parameters, its sizes and compute drawn from `seed`.

    Forward gathers, backward gathers in reverse order, and a reduction of each gradient on one group; 81 blocks give
    1,137 parameters and about 3,400 candidates, three to a parameter (the embedding is not gathered again).
    """
    rng = random.Random(seed)
    small = [HIDDEN] * 5
    large = [HIDDEN * HIDDEN] * 2 + [HIDDEN * HIDDEN // 8] * 4 + [HIDDEN * FEED_FORWARD] * 3
    names, sizes = ["embedding"], [128_256 * HIDDEN]
    for layer in range(num_layers):
        block = small + large
        rng.shuffle(block)
        names += [f"layers.{layer}.p{k}" for k in range(len(block))]
        sizes += block
    names += ["norm", "output"]
    sizes += [HIDDEN, 128_256 * HIDDEN]
    count = len(names)
    num_segments = 2 * count + 2
    work = [
        rng.randrange(10**9, 4 * 10**9) + size * 2 * 8_192 * (1 if k < count else 2)
        for k, size in enumerate([*sizes, *sizes[::-1], 0, 0])
    ]
    events: list[tuple[int, int, dict[str, Any]]] = []
    for index, (name, size) in enumerate(zip(names, sizes, strict=True)):
        shard, whole = (size // ranks,), (size,)
        common = {"group": "fsdp", "group_size": ranks, "device_type": "cuda", "param_name": name, "ordinal": index}
        backward = 2 * count - index
        gather = {"dtype": "bfloat16", "input_shape": shard, "output_shape": whole, "earliest_launch": 0}
        events.append((index, 0, common | gather | {"kind": "fsdp_all_gather", "at": index}))
        if index:
            kind = {"kind": "fsdp_all_gather_backward", "at": backward, "backward": True}
            events.append((backward, 0, common | gather | kind))
        scatter = {
            "dtype": "float32",
            "input_shape": whole,
            "output_shape": shard,
            "reduce_op": "avg",
            "backward": True,
        }
        kind = {"kind": "fsdp_reduce_scatter", "at": backward + 1, "earliest_launch": backward + 1}
        events.append((backward + 1, 1, common | scatter | kind))
    candidates = []
    for order, (_, _, fields) in enumerate(sorted(events, key=lambda event: (event[0], event[1], event[2]["ordinal"]))):
        at = fields.pop("at")
        last = at if fields["kind"] != "fsdp_reduce_scatter" else num_segments
        candidates.append(
            Candidate(
                **fields,
                launch=at,
                wait=at,
                latest_launch=last,
                latest_wait=last,
                first_use=last,
                last_use=last,
                launch_order=2 * order,
                wait_order=2 * order + 1,
            )
        )
    request = Request.build(
        num_segments=num_segments,
        groups=[Group(role="fsdp", size=ranks, nodes=nodes)],
        candidates=candidates,
        fixed=[],
        options=Options(strategy="size", planner="size/1"),
    )
    live = [
        rng.randrange(10**7) + (k if k <= count else 2 * count - min(k, 2 * count)) * 3 * 10**7
        for k in range(num_segments)
    ]
    profile = CostProfile(
        work=(WorkClass(name="matmul:bfloat16", flops=tuple(work), bytes_moved=(0,) * num_segments),),
        live_bytes=tuple(live),
    )
    return request, profile


def auto_options(options: Options, request: Request, preset: str) -> Options:
    hardware = resolve_preset(preset, _shapes(request))
    return replace(options, strategy="auto", planner="auto/1", placement="scheduled", hardware=hardware)


def rules(request: Request, options: Options) -> Iterator[tuple[str, Request]]:
    """`none`, `size` at every cap and `module` by blocks, at both placements."""
    blocks = [replace(c, scope=block_of(request, k) or None) for k, c in enumerate(request.candidates)]
    scoped = replace(request, candidates=tuple(blocks)) if any(c.scope for c in blocks) else None
    for placement in ("original", "scheduled"):
        at = replace(options, placement=placement)
        yield f"none {placement}", request.with_options(replace(at, strategy="none", planner="none/1"))
        if scoped is not None:
            module = replace(at, strategy="module", planner="module/1", bucket_cap_bytes=2**50)
            yield f"module {placement}", scoped.with_options(module)
        for cap in CAPS_MB:
            sized = replace(
                at, strategy="size", planner="size/1", bucket_cap_bytes=cap * 10**6, first_bucket_cap_bytes=cap * 10**6
            )
            yield f"size {cap} MB {placement}", request.with_options(sized)


def _shapes(request: Request) -> dict[str, GroupShape]:
    return {group.role: GroupShape(group.size, group.nodes) for group in request.groups}


def _simulated(request: Request, profile: CostProfile) -> Simulation:
    return simulate(CostModel.build(request, profile), make_plan(request, profile).decision)


def compare(name: str, request: Request, profile: CostProfile, preset: str) -> dict[str, Any]:
    """One line of the table: `auto` beside the best rule and the bound, step times in ns."""
    options = auto_options(request.options, request, preset)
    planned = request.with_options(options)
    begun = time.process_time()
    plan = make_plan(planned, profile)
    seconds = time.process_time() - begun
    cost = CostModel.build(planned, profile)
    found = simulate(cost, plan.decision)
    others = []
    for rule, other in rules(request, options):
        try:
            simulated = _simulated(other, profile)
        except PlanningError:
            continue
        others.append((simulated.step_ns, rule, simulated.peak_bytes))
    best = min(others)
    return {
        "graph": name,
        "preset": preset,
        "candidates": len(request.candidates),
        "auto_ns": found.step_ns,
        "compute_ns": found.compute_ns,
        "exposed_ns": found.exposed_ns,
        "copies_ns": found.copies_ns,
        "peak_bytes": found.peak_bytes,
        "bound_ns": lower_bound_ns(cost),
        "best_rule_ns": best[0],
        "best_rule": best[1],
        "best_rule_peak_bytes": best[2],
        "none_as_traced_ns": next(step for step, rule, _ in others if rule == "none original"),
        "buckets": len(plan.decision.buckets),
        "cpu_s": seconds,
    }


def run() -> Result:
    """The figures of `planner.json`, and the table and growth of planning time as notes."""
    rows = []
    for name in graph_names():
        request, profile = load_graph(name)
        for preset in preset_names():
            if preset_fits(preset, _shapes(request)):
                rows.append(compare(name, request, profile, preset))
    growth = []
    for layers in (10, 20, 40, 81):
        request, profile = generate(layers)
        planned = request.with_options(auto_options(request.options, request, "h100-ndr"))
        begun = time.process_time()
        plan = make_plan(planned, profile)
        seconds = time.process_time() - begun
        cost = CostModel.build(planned, profile)
        step = simulate(cost, plan.decision).step_ns
        growth.append(
            (
                len(request.candidates),
                max(len(lane.members) for lane in request.lanes),
                seconds,
                step,
                lower_bound_ns(cost),
            )
        )
    figures = {
        "plan_cpu_s_3400": growth[-1][2],
        "generated_gap_to_bound": growth[-1][3] / growth[-1][4],
    }
    if rows:
        figures |= {
            "worst_ratio_to_best_baseline": max(row["auto_ns"] / row["best_rule_ns"] for row in rows),
            "geomean_ratio_to_best_baseline": _geomean([row["auto_ns"] / row["best_rule_ns"] for row in rows]),
            "geomean_ratio_to_none_as_traced": _geomean([row["auto_ns"] / row["none_as_traced_ns"] for row in rows]),
            "worst_gap_to_bound": max(row["auto_ns"] / row["bound_ns"] for row in rows),
            "geomean_gap_to_bound": _geomean([row["auto_ns"] / row["bound_ns"] for row in rows]),
            "worst_plan_cpu_s_recorded": max(row["cpu_s"] for row in rows),
        }
    return Result(figures, "\n".join([*table(rows), *_growth_lines(growth)]))


def _geomean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def table(rows: list[dict[str, Any]]) -> list[str]:
    """One line a graph and preset, milliseconds."""
    lines = [
        "milliseconds a step; `best rule` of none, module by blocks and size at six caps, each at both placements",
        "| graph | preset | as traced | best rule | auto | bound | /best | /bound | buckets | peak GB | CPU s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['graph']} | {row['preset']} | {row['none_as_traced_ns'] / 1e6:.3f} "
            f"| {row['best_rule_ns'] / 1e6:.3f} ({row['best_rule']}) | {row['auto_ns'] / 1e6:.3f} "
            f"| {row['bound_ns'] / 1e6:.3f} | {row['auto_ns'] / row['best_rule_ns']:.4f} "
            f"| {row['auto_ns'] / row['bound_ns']:.5f} | {row['buckets']}/{row['candidates']} "
            f"| {row['peak_bytes'] / 1e9:.1f} | {row['cpu_s']:.2f} |"
        )
    return lines


def _growth_lines(growth: list[tuple[int, int, float, int, int]]) -> list[str]:
    return [
        f"generated, {count} candidates ({lane} in the largest lane): {seconds:.2f} s CPU, {step / 1e6:.1f} ms a step, "
        f"bound {bound / 1e6:.1f} ms"
        for count, lane, seconds, step, bound in growth
    ]


if __name__ == "__main__":
    result = run()
    print(result.notes, *(f"{key}: {value:.5f}" for key, value in result.figures.items()), sep="\n")
