"""Predicted against measured step time of five plans of the demo's model on two gloo ranks of this host.

The ranks calibrate first; every plan is costed with that profile, simulated, applied to a copy of the graph and run.
Plans take turns step by step, so that what drifts falls on all of them alike.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bucketplan_core.collectives import Options
from bucketplan_core.cost import CostModel
from bucketplan_core.hardware import Hardware
from bucketplan_core.planning import make_plan
from bucketplan_core.presets import GroupShape, resolve_measured
from bucketplan_core.simulate import simulate
from tests.benchmarks.harness import Result
from tests.support.gloo_pool import gloo_pool

CANNOT_SHOW = (
    "Two ranks on two cores cannot show overlap: compute and gloo's threads share the cores, so what the simulator "
    "hides behind compute still takes its time here. Read ratios between plans of one column, not one column by the "
    "other."
)
RANKS = 2
_CAP_BYTES = 1_500_000


@dataclass(frozen=True, slots=True)
class Row:
    """One plan: collectives a step, its predicted step, and over rounds the median and the least of the slowest rank's
    step.
    """

    name: str
    num_collectives: int
    predicted_ns: int
    predicted_exposed_ns: int
    measured_ns: int
    least_ns: int


@dataclass(frozen=True, slots=True)
class Found:
    """What the ranks agree on: a row a plan, and relative errors of the calibration on sizes that it did not fit."""

    rows: list[Row]
    held_out_errors: list[float]


def plans_compared(hardware: Hardware) -> dict[str, Options]:
    """Five ways to plan one graph, from as traced to chosen by cost."""

    def options(strategy: str, placement: str) -> Options:
        return Options(
            strategy=strategy, planner=f"{strategy}/1", placement=placement, bucket_cap_bytes=_CAP_BYTES,
            first_bucket_cap_bytes=_CAP_BYTES, hardware=hardware,
        )  # fmt: skip

    return {
        "none_original": options("none", "original"),
        "none_scheduled": options("none", "scheduled"),
        "size_scheduled": options("size", "scheduled"),
        "module_scheduled": options("module", "scheduled"),
        "auto_scheduled": options("auto", "scheduled"),
    }


def measure_on_rank(small: bool, rounds: int) -> Found:
    """Runs on every rank: calibrate, plan, rewrite, and take turns; all ranks return the same."""
    import torch
    import torch.distributed as dist

    from bucketplan_client import build_module_bucket_plans
    from bucketplan_client.calibrate import CalibrationPlan, calibrate
    from bucketplan_client.capture.describe import describe_graph
    from bucketplan_client.rewrite.apply import apply_plan
    from tests.support import fsdp_model as demo

    sizes = {"max_bytes": 1 << 18, "repeats": 2, "matrix_size": 64} if small else {"max_bytes": 1 << 23}
    measured, fits = calibrate(CalibrationPlan(name="here", **({"repeats": 15, "matrix_size": 256} | sizes)))
    rank = dist.get_rank()
    shape = GroupShape(RANKS, 1)
    hardware = resolve_measured([measured], {"fsdp": shape, "fsdp_expert": shape})
    config = demo.SMALL if small else demo.TransformerConfig()
    torch.manual_seed(1)
    model = demo.Transformer(config)
    batch = demo.sample_batch(demo.read_corpus(), step=0, rank=rank, batch=4, num_tokens=config.max_tokens)
    ranks = list(range(RANKS))
    dense, expert = (
        demo.RankGroup(role=role, name=dist.new_group(ranks, group_desc=role).group_name, size=RANKS)
        for role in ("fsdp", "fsdp_expert")
    )
    policy = demo.FsdpPolicy(
        group_of=lambda name: expert if ".experts." in name else dense,
        reshard=lambda name: name.startswith("blocks."),
    )
    graph = demo.shard_graph(demo.trace_joint(model, *batch), policy)
    inputs = (
        *demo.shards_of(model, graph, dict.fromkeys(graph.param_names, (rank, RANKS))),
        *model.buffers(),
        *batch,
    )
    modules, predicted = {}, {}
    scopes = build_module_bucket_plans(model, ("blocks.*", ("embedding", "norm")))
    for name, options in plans_compared(hardware).items():
        own = copy.deepcopy(graph.gm)
        description = describe_graph(own, options=options, roles=graph.roles, scopes=scopes)
        # The profile is this rank's; shapes are equal, so every rank predicts and plans the same.
        plan = make_plan(description.request, description.profile)
        predicted[name] = simulate(CostModel.build(description.request, description.profile), plan.decision)
        apply_plan(description, plan)
        modules[name] = own
    times: dict[str, list[int]] = {name: [] for name in modules}
    names = list(modules)
    for number in range(-2, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            started = time.perf_counter_ns()
            with torch.no_grad():
                modules[name](*inputs)
            if number >= 0:
                times[name].append(time.perf_counter_ns() - started)
    rows = []
    for name, own_times in times.items():
        slowest = torch.tensor(own_times)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        found = predicted[name]
        rows.append(
            Row(
                name=name,
                num_collectives=found.num_collectives,
                predicted_ns=found.step_ns,
                predicted_exposed_ns=found.exposed_ns,
                measured_ns=int(slowest.median()),
                least_ns=int(slowest.min()),
            )
        )
    return Found(rows, [error for fit in fits for _, error in fit.held_out])


def table(rows: Sequence[Row]) -> list[str]:
    """One line a plan, milliseconds, and both figures as shares of the first plan's."""
    base = rows[0]
    lines = [
        "| plan | collectives | predicted ms | exposed ms | measured ms | least ms | predicted share | measured |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.name.replace('_', ', ')} | {row.num_collectives} | {row.predicted_ns / 1e6:.1f} "
        f"| {row.predicted_exposed_ns / 1e6:.1f} | {row.measured_ns / 1e6:.1f} | {row.least_ns / 1e6:.1f} "
        f"| {row.predicted_ns / base.predicted_ns:.2f} | {row.measured_ns / base.measured_ns:.2f} |"
        for row in rows
    ]
    return lines


def run(*, small: bool = False, rounds: int = 30) -> Result:
    """The figures of `steps.json`; `small` and few rounds are for trying it out."""
    found, other = gloo_pool(RANKS).run("tests.benchmarks.bench_steps:measure_on_rank", small, rounds, timeout_s=600)
    if found != other:
        raise RuntimeError(f"the ranks found different figures: {found} and {other}")
    figures: dict[str, int | float] = {}
    for row in found.rows:
        figures |= {
            f"predicted_ns_{row.name}": row.predicted_ns,
            f"measured_ns_{row.name}": row.measured_ns,
            f"measured_least_ns_{row.name}": row.least_ns,
            f"predicted_over_measured_{row.name}": row.predicted_ns / row.measured_ns,
        }
    errors = sorted(map(abs, found.held_out_errors))
    figures |= {"held_out_error_median": statistics.median(errors), "held_out_error_most": errors[-1]}
    return Result(figures, "\n".join([*table(found.rows), CANNOT_SHOW]))


if __name__ == "__main__":
    result = run()
    print(result.notes, *(f"{key}: {value:.5g}" for key, value in result.figures.items()), sep="\n")
