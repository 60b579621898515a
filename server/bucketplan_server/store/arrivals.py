"""Which of the reports that arrive are new, known or refused: what one rank may store in one attempt is bounded.

A rank reports each graph once. One that compiles again and again, or a token in wrong hands, must not fill the store
nor make the state of an attempt, which reads every report, a burden.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bucketplan_core.attempt import RankReport
from bucketplan_core.wire import WireValue, pack, unpack

__all__ = [
    "MAX_MEMBER_LISTS",
    "MAX_REPORTS_PER_RANK",
    "MAX_REPORT_BYTES_PER_RANK",
    "Arrival",
    "Name",
    "RefusedReport",
    "Sorted",
    "encode_reports",
    "sort_arrivals",
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


class Arrival(NamedTuple):
    """A report that arrived, with its canonical bytes, which are what is stored."""

    report: RankReport
    encoded: bytes


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


def sort_arrivals(known: Mapping[Name, bytes], arrived: Sequence[Arrival]) -> Sorted:
    """Sort `arrived` in their order; `known` is everything that their ranks have stored in the attempt.

    A repeated report is always taken. Above `MAX_REPORTS_PER_RANK`, `MAX_REPORT_BYTES_PER_RANK` or
    `MAX_MEMBER_LISTS` a new one is refused, and so is one whose name stands for another content.
    """
    held = dict(known)
    counts = Counter(rank for rank, _, _ in known)
    sizes = Counter[int]()
    for (rank, _, _), encoded in known.items():
        sizes[rank] += len(encoded)
    lists = _MemberLists(known)
    found = Sorted()
    for arrival in arrived:
        report, encoded = arrival
        name = (report.rank, report.slot, report.ordinal)
        before = held.get(name)
        refused = None
        if before is None:
            refused = (
                _beyond(report, "reports", counts[report.rank] + 1, MAX_REPORTS_PER_RANK)
                or _beyond(report, "bytes of reports", sizes[report.rank] + len(encoded), MAX_REPORT_BYTES_PER_RANK)
                or lists.beyond(report, num_reports=counts[report.rank])
            )
        elif before != encoded:
            detail = f"rank {report.rank} has reported {report.slot} {report.ordinal} differently before"
            refused = RefusedReport("", f"{detail}; the first report stays", {"rank": report.rank})
        found.refused.append(refused)
        if refused is None and before is None:
            held[name] = encoded
            counts[report.rank] += 1
            sizes[report.rank] += len(encoded)
            lists.add(report)
            found.new.append(arrival)
    return found


class _MemberLists:
    """The different lists of members that ranks have reported by role.

    Stored reports are decoded only for a rank that could be at the limit: no more lists than reports can have been.
    """

    def __init__(self, known: Mapping[Name, bytes]) -> None:
        self._known = known
        self._decoded: set[int] = set()
        self._lists: dict[tuple[int, str], set[tuple[int, ...]]] = {}

    def add(self, report: RankReport) -> None:
        for role, ranks in report.members.items():
            self._lists.setdefault((report.rank, role), set()).add(ranks)

    def beyond(self, report: RankReport, *, num_reports: int) -> RefusedReport | None:
        if num_reports < MAX_MEMBER_LISTS or not report.members:
            return None
        if report.rank not in self._decoded:
            self._decoded.add(report.rank)
            for role, ranks in _stored_members(self._known, report.rank):
                self._lists.setdefault((report.rank, role), set()).add(ranks)
        for role, ranks in report.members.items():
            lists = self._lists.get((report.rank, role), set())
            if ranks not in lists and len(lists) >= MAX_MEMBER_LISTS:
                return RefusedReport(
                    f"members.{role}",
                    f"rank {report.rank} has reported {MAX_MEMBER_LISTS} different lists of members of {role!r} in "
                    "this attempt, the most that are stored; a rank is in one group of a role: report that one",
                    {"limit": MAX_MEMBER_LISTS, "rank": report.rank, "role": role},
                )
        return None


def _stored_members(known: Mapping[Name, bytes], rank: int) -> Iterable[tuple[str, tuple[int, ...]]]:
    for (holder, _, _), encoded in known.items():
        if holder == rank:
            tree = unpack(encoded)
            members = tree.get("members") if isinstance(tree, dict) else None
            if isinstance(members, dict):
                yield from ((role, tuple(ranks)) for role, ranks in members.items())


def _beyond(report: RankReport, what: str, number: int, limit: int) -> RefusedReport | None:
    if number <= limit:
        return None
    detail = f"rank {report.rank} would have {number:,} {what} in this attempt, and at most {limit:,} are stored"
    return RefusedReport("rank", f"{detail}; {_ADVICE}", {"limit": limit, "rank": report.rank})
