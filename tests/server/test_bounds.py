"""A plan of 3,410 candidates makes a page of bounded size, and so do long lists, of which the store reads one page."""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import create_engine, event

from bucketplan_core.planning import make_plan
from bucketplan_core.presets import resolve_preset
from bucketplan_server.pages.figures import PlanQuery, view_plan
from bucketplan_server.pages.timeline import MAX_BOXES, join
from bucketplan_server.planner.planned import Stored
from bucketplan_server.store.tables import metadata
from tests.benchmarks.bench_planner import _shapes, generate
from tests.support.crowded import JOB, Crowd, crowded_server
from tests.support.documents import profile_of, small_request
from tests.support.inprocess import InProcess, in_process

REQUEST = small_request()
CROWD = Crowd(num_jobs=60, num_attempts=60, num_revisions=120, num_plans=120, num_events=400)
LISTS = {
    "/": 24,
    "/plans": 50,
    "/jobs": 20,
    f"/jobs/{JOB}": 20,
    f"/jobs/{JOB}?before=40": 20,
    "/events": 50,
    f"/events?job={JOB}": 50,
    f"/events?signature={REQUEST.signature}": 50,
}
"""Rows that a page of each list has in this crowd."""
MOST_BYTES = 200_000
_IN_ORDER = re.compile(r"FROM (?:events|signatures)\b.*ORDER BY", re.DOTALL)


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    with crowded_server(tmp_path_factory.mktemp("crowd"), REQUEST, profile_of(REQUEST), CROWD) as server:
        server.kill()
        with in_process([server.database]) as servers:
            yield servers


def get(servers: InProcess, path: str) -> str:
    answer = servers.run(servers.call("GET", path, accept="text/html"))
    assert answer.status_code == 200, answer.text
    assert len(answer.content) < MOST_BYTES
    return answer.text


@pytest.mark.parametrize(("path", "num_rows"), LISTS.items())
def test_a_list_has_a_page_of_rows_that_the_store_reads_in_their_order(crowded, path, num_rows):
    engine = crowded.states[0].store._engine.sync_engine
    asked: list[tuple[str, tuple[object, ...]]] = []

    def remember(_connection, _cursor, statement, parameters, _context, _many):
        asked.append((statement, parameters))

    event.listen(engine, "before_cursor_execute", remember)
    try:
        assert get(crowded, path).count('<th scope="row"') == num_rows
    finally:
        event.remove(engine, "before_cursor_execute", remember)
    ordered = [(said, given) for said, given in asked if _IN_ORDER.search(said)]
    apart = create_engine(engine.url.set(drivername="sqlite"))
    with apart.connect() as connection:
        for statement, parameters in ordered:
            steps = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", tuple(parameters)).all()
            # Of the list of plans, the page is cut inside; the join of its rows is sorted again.
            has_page = any(step.detail.endswith(" listed") and step.parent == 0 for step in steps)
            sorts = [step for step in steps if "TEMP B-TREE" in step.detail and not (has_page and step.parent == 0)]
            assert sorts == [], (statement, steps)
    apart.dispose()


def test_a_page_of_revisions_is_read_not_all_of_them(crowded):
    rows = r'<th scope="row" class="num"><a href="/plans/[0-9a-f]+\?revision=(\d+)"'
    address = f"/plans/{REQUEST.signature}"
    pages = [list(map(int, re.findall(rows, get(crowded, f"{address}?revisions={n}")))) for n in (1, 2, 3, 4)]
    last = list(range(20, 0, -1))
    assert pages == [list(range(120, 70, -1)), list(range(70, 20, -1)), last, last]
    newest = get(crowded, address)
    assert f"and {CROWD.num_jobs - 20} more jobs" in newest
    assert "job-00019" in newest
    assert "job-00020" not in newest
    found = crowded.run(crowded.states[0].revisions.revisions(REQUEST.signature, after=70, limit=10))
    assert [row.revision for row in found] == list(range(71, 81))
    listed = crowded.run(crowded.call("GET", f"/v1{address}/revisions?after=115", accept="application/json")).json()
    assert [row["revision"] for row in listed["revisions"]] == list(range(116, 121))


def test_the_migrations_make_the_tables_and_indexes_that_are_declared(crowded):
    engine = create_engine(crowded.states[0].store._engine.url.set(drivername="sqlite"))
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    engine.dispose()


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
