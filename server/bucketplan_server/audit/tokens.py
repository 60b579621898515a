"""What the event chain says about tokens, compared with their rows: nobody gets in by writing to the database."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bucketplan_server.audit.chain import Event, Finding
from bucketplan_server.store.tokens import token_fingerprint

__all__ = ["compare_tokens"]


def compare_tokens(
    rows: Iterable[Mapping[str, Any]], created: Mapping[str, Event], revoked: Mapping[str, Event]
) -> list[Finding]:
    """What differs: columns that are not as the event says, tokens without event, events without token."""
    findings: list[Finding] = []
    seen = set()
    for row in rows:
        seen.add(row["name"])
        where = f"tokens[{row['name']}]"
        event = created.get(row["name"])
        if event is None:
            findings.append(Finding(where, "no event says that it was made"))
            continue
        ended = revoked.get(row["name"])
        said = (
            ("hash", _fingerprint(row["hash"]), event.body.get("fingerprint")),
            ("role", row["role"], event.body.get("role")),
            ("namespace", row["namespace"], event.body.get("namespace")),
            ("expires_ns", row["expires_ns"], event.body.get("expires_ns")),
            ("created_ns", row["created_ns"], event.at_ns),
            ("revoked_ns", row["revoked_ns"], None if ended is None else ended.at_ns),
        )
        for column, found, expected in said:
            if found != expected:
                by = ended if column == "revoked_ns" and ended is not None else event
                findings.append(Finding(f"{where}.{column}", f"is {found!r}, event {by.seq} says {expected!r}"))
    for name in sorted(created.keys() - seen):
        findings.append(Finding(f"tokens[{name}]", f"is missing, event {created[name].seq} says it was made"))
    return findings


def _fingerprint(stored: str) -> str:
    """As `token_fingerprint` where the column holds a hash in hex; else what it holds instead."""
    try:
        return token_fingerprint(bytes.fromhex(stored))
    except ValueError:
        return f"no hash: {stored!r}"
