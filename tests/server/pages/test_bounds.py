"""A plan of 3,410 candidates makes a page of bounded size."""

from dataclasses import replace

from bucketplan_core.planning import make_plan
from bucketplan_core.presets import resolve_preset
from bucketplan_server.pages.figures import PlanQuery, view_plan
from bucketplan_server.pages.timeline import MAX_BOXES, join
from bucketplan_server.planner.planned import Stored
from tests.benchmarks.bench_planner import _shapes, generate


def test_a_large_plan_is_drawn_and_listed_within_bounds():
    request, profile = generate(81)
    hardware = resolve_preset("h100-ndr", _shapes(request))
    options = replace(request.options, strategy="none", planner="none/1", hardware=hardware)
    request = replace(request, options=options)
    plan = make_plan(request, profile)
    stored = Stored(request=request.encoded, profile=profile.encoded, plan=plan.encoded)
    view = view_plan(stored, PlanQuery(find="layers.7", order="exposed", size=50))
    assert len(view.rows) == 50 < view.num_found < view.num_buckets
    assert all("layers.7" in row.names[0] for row in view.rows)
    exposed = [row.why["exposed_ns"] for row in view.rows]
    assert exposed == sorted(exposed, reverse=True)
    assert exposed[0] > 0
    for timeline in (view.before, view.after):
        assert timeline.num_boxes <= MAX_BOXES
        for category in ("compute", "wait", "hidden", "exposed"):
            assert sum(s.totals[category] for s in timeline.slices) == sum(r.total_ns(category) for r in timeline.rows)


def test_joined_intervals_keep_their_number_and_their_ends():
    intervals = [(n * 10, n * 10 + 5, str(n)) for n in range(1_000)]
    joined = join(intervals, unit_ns=1, most=40)
    assert len(joined) <= 40
    assert sum(count for *_, count in joined) == 1_000
    assert (joined[0][0], joined[-1][1]) == (0, 9_995)
