"""Known plans are answered in one write where a call is plain, and by the protocol server where it is not: alike."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import uvicorn

from bucketplan_core.collectives import Options
from bucketplan_server.http.protocol import ServerProtocol, write_stored
from tests.support.documents import MSGPACK, plan_body, small_request
from tests.support.load import read_answer, request_bytes
from tests.support.server import RunningServer, running_server

PATIENCE_S = 60.0
ACCEPT = {"Accept": "application/msgpack"}
REQUEST = small_request(1, num_candidates=75, options=Options(strategy="none", planner="none/1"))
PATH = f"/v1/plans/{REQUEST.signature}"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running_server(tmp_path_factory.mktemp("stored")) as server:
        posted = httpx.post(f"{server.url}/v1/plans", content=plan_body(REQUEST), headers=MSGPACK, timeout=60)
        assert posted.status_code == 201
        yield server


@contextlib.contextmanager
def connected(server: RunningServer) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        yield connection


def answers(connection: socket.socket, num_answers: int) -> list[tuple[list[bytes], bytes]]:
    """Head lines, and body, of so many answers from one connection."""
    received, found = b"", []
    while len(found) < num_answers:
        head, end, rest = received.partition(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        lengths = [int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:")] if end else []
        length = sum(lengths)
        if end and len(rest) >= length:
            found.append((head.split(b"\r\n"), rest[:length]))
            received = rest[length:]
            continue
        part = connection.recv(65_536)
        assert part, f"closed after {received!r}"
        received += part
    assert received == b""
    return found


CALLS = {
    "plain": {},
    "gzip": {"Accept-Encoding": "gzip"},
    "known": {"If-None-Match": "*"},
    "known, gzip": {"If-None-Match": "*", "Accept-Encoding": "gzip"},
    "with a request id": {"X-Request-Id": "job-7.rank-3"},
}
NOT_PLAIN = {"its end": {"Connection": "close"}, "100": {"Expect": "100-continue"}}


@pytest.mark.parametrize("not_plain", NOT_PLAIN)
@pytest.mark.parametrize("call", CALLS)
def test_both_ways_answer_alike(server, call, not_plain):
    with connected(server) as connection:
        connection.sendall(request_bytes("GET", PATH, ACCEPT | CALLS[call]))
        ((head, body),) = answers(connection, 1)
    with connected(server) as connection:
        connection.sendall(request_bytes("GET", PATH, ACCEPT | CALLS[call] | NOT_PLAIN[not_plain]))
        ((other_head, other_body),) = answers(connection, 1)

    def compared(lines: list[bytes]) -> list[bytes]:
        return [line for line in lines if not line.startswith((b"date: ", b"connection: "))]

    assert (compared(head), body) == (compared(other_head), other_body)
    assert [line.split(b": ")[0] for line in head].count(b"date") == 1


def test_which_calls_are_answered_in_one_write():
    written: list[bool] = []

    async def app(scope, receive, send):
        written.append(write_stored(scope, 200, b"content-length: 2\r\n", b"ok"))
        if not written[-1]:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})

    async def call_all() -> list[bytes]:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            config = uvicorn.Config(app, http=ServerProtocol, lifespan="off", access_log=False, log_config=None)
            server = uvicorn.Server(config)
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            bodies = []
            for headers in ({}, *NOT_PLAIN.values()):
                reader, writer = await asyncio.open_connection(*listening.getsockname())
                writer.write(request_bytes("GET", "/", headers))
                bodies.append((await read_answer(reader))[1])
                writer.close()
            server.should_exit = True
            await serving
        return bodies

    assert asyncio.run(call_all()) == [b"ok"] * 3
    assert written == [True, False, False]


def test_calls_that_come_together_are_answered_in_their_order(server):
    names = ["plain", "gzip", "with a request id", "known", "plain"]
    with connected(server) as connection:
        connection.sendall(b"".join(request_bytes("GET", PATH, ACCEPT | CALLS[name]) for name in names))
        found = answers(connection, len(names))
        assert [head[0].split()[1] for head, _ in found] == [b"200", b"200", b"200", b"304", b"200"]
        plain, packed, with_id, known, last = found
        assert b"content-encoding: gzip" in packed[0]
        assert b"x-request-id: job-7.rank-3" in with_id[0]
        assert plain[1] == with_id[1] == last[1] != packed[1]
        assert known[1] == b""
        # And the connection goes on.
        connection.sendall(request_bytes("GET", PATH, ACCEPT))
        assert answers(connection, 1)[0][1] == plain[1]


def test_one_that_reads_late_has_every_answer(server):
    num_calls = 5_000  # more bytes than the kernel takes for one that does not read
    with socket.socket() as connection, ThreadPoolExecutor(1) as pool:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        connection.settimeout(PATIENCE_S)
        connection.connect(("127.0.0.1", server.port))
        sending = pool.submit(connection.sendall, request_bytes("GET", PATH, ACCEPT) * num_calls)
        time.sleep(0.5)
        found = answers(connection, num_calls)
        sending.result()
    assert len({body for _, body in found}) == 1
