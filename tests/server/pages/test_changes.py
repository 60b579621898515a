"""Changing what is served from the pages: which options a replan starts from, and what its preview says of them."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page

from tests.server.test_attempts import open_attempt
from tests.support.browser import follow, watched_tab
from tests.support.documents import MSGPACK, SIZE, plan_body, profile_of, small_request
from tests.support.server import RunningServer, running_server

pytestmark = pytest.mark.browser
_numbers = itertools.count()
BUDGET = replace(SIZE, memory_budget_bytes=10**9, prefetch=3)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("changes")) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture
def tab(chromium: Browser, server: RunningServer) -> Iterator[Page]:
    with watched_tab(chromium, server.url, refusals=frozenset([400])) as page:
        yield page


def new_plan(client: httpx.Client, **options: Any) -> str:
    request = small_request(next(_numbers), options=replace(BUDGET, **options))
    answer = client.post("/v1/plans", content=plan_body(request, profile_of(request)), headers=MSGPACK)
    assert answer.status_code == 201, answer.text
    return request.signature


def add(client: httpx.Client, signature: str, **options: Any) -> None:
    body = {"options": options, "reason": "test"}
    assert client.post(f"/v1/plans/{signature}/revisions", json=body).status_code == 201


def activate(client: httpx.Client, signature: str, revision: int | None, **more: Any) -> None:
    body = {"reason": "test", "revision": revision, **more}
    answer = client.post(f"/v1/plans/{signature}/activate", json=body)
    assert answer.status_code == 200, answer.text


def revisions(client: httpx.Client, signature: str) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = client.get(f"/v1/plans/{signature}/revisions").json()["revisions"]
    return listed


def preview_replan(tab: Page, **fields: str) -> None:
    for name, value in {"replan-reason": "test", **fields}.items():
        field = tab.locator(f"#{name}")
        if field.evaluate("field => field.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)
    follow(tab.get_by_role("button", name="Preview the new plan"))


def confirm(tab: Page) -> None:
    follow(tab.get_by_role("button", name="Confirm and activate"))


def previewed(tab: Page) -> dict[str, tuple[str, str]]:
    """The options of a preview: name to (before, after), of those that differ."""
    rows = [row.split("\t") for row in tab.locator("#options tbody tr").all_inner_texts()]
    assert len(rows) == 9
    return {name: (before, after) for name, before, after in rows if "unchanged" not in after}


def test_an_emptied_memory_budget_is_none(tab, client):
    signature = new_plan(client)
    tab.goto(f"/plans/{signature}")
    assert tab.locator("#memory_budget_bytes").input_value() == "1000000000"
    preview_replan(tab, memory_budget_bytes="")
    assert previewed(tab) == {"memory_budget_bytes": ("1000000000 (954 MiB)", "the planner's own")}
    confirm(tab)
    assert revisions(client, signature)[1]["options"] == BUDGET.to_wire() | {"memory_budget_bytes": None}
    assert tab.locator("#memory_budget_bytes").input_value() == ""


@pytest.mark.parametrize("name", ["bucket_cap_bytes", "first_bucket_cap_bytes", "prefetch"])
def test_what_no_plan_can_do_without_cannot_be_emptied(tab, client, name):
    signature = new_plan(client)
    tab.goto(f"/plans/{signature}")
    assert tab.locator(f"#{name}").evaluate("field => field.required")
    tab.locator(f"#{name}").evaluate("field => field.removeAttribute('required')")
    preview_replan(tab, **{name: ""})
    assert f"{name}: empty" in tab.get_by_role("alert").inner_text()
    assert tab.locator(f"#{name}").get_attribute("aria-invalid") == "true"
    assert tab.locator("#memory_budget_bytes").input_value() == "1000000000"


def test_a_replan_starts_from_the_options_of_the_revision_that_is_shown(tab, client):
    signature = new_plan(client)
    add(client, signature, bucket_cap_bytes=70_000, mixed_dtype=True, strategy="none")
    add(client, signature, prefetch=7)
    tab.goto(f"/plans/{signature}?revision=2")
    shown = [tab.locator(f"#{name}").input_value() for name in ("strategy", "bucket_cap_bytes", "prefetch")]
    assert shown == ["none", "70000", "3"]
    preview_replan(tab, prefetch="5")
    assert previewed(tab) == {"prefetch": ("3", "5")}
    assert "Before, revision 2" in tab.locator("#options").inner_text()
    confirm(tab)
    made = revisions(client, signature)[3]
    expected = {"bucket_cap_bytes": 70_000, "mixed_dtype": True, "prefetch": 5, "strategy": "none"}
    assert {name: made["options"][name] for name in expected} == expected
    assert (made["parent"], made["planner"]) == (2, "none/1")


def test_a_form_that_is_refused_comes_back_beside_the_revision_that_it_was_filled_from(tab, client):
    signature = new_plan(client)
    add(client, signature, prefetch=7)
    tab.goto(f"/plans/{signature}?revision=2")
    tab.locator("#prefetch").evaluate("field => field.removeAttribute('pattern')")
    preview_replan(tab, prefetch="all")
    assert "revision 2" in tab.title()
    assert tab.locator("#prefetch").input_value() == "all"
    preview_replan(tab, prefetch="8")
    assert previewed(tab) == {"prefetch": ("7", "8")}
    follow(tab.get_by_role("link", name="Cancel"))
    assert "revision 2" in tab.title()


def test_the_preview_of_an_activation_shows_what_changes_in_the_options(tab, client):
    signature = new_plan(client)
    add(client, signature, prefetch=7)
    tab.goto(f"/plans/{signature}")
    tab.locator("#revision").select_option("2")
    tab.locator("#activate-reason").fill("test")
    follow(tab.get_by_role("button", name="Preview the activation"))
    assert previewed(tab) == {"prefetch": ("3", "7")}


def test_options_of_every_revision_are_on_the_page(tab, client):
    signature = new_plan(client)
    add(client, signature, prefetch=7, strategy="none")
    tab.goto(f"/plans/{signature}?revision=2")
    tab.get_by_text("Options of this revision").click()
    shown = tab.locator("#options").inner_text()
    for text in ("strategy none", "prefetch 7", "bucket_cap_bytes 65536 (64 KiB)", "hardware unknown"):
        assert text in shown
    rows = tab.locator("#revisions ~ .scroll tbody tr").all()
    for row in rows:
        row.locator("summary").first.click()
    assert ["prefetch 7" in row.inner_text() for row in rows] == [True, False]
    assert ["prefetch 3" in row.inner_text() for row in rows] == [False, True]


def preview_activation(tab: Page, revision: int, *, job: str = "") -> None:
    tab.locator("#revision").select_option(str(revision))
    tab.locator("#activate-job").fill(job)
    tab.locator("#activate-reason").fill("test")
    follow(tab.get_by_role("button", name="Preview the activation"))


def active(client: httpx.Client, signature: str) -> list[list[str]]:
    return [row["active_for"] for row in revisions(client, signature)]


def preview_taking_back(tab: Page, job: str) -> None:
    tab.locator("#follow-job").select_option(job)
    tab.locator("#follow-reason").fill("no longer needed")
    follow(tab.get_by_role("button", name="Preview taking it back"))


def test_what_a_job_has_of_its_own_is_taken_back(tab, client):
    signature = new_plan(client)
    add(client, signature, prefetch=7)
    tab.goto(f"/plans/{signature}")
    assert tab.locator("#follow").count() == 0
    for job in ("mine", "yours"):
        activate(client, signature, 2, job=job)
    tab.goto(f"/plans/{signature}")
    preview_taking_back(tab, "mine")
    text = tab.locator("main .callout").first.inner_text()
    assert "Served now to this job: revision 2." in text
    assert "job mine is served what everyone is, which is revision 1 now" in text
    assert previewed(tab) == {"prefetch": ("7", "3")}
    assert active(client, signature) == [[""], ["mine", "yours"]]
    follow(tab.get_by_role("button", name="Confirm"))
    assert active(client, signature) == [[""], ["yours"]]
    assert "Job mine is served from now on what everyone is" in tab.get_by_role("status").inner_text()
    assert tab.locator("#follow-job option").all_inner_texts() == ["yours (revision 2)"]
    assert unpack_activation(client, signature) == {"before": 2, "job": "mine", "revision": None}
    assert client.get("/v1/events/verify").json()["holds"] is True


def unpack_activation(client: httpx.Client, signature: str) -> dict[str, Any]:
    listed = client.get("/v1/events", params={"signature": signature}).json()["events"]
    last: dict[str, Any] = listed[-1]
    assert (last["kind"], last["reason"]) == ("plan.activated", "no longer needed")
    body: dict[str, Any] = last["body"]
    return body


def test_taking_back_twice_is_done_once_and_a_change_between_is_told(tab, client):
    signature = new_plan(client)
    add(client, signature, strategy="none")
    activate(client, signature, 2, job="mine")
    tab.goto(f"/plans/{signature}")
    preview_taking_back(tab, "mine")
    asked = {
        field.get_attribute("name"): field.get_attribute("value") for field in tab.locator("main form input").all()
    }
    places = [client.post(f"/plans/{signature}/activate", data=asked).headers["location"] for _ in range(2)]
    assert [place.partition("?")[2] for place in places] == [
        "revision=1&done=followed&job=mine",
        "revision=1&done=already&job=mine",
    ]
    assert "Job <bdi" in client.get(places[1]).text.partition("Already done")[2]
    activate(client, signature, 2, job="mine")
    for spoiled in (asked | {"expected": "1"}, asked | {"digest": "0" * 64}):
        answer = client.post(f"/plans/{signature}/activate", data=spoiled)
        assert answer.status_code == 409
    activate(client, signature, 2)
    assert client.post(f"/plans/{signature}/activate", data=asked).status_code == 409
    assert active(client, signature) == [[], ["", "mine"]]


@pytest.mark.parametrize(("job", "said"), [("", "say which job"), ("other", "has no revision of its own")])
def test_only_what_a_job_has_of_its_own_can_be_taken_back(client, job, said):
    signature = new_plan(client)
    form = {"revision": "everyone", "job": job, "reason": "because"}
    answer = client.post(f"/plans/{signature}/activate", data=form)
    assert answer.status_code == 400
    assert said in answer.text
    assert 'id="follow-job-error"' in answer.text
    assert 'id="follow-reason" name="reason" required maxlength="2000" dir="auto" value="because"' in answer.text


def test_a_change_for_everyone_names_the_jobs_that_keep_their_own(tab, client):
    signature = new_plan(client)
    add(client, signature, prefetch=7)
    tab.goto(f"/plans/{signature}")
    preview_activation(tab, 2)
    assert tab.locator("#own").count() == 0
    for number in range(7):
        activate(client, signature, 1, job=f"keeps-{number}")
    tab.goto(f"/plans/{signature}")
    preview_activation(tab, 2)
    kept = "7 jobs with a revision of their own: " + ", ".join(f"keeps-{n} (revision 1)" for n in range(5))
    assert f"Not changed by this: {kept} and 2 more." in tab.locator("#own").inner_text()
    confirm(tab)
    assert f"Revision 2 is served from now on to everyone but {kept}" in tab.get_by_role("status").inner_text()
    tab.goto(f"/plans/{signature}")
    assert f"active for everyone but {kept} and 2 more." in tab.locator("main").inner_text()


def test_a_job_that_was_never_opened_is_told_in_the_preview(tab, client):
    signature = new_plan(client)
    open_attempt(client, "opened", "first")
    for job, is_new in (("opned", True), ("opened", False)):
        tab.goto(f"/plans/{signature}")
        preview_activation(tab, 1, job=job)
        assert tab.locator("#new-job").count() == is_new
        confirm(tab)
        assert f"served from now on to job {job} alone" in tab.get_by_role("status").inner_text()
    assert active(client, signature) == [["", "opened", "opned"]]


@pytest.mark.parametrize(
    "query",
    [
        "done=activated",
        "done=activated&revision=2",
        "done=replanned&revision=1&job=mine",
        "done=already&revision=2",
        "done=followed",
        "done=followed&job=own",
        "done=already&job=own",
        "done=nonsense&revision=1",
    ],
)
def test_nothing_is_said_to_be_done_that_is_not_so(client, query):
    signature = new_plan(client)
    add(client, signature, prefetch=7)
    activate(client, signature, 2, job="own")
    text = client.get(f"/plans/{signature}?{query}").text
    assert 'role="status"' not in text


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_previews_and_what_follows_are_accessible(tab, client, scheme, width):
    signature = new_plan(client)
    add(client, signature, prefetch=7)
    activate(client, signature, 2, job="its-own")
    tab.emulate_media(color_scheme=scheme)
    tab.set_viewport_size({"width": width, "height": 900})

    def is_accessible() -> None:
        found = Axe().run(tab)
        assert found.violations_count == 0, found.generate_report()
        assert tab.evaluate("document.documentElement.scrollWidth") <= width

    tab.goto(f"/plans/{signature}")
    for summary in tab.locator("details[id=options] summary, #revisions ~ .scroll summary").all():
        summary.click()
    is_accessible()
    preview_replan(tab, prefetch="9")
    is_accessible()
    confirm(tab)
    is_accessible()
    preview_activation(tab, 1, job="nobody")
    is_accessible()
    tab.goto("/login?unsent=yes&next=/plans")
    is_accessible()
