"""What one namespace learns of another one: nothing of its epochs and of who did what, on a real server."""

import httpx
import pytest

from bucketplan_core.wire import unpack
from tests.support.documents import MSGPACK, plan_body, small_request
from tests.support.guarded import REFRESH_SECONDS, Guarded, make_token, open_body, report_body
from tests.support.server import running_server


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("namespaces")
    database = str(folder / "bucketplan.db")
    names = [(f"{team}-{role}", role, f"team-{team}") for team in "ab" for role in ("rank", "auditor")]
    secrets = {name: make_token(database, name, role, namespace=space) for name, role, space in names}
    secrets |= {role: make_token(database, role, role) for role in ("rank", "auditor", "operator")}
    with running_server(folder, database=database, refresh_seconds=REFRESH_SECONDS) as server:
        yield Guarded(server, secrets)


@pytest.fixture(scope="module")
def signature(guarded):
    """Planned by a rank of team a, reported by both, with revision 2 for job `llama` of team a alone."""
    request = small_request(920)
    guarded.call("a-rank", "POST", "/v1/plans", content=plan_body(request), headers=MSGPACK).raise_for_status()
    body = {"reason": "r", "options": {"strategy": "none"}}
    guarded.post("operator", f"/v1/plans/{request.signature}/revisions", body).raise_for_status()
    for team in "ab":
        guarded.post(f"{team}-rank", "/v1/jobs/llama/attempts", open_body("first")).raise_for_status()
        reported = guarded.post(f"{team}-rank", "/v1/jobs/llama/attempts/1/reports", report_body(request.signature))
        reported.raise_for_status()
    wanted = {"reason": "for one", "revision": 2, "job": "team-a~llama"}
    guarded.post("operator", f"/v1/plans/{request.signature}/activate", wanted).raise_for_status()
    return request.signature


@pytest.mark.parametrize("restarted", [False, True], ids=["from-memory", "from-the-store"])
@pytest.mark.parametrize("accept", ["application/msgpack", "application/json"])
def test_the_epoch_of_another_namespace_is_unknown(guarded, signature, accept, restarted):
    opened = guarded.post("a-rank", "/v1/jobs/llama/attempts", open_body(f"second-{accept}-{restarted}"))
    epoch = unpack(opened.content)["epoch_id"]
    if restarted:
        guarded.server.restart()

    def read(token: str) -> httpx.Response:
        headers = {"Accept": accept, "Bucketplan-Epoch": epoch}
        return guarded.call(token, "GET", f"/v1/plans/{signature}", headers=headers)

    for _ in range(2):  # the second time from memory, where that may be
        assert [read(token).status_code for token in ("b-rank", "a-rank", "rank", "b-auditor")] == [404, 200, 200, 404]
        assert read("a-rank").headers["bucketplan-revision"] == "2"
    post = guarded.call(
        "b-rank",
        "POST",
        "/v1/plans",
        content=plan_body(small_request(920)),
        headers=MSGPACK | {"Bucketplan-Epoch": epoch},
    )
    assert (post.status_code, unpack(post.content)["type"]) == (404, "urn:bucketplan:problem:unknown-epoch")


def test_lists_of_plans_name_no_token_of_another_namespace(guarded, signature):
    def actors(token: str) -> set[str]:
        plans = guarded.call(token, "GET", "/v1/plans").json()["plans"]
        return {row["actor"] for row in plans if row["signature"] == signature}

    assert actors("a-auditor") == actors("auditor") == {"a-rank"}
    assert actors("b-auditor") == {"another namespace"}


def test_a_leader_makes_up_no_epoch_to_be_served_what_was_never_activated(guarded, signature):
    own = unpack(guarded.post("b-rank", "/v1/jobs/llama/attempts", open_body("mine")).content)["epoch"]
    rows = guarded.call("auditor", "GET", f"/v1/plans/{signature}/revisions").json()["revisions"]
    held = own | {"overrides": {"signature": [signature], "digest": [rows[1]["digest"]]}}
    opened = guarded.post("b-rank", "/v1/jobs/llama/attempts", open_body("held") | {"held_epoch": held})
    assert opened.status_code == 201, opened.content
    answer = unpack(opened.content)
    assert (answer["epoch"], answer["overrides"]) == (held, [])

    def read(accept: str) -> httpx.Response:
        headers = {"Accept": accept, "Bucketplan-Epoch": answer["epoch_id"]}
        return guarded.call("b-rank", "GET", f"/v1/plans/{signature}", headers=headers)

    for accept in ("application/json", "application/msgpack", "application/json"):
        assert read(accept).status_code == 404
    assert read("application/json").json()["type"] == "urn:bucketplan:problem:unknown-revision"
    # What an operator once served the job is what a leader may hold, whatever is served now.
    for revision in (2, None):
        wanted = {"reason": "restored", "revision": revision, "job": "team-b~llama"}
        guarded.post("operator", f"/v1/plans/{signature}/activate", wanted).raise_for_status()
    for accept in ("application/json", "application/msgpack"):
        assert (read(accept).status_code, read(accept).headers["bucketplan-revision"]) == (200, "2")


FORM = {"Content-Type": "application/x-www-form-urlencoded"}


def test_what_the_whole_log_was_verified_with_is_not_for_one_namespace(guarded, signature):
    asked = guarded.call("auditor", "POST", "/events/verify", headers={"Origin": guarded.server.url, **FORM})
    assert asked.status_code == 303
    pages = {token: guarded.call(token, "GET", "/events").text for token in ("auditor", "a-auditor")}
    said = [(token, words in text) for token, text in pages.items() for words in ("The chain holds", "/events/verify")]
    assert said == [("auditor", True), ("auditor", True), ("a-auditor", False), ("a-auditor", False)]
    refused = guarded.call("a-auditor", "GET", "/events?kind=none")
    assert (refused.status_code, "The chain holds" in refused.text) == (400, False)
