"""What a server answers decides nothing once an attempt is open; what it answers to the opening may."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from bucketplan_client.cache import PlanCache
from bucketplan_client.errors import FallbackRefused, OpeningAborted, ServerRefused
from bucketplan_client.opening import Attempt, open_attempt
from bucketplan_client.store import JobStore
from bucketplan_client.testing import InMemoryPlanServer
from bucketplan_client.transport import PlanClient
from bucketplan_core import Request, make_plan
from bucketplan_core.attempt import RankReport
from bucketplan_core.collectives import Options
from bucketplan_core.planners import current_version
from bucketplan_core.wire import WireValue, to_json
from tests.client.ranks import run_ranks
from tests.client.requests import small_request
from tests.support.server import RunningServer, running_server

PROBLEM = "application/problem+json"
OURS = {401: "unauthorized", 403: "forbidden", 409: "conflict", 413: "body-too-large", 429: "busy", 507: "busy"}
FOREIGN = [302, 307, 401, 403, 404, 405, 407, 408, 409, 413, 418, 425, 429, 451, 500, 501, 502, 503, 507]
SIZE: dict[str, WireValue] = {"bucket_cap_bytes": 10_000, "first_bucket_cap_bytes": 10_000}


class Proxy:
    """Stands before an in-memory server, and answers with `status` instead of it where there is one."""

    def __init__(self) -> None:
        self.server = InMemoryPlanServer()
        self.status = 0
        self.slug = ""

    @contextmanager
    def listening(self) -> Iterator[str]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
                if outer.status:
                    status, headers = outer.status, {"Content-Type": "text/html", "Location": "http://login.example/"}
                    body = b"<html>gateway</html>"
                    if outer.slug:
                        headers["Content-Type"] = PROBLEM
                        body = to_json({"type": f"urn:bucketplan:problem:{outer.slug}", "title": "no"})
                else:
                    given = outer.server.answer(self.command, self.path, dict(self.headers), body)
                    status, headers, body = given.status, dict(given.headers), given.body
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = answer

            def log_message(self, *_: Any) -> None:
                pass

        httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        httpd.daemon_threads = True
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{httpd.server_address[1]}"
        finally:
            httpd.shutdown()
            thread.join()
            httpd.server_close()


@pytest.fixture(scope="module")
def gateway() -> Iterator[tuple[Proxy, str]]:
    proxy = Proxy()
    with proxy.listening() as address:
        yield proxy, address


@pytest.fixture
def proxy(gateway: tuple[Proxy, str]) -> Iterator[tuple[Proxy, str]]:
    gateway[0].status, gateway[0].slug = 0, ""
    yield gateway
    gateway[0].status, gateway[0].slug = 0, ""


@contextmanager
def opened(address: str, options: dict[str, WireValue] = SIZE, **arguments: Any) -> Iterator[Attempt]:
    given: dict[str, Any] = {
        "groups": {"fsdp": (0,)},
        "job": "llama",
        "options": options,
        "rank": 0,
        "store": dist.HashStore(),
        "server_s": 0.5,
        "plan_s": 0.5,
        **arguments,
    }
    with PlanClient(address, deadline_s=0.5) as client, open_attempt(client, **given) as attempt:
        yield attempt


def request_of(attempt: Attempt, num_params: int = 4) -> Request:
    assert attempt.options is not None
    return small_request(num_params=num_params).with_options(attempt.options)


ANSWERS = [*((status, "") for status in FOREIGN), *OURS.items()]


@pytest.mark.parametrize(("status", "slug"), ANSWERS, ids=lambda value: str(value) or "foreign")
class TestAfterTheCommit:
    def test_no_answer_ends_a_rank_that_can_plan(self, proxy, status, slug):
        gateway, address = proxy
        with opened(address) as attempt:
            gateway.status, gateway.slug = status, slug
            request = request_of(attempt)
            assert attempt.plans.plan(request).digest == make_plan(request).digest
            assert dict(attempt.plans.taken) == {"local": 1}
            gateway.status = 0

    def test_refusal_to_plan_from_another_profile_names_what_the_server_said(self, proxy, status, slug):
        gateway, address = proxy
        with opened(address, {"strategy": "auto"}) as attempt:
            gateway.status, gateway.slug = status, slug
            for _ in range(2):  # asked again, since nothing else can give the plan
                with pytest.raises(FallbackRefused) as refused:
                    attempt.plans.plan(request_of(attempt))
                assert refused.value.rule == "unbound-profile"
                assert isinstance(refused.value.unavailable, ServerRefused)
                assert refused.value.unavailable.message in refused.value.message
                assert (refused.value.where.rank, refused.value.where.job) == (0, "llama")
            gateway.status = 0
            attempt.plans.plan(request_of(attempt))
            assert dict(attempt.plans.taken) == {"server": 1}


@pytest.mark.parametrize(("status", "slug"), ANSWERS, ids=lambda value: str(value) or "foreign")
def test_only_a_servers_word_about_what_was_sent_ends_the_opening(proxy, status, slug):
    gateway, address = proxy
    gateway.status, gateway.slug = status, slug
    if slug and status not in (429, 507):
        with pytest.raises(OpeningAborted, match=slug), opened(address):
            pass
        return
    with opened(address) as attempt:
        assert attempt.source == "local"


def replace_database(server: RunningServer, backup: Path | None = None) -> None:
    """Stop the server, take what stands in `backup` or nothing for its database, start it again."""
    server.kill()
    at = Path(server.database)
    for path in at.parent.glob(f"{at.name}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if backup is not None:
        shutil.copy(backup, at)
    server.restart()


def back_up(server: RunningServer, backup: Path) -> Path:
    command = [sys.executable, "-m", "bucketplan_server", "backup", str(backup), "--database", server.database]
    subprocess.run(command, check=True, capture_output=True)
    return backup


class TestLostDatabase:
    """Ranks hold an attempt, and the database that knew it is replaced by another."""

    def test_auto_goes_on_under_the_epoch_that_its_ranks_hold(self, tmp_path):
        with running_server(tmp_path) as server:
            with opened(server.url, {"strategy": "auto"}, server_s=30.0, plan_s=60.0) as attempt:
                first = attempt.plans.plan(request_of(attempt))
                replace_database(server)
                attempt.plans.plan(request_of(attempt, num_params=5))
                assert attempt.plans.plan(request_of(attempt)).digest == first.digest
                assert dict(attempt.plans.taken) == {"server": 2, "store": 1}
            with PlanClient(server.url) as client:
                (listed,) = client.get("/v1/jobs/llama/attempts").body["attempts"]
                assert listed["epoch_id"] == attempt.epoch.id

    def test_reports_reach_the_attempt_that_was_opened_again(self, tmp_path):
        with running_server(tmp_path) as server, PlanClient(server.url) as client:
            with opened(server.url, server_s=30.0):
                pass
            with opened(server.url, server_s=30.0) as attempt:
                assert attempt.number == 2
                replace_database(server)
                attempt.report(RankReport(rank=0, slot="forward", uuid=attempt.uuid))
                attempt._reporter.close(60.0)
            # The first of the new database, and nobody's report was lost that was sent since.
            assert client.get("/v1/jobs/llama/attempts/1").body["num_reports"] >= 1

    def test_ranks_that_find_out_at_once_are_one_attempt_again(self, tmp_path):
        ranks = (0, 1, 2)
        replaced = threading.Event()
        with running_server(tmp_path) as server, PlanClient(server.url) as client:

            def body(rank: int, store: JobStore) -> tuple[int, int]:
                given: dict[str, Any] = {"groups": {"fsdp": ranks}, "participants": ranks, "rank": rank}
                given |= {"store": store._base, "server_s": 30.0, "plan_s": 60.0, "name": "one"}
                with opened(server.url, {"strategy": "auto"}, **given) as attempt:
                    attempt.compare("opened", "yes")
                    if rank == 0:
                        replace_database(server)
                        replaced.set()
                    replaced.wait(60.0)
                    attempt.plans.plan(request_of(attempt, num_params=4 + rank))
                    return attempt.plans.taken["server"], attempt.plans._at_server.number

            assert run_ranks(ranks, body) == dict.fromkeys(ranks, (1, 1))
            state = client.get("/v1/jobs/llama/attempts/1").body
            assert state["opening"]["num_expected"] == 3
            with pytest.raises(ServerRefused, match="unknown-attempt"):
                client.get("/v1/jobs/llama/attempts/2")

    @pytest.mark.parametrize("strategy", ["size", "auto"])
    @pytest.mark.parametrize("lost", ["everything", "what came after the backup"])
    def test_overrides_are_those_that_the_ranks_hold(self, tmp_path, strategy, lost):
        backup: Path | None = None
        with running_server(tmp_path) as server, PlanClient(server.url) as client:
            with opened(server.url, {"strategy": strategy}, server_s=30.0, plan_s=60.0) as attempt:
                request = request_of(attempt)
                planned = attempt.plans.plan(request)
            at = f"/v1/plans/{request.signature}"
            options: dict[str, WireValue] = {"strategy": "none", "planner": "none/1"}
            made = client.post(f"{at}/revisions", {"options": options, "reason": "test"}).body
            client.post(f"{at}/activate", {"revision": made["revision"], "job": "llama", "reason": "test"})
            if lost == "what came after the backup":
                backup = back_up(server, tmp_path / "backup.db")
            with opened(server.url, {"strategy": strategy}, server_s=30.0, plan_s=60.0) as attempt:
                assert attempt.epoch.digest_for(request.signature) not in (None, planned.digest)
                replace_database(server, backup)
                attempt.plans.plan(request_of(attempt, num_params=5))
                overridden = attempt.plans.plan(request)
                assert dict(attempt.plans.taken) == {"server": 1, "override": 1}
                assert overridden.digest == attempt.epoch.digest_for(request.signature)


class TestCachedEpochWithoutThePlan:
    def test_a_job_whose_graph_is_not_cached_trains_with_the_server_down(self, tmp_path):
        """It did without a cache; the profile is one that the attempt's ranks share, so is the plan."""
        server = InMemoryPlanServer()
        cache = PlanCache(tmp_path)
        defaults = Options(strategy="auto", planner=current_version("auto"))

        def once(num_params: int) -> tuple[str | None, dict[str, int], str]:
            given: dict[str, Any] = {"groups": {"fsdp": (0,)}, "job": "llama", "store": dist.HashStore(), "rank": 0}
            options: dict[str, WireValue] = {"strategy": "auto"}
            client = server.client(deadline_s=0.3)
            with open_attempt(
                client, options=options, cache=cache, server_s=0.3, defaults=defaults, **given
            ) as attempt:
                attempt.plans.plan(request_of(attempt, num_params))
                return attempt.source, dict(attempt.plans.taken), attempt.uuid

        first = once(4)
        server.available = False
        again, changed, repeated = once(4), once(5), once(5)
        assert again[:2] == ("cache", {"cache": 1})
        assert changed[:2] == repeated[:2] == ("cache", {"local": 1})
        # No compile cache replays what one attempt made from a profile of its own.
        assert len({first[2], again[2], changed[2], repeated[2]}) == 4
