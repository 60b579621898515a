"""What the page of a plan of 3,410 candidates costs the server: the view of it, in CPU of one process."""

import time
from dataclasses import replace

from bucketplan_core.planning import make_plan
from bucketplan_core.presets import resolve_preset
from bucketplan_server.pages.figures import PlanQuery, view_plan
from bucketplan_server.planner.planned import Stored
from tests.benchmarks.bench_planner import _shapes, generate
from tests.benchmarks.harness import Result

ROUNDS = 5


def run() -> Result:
    request, profile = generate(81)
    hardware = resolve_preset("h100-ndr", _shapes(request))
    options = replace(request.options, strategy="size", planner="size/1", placement="scheduled", hardware=hardware)
    request = replace(request, options=options)
    plan = make_plan(request, profile)
    stored = Stored(request=request.encoded, profile=profile.encoded, plan=plan.encoded)
    times = []
    for _ in range(ROUNDS):
        began = time.process_time_ns()
        view = view_plan(stored, PlanQuery())
        times.append(time.process_time_ns() - began)
    assert view.after is not None
    figures = {"view_cpu_ns": min(times), "num_candidates": len(request.candidates), "boxes": view.after.num_boxes}
    return Result(figures, "least of five rounds; the template adds the rendering of 50 bucket rows")
