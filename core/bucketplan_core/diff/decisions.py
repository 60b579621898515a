"""The structural difference of two decisions: buckets merged, split, moved.

Members are matched by what they are (`names.Identity`), so the decisions may be of different requests. Linear time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from bucketplan_core.diff.names import Identity, Names
from bucketplan_core.plan import Decision, StepOp
from bucketplan_core.request import Request
from bucketplan_core.wire import WireValue

__all__ = ["BucketChange", "BucketView", "ChangeKind", "DecisionDiff", "diff_decisions"]

ChangeKind: TypeAlias = Literal["merged", "split", "regrouped", "moved", "reordered", "changed", "added", "removed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketView:
    """A bucket of one decision: id, members by label in payload order, gaps of launch and wait."""

    id: str
    members: tuple[str, ...]
    launch: int
    wait: int

    def to_wire(self) -> dict[str, WireValue]:
        return {"id": self.id, "launch": self.launch, "members": list(self.members), "wait": self.wait}


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketChange:
    """Buckets of `a` and of `b` that share members.

    `merged`: several became one. `split`: one became several. `regrouped`: several became several others. `moved`: same
    members, other gaps. `reordered`: same members and gaps, other payload order. `changed`: one became one, but with
    members that only one request has. `added`, `removed`: none of its members was, or is, there.
    """

    kind: ChangeKind
    before: tuple[BucketView, ...]
    after: tuple[BucketView, ...]

    def to_wire(self) -> dict[str, WireValue]:
        return {
            "after": [bucket.to_wire() for bucket in self.after],
            "before": [bucket.to_wire() for bucket in self.before],
            "kind": self.kind,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionDiff:
    """How decision `b` differs from `a`, bucket by bucket in launch order; `num_unchanged` are the same in all.

    `issue_order_changed` says whether launches and waits that both have come in another order.
    """

    digest_a: str
    digest_b: str
    changes: tuple[BucketChange, ...]
    num_unchanged: int
    issue_order_changed: bool

    @property
    def is_empty(self) -> bool:
        """Whether both run the same collectives at the same places in the same order."""
        return not self.changes and not self.issue_order_changed

    def count(self, kind: ChangeKind) -> int:
        return sum(change.kind == kind for change in self.changes)

    def to_wire(self) -> dict[str, WireValue]:
        return {
            "changes": [change.to_wire() for change in self.changes],
            "digest_a": self.digest_a,
            "digest_b": self.digest_b,
            "issue_order_changed": self.issue_order_changed,
            "num_unchanged": self.num_unchanged,
        }


def diff_decisions(request_a: Request, a: Decision, request_b: Request, b: Decision) -> DecisionDiff:
    """The difference of two legal decisions, each of its request; of the same request or not."""
    side_a, side_b = _Side(request_a, a), _Side(request_b, b)
    partners_a = [side_b.buckets_of(members) for members in side_a.members]
    partners_b = [side_a.buckets_of(members) for members in side_b.members]
    changes: list[BucketChange] = []
    one_to_one: dict[int, int] = {}
    seen: set[int] = set()
    num_unchanged = 0
    for start in range(len(a.buckets)):
        if start in seen:
            continue
        before, after = _component(start, partners_a, partners_b)
        seen.update(before)
        if len(before) == len(after) == 1:
            one_to_one[before[0]] = after[0]
        kind = _kind_of(before, after, side_a, side_b)
        if kind is None:
            num_unchanged += 1
        else:
            changes.append(_change(kind, [side_a.view(i) for i in before], [side_b.view(j) for j in after]))
    changes += [_change("added", [], [side_b.view(j)]) for j, found in enumerate(partners_b) if not found]
    return DecisionDiff(
        digest_a=a.digest,
        digest_b=b.digest,
        changes=tuple(sorted(changes, key=lambda change: (change.before or change.after)[0].launch)),
        num_unchanged=num_unchanged,
        issue_order_changed=side_a.issue_order(one_to_one) != side_b.issue_order({j: j for j in one_to_one.values()}),
    )


def _change(kind: ChangeKind, before: Sequence[BucketView], after: Sequence[BucketView]) -> BucketChange:
    return BucketChange(kind=kind, before=tuple(before), after=tuple(after))


class _Side:
    """One decision with its members by identity."""

    def __init__(self, request: Request, decision: Decision) -> None:
        self._decision = decision
        self._names = Names(request)
        self._first_fixed = len(request.candidates)
        self.members = [[self._names.identities[m] for m in bucket.members] for bucket in decision.buckets]
        self._bucket_of = {identity: i for i, members in enumerate(self.members) for identity in members}
        self.launches = {step.target: step.gap for step in decision.steps if step.op is StepOp.LAUNCH}
        self.waits = {step.target: step.gap for step in decision.steps if step.op is StepOp.WAIT}

    def buckets_of(self, members: Iterable[Identity]) -> set[int]:
        return {self._bucket_of[identity] for identity in members if identity in self._bucket_of}

    def view(self, index: int) -> BucketView:
        bucket = self._decision.buckets[index]
        return BucketView(
            id=bucket.id,
            members=tuple(self._names.labels[member] for member in bucket.members),
            launch=self.launches[index],
            wait=self.waits[index],
        )

    def issue_order(self, number: Mapping[int, int]) -> list[tuple[int, object]]:
        """Steps of the buckets that have a number, under it, and of fixed collectives, in order."""
        order: list[tuple[int, object]] = []
        for step in self._decision.steps:
            if step.op > StepOp.WAIT:
                order.append((int(step.op), self._names.identities[self._first_fixed + step.target]))
            elif step.target in number:
                order.append((int(step.op), number[step.target]))
        return order


def _component(
    start: int, partners_a: Sequence[set[int]], partners_b: Sequence[set[int]]
) -> tuple[list[int], list[int]]:
    """All buckets of both sides that are linked to bucket `start` of `a` through shared members."""
    of_a, of_b = {start}, set[int]()
    stack = [start]
    while stack:
        for j in partners_a[stack.pop()] - of_b:
            of_b.add(j)
            stack += partners_b[j] - of_a
            of_a |= partners_b[j]
    return sorted(of_a), sorted(of_b)


def _kind_of(before: Sequence[int], after: Sequence[int], side_a: _Side, side_b: _Side) -> ChangeKind | None:
    if not after:
        return "removed"
    if len(before) > 1 or len(after) > 1:
        return "merged" if len(after) == 1 else "split" if len(before) == 1 else "regrouped"
    (i,), (j,) = before, after
    members_a, members_b = side_a.members[i], side_b.members[j]
    if set(members_a) != set(members_b):
        return "changed"
    if (side_a.launches[i], side_a.waits[i]) != (side_b.launches[j], side_b.waits[j]):
        return "moved"
    return "reordered" if members_a != members_b else None
