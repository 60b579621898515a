"""What the reports of an attempt say, as people need it: who is missing, which groups agree, where they differ.

Agreement is about opening: every participant adopted the attempt under one uuid. Reports of graphs are evidence. A rank
whose compile cache hit compiles nothing and reports nothing, so its silence is no alarm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from bucketplan_core.attempt import OPEN_SLOT, Participants, RankReport
from bucketplan_core.errors import describe_ranks
from bucketplan_core.wire import WireValue
from bucketplan_server.store.jobs import Pruned

__all__ = ["Difference", "attempt_status", "not_opened"]

_SHOWN_HEX = 12
_FEW_RANKS = 8
Difference = Callable[[str, str], Mapping[str, WireValue] | None]


@dataclass(slots=True)
class _Holders:
    """Ranks that hold one value, in the order of their numbers."""

    digest: str | None
    signature: str | None
    ranks: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        if self.digest is not None:
            return f"group digest {self.digest[:_SHOWN_HEX]}"
        return "no signature" if self.signature is None else f"signature {self.signature[:_SHOWN_HEX]}"


def attempt_status(
    participants: Participants,
    reports: Sequence[RankReport],
    *,
    pruned: Pruned | None,
    opened_ns: int,
    now_ns: int,
    stall_ns: int,
    difference: Difference,
) -> dict[str, WireValue]:
    """The state of one attempt.

    Where retention deleted reports (`pruned`), a group of which none is left is ``pruned``, not ``unreported``.
    `difference` names the first field in which the requests of two signatures differ, or None where that is unknown.
    An opening that waits for longer than `stall_ns` is stalled.
    """
    opened = {report.rank: report.uuid for report in reports if report.slot == OPEN_SLOT}
    groups = _groups(participants, reports)
    by_rank = _by_role_and_rank(reports)
    return {
        "groups": [
            _group_status(role, members, opened, by_rank, difference, is_pruned=pruned is not None)
            for role, members in groups
        ],
        "num_reports": len(reports),
        "opening": _opening(participants, opened, opened_ns=opened_ns, now_ns=now_ns, stall_ns=stall_ns),
        "pruned": None if pruned is None else {"num_reports": pruned.num_reports, "since_ns": pruned.since_ns},
    }


def not_opened(who: str, waited_ns: int) -> str:
    """The sentence for ranks that are missing."""
    return f"{who} did not open for {waited_ns // 1_000_000_000} s"


def _opening(
    participants: Participants, opened: Mapping[int, str | None], *, opened_ns: int, now_ns: int, stall_ns: int
) -> dict[str, WireValue]:
    expected = {rank for groups in participants.values() for group in groups for rank in group}
    missing = sorted(expected - set(opened))
    holders: dict[str | None, list[int]] = {}
    for rank in sorted(opened):
        holders.setdefault(opened[rank], []).append(rank)
    waited_ns = max(0, now_ns - opened_ns) if missing else 0
    stalled = bool(missing) and waited_ns >= stall_ns
    if len(holders) > 1:
        state, summary = "diverged", _sentence([(f"uuid {uuid or 'none'}", ranks) for uuid, ranks in holders.items()])
    elif missing:
        state, summary = "waiting", not_opened(describe_ranks(missing), waited_ns)
    else:
        state, summary = "agreed", f"{describe_ranks(sorted(opened))} opened" if opened else "nobody is expected"
    return {
        "missing": missing,
        "num_expected": len(expected),
        "num_opened": len(opened),
        "stalled": stalled,
        "state": state,
        "summary": summary,
        "uuids": [{"ranks": ranks, "uuid": uuid} for uuid, ranks in holders.items()],
        "waited_ns": waited_ns,
    }


def _groups(participants: Participants, reports: Sequence[RankReport]) -> list[tuple[str, tuple[int, ...]]]:
    """Every group instance: those that the leader named, and of other roles those that ranks believe in."""
    found = {(role, group) for role, groups in participants.items() for group in groups}
    for report in reports:
        found.update((role, members) for role, members in report.members.items() if role not in participants)
    return sorted(found)


def _by_role_and_rank(reports: Sequence[RankReport]) -> dict[tuple[str, int], list[RankReport]]:
    """Reports of graphs that speak of a role, by it and their rank: each group then looks at its own ranks' alone."""
    found: dict[tuple[str, int], list[RankReport]] = {}
    for report in reports:
        if report.slot != OPEN_SLOT:
            for role in report.digests.keys() | report.members.keys():
                found.setdefault((role, report.rank), []).append(report)
    return found


def _group_status(
    role: str,
    members: tuple[int, ...],
    opened: Mapping[int, str | None],
    by_rank: Mapping[tuple[str, int], Sequence[RankReport]],
    difference: Difference,
    *,
    is_pruned: bool,
) -> dict[str, WireValue]:
    slots: dict[tuple[str, int], list[RankReport]] = {}
    # By rank, as the store lists them, so that slots keep the order in which the lowest ranks reported them.
    for rank in sorted(members):
        for report in by_rank.get((role, rank), ()):
            slots.setdefault((report.slot, report.ordinal), []).append(report)
    listed = [_slot_status(slot, ordinal, role, members, found, difference) for (slot, ordinal), found in slots.items()]
    states = {str(slot["state"]) for slot in listed}
    nothing = "pruned" if is_pruned else "unreported"
    state = next((name for name in ("diverged", "partial", "agreed") if name in states), nothing)
    return {
        "members": list(members),
        "missing": [rank for rank in members if rank not in opened],
        "role": role,
        "slots": listed,
        "state": state,
    }


def _slot_status(
    slot: str,
    ordinal: int,
    role: str,
    members: tuple[int, ...],
    reports: Sequence[RankReport],
    difference: Difference,
) -> dict[str, WireValue]:
    holders: dict[tuple[str | None, str | None], _Holders] = {}
    lists: dict[tuple[int, ...], list[int]] = {}
    for report in sorted(reports, key=lambda report: report.rank):
        value = (report.digests.get(role), report.signature)
        holders.setdefault(value, _Holders(*value)).ranks.append(report.rank)
        if role in report.members:
            lists.setdefault(report.members[role], []).append(report.rank)
    reported = {report.rank for report in reports}
    silent = [rank for rank in members if rank not in reported]
    # Equal digests mean equal collectives, whatever else differs between the graphs.
    compared = {digest if digest is not None else f"signature {signature}" for digest, signature in holders}
    found = list(holders.values())
    odd_lists = {ranks: held for ranks, held in lists.items() if ranks != members}
    largest: str | None = None
    by_signature: Mapping[str | None, Mapping[str, WireValue] | None] = {}
    first: Mapping[str, WireValue] | None = None
    if len(compared) > 1:
        state, summary = "diverged", _sentence([(holder.name, holder.ranks) for holder in found])
        largest, by_signature = _by_signature(found, difference)
        first = next(filter(None, by_signature.values()), None)
    elif odd_lists:
        named = [("members " + ", ".join(map(str, ranks)), held) for ranks, held in lists.items()]
        state, summary = "diverged", _sentence(named)
    elif silent:
        state, summary = (
            "partial",
            f"{describe_ranks(sorted(reported))} agree, {describe_ranks(silent)} reported no compile",
        )
    else:
        state, summary = "agreed", f"{describe_ranks(sorted(reported))} hold {found[0].name}"
    return {
        "difference": None if first is None else dict(first),
        "holders": [
            {
                "difference": by_signature.get(h.signature),
                "digest": h.digest,
                "ranks": h.ranks,
                "signature": h.signature,
            }
            for h in found
        ],
        "largest": largest,
        "ordinal": ordinal,
        "silent": silent,
        "slot": slot,
        "state": state,
        "summary": summary,
    }


def _by_signature(
    holders: Sequence[_Holders], difference: Difference
) -> tuple[str | None, dict[str | None, Mapping[str, WireValue] | None]]:
    """The signature that most ranks hold, and of every other one the first field in which it differs from that."""
    sizes: dict[str, int] = {}
    for holder in holders:
        if holder.signature is not None:
            sizes[holder.signature] = sizes.get(holder.signature, 0) + len(holder.ranks)
    if not sizes:
        return None, {}
    largest = max(sizes, key=sizes.__getitem__)
    return largest, {signature: difference(largest, signature) for signature in sizes if signature != largest}


def _sentence(holders: Sequence[tuple[str, Sequence[int]]]) -> str:
    """``26 ranks hold uuid X; ranks 3, 5 hold uuid Y``: the largest party first, named where they are few."""
    ordered = sorted(holders, key=lambda holder: (-len(holder[1]), holder[0]))
    return "; ".join(f"{_party(ranks)} hold{'s' if len(ranks) == 1 else ''} {name}" for name, ranks in ordered)


def _party(ranks: Sequence[int]) -> str:
    return describe_ranks(ranks) if len(ranks) <= _FEW_RANKS else f"{len(ranks)} ranks"
