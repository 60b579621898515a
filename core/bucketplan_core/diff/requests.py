"""The structural difference of two requests.

Collectives are matched by what they are, not by where they stand (`names.Identity`). What refers to other collectives
(edges, order numbers) is compared through that match, so that one candidate more is one difference and not a thousand.
Time is linear but for a sort.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from bucketplan_core.collectives import Candidate, FixedCollective, Options
from bucketplan_core.diff.first import ABSENT, Difference
from bucketplan_core.diff.names import Names
from bucketplan_core.request import Request
from bucketplan_core.wire import WireValue

__all__ = ["CollectiveChange", "CollectiveView", "RequestDiff", "diff_requests"]

_Table: TypeAlias = "Sequence[Candidate] | Sequence[FixedCollective]"
_ORDER_FIELDS = ("launch_order", "wait_order")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveView:
    """A collective of one request: its index there, and what people call it."""

    index: int
    label: str

    def to_wire(self) -> dict[str, WireValue]:
        return {"index": self.index, "label": self.label}


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveChange:
    """A collective that both requests have, with the fields that differ; `path` of each is the field's name."""

    label: str
    index_a: int
    index_b: int
    fields: tuple[Difference, ...]

    def to_wire(self) -> dict[str, WireValue]:
        return {
            "fields": [field.to_wire() for field in self.fields],
            "index_a": self.index_a,
            "index_b": self.index_b,
            "label": self.label,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDiff:
    """How request `b` differs from `a`: options and other single fields, groups by role, candidates, fixed collectives.

    `launch_order` and `wait_order` are named only for collectives that changed places with others.
    """

    signature_a: str
    signature_b: str
    fields: tuple[Difference, ...]
    groups: tuple[Difference, ...]
    added: tuple[CollectiveView, ...]
    removed: tuple[CollectiveView, ...]
    changed: tuple[CollectiveChange, ...]
    fixed_added: tuple[CollectiveView, ...]
    fixed_removed: tuple[CollectiveView, ...]
    fixed_changed: tuple[CollectiveChange, ...]

    @property
    def is_empty(self) -> bool:
        """True exactly where the signatures are equal."""
        return self.signature_a == self.signature_b

    def changes_by_field(self) -> dict[str, int]:
        """How many candidates differ in each field, most first."""
        counts: dict[str, int] = {}
        for change in self.changed:
            for field in change.fields:
                counts[field.path] = counts.get(field.path, 0) + 1
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    def to_wire(self) -> dict[str, WireValue]:
        return {
            "added": [view.to_wire() for view in self.added],
            "changed": [change.to_wire() for change in self.changed],
            "changes_by_field": self.changes_by_field(),
            "fields": [field.to_wire() for field in self.fields],
            "fixed_added": [view.to_wire() for view in self.fixed_added],
            "fixed_changed": [change.to_wire() for change in self.fixed_changed],
            "fixed_removed": [view.to_wire() for view in self.fixed_removed],
            "groups": [field.to_wire() for field in self.groups],
            "removed": [view.to_wire() for view in self.removed],
            "signature_a": self.signature_a,
            "signature_b": self.signature_b,
        }


def diff_requests(a: Request, b: Request) -> RequestDiff:
    """The structural difference of two requests."""
    labels_a, labels_b = Names(a), Names(b)
    added, removed, changed = _diff_tables(a.candidates, b.candidates, labels_a, labels_b, first_a=0, first_b=0)
    fixed_added, fixed_removed, fixed_changed = _diff_tables(
        a.fixed, b.fixed, labels_a, labels_b, first_a=len(a.candidates), first_b=len(b.candidates)
    )
    single = ("schema", "capture", "phase", "num_segments")
    fields = [Difference(path=name, a=getattr(a, name), b=getattr(b, name)) for name in single]
    options_a, options_b = a.options.to_wire(), b.options.to_wire()
    fields += [Difference(path=f"options.{name}", a=options_a[name], b=options_b[name]) for name in Options.__slots__]
    return RequestDiff(
        signature_a=a.signature,
        signature_b=b.signature,
        fields=tuple(field for field in fields if field.a != field.b),
        groups=tuple(_diff_groups(a, b)),
        added=added,
        removed=removed,
        changed=changed,
        fixed_added=fixed_added,
        fixed_removed=fixed_removed,
        fixed_changed=fixed_changed,
    )


def _diff_groups(a: Request, b: Request) -> Iterable[Difference]:
    groups_a = {group.role: group.to_wire() for group in a.groups}
    groups_b = {group.role: group.to_wire() for group in b.groups}
    for role in sorted(groups_a.keys() | groups_b.keys()):
        of_a, of_b = groups_a.get(role), groups_b.get(role)
        if of_a is None or of_b is None:
            yield Difference(
                path=f"groups[{role}]", a=ABSENT if of_a is None else of_a, b=ABSENT if of_b is None else of_b
            )
        else:
            for name, value in of_a.items():
                if value != of_b[name]:
                    yield Difference(path=f"groups[{role}].{name}", a=value, b=of_b[name])


def _diff_tables(
    rows_a: _Table, rows_b: _Table, names_a: Names, names_b: Names, *, first_a: int, first_b: int
) -> tuple[tuple[CollectiveView, ...], tuple[CollectiveView, ...], tuple[CollectiveChange, ...]]:
    index_in_a = {names_a.identities[first_a + index]: index for index in range(len(rows_a))}
    matched = [index_in_a.get(names_b.identities[first_b + index]) for index in range(len(rows_b))]
    pairs = [(found, index) for index, found in enumerate(matched) if found is not None]
    kept_a = {found for found, _ in pairs}
    out_of_order = {
        name: _out_of_order([(_order(rows_a[i], name), _order(rows_b[j], name)) for i, j in pairs])
        for name in _ORDER_FIELDS
    }
    changed = []
    for number, (i, j) in enumerate(pairs):
        fields = tuple(_diff_rows(rows_a[i], rows_b[j], names_a, names_b)) + tuple(
            Difference(path=name, a=_order(rows_a[i], name), b=_order(rows_b[j], name))
            for name in _ORDER_FIELDS
            if number in out_of_order[name]
        )
        if fields:
            label = names_a.labels[first_a + i]
            changed.append(CollectiveChange(label=label, index_a=i, index_b=j, fields=fields))
    added = [
        CollectiveView(index=j, label=names_b.labels[first_b + j]) for j, found in enumerate(matched) if found is None
    ]
    removed = [
        CollectiveView(index=i, label=names_a.labels[first_a + i]) for i in range(len(rows_a)) if i not in kept_a
    ]
    return tuple(added), tuple(removed), tuple(changed)


def _order(row: Candidate | FixedCollective, name: str) -> int | None:
    return row.launch_order if name == "launch_order" else row.wait_order


def _diff_rows(
    a: Candidate | FixedCollective, b: Candidate | FixedCollective, names_a: Names, names_b: Names
) -> Iterable[Difference]:
    for name in type(a).__slots__:
        of_a, of_b = getattr(a, name), getattr(b, name)
        if name == "depends_on":
            edges_a = [names_a.labels[edge] for edge in of_a]
            edges_b = [names_b.labels[edge] for edge in of_b]
            if {names_a.identities[edge] for edge in of_a} != {names_b.identities[edge] for edge in of_b}:
                yield Difference(path=name, a=edges_a, b=edges_b)
        elif of_a != of_b and name not in _ORDER_FIELDS:
            yield Difference(path=name, a=_as_wire(of_a), b=_as_wire(of_b))


def _as_wire(value: object) -> WireValue:
    if isinstance(value, tuple):
        return [_as_wire(item) for item in value]
    assert value is None or isinstance(value, bool | int | str)
    return value


def _out_of_order(pairs: Sequence[tuple[int | None, int | None]]) -> set[int]:
    """The least set of positions in `pairs` without which both columns are in one order; a pair with None is left out.

    All that is outside one longest increasing run (patience sorting, Fredman 1975).
    """
    present = sorted((a, b, number) for number, (a, b) in enumerate(pairs) if a is not None and b is not None)
    tails: list[int] = []
    last: list[int] = []
    before: list[int] = []
    for place, (_, b, _) in enumerate(present):
        length = bisect_left(tails, b)
        before.append(last[length - 1] if length else -1)
        if length == len(tails):
            tails.append(b)
            last.append(place)
        else:
            tails[length] = b
            last[length] = place
    keeps: set[int] = set()
    place = last[-1] if last else -1
    while place >= 0:
        keeps.add(present[place][2])
        place = before[place]
    return {number for _, _, number in present if number not in keeps}
