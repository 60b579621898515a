"""Walking the event log: the chain itself, and what it says about every other table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bucketplan_core.errors import DecodeError
from bucketplan_core.wire import WireValue, unpack
from bucketplan_server.store.events import FIRST_PREVIOUS, event_digest

__all__ = ["Chain", "Event", "Finding"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it was written: `where` names table, row and column."""

    where: str
    detail: str

    def to_wire(self) -> dict[str, WireValue]:
        return {"detail": self.detail, "where": self.where}


@dataclass(frozen=True, slots=True)
class Event:
    """What later checks need of one event."""

    seq: int
    at_ns: int
    actor: str
    reason: str
    body: Mapping[str, Any]


@dataclass(slots=True)
class Chain:
    """The log as far as it was walked, and what its events promise, by the name of the row that they speak of."""

    num_events: int = 0
    head: str = FIRST_PREVIOUS
    findings: list[Finding] = field(default_factory=list)
    revisions: dict[tuple[str, int], Event] = field(default_factory=dict)
    attempts: dict[tuple[str, int], Event] = field(default_factory=dict)
    reports: dict[tuple[str, int, int, str, int], tuple[int, str]] = field(default_factory=dict)
    report_times: dict[int, int] = field(default_factory=dict)
    quarantined: dict[tuple[str, int], Event] = field(default_factory=dict)
    active: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    active_until: int = 0
    pruned: dict[tuple[str, int], int] = field(default_factory=dict)
    pruned_signatures: set[tuple[str, str]] = field(default_factory=set)
    hardware: dict[tuple[str, int], Event] = field(default_factory=dict)
    tokens_created: dict[str, Event] = field(default_factory=dict)
    tokens_revoked: dict[str, Event] = field(default_factory=dict)

    def walk(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Check the next events, in order; a broken link is named and the walk goes on behind it."""
        for row in rows:
            seq = row["seq"]
            if seq != self.num_events + 1:
                self.findings.append(
                    Finding(f"events[{self.num_events + 1}]", f"is missing or unreadable; the next one is {seq}")
                )
            elif row["previous"] != self.head:
                self.findings.append(
                    Finding(f"events[{seq}].previous", f"names {row['previous']}, the event before has {self.head}")
                )
            try:
                actual = event_digest(row)
            except DecodeError as error:
                actual = f"nothing: {error}"
            if actual != row["digest"]:
                self.findings.append(Finding(f"events[{seq}]", f"hashes to {actual}, stored is {row['digest']}"))
            self.num_events = seq
            self.head = row["digest"]
            try:
                body = unpack(row["body"])
                if not isinstance(body, dict):
                    raise DecodeError("body", body, "must be a map")
                _check_types(row, body)
                self._note(row, Event(seq, row["at_ns"], row["actor"], row["reason"], body))
            except (DecodeError, KeyError, TypeError, ValueError) as error:
                self.findings.append(Finding(f"events[{seq}].body", f"cannot be read: {error}"))

    def _note(self, row: Mapping[str, Any], event: Event) -> None:
        signature, job, body, kind = row["signature"], row["job"], event.body, row["kind"]
        if kind in ("plan.created", "revision.created"):
            self.revisions[signature, body["revision"]] = event
            if kind == "plan.created" and (not self.active_until or event.seq <= self.active_until):
                self.active[signature, ""] = (body["revision"], event.at_ns)
        elif kind == "plan.activated" and (not self.active_until or event.seq <= self.active_until):
            key = (signature, body["job"])
            if body["revision"] is None:
                self.active.pop(key, None)
            else:
                self.active[key] = (body["revision"], event.at_ns)
        elif kind == "attempt.opened":
            self.attempts[job, body["attempt"]] = event
        elif kind == "reports.received":
            for rank, slot, ordinal, digest in body["reports"]:
                self.reports[job, body["attempt"], rank, slot, ordinal] = (event.seq, digest)
            self.report_times[event.seq] = event.at_ns
        elif kind in ("token.created", "token.revoked"):
            # Read together with `active`: rows of tokens change too.
            if not self.active_until or event.seq <= self.active_until:
                noted = self.tokens_created if kind == "token.created" else self.tokens_revoked
                noted[body["name"]] = event
        elif kind == "reports.pruned":
            self.pruned[job, body["attempt"]] = event.seq
            self.pruned_signatures.update((job, name) for name in body["signatures"])
        elif kind == "profile.stored":
            self.hardware[body["name"], body["version"]] = event
        elif kind == "plan.quarantined":
            self.quarantined[signature, body["revision"]] = event


_BODY_TYPES: dict[str, tuple[type, ...]] = {
    "attempt": (int,),
    "epoch": (str,),
    "job": (str,),
    "name": (str,),
    "profile": (str,),
    "reports": (list,),
    "revision": (int, type(None)),
    "signatures": (list,),
    "version": (int,),
}
"""Types of what later checks use as names of rows, so that no content of a body can stop them."""


def _check_types(row: Mapping[str, Any], body: Mapping[str, Any]) -> None:
    """Raises `DecodeError` where an event names a row by something that cannot be a name."""
    subject = "signature" if row["kind"].startswith(("plan.", "revision.")) else "job"
    if row[subject] is None and not row["kind"].startswith(("token.", "profile.")):
        raise DecodeError(subject, None, f"must be given by an event of kind {row['kind']}")
    for name, types in _BODY_TYPES.items():
        if name in body and type(body[name]) not in types:
            raise DecodeError(f"body.{name}", body[name], f"must be {' or '.join(kind.__name__ for kind in types)}")
    for report in body.get("reports", ()):
        if not isinstance(report, list) or [type(part) for part in report] != [int, str, int, str]:
            raise DecodeError("body.reports", report, "must be rank, slot, ordinal and digest")
    if not all(isinstance(name, str) for name in body.get("signatures", ())):
        raise DecodeError("body.signatures", body["signatures"], "must be signatures")
