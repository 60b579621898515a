"""Bodies on their way in are bounded together in bytes and each in time, on real servers."""

import asyncio
import contextlib
import json
import socket
import zlib
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from bucketplan_core.wire import pack, unpack
from bucketplan_server.http import bodies
from tests.support.documents import MSGPACK, plan_body, small_request
from tests.support.guarded import wait_until
from tests.support.server import RunningServer, running_server

MOST_BYTES = 2**20
HEAD = "POST /v1/plans HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: application/json\r\nContent-Type: application/msgpack\r\n"


@contextlib.contextmanager
def unfinished(server: RunningServer, body: bytes, *headers: str) -> Iterator[socket.socket]:
    """A call that has sent `body` and owes ten more bytes."""
    length = f"Content-Length: {len(body) + 10}\r\n"
    head = HEAD + length + "".join(f"{header}\r\n" for header in headers) + "\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head.encode() + body)
        yield connection


def answered(connection: socket.socket) -> tuple[int, dict[str, object]]:
    received = b""
    while part := connection.recv(65_536):
        received += part
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def held(server: RunningServer) -> float:
    return server.metric("bucketplan_body_bytes")


def inflating(num_bytes: int) -> bytes:
    """A gzip stream that does not end, of so many bytes."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return packer.compress(bytes(num_bytes)) + packer.flush(zlib.Z_SYNC_FLUSH)


@pytest.mark.parametrize("coding", ["identity", "gzip"])
def test_all_calls_together_hold_no_more_than_the_setting(tmp_path, coding):
    part = MOST_BYTES * 2 // 5
    body = inflating(part) if coding == "gzip" else bytes(part)
    header = f"Content-Encoding: {coding}"
    with running_server(tmp_path, max_body_bytes=MOST_BYTES // 2, max_bodies_bytes=MOST_BYTES) as server:
        with unfinished(server, body, header), unfinished(server, body, header):
            wait_until(lambda: held(server) == 2 * part)
            with unfinished(server, body, header) as third:
                status, problem = answered(third)
            assert (status, problem["type"]) == (503, "urn:bucketplan:problem:busy")
            assert "BUCKETPLAN_MAX_BODIES_BYTES" in str(problem["detail"])
            # Small calls go on while there is room, and what was refused holds nothing.
            small = httpx.post(
                f"{server.url}/v1/plans", content=plan_body(small_request(1)), headers=MSGPACK, timeout=60
            )
            assert small.status_code == 201
            assert held(server) == 2 * part
        wait_until(lambda: held(server) == 0)


def test_a_body_of_which_nothing_more_comes_is_refused(tmp_path):
    with running_server(tmp_path, body_timeout_seconds=0.3) as server, unfinished(server, bytes(100)) as connection:
        status, problem = answered(connection)
        assert (status, problem["type"]) == (408, "urn:bucketplan:problem:body-timeout")
        assert "no part of the body came within 0.3 s" in str(problem["detail"])
        assert held(server) == 0


def test_a_body_that_trickles_is_refused_in_the_end(tmp_path):
    with running_server(tmp_path, body_timeout_seconds=1.0) as server:
        head = HEAD + "Transfer-Encoding: chunked\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.port), timeout=0.1) as connection:
            connection.sendall(head.encode())
            received = b""
            while not received:
                connection.sendall(b"1\r\n\0\r\n")
                with contextlib.suppress(TimeoutError):
                    received = connection.recv(65_536)
            connection.settimeout(60)
            while part := connection.recv(65_536):
                received += part
        assert received.startswith(b"HTTP/1.1 408 ")
        assert b"was not whole within 10 s" in received


def test_a_body_that_comes_slowly_while_the_server_stops_is_answered(tmp_path):
    with running_server(tmp_path) as server, unfinished(server, bytes(100)) as connection:
        wait_until(lambda: held(server) == 100)
        assert server.terminate() == 0
        status, problem = answered(connection)
        assert (status, problem["type"]) == (503, "urn:bucketplan:problem:busy")
        assert "stopping" in str(problem["detail"])
        log = server.log.read_text()
    assert "Exception in ASGI application" not in log
    assert "Traceback" not in log


def test_a_call_that_is_cut_at_the_end_of_stopping_is_answered_quietly(tmp_path):
    request = small_request(2)
    with running_server(tmp_path) as server:
        posted = httpx.post(f"{server.url}/v1/plans", content=plan_body(request), headers=MSGPACK, timeout=60)
        assert posted.status_code == 201
    with (
        running_server(tmp_path, database=server.database, plan_wait_seconds=0, planning_seconds=60.0) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        body = pack({"reason": "r", "options": {"strategy": "none"}})
        url = f"{server.url}/v1/plans/{request.signature}/revisions"
        replan = pool.submit(httpx.post, url, content=body, headers=MSGPACK, timeout=120)
        wait_until(lambda: held(server) == len(body))
        assert server.terminate() == 0
        answer = replan.result()
        assert (answer.status_code, "stopped" in str(unpack(answer.content)["detail"])) == (503, True)
        log = server.log.read_text()
    assert "Exception in ASGI application" not in log


def test_a_post_that_waits_for_its_plan_holds_no_body(tmp_path):
    with running_server(tmp_path, planning_seconds=3.0) as server, ThreadPoolExecutor(2) as pool:
        request = plan_body(small_request(3))
        waiting = [
            pool.submit(httpx.post, f"{server.url}/v1/plans", content=request, headers=MSGPACK, timeout=60)
            for _ in range(2)
        ]
        wait_until(lambda: server.metric("bucketplan_waiters") == 2)
        assert held(server) == 0
        assert sorted(each.result().status_code for each in waiting) == [200, 201]


def test_requests_in_planning_are_bounded_in_bytes(tmp_path):
    first, second = plan_body(small_request(4)), plan_body(small_request(5))
    most = max(2048, len(first) * 3 // 2)
    with running_server(
        tmp_path, planning_seconds=3.0, plan_wait_seconds=0, max_body_bytes=most, max_bodies_bytes=most
    ) as server:
        statuses = [
            httpx.post(f"{server.url}/v1/plans", content=body, headers=MSGPACK, timeout=60).status_code
            for body in (first, second)
        ]
        assert statuses == [202, 503]


@pytest.mark.parametrize("length", [0, 1, 2**17 - 1, 2**17, 2**17 + 1, 10 * 2**17])
@pytest.mark.parametrize("part_bytes", [1, 7, 100_000])
def test_gzip_is_inflated_in_small_pieces_whatever_its_parts(length, part_bytes):
    content = (bytes(range(256)) * (length // 256 + 1))[:length]
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    packed = packer.compress(content) + packer.flush()

    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, len(packed), part_bytes):
            yield packed[start : start + part_bytes]

    async def inflated() -> list[bytes]:
        return [piece async for piece in bodies._inflate(parts(), 2**24)]

    pieces = asyncio.run(inflated())
    assert b"".join(pieces) == content
    assert max(map(len, pieces)) <= 2**17
