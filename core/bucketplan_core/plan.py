"""The plan: a digested decision that every rank applies, and an undigested assessment for people.

The decision holds the buckets and one total order of launches and waits, fixed collectives included: ranks whose graphs
differ in padding still issue the same collectives in the same order, and nothing is left to the rewriter. Figures of
the simulator live in the assessment, which may be recomputed and is never compared between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property, partial
from typing import Any

from bucketplan_core.columns import MAX_CANDIDATES, MAX_FIXED, rows_from_columns
from bucketplan_core.errors import DecodeError, SignatureMismatch
from bucketplan_core.fields import Fields
from bucketplan_core.request import SCHEMA_VERSION
from bucketplan_core.wire import WireValue, digest_of, pack, unpack, unpack_for_reader

__all__ = ["REWRITES", "Bucket", "Decision", "Plan", "Step", "StepOp"]

REWRITES = ("gather", "none", "reduce", "scatter")


class StepOp(IntEnum):
    """What a step does; `target` of the step is a bucket for the first two, a fixed collective for the others."""

    LAUNCH = 0
    WAIT = 1
    FIXED_LAUNCH = 2
    FIXED_WAIT = 3


_OPS = tuple(StepOp)


@dataclass(frozen=True, slots=True, order=True)
class Step:
    """One event of the schedule, at a gap of the timeline."""

    gap: int
    op: StepOp
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Candidates that become one collective, `members` in payload order.

    `lane` indexes the request's lanes; `rewrite` says which rewrite fuses it (`gather`, `scatter`, `reduce`) or `none`
    for one member, whose nodes stay and may move.
    """

    id: str
    lane: int
    members: tuple[int, ...]
    rewrite: str


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Every bucket of a graph and the total order of its steps; `digest` is what ranks compare.

    `profile` is the digest of the cost profile the planner used, None for planners that use none.
    """

    signature: str
    planner: str
    buckets: tuple[Bucket, ...]
    steps: tuple[Step, ...]
    profile: str | None = None

    def __getattr__(self, name: str) -> Any:
        # What was decoded holds checked columns; the thousands of rows are made for whoever reads them.
        make_rows = self.__dict__.get(f"_make_{name}")
        if make_rows is None:
            if name in self.__dict__:
                return self.__dict__[name]  # another thread has just made them
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        rows = self.__dict__[name] = make_rows()
        self.__dict__.pop(f"_make_{name}", None)
        return rows

    @cached_property
    def encoded(self) -> bytes:
        return pack(self.to_wire())

    @cached_property
    def digest(self) -> str:
        return digest_of(self.encoded)

    def to_wire(self) -> dict[str, WireValue]:
        return {
            "buckets": {
                "id": [bucket.id for bucket in self.buckets],
                "lane": [bucket.lane for bucket in self.buckets],
                "members": [list(bucket.members) for bucket in self.buckets],
                "rewrite": [bucket.rewrite for bucket in self.buckets],
            },
            "planner": self.planner,
            "profile": self.profile,
            "schema": SCHEMA_VERSION,
            "signature": self.signature,
            "steps": {
                "gap": [step.gap for step in self.steps],
                "op": [int(step.op) for step in self.steps],
                "target": [step.target for step in self.steps],
            },
        }

    @classmethod
    def decode(cls, data: bytes, path: str = "decision") -> Decision:
        """Read canonical bytes; raises `DecodeError` with the field's path. Legality is checked elsewhere."""
        try:
            decision = cls.from_wire(unpack_for_reader(data), path)
        except DecodeError:
            decision = cls.from_wire(unpack(data, root=path), path)
        decision.__dict__["encoded"] = data
        return decision

    @classmethod
    def from_wire(cls, tree: WireValue, path: str = "decision") -> Decision:
        """Read a decoded tree; raises `DecodeError` with the field's path below `path`."""
        fields = Fields(tree, path)
        fields.schema((SCHEMA_VERSION,))
        decision = object.__new__(cls)
        decision.__dict__.update(
            signature=fields.digest("signature"),
            planner=fields.name("planner"),
            profile=fields.optional_digest("profile"),
            _make_buckets=_buckets_from_wire(fields.submap("buckets")),
            _make_steps=_steps_from_wire(fields.submap("steps")),
        )
        fields.finish()
        return decision

    @property
    def num_fused(self) -> int:
        """Buckets of more than one member."""
        return sum(len(bucket.members) > 1 for bucket in self.buckets)

    def __repr__(self) -> str:
        sizes = [len(bucket.members) for bucket in self.buckets]
        fused = [size for size in sizes if size > 1]
        return (
            f"Decision({self.planner}, signature {self.signature[:12]}, {sum(sizes)} candidates in {len(sizes)} "
            f"buckets, {len(fused)} fused of up to {max(fused, default=0)} members)"
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A decision with its assessment: what the service stores and answers.

    `assessment` holds integers, texts, lists and maps only; nothing in it changes what a rank does.
    """

    decision: Decision
    assessment: Mapping[str, WireValue] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        return self.decision.digest

    @cached_property
    def encoded(self) -> bytes:
        return pack(
            {
                "assessment": self.assessment,
                "decision": self.decision.encoded,
                "digest": self.digest,
                "schema": SCHEMA_VERSION,
            }
        )

    def to_people(self) -> dict[str, WireValue]:
        """The same as a readable tree: the decision as a map, not as bytes."""
        return {
            "assessment": self.assessment,
            "decision": self.decision.to_wire(),
            "digest": self.digest,
            "schema": SCHEMA_VERSION,
        }

    def __repr__(self) -> str:
        return f"Plan({self.decision!r}, digest {self.digest[:12]})"

    @classmethod
    def decode(cls, data: bytes, *, expected_signature: str | None = None) -> Plan:
        """Read what a server answered.

        Raises `DecodeError` for a malformed body and `SignatureMismatch` when the decision is not what its digest or
        `expected_signature` says.
        """
        fields = Fields(unpack(data, root="plan"), "plan")
        fields.schema((SCHEMA_VERSION,))
        claimed = fields.digest("digest")
        encoded = fields.raw("decision")
        if type(encoded) is not bytes:
            raise DecodeError("plan.decision", encoded, "must be bytes")
        assessment = fields.raw("assessment")
        if not isinstance(assessment, dict):
            raise DecodeError("plan.assessment", assessment, "must be a map")
        fields.finish()
        actual = digest_of(encoded)
        if actual != claimed:
            raise SignatureMismatch(claimed=claimed, actual=actual, what="decision")
        decision = Decision.decode(encoded, "plan.decision")
        if expected_signature is not None and decision.signature != expected_signature:
            raise SignatureMismatch(
                claimed=expected_signature,
                actual=decision.signature,
                what="plan's signature",
            )
        plan = cls(decision=decision, assessment=assessment)
        plan.__dict__["encoded"] = data
        return plan


def _buckets_from_wire(fields: Fields) -> Callable[[], tuple[Bucket, ...]]:
    """Check every column; the rows are made by what is returned."""
    n = fields.column_length("id", limit=MAX_CANDIDATES)
    columns: dict[str, Sequence[object]] = {
        "id": fields.column_str("id", n),
        "lane": fields.column_int("lane", n),
        "members": fields.column_int_lists("members", n, limit=MAX_CANDIDATES),
        "rewrite": fields.column_str("rewrite", n, choices=REWRITES),
    }
    fields.finish()
    return partial(_buckets, columns, n)


def _buckets(columns: Mapping[str, Sequence[Any]], length: int) -> tuple[Bucket, ...]:
    return rows_from_columns(Bucket, {**columns, "members": list(map(tuple, columns["members"]))}, length)


def _steps_from_wire(fields: Fields) -> Callable[[], tuple[Step, ...]]:
    """Check every column; the rows are made by what is returned."""
    n = fields.column_length("gap", limit=2 * (MAX_CANDIDATES + MAX_FIXED))
    columns: dict[str, Sequence[object]] = {
        "gap": fields.column_int("gap", n),
        "op": fields.column_int("op", n, high=max(StepOp)),
        "target": fields.column_int("target", n),
    }
    fields.finish()
    return partial(_steps, columns, n)


def _steps(columns: Mapping[str, Sequence[Any]], length: int) -> tuple[Step, ...]:
    return rows_from_columns(Step, {**columns, "op": list(map(_OPS.__getitem__, columns["op"]))}, length)
