"""What lists say of attempts: the words that their states have, at a bounded cost whatever their ranks reported."""

import asyncio
import re
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import event, text

from bucketplan_core.attempt import AttemptRequest, RankReport
from bucketplan_core.wire import pack
from bucketplan_server.jobs import evidence, states
from bucketplan_server.jobs.evidence import ReportDecoder
from bucketplan_server.jobs.state import Verdict, overall_state
from bucketplan_server.jobs.status import attempt_status
from bucketplan_server.store.events import Cause
from bucketplan_server.store.jobs import StoredReport
from tests.support.inprocess import InProcess, in_process

NUM_RANKS = 2_048
NUM_ATTEMPTS = 20
GROUPS = tuple(tuple(range(first, first + 256)) for first in range(0, NUM_RANKS, 256))
NOT_SHOWN = "Open the attempt to see its state"
AT_ONCE = states.MOST_READ_FOR_A_LIST // (2 * NUM_RANKS)
"""Attempts whose reports one list reads."""

# Rank 97 is the byte "a" on the wire, and the last byte of "ä" is the one before the key "rank" there.
_digests = st.sampled_from(["1" * 64, "2" * 64])
_roles = st.sampled_from(["fsdp", "ärank", "äranka"])
_reports = st.builds(
    RankReport,
    rank=st.sampled_from([0, 1, 33, 97, 127, 128, 70_000]),
    slot=st.sampled_from(["open", "forward", "äranka"]),
    ordinal=st.integers(0, 1),
    uuid=st.sampled_from([None, "u", "v"]),
    signature=st.none() | _digests,
    decision=st.none() | _digests,
    digests=st.dictionaries(_roles, _digests),
    members=st.dictionaries(_roles, st.sampled_from([(0, 1), (1, 0), (33, 97), (127, 128, 70_000)])),
    statistics=st.dictionaries(st.just("ärank!"), st.integers(0, 2)),
)
_participants = st.sampled_from([{}, {"fsdp": ((0, 1), (33, 97))}, {"fsdp": ((0, 1),), "ärank": ((127, 128, 70_000),)}])


@given(st.lists(_reports, max_size=12))
def test_reports_of_equal_content_are_decoded_once_and_each_for_its_rank(reports):
    decoder = ReportDecoder()
    stored = [StoredReport(report.rank, pack(report.to_wire())) for report in reports]
    assert [decoder.decode(one) for one in stored] == reports


@given(_participants, st.lists(_reports, max_size=12, unique_by=lambda r: (r.rank, r.slot, r.ordinal)), st.data())
def test_a_verdict_is_the_word_and_the_sentence_of_the_state(participants, reports, data):
    reports = sorted(reports, key=lambda report: (report.rank, report.slot, report.ordinal))
    opened_ns, *times = sorted(data.draw(st.lists(st.integers(0, 10**12), min_size=3, max_size=3)))

    def state(now_ns: int) -> dict:
        found = attempt_status(
            participants,
            reports,
            pruned=None,
            opened_ns=opened_ns,
            now_ns=now_ns,
            stall_ns=2**62,
            difference=lambda *_: None,
        )
        return {**found, "opened_ns": opened_ns}

    verdict = Verdict.of(state(times[0]))
    for now_ns in times:
        assert (verdict.word, verdict.summary(now_ns)) == overall_state(state(now_ns))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    """A job whose attempts each have an opening and a graph of 2,048 ranks."""
    with in_process([str(tmp_path_factory.mktemp("fleet") / "store.db")]) as servers:
        servers.run(_fill(servers))
        yield servers


async def _fill(servers: InProcess) -> None:
    store, jobs, cause = servers.states[0].store, servers.states[0].jobs, Cause("test", "fill")
    for number in range(NUM_ATTEMPTS):
        await jobs.open("fleet", AttemptRequest(key=str(number), participants={"fsdp": GROUPS}), cause)
    for group in GROUPS:
        for slot, digests in (("open", {}), ("forward", {"fsdp": "d" * 64})):
            said = [RankReport(rank=r, slot=slot, digests=digests, members={"fsdp": group}) for r in group]
            await jobs.report("fleet", 1, said, cause)
    copied = "INSERT INTO reports SELECT job, :n, rank, slot, ordinal, report, received_ns FROM reports"
    for number in range(2, NUM_ATTEMPTS + 1):
        async with store.write() as connection:
            await connection.execute(text(f"{copied} WHERE attempt = 1"), {"n": number})


def test_a_list_of_large_attempts_reads_a_bounded_number_of_reports(fleet, monkeypatch):
    gathered: list[int] = []
    running = most_running = 0
    decoders: list[ReportDecoder] = []
    rows: list[int] = []

    async def counted(store, attempt, mark):
        nonlocal running, most_running
        running += 1
        most_running = max(most_running, running)
        try:
            found = await evidence.gather(store, attempt, mark)
        finally:
            running -= 1
        gathered.append(len(found.reports))
        return found

    class Watched(ReportDecoder):
        def __init__(self) -> None:
            super().__init__()
            decoders.append(self)

    def limits(_connection, _cursor, statement, parameters, _context, _many):
        if "SELECT reports.rank, reports.slot" in statement:
            rows.append(parameters[-2])

    monkeypatch.setattr(states, "gather", counted)
    monkeypatch.setattr(evidence, "ReportDecoder", Watched)
    engine = fleet.states[0].store._engine.sync_engine
    event.listen(engine, "before_cursor_execute", limits)

    def look(path: str, number: int = 1) -> list[str]:
        async def all_of() -> list[httpx.Response]:
            return await asyncio.gather(*(fleet.call("GET", path, accept="text/html") for _ in range(number)))

        gathered.clear()
        answers = fleet.run(all_of())
        assert {answer.status_code for answer in answers} == {200}
        return [answer.text for answer in answers]

    try:
        (first,) = look("/jobs/fleet")
        assert gathered == [2 * NUM_RANKS] * AT_ONCE
        assert most_running == 1, "one list computes one state after the other"
        assert (first.count("✓ agreed"), first.count(NOT_SHOWN)) == (AT_ONCE, NUM_ATTEMPTS - AT_ONCE)
        unread = re.findall(rf'href="(/jobs/fleet/attempts/\d+)">{NOT_SHOWN}', first)
        assert unread[0] == f"/jobs/fleet/attempts/{NUM_ATTEMPTS - AT_ONCE}"
        (opened,) = look(unread[0])
        assert "✓ agreed" in opened
        together = look("/jobs/fleet", 8)
        assert most_running == 1, "and so do several lists"
        assert sum(gathered) == len(gathered) * 2 * NUM_RANKS
        assert all(page.count(NOT_SHOWN) < len(unread) for page in together), "the attempt that was opened is shown"
        while NOT_SHOWN in look("/jobs/fleet")[0]:
            assert 1 <= len(gathered) <= AT_ONCE
        (last,) = look("/jobs/fleet")
        assert (last.count("✓ agreed"), gathered) == (NUM_ATTEMPTS, [])
        assert len(decoders) == NUM_ATTEMPTS, "each attempt was read once, by whoever came first"
        assert {decoder.num_decoded for decoder in decoders} == {2 * len(GROUPS)}
        assert max(rows) <= 500, "reading holds the store for few reports at a time"
    finally:
        event.remove(engine, "before_cursor_execute", limits)
    for path in ("/", "/jobs"):
        (page,) = look(path)
        assert (page.count("✓ agreed"), gathered) == (1, [])


def test_a_verdict_is_computed_again_when_reports_come(fleet):
    async def say(rank: int, uuid: str) -> None:
        cause = Cause("test", "report")
        await fleet.states[0].jobs.report("small", 1, [RankReport(rank=rank, slot="open", uuid=uuid)], cause)

    async def opened() -> None:
        request = AttemptRequest(key="a", participants={"fsdp": ((0, 1),)})
        await fleet.states[0].jobs.open("small", request, Cause("test", "open"))

    def page() -> str:
        return fleet.run(fleet.call("GET", "/jobs/small", accept="text/html")).text

    fleet.run(opened())
    assert "ranks 0-1 did not open" in page()
    fleet.run(say(0, "u"))
    assert "rank 1 did not open" in page()
    fleet.run(say(1, "v"))
    assert "rank 0 holds uuid u; rank 1 holds uuid v" in page()
