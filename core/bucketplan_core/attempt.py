"""What a job tells the service about one start of it: the opening by its leader, and the reports of its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bucketplan_core.epoch import Epoch, read_topology
from bucketplan_core.errors import DecodeError
from bucketplan_core.fields import Fields
from bucketplan_core.wire import WireValue

__all__ = ["MAX_RANK", "MAX_REPORT_ENTRIES", "OPEN_SLOT", "AttemptRequest", "Participants", "RankReport"]

Participants = Mapping[str, tuple[tuple[int, ...], ...]]
"""The rank lists of each group role's groups, each in group order."""

OPEN_SLOT = "open"
"""Slot of the report by which a rank says that it adopted the attempt; other slots name the graph that was compiled."""
MAX_RANK = 2**31 - 1
_MAX_RANKS = 1_000_000
_MAX_ROLES = 1_000
_MAX_NAME_CHARACTERS = 200
MAX_REPORT_ENTRIES = 1_000
"""Most statistics of one report, and most collectives that it names as skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRequest:
    """Body of `POST /v1/jobs/{job}/attempts`.

    `key` is the nonce that makes a repeated call harmless. `options` are the option fields that the user gave, the
    server fills the others. `participants` may be empty where the leader does not know them; then nobody is missing.
    `held_epoch` is the epoch of an attempt that already runs: the server adopts it instead of making one.
    """

    key: str
    participants: Participants
    options: Mapping[str, WireValue] = field(default_factory=dict)
    topology: Mapping[str, int] = field(default_factory=dict)
    uuid: str | None = None
    held_epoch: Epoch | None = None

    def to_wire(self) -> dict[str, WireValue]:
        return {
            "held_epoch": None if self.held_epoch is None else self.held_epoch.to_wire(),
            "key": self.key,
            "options": dict(self.options),
            "participants": participants_to_wire(self.participants),
            "topology": dict(self.topology),
            "uuid": self.uuid,
        }

    @classmethod
    def read(cls, fields: Fields) -> AttemptRequest:
        """Read the body; raises `DecodeError` with the field's path. Options are checked when they are completed."""
        options = fields.raw("options")
        if not isinstance(options, dict):
            raise DecodeError(f"{fields.path}.options", options, "must be a map")
        held = fields.optional_submap("held_epoch")
        request = cls(
            key=fields.plain_text("key", limit=_MAX_NAME_CHARACTERS),
            participants=read_participants(fields.submap("participants")),
            options=options,
            topology=dict(read_topology(fields.submap("topology"))),
            uuid=fields.optional_text("uuid"),
            held_epoch=None if held is None else Epoch.read(held),
        )
        fields.finish()
        return request


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank did with one graph: evidence for people, never something that other ranks wait for.

    A report is named by (`rank`, `slot`, `ordinal`): slot `open` for the opening, else the graph (`joint`, `forward`,
    `backward`), ordinal counting compilations of it. `digests` are group digests by role, `members` the ranks that this
    rank believes the role's group has, in group order. `statistics` are counts of the rewrite.
    """

    rank: int
    slot: str
    ordinal: int = 0
    uuid: str | None = None
    signature: str | None = None
    decision: str | None = None
    digests: Mapping[str, str] = field(default_factory=dict)
    members: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    statistics: Mapping[str, int] = field(default_factory=dict)
    skipped: Sequence[str] = ()
    graph_hash: str | None = None

    def to_wire(self) -> dict[str, WireValue]:
        return {
            "decision": self.decision,
            "digests": dict(self.digests),
            "graph_hash": self.graph_hash,
            "members": {role: list(ranks) for role, ranks in self.members.items()},
            "ordinal": self.ordinal,
            "rank": self.rank,
            "signature": self.signature,
            "skipped": list(self.skipped),
            "slot": self.slot,
            "statistics": dict(self.statistics),
            "uuid": self.uuid,
        }

    @classmethod
    def read(cls, fields: Fields) -> RankReport:
        """Read one report; raises `DecodeError` with the field's path."""
        digests, members = fields.submap("digests"), fields.submap("members")
        statistics = fields.submap("statistics")
        report = cls(
            rank=fields.integer("rank", high=MAX_RANK),
            slot=fields.plain_text("slot", limit=_MAX_NAME_CHARACTERS),
            ordinal=fields.integer("ordinal", high=MAX_RANK),
            uuid=fields.optional_text("uuid"),
            signature=fields.optional_digest("signature"),
            decision=fields.optional_digest("decision"),
            digests={role: digests.digest(role) for role in digests.keys(limit=_MAX_ROLES)},
            members={
                role: _ranks(members.raw(role), f"{members.path}.{role}") for role in members.keys(limit=_MAX_ROLES)
            },
            statistics={name: statistics.integer(name) for name in statistics.keys(limit=MAX_REPORT_ENTRIES)},
            skipped=tuple(fields.column_str("skipped", fields.column_length("skipped", limit=MAX_REPORT_ENTRIES))),
            graph_hash=fields.optional_text("graph_hash"),
        )
        fields.finish()
        return report


def participants_to_wire(participants: Participants) -> dict[str, WireValue]:
    return {role: [list(group) for group in groups] for role, groups in participants.items()}


def read_participants(fields: Fields) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Groups by role; raises `DecodeError` where a rank stands twice in the groups of one role."""
    read: dict[str, tuple[tuple[int, ...], ...]] = {}
    for role in fields.keys(limit=_MAX_ROLES):
        path = f"{fields.path}.{role}"
        groups = tuple(
            _ranks(value, f"{path}[{index}]") for index, value in enumerate(fields.array(role, limit=_MAX_RANKS))
        )
        seen: set[int] = set()
        for index, group in enumerate(groups):
            twice = seen.intersection(group)
            if twice:
                raise DecodeError(f"{path}[{index}]", min(twice), "this rank is in another group of the role already")
            seen.update(group)
        read[role] = groups
    return read


def _ranks(value: WireValue, path: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise DecodeError(path, value, "must be a list of ranks, at least one")
    if len(value) > _MAX_RANKS:
        raise DecodeError(path, f"{len(value)} ranks", f"at most {_MAX_RANKS} are allowed")
    for index, rank in enumerate(value):
        if type(rank) is not int or not 0 <= rank <= MAX_RANK:
            raise DecodeError(f"{path}[{index}]", rank, f"must be a rank between 0 and {MAX_RANK}")
    if len(set(value)) != len(value):
        raise DecodeError(path, value, "a rank stands twice in one group")
    return tuple(value)
