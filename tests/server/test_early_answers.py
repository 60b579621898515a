"""Who is answered before all of its call was read gets the whole answer and no reset, within bounds."""

import contextlib
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.guarded import wait_until
from tests.support.server import RunningServer, running_server
from tests.support.tls import make_tls_files

MOST_BYTES = 2**20
POST = "POST /v1/plans HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/msgpack\r\n"
NOWHERE = POST.replace("plans", "nothing")
TOO_LONG = f"Content-Length: {2 * MOST_BYTES}\r\n"
LENGTH = f"Content-Length: {MOST_BYTES}\r\n"
EARLY = {
    "too large": (POST + TOO_LONG, 413),
    "a coding that the server does not read": (POST + LENGTH + "Content-Encoding: br\r\n", 415),
    "a caller that wants it closed": (NOWHERE + LENGTH + "Connection: close\r\n", 404),
    "HTTP/1.0, as proxies speak it": (NOWHERE.replace("HTTP/1.1", "HTTP/1.0") + LENGTH, 404),
    "no HTTP": ("I would like to plan, please\r\n", 400),
}
PATIENCE_S = 60.0


@contextlib.contextmanager
def connected(server: RunningServer) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        if server.url.startswith("https"):
            with ssl._create_unverified_context().wrap_socket(connection) as wrapped:
                yield wrapped
        else:
            yield connection


def everything(connection: socket.socket) -> bytes:
    received = b""
    while part := connection.recv(65_536):
        received += part
    return received


def sockets_of(server: RunningServer) -> int:
    links = []
    for each in Path(f"/proc/{server.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(str(each.readlink()))
    return sum(link.startswith("socket:") for link in links)


@pytest.fixture(scope="module", params=["http", "https"])
def server(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    tls = {}
    if request.param == "https":
        files = make_tls_files(folder)
        tls = {"tls_certificate": str(files.certificate), "tls_key": str(files.key)}
    with running_server(folder, max_body_bytes=MOST_BYTES, **tls) as server:
        yield server


@pytest.mark.parametrize("case", EARLY)
def test_who_sends_all_before_it_reads_has_the_whole_answer(server, case):
    head, status = EARLY[case]
    body = bytes(MOST_BYTES if LENGTH in head else 2 * MOST_BYTES)
    with connected(server) as connection:
        connection.sendall(head.encode() + b"\r\n" + body)
        answer = everything(connection)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    (length,) = [line.split()[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    assert len(body) == int(length)


def test_who_never_ends_is_closed_all_the_same(tmp_path):
    deadline = time.monotonic() + PATIENCE_S
    with running_server(tmp_path, max_body_bytes=MOST_BYTES) as server, contextlib.ExitStack() as stack:
        before = sockets_of(server)
        talks, stalls = (stack.enter_context(connected(server)) for _ in range(2))
        for connection in (talks, stalls):
            connection.sendall(f"{POST}{TOO_LONG}\r\n".encode())
            wait_until(lambda: b" 413 " in connection.recv(65_536, socket.MSG_PEEK))  # noqa: B023  # called before it changes
        while sockets_of(server) > before:
            assert time.monotonic() < deadline, "a connection that was answered is still open"
            with contextlib.suppress(OSError):
                talks.sendall(bytes(100))
            time.sleep(0.01)


def test_a_connection_that_lingers_does_not_hold_up_the_end(tmp_path):
    with running_server(tmp_path, max_body_bytes=MOST_BYTES) as server, connected(server) as connection:
        connection.sendall(f"{POST}{TOO_LONG}\r\n".encode())
        wait_until(lambda: b" 413 " in connection.recv(65_536, socket.MSG_PEEK))
        assert server.terminate() == 0
        assert "Traceback" not in server.log.read_text()


def test_an_answer_that_comes_behind_the_close_is_dropped(tmp_path):
    with running_server(tmp_path, max_body_bytes=MOST_BYTES) as server:
        with connected(server) as connection:
            connection.sendall(b"GET /v1/plans HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nno HTTP\r\n")
            assert everything(connection).startswith(b"HTTP/1.1 400 ")
            # The connection is still open on this side, so the server has a place to write the first answer to.
            assert httpx.get(f"{server.url}/v1/plans", timeout=PATIENCE_S).status_code == 200
        assert server.terminate() == 0
        assert "Traceback" not in server.log.read_text()
