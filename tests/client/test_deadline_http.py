"""The total deadline of a call, against names that do not resolve, dead addresses and peers that read slowly."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from bucketplan_client.errors import DeadlineExceeded, ServerUnreachable
from bucketplan_client.testing import InMemoryPlanServer
from bucketplan_client.transport import PlanClient
from tests.client.requests import small_request

BODY_BYTES = 24 * 2**20


def resolving(monkeypatch: pytest.MonkeyPatch, name: str, hosts: list[str], port: int) -> None:
    """Let `name` have the addresses `hosts`."""
    real = socket.getaddrinfo

    def look_up(host: Any, *arguments: Any, **options: Any) -> Any:
        if host != name:
            return real(host, *arguments, **options)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in hosts]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


@contextmanager
def dead_addresses(hosts: list[str], port: int) -> Iterator[None]:
    """Listeners that accept nobody, with a full backlog: the kernel drops every further attempt to connect."""
    with ExitStack() as stack:
        for host in hosts:
            listener = stack.enter_context(socket.socket())
            listener.bind((host, port))
            listener.listen(0)
            for _ in range(3):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex((host, port))
        yield


class TestResolving:
    def test_lookup_that_hangs_is_given_up_and_not_started_again_by_each_try(self, monkeypatch):
        released, returned = threading.Event(), threading.Event()
        names: list[str] = []

        def hang(host: str, *_: Any, **__: Any) -> Any:
            names.append(host)
            released.wait(60.0)
            returned.set()
            raise socket.gaierror("no such name")

        monkeypatch.setattr(socket, "getaddrinfo", hang)
        try:
            with (
                PlanClient("http://hangs.example:8400", deadline_s=1.0, connect_timeout_s=0.2) as client,
                pytest.raises(ServerUnreachable, match=r"hangs\.example"),
            ):
                client.plan(small_request())
            assert not returned.is_set()
            assert names == ["hangs.example"]
        finally:
            released.set()

    def test_name_that_does_not_exist_is_unreachable(self, monkeypatch):
        def unknown(*_: Any, **__: Any) -> Any:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

        monkeypatch.setattr(socket, "getaddrinfo", unknown)
        with (
            PlanClient("http://unknown.example:8400", deadline_s=0.3) as client,
            pytest.raises(ServerUnreachable, match="not known"),
        ):
            client.plan(small_request())


class TestConnecting:
    def test_address_behind_dead_ones_is_reached_within_the_deadline(self, monkeypatch):
        """The addresses share the time to connect; given all of it, the first one alone would use it up."""
        request = small_request()
        dead = ["127.0.0.2", "127.0.0.3"]
        with InMemoryPlanServer().listening() as address:
            port = urlsplit(address).port
            assert port is not None
            resolving(monkeypatch, "pods.example", [*dead, "127.0.0.1"], port)
            with dead_addresses(dead, port), PlanClient(f"http://pods.example:{port}", deadline_s=5.0) as client:
                assert client.plan(request).decision.signature == request.signature

    def test_name_with_dead_addresses_only_is_unreachable(self, monkeypatch):
        dead = [f"127.0.0.{number}" for number in range(2, 8)]
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        resolving(monkeypatch, "pods.example", dead, port)
        with (
            dead_addresses(dead, port),
            PlanClient(f"http://pods.example:{port}", deadline_s=1.0) as client,
            pytest.raises(ServerUnreachable),
        ):
            client.plan(small_request())


class TestWriting:
    def test_peer_that_reads_slowly_does_not_get_the_whole_body(self):
        """Each send goes through in time, for as long as the body lasts: only what is left of the call ends that."""
        received = 0
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
            listener.bind(("127.0.0.1", 0))
            listener.listen(1)
            pause = threading.Event()

            def read_slowly() -> None:
                nonlocal received
                connection, _ = listener.accept()
                with connection:
                    try:
                        while part := connection.recv(2**18):
                            received += len(part)
                            pause.wait(0.05)
                    except OSError:
                        return

            peer = threading.Thread(target=read_slowly, daemon=True)
            peer.start()
            address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with PlanClient(address, deadline_s=0.7) as client, pytest.raises(DeadlineExceeded):
                client.post("/v1/plans", {"padding": b"x" * BODY_BYTES}, repeatable=False)
            peer.join()
        assert 0 < received < BODY_BYTES


class TestPool:
    def test_call_does_not_wait_for_a_connection_beyond_its_deadline(self):
        """The pool has 16 connections; as many calls hold them until the seventeenth has ended."""
        ended = threading.Event()
        held: list[socket.socket] = []
        with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:

            def hold() -> None:
                while len(held) < 16:
                    held.append(listener.accept()[0])
                ended.wait(60.0)
                for connection in held:
                    connection.close()

            threads = [threading.Thread(target=hold, daemon=True)]
            threads[0].start()
            client = PlanClient(f"http://127.0.0.1:{listener.getsockname()[1]}", deadline_s=60.0)

            def call() -> None:
                with pytest.raises(DeadlineExceeded):
                    client.post("/v1/x", {}, repeatable=False)

            threads += [threading.Thread(target=call, daemon=True) for _ in range(16)]
            for thread in threads[1:]:
                thread.start()
            while len(held) < 16:
                ended.wait(0.01)
            with pytest.raises(DeadlineExceeded, match="PoolTimeout"):
                client.post("/v1/x", {}, deadline_s=0.3)
            assert all(thread.is_alive() for thread in threads)
            ended.set()
            for thread in threads:
                thread.join()
            client.close()


FORKED = """
import http.server, json, os, sys
from bucketplan_client.transport import PlanClient

class Echo(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        body = json.dumps({"path": self.path}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo)
serving = os.fork()
if not serving:
    server.serve_forever()
client = PlanClient(f"http://127.0.0.1:{server.server_port}", deadline_s=20.0)
client.get("/kept-alive", accept="application/json")
child = os.fork()
me = "parent" if child else "child"
wrong = 0
for number in range(200):
    wrong += client.get(f"/{me}/{number}", accept="application/json").body["path"] != f"/{me}/{number}"
if not child:
    os._exit(wrong > 0)
_, status = os.waitpid(child, 0)
os.kill(serving, 9)
sys.exit(wrong > 0 or status != 0)
"""


def test_a_forked_process_and_its_parent_each_get_their_own_answers():
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
