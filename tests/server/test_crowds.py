"""Who looks does not wait behind plannings, and who verifies not behind callers that left."""

import contextlib
import socket

import httpx

from bucketplan_core.wire import pack, to_json, unpack
from tests.support.documents import MSGPACK, plan_body, small_request
from tests.support.guarded import wait_until
from tests.support.server import RunningServer, running_server, wait_for_planning

JSON = {"Content-Type": "application/json"}


def stored(client: httpx.Client, number: int) -> str:
    request = small_request(number)
    client.post("/v1/plans", content=plan_body(request), headers=MSGPACK)
    wait_until(lambda: client.get(f"/v1/plans/{request.signature}").status_code == 200)
    return request.signature


def test_who_looks_does_not_wait_behind_a_planning(tmp_path):
    with running_server(tmp_path) as server, httpx.Client(base_url=server.url, timeout=120) as client:
        request = small_request(1)
        signature = stored(client, 1)
        # The first read of all starts the process that reads.
        assert client.get(f"/v1/diff?a={signature}&b={signature}").status_code == 200
        posted = to_json({"profile": None, "request": request.to_wire(), "signature": signature})
        server.kill()
        slow = {"plan_wait_seconds": 0, "planning_seconds": 600}
        with (
            running_server(tmp_path, database=server.database, **slow) as busy,
            httpx.Client(base_url=busy.url, timeout=120) as calls,
        ):
            assert calls.post("/v1/plans", content=plan_body(small_request(2)), headers=MSGPACK).status_code == 202
            wait_for_planning(busy)
            assert calls.get(f"/v1/diff?a={signature}&b={signature}").status_code == 200
            assert calls.get(f"/v1/plans/{signature}/explain").status_code in (200, 422)
            assert calls.post("/v1/plans", content=posted, headers=JSON).status_code == 200
            replan = pack({"reason": "r", "options": {"strategy": "none"}})
            refused = calls.post(f"/v1/plans/{signature}/revisions", content=replan, headers=MSGPACK)
            assert (refused.status_code, unpack(refused.content)["type"]) == (503, "urn:bucketplan:problem:busy")
            assert "Retry-After" in refused.headers


def test_verifications_are_few_and_end_when_their_callers_leave(tmp_path):
    with running_server(tmp_path) as server, httpx.Client(base_url=server.url, timeout=120) as client:
        stored(client, 3)
    with (
        running_server(tmp_path, database=server.database, planning_seconds=600.0) as server,
        httpx.Client(base_url=server.url, timeout=2) as client,
    ):

        def status() -> int:
            with contextlib.suppress(httpx.ReadTimeout):
                return client.get("/v1/events/verify").status_code
            return 0

        with contextlib.ExitStack() as callers:
            for _ in range(4):
                callers.enter_context(verifying(server))
            wait_until(lambda: status() == 503)
        wait_until(lambda: status() == 200)


@contextlib.contextmanager
def verifying(server: RunningServer):
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(b"GET /v1/events/verify?replay=true HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        yield connection
