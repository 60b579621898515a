"""What a browser is told when something is refused: always a page with a way on, and never half of a change."""

import html
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.cookies import SimpleCookie
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser

from bucketplan_core.collectives import PLACEMENTS, STRATEGIES, Options
from bucketplan_server import cli_tokens
from bucketplan_server.settings import load_settings
from tests.support.browser import follow, watched_tab
from tests.support.documents import MSGPACK, plan_body, profile_of, small_request
from tests.support.server import RunningServer, running_server

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
NOWHERE = "0" * 64


@pytest.fixture(scope="module")
def open_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("refusals"), max_body_bytes="100000") as server:
        yield server


@pytest.fixture
def client(open_server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=open_server.url, headers=BROWSER, timeout=60) as client:
        yield client


_made = iter(range(1_000, 2_000))


def new_plan(client: httpx.Client) -> str:
    request = small_request(next(_made), options=Options(strategy="size", planner="size/1"))
    answer = client.post("/v1/plans", content=plan_body(request, profile_of(request)), headers=MSGPACK)
    assert answer.status_code == 201, answer.text
    return request.signature


def revisions(client: httpx.Client, signature: str) -> list[list[str]]:
    answer = client.get(f"/v1/plans/{signature}/revisions", headers={"Accept": "application/json"})
    return [row["active_for"] for row in answer.json()["revisions"]]


def hidden(text: str) -> dict[str, str]:
    found = re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', text)
    return {name: html.unescape(value) for name, value in found}


def preview(client: httpx.Client, signature: str, action: str, **form: str) -> dict[str, str]:
    answer = client.post(f"/plans/{signature}/{action}", data={"reason": "test", **form})
    assert answer.status_code == 200, answer.text
    return hidden(answer.text)


def is_error_page(answer: httpx.Response) -> None:
    assert answer.headers["content-type"].startswith("text/html")
    assert "<title>Error: " in answer.text
    assert 'role="alert"' in answer.text
    main = answer.text.partition("<main")[2]
    assert re.search(r'<a href="/[^"]*">', main)


@pytest.mark.parametrize(
    ("method", "path", "status", "options"),
    [
        ("GET", "/nope", 404, {}),
        ("GET", "/plans/", 404, {}),
        ("GET", "/plans/abc", 404, {}),
        ("GET", f"/plans/{NOWHERE}", 404, {}),
        ("GET", f"/plans/{NOWHERE}/buckets/0", 404, {}),
        ("GET", "/jobs/nope", 404, {}),
        ("GET", "/jobs/nope?before=3", 404, {}),
        ("GET", "/jobs/nope/attempts/1", 404, {}),
        ("GET", "/static/nope.js", 404, {}),
        ("GET", f"/diff?a={NOWHERE}&b={NOWHERE}", 404, {}),
        ("GET", "/events?before=x", 400, {}),
        ("GET", "/plans?signature=%00", 400, {}),
        ("GET", f"/plans/{NOWHERE}/replan", 405, {}),
        ("GET", "/events/verify", 405, {}),
        ("GET", "/logout", 405, {}),
        ("PUT", "/plans", 405, {}),
        ("POST", "/events/verify", 403, {"headers": BROWSER | {"Origin": "https://evil.example"}, "data": {}}),
        ("POST", f"/plans/{NOWHERE}/replan", 413, {"content": b"x" * 200_000}),
        ("POST", f"/plans/{NOWHERE}/replan", 415, {"json": {}}),
    ],
)
def test_a_browser_reads_every_refusal_as_a_page(client, method, path, status, options):
    answer = client.request(method, path, **options)
    assert answer.status_code == status
    is_error_page(answer)


@pytest.mark.parametrize("path", ["/v1/nope", f"/v1/plans/{NOWHERE}", "/v1/jobs/nope/attempts/1"])
def test_the_api_answers_problem_details_even_to_a_browser(client, path):
    answer = client.get(path)
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"


def test_a_program_reads_an_unknown_address_as_problem_details(client):
    answer = client.get("/nope", headers={"Accept": "*/*"})
    assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")


def test_the_way_back_is_where_the_browser_came_from_if_that_is_here(client):
    came_from = f"{client.base_url}/plans?strategy=size"
    assert '<a href="/plans?strategy=size">' in client.get("/nope", headers={"Referer": came_from}).text
    text = client.get("/nope", headers={"Referer": "https://evil.example/plans"}).text
    assert "evil.example" not in text


def test_a_form_that_was_sent_twice_changes_once(client):
    signature = new_plan(client)
    form = preview(client, signature, "replan", strategy="none")
    with ThreadPoolExecutor(2) as two:
        sent = [two.submit(client.post, f"/plans/{signature}/replan", data=form) for _ in range(2)]
        places = sorted(answer.result().headers["location"] for answer in sent)
    assert places == [f"/plans/{signature}?revision=2&done={done}" for done in ("already", "replanned")]
    assert "Already done" in client.get(places[0]).text
    assert revisions(client, signature) == [[], [""]]
    form = preview(client, signature, "activate", revision="1")
    places = [client.post(f"/plans/{signature}/activate", data=form).headers["location"] for _ in range(2)]
    assert [place.rpartition("=")[2] for place in places] == ["activated", "already"]
    assert revisions(client, signature) == [[""], []]


def stale(client: httpx.Client, signature: str, form: dict[str, str]) -> dict[str, str]:
    """The form after somebody else has made another revision active."""
    other = preview(client, signature, "replan", bucket_cap_bytes="70000", job=form["job"], reason="overtaken")
    assert client.post(f"/plans/{signature}/replan", data=other).status_code == 303
    return form


def without(*names: str) -> Any:
    return lambda _client, _signature, form: {name: value for name, value in form.items() if name not in names}


@pytest.mark.parametrize("job", ["", "one-job"])
@pytest.mark.parametrize(
    ("spoil", "status", "said", "num_before"),
    [
        (stale, 409, "is active, not", 2),
        (lambda _c, _s, form: form | {"digest": NOWHERE}, 409, "not make the plan that was shown", 1),
        (without("expected"), 400, "expected: missing", 1),
        (without("digest"), 400, "digest: missing", 1),
        (lambda _c, _s, form: form | {"expected": "x"}, 400, "whole number", 1),
        (without("reason"), 400, "say why", 1),
    ],
)
def test_a_confirmation_that_does_not_hold_stores_nothing(client, spoil, status, said, num_before, job):
    signature = new_plan(client)
    form = preview(client, signature, "replan", strategy="none", job=job)
    spoiled = spoil(client, signature, form)
    before = revisions(client, signature)
    assert len(before) == num_before
    answer = client.post(f"/plans/{signature}/replan", data=spoiled)
    assert answer.status_code == status
    is_error_page(answer)
    assert said in html.unescape(answer.text)
    assert revisions(client, signature) == before


@pytest.mark.parametrize(
    ("action", "field", "form"),
    [
        ("replan", "bucket_cap_bytes", {"strategy": "size", "bucket_cap_bytes": "lots"}),
        ("replan", "strategy", {"strategy": "magic", "bucket_cap_bytes": "77777"}),
        ("replan", "reason", {"strategy": "size", "bucket_cap_bytes": "77777", "reason": " "}),
        ("replan", "job", {"strategy": "size", "job": '../"x'}),
        ("activate", "revision", {"revision": "99"}),
        ("activate", "revision", {"revision": "abc"}),
        ("activate", "reason", {"revision": "1", "reason": ""}),
    ],
)
def test_a_form_that_is_refused_comes_back_as_it_was_filled_in(client, action, field, form):
    signature = new_plan(client)
    typed = {"reason": 'because <b>"I"</b> 🚂'} | form
    answer = client.post(f"/plans/{signature}/{action}", data=typed)
    assert answer.status_code in (400, 404, 409, 422)
    is_error_page(answer)
    text = answer.text
    assert f'aria-describedby="{action}-{field}-error"' in text
    assert f'id="{action}-{field}-error"' in text
    assert f'name="{field}"' in re.search(r'<(?:input|select)[^>]*aria-invalid="true"[^>]*>', text)[0]
    assert "parameter of the address" not in text
    for name in ("reason", "bucket_cap_bytes", "job"):
        if typed.get(name, "").strip():
            form_at = f'action="/plans/{signature}/{action}\\?revision=1"'
            shown = re.search(rf'{form_at}.*?name="{name}"[^>]* value="([^"]*)"', text, re.DOTALL)
            assert html.unescape(shown[1]) == typed[name]


@pytest.mark.parametrize(
    ("path", "field", "value", "status"),
    [
        ("/plans", "signature", '"><b>zz', 400),
        ("/plans", "job", '../"x', 400),
        ("/plans", "strategy", "magic", 400),
        ("/plans", "since", "2026-13-45", 400),
        ("/plans", "until", "9999-12-31", 400),
        ("/events", "signature", "abc", 400),
        ("/events", "job", '../"x', 400),
        ("/events", "kind", "plan.eaten", 400),
        ("/diff", "a", "abc", 400),
        ("/diff", "b", "1" * 64, 404),
        ("/diff", "revision_a", "first", 400),
        ("/diff", "revision_b", "99", 404),
    ],
)
def test_a_filter_that_is_refused_comes_back_as_it_was_filled_in(client, path, field, value, status):
    known = new_plan(client)
    forms = {
        "/plans": {"parameter": 'because <b>"I"</b> 🚂', "module": "kept"},
        "/events": {"signature": known, "job": "kept"},
        "/diff": {"a": known, "b": known, "revision_a": "1", "revision_b": "1"},
    }
    typed = forms[path] | {field: value}
    answer = client.get(path, params=typed)
    assert answer.status_code == status
    text = answer.text
    assert "<title>Error: " in text
    assert text.count('aria-invalid="true"') == 1
    at_fault = re.search(r'<(?:input|select)[^>]*aria-invalid="true"[^>]*>', text)[0]
    assert f'name="{field}"' in at_fault
    assert f'aria-describedby="filter-{field}-error"' in at_fault
    assert "date" not in re.findall('type="([^"]*)"', at_fault), "a browser empties a date that is none"
    told = re.search(f'id="filter-{field}-error">(.*?)</p>', text, re.DOTALL)[1]
    alert = re.search('role="alert">(.*?)</div>', text, re.DOTALL)[1]
    for said in (told, alert):
        said = html.unescape(re.sub("<[^>]*>", "", said))
        assert said.startswith(f"{field}: ")
        assert value in said
    kept = {name: html.unescape(found) for name, found in re.findall(r'name="(\w+)"[^>]* value="([^"]*)"', text)}
    kept |= {name: html.unescape(found) for name, found in re.findall(r'name="(\w+)".*<option selected>([^<]*)<', text)}
    assert {name: kept[name] for name in typed} == typed


def test_a_replan_offers_every_strategy_and_placement_that_there_is(client):
    signature = new_plan(client)
    text = client.get(f"/plans/{signature}").text
    for name, allowed in (("strategy", STRATEGIES), ("placement", PLACEMENTS)):
        chosen = re.search(f'<select id="{name}".*?</select>', text, re.DOTALL)[0]
        assert tuple(re.findall("<option[^>]*>([^<]*)<", chosen)) == allowed
        for value in allowed:
            answer = client.post(f"/plans/{signature}/replan", data={"reason": "test", name: value})
            # 422: some need figures of the hardware, which this plan has none of.
            assert answer.status_code in (200, 422)
            assert "must be one of" not in answer.text


def test_many_revisions_are_paged_and_chosen_by_number(client):
    signature = new_plan(client)
    body = {"options": {"strategy": "none"}, "reason": "test"}
    for _ in range(54):
        assert client.post(f"/v1/plans/{signature}/revisions", json=body).status_code == 201
    rows = r'<th scope="row" class="num"><a href="/plans/[0-9a-f]+\?revision=(\d+)"'
    first = client.get(f"/plans/{signature}").text
    assert 'rel="next"' in first
    second = client.get(f"/plans/{signature}?revisions=2").text
    assert [int(n) for n in re.findall(rows, first) + re.findall(rows, second)] == list(range(55, 0, -1))
    assert re.search(r'<input id="revision" name="revision" inputmode="numeric"', first)


def test_a_fleet_of_many_groups_is_paged(client):
    groups = [[2 * n, 2 * n + 1] for n in range(130)]
    opened = {
        "held_epoch": None, "key": "many", "options": {"strategy": "size"}, "topology": {"fsdp": 1},
        "participants": {"<i>ר🚂": groups}, "uuid": "many",
    }  # fmt: skip
    assert client.post("/v1/jobs/many/attempts", json=opened).status_code == 201
    pages = [client.get(f"/jobs/many/attempts/1?page={n}").text for n in (1, 2)]
    counts = [page.count("&lt;i&gt;ר🚂") for page in pages]
    assert counts == [100, 30]
    assert 'href="?page=2"' in pages[0]


@pytest.mark.parametrize(
    ("proto", "is_secure"),
    [("https", True), ("https, http", True), ("HTTPS,http", True), ("http, https", False), (None, False)],
)
def test_the_cookie_is_secure_where_the_first_hop_is_encrypted(guarded_login, proto, is_secure):
    url, secret = guarded_login
    headers = {} if proto is None else {"X-Forwarded-Proto": proto}
    answer = httpx.post(f"{url}/login", data={"token": secret}, headers=headers)
    assert answer.status_code == 303
    cookie = SimpleCookie(answer.headers["set-cookie"])
    assert bool(cookie["bucketplan_token"]["secure"]) is is_secure


@pytest.fixture(scope="module")
def guarded_login(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    folder = tmp_path_factory.mktemp("login")
    database = str(folder / "bucketplan.db")
    with ThreadPoolExecutor(1) as apart:
        secret = apart.submit(
            cli_tokens.create,
            load_settings(database=database),
            "looks",
            role="auditor",
            namespace=None,
            expires=None,
            reason="test",
        ).result()
    with running_server(folder, database=database) as server:
        yield server.url, secret


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_refusals_are_accessible_on_a_small_phone(chromium: Browser, open_server, client, scheme):
    signature = new_plan(client)
    with watched_tab(chromium, open_server.url, refusals=frozenset([400, 404])) as tab:
        tab.set_viewport_size({"width": 360, "height": 800})
        tab.emulate_media(color_scheme=scheme)
        tab.goto("/nope")
        found = Axe().run(tab)
        assert found.violations_count == 0, found.generate_report()
        tab.goto(f"/plans/{signature}")
        tab.locator("#activate-reason").evaluate("field => field.removeAttribute('required')")
        follow(tab.get_by_role("button", name="Preview the activation"))
        assert tab.title().startswith("Error:")
        field = tab.locator("#activate-reason")
        assert "say why" in tab.locator(f"#{field.get_attribute('aria-describedby')}").inner_text()
        found = Axe().run(tab)
        assert found.violations_count == 0, found.generate_report()
        assert tab.evaluate("document.documentElement.scrollWidth") <= 360
        tab.goto("/plans?since=2026-13-45&module=kept")
        field = tab.get_by_label("Stored since (UTC)")
        assert (field.input_value(), tab.get_by_label("Module").input_value()) == ("2026-13-45", "kept")
        assert "like 2026-12-31" in tab.locator(f"#{field.get_attribute('aria-describedby')}").inner_text()
        found = Axe().run(tab)
        assert found.violations_count == 0, found.generate_report()
        assert tab.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.mark.browser
def test_a_replan_needs_neither_scripts_nor_a_mouse(chromium: Browser, open_server, client):
    signature = new_plan(client)
    with chromium.new_context(base_url=open_server.url, java_script_enabled=False) as context:
        tab = context.new_page()
        tab.goto(f"/plans/{signature}")
        tab.keyboard.press("Tab")
        assert tab.locator(":focus").inner_text() == "Skip to the content"
        outline = tab.locator(".skip").evaluate("link => getComputedStyle(link).outlineStyle")
        assert outline == "solid"
        tab.keyboard.press("Enter")
        assert tab.url.endswith("#content")
        for _ in range(200):
            tab.keyboard.press("Tab")
            if tab.locator(":focus").get_attribute("id") == "strategy":
                break
        tab.keyboard.type("none")
        for name in ("placement", "bucket_cap_bytes", "first_bucket_cap_bytes", "memory_budget_bytes", "prefetch"):
            tab.keyboard.press("Tab")
            assert tab.locator(":focus").get_attribute("id") == name
        tab.keyboard.press("Tab")
        tab.keyboard.press("Tab")
        tab.keyboard.type("by keyboard")
        with tab.expect_navigation():
            tab.keyboard.press("Enter")
        assert "confirm" in tab.title()
        for _ in range(40):
            tab.keyboard.press("Tab")
            if tab.locator(":focus").inner_text() == "Confirm and activate":
                break
        with tab.expect_navigation():
            tab.keyboard.press("Enter")
        assert "served from now on" in tab.get_by_role("status").inner_text()
    assert revisions(client, signature) == [[], [""]]
