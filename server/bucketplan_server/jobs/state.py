"""One word and one sentence for the whole of an attempt, from its status."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bucketplan_core.errors import describe_ranks
from bucketplan_server.jobs.status import not_opened

__all__ = ["Verdict", "overall_state"]

_MOST_TEXT = 1_000
"""Characters of a sentence that are kept: lists show a third of them."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What lists say of an attempt; of one that waits the sentence goes on with time."""

    word: str
    _sentence: str
    _waits_since_ns: int | None

    @classmethod
    def of(cls, status: Mapping[str, Any]) -> Verdict:
        word, summary = overall_state(status)
        if word not in ("stalled", "waiting"):
            return cls(word, summary[:_MOST_TEXT], None)
        return cls(word, describe_ranks(status["opening"]["missing"])[:_MOST_TEXT], status["opened_ns"])

    def summary(self, now_ns: int) -> str:
        """The sentence as of `now_ns`, cut where it is long."""
        if self._waits_since_ns is None:
            return self._sentence
        return not_opened(self._sentence, max(0, now_ns - self._waits_since_ns))


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
