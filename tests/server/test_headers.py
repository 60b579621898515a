"""Headers mean the same for a plan from memory and for every other call."""

import socket

import httpx
import pytest

from tests.server.test_revisions import known
from tests.support.documents import MSGPACK
from tests.support.server import RunningServer, running_server


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running_server(tmp_path_factory.mktemp("headers")) as running:
        yield running


@pytest.fixture(scope="module")
def signature(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        return known(client, 1).signature


def raw(server: RunningServer, method: str, path: str, *lines: str) -> bytes:
    head = (f"{method} {path} HTTP/1.1", *lines, "Connection: close", "", "")
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall("\r\n".join(head).encode())
        answer = b""
        while part := connection.recv(65_536):
            answer += part
        return answer


@pytest.mark.parametrize("encoding", ["msgpack", "json"])
@pytest.mark.parametrize("name", ["Bucketplan-Epoch", "Authorization", "Host"])
def test_a_header_of_one_value_that_comes_twice_is_refused(server, signature, encoding, name):
    values = ("127.0.0.1", "localhost") if name == "Host" else ("0" * 64, "1" * 64)
    lines = [f"Accept: application/{encoding}", *(f"{name}: {value}" for value in values)]
    if name != "Host":
        lines.append("Host: 127.0.0.1")
    answer = raw(server, "GET", f"/v1/plans/{signature}", *lines)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert f"{name}: the call has several".encode() in answer


@pytest.mark.parametrize("name", ["Content-Type", "Content-Encoding"])
def test_a_body_is_of_one_kind(server, name):
    lines = ("Host: 127.0.0.1", "Content-Length: 0", f"{name}: application/json", f"{name}: application/msgpack")
    answer = raw(server, "POST", "/v1/plans", *lines)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert f"{name}: the call has several".encode() in answer


@pytest.mark.parametrize("encoding", ["msgpack", "json"])
def test_lines_of_a_list_count_together(server, signature, encoding):
    accept = ("Accept: text/html;q=0.1", f"Accept: application/{encoding}")
    answer = raw(server, "GET", f"/v1/plans/{signature}", "Host: localhost", *accept)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert f"content-type: application/{encoding}".encode() in answer


@pytest.mark.parametrize("accept", ["application/msgpack", "application/json"])
def test_the_callers_request_id_is_answered(server, signature, accept):
    url = f"{server.url}/v1/plans/{signature}"
    given = httpx.get(url, headers={"Accept": accept, "X-Request-Id": "mine-1"})
    assert (given.status_code, given.headers.get_list("x-request-id")) == (200, ["mine-1"])
    unfit = httpx.get(url, headers={"Accept": accept, "X-Request-Id": "not one!"})
    assert unfit.status_code == 200
    assert unfit.headers["x-request-id"] != "not one!"
    # It is that caller's alone.
    assert httpx.get(url, headers={"Accept": accept}).headers.get("x-request-id") != "mine-1"


OWN = ("127.0.0.1", "127.8.9.1:8321", "localhost", "LOCALHOST:1", "localhost.", "plans.localhost", "[::1]:8321")
FOREIGN = ("evil.example", "evil.example:8321", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.1", "[", "")


@pytest.mark.parametrize("accept", ["application/msgpack", "application/json"])
@pytest.mark.parametrize("host", [*OWN, *FOREIGN])
def test_an_open_server_on_loopback_takes_calls_for_loopback_names_only(server, signature, host, accept):
    answer = raw(server, "GET", f"/v1/plans/{signature}", f"Host: {host}", f"Accept: {accept}")
    assert answer.startswith(b"HTTP/1.1 200 " if host in OWN else b"HTTP/1.1 403 ")
    assert (b"BUCKETPLAN_ALLOW_ANONYMOUS" in answer) == (host in FOREIGN)
    # Probes may come by any name.
    assert raw(server, "GET", "/healthz", f"Host: {host}").startswith(b"HTTP/1.1 200 ")


def test_a_page_of_another_name_changes_nothing(server, signature):
    headers = {"Host": "evil.example", "Origin": "http://evil.example", "Sec-Fetch-Site": "same-origin"}
    answer = httpx.post(f"{server.url}/v1/plans/{signature}/activate", headers=headers | MSGPACK, content=b"")
    assert answer.status_code == 403
    assert server.metric("bucketplan_access_refused_total", reason="host") >= 1


def test_an_operator_may_let_an_open_server_be_called_by_any_name(tmp_path):
    with running_server(tmp_path, allow_anonymous=True) as server:
        assert raw(server, "GET", "/v1/plans", "Host: plans.example").startswith(b"HTTP/1.1 200 ")
