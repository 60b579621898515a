"""Attempts: numbered by the server, opened once a key, under an epoch that names nothing of other jobs."""

import asyncio
import time

import httpx
import pytest

from bucketplan_core.attempt import AttemptRequest, RankReport
from bucketplan_core.collectives import Options
from bucketplan_core.epoch import Epoch
from bucketplan_core.errors import DecodeError
from bucketplan_core.wire import pack, unpack
from bucketplan_server.jobs.status import attempt_status
from bucketplan_server.store.arrivals import (
    MAX_MEMBER_LISTS,
    MAX_REPORT_BYTES_PER_RANK,
    MAX_REPORTS_PER_RANK,
    Known,
    encode_reports,
    sort_arrivals,
)
from bucketplan_server.store.events import Cause
from tests.support.documents import MSGPACK, SIZE, plan_body, small_request
from tests.support.inprocess import in_process
from tests.support.server import running_server


def open_attempt(client: httpx.Client, job: str, key: str, **parts) -> httpx.Response:
    request = AttemptRequest(key=key, **{"participants": {"fsdp": ((0, 1), (2, 3))}, **parts})
    return client.post(f"/v1/jobs/{job}/attempts", content=pack(request.to_wire()), headers=MSGPACK)


def report(client: httpx.Client, job: str, attempt: int, *reports: RankReport) -> httpx.Response:
    body = pack({"reports": [item.to_wire() for item in reports]})
    return client.post(f"/v1/jobs/{job}/attempts/{attempt}/reports", content=body, headers=MSGPACK)


def status(client: httpx.Client, job: str, attempt: int) -> dict:
    answer = client.get(f"/v1/jobs/{job}/attempts/{attempt}")
    assert answer.status_code == 200, answer.text
    return answer.json()


class TestOpening:
    def test_attempts_are_numbered_a_job_and_repeating_a_key_answers_the_same(self, client):
        first, again, second = (open_attempt(client, "numbered", key) for key in ("a", "a", "b"))
        assert [answer.status_code for answer in (first, again, second)] == [201, 200, 201]
        assert first.content == again.content
        assert [unpack(answer.content)["attempt"] for answer in (first, second)] == [1, 2]
        assert unpack(open_attempt(client, "numbered-too", "a").content)["attempt"] == 1

    def test_equal_circumstances_give_an_equal_epoch(self, client):
        first, second = (unpack(open_attempt(client, "equal", key).content) for key in ("a", "b"))
        assert first["epoch_id"] == second["epoch_id"]
        epoch = Epoch.from_wire(first["epoch"])
        assert epoch.id == first["epoch_id"]
        assert epoch.job == "equal"
        assert epoch.options == Options(strategy="size", planner="size/1")

    def test_given_options_and_topology_enter_the_epoch(self, client):
        answer = open_attempt(client, "given", "a", options={"prefetch": 4}, topology={"fsdp": 2})
        epoch = Epoch.from_wire(unpack(answer.content)["epoch"])
        assert epoch.options.prefetch == 4
        assert epoch.topology == (("fsdp", 2),)
        assert client.get(f"/v1/epochs/{epoch.id}", headers=MSGPACK).content == epoch.encoded
        assert client.get(f"/v1/epochs/{'0' * 64}").status_code == 404

    def test_a_key_with_another_body_is_a_conflict(self, client):
        open_attempt(client, "conflict", "a")
        answer = open_attempt(client, "conflict", "a", topology={"fsdp": 9})
        assert answer.status_code == 409
        assert unpack(answer.content)["path"] == "body.key"
        assert len(client.get("/v1/jobs/conflict/attempts").json()["attempts"]) == 1

    def test_a_held_epoch_is_adopted(self, client):
        held = Epoch.build(job="held", options=SIZE, topology={"fsdp": 3}, overrides={"a" * 64: "b" * 64})
        answer = open_attempt(client, "held", "a", held_epoch=held)
        assert unpack(answer.content)["epoch_id"] == held.id
        # The rank that holds it may also call without it, or repeat the call with it.
        assert unpack(open_attempt(client, "held", "a").content)["epoch_id"] == held.id
        assert open_attempt(client, "held", "a", held_epoch=held).status_code == 200
        other = Epoch.build(job="held", options=SIZE, topology={"fsdp": 4}, overrides={})
        assert open_attempt(client, "held", "a", held_epoch=other).status_code == 409
        assert open_attempt(client, "not-held", "a", held_epoch=held).status_code == 409

    @pytest.mark.parametrize(
        ("change", "path"),
        [
            ({"key": ""}, "body.key"),
            ({"key": "k" * 201}, "body.key"),
            ({"key": "a\0b"}, "body.key"),
            ({"key": "a\x1b[2J"}, "body.key"),
            ({"participants": {"fsdp": [[0, 1], [1]]}}, "body.participants.fsdp[1]"),
            ({"participants": {"fsdp": [[0, 0]]}}, "body.participants.fsdp[0]"),
            ({"participants": {"fsdp": [[-1]]}}, "body.participants.fsdp[0][0]"),
            ({"participants": {"fsdp": [[]]}}, "body.participants.fsdp[0]"),
            ({"participants": None}, "body.participants"),
            ({"options": {"prefetch": -1}}, "body.options.prefetch"),
            ({"options": {"caps": 1}}, "body.options.caps"),
            ({"topology": {"fsdp": "two"}}, "body.topology.fsdp"),
            ({"held_epoch": {}}, "body.held_epoch.schema"),
            ({"surprise": 1}, "body.surprise"),
        ],
    )
    def test_a_bad_body_names_its_field_and_opens_nothing(self, client, change, path):
        tree = {**AttemptRequest(key="a", participants={}).to_wire(), **change}
        answer = client.post("/v1/jobs/bad/attempts", content=pack(tree), headers=MSGPACK)
        assert answer.status_code in (400, 422)
        assert unpack(answer.content)["path"].startswith(path)
        assert client.get("/v1/jobs/bad/attempts").json()["attempts"] == []

    def test_an_unknown_planner_is_422(self, client):
        answer = open_attempt(client, "bad", "a", options={"planner": "size/999"})
        assert answer.status_code == 422
        assert unpack(answer.content)["type"] == "urn:bucketplan:problem:unknown-planner"

    @pytest.mark.parametrize("job", ["-dash", "a b", "x" * 201, "ä"])
    def test_a_bad_job_name_is_400(self, client, job):
        assert open_attempt(client, job, "a").status_code == 400

    def test_ranks_may_be_many_openers_and_get_one_attempt(self, server):
        async def open_all() -> set[bytes]:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                body = pack(AttemptRequest(key="same", participants={}).to_wire())
                calls = [client.post("/v1/jobs/herd/attempts", content=body, headers=MSGPACK) for _ in range(40)]
                answers = await asyncio.gather(*calls)
                assert sorted(answer.status_code for answer in answers) == [200] * 39 + [201]
                return {answer.content for answer in answers}

        assert len(asyncio.run(open_all())) == 1


class TestPlansUnderAnEpoch:
    def test_an_epoch_without_overrides_gives_the_planners_plan(self, client):
        epoch = unpack(open_attempt(client, "under", "a").content)["epoch_id"]
        request = small_request(300)
        headers = MSGPACK | {"Bucketplan-Epoch": epoch}
        posted = client.post("/v1/plans", content=plan_body(request), headers=headers)
        assert posted.status_code == 201
        for _ in range(2):
            read = client.get(f"/v1/plans/{request.signature}", headers=headers)
            assert (read.content, read.headers["etag"]) == (posted.content, posted.headers["etag"])

    def test_an_override_that_the_store_lost_is_said(self, client):
        request = small_request(301)
        client.post("/v1/plans", content=plan_body(request), headers=MSGPACK)
        held = Epoch.build(job="lost", options=SIZE, topology={}, overrides={request.signature: "e" * 64})
        opened = unpack(open_attempt(client, "lost", "a", held_epoch=held).content)
        assert opened["overrides"] == []
        answer = client.get(f"/v1/plans/{request.signature}", headers=MSGPACK | {"Bucketplan-Epoch": held.id})
        assert answer.status_code == 404
        assert unpack(answer.content)["type"] == "urn:bucketplan:problem:unknown-revision"

    def test_a_malformed_epoch_is_400(self, client):
        answer = client.get(f"/v1/plans/{small_request(300).signature}", headers={"Bucketplan-Epoch": "latest"})
        assert (answer.status_code, answer.json()["path"]) == (400, "Bucketplan-Epoch")


def compiled(rank: int, *, digest: str = "d" * 64, signature: str | None = None, members=(0, 1)) -> RankReport:
    return RankReport(
        rank=rank, slot="joint", signature=signature, digests={"fsdp": digest}, members={"fsdp": tuple(members)}
    )


def opened(rank: int, uuid: str = "u") -> RankReport:
    return RankReport(rank=rank, slot="open", uuid=uuid)


class TestStatus:
    def test_an_opening_waits_until_every_participant_opened(self, client):
        open_attempt(client, "waits", "a")
        before = status(client, "waits", 1)["opening"]
        assert (before["state"], before["missing"], before["stalled"]) == ("waiting", [0, 1, 2, 3], False)
        report(client, "waits", 1, opened(0), opened(1), opened(3))
        assert status(client, "waits", 1)["opening"]["missing"] == [2]
        assert "rank 2" in status(client, "waits", 1)["opening"]["summary"]
        report(client, "waits", 1, opened(2))
        after = status(client, "waits", 1)
        assert (after["opening"]["state"], after["opening"]["missing"]) == ("agreed", [])
        # A warm restart compiles nothing: silence about graphs is no alarm.
        assert [group["state"] for group in after["groups"]] == ["unreported", "unreported"]

    def test_openings_under_two_uuids_are_diverged(self, client):
        open_attempt(client, "uuids", "a")
        report(client, "uuids", 1, opened(0), opened(1), opened(2), opened(3, "v"))
        opening = status(client, "uuids", 1)["opening"]
        assert opening["state"] == "diverged"
        assert opening["summary"] == "ranks 0-2 hold uuid u; rank 3 holds uuid v"

    def test_groups_agree_or_diverge_each_for_itself(self, client):
        open_attempt(client, "groups", "a")
        report(client, "groups", 1, compiled(0), compiled(1))
        report(client, "groups", 1, compiled(2, digest="1" * 64, members=(2, 3)))
        states = {tuple(group["members"]): group["state"] for group in status(client, "groups", 1)["groups"]}
        # The second group is another pipeline stage: that its digest is another one is no divergence.
        assert states == {(0, 1): "agreed", (2, 3): "partial"}
        report(client, "groups", 1, compiled(3, digest="2" * 64, members=(2, 3)))
        (group,) = [g for g in status(client, "groups", 1)["groups"] if g["members"] == [2, 3]]
        assert group["state"] == "diverged"
        assert (
            group["slots"][0]["summary"]
            == f"rank 2 holds group digest {'1' * 12}; rank 3 holds group digest {'2' * 12}"
        )

    def test_a_divergence_names_the_first_differing_field_with_both_values(self, client):
        left, right = small_request(310), small_request(311)
        for request in (left, right):
            client.post("/v1/plans", content=plan_body(request), headers=MSGPACK)
        open_attempt(client, "differs", "a")
        report(client, "differs", 1, compiled(0, digest="1" * 64, signature=left.signature))
        report(client, "differs", 1, compiled(1, digest="2" * 64, signature=right.signature))
        slot = status(client, "differs", 1)["groups"][0]["slots"][0]
        found = slot["difference"]
        assert "input_shape" in found["path"]
        assert "layers.0.weight" in found["where"]
        assert (found["a"], found["b"]) != (None, None)
        assert found["a"] != found["b"]
        assert [holder["ranks"] for holder in slot["holders"]] == [[0], [1]]

    def test_many_ranks_are_counted_and_few_are_named(self, client):
        ranks = tuple(range(32))
        open_attempt(client, "counted", "a", participants={"fsdp": (ranks,)})
        reports = [compiled(rank, digest=("1" if rank < 26 else "2") * 64, members=ranks) for rank in ranks]
        report(client, "counted", 1, *reports)
        summary = status(client, "counted", 1)["groups"][0]["slots"][0]["summary"]
        assert summary == f"26 ranks hold group digest {'1' * 12}; ranks 26-31 hold group digest {'2' * 12}"

    def test_a_rank_that_believes_in_another_group_is_diverged(self, client):
        open_attempt(client, "lists", "a")
        report(client, "lists", 1, compiled(0), compiled(1, members=(1, 0)))
        (slot,) = status(client, "lists", 1)["groups"][0]["slots"]
        assert slot["state"] == "diverged"
        assert slot["summary"] == "rank 0 holds members 0, 1; rank 1 holds members 1, 0"

    def test_reports_are_idempotent_and_the_first_stays(self, client):
        open_attempt(client, "idempotent", "a")
        for _ in range(2):
            assert report(client, "idempotent", 1, compiled(0)).status_code == 200
        answer = report(client, "idempotent", 1, compiled(1), compiled(0, digest="9" * 64))
        assert answer.status_code == 409
        state = status(client, "idempotent", 1)
        assert state["num_reports"] == 2
        assert state["groups"][0]["state"] == "agreed"

    def test_an_attempt_that_was_not_opened_is_404(self, client):
        assert client.get("/v1/jobs/nobody/attempts/1").status_code == 404
        assert report(client, "nobody", 1, opened(0)).status_code == 404

    @pytest.mark.parametrize(
        ("change", "path"),
        [
            ({"rank": -1}, "body.reports[0].rank"),
            ({"slot": ""}, "body.reports[0].slot"),
            ({"slot": "joint\0"}, "body.reports[0].slot"),
            ({"signature": "x"}, "body.reports[0].signature"),
            ({"digests": {"fsdp": 1}}, "body.reports[0].digests.fsdp"),
            ({"members": {"fsdp": []}}, "body.reports[0].members.fsdp"),
            ({"statistics": {"moved": -1}}, "body.reports[0].statistics.moved"),
            ({"more": 1}, "body.reports[0].more"),
        ],
    )
    def test_a_bad_report_names_its_field(self, client, change, path):
        open_attempt(client, "bad-report", "a")
        body = pack({"reports": [{**compiled(0).to_wire(), **change}]})
        answer = client.post("/v1/jobs/bad-report/attempts/1/reports", content=body, headers=MSGPACK)
        assert answer.status_code == 400
        assert unpack(answer.content)["path"] == path
        assert status(client, "bad-report", 1)["num_reports"] == 0

    def test_a_report_of_a_rank_that_is_no_participant_is_refused_by_name(self, client):
        open_attempt(client, "outside", "a")
        for outside in (opened(4), compiled(9)):
            answer = report(client, "outside", 1, opened(0), outside)
            problem = unpack(answer.content)
            assert (answer.status_code, problem["path"], problem["value"]) == (
                409,
                "body.reports[1].rank",
                outside.rank,
            )
        assert status(client, "outside", 1)["opening"]["num_opened"] == 0
        open_attempt(client, "anybody", "a", participants={})
        assert report(client, "anybody", 1, opened(4)).status_code == 200


def test_a_long_poll_ends_with_the_change(tmp_path):
    path = "/v1/jobs/poll/attempts"
    with in_process([str(tmp_path / "store.db")]) as servers:
        watchers = servers.states[0].jobs.watchers

        async def scenario() -> tuple[httpx.Response, httpx.Response]:
            body = pack(AttemptRequest(key="a", participants={"fsdp": ((0, 1),)}).to_wire())
            await servers.call("POST", path, content=body, **MSGPACK)
            seen = (await servers.call("GET", f"{path}/1")).headers["etag"]
            unchanged = await servers.call("GET", f"{path}/1", if_none_match=seen)
            waiting = asyncio.create_task(servers.call("GET", f"{path}/1?wait=30", if_none_match=seen))
            async with asyncio.timeout(60):
                while not watchers.num_waiters:  # noqa: ASYNC110  # it has no event, and gets none for a test
                    await asyncio.sleep(0.005)
            assert not waiting.done()
            said = pack({"reports": [opened(0).to_wire()]})
            await servers.call("POST", f"{path}/1/reports", content=said, **MSGPACK)
            return unchanged, await waiting

        unchanged, changed = servers.run(scenario())
        assert (unchanged.status_code, changed.status_code) == (304, 200)
        assert changed.json()["opening"]["num_opened"] == 1


def test_a_report_that_cannot_be_stored_fails_its_own_call_alone(tmp_path):
    with in_process([str(tmp_path / "store.db")], planner_processes=1) as servers:
        service, cause = servers.states[0].jobs, Cause("test", "report")

        async def scenario() -> list[object]:
            await service.open("batch", AttemptRequest(key="a", participants={}), cause)
            arrived = [opened(0), RankReport(rank=1, slot="\ud800"), opened(2)]
            calls = [service.report("batch", 1, [one], cause) for one in arrived]
            return await asyncio.gather(*calls, return_exceptions=True)

        first, bad, third = servers.run(scenario())
        assert (first, third) == (None, None)
        assert isinstance(bad, DecodeError)
        state = servers.run(servers.call("GET", "/v1/jobs/batch/attempts/1")).json()
        assert state["opening"]["num_opened"] == 2


def test_attempts_outlive_the_server_and_a_stall_is_named(tmp_path):
    with (
        running_server(tmp_path, stall_seconds=0.2, planning_defaults='{"strategy": "none"}') as server,
        httpx.Client(base_url=server.url) as client,
    ):
        body = open_attempt(client, "lives", "a").content
        assert Epoch.from_wire(unpack(body)["epoch"]).options.planner == "none/1"
        report(client, "lives", 1, opened(0), opened(1), opened(2))
        server.kill()
        server.restart(planning_defaults="{}")
        # The epoch of an attempt is fixed: other defaults touch later attempts only.
        assert open_attempt(client, "lives", "a").content == body
        later = unpack(open_attempt(client, "lives", "b").content)
        assert Epoch.from_wire(later["epoch"]).options.planner == "size/1"
        assert later["attempt"] == 2
        ends = time.monotonic() + 60
        while not (opening := status(client, "lives", 1)["opening"])["stalled"]:
            assert time.monotonic() < ends
            time.sleep(0.01)
        assert (opening["stalled"], opening["missing"]) == (True, [3])


def test_a_thousand_ranks_report_at_once(tmp_path):
    ranks = tuple(range(1000))
    with running_server(tmp_path) as server:
        with httpx.Client(base_url=server.url) as client:
            open_attempt(client, "fleet", "a", participants={"fsdp": (ranks,)})

        async def all_report() -> list[int]:
            # A connection that is used again may just have been closed as idle, which httpx does not try again.
            limits = httpx.Limits(max_connections=100, max_keepalive_connections=0)
            async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:

                async def one(rank: int) -> int:
                    body = pack({"reports": [opened(rank).to_wire()]})
                    answer = await client.post("/v1/jobs/fleet/attempts/1/reports", content=body, headers=MSGPACK)
                    return answer.status_code

                return await asyncio.gather(*(one(rank) for rank in ranks))

        assert asyncio.run(all_report()) == [200] * 1000
        assert server.metric("bucketplan_reports_total") == 1000
        with httpx.Client(base_url=server.url) as client:
            assert status(client, "fleet", 1)["opening"]["state"] == "agreed"


def test_a_group_looks_at_its_own_ranks_reports_alone():
    """The list of all reports is gone through as often for many groups as for one: a fleet's state stays linear."""

    class Counted(list):
        passes = 0

        def __iter__(self):
            self.passes += 1
            return super().__iter__()

    def passes(num_groups: int) -> int:
        groups = tuple((2 * index, 2 * index + 1) for index in range(num_groups))
        reports = Counted(
            RankReport(rank=rank, slot="joint", digests={"fsdp": "b" * 64}, members={"fsdp": group})
            for group in groups
            for rank in group
        )
        state = attempt_status(
            {"fsdp": groups}, reports, pruned=None, opened_ns=0, now_ns=1, stall_ns=9, difference=lambda *_: None
        )
        assert [group["state"] for group in state["groups"]] == ["agreed"] * num_groups
        return reports.passes

    assert passes(50) == passes(1)


class TestLimitsOfARank:
    """What one rank may store in one attempt, and what it is told beyond that."""

    def refused(self, answer: httpx.Response) -> tuple[int, str, int, int]:
        problem = unpack(answer.content)
        return answer.status_code, problem["path"], problem["rank"], problem["limit"]

    def test_reports(self, client):
        open_attempt(client, "bounded", "a")
        most = [RankReport(rank=0, slot="joint", ordinal=ordinal) for ordinal in range(MAX_REPORTS_PER_RANK)]
        assert report(client, "bounded", 1, *most).status_code == 200
        refused = report(client, "bounded", 1, most[3], RankReport(rank=0, slot="backward"), opened(1))
        assert self.refused(refused) == (409, "body.reports[1].rank", 0, MAX_REPORTS_PER_RANK)
        assert "open a new attempt" in unpack(refused.content)["detail"]
        assert report(client, "bounded", 1, *most).status_code == 200, "what is stored may be repeated"
        assert report(client, "bounded", 1, RankReport(rank=1, slot="joint")).status_code == 200
        found = status(client, "bounded", 1)
        assert (found["num_reports"], found["opening"]["num_opened"]) == (MAX_REPORTS_PER_RANK + 2, 1)
        open_attempt(client, "bounded", "b")
        assert report(client, "bounded", 2, RankReport(rank=0, slot="backward")).status_code == 200

    def test_member_lists_of_a_role(self, client):
        open_attempt(client, "many-lists", "a")

        def member(ordinal: int, last: int, role: str = "fsdp", rank: int = 0) -> RankReport:
            return RankReport(rank=rank, slot="joint", ordinal=ordinal, members={role: (rank, 100 + last)})

        for ordinal in range(MAX_MEMBER_LISTS):
            assert report(client, "many-lists", 1, member(ordinal, ordinal)).status_code == 200
        refused = report(client, "many-lists", 1, opened(1), member(50, 50))
        assert self.refused(refused) == (409, "body.reports[1].members.fsdp", 0, MAX_MEMBER_LISTS)
        assert unpack(refused.content)["role"] == "fsdp"
        taken = (member(51, 2), member(3, 3), member(52, 52, "ddp"), member(53, 53, rank=1))
        assert report(client, "many-lists", 1, *taken).status_code == 200, (
            "a list that is known, another role, another rank"
        )
        at_once = [member(ordinal, ordinal, rank=2) for ordinal in range(MAX_MEMBER_LISTS + 1)]
        refused = report(client, "many-lists", 1, *at_once)
        assert self.refused(refused) == (409, "body.reports[8].members.fsdp", 2, MAX_MEMBER_LISTS)

    def test_bytes(self):
        long = [RankReport(rank=0, slot="joint", ordinal=o, skipped=["x" * 2**20]) for o in range(17)]
        found = sort_arrivals(Known(), encode_reports([*long, RankReport(rank=1, slot="joint")]))
        assert [refused is None for refused in found.refused] == [True] * 15 + [False] * 2 + [True]
        assert found.refused[15].fields == {"limit": MAX_REPORT_BYTES_PER_RANK, "rank": 0}
        stored = {(each.rank, each.slot, each.ordinal): encoded for each, encoded in found.new}
        size = sum(len(encoded) for (rank, _, _), encoded in stored.items() if rank == 0)
        again = sort_arrivals(Known(stored, {0: 15}, {0: size}), encode_reports([long[0], long[15]]))
        assert [refused is None for refused in again.refused] == [True, False]

    def test_a_report_that_differs_is_named_by_its_place(self, client):
        open_attempt(client, "placed", "a")
        assert report(client, "placed", 1, compiled(0)).status_code == 200
        refused = unpack(report(client, "placed", 1, opened(0), compiled(0, digest="9" * 64)).content)
        assert (refused["path"], refused["rank"]) == ("body.reports[1]", 0)
