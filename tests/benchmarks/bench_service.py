"""The service under load: CPU of serving a known plan beside a bare ASGI application, and a herd on an unknown one.

Ratios are the bare application's CPU a request divided by ours, so 1 is free and 0.8 costs a quarter more. CPU of the
server process is what counts: the load generator shares the cores.
"""

import asyncio
import contextlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from bucketplan_core.collectives import Options
from bucketplan_server import cli_tokens
from bucketplan_server.settings import load_settings
from tests.benchmarks.harness import Result
from tests.support.documents import MSGPACK, plan_body, small_request
from tests.support.load import request_bytes, send_all
from tests.support.paths import ROOT
from tests.support.server import RunningServer, free_port, running_server

ROUNDS = 180
REQUESTS_A_ROUND = 50
WARM_UP_ROUNDS = 10
CPU_ROUNDS = 5
CPU_REQUESTS_A_ROUND = 100
HERD_CONNECTIONS = 2_000
HERD_PLANNING_SECONDS = 2.0
KNOWN_REQUESTS = 10_000
ALONE = Options(strategy="none", planner="none/1")
NUM_CANDIDATES = {"2k": 75, "50k": 1_740}
"""Candidates whose plan, each alone, is about 2 KB and 50 KB."""


def cpu_ns(pid: int) -> int:
    """CPU time of every thread of a process, from the scheduler's own account."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir())


def ask(connection: socket.socket, payload: bytes, length: int, times: int) -> None:
    """Send one request after the other and read answers of `length` bytes."""
    buffer = bytearray(length)
    for _ in range(times):
        connection.sendall(payload)
        left = memoryview(buffer)
        while left:
            left = left[connection.recv_into(left) :]


@contextlib.contextmanager
def bare_server(folder: Path, bodies: dict[str, bytes]) -> Iterator[tuple[int, int]]:
    """Port and process id of the bare application that answers `bodies` by path."""
    files: list[str] = []
    for index, (path, body) in enumerate(bodies.items()):
        file = folder / f"body{index}"
        file.write_bytes(body)
        files += [path, str(file)]
    port = free_port()
    command = [sys.executable, "-m", "tests.support.bare_asgi", str(port), *files]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL)
    try:
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        yield port, process.pid
    finally:
        process.kill()
        process.wait()


def answer_length(port: int, payload: bytes) -> int:
    """Bytes of one whole answer, head included."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(payload)
        received = b""
        while b"\r\n\r\n" not in received:
            received += connection.recv(65536)
        head, _, rest = received.partition(b"\r\n\r\n")
        (length,) = [
            int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
        ]
        while len(rest) < length:
            rest += connection.recv(65536)
        return len(head) + 4 + length


def hot_get_ratios(folder: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Bare CPU a request over ours, alternating in one run, by size, without and with a token; and CPU of other calls.

    The token is a rank's in a namespace, as fleets have one. The other calls are in microseconds of the server's CPU.
    """
    ratios: dict[str, float] = {}
    accept = {"Accept": "application/msgpack"}
    with running_server(folder) as server:
        paths, bodies, posts = {}, {}, {}
        for name, num_candidates in NUM_CANDIDATES.items():
            request = small_request(1, num_candidates=num_candidates, options=ALONE)
            posts[name] = plan_body(request)
            posted = httpx.post(f"{server.url}/v1/plans", content=posts[name], headers=MSGPACK, timeout=60)
            posted.raise_for_status()
            paths[name], bodies[name] = f"/v1/plans/{request.signature}", posted.content
        with bare_server(folder, {paths[name]: body for name, body in bodies.items()}) as (bare_port, bare_pid):
            token: dict[str, str] = {}
            for suffix in ("", "_token"):
                if suffix:
                    token["Authorization"] = f"Bearer {make_rank_token(server)}"
                for name, path in paths.items():
                    get = request_bytes("GET", path, accept | token)
                    ratios[name + suffix] = _ratio((server.port, server.pid, get), (bare_port, bare_pid, get))
        calls = {f"hot_get_{name}": request_bytes("GET", path, accept | token) for name, path in paths.items()}
        calls["unknown_get"] = request_bytes("GET", f"/v1/plans/{'0' * 64}", accept | token)
        calls["known_post_50k"] = request_bytes("POST", "/v1/plans", MSGPACK | token, posts["50k"])
        return ratios, {name: cpu_us(server, payload) for name, payload in calls.items()}


def make_rank_token(server: RunningServer) -> str:
    """The secret of a rank's token in a namespace; from when this returns the server needs one."""
    settings = load_settings(database=server.database)
    secret = cli_tokens.create(settings, "fleet", role="rank", namespace="team", expires="90d", reason="benchmark")
    path = f"{server.url}/v1/plans/{'0' * 64}"
    assert httpx.get(path).status_code == 401
    assert httpx.get(path, headers={"Authorization": f"Bearer {secret}"}).status_code == 404
    return secret


def cpu_us(server: RunningServer, payload: bytes) -> float:
    """CPU of the server process a request, in microseconds."""
    found = []
    length = answer_length(server.port, payload)
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        for number in range(-1, CPU_ROUNDS):
            before = cpu_ns(server.pid)
            ask(connection, payload, length, CPU_REQUESTS_A_ROUND)
            if number >= 0:
                found.append((cpu_ns(server.pid) - before) / CPU_REQUESTS_A_ROUND / 1_000)
    return statistics.median(found)


def _ratio(ours: tuple[int, int, bytes], bare: tuple[int, int, bytes]) -> float:
    found = []
    sides = [(*side, answer_length(side[0], side[2])) for side in (ours, bare)]
    connections = [socket.create_connection(("127.0.0.1", port)) for port, *_ in sides]
    try:
        for number in range(-WARM_UP_ROUNDS, ROUNDS):
            spent = [0, 0]
            for side in (0, 1) if number % 2 else (1, 0):
                _, pid, payload, length = sides[side]
                before = cpu_ns(pid)
                ask(connections[side], payload, length, REQUESTS_A_ROUND)
                spent[side] = cpu_ns(pid) - before
            if number >= 0:
                found.append(spent[1] / spent[0])
    finally:
        for connection in connections:
            connection.close()
    return statistics.median(found)


def herd(server: RunningServer) -> tuple[int, int]:
    """2,000 connections post an unknown signature, then 10,000 reads of it: plannings, and requests without a plan."""
    request = small_request(7, num_candidates=60)
    post = request_bytes("POST", "/v1/plans", MSGPACK, plan_body(request))
    get = request_bytes("GET", f"/v1/plans/{request.signature}", {"Accept": "application/msgpack"})

    async def run_both() -> int:
        first = await send_all(server.url, post, num_requests=HERD_CONNECTIONS, num_connections=HERD_CONNECTIONS)
        second = await send_all(server.url, get, num_requests=KNOWN_REQUESTS, num_connections=200)
        unequal = len(first.bodies | second.bodies) - 1
        return first.num_errors + second.num_errors + unequal

    errors = asyncio.run(run_both())
    return int(server.metric("bucketplan_planning_seconds_count")), errors


def run() -> Result:
    with tempfile.TemporaryDirectory() as folder:
        ratios, cpu = hot_get_ratios(Path(folder))
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(Path(folder), planning_seconds=HERD_PLANNING_SECONDS) as server,
    ):
        plannings, errors = herd(server)
    return Result(
        figures={
            **{f"hot_get_ratio_{name}": round(ratio, 4) for name, ratio in ratios.items()},
            **{f"{name}_cpu_us": round(spent) for name, spent in cpu.items()},
            "herd_plannings": plannings,
            "herd_errors": errors,
        },
        notes=f"ratio: bare ASGI CPU a request / ours, median of {ROUNDS} alternating rounds of {REQUESTS_A_ROUND}, "
        "_token with a rank's token in a namespace; _cpu_us: CPU of the server process a request, with that token; "
        f"herd: {HERD_CONNECTIONS} connections on one unknown signature ({HERD_PLANNING_SECONDS:g} s planning), then "
        f"{KNOWN_REQUESTS} reads",
    )
