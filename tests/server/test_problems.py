"""Every error has one body, in whichever encoding and from whichever layer it comes."""

import asyncio
import socket

import httpx
import pytest
import uvicorn
from starlette.requests import Request
from starlette.types import ASGIApp

from bucketplan_core.wire import from_json, pack, unpack
from bucketplan_server.access.authenticate import Access
from bucketplan_server.access.tokens import TokenTable
from bucketplan_server.http.app import build_app
from bucketplan_server.http.front import Front
from bucketplan_server.http.intake import Intake
from bucketplan_server.memory import EpochMemory, PlanMemory
from bucketplan_server.metrics import Metrics
from bucketplan_server.problems import PROBLEMS
from bucketplan_server.serve import open_state
from bucketplan_server.settings import Settings
from tests.support.documents import MSGPACK, plan_body, small_request
from tests.support.inprocess import front_of, in_process

WRONG = pack({"profile": None, "request": small_request(201).encoded, "signature": small_request(202).signature})
CALLS = {
    "invalid-body": ("POST", "/v1/plans", MSGPACK, b"\xc1"),
    "invalid-parameter": ("GET", "/v1/plans/short", {}, b""),
    "not-found": ("GET", "/v2/plans", {}, b""),
    "unknown-signature": ("GET", f"/v1/plans/{'a' * 64}", {}, b""),
    "unknown-epoch": ("POST", "/v1/plans", MSGPACK | {"Bucketplan-Epoch": "b" * 64}, plan_body(small_request(203))),
    "method-not-allowed": ("DELETE", "/v1/plans", {}, b""),
    "body-too-large": ("POST", "/v1/plans", MSGPACK, bytes(300 * 1024)),
    "unsupported-media-type": ("POST", "/v1/plans", {"Content-Type": "text/plain"}, b"x"),
    "signature-mismatch": ("POST", "/v1/plans", MSGPACK, WRONG),
}


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
@pytest.mark.parametrize("slug", CALLS)
def test_errors_have_one_shape(client, slug, encoding):
    method, path, headers, body = CALLS[slug]
    answer = client.request(method, path, headers={**headers, "Accept": f"application/{encoding}"}, content=body)
    check_shape(answer, slug, encoding)


def check_shape(answer: httpx.Response, slug: str, encoding: str) -> None:
    assert answer.headers["content-type"] == f"application/problem+{encoding}"
    problem = from_json(answer.content) if encoding == "json" else unpack(answer.content)
    kind = PROBLEMS[slug]
    assert {"type", "title", "status", "detail"} <= set(problem)
    assert (problem["type"], problem["title"]) == (f"urn:bucketplan:problem:{slug}", kind.title)
    assert problem["status"] == answer.status_code == kind.status
    assert problem["detail"]
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-request-id"]


def test_not_acceptable_is_answered_in_json(client):
    client.post("/v1/plans", content=plan_body(small_request(203)), headers=MSGPACK)
    answer = client.get(f"/v1/plans/{small_request(203).signature}", headers={"Accept": "image/png"})
    check_shape(answer, "not-acceptable", "json")


def test_405_says_what_is_allowed(client):
    assert client.delete("/v1/plans").headers["allow"] == "POST"


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_a_fault_of_the_server_has_the_same_shape_and_hides_its_reason(encoding):
    async def broken(scope, receive, send):
        raise RuntimeError("secret detail")

    async def call() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(around(broken)), base_url="http://server") as client:
            return await client.get("/v1/plans", headers={"Accept": f"application/{encoding}"})

    answer = asyncio.run(call())
    check_shape(answer, "internal", encoding)
    assert b"secret" not in answer.content
    assert answer.headers["x-request-id"].encode() in answer.content


def around(app: ASGIApp, **options: str) -> Front:
    """A front with nothing in memory."""
    metrics = Metrics()
    intake = Intake(most_bytes=1024, timeout_seconds=30, retry_after_seconds=1)
    parts = {"memory": PlanMemory(0), "epochs": EpochMemory(), "metrics": metrics, "intake": intake}
    return Front(app, **parts, access=Access(TokenTable(required=False), metrics), max_body_bytes=1024, **options)


@pytest.mark.parametrize(
    ("peer", "trusted", "seen"),
    [
        ("127.0.0.1", {}, ("192.0.2.7", "https")),
        ("198.51.100.1", {}, ("198.51.100.1", "http")),
        ("198.51.100.1", {"trusted_proxies": "198.51.100.0/24"}, ("192.0.2.7", "https")),
    ],
)
def test_a_trusted_proxy_says_who_calls_and_how(peer, trusted, seen):
    async def echo(scope, receive, send):
        body = f"{scope['client'][0]} {scope['scheme']}".encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def call() -> httpx.Response:
        transport = httpx.ASGITransport(around(echo, **trusted), client=(peer, 4711))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            told = {"X-Forwarded-For": "192.0.2.7", "X-Forwarded-Proto": "https"}
            return await client.get("/v1/plans", headers=told)

    assert asyncio.run(call()).text == " ".join(seen)


async def raising(request: Request) -> None:
    await request.body()
    raise RuntimeError("secret detail")


@pytest.mark.parametrize("encoding", ["json", "msgpack"])
def test_a_route_that_raises_is_answered_as_a_problem_on_a_connection_that_goes_on(tmp_path, encoding):
    async def call() -> tuple[list[httpx.Response], list[object]]:
        async with open_state(Settings(database=str(tmp_path / "store.db"), planner_processes=1)) as state:
            app = build_app(state)
            app.add_api_route("/v1/raising", raising, methods=["GET", "POST"])
            with socket.create_server(("127.0.0.1", 0)) as listening:
                front = front_of(state, app)
                server = uvicorn.Server(uvicorn.Config(front, http="httptools", lifespan="off", log_config=None))
                serving = asyncio.create_task(server.serve(sockets=[listening]))
                url = f"http://127.0.0.1:{listening.getsockname()[1]}"
                headers = {"Accept": f"application/{encoding}", "X-Request-Id": "r-17"}
                async with httpx.AsyncClient(base_url=url, headers=headers) as client:
                    answers = [
                        await client.get("/v1/raising"),
                        await client.post("/v1/raising", content=bytes(1000)),
                        await client.get("/healthz", headers={"Accept": "application/json"}),
                    ]
                    ports = [answer.extensions["network_stream"].get_extra_info("client_addr") for answer in answers]
                server.should_exit = True
                await serving
        return answers, ports

    (*failed, after), ports = asyncio.run(call())
    for answer in failed:
        check_shape(answer, "internal", encoding)
        assert b"secret" not in answer.content
        assert answer.headers["x-request-id"] == "r-17"
        assert b"r-17" in answer.content
    assert after.status_code == 200
    assert len(set(ports)) == 1


def test_a_damaged_store_says_what_to_do_and_asks_for_no_repeat(tmp_path):
    path = tmp_path / "store.db"
    with in_process([str(path)]) as servers:
        assert servers.run(servers.call("GET", "/v1/jobs/any/attempts")).status_code == 200
        # A new connection, since the old one holds the pages of so small a file.
        servers.run(servers.states[0].store._engine.dispose())
        content = path.read_bytes()
        path.write_bytes(content[:100] + b"\xff" * (len(content) - 100))
        for address in ("/v1/jobs/any/attempts", "/v1/events", "/readyz"):
            answer = servers.run(servers.call("GET", address))
            check_shape(answer, "store-damaged", "json")
            assert "restore a backup" in answer.json()["detail"]
            assert "repeating the call will not help" in answer.json()["detail"]
            assert "retry-after" not in answer.headers
