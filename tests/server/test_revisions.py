"""Replans and plans by hand become revisions, activation moves a pointer, open attempts keep what they have."""

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from bucketplan_core.attempt import AttemptRequest, RankReport
from bucketplan_core.epoch import Epoch
from bucketplan_core.legality import check_decision
from bucketplan_core.plan import Plan
from bucketplan_core.wire import pack, unpack
from bucketplan_server.store.plans import load_active
from tests.server.test_attempts import open_attempt, report
from tests.support.documents import MSGPACK, plan_body, profile_of, small_request
from tests.support.inprocess import in_process
from tests.support.server import running_server

NUM = 8


def known(client: httpx.Client, number: int):
    """A request of one lane whose gathers may all be launched at the start, posted."""
    request = small_request(number, num_candidates=NUM)
    client.post("/v1/plans", content=plan_body(request, profile_of(request)), headers=MSGPACK).raise_for_status()
    return request


def send(client: httpx.Client, signature: str, what: str, **body) -> httpx.Response:
    body = {"reason": "test", **body}
    return client.post(f"/v1/plans/{signature}/{what}", content=pack(body), headers=MSGPACK)


def plan(client: httpx.Client, signature: str, **headers: str) -> Plan:
    answer = client.get(f"/v1/plans/{signature}", headers=MSGPACK | headers)
    assert answer.status_code == 200, answer.content
    return Plan.decode(answer.content, expected_signature=signature)


def entries(tree: object, where: tuple[object, ...] = ()) -> Iterator[tuple[object, ...]]:
    """The place of the first entry of every list, and of every key."""
    keys = list(tree) if isinstance(tree, dict) else [0] if isinstance(tree, list) and tree else []
    for key in keys:
        yield (*where, key)
        yield from entries(tree[key], (*where, key))


def test_a_read_behind_an_activation_joins_no_load_that_began_before_it(tmp_path, monkeypatch):
    request = small_request(402, num_candidates=NUM)
    with in_process([str(tmp_path / "plans.db")], memory_cache_bytes=0) as servers:

        async def read() -> str:
            answer = await servers.call("GET", f"/v1/plans/{request.signature}", accept="application/msgpack")
            return answer.headers["bucketplan-revision"]

        async def change(what: str, **body: object) -> None:
            content = pack({"reason": "test", **body})
            path = f"/v1/plans/{request.signature}/{what}"
            (await servers.call("POST", path, content=content, content_type="application/msgpack")).raise_for_status()

        async def race() -> tuple[str, str]:
            body = plan_body(request, profile_of(request))
            await servers.call("POST", "/v1/plans", content=body, content_type="application/msgpack")
            await change("revisions", options={"strategy": "none"})
            loaded, go_on = asyncio.Event(), asyncio.Event()

            async def held(store, signature):
                rows = await load_active(store, signature)
                loaded.set()
                await go_on.wait()
                return rows

            monkeypatch.setattr("bucketplan_server.service.load_active", held)
            early = asyncio.create_task(read())
            await loaded.wait()
            monkeypatch.undo()
            await change("activate", revision=2)
            late = await read()
            go_on.set()
            return await early, late

        assert servers.run(race()) == ("1", "2")


class TestReplanning:
    def test_other_options_give_a_revision_under_the_same_signature(self, client):
        request = known(client, 400)
        before = plan(client, request.signature)
        added = send(client, request.signature, "revisions", options={"strategy": "none"})
        assert (added.status_code, unpack(added.content)["revision"]) == (201, 2)
        assert plan(client, request.signature).encoded == before.encoded, "added is not activated"
        first, second = client.get(f"/v1/plans/{request.signature}/revisions").json()["revisions"]
        assert (first["origin"], first["active_for"], first["parent"]) == ("planner", [""], None)
        assert (second["origin"], second["active_for"], second["parent"]) == ("replan", [], 1)
        assert (second["options"]["strategy"], second["planner"], second["reason"]) == ("none", "none/1", "test")
        assert second["actor"].startswith("anonymous@")
        assert send(client, request.signature, "activate", revision=2).status_code == 200
        after = plan(client, request.signature)
        assert after.decision.planner == "none/1"
        check_decision(request, after.decision)
        assert client.get(f"/v1/plans/{request.signature}", headers=MSGPACK).headers["bucketplan-revision"] == "2"

    def test_a_bad_option_or_parent_is_named_and_nothing_is_added(self, client):
        request = known(client, 401)
        for body, path in (
            ({"options": {"caps": 1}}, "body.options.caps"),
            ({"options": {}, "parent": 9}, "body.parent"),
            ({"options": {}, "buckets": []}, "body"),
            ({}, "body"),
            ({"options": {}, "reason": ""}, "body.reason"),
            ({"options": {}, "more": 1}, "body.more"),
        ):
            answer = send(client, request.signature, "revisions", **body)
            assert 400 <= answer.status_code < 500
            assert unpack(answer.content)["path"] == path
        assert len(client.get(f"/v1/plans/{request.signature}/revisions").json()["revisions"]) == 1

    def test_an_unknown_signature_is_404(self, client):
        assert send(client, "f" * 64, "revisions", options={}).status_code == 404
        assert send(client, "f" * 64, "activate", revision=1).status_code == 404
        assert client.get(f"/v1/plans/{'f' * 64}/revisions").status_code == 404


class TestByHand:
    def test_a_whole_decision_is_stored_as_it_is(self, client):
        request = known(client, 410)
        decision = plan(client, request.signature).decision
        added = send(client, request.signature, "revisions", decision=decision.to_wire())
        assert added.status_code == 201
        assert send(client, request.signature, "activate", revision=2).status_code == 200
        assert plan(client, request.signature).decision.encoded == decision.encoded

    def test_buckets_leave_the_others_alone(self, client):
        request = known(client, 411)
        added = send(client, request.signature, "revisions", buckets=[[0, 1]])
        assert added.status_code == 201, added.content
        send(client, request.signature, "activate", revision=2)
        made = plan(client, request.signature).decision
        assert sorted(len(bucket.members) for bucket in made.buckets) == [1] * (NUM - 2) + [2]
        assert made.planner == "manual/1"

    @pytest.mark.parametrize(
        ("buckets", "rule"), [([[0, 1], [1, 2]], "complete"), ([[0, NUM]], "complete"), ([[0, 0]], "complete")]
    )
    def test_illegal_buckets_name_the_rule_and_the_members(self, client, buckets, rule):
        request = known(client, 412)
        answer = send(client, request.signature, "revisions", buckets=buckets)
        assert answer.status_code == 422
        problem = unpack(answer.content)
        assert problem["type"] == "urn:bucketplan:problem:illegal-plan"
        assert problem["rule"] == rule
        assert problem["members"]

    @pytest.mark.parametrize(
        ("buckets", "path"),
        [
            ([[]], "body.buckets[0]"),
            ([[0, 1], []], "body.buckets[1]"),
            ([[-1]], "body.buckets[0][0]"),
            ([[2**63 - 1], [True]], "body.buckets[1][0]"),
            ([["0"]], "body.buckets[0][0]"),
            ([[[0]]], "body.buckets[0][0]"),
            ([{"0": 1}], "body.buckets[0]"),
            ({}, "body.buckets"),
            (None, "body.buckets"),
        ],
    )
    def test_buckets_that_are_no_lists_of_candidates_are_named(self, client, buckets, path):
        request = known(client, 415)
        answer = send(client, request.signature, "revisions", buckets=buckets)
        assert (answer.status_code, unpack(answer.content).get("path")) == (400, path)

    @pytest.mark.parametrize("value", [None, -1, NUM, []])
    def test_a_decision_with_one_entry_replaced_is_never_a_fault_of_the_server(self, client, value):
        request = known(client, 416)
        for where in entries(plan(client, request.signature).decision.to_wire()):
            tree = plan(client, request.signature).decision.to_wire()
            inner = tree
            for key in where[:-1]:
                inner = inner[key]
            inner[where[-1]] = value
            answer = send(client, request.signature, "revisions", decision=tree)
            assert answer.status_code in (201, 400, 422), (where, value, answer.content)

    def test_an_illegal_decision_is_refused(self, client):
        request = known(client, 413)
        tree = plan(client, request.signature).decision.to_wire()
        steps = tree["steps"]
        steps["gap"][0], steps["gap"][-1] = steps["gap"][-1], steps["gap"][0]
        answer = send(client, request.signature, "revisions", decision=tree)
        assert answer.status_code == 422
        assert unpack(answer.content)["rule"]
        other = known(client, 414)
        wrong = send(client, other.signature, "revisions", decision=plan(client, request.signature).decision.to_wire())
        assert unpack(wrong.content)["rule"] == "signature"


class TestActivation:
    def test_rolling_back_serves_the_old_bytes_again(self, client):
        request = known(client, 420)
        before = plan(client, request.signature)
        send(client, request.signature, "revisions", options={"strategy": "none"})
        answers = [send(client, request.signature, "activate", revision=number) for number in (2, 1, 1)]
        assert [unpack(answer.content)["before"] for answer in answers] == [1, 2, 1]
        assert plan(client, request.signature).encoded == before.encoded

    def test_of_two_operators_who_expect_the_same_one_is_told(self, server, client):
        request = known(client, 421)
        for strategy in ("none", "size"):
            send(client, request.signature, "revisions", options={"strategy": strategy})

        async def both() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=server.url) as caller:
                path = f"/v1/plans/{request.signature}/activate"
                bodies = [pack({"expected": 1, "reason": "race", "revision": number}) for number in (2, 3)]
                return await asyncio.gather(*(caller.post(path, content=b, headers=MSGPACK) for b in bodies))

        answers = asyncio.run(both())
        assert sorted(answer.status_code for answer in answers) == [200, 409]

    def test_a_revision_that_does_not_exist_is_404(self, client):
        request = known(client, 422)
        answer = send(client, request.signature, "activate", revision=5)
        assert answer.status_code == 404
        assert unpack(answer.content)["value"] == 5
        assert send(client, request.signature, "activate", revision=None).status_code == 400


class TestEpochs:
    def test_activating_for_one_job_leaves_the_other_jobs_epoch_id_unchanged(self, client):
        mine, others = known(client, 430), known(client, 431)
        for job in ("epoch-a", "epoch-b"):
            open_attempt(client, job, "first")
        report(client, "epoch-a", 1, RankReport(rank=0, slot="joint", signature=mine.signature))
        report(client, "epoch-b", 1, RankReport(rank=0, slot="joint", signature=others.signature))
        before = {job: unpack(open_attempt(client, job, "second").content) for job in ("epoch-a", "epoch-b")}
        send(client, mine.signature, "revisions", options={"strategy": "none"})
        send(client, mine.signature, "activate", revision=2)
        after = {job: unpack(open_attempt(client, job, "third").content) for job in ("epoch-a", "epoch-b")}
        assert after["epoch-b"]["epoch_id"] == before["epoch-b"]["epoch_id"]
        assert after["epoch-a"]["epoch_id"] != before["epoch-a"]["epoch_id"]
        (override,) = after["epoch-a"]["overrides"]
        assert Plan.decode(override["plan"], expected_signature=mine.signature).digest == override["digest"]
        # Repeating an opening answers what was opened, whatever was activated since.
        assert unpack(open_attempt(client, "epoch-a", "second").content) == before["epoch-a"]

    def test_an_open_attempt_sees_its_plan_to_its_end(self, client):
        request = known(client, 432)
        first = plan(client, request.signature)
        send(client, request.signature, "revisions", options={"strategy": "none"})
        open_attempt(client, "keeps", "zero")
        report(client, "keeps", 1, RankReport(rank=0, slot="joint", signature=request.signature))
        old = unpack(open_attempt(client, "keeps", "old").content)["epoch_id"]
        send(client, request.signature, "activate", revision=2)
        new = unpack(open_attempt(client, "keeps", "new").content)["epoch_id"]
        second = plan(client, request.signature)
        assert first.digest != second.digest
        send(client, request.signature, "activate", revision=1)
        for _ in range(2):
            under = [plan(client, request.signature, **{"Bucketplan-Epoch": epoch}) for epoch in (old, new)]
            assert [found.encoded for found in under] == [first.encoded, second.encoded]
        # Back at the planner's own plan, the next attempt has the epoch of the first one again: its cache is warm.
        assert unpack(open_attempt(client, "keeps", "back").content)["epoch_id"] == old

    def test_an_activation_for_a_job_by_name_is_that_jobs_alone(self, client):
        request = known(client, 433)
        send(client, request.signature, "revisions", options={"strategy": "none"})
        before = plan(client, request.signature)
        send(client, request.signature, "activate", revision=2, job="named")
        assert plan(client, request.signature).encoded == before.encoded
        epochs = {
            job: Epoch.from_wire(unpack(open_attempt(client, job, "a").content)["epoch"]) for job in ("named", "nobody")
        }
        assert [len(epochs[job].overrides) for job in ("named", "nobody")] == [1, 0]
        answer = send(client, request.signature, "activate", revision=None, job="named")
        assert unpack(answer.content)["before"] == 2
        assert unpack(open_attempt(client, "named", "b").content)["overrides"] == []

    def test_a_revision_with_the_planners_own_decision_is_no_override(self, client):
        request = known(client, 434)
        send(client, request.signature, "revisions", options={})
        open_attempt(client, "same", "a")
        report(client, "same", 1, RankReport(rank=0, slot="joint", signature=request.signature))
        before = unpack(open_attempt(client, "same", "b").content)["epoch_id"]
        send(client, request.signature, "activate", revision=2)
        assert unpack(open_attempt(client, "same", "c").content)["epoch_id"] == before


def test_documents_are_answered_as_the_bytes_that_were_hashed(client):
    request = known(client, 440)
    assert client.get(f"/v1/plans/{request.signature}/request", headers=MSGPACK).content == request.encoded
    assert client.get(f"/v1/plans/{request.signature}/profile", headers=MSGPACK).content == profile_of(request).encoded
    assert client.get(f"/v1/plans/{request.signature}/request").json()["num_segments"] == NUM


def test_an_activation_survives_a_kill(tmp_path):
    with running_server(tmp_path) as server, httpx.Client(base_url=server.url) as client:
        request = known(client, 1)
        send(client, request.signature, "revisions", options={"strategy": "none"})
        send(client, request.signature, "activate", revision=2)
        served = plan(client, request.signature)
        body = AttemptRequest(key="k", participants={})
        opened = client.post("/v1/jobs/j/attempts", content=pack(body.to_wire()), headers=MSGPACK).content
    with running_server(tmp_path, database=server.database) as server, httpx.Client(base_url=server.url) as client:
        assert plan(client, request.signature).encoded == served.encoded
        assert client.post("/v1/jobs/j/attempts", content=pack(body.to_wire()), headers=MSGPACK).content == opened
