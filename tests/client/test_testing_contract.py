"""The public test double and a real server, asked the same: a test against the double is one of the contract."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest

from bucketplan_client.testing import InMemoryPlanServer
from bucketplan_core.attempt import AttemptRequest, RankReport
from bucketplan_core.collectives import Options
from bucketplan_core.epoch import Epoch
from bucketplan_core.profile import CostProfile
from bucketplan_core.request import Request
from bucketplan_core.wire import WireValue, digest_of, pack, unpack
from tests.client.requests import small_request
from tests.support.server import running_server

MSGPACK = "application/msgpack"
COMPARED = ("Allow", "Bucketplan-Revision", "Cache-Control", "Content-Type", "ETag", "Vary")
"""Headers that a caller may act on; `Retry-After` is 0 in the double, so that tests need not wait."""
PLAN = small_request()
KNOWN, OTHER = f"/v1/plans/{PLAN.signature}", f"/v1/plans/{'0' * 64}"
EPOCH = Epoch.build(
    job="epochs", options=Options(strategy="size", planner="size/1"), topology={"fsdp": 1}, overrides={}
)


@dataclass(frozen=True)
class Call:
    """One call and the answer that both must give: status, and the problem's type and path where it is one."""

    method: str
    path: str
    status: int
    problem: str | None = None
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    at: str | None = None


def post(path: str, tree: WireValue, status: int, problem: str | None = None, **more: Any) -> Call:
    return Call("POST", path, status, problem, body=pack(tree), **more)


def plan(graph: Request, status: int, problem: str | None = None, **changed: Any) -> Call:
    headers = changed.pop("headers", {})
    at = changed.pop("at", None)
    tree = {"profile": None, "request": graph.encoded, "signature": graph.signature, **changed}
    return post("/v1/plans", tree, status, problem, headers=headers, at=at)


def opening(job: str, status: int, problem: str | None = None, *, at: str | None = None, **changed: Any) -> Call:
    asked = AttemptRequest(
        key="a", participants={"fsdp": ((0, 1),)}, topology={"fsdp": 1}, options={"strategy": "size"}
    )
    return post(f"/v1/jobs/{job}/attempts", {**asked.to_wire(), **changed}, status, problem, at=at)


def reports(job: str, status: int, *given: Any, problem: str | None = None, at: str | None = None) -> Call:
    trees = [report.to_wire() if isinstance(report, RankReport) else report for report in given]
    return post(f"/v1/jobs/{job}/attempts/1/reports", {"reports": trees}, status, problem, at=at)


def with_version(request: Request, **changed: Any) -> Call:
    """A post of the same request as another tree."""
    encoded = pack({**request.to_wire(), **changed.pop("tree")})
    return plan(request, request=encoded, signature=digest_of(encoded), **changed)


def with_options(**changed: Any) -> Request:
    return PLAN.with_options(replace(PLAN.options, **changed))


GOOD = RankReport(rank=0, slot="joint", members={"fsdp": (0, 1)})
SCENARIOS: dict[str, Sequence[Call]] = {
    "plans": [
        Call("GET", KNOWN, 404, "unknown-signature"),
        plan(PLAN, 201),
        plan(PLAN, 200),
        Call("GET", KNOWN, 200),
        Call("GET", KNOWN, 304, headers={"If-None-Match": "{etag}"}),
        Call("GET", KNOWN, 304, headers={"If-None-Match": 'W/"other", {etag}'}),
        Call("GET", KNOWN, 304, headers={"If-None-Match": "*"}),
        Call("GET", KNOWN, 200, headers={"If-None-Match": '"other"'}),
        Call("GET", KNOWN, 404, "unknown-epoch", headers={"Bucketplan-Epoch": "1" * 64}),
        Call("GET", KNOWN, 400, "invalid-parameter", headers={"Bucketplan-Epoch": "one"}, at="Bucketplan-Epoch"),
        Call("GET", OTHER, 404, "unknown-signature", headers={"Bucketplan-Epoch": "1" * 64}),
        Call("GET", KNOWN, 406, "not-acceptable", headers={"Accept": "text/html"}, at="Accept"),
        Call("GET", "/v1/plans/short", 400, "invalid-parameter", at="path.signature"),
        Call("GET", KNOWN.upper().replace("/V1/PLANS", "/v1/plans"), 400, "invalid-parameter", at="path.signature"),
        plan(PLAN, 404, "unknown-epoch", headers={"Bucketplan-Epoch": "1" * 64}),
    ],
    "posts that are refused": [
        plan(PLAN, 422, "signature-mismatch", signature="1" * 64),
        plan(PLAN, 400, "invalid-body", signature="one", at="body.signature"),
        plan(PLAN, 400, "invalid-body", request="text", at="body.request"),
        plan(PLAN, 400, "invalid-body", profile="text", at="body.profile"),
        plan(PLAN, 400, "invalid-body", extra=1, at="body.extra"),
        post("/v1/plans", {"signature": "1" * 64}, 400, "invalid-body", at="body.request"),
        post("/v1/plans", [], 400, "invalid-body", at="body"),
        Call("POST", "/v1/plans", 400, "invalid-body", body=b"\xc1", at="body"),
        Call("POST", "/v1/plans", 400, "invalid-body", body=b"", at="body"),
        Call("POST", "/v1/plans", 415, "unsupported-media-type", body=b"a", headers={"Content-Type": "text/plain"}),
        with_version(small_request(num_params=5), tree={"schema": 7}, status=422, problem="schema-version"),
        with_version(small_request(num_params=5), tree={"phase": "sideways"}, status=400, problem="invalid-body"),
        plan(small_request(num_params=5), 400, "invalid-body", profile=b"\x80"),
        plan(with_options(planner="size/9"), 422, "unknown-planner"),
    ],
    "attempts": [
        opening("opened", 201),
        opening("opened", 200),
        opening("opened", 409, "conflict", options={"strategy": "none"}, at="body.key"),
        opening("opened", 201, key="b"),
        opening("opened", 409, "conflict", held_epoch=EPOCH.to_wire(), at="body.held_epoch.job"),
        opening("opened", 400, "invalid-body", key="c", options={"strategy": "nonsense"}, at="body.options.strategy"),
        opening("opened", 400, "invalid-body", key="c", options={"no_such": 1}, at="body.options.no_such"),
        opening("opened", 400, "invalid-body", key="c", options=[], at="body.options"),
        opening("opened", 422, "unknown-planner", key="c", options={"strategy": "size", "planner": "size/9"}),
        opening("opened", 404, "unknown-profile", key="c", options={"hardware": "nobody"}, at="body.options.hardware"),
        opening("opened", 400, "invalid-body", key=7, at="body.key"),
        opening("opened", 400, "invalid-body", participants={"fsdp": [[0], [0]]}, at="body.participants.fsdp[1]"),
        opening("bad%20name", 400, "invalid-parameter", at="path.job"),
        Call("POST", "/v1/jobs/opened/attempts", 400, "invalid-body", body=b"\xc1", at="body"),
        Call("POST", "/v1/jobs/opened/attempts", 413, "body-too-large", body=b"\x00" * (2**20 + 1)),
        Call(
            "POST",
            "/v1/jobs/opened/attempts",
            415,
            "unsupported-media-type",
            body=b"a",
            headers={"Content-Type": "a/b"},
        ),
    ],
    "epochs": [
        Call("GET", f"/v1/epochs/{EPOCH.id}", 404, "unknown-epoch"),
        opening("epochs", 201, held_epoch=EPOCH.to_wire()),
        opening("epochs", 200, held_epoch=EPOCH.to_wire()),
        opening("epochs", 200),
        opening("epochs", 409, "conflict", held_epoch=replace(EPOCH, capture=9).to_wire(), at="body.held_epoch"),
        Call("GET", f"/v1/epochs/{EPOCH.id}", 200),
        Call("GET", "/v1/epochs/one", 400, "invalid-parameter", at="path.epoch"),
        plan(small_request(num_params=3), 201, headers={"Bucketplan-Epoch": EPOCH.id}),
    ],
    "reports": [
        reports("reported", 404, GOOD, problem="unknown-attempt"),
        opening("reported", 201),
        reports("reported", 200, GOOD),
        reports("reported", 200, GOOD, replace(GOOD, rank=1)),
        reports("reported", 409, GOOD, replace(GOOD, skipped=("x",)), problem="conflict", at="body.reports[1]"),
        reports("reported", 409, replace(GOOD, rank=7), problem="conflict", at="body.reports[0].rank"),
        reports("reported", 400, {**GOOD.to_wire(), "rank": -1}, problem="invalid-body", at="body.reports[0].rank"),
        reports("reported", 400, 1, problem="invalid-body", at="body.reports[0]"),
        reports("reported", 200),
        post("/v1/jobs/reported/attempts/1/reports", {"reports": 1}, 400, "invalid-body", at="body.reports"),
        post("/v1/jobs/reported/attempts/1/reports", {}, 400, "invalid-body", at="body.reports"),
        post("/v1/jobs/reported/attempts/1/reports", {"reports": [], "x": 1}, 400, "invalid-body", at="body.x"),
        post("/v1/jobs/reported/attempts/1/reports", {"reports": [0] * 20_001}, 400, "invalid-body"),
        post("/v1/jobs/reported/attempts/0/reports", {"reports": []}, 400, "invalid-parameter", at="path.attempt"),
        post("/v1/jobs/reported/attempts/x/reports", {"reports": []}, 400, "invalid-parameter", at="path.attempt"),
        Call("POST", "/v1/jobs/reported/attempts/1/reports", 400, "invalid-body", body=b"\xc1", at="body"),
        Call("POST", "/v1/jobs/reported/attempts/1/reports", 413, "body-too-large", body=b"\x00" * (2**20 + 1)),
    ],
    "other addresses": [
        Call("GET", "/v1/nothing", 404, "not-found", at="/v1/nothing"),
        Call("PUT", "/v1/plans", 405, "method-not-allowed"),
        Call("DELETE", KNOWN, 405, "method-not-allowed"),
        Call("GET", "/v1/jobs/j/attempts/1/reports", 405, "method-not-allowed"),
        Call("POST", f"/v1/epochs/{EPOCH.id}", 405, "method-not-allowed"),
    ],
}


@pytest.fixture(scope="module", params=["in memory", "listening"])
def double(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    server = InMemoryPlanServer()
    if request.param == "in memory":
        with httpx.Client(base_url="http://double", transport=server.transport()) as client:
            yield client
    else:
        with server.listening() as address, httpx.Client(base_url=address) as client:
            yield client


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, double: httpx.Client) -> Iterator[httpx.Client]:
    """A server as new as the double is."""
    with running_server(tmp_path_factory.mktemp("contract")) as server, httpx.Client(base_url=server.url) as client:
        yield client


def ask(client: httpx.Client, call: Call, etag: str) -> httpx.Response:
    kind = {} if call.body is None else {"Content-Type": MSGPACK}
    given = {name: value.replace("{etag}", etag) for name, value in call.headers.items()}
    headers = {"Accept": MSGPACK, "Accept-Encoding": "identity", **kind, **given}
    return client.request(call.method, call.path, headers=headers, content=call.body)


def seen(answer: httpx.Response) -> dict[str, Any]:
    """What a caller may act on: everything but the words of a refusal and the values that it quotes."""
    headers = {name: answer.headers.get(name) for name in COMPARED}
    body: Any = answer.content
    if answer.status_code >= 400:
        tree = answer.json() if "json" in answer.headers["Content-Type"] else unpack(answer.content)
        body = {name: tree.get(name) for name in ("type", "title", "status", "path")}
    return {"status": answer.status_code, "body": body, **headers}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_double_and_server_answer_the_same(real, double, scenario):
    etag = ""
    for number, call in enumerate(SCENARIOS[scenario], 1):
        answers = [ask(client, call, etag) for client in (double, real)]
        said = f"call {number}: {call.method} {call.path[:60]}"
        one, other = map(seen, answers)
        assert one == other, said
        assert other["status"] == call.status, (said, other)
        if call.problem is not None:
            assert other["body"]["type"] == f"urn:bucketplan:problem:{call.problem}", (said, other)
        if call.at is not None:
            assert other["body"]["path"] == call.at, (said, other)
        etag = other["ETag"] or etag


def test_profile_of_the_first_post_is_bound_by_both(real, double):
    request = small_request(num_params=7)
    profile = CostProfile.empty(request)
    call = plan(request, 201, profile=profile.encoded)
    assert seen(ask(double, call, "")) == seen(ask(real, call, ""))


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_state_is_what_a_server_says(real, double, path):
    assert seen(ask(double, Call("GET", path, 200), "")) == seen(ask(real, Call("GET", path, 200), ""))
