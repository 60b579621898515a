"""A hit is a plan that was answered, a miss a plan that is not stored; what else reads plans is neither."""

from collections.abc import Iterator

import pytest

from bucketplan_core.wire import pack
from tests.support.documents import MSGPACK, plan_body, small_request
from tests.support.inprocess import InProcess, in_process

REQUEST = small_request(1)
PLAN = f"/v1/plans/{REQUEST.signature}"
UNKNOWN = f"/v1/plans/{'0' * 64}"
HEADERS = {name.replace("-", "_"): value for name, value in MSGPACK.items()}


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[InProcess]:
    with in_process([str(tmp_path_factory.mktemp("hits") / "store.db")], planner_processes=1) as opened:
        posted = opened.run(opened.call("POST", "/v1/plans", content=plan_body(REQUEST), **HEADERS))
        assert posted.status_code == 201
        yield opened


def counted(servers: InProcess, method: str, path: str, status: int, **call: object) -> dict[str, int]:
    """What a call changes of the counters of hits and misses."""
    tallies = servers.states[0].metrics.tallies
    before = dict(tallies)
    assert servers.run(servers.call(method, path, **call)).status_code == status
    changed = {name: number - before.get(name, 0) for name, number in tallies.items() if "_plan_" in name[0]}
    return {f"{name[0].split('_')[2]} {name[1]}".strip(): number for name, number in changed.items() if number}


@pytest.mark.parametrize("accept", ["application/msgpack", "application/json"])
def test_a_plan_from_memory_is_a_hit(servers, accept):
    assert counted(servers, "GET", PLAN, 200, accept=accept) == {"hits memory": 1}


def test_a_known_plan_that_is_posted_is_a_hit_and_a_new_one_is_none(servers):
    assert counted(servers, "POST", "/v1/plans", 200, content=plan_body(REQUEST), **HEADERS) == {"hits memory": 1}
    other = plan_body(small_request(2))
    assert counted(servers, "POST", "/v1/plans", 201, content=other, **HEADERS) == {}


def test_a_plan_from_the_store_is_a_hit(servers):
    servers.states[0].plans.forget(REQUEST.signature)
    assert counted(servers, "GET", PLAN, 200) == {"hits store": 1}


def test_an_unknown_plan_is_a_miss(servers):
    assert counted(servers, "GET", UNKNOWN, 404) == {"misses": 1}


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (f"{PLAN}/trace", (200, 422)),
        (f"{PLAN}/explain", (200, 422)),
        (f"{UNKNOWN}/trace", (404,)),
        (f"/plans/{REQUEST.signature}", (200,)),
        (f"/v1/diff?a={REQUEST.signature}&b={REQUEST.signature}", (200,)),
    ],
)
def test_what_else_reads_plans_is_neither(servers, path, status):
    found = servers.run(servers.call("GET", path))
    assert found.status_code in status
    assert counted(servers, "GET", path, found.status_code) == {}


def test_an_unknown_epoch_is_neither(servers):
    for headers in ({}, {"accept": "application/msgpack"}):
        assert counted(servers, "GET", PLAN, 404, bucketplan_epoch="9" * 64, **headers) == {}
    body = pack({"reason": "why", "options": {"strategy": "none"}})
    assert counted(servers, "POST", f"{PLAN}/revisions", 201, content=body, **HEADERS) == {}
