"""Posting requests and reading plans: what is answered, in which encoding, under which tag."""

import gzip
import json

import httpx
import pytest

from bucketplan_core.collectives import Options
from bucketplan_core.plan import Plan
from bucketplan_core.planning import make_plan
from bucketplan_core.wire import from_json, to_json, unpack
from tests.support.documents import JSON, MSGPACK, plan_body, profile_of, small_request


def post(client: httpx.Client, number: int, **headers: str) -> httpx.Response:
    request = small_request(number)
    return client.post("/v1/plans", content=plan_body(request, profile_of(request)), headers=MSGPACK | headers)


class TestPosting:
    def test_a_new_request_is_planned_and_a_known_one_is_answered_from_the_store(self, client):
        first, second = post(client, 1), post(client, 1)
        assert (first.status_code, second.status_code) == (201, 200)
        assert first.content == second.content

    def test_the_plan_is_what_core_plans(self, client):
        request = small_request(2)
        plan = Plan.decode(post(client, 2).content, expected_signature=request.signature)
        expected = make_plan(request, profile_of(request))
        assert plan.decision.encoded == expected.decision.encoded
        assert plan.encoded == expected.encoded

    def test_json_bodies_give_the_same_plan(self, client):
        request, profile = small_request(3), profile_of(small_request(3))
        body = to_json({"profile": profile.to_wire(), "request": request.to_wire(), "signature": request.signature})
        answer = client.post("/v1/plans", content=body, headers=JSON)
        assert answer.status_code == 201
        assert answer.headers["content-type"] == "application/json"
        people = from_json(answer.content)
        assert people["digest"] == make_plan(request, profile).digest
        assert client.get(f"/v1/plans/{request.signature}", headers=MSGPACK).status_code == 200

    def test_the_first_profile_is_bound_for_ever(self, client):
        request = small_request(4)
        first, later = profile_of(request, flops=1), profile_of(request, flops=2)
        answers = [client.post("/v1/plans", content=plan_body(request, p), headers=MSGPACK) for p in (first, later)]
        assert answers[0].content == answers[1].content
        assert Plan.decode(answers[1].content).assessment["profile"] == first.digest

    def test_no_profile_binds_the_empty_one(self, client):
        request = small_request(5)
        client.post("/v1/plans", content=plan_body(request), headers=MSGPACK)
        answer = client.post("/v1/plans", content=plan_body(request, profile_of(request)), headers=MSGPACK)
        assert answer.content == make_plan(request).encoded

    def test_gzip_bodies_are_taken(self, client):
        request = small_request(6)
        body = gzip.compress(plan_body(request))
        answer = client.post("/v1/plans", content=body, headers=MSGPACK | {"Content-Encoding": "gzip"})
        assert answer.status_code == 201


class TestReading:
    @pytest.fixture
    def known(self, client: httpx.Client) -> httpx.Response:
        return post(client, 10)

    def test_stored_bytes_are_answered_with_their_tag(self, client, known):
        answer = client.get(f"/v1/plans/{small_request(10).signature}", headers=MSGPACK)
        assert answer.content == known.content
        assert answer.headers["etag"] == f'"{Plan.decode(answer.content).digest}"'
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["bucketplan-revision"] == "1"
        assert {part.strip() for part in answer.headers["vary"].split(",")} >= {"Accept", "Bucketplan-Epoch"}

    @pytest.mark.parametrize("accept", ["application/msgpack", "application/msgpack;q=0.9", "application/json", "*/*"])
    @pytest.mark.parametrize("coding", ["identity", "gzip", "gzip;q=0.5"])
    @pytest.mark.parametrize("address", ["", "/revisions/1"])
    def test_a_caller_that_has_the_plan_gets_304_with_the_tag_of_its_200(self, client, accept, coding, address):
        request = small_request(12, num_candidates=400)
        tag = client.post("/v1/plans", content=plan_body(request), headers=MSGPACK).headers["etag"].removeprefix("W/")
        path = f"/v1/plans/{request.signature}{address}"
        headers = {"Accept": accept, "Accept-Encoding": coding}
        full = client.get(path, headers=headers)
        assert full.status_code == 200
        for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
            answer = client.get(path, headers={**headers, "If-None-Match": known})
            assert (answer.status_code, answer.content) == (304, b"")
            for name in ("etag", "cache-control", "vary", "bucketplan-revision"):
                assert answer.headers[name] == full.headers[name], name
        for unknown in ('"*"', "other", "**"):
            assert client.get(path, headers={**headers, "If-None-Match": unknown}).status_code == 200

    def test_lines_of_if_none_match_are_one_list(self, client, known):
        tag = known.headers["etag"]
        for accept in ("application/msgpack", "application/json"):
            lines = [("Accept", accept), ("If-None-Match", tag), ("If-None-Match", '"other"')]
            assert client.get(f"/v1/plans/{small_request(10).signature}", headers=lines).status_code == 304

    def test_no_plan_is_no_304(self, client):
        for headers in (MSGPACK, {}):
            answer = client.get(f"/v1/plans/{'0' * 64}", headers={**headers, "If-None-Match": "*"})
            assert answer.status_code == 404

    def test_another_tag_gets_the_plan(self, client, known):
        headers = MSGPACK | {"If-None-Match": f'"{"0" * 64}"'}
        assert client.get(f"/v1/plans/{small_request(10).signature}", headers=headers).status_code == 200

    def test_people_read_json(self, client, known):
        answer = client.get(f"/v1/plans/{small_request(10).signature}")
        tree = json.loads(answer.content)
        assert tree["decision"] == json.loads(to_json(Plan.decode(known.content).decision.to_wire()))
        assert answer.headers["etag"] == "W/" + known.headers["etag"]

    def test_compressed_bodies_hold_the_same_bytes(self, client):
        request = small_request(11, num_candidates=400)
        plain = client.post("/v1/plans", content=plan_body(request), headers=MSGPACK)
        for _ in range(2):
            answer = client.get(f"/v1/plans/{request.signature}", headers=MSGPACK | {"Accept-Encoding": "gzip"})
            assert answer.headers["content-encoding"] == "gzip"
            assert int(answer.headers["content-length"]) < len(plain.content)
            assert answer.content == plain.content
        for refused in ("identity", "gzip;q=0"):
            answer = client.get(f"/v1/plans/{request.signature}", headers=MSGPACK | {"Accept-Encoding": refused})
            assert "content-encoding" not in answer.headers
            assert answer.content == plain.content

    def test_an_unknown_signature_is_404_with_its_name(self, client):
        answer = client.get(f"/v1/plans/{'e' * 64}", headers=MSGPACK)
        assert answer.status_code == 404
        problem = unpack(answer.content)
        assert problem["type"] == "urn:bucketplan:problem:unknown-signature"
        assert problem["signature"] == "e" * 64

    def test_head_has_the_headers_of_get_and_no_body(self, client, known):
        answer = client.head(f"/v1/plans/{small_request(10).signature}", headers=MSGPACK)
        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["etag"] == known.headers["etag"]


class TestNegotiation:
    @pytest.mark.parametrize(
        ("accept", "expected"),
        [
            ("application/msgpack", "application/msgpack"),
            ("application/x-msgpack", "application/msgpack"),
            ("application/json", "application/json"),
            ("text/html, application/json;q=0.5, application/msgpack;q=0.9", "application/msgpack"),
            ("application/msgpack;q=0.1, */*", "application/json"),
            ("application/json;q=0, */*;q=0.5", "application/msgpack"),
            ("text/html, */*;q=0.1", "application/json"),
        ],
    )
    def test_the_best_accepted_type_is_answered(self, client, accept, expected):
        post(client, 20)
        answer = client.get(f"/v1/plans/{small_request(20).signature}", headers={"Accept": accept})
        assert answer.headers["content-type"] == expected

    @pytest.mark.parametrize(
        "accept", ["text/html", "application/xml", "application/json;q=0, application/msgpack;q=0"]
    )
    def test_nothing_acceptable_is_406(self, client, accept):
        post(client, 20)
        answer = client.get(f"/v1/plans/{small_request(20).signature}", headers={"Accept": accept})
        assert answer.status_code == 406
        assert answer.json()["type"] == "urn:bucketplan:problem:not-acceptable"

    def test_without_preference_the_answer_speaks_as_the_body_did(self, client):
        request = small_request(21)
        answer = client.post(
            "/v1/plans", content=plan_body(request), headers={"Content-Type": "application/msgpack", "Accept": "*/*"}
        )
        assert answer.headers["content-type"] == "application/msgpack"


def test_planners_refusals_name_the_option(client):
    request = small_request(30, options=Options(strategy="size", planner="size/999"))
    answer = client.post("/v1/plans", content=plan_body(request), headers=MSGPACK | {"Accept": "application/json"})
    assert answer.status_code == 422
    assert answer.json()["type"] == "urn:bucketplan:problem:unknown-planner"
    assert "size/1" in answer.json()["available"]
    request = small_request(31, options=Options(strategy="module", planner="module/1"))
    answer = client.post("/v1/plans", content=plan_body(request), headers=MSGPACK | {"Accept": "application/json"})
    assert answer.status_code == 422
    assert answer.json()["path"] == "options.strategy"
