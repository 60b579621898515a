"""A connection on which no complete request head arrives is closed; one with a request under way is not."""

import contextlib
import resource
import socket
import time

import httpx

from tests.support.server import RunningServer, running_server

HEAD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
PATIENCE_S = 60.0


def connected(server: RunningServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)


def answer_on(connection: socket.socket) -> bytes:
    """The head of the next answer."""
    received = b""
    while b"\r\n\r\n" not in received:
        part = connection.recv(65536)
        assert part, f"closed after {received!r}"
        received += part
    return received


def is_closed(connection: socket.socket) -> bool:
    """Whether the server closes it, within a patience that only a failure uses up."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


def test_without_a_complete_head_it_is_closed_and_a_call_that_waits_is_answered(tmp_path):
    with running_server(tmp_path) as server, contextlib.ExitStack() as stack:
        silent, half, again, one_byte, waiting = (stack.enter_context(connected(server)) for _ in range(5))
        # Longer than a head may take.
        waiting.sendall(b"GET /v1/plans/" + b"0" * 64 + b"?wait=14 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        half.sendall(HEAD)
        for connection, rest in ((again, HEAD), (one_byte, b"G")):
            connection.sendall(HEAD + b"\r\n")
            assert b" 200 " in answer_on(connection)
            connection.sendall(rest)
        assert [is_closed(each) for each in (silent, half, again, one_byte)] == [True] * 4
        assert b" 404 " in answer_on(waiting)
        waiting.sendall(HEAD + b"\r\n")
        assert b" 200 " in answer_on(waiting)


def test_more_silent_connections_than_descriptors_do_not_keep_callers_out(tmp_path):
    with running_server(tmp_path) as server, contextlib.ExitStack() as stack:
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (200, 200))
        for _ in range(260):
            stack.enter_context(connected(server))
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                assert httpx.get(f"{server.url}/healthz", timeout=5).status_code == 200
                return
            assert time.monotonic() < deadline, "no connection was answered"
