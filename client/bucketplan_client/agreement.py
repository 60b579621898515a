"""Agreement of passes that all ranks run in lockstep: before a rewrite, the ranks of each group compare what they hold.

Every rank either goes on knowing that each of its groups holds one plan, or raises what all ranks of that group raise.
A rank that failed takes part with its failure: a rank that stays away would leave the others waiting.

A rank usually stands in several groups (dense and expert parameters, rows and columns of a mesh). The groups are
compared from the smallest to the largest and then back again, and who learned of a failure in one group reports it in
the next. On a mesh that reaches every rank that shares a group with the failed one, directly or through another rank.
"""

from __future__ import annotations

import itertools
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bucketplan_client.arguments import printable
from bucketplan_client.errors import AgreementError, RankFailed, RanksDisagree, RanksMissing, Where
from bucketplan_client.protocol import (
    Exchange,
    GetMany,
    Now,
    Protocol,
    Put,
    PutOnce,
    Wait,
    exchange,
    members_digest,
    withdraw,
)
from bucketplan_client.store import JobStore, drive, drive_apart
from bucketplan_core.errors import BucketplanError
from bucketplan_core.request import Request
from bucketplan_core.wire import WireValue, pack, unpack

__all__ = ["GroupView", "Lockstep", "Report", "agree", "agree_in_time", "withdraw_in_time"]


DEFAULT_GRACE_S = 5.0
DEFAULT_DEADLINE_S = 120.0
"""Ranks that run a pass in lockstep arrive within seconds; two minutes cover a host that is paging."""
_DIFFERENCE_S = 10.0
_LONGEST_REASON = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """What one rank holds of one of its groups: role, member ranks in group order, digest of what they will issue."""

    role: str
    members: tuple[int, ...]
    digest: str | None = None

    @property
    def key(self) -> str:
        """Name of the group instance in the store: two roles may have the same members, and one role several groups."""
        return f"{self.role}/{members_digest(self.members)[:16]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one rank brings to a comparison.

    `failure` is why it has no plan; `request` is read only if descriptions have to be compared field by field.
    `decision` is the digest of the whole decision: ranks of one signature must hold one, since digests of groups say
    nothing about the order of what two groups issue.
    """

    rank: int
    groups: tuple[GroupView, ...]
    signature: str | None = None
    decision: str | None = None
    failure: str | None = None
    request: Callable[[], bytes] | None = None


class Lockstep:
    """Comparisons of one pass, counted: its n-th call on one rank meets the n-th call on the others."""

    _instances = itertools.count()

    def __init__(
        self,
        store: JobStore,
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
        grace_s: float = DEFAULT_GRACE_S,
        where: Where | None = None,
        name: str | None = None,
    ) -> None:
        self._store = store.scoped(f"lockstep/{next(self._instances) if name is None else name}")
        self._deadline_s = deadline_s
        self._grace_s = grace_s
        self._where = where or store.where
        self._calls = itertools.count()
        self._last: int | None = None
        self._is_open = False

    def agree(self, report: Report) -> None:
        """Return once every group of `report` holds one plan; else raise `AgreementError`, alike on all its ranks."""
        until = time.monotonic() + self._deadline_s
        self._last, self._is_open = next(self._calls), True
        key = str(self._last)
        drive(agree(report, key=key, until=until, where=self._where, grace_s=self._grace_s), self._store)
        self._is_open = False

    def withdraw(self, report: Report) -> None:
        """Tell the others `report.failure` where they would wait for this rank, which takes no part any more.

        That is the comparison it was in, and the next one. Takes a few seconds at most, whatever the store does, and
        raises nothing: it is called while something else is being raised.
        """
        keys = [str(self._last)] if self._is_open else []
        withdraw_in_time(self._store, report, keys=(*keys, str(next(self._calls))))


def withdraw_in_time(store: JobStore, report: Report, *, keys: Sequence[str]) -> None:
    """Answer the comparisons `keys` with `report.failure`, in all groups, on a connection of its own, or give up."""
    drive_apart(_withdrawals(report, keys), store, told="is interrupted")


def _withdrawals(report: Report, keys: Sequence[str]) -> Protocol[None]:
    for key in keys:
        for phase in ("up", "down"):
            for group in report.groups:
                if len(group.members) > 1:
                    payload = _payload(report, group)
                    verdict = _judge(group, {report.rank: payload}, what="plan")
                    yield from withdraw(f"{key}/{phase}/{group.key}", report.rank, payload, pack(verdict))


def agree_in_time(report: Report, *, key: str, deadline_s: float, where: Where, what: str = "plan") -> Protocol[None]:
    """`agree` that ends within `deadline_s` from now, all its comparisons together."""
    num_graces = 4 * max(1, sum(len(group.members) > 1 for group in report.groups)) - 1
    grace_s = min(DEFAULT_GRACE_S, deadline_s / (2 * num_graces))
    now: float = yield Now()
    until = now + deadline_s - num_graces * grace_s
    yield from agree(report, key=key, until=until, where=where, grace_s=grace_s, what=what)


def agree(
    report: Report, *, key: str, until: float, where: Where, grace_s: float = DEFAULT_GRACE_S, what: str = "plan"
) -> Protocol[None]:
    """The protocol of `Lockstep.agree`: ends by `until` and a few grace periods for each group."""
    groups = sorted(
        (group for group in report.groups if len(group.members) > 1), key=lambda g: (len(g.members), g.members, g.role)
    )
    order = [("up", group) for group in groups] + [("down", group) for group in reversed(groups)]
    found: dict[str, WireValue] | None = None
    for number, (phase, group) in enumerate(order):
        carried = report if found is None else replace(report, failure=_told(found, where))
        verdict = yield from _compare(
            carried,
            group,
            key=f"{key}/{phase}/{group.key}",
            until=until + 2 * number * grace_s,
            grace_s=grace_s,
            what=what,
        )
        if found is None and verdict["kind"] != "agreed":
            found = verdict
    if found is not None:
        raise _error(found, where)
    if report.failure is not None and not groups:
        raise RankFailed(role="", failures={report.rank: report.failure}, where=where)


def _compare(
    report: Report, group: GroupView, *, key: str, until: float, grace_s: float, what: str
) -> Protocol[dict[str, WireValue]]:
    standing = yield from exchange(
        Exchange(
            key=key,
            rank=report.rank,
            members=group.members,
            payload=_payload(report, group),
            judge=lambda payloads: pack(_judge(group, payloads, what)),
            absent=lambda ranks: pack({"kind": "missing", "role": group.role, "ranks": list(ranks)}),
            until=until,
            grace_s=grace_s,
        )
    )
    verdict = _read(standing)
    if verdict["kind"] == "disagree" and verdict["send"]:
        verdict["difference"] = yield from _difference(report, group, verdict, key)
    return verdict


def _payload(report: Report, group: GroupView) -> bytes:
    return pack(
        {
            "decision": report.decision,
            "digest": group.digest,
            "failure": None if report.failure is None else printable(report.failure[:_LONGEST_REASON]),
            "members": list(group.members),
            "signature": report.signature,
        }
    )


def _judge(group: GroupView, payloads: Mapping[int, bytes], what: str) -> dict[str, WireValue]:
    """What the collector finds: failures first, since a rank that failed has no plan to disagree with."""
    reports = {rank: _read(payload) for rank, payload in payloads.items()}
    failures: dict[str, WireValue] = {
        str(rank): str(found["failure"]) for rank, found in reports.items() if found["failure"] is not None
    }
    if failures:
        return {"kind": "failed", "role": group.role, "failures": failures}
    for field in ("members", "digest"):
        holders: dict[str, list[int]] = {}
        for rank, found in reports.items():
            value = found[field]
            shown = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            holders.setdefault(shown, []).append(rank)
        if len(holders) > 1:
            sides = sorted(holders.values(), key=lambda ranks: (-len(ranks), ranks))
            one, other = sides[0][0], sides[1][0]
            differ = reports[one]["signature"] != reports[other]["signature"]
            return {
                "kind": "disagree",
                "role": group.role,
                "what": "member list" if field == "members" else what,
                "holders": {value: list(ranks) for value, ranks in holders.items()},
                "send": [one, other] if differ else [],
                "difference": None if differ else _same_graph(reports[one]["signature"]),
            }
    return _judge_decisions(group, reports, what)


def _judge_decisions(
    group: GroupView, reports: Mapping[int, Mapping[str, WireValue]], what: str
) -> dict[str, WireValue]:
    by_signature: dict[str, dict[str, list[int]]] = {}
    for rank, found in reports.items():
        if found["signature"] is not None:
            decisions = by_signature.setdefault(str(found["signature"]), {})
            decisions.setdefault(str(found["decision"]), []).append(rank)
    for signature, holders in sorted(by_signature.items()):
        if len(holders) > 1:
            return {
                "kind": "disagree",
                "role": group.role,
                "what": what,
                "holders": {value: list(ranks) for value, ranks in holders.items()},
                "send": [],
                "difference": _same_graph(signature),
            }
    return {"kind": "agreed"}


def _same_graph(signature: WireValue) -> str | None:
    if signature is None:
        return None
    return f"nothing in their descriptions (both {str(signature)[:12]}): they were given different plans for one graph"


def _difference(report: Report, group: GroupView, verdict: dict[str, WireValue], key: str) -> Protocol[str | None]:
    """Where the descriptions of one rank of each side first differ; None when they could not be had in time."""
    send = verdict["send"]
    assert isinstance(send, list)
    sides = tuple(f"{key}/description/{rank}" for rank in send)
    answer = f"{key}/difference"
    now: float = yield Now()
    if report.rank in send and report.request is not None:
        yield Put(f"{key}/description/{report.rank}", zlib.compress(report.request()))
    if report.rank == group.members[0]:
        missing = yield Wait(sides, now + _DIFFERENCE_S)
        text = ""
        if not missing:
            one, other = yield GetMany(sides)
            text = describe_difference(
                zlib.decompress(one), zlib.decompress(other), int(str(send[0])), int(str(send[1]))
            )
        standing: bytes = yield PutOnce(answer, text.encode())
    else:
        missing = yield Wait((answer,), now + 2 * _DIFFERENCE_S)
        if missing:
            return None
        (standing,) = yield GetMany((answer,))
    return standing.decode() or None


def describe_difference(one: bytes, other: bytes, rank: int, other_rank: int) -> str:
    """The first field in which two encoded requests differ, with both values, in words."""
    from bucketplan_core.diff import first_difference  # only jobs that disagree load it

    try:
        first = first_difference(Request.decode(one), Request.decode(other))
    except BucketplanError as error:
        return f"a description that cannot be read: {error}"
    if first is None:
        return ""
    of = f" of {first.where}" if first.where is not None else ""
    return f"{first.path}{of} ({first.a!r} on rank {rank}, {first.b!r} on rank {other_rank})"


def _read(data: bytes) -> dict[str, WireValue]:
    tree = unpack(data)
    assert isinstance(tree, dict)
    return tree


def _told(found: Mapping[str, WireValue], where: Where) -> str:
    return _error(found, where).message


def _error(found: Mapping[str, Any], where: Where) -> AgreementError:
    role = str(found.get("role", ""))
    if found["kind"] == "missing":
        return RanksMissing(role=role, missing=found["ranks"], what="comparison of plans", where=where)
    if found["kind"] == "failed":
        return RankFailed(role=role, failures={int(r): text for r, text in found["failures"].items()}, where=where)
    return RanksDisagree(
        role=role, what=found["what"], holders=found["holders"], difference=found["difference"], where=where
    )
