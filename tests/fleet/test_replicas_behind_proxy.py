"""deploy/ as it stands in a fleet: PostgreSQL, two replicas, and nginx with TLS and the files of deploy/nginx."""

import asyncio
import contextlib
import json
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from bucketplan_client import PlanClient
from tests.support.documents import MSGPACK, plan_body, profile_of, small_request
from tests.support.nginx import Proxy, running_nginx
from tests.support.postgres import PostgresAddress, running_postgres
from tests.support.server import RunningServer, running_server
from tests.support.tools import tool

pytestmark = pytest.mark.postgres


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresAddress]:
    tool("nginx", package="nginx")
    with running_postgres() as address:
        yield address


@dataclass(frozen=True)
class Fleet:
    replicas: tuple[RunningServer, RunningServer]
    proxy: Proxy
    folder: Path

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.proxy.url, verify=self._trust(), timeout=60)

    def async_client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=200)
        return httpx.AsyncClient(base_url=self.proxy.url, verify=self._trust(), timeout=60, limits=limits)

    def metric(self, name: str, **labels: str) -> float:
        return sum(replica.metric(name, **labels) for replica in self.replicas if replica.is_running)

    def wait_for_log(self, holds: Callable[[list[dict[str, object]]], bool]) -> None:
        """Returns once the proxy's log is as it should be; a line is written after its answer is sent."""
        deadline = time.monotonic() + 30
        while True:
            lines = (self.folder / "bucketplan.log").read_text().split("\n")[:-1]
            if holds([json.loads(line) for line in lines]):
                return
            assert time.monotonic() < deadline, lines[-3:]
            time.sleep(0.05)

    def _trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.proxy.ca_file))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory, postgres) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("fleet"), postgres, drain_seconds=1.0) as running:
        yield running


@pytest.fixture(scope="module")
def slow_planning_fleet(tmp_path_factory, postgres) -> Iterator[Fleet]:
    """Every planning takes a second longer, so that others can come while it runs."""
    with running_fleet(tmp_path_factory.mktemp("slow"), postgres, planning_seconds=1.0) as running:
        yield running


@contextlib.contextmanager
def running_fleet(tmp_path: Path, postgres: PostgresAddress, **settings) -> Iterator[Fleet]:
    database = postgres.new_database()
    with contextlib.ExitStack() as stack:

        def start(name: str) -> RunningServer:
            (tmp_path / name).mkdir()
            running = running_server(tmp_path / name, database=database, refresh_seconds=0.1, **settings)
            return stack.enter_context(running)

        # Both at once, on an empty database, as an orchestrator starts them.
        with ThreadPoolExecutor(2) as pool:
            one, two = pool.map(start, ("one", "two"))
        (tmp_path / "proxy").mkdir()
        proxy = stack.enter_context(running_nginx(tmp_path / "proxy", [one.port, two.port]))
        yield Fleet((one, two), proxy, tmp_path / "proxy")


@dataclass
class Load:
    """Ranks that read a known plan and post new ones through the proxy until they are told to stop."""

    fleet: Fleet
    first_graph: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    bodies: dict[str, set[bytes]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def running(self, *, num_ranks: int = 4) -> Iterator["Load"]:
        threads = [threading.Thread(target=self._rank, args=(rank,)) for rank in range(num_ranks)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()

    def wait_for(self, num_answers: int) -> None:
        """Returns when that many more answers have come."""
        wanted = sum(self.statuses.values()) + num_answers
        deadline = time.monotonic() + 60
        while sum(self.statuses.values()) < wanted and not self.failures:
            assert time.monotonic() < deadline, f"only {self.statuses}"
            time.sleep(0.02)

    def _rank(self, rank: int) -> None:
        try:
            with self.fleet.client() as client:
                for number in range(1_000_000):
                    if self._stop.is_set():
                        return
                    # Pairs of ranks post the same signatures at about the same time.
                    request = small_request(self.first_graph + 10_000 * (rank // 2) + number // 8, num_candidates=3)
                    if number % 8 == 0:
                        answer = client.post("/v1/plans", content=plan_body(request), headers=MSGPACK)
                    else:
                        answer = client.get(f"/v1/plans/{request.signature}", headers=MSGPACK)
                    self.statuses[answer.status_code] += 1
                    self.bodies.setdefault(request.signature, set()).add(answer.content)
        except httpx.HTTPError as error:
            self.failures.append(repr(error))

    def check(self) -> None:
        """Every rank got its plan every time, and no signature has two."""
        assert self.failures == []
        assert set(self.statuses) <= {200, 201}
        assert [signature for signature, bodies in self.bodies.items() if len(bodies) != 1] == []


def test_a_herd_of_first_posts_through_the_proxy_plans_once(slow_planning_fleet):
    fleet = slow_planning_fleet
    request = small_request()
    bodies = [plan_body(request, profile_of(request, flops=number)) for number in range(60)]
    before = fleet.metric("bucketplan_plannings_total", outcome="stored")

    async def herd() -> list[httpx.Response]:
        async with fleet.async_client() as client:
            posts = [client.post("/v1/plans", content=body, headers=MSGPACK) for body in bodies]
            return await asyncio.gather(*posts)

    answers = asyncio.run(herd())
    assert sorted(answer.status_code for answer in answers) == [200] * 59 + [201]
    assert len({answer.content for answer in answers}) == 1
    assert fleet.metric("bucketplan_plannings_total", outcome="stored") == before + 1
    asked = {replica.url.removeprefix("http://") for replica in fleet.replicas}
    # The proxy left no replica idle.
    fleet.wait_for_log(lambda lines: {line["upstream"] for line in lines} >= asked)

    # A rank's own client, with a certificate authority of the site's.
    with PlanClient(fleet.proxy.url, ca_file=str(fleet.proxy.ca_file)) as ranks:
        assert ranks.plan(request).encoded == answers[0].content


def test_the_proxy_passes_ids_and_large_bodies_and_keeps_metrics_inside(fleet):
    request = small_request(900_000)
    with fleet.client() as client:
        path = f"/v1/plans/{request.signature}"
        # One id is the caller's, in the answer and in the log; where there is none, nginx makes it.
        assert client.get(path, headers={"X-Request-Id": "rank-7"}).headers["x-request-id"] == "rank-7"
        made = client.get(path).headers["x-request-id"]
        fleet.wait_for_log(lambda lines: {"rank-7", made} <= {line["request_id"] for line in lines})
        assert client.get("/metrics").status_code == 404
        assert client.get("/proxy-healthz").text == "ok\n"
        # A body above nginx's own buffers and below the cap reaches the server, which judges it.
        large = client.post("/v1/plans", content=b"x" * (3 * 2**20), headers=MSGPACK)
        assert large.status_code == 400
        assert b"invalid-body" in large.content


def test_a_replica_killed_while_it_plans_is_replaced_by_the_other_within_the_same_post(slow_planning_fleet):
    fleet = slow_planning_fleet
    request = small_request(1)
    with fleet.client() as client, ThreadPoolExecutor(1) as pool:
        post = pool.submit(client.post, "/v1/plans", content=plan_body(request), headers=MSGPACK)
        planning = _replica_that_plans(fleet)
        planning.kill()
        assert post.result().status_code == 201
        # nginx asked both within one request.
        fleet.wait_for_log(lambda lines: any(str(line["upstream"]).count(",") == 1 for line in lines))
    planning.start()


def test_a_replica_killed_under_load_takes_no_rank_with_it(fleet):
    one, two = fleet.replicas
    load = Load(fleet)
    with load.running():
        load.wait_for(100)
        one.kill()
        load.wait_for(200)
        one.start()
        _wait_until_served_by(one)
        two.kill()
        load.wait_for(100)
    load.check()
    with httpx.Client(base_url=one.url, timeout=60) as client:
        assert client.get("/v1/events/verify?replay=true").json()["holds"]
        for signature, (body,) in load.bodies.items():
            assert client.get(f"/v1/plans/{signature}", headers=MSGPACK).content == body
    two.start()


def test_a_rolling_restart_is_not_noticed_by_the_ranks(fleet):
    load = Load(fleet, first_graph=500_000)
    with load.running():
        load.wait_for(50)
        for replica in fleet.replicas:
            _wait_until_served_by(replica)
            with ThreadPoolExecutor(1) as pool:
                ended = pool.submit(replica.terminate)
                _wait_until_not_ready(replica)
                assert ended.result() == 0
            load.wait_for(50)
            replica.start()
            _wait_until_served_by(replica)
    load.check()
    assert len(load.bodies) > 2


def _replica_that_plans(fleet: Fleet) -> RunningServer:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for replica in fleet.replicas:
            if replica.metric("bucketplan_plannings_in_progress"):
                return replica
        time.sleep(0.02)
    raise AssertionError("no planning began")


def _wait_until_not_ready(replica: RunningServer) -> None:
    """Returns once the replica says itself that no new work should be sent to it."""
    deadline = time.monotonic() + 30
    while httpx.get(f"{replica.url}/readyz", timeout=5).status_code != 503:
        assert time.monotonic() < deadline, "readiness was never turned off"
        time.sleep(0.02)


def _wait_until_served_by(replica: RunningServer) -> None:
    """Returns once the proxy sends requests to a replica; for a while after a failure it does not."""
    deadline = time.monotonic() + 30
    while not sum(replica.metric("bucketplan_plan_hits_total", source=source) for source in ("memory", "store")):
        assert time.monotonic() < deadline, "the proxy never took the replica back"
        time.sleep(0.02)
