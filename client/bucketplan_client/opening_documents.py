"""What ranks write into the job's store while they open an attempt: each its hello, one of them the outcome."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from bucketplan_client.protocol import members_digest
from bucketplan_core.epoch import Epoch
from bucketplan_core.errors import DecodeError
from bucketplan_core.fields import Fields
from bucketplan_core.wire import WireValue, pack, unpack

__all__ = ["Hello", "OnUnavailable", "Opened", "Outcome", "OutcomeKind", "Source", "shortened"]

OnUnavailable = Literal["local", "unbucketed", "error"]
OutcomeKind = Literal["commit", "unbucketed", "abort"]
Source = Literal["server", "cache", "local"]

_MAX_ROLES = 1_000
_LONGEST_TEXT = 2_000
"""Characters of a reason: what `Fields` reads is more, and a server or a proxy may say anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What one rank brings to the opening.

    `options` are the option fields that the user gave. `groups` are this rank's groups: members by role; on the wire
    only the first member of a group lists them, the others send their digest, so that the leader of thousands of ranks
    reads each list once. `held` are the epochs in its cache, the latest first. `host` tells ranks of one machine from
    those of another. `participants` is the digest of theirs.
    """

    rank: int
    capture: int
    rewriter: int
    schema: int
    options: Mapping[str, WireValue] = field(default_factory=dict)
    on_unavailable: OnUnavailable = "local"
    disabled: bool = False
    host: str = ""
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    held: tuple[str, ...] = ()
    group_digests: Mapping[str, str] = field(default_factory=dict)
    participants: str = ""

    def encoded(self) -> bytes:
        return pack(
            {
                "capture": self.capture,
                "disabled": self.disabled,
                "group_digests": {role: members_digest(members) for role, members in self.groups.items()},
                "groups": {role: list(members) for role, members in self.groups.items() if members[0] == self.rank},
                "held": list(self.held),
                "host": self.host,
                "on_unavailable": self.on_unavailable,
                "options": dict(self.options),
                "participants": self.participants,
                "rank": self.rank,
                "rewriter": self.rewriter,
                "schema": self.schema,
            }
        )

    @classmethod
    def decode(cls, data: bytes) -> Hello:
        fields = Fields(unpack(data), "hello")
        groups, digests = fields.submap("groups"), fields.submap("group_digests")
        options = fields.raw("options")
        if not isinstance(options, dict):
            raise DecodeError("hello.options", options, "must be a map")
        held = fields.array("held", limit=1_000)
        hello = cls(
            rank=fields.integer("rank"),
            capture=fields.integer("capture"),
            rewriter=fields.integer("rewriter"),
            schema=fields.integer("schema"),
            options=options,
            on_unavailable=fields.text("on_unavailable", choices=("local", "unbucketed", "error")),  # type: ignore[arg-type]  # one of the choices
            disabled=fields.flag("disabled"),
            host=fields.text("host"),
            groups={role: _int_tuple(groups, role) for role in groups.keys(limit=_MAX_ROLES)},
            group_digests={role: digests.digest(role) for role in digests.keys(limit=_MAX_ROLES)},
            held=tuple(str(value) for value in held),
            participants=fields.text("participants"),
        )
        groups.finish()
        digests.finish()
        fields.finish()
        return hello


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """What the server (or a cache) promises an attempt: its number, its epoch, and the bytes of every override."""

    epoch: Epoch
    overrides: Mapping[str, bytes] = field(default_factory=dict)
    attempt: int | None = None

    def to_wire(self) -> dict[str, WireValue]:
        return {
            "attempt": self.attempt,
            "epoch": self.epoch.encoded,
            "overrides": dict(self.overrides),
        }

    @classmethod
    def from_wire(cls, tree: WireValue, path: str = "opened") -> Opened:
        fields = Fields(tree, path)
        encoded = fields.raw("epoch")
        overrides = fields.raw("overrides")
        if not isinstance(encoded, bytes):
            raise DecodeError(f"{path}.epoch", encoded, "must be bytes")
        if not isinstance(overrides, dict):
            raise DecodeError(f"{path}.overrides", overrides, "must be a map")
        opened = cls(
            epoch=Epoch.decode(encoded),
            overrides={signature: plan for signature, plan in overrides.items() if isinstance(plan, bytes)},
            attempt=fields.optional_integer("attempt"),
        )
        fields.finish()
        return opened


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The one decision about an attempt, as it stands in the store.

    `source` says where the epoch of a commit came from. `reason` and `remedy` are for people, and cut where they are
    longer than a rank would read; `missing` and `odd` are the ranks that an abort is about. `nonce` is different for
    every opening. `participants` is the digest of those whose outcome it is.
    """

    kind: OutcomeKind
    nonce: str = ""
    source: Source = "server"
    opened: Opened | None = None
    reason: str = ""
    remedy: str = ""
    missing: tuple[int, ...] = ()
    odd: tuple[int, ...] = ()
    participants: str = ""

    def encoded(self) -> bytes:
        return pack(
            {
                "kind": self.kind,
                "missing": list(self.missing),
                "nonce": self.nonce,
                "odd": list(self.odd),
                "opened": None if self.opened is None else self.opened.to_wire(),
                "participants": self.participants,
                "reason": shortened(self.reason),
                "remedy": shortened(self.remedy),
                "source": self.source,
            }
        )

    @classmethod
    def decode(cls, data: bytes) -> Outcome:
        tree = unpack(data)
        fields = Fields({"participants": "", **tree} if isinstance(tree, dict) else tree, "outcome")
        opened = fields.raw("opened")
        outcome = cls(
            kind=fields.text("kind", choices=("commit", "unbucketed", "abort")),  # type: ignore[arg-type]  # one of the choices
            nonce=fields.text("nonce"),
            source=fields.text("source", choices=("server", "cache", "local")),  # type: ignore[arg-type]  # one of the choices
            opened=None if opened is None else Opened.from_wire(opened, "outcome.opened"),
            reason=fields.text("reason"),
            remedy=fields.text("remedy"),
            missing=_int_tuple(fields, "missing"),
            odd=_int_tuple(fields, "odd"),
            participants=fields.text("participants"),
        )
        # No `finish`: an outcome that another release wrote because the releases differ must be readable here.
        if (outcome.kind == "commit") != (outcome.opened is not None):
            raise DecodeError("outcome.opened", opened, "must be there exactly for a commit")
        return outcome


def shortened(text: str) -> str:
    """`text`, or its beginning and how much was left out."""
    left_out = len(text) - _LONGEST_TEXT
    return text if left_out <= 0 else f"{text[:_LONGEST_TEXT]} [and {left_out:,} more characters]"


def _int_tuple(fields: Fields, key: str) -> tuple[int, ...]:
    values = fields.raw(key)
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise DecodeError(f"{fields.path}.{key}", values, "must be a list of integers")
    return tuple(value for value in values if isinstance(value, int))
