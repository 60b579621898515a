"""Options of a replan: what the form says of them, and options as people read them. Every function is pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bucketplan_core.collectives import PLACEMENTS, STRATEGIES
from bucketplan_core.wire import MAX_INT, WireValue, digest_of, pack
from bucketplan_server.pages.render import SHORT_HEX, readable_bytes
from bucketplan_server.pages.routing import number_field, one_of, text_field
from bucketplan_server.problems import Problem

__all__ = ["CHOICES", "FORM_FIELDS", "OptionRow", "changed_options", "readable_options", "typed_options"]

CHOICES = {"strategy": STRATEGIES, "placement": PLACEMENTS}
"""Options of a replan that are chosen from a list, and what may be chosen."""
_NUMBERS = {
    "bucket_cap_bytes": (1, MAX_INT),
    "first_bucket_cap_bytes": (1, MAX_INT),
    "memory_budget_bytes": (0, MAX_INT),
    "prefetch": (0, 10_000),
}
_MAY_BE_NONE = frozenset(("memory_budget_bytes",))
FORM_FIELDS = (*CHOICES, *_NUMBERS)


@dataclass(frozen=True, slots=True)
class OptionRow:
    """One option of two plans, as text."""

    name: str
    before: str
    after: str

    @property
    def differs(self) -> bool:
        return self.before != self.after


def typed_options(form: Mapping[str, str]) -> dict[str, WireValue]:
    """The options that a form sets; what it has no field of is left open, and an emptied field is none.

    Raises `Problem` for a value that the option cannot have, and for an emptied field of one that cannot be none.
    """
    options: dict[str, WireValue] = {}
    for name in FORM_FIELDS:
        if name not in form:
            continue
        allowed = CHOICES.get(name)
        if allowed is not None:
            value: str | int | None = one_of(text_field(form, name), name, allowed, slug="invalid-body") or None
        else:
            low, high = _NUMBERS[name]
            value = number_field(form, name, low=low, high=high)
        if value is None and name not in _MAY_BE_NONE:
            what = f"one of {', '.join(allowed)}" if allowed is not None else "a whole number"
            raise Problem(
                "invalid-body", f"{name}: empty, and no plan can do without; give {what}", fields={"path": name}
            )
        options[name] = value
    return options


def readable_options(options: Mapping[str, WireValue]) -> dict[str, str]:
    """Options by name as people read them; figures of hardware by their digest."""
    return {name: _readable(name, value) for name, value in options.items()}


def changed_options(before: Mapping[str, WireValue], after: Mapping[str, WireValue]) -> list[OptionRow]:
    """Every option of `after` beside the same of `before`, those that differ first."""
    old, new = readable_options(before), readable_options(after)
    rows = [OptionRow(name, old[name], text) for name, text in new.items()]
    return sorted(rows, key=lambda row: not row.differs)


def _readable(name: str, value: WireValue) -> str:
    if name == "hardware":
        return "unknown" if value is None else f"figures {digest_of(pack(value))[:SHORT_HEX]}"
    if value is None:
        return "the planner's own"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("_bytes") and isinstance(value, int) and value >= 1024:
        return f"{value} ({readable_bytes(value)})"
    return str(value)
