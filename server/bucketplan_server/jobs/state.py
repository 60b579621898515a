"""One word and one sentence for the whole of an attempt, from its status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["overall_state"]


def overall_state(status: Mapping[str, Any]) -> tuple[str, str]:
    """`diverged`, `stalled`, `waiting` or `agreed`, and the summary that says why; a divergence outweighs a wait."""
    opening = status["opening"]
    if opening["state"] == "diverged":
        return "diverged", opening["summary"]
    for group in status["groups"]:
        for slot in group["slots"]:
            if slot["state"] == "diverged":
                return "diverged", f"{group['role']}, {slot['slot']} {slot['ordinal']}: {slot['summary']}"
    if opening["state"] == "waiting":
        return "stalled" if opening["stalled"] else "waiting", opening["summary"]
    return "agreed", opening["summary"]
