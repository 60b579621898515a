"""Where two documents differ first, in the order of their keys: one sentence for whoever hunts a divergence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from bucketplan_core.wire import WireValue

__all__ = ["Difference", "first_difference"]

_ABSENT = "(absent)"


@dataclass(frozen=True, slots=True)
class Difference:
    """The field at `path` holds `left` in one document and `right` in the other."""

    path: str
    left: WireValue
    right: WireValue

    def to_wire(self) -> dict[str, WireValue]:
        return {"left": self.left, "path": self.path, "right": self.right}


def first_difference(left: WireValue, right: WireValue, path: str = "request") -> Difference | None:
    """The first field, keys in sorted order, in which the trees differ; None if they are equal.

    Lists of unequal length that agree as far as both go differ in their length.
    """
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for key in sorted({*left, *right}):
            if key not in left or key not in right:
                return Difference(f"{path}.{key}", left.get(key, _ABSENT), right.get(key, _ABSENT))
            found = first_difference(left[key], right[key], f"{path}.{key}")
            if found is not None:
                return found
        return None
    if _is_list(left) and _is_list(right):
        for index, (one, other) in enumerate(zip(left, right, strict=False)):
            found = first_difference(one, other, f"{path}[{index}]")
            if found is not None:
                return found
        if len(left) != len(right):
            return Difference(f"{path} (number of entries)", len(left), len(right))
        return None
    return None if type(left) is type(right) and left == right else Difference(path, left, right)


def _is_list(value: WireValue) -> TypeGuard[Sequence[WireValue]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
