"""Which of the reports that arrive are new, known or refused: what one rank may store in one attempt is bounded.

A rank reports each graph once. One that compiles again and again, or a token in wrong hands, must not fill the store
nor make the state of an attempt, which reads every report, a burden.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bucketplan_core.attempt import RankReport
from bucketplan_core.wire import WireValue, digest_of, pack, unpack

__all__ = [
    "MAX_MEMBER_LISTS",
    "MAX_REPORTS_PER_RANK",
    "MAX_REPORT_BYTES_PER_RANK",
    "Arrival",
    "Known",
    "Lists",
    "Name",
    "RefusedReport",
    "Sorted",
    "crowded_ranks",
    "encode_reports",
    "sort_arrivals",
    "stored_lists",
    "wanted_lists",
]

MAX_REPORTS_PER_RANK = 1_024
"""Reports of one rank in one attempt: far above the graphs of a model and their recompilations."""
MAX_REPORT_BYTES_PER_RANK = 16 * 2**20
"""Bytes of one rank's reports in one attempt: 160 reports that each list 16,384 ranks in two roles."""
MAX_MEMBER_LISTS = 8
"""Different lists of a role's members that one rank may report in one attempt; it has one group, so one is right."""
_ADVICE = "find out why it compiles again and again, or open a new attempt"

Name = tuple[int, str, int]
"""Rank, slot and ordinal of a report."""
Lists = dict[str, set[str]]
"""Different lists of members by role, each as its digest: a list may name every rank."""


class Arrival(NamedTuple):
    """A report that arrived, with its canonical bytes, which are what is stored."""

    report: RankReport
    encoded: bytes


@dataclass(frozen=True, slots=True)
class Known:
    """What the ranks of arriving reports have stored in the attempt.

    `reports` has those under a name that arrives, None for one of another length than what arrives; `counts` and
    `sizes` are of all reports by rank; `lists` has the stored lists of members of `crowded_ranks`.
    """

    reports: Mapping[Name, bytes | None] = field(default_factory=dict)
    counts: Mapping[int, int] = field(default_factory=dict)
    sizes: Mapping[int, int] = field(default_factory=dict)
    lists: Mapping[int, Lists] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RefusedReport:
    """A report that is not stored; `path` is relative to it, `fields` go into the problem that its sender gets."""

    path: str
    detail: str
    fields: Mapping[str, WireValue]


@dataclass(frozen=True, slots=True)
class Sorted:
    """`new` are reports to be stored; `refused` has an item a report, None where it is taken."""

    new: list[Arrival] = field(default_factory=list)
    refused: list[RefusedReport | None] = field(default_factory=list)


def encode_reports(reports: Sequence[RankReport]) -> list[Arrival]:
    """Raises `DecodeError` for a text that has no UTF-8."""
    return [Arrival(report, pack(report.to_wire())) for report in reports]


def sort_arrivals(known: Known, arrived: Sequence[Arrival]) -> Sorted:
    """Sort `arrived` in their order; `known` is what their ranks have stored in the attempt.

    A repeated report is always taken. Above `MAX_REPORTS_PER_RANK`, `MAX_REPORT_BYTES_PER_RANK` or
    `MAX_MEMBER_LISTS` a new one is refused, and so is one whose name stands for another content.
    """
    held = dict(known.reports)
    counts = Counter(known.counts)
    sizes = Counter(known.sizes)
    lists = _MemberLists(known, arrived)
    found = Sorted()
    for arrival in arrived:
        report, encoded = arrival
        name = (report.rank, report.slot, report.ordinal)
        is_new = name not in held
        refused = None
        if is_new:
            refused = (
                _beyond(report, "reports", counts[report.rank] + 1, MAX_REPORTS_PER_RANK)
                or _beyond(report, "bytes of reports", sizes[report.rank] + len(encoded), MAX_REPORT_BYTES_PER_RANK)
                or lists.beyond(report)
            )
        elif held[name] != encoded:
            detail = f"rank {report.rank} has reported {report.slot} {report.ordinal} differently before"
            refused = RefusedReport("", f"{detail}; the first report stays", {"rank": report.rank})
        found.refused.append(refused)
        if refused is None and is_new:
            held[name] = encoded
            counts[report.rank] += 1
            sizes[report.rank] += len(encoded)
            lists.add(report)
            found.new.append(arrival)
    return found


def crowded_ranks(counts: Mapping[int, int], arrived: Sequence[Arrival]) -> set[int]:
    """Ranks that could get above `MAX_MEMBER_LISTS`: no more lists than reports can have been."""
    after = Counter(arrival.report.rank for arrival in arrived)
    return {rank for rank, number in after.items() if counts.get(rank, 0) + number > MAX_MEMBER_LISTS}


def wanted_lists(arrived: Sequence[Arrival], ranks: Collection[int]) -> dict[int, Lists]:
    """The lists of members that the reports of `ranks` name, by rank and role."""
    wanted: dict[int, Lists] = {}
    for report, _ in arrived:
        if report.rank in ranks and report.members:
            _add_lists(wanted.setdefault(report.rank, {}), report.members)
    return wanted


def stored_lists(encoded: Iterable[bytes], roles: Collection[str]) -> Lists:
    """The lists of members that stored reports name in `roles`, by role."""
    found: Lists = {}
    for one in encoded:
        tree = unpack(one)
        members = tree.get("members") if isinstance(tree, dict) else None
        if isinstance(members, dict):
            _add_lists(found, {role: ranks for role, ranks in members.items() if role in roles})
    return found


def _add_lists(lists: Lists, members: Mapping[str, Iterable[WireValue]]) -> None:
    for role, ranks in members.items():
        lists.setdefault(role, set()).add(digest_of(pack(list(ranks))))


class _MemberLists:
    """The different lists of members that those ranks have reported by role that could get above the limit."""

    def __init__(self, known: Known, arrived: Sequence[Arrival]) -> None:
        self._crowded = crowded_ranks(known.counts, arrived)
        self._lists = {
            rank: {role: set(found) for role, found in known.lists.get(rank, {}).items()} for rank in self._crowded
        }

    def add(self, report: RankReport) -> None:
        if report.rank in self._crowded:
            _add_lists(self._lists[report.rank], report.members)

    def beyond(self, report: RankReport) -> RefusedReport | None:
        if report.rank not in self._crowded:
            return None
        for role, ranks in report.members.items():
            lists = self._lists[report.rank].get(role, set())
            if len(lists) >= MAX_MEMBER_LISTS and digest_of(pack(list(ranks))) not in lists:
                return RefusedReport(
                    f"members.{role}",
                    f"rank {report.rank} has reported {MAX_MEMBER_LISTS} different lists of members of {role!r} in "
                    "this attempt, the most that are stored; a rank is in one group of a role: report that one",
                    {"limit": MAX_MEMBER_LISTS, "rank": report.rank, "role": role},
                )
        return None


def _beyond(report: RankReport, what: str, number: int, limit: int) -> RefusedReport | None:
    if number <= limit:
        return None
    detail = f"rank {report.rank} would have {number:,} {what} in this attempt, and at most {limit:,} are stored"
    return RefusedReport("rank", f"{detail}; {_ADVICE}", {"limit": limit, "rank": report.rank})
