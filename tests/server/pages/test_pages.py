"""The audit pages in a real Chromium: pages, flows, no console errors, axe-core in both schemes and on a phone."""

from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from fastapi.routing import APIRoute
from playwright.sync_api import Browser, Page

from bucketplan_core.collectives import Options
from bucketplan_core.presets import GroupShape, resolve_preset
from bucketplan_core.request import Request
from bucketplan_server.pages import attempt, change, compare, fleet, plan, session
from bucketplan_server.pages.places import local_path
from tests.support.browser import follow, watched_tab
from tests.support.documents import MSGPACK, plan_body, profile_of, small_request
from tests.support.paths import ROOT
from tests.support.server import RunningServer, running_server

pytestmark = pytest.mark.browser
HARDWARE = resolve_preset("h100-nvlink", {"fsdp": GroupShape(8, 1)})
SIZE = Options(
    strategy="size", planner="size/1", bucket_cap_bytes=65536, first_bucket_cap_bytes=65536, hardware=HARDWARE
)
ODD = ("<img src=x onerror=alert(1)>", "\"quotes' & ampersands", "🚂 emoji", "\u05e9\u05dc\u05d5\u05dd", "long" * 2_500)


def odd_request() -> Request:
    request = small_request(3, options=SIZE)
    named = [
        replace(c, param_name=(*ODD, "plain")[i], module_fqns=(ODD[i % 5],)) for i, c in enumerate(request.candidates)
    ]
    return replace(request, candidates=tuple(named))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, list[str]]]:
    with running_server(tmp_path_factory.mktemp("pages")) as server:
        requests = [small_request(0, options=SIZE), small_request(1, options=SIZE), odd_request()]
        for request in requests:
            answer = httpx.post(
                f"{server.url}/v1/plans", content=plan_body(request, profile_of(request)), headers=MSGPACK, timeout=60
            )
            assert answer.status_code == 201
        for key in ("first", "second"):
            opened = {
                "held_epoch": None, "key": key, "options": {"strategy": "size"}, "topology": {"fsdp": 1},
                "participants": {"fsdp": [[0, 1, 2]]}, "uuid": key,
            }  # fmt: skip
            assert httpx.post(f"{server.url}/v1/jobs/llama/attempts", json=opened).status_code == 201
        base = {
            "decision": None, "graph_hash": None, "members": {"fsdp": [0, 1, 2]}, "ordinal": 0, "skipped": [],
            "statistics": {}, "uuid": None, "slot": "forward",
        }  # fmt: skip
        reports = [
            base | {"rank": rank, "signature": requests[rank == 2].signature, "digests": {"fsdp": f"{rank == 2:064x}"}}
            for rank in range(3)
        ]
        sent = httpx.post(f"{server.url}/v1/jobs/llama/attempts/2/reports", json={"reports": reports})
        assert sent.status_code == 200, sent.text
        yield server, [request.signature for request in requests]


@pytest.fixture
def tab(chromium: Browser, served: tuple[RunningServer, list[str]]) -> Iterator[Page]:
    with watched_tab(chromium, served[0].url) as page:
        yield page


def addresses(signatures: list[str]) -> list[str]:
    first, second, odd = signatures
    return [
        "/", "/plans", f"/plans/{first}", f"/plans/{odd}", f"/plans/{odd}/buckets/0", "/jobs", "/jobs/llama",
        "/jobs/llama/attempts/2", f"/diff?a={first}&b={second}", "/events", "/login",
    ]  # fmt: skip


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 390)])
def test_every_page_is_accessible(tab, served, scheme, width):
    tab.emulate_media(color_scheme=scheme)
    tab.set_viewport_size({"width": width, "height": 900})
    for address in addresses(served[1]):
        answer = tab.goto(address)
        assert answer.status == 200, address
        found = Axe().run(tab)
        assert found.violations_count == 0, (address, found.generate_report())
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, address


def test_names_are_shown_as_they_are(tab, served):
    tab.goto(f"/plans/{served[1][2]}/buckets/0")
    buckets = ""
    for index in range(6):
        if tab.goto(f"/plans/{served[1][2]}/buckets/{index}").status == 200:
            buckets += tab.locator("main").evaluate("node => node.textContent")
        if all(name in buckets for name in ODD):
            break
        tab.wait_for_load_state()
    assert all(name in buckets for name in ODD)


def test_a_replan_is_previewed_then_confirmed(tab, served):
    signature = served[1][0]
    tab.goto(f"/plans/{signature}")
    tab.get_by_label("Strategy").select_option("none")
    tab.locator("#replan-reason").fill("buckets off <b>today</b>")
    follow(tab.get_by_role("button", name="Preview the new plan"))
    assert "Nothing is changed yet" in tab.content()
    assert len(httpx.get(f"{served[0].url}/v1/plans/{signature}/revisions").json()["revisions"]) == 1
    follow(tab.get_by_role("button", name="Confirm and activate"))
    assert "revision 2" in tab.title()
    listed = httpx.get(f"{served[0].url}/v1/plans/{signature}/revisions").json()["revisions"]
    assert [row["active_for"] for row in listed] == [[], [""]]
    assert listed[1]["reason"] == "buckets off <b>today</b>"


def test_three_clicks_lead_to_the_rank_that_differs(tab, served):
    tab.goto("/")
    follow(tab.get_by_role("link", name="Attempt 2"))
    text = tab.locator("section.callout").inner_text()
    assert "rank 2" in text
    assert "input_shape" in text


def test_two_clicks_lead_to_why_a_bucket_is_as_it_is(tab, served):
    tab.goto("/")
    follow(tab.locator(f"main a[href='/plans/{served[1][1]}']").first)
    follow(tab.locator("main a[href*='/buckets/0']").first)
    said = tab.locator("main .callout").inner_text()
    assert "Begins here: " in said
    assert "Ends here: " in said


def test_search_finds_a_plan_by_its_parameter(tab, served):
    tab.goto("/plans")
    tab.get_by_label("Parameter contains").fill("emoji")
    follow(tab.get_by_role("button", name="Filter"))
    assert tab.locator("tbody tr").count() == 1
    assert served[1][2][:12] in tab.locator("tbody").inner_text()


def test_the_log_is_verified_from_its_page(tab, served):
    tab.goto("/events")
    follow(tab.get_by_role("button", name="Verify now"))
    assert "The chain holds" in tab.locator("#verification").inner_text()


@pytest.mark.parametrize("target", ["//evil.example", "https://evil.example/", "/\\evil.example", "evil", "/\nx"])
def test_nobody_is_sent_elsewhere_after_signing_in(target):
    assert local_path(target) == "/"


def test_a_post_from_another_site_is_refused(served):
    answer = httpx.post(
        f"{served[0].url}/plans/{served[1][0]}/activate",
        data={"revision": "1", "reason": "x", "confirm": "yes"},
        headers={"Origin": "https://evil.example"},
    )
    assert answer.status_code == 403


def test_every_page_is_documented():
    readme = (ROOT / "server" / "README.md").read_text()
    parts = (fleet, plan, compare, change, attempt, session)
    routes = [route for part in parts for route in part.router.routes if isinstance(route, APIRoute)]
    assert len(routes) > 10
    missing = [f"{m} {r.path}" for r in routes for m in r.methods if f"`{m} {r.path}`" not in readme]
    assert missing == []
