"""What people do on the pages with real tokens: sign in, page through lists, compare, change, roll back."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from playwright.sync_api import Browser, Page

from bucketplan_core.attempt import AttemptRequest, RankReport
from bucketplan_core.collectives import Options
from bucketplan_core.wire import pack, unpack
from bucketplan_server import cli_tokens
from bucketplan_server.access.authenticate import COOKIE
from bucketplan_server.settings import load_settings
from tests.support.browser import follow, watched_tab
from tests.support.documents import MSGPACK, plan_body, profile_of, small_request
from tests.support.server import RunningServer, running_server

pytestmark = pytest.mark.browser
_numbers = itertools.count()
NONE = Options(strategy="none", planner="none/1")
TOKENS = {
    "ranks": ("rank", None), "auditor": ("auditor", None), "operator": ("operator", None),
    "a-ranks": ("rank", "team-a"), "a-operator": ("operator", "team-a"),
}  # fmt: skip
NUM_JOBS, NUM_ATTEMPTS, NUM_PLANS, NUM_BUCKETS = 23, 22, 53, 60


@dataclass(frozen=True, slots=True)
class Guarded:
    server: RunningServer
    secrets: dict[str, str]
    signatures: list[str]
    client: httpx.Client

    def call(self, token: str, method: str, path: str, body: Any = None, **options: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.secrets[token]}"}
        if body is not None:
            headers |= MSGPACK
            options["content"] = body if isinstance(body, bytes) else pack(body)
        return self.client.request(method, path, headers=headers, **options)

    def done(self, token: str, method: str, path: str, body: Any = None) -> Any:
        answer = self.call(token, method, path, body)
        assert answer.is_success, answer.text
        return unpack(answer.content)

    def new_plan(self, number: int, **options: Any) -> str:
        """A plan of its own for a test that changes it."""
        request = small_request(number, **options)
        self.done("ranks", "POST", "/v1/plans", plan_body(request, profile_of(request)))
        return request.signature

    def active(self, signature: str) -> list[list[str]]:
        listed = self.call("operator", "GET", f"/v1/plans/{signature}/revisions").json()
        return [row["active_for"] for row in listed["revisions"]]

    def start(self, job: str, signatures: list[str], *, token: str = "ranks", **options: Any) -> int:
        ranks = tuple(range(len(signatures)))
        body = AttemptRequest(
            key=f"start {next(_numbers)}", participants={"fsdp": (ranks,)} if ranks else {}, options=options
        )
        number: int = self.done(token, "POST", f"/v1/jobs/{job}/attempts", body.to_wire())["attempt"]
        if not signatures:
            return number
        reports = [
            RankReport(rank=rank, slot="joint", signature=name, digests={"fsdp": name}, members={"fsdp": ranks})
            for rank, name in enumerate(signatures)
        ]
        reported = {"reports": [report.to_wire() for report in reports]}
        self.done(token, "POST", f"/v1/jobs/{job}/attempts/{number}/reports", reported)
        return number


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded-pages")
    database = str(folder / "bucketplan.db")
    settings = load_settings(database=database)
    # Playwright keeps an event loop in this thread, and the command starts one of its own.
    with ThreadPoolExecutor(1) as apart:
        secrets = {
            name: apart.submit(
                cli_tokens.create, settings, name, role=role, namespace=namespace, expires=None, reason="test"
            ).result()
            for name, (role, namespace) in TOKENS.items()
        }
    with (
        running_server(folder, database=database) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        found = Guarded(server, secrets, [], client)
        found.signatures.append(found.new_plan(0, num_candidates=NUM_BUCKETS, options=NONE))
        found.signatures.extend(found.new_plan(number) for number in range(1, NUM_PLANS))
        for number in range(NUM_JOBS - 1):
            found.start(f"job-{number:02}", [])
        for _ in range(NUM_ATTEMPTS):
            found.start("often", [])
        found.start("secret", [found.signatures[2]], token="a-ranks")
        yield found


@contextmanager
def signed_in(browser: Browser, guarded: Guarded, token: str, *refusals: int) -> Iterator[Page]:
    with watched_tab(browser, guarded.server.url, refusals=frozenset(refusals)) as tab:
        sign_in(tab, guarded.secrets[token])
        yield tab


def sign_in(tab: Page, secret: str) -> None:
    if "/login" not in tab.url:
        tab.goto("/login")
    tab.get_by_label("Token").fill(secret)
    follow(tab.get_by_role("button", name="Sign in"))


@pytest.fixture
def operator(chromium: Browser, guarded: Guarded) -> Iterator[Page]:
    with signed_in(chromium, guarded, "operator", 409) as tab:
        yield tab


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("/jobs", NUM_JOBS + 1),
        ("/jobs/often", NUM_ATTEMPTS),
        ("/plans/{large}", NUM_BUCKETS),
        ("/plans/{large}/buckets/0", 1),
        ("/plans?strategy=none", 1),
        ("/plans?strategy=size", NUM_PLANS - 1),
        ("/events?kind=attempt.opened", NUM_JOBS + NUM_ATTEMPTS),
    ],
)
def test_paging_shows_everything_once(operator, guarded, address, expected):
    operator.goto(address.format(large=guarded.signatures[0]))
    seen = []
    for _ in range(10):
        table = operator.locator("table", has=operator.locator("tbody th[scope=row]")).first
        if "{large}" in address and "buckets" not in address:
            table = operator.locator("#buckets ~ .scroll table").first
        seen += table.locator("tbody th[scope=row]").all_inner_texts()
        following = operator.locator(".pager a[rel=next]")
        if not following.count():
            break
        follow(following.first)
    assert len(seen) == len(set(seen)) == expected


def test_a_stranger_signs_in_arrives_and_signs_out(chromium, guarded):
    wanted = f"/plans/{guarded.signatures[1]}?order=bytes"
    with watched_tab(chromium, guarded.server.url, refusals=frozenset([401])) as tab:
        tab.goto(wanted)
        assert "/login?next=" in tab.url
        assert guarded.signatures[1][:12] not in tab.locator("main").inner_text()
        sign_in(tab, "not a token")
        assert "not valid here" in tab.get_by_role("alert").inner_text()
        sign_in(tab, guarded.secrets["auditor"])
        assert tab.url == guarded.server.url + wanted
        assert "auditor, auditor" in tab.locator(".who").inner_text()
        (cookie,) = tab.context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"], cookie["path"]) == (True, "Strict", "/")
        assert tab.evaluate("document.cookie") == ""
        follow(tab.get_by_role("button", name="Log out"))
        assert tab.context.cookies() == []
        tab.goto(wanted)
        assert "/login?next=" in tab.url


def test_a_rank_may_not_look_and_is_told_what_it_needs(chromium, guarded):
    with signed_in(chromium, guarded, "ranks", 403) as tab:
        assert "needs 'auditor'" in tab.get_by_role("alert").inner_text()
        assert tab.get_by_role("link", name="Sign in with another token").count() == 1


def test_an_auditor_may_verify_and_not_change(chromium, guarded):
    signature = guarded.signatures[3]
    with signed_in(chromium, guarded, "auditor", 403) as tab:
        tab.goto("/events")
        tab.get_by_label("plan every revision again, too").check()
        follow(tab.get_by_role("button", name="Verify now"))
        assert "The chain holds" in tab.locator("#verification").inner_text()
        assert f"{NUM_PLANS}" in tab.locator("#verification").inner_text()
        tab.goto(f"/plans/{signature}")
        assert tab.locator("main form[method=post]").count() == 0
        for action in ("activate", "replan"):
            # What a form would send, from a page of the server's own.
            status = tab.evaluate(
                "([path]) => fetch(path, {method: 'POST', body: new URLSearchParams({revision: 1, reason: 'x'})})"
                ".then(answer => answer.status)",
                [f"/plans/{signature}/{action}"],
            )
            assert status == 403
    assert guarded.active(signature) == [[""]]


def preview(tab: Page, signature: str, revision: int, *, job: str = "", reason: str = "test") -> None:
    tab.goto(f"/plans/{signature}")
    tab.locator("select#revision").select_option(str(revision))
    tab.locator("#activate-job").fill(job)
    tab.locator("#activate-reason").fill(reason)
    follow(tab.get_by_role("button", name="Preview the activation"))
    assert "Nothing is changed yet" in tab.locator("main").inner_text()


def confirm(tab: Page) -> None:
    follow(tab.get_by_role("button", name="Confirm and activate"))


def with_two_revisions(guarded: Guarded, number: int) -> str:
    signature = guarded.new_plan(number)
    body = {"options": {"strategy": "none"}, "reason": "test"}
    guarded.done("operator", "POST", f"/v1/plans/{signature}/revisions", body)
    return signature


def test_a_revision_is_activated_and_rolled_back(operator, guarded):
    signature = with_two_revisions(guarded, 101)
    for revision, active in ((2, [[], [""]]), (1, [[""], []])):
        preview(operator, signature, revision, reason=f"to {revision}")
        text = operator.locator("main").inner_text()
        assert f"Served now: revision {3 - revision}" in text
        assert ("split" if revision == 2 else "merged") in text
        assert guarded.active(signature) == [[""], []] if revision == 2 else [[], [""]]
        confirm(operator)
        assert "served from now on" in operator.get_by_role("status").inner_text()
        assert guarded.active(signature) == active
    operator.goto(f"/events?signature={signature}&kind=plan.activated")
    assert operator.locator("tbody td.text").all_inner_texts() == ["to 1", "to 2"]


@pytest.mark.parametrize("job", ["", "job-01"])
def test_a_preview_that_somebody_overtook_is_refused(operator, guarded, job):
    signature = with_two_revisions(guarded, 103 + len(job))
    preview(operator, signature, 1 if job else 2, job=job)
    body = {"revision": 2, "reason": "faster", **({"job": job} if job else {})}
    guarded.done("operator", "POST", f"/v1/plans/{signature}/activate", body)
    confirm(operator)
    assert "revision 2 is active" in operator.get_by_role("alert").inner_text()
    assert guarded.active(signature) == ([[""], [job]] if job else [[], [""]])


def test_a_revision_for_one_job_leaves_the_others_alone(operator, guarded):
    signature = with_two_revisions(guarded, 120)
    preview(operator, signature, 2, job="job-02")
    assert "Served now to this job: revision 1, as to everyone" in operator.locator("main").inner_text()
    confirm(operator)
    assert guarded.active(signature) == [[""], ["job-02"]]
    preview(operator, signature, 1, job="job-02")
    assert "Served now to this job: revision 2." in operator.locator("main").inner_text()
    confirm(operator)
    assert sorted(guarded.active(signature)[0]) == ["", "job-02"]


def test_what_changed_since_the_attempt_before_is_three_clicks_away(operator, guarded):
    old, new = guarded.signatures[4:6]
    overridden = with_two_revisions(guarded, 130)
    guarded.start("changes", [old, old], strategy="size")
    body = {"revision": 2, "reason": "test", "job": "changes"}
    guarded.done("operator", "POST", f"/v1/plans/{overridden}/activate", body)
    guarded.start("changes", [new, new], strategy="none")
    operator.goto("/")
    follow(operator.get_by_role("link", name="Jobs", exact=True))
    follow(operator.get_by_role("row", name="changes").get_by_role("link", name="Attempt 2"))
    rows = operator.locator("#since ~ .scroll tbody tr").all_inner_texts()
    changed = {row.split("\t")[0]: row.split("\t")[1:] for row in rows}
    assert changed["option strategy"][:2] == ["size", "none"]
    assert changed["graph joint 0"][:2] == [old[:12], new[:12]]
    assert overridden[:12] in "".join(changed["plan that is served"])
    follow(operator.get_by_role("link", name="Compare", exact=True).last)
    assert "input_shape" in operator.locator("main").inner_text()


def test_every_signature_that_differs_has_its_first_field(operator, guarded):
    base = small_request(140)
    others = [
        replace(base, candidates=(replace(base.candidates[0], **change), *base.candidates[1:]))
        for change in ({"dtype": "float32"}, {"input_shape": (64, 4), "output_shape": (512, 4)})
    ]
    for request in (base, *others):
        guarded.done("ranks", "POST", "/v1/plans", plan_body(request, profile_of(request)))
    guarded.start("three", [others[0].signature, base.signature, base.signature, others[1].signature])
    operator.goto("/jobs/three/attempts/1")
    listed = operator.locator("section.callout li").all_inner_texts()
    assert [text.split(":")[0] for text in listed] == ["rank 0", "rank 3"]
    assert "dtype" in listed[0]
    assert "float32 there, bfloat16 in the largest party" in listed[0]
    assert "input_shape" in listed[1]
    operator.goto("/jobs/three")
    assert "diverged" in operator.locator("tbody").inner_text()


def test_a_namespace_sees_its_own_jobs_only(chromium, guarded):
    with signed_in(chromium, guarded, "a-operator", 403, 404) as tab:
        tab.goto("/jobs")
        assert tab.locator("tbody th").all_inner_texts() == ["secret"]
        tab.goto("/")
        assert "job-" not in tab.locator("main").inner_text()
        assert tab.get_by_text("Hit rate").count() == 1
        tab.goto("/events")
        kinds = tab.locator("tbody td:nth-child(6)").all_inner_texts()
        assert kinds
        assert not any("job-" in text or "often" in text for text in kinds)
        assert tab.get_by_role("button", name="Verify now").count() == 0
        assert tab.goto("/jobs/job-01/attempts/1").status == 404
        preview_of_everyone = guarded.signatures[2]
        tab.goto(f"/plans/{preview_of_everyone}")
        tab.locator("#activate-reason").fill("mine")
        follow(tab.get_by_role("button", name="Preview the activation"))
        assert "served to every namespace" in tab.get_by_role("alert").inner_text()
    with signed_in(chromium, guarded, "auditor") as tab:
        tab.goto("/jobs?name=secret")
        assert tab.locator("tbody th").all_inner_texts() == ["team-a~secret"]


def test_the_keyboard_alone_replans(operator, guarded):
    signature = guarded.new_plan(150)
    operator.goto(f"/plans/{signature}")
    operator.keyboard.press("Tab")
    assert operator.evaluate("document.activeElement.className") == "skip"
    walk_to(operator, "strategy")
    operator.keyboard.type("none")
    walk_to(operator, "replan-reason")
    operator.keyboard.type("by keyboard")
    operator.keyboard.press("Enter")
    operator.get_by_role("heading", name="What would change").wait_for()
    walk_to(operator, "Confirm and activate")
    operator.keyboard.press("Enter")
    operator.get_by_role("status").wait_for()
    assert "revision 2" in operator.title()
    assert guarded.active(signature) == [[], [""]]


def walk_to(tab: Page, wanted: str) -> None:
    """Tab forward to the element of this id or text; everything on the way shows that it has the focus."""
    for _ in range(300):
        tab.keyboard.press("Tab")
        name, text, outline = tab.evaluate(
            "() => { const at = document.activeElement; const style = getComputedStyle(at);"
            " return [at.id, at.textContent.trim(), style.outlineStyle]; }"
        )
        assert outline != "none", (name, text)
        if wanted in (name, text):
            return
    raise AssertionError(f"the Tab key never reaches {wanted}")


def test_a_plan_without_figures_shows_sizes_and_says_why(operator, guarded):
    operator.goto(f"/plans/{guarded.signatures[0]}")
    assert "no figures of the hardware" in operator.locator("main .callout").inner_text()
    assert operator.locator("rect.bar").count() == NUM_BUCKETS
    data = guarded.call("auditor", "GET", f"/plans/{guarded.signatures[0]}/pictures.json").json()
    assert (data["before"], len(data["sizes"])) == (None, NUM_BUCKETS)


def test_every_page_carries_the_headers_that_protect_it(guarded):
    signature = guarded.signatures[0]
    pages = {
        "/": 200, "/plans": 200, f"/plans/{signature}": 200, f"/plans/{signature}/buckets/0": 200, "/jobs": 200,
        "/jobs/often": 200, "/jobs/often/attempts/1": 200, f"/diff?a={signature}&b={signature}": 200, "/events": 200,
        "/login": 200, "/plans/" + 64 * "0": 404, f"/plans/{signature}?revision=x": 400, "/jobs/none/attempts/1": 404,
    }  # fmt: skip
    for address, status in pages.items():
        answer = guarded.call("auditor", "GET", address)
        assert answer.status_code == status, address
        assert answer.headers["content-type"] == "text/html; charset=utf-8", address
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'", address
        assert policy["script-src"] == policy["style-src"] == policy["form-action"] == "'self'", address
        assert answer.headers["x-content-type-options"] == "nosniff", address
        assert answer.headers["referrer-policy"] == "same-origin", address
        assert answer.headers["cache-control"] == "no-store", address
        assert "style=" not in answer.text, address
        assert "<script>" not in answer.text, address


@pytest.mark.parametrize("name", ["style.css", "app.js", "icon.svg"])
def test_static_files_are_checked_by_their_tag(guarded, name):
    first = httpx.get(f"{guarded.server.url}/static/{name}")
    assert first.status_code == 200
    assert first.headers["x-content-type-options"] == "nosniff"
    assert first.headers["cache-control"] == "no-cache"
    again = httpx.get(f"{guarded.server.url}/static/{name}", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = httpx.get(f"{guarded.server.url}/static/{name}", headers={"If-None-Match": '"other"'})
    assert other.content == first.content
    assert httpx.get(f"{guarded.server.url}/static/..%2Frender.py").status_code == 404


@pytest.mark.parametrize("cookie", [None, "ended"])
@pytest.mark.parametrize("confirming", [False, True])
def test_a_form_that_an_ended_session_stops_is_not_lost(chromium, guarded, cookie, confirming):
    signature = guarded.new_plan(200 + 2 * confirming + (cookie is None))
    wanted = f"{guarded.server.url}/plans/{signature}?revision=1"
    with signed_in(chromium, guarded, "operator", 401) as tab:
        tab.goto(wanted)
        tab.locator("#strategy").select_option("none")
        tab.locator("#memory_budget_bytes").fill("123456789")
        tab.locator("#replan-reason").fill("typed <b>once</b>")
        button = tab.get_by_role("button", name="Preview the new plan")
        if confirming:
            follow(button)
            button = tab.get_by_role("button", name="Confirm and activate")
        tab.context.clear_cookies()
        if cookie is not None:
            tab.context.add_cookies([{"name": COOKIE, "value": cookie, "url": guarded.server.url}])
        follow(button)
        assert "The form was not sent" in tab.get_by_role("status").inner_text()
        sign_in(tab, "not a token")
        assert "The form was not sent" in tab.get_by_role("status").inner_text()
        sign_in(tab, guarded.secrets["operator"])
        assert tab.url == wanted
        typed = [tab.locator(f"#{name}").input_value() for name in ("strategy", "memory_budget_bytes", "replan-reason")]
        assert typed == ["none", "123456789", "typed <b>once</b>"]
        follow(tab.get_by_role("button", name="Preview the new plan"))
        follow(tab.get_by_role("link", name="Cancel"))
        assert tab.locator("#replan-reason").input_value() == "", "only what was stopped is filled in"
    assert guarded.active(signature) == [[""]]


@pytest.mark.parametrize(
    ("referer", "place"),
    [
        ("{url}/plans?strategy=size", "/plans?strategy=size"),
        ("{url}/plans/x/replan?revision=2", "/plans/x?revision=2"),
        ("https://evil.example/plans", "/plans/x"),
        ("//evil.example", "/plans/x"),
        (None, "/plans/x"),
    ],
)
def test_who_must_sign_in_for_a_form_is_led_back_to_its_page(guarded, referer, place):
    headers = {"Accept": "text/html"} | ({"Referer": referer.format(url=guarded.server.url)} if referer else {})
    answer = httpx.post(f"{guarded.server.url}/plans/x/replan", data={"reason": "x"}, headers=headers)
    assert (answer.status_code, answer.headers["location"]) == (303, f"/login?next={quote(place, safe='')}&unsent=yes")


def test_who_may_not_send_a_form_can_sign_in_and_be_back_on_its_page(guarded):
    path = f"/plans/{guarded.signatures[0]}/activate"
    answer = guarded.call("auditor", "POST", path)
    assert answer.status_code == 403
    assert f"/login?next={quote(path.removesuffix('/activate'), safe='')}&amp;unsent=yes" in answer.text
