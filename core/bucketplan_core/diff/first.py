"""The first field in which two documents differ: what a rank is told that disagrees with the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from bucketplan_core.diff.names import Names
from bucketplan_core.request import Request
from bucketplan_core.wire import WireValue

__all__ = ["ABSENT", "Difference", "first_difference"]

ABSENT = "(absent)"
"""Stands for the value of a key that only the other document has."""

# Versions and options first, then a table's row: what it is before where it stands. Causes come before consequences.
_FIRST_KEYS = (
    *("schema", "capture", "signature", "phase", "planner", "options", "groups", "candidates", "buckets", "steps"),
    *("fixed", "kind", "group", "param_name", "ordinal", "state_idx", "reduce_op", "dtype", "group_size"),
    *("input_shape", "output_shape", "device_type", "module_fqns", "scope", "depends_on", "launch", "wait"),
    *("id", "lane", "members"),
)
_KEY_RANK = {key: rank for rank, key in enumerate(_FIRST_KEYS)}


class _Document(Protocol):
    def to_wire(self) -> dict[str, WireValue]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One field that differs: where it stands, its two values, and of which collective it is, if of one."""

    path: str
    a: WireValue
    b: WireValue
    where: str | None = None

    def __str__(self) -> str:
        where = f" ({self.where})" if self.where is not None else ""
        return f"{self.path}{where}: {self.a!r} against {self.b!r}"

    def to_wire(self) -> dict[str, WireValue]:
        return {"a": self.a, "b": self.b, "path": self.path, "where": self.where}


def first_difference(
    a: WireValue | _Document, b: WireValue | _Document, *, path: str | None = None
) -> Difference | None:
    """The first field in which two documents, or their trees, differ; None where they are equal.

    Looks at causes before consequences: versions and options, then groups, then tables row by row in launch order. Its
    path starts with `path`, by default the name of the document's kind.
    """
    root = path if path is not None else type(a).__name__.lower() if hasattr(a, "to_wire") else "$"
    found = _first(_tree(a), _tree(b), root)
    if found is None or not isinstance(a, Request) or not isinstance(b, Request):
        return found
    return _with_label(found, a, b, root)


def _tree(document: WireValue | _Document) -> WireValue:
    if document is None or isinstance(document, bool | int | str | bytes | Sequence | Mapping):
        return document
    return document.to_wire()


def _first(a: WireValue, b: WireValue, path: str) -> Difference | None:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        keys = sorted(a.keys() | b.keys(), key=_key_rank)
        if _is_table(a) and _is_table(b) and a.keys() == b.keys():
            return _first_in_table(a, b, keys, path)
        for key in keys:
            if key not in a or key not in b:
                return Difference(path=f"{path}.{key}", a=a.get(key, ABSENT), b=b.get(key, ABSENT))
            found = _first(a[key], b[key], f"{path}.{key}")
            if found is not None:
                return found
        return None
    if _is_list(a) and _is_list(b):
        assert isinstance(a, Sequence)
        assert isinstance(b, Sequence)
        for index, (of_a, of_b) in enumerate(zip(a, b, strict=False)):
            found = _first(of_a, of_b, f"{path}[{index}]")
            if found is not None:
                return found
        return None if len(a) == len(b) else Difference(path=f"{path}.length", a=len(a), b=len(b))
    return None if type(a) is type(b) and a == b else Difference(path=path, a=a, b=b)


def _key_rank(key: str) -> tuple[int, str]:
    return (_KEY_RANK.get(key, len(_KEY_RANK)), key)


def _is_list(value: WireValue) -> bool:
    return isinstance(value, list | tuple)


def _is_table(tree: Mapping[str, WireValue]) -> bool:
    """Whether this is one array a field, as candidates travel."""
    lengths = {len(column) if isinstance(column, list | tuple) else -1 for column in tree.values()}
    return len(tree) > 1 and len(lengths) == 1 and -1 not in lengths


def _first_in_table(
    a: Mapping[str, WireValue], b: Mapping[str, WireValue], keys: Sequence[str], path: str
) -> Difference | None:
    """The first row that differs, by its first column that does."""
    found: tuple[int, int, Difference] | None = None
    for rank, key in enumerate(keys):
        column_a, column_b = a[key], b[key]
        assert isinstance(column_a, Sequence)
        assert isinstance(column_b, Sequence)
        for row, (of_a, of_b) in enumerate(zip(column_a, column_b, strict=False)):
            if found is not None and row >= found[0]:
                break
            if type(of_a) is not type(of_b) or of_a != of_b:
                # Inside a cell the whole value says more than its first differing number.
                found = (row, rank, Difference(path=f"{path}.{key}[{row}]", a=of_a, b=of_b))
                break
    if found is not None:
        return found[2]
    lengths = [len(tree[keys[0]]) for tree in (a, b)]  # type: ignore[arg-type]  # both sides are columns
    return None if lengths[0] == lengths[1] else Difference(path=f"{path}.length", a=lengths[0], b=lengths[1])


def _with_label(found: Difference, a: Request, b: Request, root: str) -> Difference:
    """Say of which collective it is, as `a` calls it, and as `b` does where they differ."""
    for table, first_a, first_b in (
        ("candidates", 0, 0),
        ("fixed", len(a.candidates), len(b.candidates)),
    ):
        if found.path.startswith(f"{root}.{table}.") and found.path.endswith("]"):
            row = int(found.path.rpartition("[")[2][:-1])
            labels = dict.fromkeys((Names(a).labels[first_a + row], Names(b).labels[first_b + row]))
            return replace(found, where=" / ".join(labels))
    return found
