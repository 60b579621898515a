"""Audit reads: plans are found by what people know of them, explained, and compared."""

import base64
import hashlib

import httpx
import pytest

from bucketplan_core.attempt import RankReport
from bucketplan_core.collectives import Options
from bucketplan_core.hardware import CollectiveCost, Hardware, Protocol
from bucketplan_core.plan import Plan
from bucketplan_core.wire import digest_of
from tests.server.test_attempts import open_attempt, report
from tests.server.test_revisions import known, send
from tests.support.documents import MSGPACK, plan_body, profile_of, small_request
from tests.support.server import running_server

HARDWARE = Hardware(
    flops_per_us=(("matmul:bfloat16", 1_000_000),),
    memory_bytes_per_us=1_000_000,
    copy_bytes_per_us=1_000_000,
    launch_ns=1_000,
    slowdown_permille=0,
    collectives=(CollectiveCost("fsdp", "all_gather", (Protocol(10_000, 100_000),)),),
)


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A client of a server with five plans, of which a job has reported the first."""
    with running_server(tmp_path_factory.mktemp("reads")) as server, httpx.Client(base_url=server.url) as client:
        requests = [known(client, number) for number in range(4)]
        alone = small_request(9, options=Options(strategy="none", planner="none/1"))
        client.post("/v1/plans", content=plan_body(alone), headers=MSGPACK).raise_for_status()
        open_attempt(client, "reads", "a")
        report(client, "reads", 1, RankReport(rank=0, slot="joint", signature=requests[0].signature))
        yield client, [*requests, alone]


def listed(client: httpx.Client, query: str) -> list[str]:
    answer = client.get(f"/v1/plans?{query}")
    assert answer.status_code == 200, answer.text
    return [plan["signature"] for plan in answer.json()["plans"]]


class TestListing:
    def test_the_newest_comes_first_and_pages_join_without_gap_or_repeat(self, reader):
        client, requests = reader
        everything = [request.signature for request in reversed(requests)]
        assert listed(client, "") == everything
        collected, cursor = [], ""
        while cursor is not None:
            page = client.get(f"/v1/plans?limit=2{cursor and '&cursor=' + cursor}").json()
            collected += [plan["signature"] for plan in page["plans"]]
            cursor = page["next"]
        assert collected == everything

    @pytest.mark.parametrize(
        ("query", "found"),
        [
            ("job=reads", [0]),
            ("job=nobody", []),
            ("strategy=none", [4]),
            ("strategy=size", [3, 2, 1, 0]),
            ("parameter=layers.7.weight", [3, 2, 1, 0]),
            ("parameter=LAYERS", []),
            ("parameter=layers_7", []),
            ("module=layers.7", [3, 2, 1, 0]),
            ("group=fsdp", [4, 3, 2, 1, 0]),
            ("group=fs", []),
            ("since_ns=0&until_ns=1", []),
            ("job=reads&strategy=none", []),
        ],
    )
    def test_filters_let_through_what_they_name(self, reader, query, found):
        client, requests = reader
        assert listed(client, query) == [requests[index].signature for index in found]

    @pytest.mark.parametrize(
        "query", ["limit=0", "limit=1001", "cursor=x", "since_ns=-1", f"cursor={'9' * 19}-{'a' * 64}"]
    )
    def test_bad_parameters_are_named(self, reader, query):
        client, _ = reader
        answer = client.get(f"/v1/plans?{query}")
        assert answer.status_code == 400
        assert answer.json()["path"] == f"query.{query.split('=')[0]}"


class TestComparing:
    def test_two_revisions_differ_in_buckets_alone(self, reader):
        client, requests = reader
        signature = requests[1].signature
        send(client, signature, "revisions", options={"strategy": "none"})
        found = client.get(f"/v1/diff?a={signature}&b={signature}&revision_a=1&revision_b=2").json()
        assert found["request"]["signature_a"] == found["request"]["signature_b"] == signature
        assert found["request"]["fields"] == []
        one = Plan.decode(client.get(f"/v1/plans/{signature}/revisions/1", headers=MSGPACK).content)
        two = Plan.decode(client.get(f"/v1/plans/{signature}/revisions/2", headers=MSGPACK).content)
        assert (found["decision"]["digest_a"], found["decision"]["digest_b"]) == (one.digest, two.digest)
        same = client.get(f"/v1/diff?a={signature}&b={signature}&revision_a=2&revision_b=2").json()
        assert same["decision"]["changes"] == []

    def test_two_signatures_differ_in_their_shapes(self, reader):
        client, requests = reader
        found = client.get(f"/v1/diff?a={requests[2].signature}&b={requests[3].signature}").json()
        assert set(found["request"]["changes_by_field"]) == {"input_shape", "output_shape"}

    def test_what_does_not_exist_is_404(self, reader):
        client, requests = reader
        signature = requests[1].signature
        assert client.get(f"/v1/diff?a={signature}&b={'0' * 64}").status_code == 404
        assert client.get(f"/v1/diff?a={signature}&b={signature}&revision_b=99").status_code == 404
        assert client.get(f"/v1/plans/{signature}/revisions/99").status_code == 404
        assert client.get(f"/v1/diff?a={signature}").status_code == 400


class TestExplaining:
    def test_a_plan_with_hardware_figures_is_explained(self, reader):
        client, _ = reader
        options = Options(strategy="size", planner="size/1", hardware=HARDWARE)
        request = small_request(20, options=options)
        body = plan_body(request, profile_of(request))
        client.post("/v1/plans", content=body, headers=MSGPACK).raise_for_status()
        answer = client.get(f"/v1/plans/{request.signature}/explain")
        assert answer.status_code == 200, answer.text
        made = Plan.decode(client.get(f"/v1/plans/{request.signature}", headers=MSGPACK).content)
        assert len(answer.json()["buckets"]) == len(made.decision.buckets)

    def test_without_figures_it_says_what_is_missing(self, reader):
        client, requests = reader
        answer = client.get(f"/v1/plans/{requests[0].signature}/explain")
        assert answer.status_code == 422
        assert "hardware" in answer.json()["detail"]


class TestTracing:
    def test_the_trace_holds_both_steps_with_the_figures_of_the_assessment(self, reader):
        client, _ = reader
        request = small_request(30, options=Options(strategy="size", planner="size/1", hardware=HARDWARE))
        body = plan_body(request, profile_of(request, flops=10_000_000))
        made = Plan.decode(client.post("/v1/plans", content=body, headers=MSGPACK).raise_for_status().content)
        found = client.get(f"/v1/plans/{request.signature}/trace").raise_for_status().json()
        assert found["otherData"] == {
            "after_step_ns": made.assessment["simulated"]["step_ns"],
            "before_step_ns": made.assessment["baselines"]["none"]["step_ns"],
            "digest": made.digest,
            "signature": request.signature,
        }
        named = {(event["pid"], event["tid"]) for event in found["traceEvents"] if event["name"] == "thread_name"}
        boxes = [event for event in found["traceEvents"] if event["ph"] == "X"]
        ends: dict[tuple[int, int], int] = {}
        for box in sorted(boxes, key=lambda event: event["args"]["start_ns"]):
            track = (box["pid"], box["tid"])
            assert track in named
            assert box["ts"] >= ends.get(track, 0), "boxes of one stream overlap"
            ends[track] = box["ts"] + box["dur"]
        assert {pid for pid, _ in ends} == {1, 2}
        gathers = [box for box in boxes if box["cat"] == "collective" and box["pid"] == 1]
        assert sorted(name for box in gathers for name in box["args"]["parameters"]) == sorted(
            candidate.param_name for candidate in request.candidates
        )
        assert len(gathers) == len(request.candidates)

    def test_without_figures_it_says_what_is_missing(self, reader):
        client, requests = reader
        answer = client.get(f"/v1/plans/{requests[0].signature}/trace")
        assert answer.status_code == 422
        assert "hardware" in answer.json()["detail"]


class TestDigests:
    def test_a_decision_is_found_by_its_digest_and_may_be_kept_for_ever(self, reader):
        client, requests = reader
        plan = client.get(f"/v1/plans/{requests[0].signature}", headers=MSGPACK)
        digest = Plan.decode(plan.content).digest
        found = client.get(f"/v1/decisions/{digest}", headers=MSGPACK)
        assert digest_of(found.content) == digest
        assert "immutable" in found.headers["cache-control"]
        again = client.get(f"/v1/decisions/{digest}", headers={**MSGPACK, "If-None-Match": found.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert client.get(f"/v1/decisions/{'0' * 64}").status_code == 404

    @pytest.mark.parametrize("coding", ["identity", "gzip"])
    def test_the_content_digest_is_that_of_the_bytes_on_the_wire(self, reader, coding):
        client, _ = reader
        request = small_request(31, num_candidates=400)
        client.post("/v1/plans", content=plan_body(request), headers=MSGPACK).raise_for_status()
        asked = {**MSGPACK, "Accept-Encoding": coding}
        with client.stream("GET", f"/v1/plans/{request.signature}", headers=asked) as answer:
            raw = b"".join(answer.iter_raw())
        assert answer.headers.get("content-encoding", "identity") == coding
        hashed = base64.b64encode(hashlib.sha256(raw).digest()).decode()
        assert answer.headers["content-digest"] == f"sha-256=:{hashed}:"
