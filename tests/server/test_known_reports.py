"""Reports are sorted against what their ranks have stored without reading all of it."""

from collections.abc import Sequence

import pytest

from bucketplan_core.attempt import AttemptRequest, RankReport
from bucketplan_server.store import known
from bucketplan_server.store.arrivals import MAX_MEMBER_LISTS, MAX_REPORT_BYTES_PER_RANK, encode_reports, sort_arrivals
from bucketplan_server.store.events import Cause
from bucketplan_server.store.jobs import store_reports
from tests.support.inprocess import InProcess, in_process
from tests.support.postgres import running_postgres

CAUSE = Cause("test", "report")


@pytest.fixture(params=["sqlite", "postgresql"])
def servers(request, tmp_path):
    if request.param == "sqlite":
        with in_process([str(tmp_path / "store.db")]) as servers:
            yield servers
    else:
        with running_postgres() as postgres, in_process([postgres.new_database()]) as servers:
            yield servers


@pytest.fixture
def job(servers: InProcess) -> str:
    servers.run(servers.states[0].jobs.open("j", AttemptRequest(key="a", participants={}), CAUSE))
    return "j"


def stored(servers: InProcess, job: str, reports: Sequence[RankReport]) -> list[str | None]:
    """Where each report was refused, None where it was taken."""
    _, refused = servers.run(store_reports(servers.states[0].store, job, 1, encode_reports(reports), CAUSE))
    return [None if one is None else one.path for one in refused]


def known_of(servers: InProcess, job: str, reports: Sequence[RankReport]) -> known.Known:
    async def read() -> known.Known:
        async with servers.states[0].store.write() as connection:
            return await known.known_of(connection, job, 1, encode_reports(reports))

    return servers.run(read())


def member(ordinal: int, last: int, rank: int = 0, text: str = "") -> RankReport:
    return RankReport(rank=rank, slot="joint", ordinal=ordinal, members={"dp": (rank, 100 + last)}, skipped=[text])


def test_a_small_call_reads_no_bytes_of_large_reports(servers, job):
    large = [RankReport(rank=rank, slot="joint", skipped=["x" * 2**20]) for rank in range(3)]
    assert stored(servers, job, large) == [None] * 3
    small = [RankReport(rank=rank, slot=slot) for rank in range(4) for slot in ("open", "joint")]
    found = known_of(servers, job, small)
    assert found.reports == {(rank, "joint", 0): None for rank in range(3)}
    assert found.counts == dict.fromkeys(range(3), 1)
    assert found.sizes == {one.report.rank: len(one.encoded) for one in encode_reports(large)}
    assert found.lists == {}
    # Stored under the same name with another content; rank 3 is new.
    assert stored(servers, job, small) == [None, ""] * 3 + [None, None]
    assert known_of(servers, job, large[:1]).reports == {(0, "joint", 0): encode_reports(large)[0].encoded}
    assert stored(servers, job, large) == [None] * 3


def test_a_report_of_the_same_length_with_another_content_is_refused(servers, job):
    one, other = (RankReport(rank=0, slot="joint", uuid=letter) for letter in "ab")
    assert stored(servers, job, [one, other, one]) == [None, "", None]
    assert stored(servers, job, [other, one]) == ["", None]


def test_bytes_of_a_rank_are_counted_over_calls(servers, job):
    most = MAX_REPORT_BYTES_PER_RANK // 2**20
    large = [RankReport(rank=0, slot="joint", ordinal=n, skipped=["x" * 2**20]) for n in range(most)]
    assert stored(servers, job, large[:-1]) == [None] * (most - 1)
    assert stored(servers, job, [large[-1], large[0], RankReport(rank=0, slot="open")]) == ["rank", None, None]


def test_lists_of_members_are_read_in_pieces_until_those_that_arrive_are_found(servers, job, monkeypatch):
    monkeypatch.setattr(known, "_DECODED_AT_ONCE_BYTES", 1)
    pieces = []

    def decode(encoded, roles):
        pieces.append(len(encoded))
        return known_lists(encoded, roles)

    known_lists = known.stored_lists
    monkeypatch.setattr(known, "stored_lists", decode)
    few = [member(n, n) for n in range(MAX_MEMBER_LISTS - 1)]
    assert stored(servers, job, few) == [None] * len(few)
    assert pieces == []
    assert stored(servers, job, [member(50, 7)]) == [None]
    assert pieces == []
    assert stored(servers, job, [member(51, 0)]) == [None]
    assert pieces == [1]
    assert stored(servers, job, [member(51, 0)]) == [None]
    assert pieces == [1]
    refused = [member(52, 99), member(53, 7), member(0, 0), member(54, 98, rank=1)]
    assert stored(servers, job, refused) == ["members.dp", None, None, None]
    assert pieces == [1] * 10


def test_what_is_known_is_enough_to_sort(servers, job):
    """As if everything were read: the same reports one a call and all in one call have the same end."""
    reports = [member(n, n % 11, rank=n % 2, text=str(n // 30)) for n in range(25)]
    alone = [stored(servers, job, [one])[0] for one in reports]
    assert alone == [
        None if one is None else one.path for one in sort_arrivals(known.Known(), encode_reports(reports)).refused
    ]
    assert "members.dp" in alone
