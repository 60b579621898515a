"""What goes to a planning process and what comes back: plain data only, since it crosses a pipe."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Canonical", "PlanJob", "Planned", "Revised", "RevisionJob", "Stored"]


@dataclass(frozen=True, slots=True)
class PlanJob:
    """A request to plan: canonical bytes that hash to `signature`, and the profile that came with them, if any."""

    signature: str
    request: bytes
    profile: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan that passed every check, and what the store keeps beside it (`facts`, see `request_facts`)."""

    signature: str
    request: bytes
    profile: bytes
    profile_digest: str
    plan: bytes
    plan_sha256: str
    digest: str
    planner: str
    options: bytes
    facts: dict[str, str | int]


@dataclass(frozen=True, slots=True)
class Canonical:
    """A JSON body in canonical bytes, with the signature that its request has."""

    signature: str
    request: bytes
    profile: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RevisionJob:
    """Another plan of a stored signature: by `origin` ``planner`` or ``replan`` under `options`, or ``manual``.

    `options` are canonical bytes of complete options. A manual job holds `buckets` (candidates by index, those that
    are named nowhere stay alone) or `decision`, the canonical bytes of a whole decision.
    """

    signature: str
    request: bytes
    profile: bytes
    origin: str
    options: bytes
    buckets: tuple[tuple[int, ...], ...] | None = None
    decision: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Revised:
    """The plan of a `RevisionJob`, legality-checked against the request of its signature."""

    plan: bytes
    plan_sha256: str
    digest: str
    planner: str
    options: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A stored revision with the documents of its signature, canonical bytes."""

    request: bytes
    profile: bytes
    plan: bytes
