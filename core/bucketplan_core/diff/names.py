"""What a collective is called, and by what it is found again in another request."""

from __future__ import annotations

from typing import TypeAlias

from bucketplan_core.collectives import Candidate
from bucketplan_core.request import Request

__all__ = ["Identity", "Names"]

Identity: TypeAlias = tuple[bool, str, str | None, str, int]
"""(is fixed, kind, group, own name, occurrence in launch order)."""


class Names:
    """Identities and labels of a request's collectives, by their index in the request's one numbering.

    A candidate's own name is that of its parameter, else the parameter's ordinal, else its modules.
    """

    def __init__(self, request: Request) -> None:
        self.identities: list[Identity] = []
        self.labels: list[str] = []
        self._seen: dict[tuple[bool, str, str | None, str], int] = {}
        for candidate in request.candidates:
            self._add(False, candidate.kind, candidate.group, _own_name(candidate))
        for fixed in request.fixed:
            self._add(True, fixed.kind, fixed.group, "")

    def _add(self, is_fixed: bool, kind: str, group: str | None, name: str) -> None:
        occurrence = self._seen.get((is_fixed, kind, group, name), 0)
        self._seen[(is_fixed, kind, group, name)] = occurrence + 1
        self.identities.append((is_fixed, kind, group, name, occurrence))
        words = ["fixed", kind] if is_fixed else [kind]
        words += [name] if name else []
        words += [f"#{occurrence + 1}"] if occurrence or not name else []
        words += [f"on {group!r}"] if group is not None else []
        self.labels.append(" ".join(words))


def _own_name(candidate: Candidate) -> str:
    if candidate.param_name is not None:
        return candidate.param_name
    if candidate.ordinal is not None:
        return f"parameter {candidate.ordinal}"
    return ", ".join(candidate.module_fqns)
