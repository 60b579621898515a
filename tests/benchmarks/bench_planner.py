"""How good `auto`'s plans are, and what they cost to make.

`run()` plans every recorded graph at every preset that covers it, at both placements, and compares the simulated step
with `none`, `size` at six caps and `module` by blocks of the model, each at both placements (at `original` alone where
`auto` plans for that), and with the lower bound; where others' figures for a graph are published beside it, with those.
Then it plans a generated model of 3,400 candidates under every preset, as shipped and as a calibration might leave it,
and models of other lengths to show how time grows.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from bucketplan_core.bound import lower_bound_ns
from bucketplan_core.collectives import PLACEMENTS, Candidate, Group, Options
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
RECORDED_MS = {
    "tt_llama3_8b_fsdp64": (922, 924),
    "tt_dsv3_16b_fsdp64_ep8": (555, 632),
    "ap_llama3_8b_fw_64_1d": (None, 547),
    "ap_llama3_8b_bw_64_1d": (None, 1_312),
}
"""Steps that came with the graphs: per-block buckets issued one block ahead, and the better of Inductor's two ways.

Their judge is a roofline at 70% of an H100's peak with 8 nodes of 8 over NDR; preset `h100-ndr` has the same constants.
"""
RECORDED_PRESET = "h100-ndr"
HIDDEN, FEED_FORWARD = 8_192, 28_672


def generate(
    num_layers: int, *, seed: int = 0, ranks: int = 64, nodes: int = 8, narrower: int = 1
) -> tuple[Request, CostProfile]:
    """A joint graph of a dense model of `num_layers` blocks of 14 parameters, its sizes and compute drawn from `seed`.

    Forward gathers, backward gathers in reverse order, and a reduction of each gradient on one group; 81 blocks give
    1,137 parameters and about 3,400 candidates, three to a parameter (the embedding is not gathered again). `narrower`
    divides the widths.
    """
    rng = random.Random(seed)
    hidden, feed_forward = HIDDEN // narrower, FEED_FORWARD // narrower
    small = [hidden] * 5
    large = [hidden * hidden] * 2 + [hidden * hidden // 8] * 4 + [hidden * feed_forward] * 3
    names, sizes = ["embedding"], [128_256 * hidden]
    for layer in range(num_layers):
        block = small + large
        rng.shuffle(block)
        names += [f"layers.{layer}.p{k}" for k in range(len(block))]
        sizes += block
    names += ["norm", "output"]
    sizes += [hidden, 128_256 * hidden]
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


def auto_options(options: Options, request: Request, preset: str, placement: str = "scheduled") -> Options:
    hardware = resolve_preset(preset, _shapes(request))
    return replace(options, strategy="auto", planner="auto/1", placement=placement, hardware=hardware)


def rules(request: Request, options: Options) -> Iterator[tuple[str, Request]]:
    """`none`, `size` at every cap and `module` by blocks, at both placements or, under `original`, at that."""
    blocks = [replace(c, scope=block_of(request, k) or None) for k, c in enumerate(request.candidates)]
    scoped = replace(request, candidates=tuple(blocks)) if any(c.scope for c in blocks) else None
    for placement in ("original", "scheduled") if options.placement == "scheduled" else ("original",):
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


def compare(name: str, request: Request, profile: CostProfile, preset: str, placement: str) -> dict[str, Any]:
    """One line of the table: `auto` beside the best rule and the bound, step times in ns."""
    options = auto_options(request.options, request, preset, placement)
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
        "placement": placement,
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
    """The figures of `planner.json`, and the tables and growth of planning time as notes."""
    rows = []
    for name in graph_names():
        request, profile = load_graph(name)
        for preset in preset_names():
            if preset_fits(preset, _shapes(request)):
                rows += [compare(name, request, profile, preset, placement) for placement in PLACEMENTS]
    cases = list(timed_cases())
    timings = [time_one(*case) for case in cases]
    # Other load on the machine shows up as CPU time, too: the slowest are planned again, and the lesser counts.
    for number in sorted(range(len(cases)), key=lambda n: -timings[n].cpu_s)[:5]:
        timings[number] = min(timings[number], time_one(*cases[number]), key=lambda timing: timing.cpu_s)
    growth = [time_one(f"{layers} blocks", *_planned(*generate(layers), "h100-ndr")) for layers in (20, 40, 81, 162)]
    worst = max(timings, key=lambda timing: timing.cpu_s)
    figures: dict[str, int | float] = {
        "plan_cpu_s_3400": worst.cpu_s,
        "plan_cpu_s_3400_median": statistics.median(timing.cpu_s for timing in timings),
        "plan_cpu_growth_3400_to_6800": growth[-1].cpu_s / growth[-2].cpu_s,
        "generated_gap_to_bound": growth[-2].step_ns / growth[-2].bound_ns,
    }
    recorded = recorded_rows(rows)
    for placement in PLACEMENTS:
        figures |= _summary([row for row in rows if row["placement"] == placement], placement)
    if recorded:
        figures["worst_ratio_to_recorded_best"] = max(row["auto_ns"] / best for row, _, best in recorded)
    slowest = sorted(timings, key=lambda timing: -timing.cpu_s)[:5]
    lines = [*table(rows), *_recorded_lines(recorded), "", f"planning in CPU seconds, the slowest 5 of {len(timings)}"]
    lines += [timing.line() for timing in slowest]
    lines += ["", "growth under h100-ndr", *(timing.line() for timing in growth)]
    return Result(figures, "\n".join(lines))


def _summary(rows: list[dict[str, Any]], placement: str) -> dict[str, float]:
    if not rows:
        return {}
    ratios = [row["auto_ns"] / row["best_rule_ns"] for row in rows]
    gaps = [row["auto_ns"] / row["bound_ns"] for row in rows]
    figures = {
        "worst_ratio_to_best_baseline": max(ratios),
        "geomean_ratio_to_best_baseline": _geomean(ratios),
        "geomean_ratio_to_none_as_traced": _geomean([row["auto_ns"] / row["none_as_traced_ns"] for row in rows]),
        "worst_gap_to_bound": max(gaps),
        "geomean_gap_to_bound": _geomean(gaps),
        "worst_plan_cpu_s_recorded": max(row["cpu_s"] for row in rows),
    }
    return figures if placement == "scheduled" else {f"{key}_{placement}": value for key, value in figures.items()}


def recorded_rows(rows: list[dict[str, Any]]) -> list[tuple[dict[str, Any], tuple[int | None, int], float]]:
    """Rows that have published figures, with those in ms and the best of them in ns."""
    return [
        (row, published, min(ms for ms in published if ms is not None) * 1e6)
        for row in rows
        if row["preset"] == RECORDED_PRESET and row["placement"] == "scheduled"
        if (published := RECORDED_MS.get(row["graph"])) is not None
    ]


def _recorded_lines(recorded: list[tuple[dict[str, Any], tuple[int | None, int], float]]) -> list[str]:
    lines = [
        "",
        f"beside the figures that came with the graphs, ms a step, constants of {RECORDED_PRESET}",
        "| graph | per-block, one ahead | Inductor | auto | of it compute | bound | auto / best of theirs |",
        "|---|---|---|---|---|---|---|",
    ]
    for row, (per_block, inductor), best in recorded:
        lines.append(
            f"| {row['graph']} | {'-' if per_block is None else per_block} | {inductor} | {row['auto_ns'] / 1e6:.1f} "
            f"| {row['compute_ns'] / 1e6:.1f} | {row['bound_ns'] / 1e6:.1f} | {row['auto_ns'] / best:.3f} |"
        )
    return lines if recorded else []


@dataclass(frozen=True, slots=True)
class Timing:
    """What planning one generated model took, and what came of it."""

    name: str
    candidates: int
    largest_lane: int
    cpu_s: float
    step_ns: int
    bound_ns: int

    def line(self) -> str:
        return (
            f"{self.name}: {self.candidates} candidates ({self.largest_lane} in the largest lane), {self.cpu_s:.2f} s, "
            f"{self.step_ns / 1e6:.1f} ms a step, bound {self.bound_ns / 1e6:.1f} ms"
        )


def _planned(request: Request, profile: CostProfile, preset: str) -> tuple[Request, CostProfile]:
    return request.with_options(auto_options(request.options, request, preset)), profile


def timed_cases() -> Iterator[tuple[str, Request, CostProfile]]:
    """3,400 candidates under every preset at every group shape that it covers, as shipped and as measured.

    A calibration adds a cost of launches and a slowdown, which no preset has; `original` and a deeper prefetch plan the
    same under other rules. gloo gets a narrower model: planners refuse a step of more than 78 hours.
    """
    for preset in preset_names():
        for ranks, nodes in ((8, 1), (64, 8), (64, 64), (256, 32)):
            if not preset_fits(preset, {"fsdp": GroupShape(ranks, nodes)}):
                continue
            narrower = 32 if preset == "gloo-loopback" else 1
            request, profile = _planned(*generate(81, ranks=ranks, nodes=nodes, narrower=narrower), preset)
            shipped = request.options
            assert shipped.hardware is not None
            measured = replace(shipped.hardware, launch_ns=5_000, slowdown_permille=100)
            for how, options in (
                ("as shipped", shipped),
                ("5 us a launch", replace(shipped, hardware=replace(measured, slowdown_permille=0))),
                ("5 us a launch, 10% slowdown", replace(shipped, hardware=measured)),
                ("original", replace(shipped, placement="original")),
                ("prefetch 3", replace(shipped, prefetch=3)),
            ):
                yield f"{preset} {ranks} ranks on {nodes}, {how}", request.with_options(options), profile


def time_one(name: str, request: Request, profile: CostProfile) -> Timing:
    """Plan from a request that nothing has been computed from."""
    fresh = Request.decode(request.encoded)
    begun = time.process_time()
    plan = make_plan(fresh, profile)
    seconds = time.process_time() - begun
    figures = plan.assessment["simulated"]
    bound = plan.assessment["bound_ns"]
    assert isinstance(figures, dict)
    assert isinstance(bound, int)
    step = figures["step_ns"]
    assert isinstance(step, int)
    largest = max(len(lane.members) for lane in fresh.lanes)
    return Timing(name, len(fresh.candidates), largest, seconds, step, bound)


def _geomean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def table(rows: list[dict[str, Any]]) -> list[str]:
    """One line a graph and preset, milliseconds."""
    lines = [
        "milliseconds a step; `best rule` of none, module by blocks and size at six caps, each at both placements",
        "| graph | preset | placement | traced | best rule | auto | bound | /best | /bound | buckets | peak GB | CPU |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['graph']} | {row['preset']} | {row['placement']} | {row['none_as_traced_ns'] / 1e6:.3f} "
            f"| {row['best_rule_ns'] / 1e6:.3f} ({row['best_rule']}) | {row['auto_ns'] / 1e6:.3f} "
            f"| {row['bound_ns'] / 1e6:.3f} | {row['auto_ns'] / row['best_rule_ns']:.4f} "
            f"| {row['auto_ns'] / row['bound_ns']:.5f} | {row['buckets']}/{row['candidates']} "
            f"| {row['peak_bytes'] / 1e9:.1f} | {row['cpu_s']:.2f} |"
        )
    return lines


if __name__ == "__main__":
    result = run()
    print(result.notes, *(f"{key}: {value:.5f}" for key, value in result.figures.items()), sep="\n")
