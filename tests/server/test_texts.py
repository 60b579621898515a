"""Whatever text a caller may send is shown as it is on every page where it appears, and never becomes an element."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any
from urllib.parse import quote, urlencode

import httpx
import pytest

from bucketplan_core.collectives import FixedCollective, Group
from bucketplan_core.request import Request
from bucketplan_core.wire import pack
from bucketplan_server.store.events import Cause, append_event
from tests.server.test_profiles import measured
from tests.support.documents import MSGPACK, plan_body, small_request
from tests.support.inprocess import InProcess, in_process

SHORT = '\'"><hostile onhostile="1">&amp; 🚂 \u05e9\u05dc\u05d5\u05dd </title></script><!--'
LONG = SHORT + "long" * 2_500
WHOLE = 1_000_000
Shown = dict[str, int]
"""How many characters of the text each page shows at least, by its address."""


class Seen(HTMLParser):
    """What a page says, and which of its elements or attributes came from a hostile text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.made: list[str] = []
        self.text = ""
        self.values: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.made += [name for name in (tag, *(name for name, _ in attributes)) if "hostile" in name]
        self.values += [value for name, value in attributes if name == "value" and value is not None]

    def handle_comment(self, data: str) -> None:
        self.made.append(data)

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    with in_process([str(tmp_path_factory.mktemp("texts") / "store.db")]) as servers:
        yield servers


def send(server: InProcess, path: str, body: Any) -> None:
    content = body if isinstance(body, bytes) else pack(body)
    answer = server.run(server.call("POST", path, content=content, **MSGPACK))
    assert answer.is_success, answer.text


def post_form(server: InProcess, signature: str, action: str, typed: dict[str, str]) -> httpx.Response:
    form = server.call(
        "POST", f"/plans/{signature}/{action}", content=urlencode(typed).encode(), accept="text/html",
        content_type="application/x-www-form-urlencoded",
    )  # fmt: skip
    return server.run(form)


def num_events(server: InProcess) -> int:
    return len(server.run(server.call("GET", "/v1/events?limit=1000", accept="application/json")).json()["events"])


def planned(server: InProcess, request: Request) -> str:
    send(server, "/v1/plans", plan_body(request))
    return request.signature


def first_changed(number: int, **changes: Any) -> Request:
    request = small_request(number)
    first, *others = request.candidates
    return replace(request, candidates=(replace(first, **changes), *others))


def opened(server: InProcess, job: str, *reports: dict[str, Any], role: str = "fsdp") -> str:
    """The page of an attempt of two ranks with these reports."""
    opening = {"held_epoch": None, "key": "k", "options": {"strategy": "size"}, "topology": {}, "uuid": None}
    send(server, f"/v1/jobs/{job}/attempts", opening | {"participants": {role: [[0, 1]]}})
    said = {
        "decision": None, "digests": {}, "graph_hash": None, "members": {role: [0, 1]}, "ordinal": 0, "signature": None,
        "skipped": [], "slot": "forward", "statistics": {}, "uuid": None,
    }  # fmt: skip
    if reports:
        send(server, f"/v1/jobs/{job}/attempts/1/reports", {"reports": [said | report for report in reports]})
    return f"/jobs/{job}/attempts/1"


def parameter(server: InProcess) -> Shown:
    signature = planned(server, first_changed(1, param_name=LONG))
    return {f"/plans/{signature}": 160, f"/plans/{signature}/buckets/0": WHOLE}


def module(server: InProcess) -> Shown:
    signature = planned(server, first_changed(2, module_fqns=(LONG,)))
    return {f"/plans/{signature}/buckets/0": WHOLE}


def group(server: InProcess) -> Shown:
    request = small_request(3)
    candidates = tuple(replace(one, group=SHORT) for one in request.candidates)
    planned(server, replace(request, candidates=candidates, groups=(Group(role=SHORT, size=8, strides=(1, 7)),)))
    return {"/": 60, "/plans": 60}


def skipped(server: InProcess) -> Shown:
    fixed = FixedCollective(kind="all_reduce", group="fsdp", launch=6, launch_order=12, skipped=LONG)
    request = small_request(4)
    made = Request.build(
        num_segments=request.num_segments, groups=request.groups, candidates=request.candidates, fixed=[fixed],
        options=request.options, phase=request.phase,
    )  # fmt: skip
    return {f"/plans/{planned(server, made)}": WHOLE}


def reason_of_a_revision(server: InProcess) -> Shown:
    signature = planned(server, small_request(5))
    send(server, f"/v1/plans/{signature}/revisions", {"options": {"strategy": "none"}, "reason": LONG})
    send(server, f"/v1/plans/{signature}/activate", {"reason": LONG, "revision": 2})
    pages = ("/", "/events", f"/plans/{signature}", f"/plans/{signature}?revision=2", f"/events?signature={signature}")
    return dict.fromkeys(pages, WHOLE)


def actor(server: InProcess) -> Shown:
    async def write() -> None:
        async with server.states[0].store.write() as connection:
            cause = Cause(SHORT, SHORT)
            await append_event(connection, "token.created", cause, at_ns=1, body={"name": LONG})

    server.run(write())
    return dict.fromkeys(("/", "/events", "/events?kind=token.created"), len(SHORT))


def role(server: InProcess) -> Shown:
    return {opened(server, "role", role=SHORT): len(SHORT)}


def slot(server: InProcess) -> Shown:
    one, other = (planned(server, small_request(number)) for number in (6, 7))
    reports = [{"rank": n, "slot": SHORT, "signature": name} for n, name in enumerate((one, other))]
    address = opened(server, "slot", *reports)
    return {address: len(SHORT)} | dict.fromkeys(("/", "/jobs", "/jobs/slot"), len(SHORT))


def uuid(server: InProcess) -> Shown:
    address = opened(server, "uuid", *({"rank": n, "slot": "open", "uuid": f"{n}{LONG}"} for n in range(2)))
    return {address: WHOLE} | dict.fromkeys(("/", "/jobs", "/jobs/uuid"), 100)


def value_that_differs(server: InProcess) -> Shown:
    one, other = (planned(server, first_changed(8, param_name=name)) for name in ("plain", LONG))
    address = opened(server, "differs", *({"rank": n, "signature": name} for n, name in enumerate((one, other))))
    return {address: WHOLE, f"/diff?a={one}&b={other}": 60}


PLACES: dict[str, Callable[[InProcess], Shown]] = {
    made.__name__: made
    for made in (parameter, module, group, skipped, reason_of_a_revision, actor, role, slot, uuid, value_that_differs)
}
ECHOES = (
    "/plans?parameter=", "/plans?module=", "/plans?signature=", "/plans?job=", "/plans?since=", "/plans?strategy=",
    "/plans?cursor=", "/jobs?name=", "/events?job=", "/events?kind=", "/events?before=", "/diff?a=", "/diff?b=",
    "/jobs/", "/plans/", "/login?next=/", "/jobs/x/attempts/",
)  # fmt: skip


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
def test_a_hostile_text_is_shown_as_it_is_wherever_it_may_be_sent(server, place):
    for address, most in place(server).items():
        answer = server.run(server.call("GET", address, accept="text/html"))
        assert answer.status_code == 200, (address, answer.text)
        seen = Seen(answer.text)
        assert seen.made == [], address
        text = LONG if most > len(SHORT) else SHORT
        assert text[:most] in seen.text, address
        assert len(answer.content) < 500_000


@pytest.mark.parametrize("address", ECHOES)
def test_what_stands_in_an_address_makes_no_element(server, address):
    answer = server.run(server.call("GET", address + quote(SHORT, safe=""), accept="text/html"))
    assert answer.status_code < 500
    assert Seen(answer.text).made == []


@pytest.mark.parametrize("action", ["replan", "activate"])
def test_a_form_gives_a_hostile_text_back_as_it_is(server, action):
    signature = planned(server, small_request(9))
    for typed in ({"reason": SHORT, "revision": "1"}, {"reason": SHORT, "job": SHORT, "revision": "1"}):
        seen = Seen(post_form(server, signature, action, typed).text)
        assert seen.made == []
        assert seen.values.count(SHORT) == len(typed) - 1


@pytest.mark.parametrize("obeyed", ["\x1b[2J", "\x9b31m", "a\rb", "\x7f", "\u202egnp", "\u2066x"], ids=ascii)
def test_nothing_that_a_terminal_obeys_comes_into_the_log(server, obeyed):
    signature = planned(server, small_request(10))
    before = num_events(server)
    reason = {"reason": f"why {obeyed}."}
    profile = measured("texts")
    opening = {"held_epoch": None, "options": {}, "participants": {"fsdp": [[0]]}, "topology": {}, "uuid": None}
    bodies = {
        f"/v1/plans/{signature}/revisions": {"options": {"strategy": "none"}, **reason},
        f"/v1/plans/{signature}/activate": {"revision": 1, **reason},
        "/v1/profiles/texts": {"profile": profile, **reason},
        "/v1/profiles/texts?": {"profile": {**profile, "backend": obeyed}, "reason": "plain"},
        "/v1/jobs/texts/attempts": {**opening, "key": f"k{obeyed}"},
    }
    for path, body in bodies.items():
        method = "PUT" if "profiles" in path else "POST"
        answer = server.run(server.call(method, path, content=pack(body), **MSGPACK))
        assert answer.status_code == 400, path
    for action, field in itertools.product(("replan", "activate"), ("reason", "job")):
        answer = post_form(server, signature, action, {"reason": "plain", "revision": "1", field: f"a{obeyed}b"})
        assert answer.status_code == 400, (action, field)
        assert "must hold no control characters" in Seen(answer.text).text
    assert num_events(server) == before


def test_a_reason_may_have_several_lines(server):
    signature = planned(server, small_request(11))
    for path, body in (("revisions", {"options": {"strategy": "none"}}), ("activate", {"revision": 1})):
        send(server, f"/v1/plans/{signature}/{path}", {**body, "reason": "one\r\n\ttwo\nthree"})
    for action in ("replan", "activate"):
        form = {"reason": "one\r\n\ttwo\nthree", "revision": "2", "strategy": "size"}
        assert post_form(server, signature, action, form).status_code == 200
