"""Reports of a rank against a real server: bounded as it reads them, and one that it refuses costs no other."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bucketplan_client.errors import ClientError
from bucketplan_client.reports import Reporter
from bucketplan_client.testing import InMemoryPlanServer
from bucketplan_client.transport import PlanClient
from bucketplan_core.attempt import MAX_REPORT_ENTRIES, AttemptRequest, RankReport
from tests.support.server import running_server

MANY = tuple(range(100_000, 116_384))
"""A group whose list takes 82 KiB in a report."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlanClient]:
    with running_server(tmp_path_factory.mktemp("reports")) as server, PlanClient(server.url) as opened:
        yield opened


def open_job(client: PlanClient, job: str, **changed: object) -> Reporter:
    opening = AttemptRequest(key="nonce", participants=changed.get("participants", {}))
    number = client.post(f"/v1/jobs/{job}/attempts", opening.to_wire()).body["attempt"]
    return Reporter(client, job=job, attempt=number)


def num_stored(client: PlanClient, job: str) -> int:
    return client.get(f"/v1/jobs/{job}/attempts/1").body["num_reports"]


def test_graph_with_more_skipped_collectives_than_a_report_may_name_is_stored(client, caplog):
    reporter = open_job(client, "skipped")
    reporter.send(
        RankReport(
            rank=0,
            slot="joint",
            skipped=[f"node_{index}: no-wait" for index in range(1_500)],
            statistics={f"count.{index}": index for index in range(1_500)},
        )
    )
    reporter.send(RankReport(rank=0, slot="forward", skipped=["x" * 20_000] * 1_000))
    reporter.close(60.0)
    assert num_stored(client, "skipped") == 2, caplog.text


def test_what_is_left_out_of_a_report_is_said():
    server = InMemoryPlanServer()
    with server.client() as client:
        reporter = open_job(client, "skipped")
        for length in (1_000, 1_001, 1_500):
            reporter.send(RankReport(rank=0, slot="joint", ordinal=length, skipped=["x" * 201] * length))
        reporter.close(60.0)
    last = [report.skipped[-1] for report in server.reports]
    assert last == ["x" * 197 + "...", "and 2 more", "and 501 more"]
    assert {len(report.skipped) for report in server.reports} == {MAX_REPORT_ENTRIES}


def test_reports_of_large_groups_are_sent_in_bodies_that_the_server_reads(client, caplog):
    reporter = open_job(client, "large")
    for ordinal in range(40):
        reporter.send(RankReport(rank=MANY[0], slot="joint", ordinal=ordinal, members={"fsdp": MANY}))
    reporter.close(60.0)
    assert num_stored(client, "large") == 40, caplog.text


def test_report_that_is_refused_costs_no_other_and_is_named(client, caplog):
    reporter = open_job(client, "refused", participants={"fsdp": ((0, 1),)})
    for rank in (0, 7, 1):
        reporter.send(RankReport(rank=rank, slot="joint"))
    # The first report under a name stays: this one holds another content.
    reporter.send(RankReport(rank=0, slot="joint", skipped=["other"]))
    reporter.send(RankReport(rank=1, slot="backward"))
    with caplog.at_level(logging.WARNING, logger="bucketplan_client"):
        reporter.close(60.0)
    assert num_stored(client, "refused") == 3
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2, warnings
    assert "rank 7 is none of the 2 participants" in warnings[0]
    assert "rank 0 has reported joint 0 differently before" in warnings[1]


def test_report_that_no_wire_carries_costs_no_other(client, caplog):
    reporter = open_job(client, "unpackable")
    reporter.send(RankReport(rank=0, slot="joint", skipped=["\udcff"]))
    reporter.send(RankReport(rank=0, slot="forward"))
    reporter.close(60.0)
    assert num_stored(client, "unpackable") == 1
    assert "a report was dropped" in caplog.text


def test_full_queue_is_sent_when_the_reporter_closes(client, caplog):
    reporter = open_job(client, "full")
    for ordinal in range(1_005):
        reporter.send(RankReport(rank=0, slot="joint", ordinal=ordinal))
    reporter.close(60.0)
    dropped = caplog.text.count("a report was dropped")
    assert num_stored(client, "full") == 1_005 - dropped
    assert not reporter._thread.is_alive()


def test_report_after_which_nothing_answers_does_not_hold_up_the_end():
    server = InMemoryPlanServer()
    with server.client() as client:
        reporter = open_job(client, "away")
        server.available = False
        reporter.send(RankReport(rank=0, slot="joint"))
        reporter.close(0.2)
        reporter._thread.join(60.0)
        assert not reporter._thread.is_alive()
    assert server.reports == []


def test_report_waits_for_a_server_that_is_away(monkeypatch):
    monkeypatch.setattr("bucketplan_client.reports._DEADLINE_S", 0.2)
    monkeypatch.setattr("bucketplan_client.reports._FIRST_PAUSE_S", 0.1)
    server = InMemoryPlanServer()
    with server.client() as client:
        reporter = open_job(client, "back")
        server.available = False
        tried = threading.Event()
        monkeypatch.setattr(reporter, "_post", _telling(tried, reporter._post))
        for ordinal in range(3):
            reporter.send(RankReport(rank=0, slot="joint", ordinal=ordinal))
        assert tried.wait(60.0), "it was refused a connection at least once"
        server.available = True
        deadline = time.monotonic() + 60.0
        while len(server.reports) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        # Before the attempt is closed: a state of the attempt is looked at while it runs.
        assert [report.ordinal for report in server.reports] == [0, 1, 2]
        reporter.close()


def test_what_waits_for_a_server_that_is_away_is_bounded(monkeypatch):
    monkeypatch.setattr("bucketplan_client.reports._DEADLINE_S", 0.1)
    monkeypatch.setattr("bucketplan_client.reports._FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr("bucketplan_client.reports._SPREAD_S", 0.0)
    monkeypatch.setattr("bucketplan_client.reports._MOST_WAITING", 10)
    server = InMemoryPlanServer()
    with server.client() as client:
        reporter = open_job(client, "bounded")
        server.available = False
        for round_ in range(3):
            failed = threading.Event()
            monkeypatch.setattr(reporter, "_post", _telling(failed, reporter._post))
            for ordinal in range(10):
                reporter.send(RankReport(rank=0, slot=f"round {round_}", ordinal=ordinal))
            assert failed.wait(60.0)
        server.available = True
        reporter.close(60.0)
    assert [(report.slot, report.ordinal) for report in server.reports] == [("round 0", n) for n in range(10)]


def _telling(failed: threading.Event, post: Callable[[Any], None]) -> Callable[[Any], None]:
    def told(batch: Any) -> None:
        try:
            post(batch)
        except ClientError:
            failed.set()
            raise

    return told


def test_token_that_is_refused_is_said_once(tmp_path, caplog):
    with running_server(tmp_path, auth="required") as server, PlanClient(server.url, token="bp_none") as client:
        reporter = Reporter(client, job="secret", attempt=1)
        for ordinal in range(5):
            reporter.send(RankReport(rank=0, slot="joint", ordinal=ordinal))
        reporter.close(60.0)
    assert caplog.text.count("5 reports were refused") == 1
