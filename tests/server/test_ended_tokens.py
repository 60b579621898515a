"""A token that ends while its call is under way changes nothing any more, on real servers."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlencode

import pytest

from bucketplan_core.wire import pack
from bucketplan_server import cli_tokens
from bucketplan_server.settings import load_settings
from tests.support.documents import MSGPACK, plan_body, small_request
from tests.support.guarded import REFRESH_SECONDS, Guarded, make_token, open_body, report_body, wait_until
from tests.support.server import running_server

PLANNING_SECONDS = 2.0


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("ended")
    database = str(folder / "bucketplan.db")
    secrets = {role: make_token(database, role, role) for role in ("rank", "auditor", "operator")}
    with running_server(
        folder, database=database, refresh_seconds=REFRESH_SECONDS, planning_seconds=PLANNING_SECONDS
    ) as server:
        yield Guarded(server, secrets)


@pytest.fixture(scope="module")
def signature(guarded: Guarded) -> str:
    """A plan with a second revision, and attempt 1 of job `held`."""
    request = small_request(910)
    guarded.call("rank", "POST", "/v1/plans", content=plan_body(request), headers=MSGPACK).raise_for_status()
    body = {"reason": "another", "options": {"strategy": "none"}}
    guarded.post("operator", f"/v1/plans/{request.signature}/revisions", body).raise_for_status()
    guarded.post("rank", "/v1/jobs/held/attempts", open_body("first")).raise_for_status()
    return request.signature


def leaver(guarded: Guarded, name: str, role: str = "operator") -> str:
    secret = guarded.secrets[name] = make_token(guarded.server.database, name, role)
    wait_until(lambda: guarded.call(name, "GET", f"/v1/plans/{'0' * 64}").status_code == 404)
    return secret


def revoke(guarded: Guarded, name: str) -> None:
    cli_tokens.revoke(load_settings(database=guarded.server.database), name, reason="test")
    wait_until(lambda: guarded.call(name, "GET", f"/v1/plans/{'0' * 64}").status_code == 401)


def changes_of(guarded: Guarded, name: str) -> list[str]:
    events = guarded.call("auditor", "GET", "/v1/events?limit=1000").json()["events"]
    return [event["kind"] for event in events if event["actor"] == name]


@pytest.mark.parametrize(
    ("method", "path", "body", "media_type"),
    [
        ("POST", "/v1/plans", plan_body(small_request(911)), "application/msgpack"),
        ("POST", "/v1/plans/{}/activate", pack({"reason": "r", "revision": 2}), "application/msgpack"),
        (
            "POST",
            "/v1/plans/{}/revisions",
            pack({"reason": "r", "options": {"strategy": "size"}}),
            "application/msgpack",
        ),
        ("POST", "/v1/jobs/held/attempts", pack(open_body("second")), "application/msgpack"),
        ("POST", "/v1/jobs/held/attempts/1/reports", pack(report_body(None)), "application/msgpack"),
        (
            "POST",
            "/plans/{}/activate",
            urlencode({"reason": "r", "revision": "2"}).encode(),
            "application/x-www-form-urlencoded",
        ),
    ],
)
def test_a_token_that_ends_while_its_body_comes_changes_nothing(guarded, signature, method, path, body, media_type):
    name = f"slow-{len(guarded.secrets)}"
    secret = leaver(guarded, name)
    with socket.create_connection(("127.0.0.1", guarded.server.port), timeout=30) as connection:
        connection.sendall(
            f"{method} {path.format(signature)} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {secret}\r\n"
            f"Content-Type: {media_type}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body[:5]
        )
        revoke(guarded, name)
        connection.sendall(body[5:])
        assert connection.recv(4096).startswith(b"HTTP/1.1 401 ")
    assert guarded.refusals()[-1]["reason"] == "ended-token"
    assert changes_of(guarded, name) == []


def test_a_token_that_ends_while_its_replan_runs_adds_no_revision(guarded, signature):
    leaver(guarded, "replanner")
    body = {"reason": "late", "options": {"strategy": "size"}}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(guarded.post, "replanner", f"/v1/plans/{signature}/revisions", body)
        cli_tokens.revoke(load_settings(database=guarded.server.database), "replanner", reason="test")
        answer = waiting.result()
    assert answer.status_code == 401
    assert changes_of(guarded, "replanner") == []
    listed = guarded.call("auditor", "GET", f"/v1/plans/{signature}/revisions").json()["revisions"]
    assert [row["revision"] for row in listed] == [1, 2]


def test_a_plan_that_others_wait_for_outlives_the_token_that_had_it_planned(guarded):
    leaver(guarded, "first", "rank")
    body = plan_body(small_request(912))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(guarded.call, "first", "POST", "/v1/plans", content=body, headers=MSGPACK)
        wait_until(lambda: guarded.server.metric("bucketplan_waiters") == 1)
        second = pool.submit(guarded.call, "rank", "POST", "/v1/plans", content=body, headers=MSGPACK)
        wait_until(lambda: guarded.server.metric("bucketplan_waiters") == 2)
        cli_tokens.revoke(load_settings(database=guarded.server.database), "first", reason="test")
        assert (first.result().status_code, second.result().status_code) == (401, 200)
