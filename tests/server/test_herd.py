"""A fleet that starts at once: thousands of connections on one signature that nobody knows yet."""

from tests.benchmarks.bench_service import HERD_PLANNING_SECONDS, herd
from tests.support.server import running_server


def test_two_thousand_connections_get_one_planning_and_no_error(tmp_path):
    with running_server(tmp_path, planning_seconds=HERD_PLANNING_SECONDS) as server:
        plannings, errors = herd(server)
        assert (plannings, errors) == (1, 0)
        assert server.metric("bucketplan_http_responses_total", status="201") == 1
