"""The lists behind the pages say the same on both stores."""

import html
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from bucketplan_server.pages.fleet import KINDS
from tests.server.test_attempts import open_attempt
from tests.server.test_revisions import known, send
from tests.support.paths import ROOT
from tests.support.postgres import running_postgres
from tests.support.server import running_server

JOBS = [f"run-{number:02}" for number in range(22)] + ["a_b", "a.b"]


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def client(request, tmp_path_factory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("lists")
    if request.param == "sqlite":
        with running_server(folder) as server, httpx.Client(base_url=server.url, timeout=60) as found:
            yield filled(found)
    else:
        with (
            running_postgres() as postgres,
            running_server(folder, database=postgres.new_database()) as server,
            httpx.Client(base_url=server.url, timeout=60) as found,
        ):
            yield filled(found)


def filled(client: httpx.Client) -> httpx.Client:
    """Three plans, one of them overridden, one by the same decision, and 24 jobs, one of them started twice."""
    first, second, _ = [known(client, number) for number in range(3)]
    assert send(client, first.signature, "revisions", options={"strategy": "none"}).is_success
    assert send(client, first.signature, "activate", revision=2).is_success
    # The planner's own decision under another number is the planner's own.
    assert send(client, second.signature, "revisions", options={}).is_success
    assert send(client, second.signature, "activate", revision=2).is_success
    for job in [*JOBS, JOBS[0]]:
        open_attempt(client, job, f"key-{next(_keys)}")
    return client


_keys = iter(range(1_000))


def rows(client: httpx.Client, address: str) -> tuple[list[str], str | None]:
    """The heading of each row of the page's table, as text, and the address of the next page."""
    answer = client.get(address)
    assert answer.status_code == 200, answer.text
    found = [re.sub("<[^>]*>", "", cell) for cell in re.findall('<th scope="row"[^>]*>(.*?)</th>', answer.text)]
    following = re.search('rel="next" href="([^"]*)"', answer.text)
    return found, None if following is None else following[1].replace("&amp;", "&")


def test_the_overview_counts_what_is_stored(client):
    text = re.sub("<[^>]*>", " ", client.get("/").text)
    said = " ".join(text.split())
    assert "Plans 3 5 revisions, 1 not the planner" in said
    assert "Jobs 24 25 attempts" in said
    assert f"Events {3 + 4 + 25}" in said


def test_jobs_stand_in_the_order_of_their_last_start(client):
    seen, following = rows(client, "/jobs")
    assert seen[0] == JOBS[0], "it started again last"
    while following:
        more, following = rows(client, following)
        seen += more
    assert seen == [JOBS[0], *reversed(JOBS[1:])]


def test_a_part_of_a_name_is_taken_literally(client):
    assert rows(client, "/jobs?name=a_b")[0] == ["a_b"]
    assert rows(client, "/jobs?name=%25")[0] == []


def test_events_are_filtered_and_paged_backwards(client):
    seen, following = rows(client, "/events?kind=attempt.opened")
    assert (len(seen), following) == (25, None)
    assert [int(number) for number in seen] == sorted(map(int, seen), reverse=True)
    assert rows(client, f"/events?kind=attempt.opened&before={seen[9]}")[0] == seen[10:]
    assert len(rows(client, f"/events?kind=attempt.opened&job={JOBS[0]}")[0]) == 2


@pytest.mark.parametrize(
    "address",
    [
        "/plans?since=9999-12-31",
        "/plans?until=2300-01-01",
        f"/plans?cursor=9999999999999999999-{'0' * 64}",
    ],
)
def test_what_no_list_can_be_asked_for_is_an_error_of_the_caller(client, address):
    answer = client.get(address, headers={"Accept": "text/html"})
    assert answer.status_code == 400
    assert answer.headers["content-type"].startswith("text/html")


@pytest.mark.parametrize(
    "address", ["/plans/{one}?page=99", "/plans/{one}/buckets/0?page=99", "/plans/{one}?revisions=99"]
)
def test_a_page_behind_the_last_is_the_last(client, address):
    signature = listed(client, "/v1/plans")["plans"][0]["signature"]
    address = address.format(one=signature)
    shown, following = rows(client, address)
    assert (shown, following) == rows(client, address.partition("?")[0])
    assert shown
    assert "page 1 of 1" in client.get(address).text


def test_a_page_of_ranks_behind_the_last_is_the_last(client):
    opened = {
        "held_epoch": None, "key": "ranks", "options": {}, "topology": {}, "participants": {"fsdp": [[0], [1]]},
        "uuid": "ranks",
    }  # fmt: skip
    assert client.post("/v1/jobs/ranks/attempts", json=opened).is_success
    assert rows(client, "/jobs/ranks/attempts/1?page=99") == rows(client, "/jobs/ranks/attempts/1")


def listed(client: httpx.Client, address: str) -> dict[str, Any]:
    answer = client.get(address, headers={"Accept": "application/json"})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def as_json(client: httpx.Client, address: str, word: str = "As JSON") -> dict[str, Any]:
    """What the page's link to its JSON leads to."""
    text = client.get(address).text
    link = re.search(rf'<a href="([^"]*)">{word}</a>', text)
    return listed(client, html.unescape(link[1]))


def test_the_json_of_a_list_is_filtered_as_the_list_is(client):
    signature = listed(client, "/v1/plans")["plans"][-1]["signature"]
    for query, number in (
        ("parameter=layers.1&strategy=size&since=2020-01-01", 3),
        ("until=2020-01-01", 0),
        ("module=nowhere", 0),
        ("job=run-01", 0),
    ):
        assert len(as_json(client, f"/plans?{query}")["plans"]) == number == len(rows(client, f"/plans?{query}")[0])
    for query in (f"signature={signature}", f"job={JOBS[0]}"):
        found = as_json(client, f"/events?{query}")["events"]
        assert [str(event["seq"]) for event in reversed(found)] == rows(client, f"/events?{query}")[0]
    found = as_json(client, f"/jobs/{JOBS[0]}?before=2")["attempts"]
    assert [attempt["attempt"] for attempt in found] == [1]
    found = as_json(client, f"/plans/{signature}", "Revisions as JSON")["revisions"]
    assert [row["revision"] for row in found] == [1, 2]


def test_a_signature_in_capitals_is_the_same(client):
    signature = listed(client, "/v1/plans")["plans"][0]["signature"]
    capitals = signature.upper()
    assert capitals != signature
    assert client.get(f"/plans/{capitals}").text == client.get(f"/plans/{signature}").text
    assert client.get(f"/plans/{capitals}/buckets/0").status_code == 200
    assert client.get(f"/plans?signature={capitals}").headers["location"] == f"/plans/{signature}"
    assert rows(client, f"/plans?signature={capitals[:9]}")[0] == [signature[:12]]
    assert rows(client, f"/events?signature={capitals}") == rows(client, f"/events?signature={signature}")
    assert client.get(f"/diff?a={capitals}&b={signature}").status_code == 200
    form = {"revision": "1", "reason": "test"}
    assert client.post(f"/plans/{capitals}/activate", data=form).status_code == 200
    assert client.get(f"/plans/{'Z' * 64}", headers={"Accept": "text/html"}).status_code == 404


def test_every_kind_of_event_can_be_chosen():
    kinds = {
        kind
        for path in (ROOT / "server" / "bucketplan_server" / "store").glob("*.py")
        for kind in re.findall(r'"((?:plan|revision|attempt|reports|token|profile)\.[a-z]+)"', path.read_text())
    }
    assert kinds == set(KINDS)
