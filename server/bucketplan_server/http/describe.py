"""What the OpenAPI description says of bodies and answers: both encodings of one model, and the problems of a call."""

from __future__ import annotations

from typing import Any

from bucketplan_server.http.negotiation import JSON_TYPE, MSGPACK_TYPE
from bucketplan_server.http.parameters import DIGEST_PATTERN
from bucketplan_server.problems import PROBLEMS

__all__ = ["DIGEST", "MAP", "PLAN", "PLAN_READ_PROBLEMS", "PROBLEM", "body_of", "both", "obj", "problems"]

DIGEST: dict[str, Any] = {"type": "string", "pattern": DIGEST_PATTERN, "description": "SHA-256 in lower-case hex"}
MAP: dict[str, Any] = {"type": "object"}
PLAN_READ_PROBLEMS = (
    "invalid-parameter",
    "not-acceptable",
    "unknown-signature",
    "unknown-revision",
    "busy",
    "cannot-plan",
    "planner-failed",
    "quarantined",
    "store-unavailable",
)
"""What a read that looks a plan up and computes something of it in a planning process may end in."""

PROBLEM: dict[str, Any] = {
    "type": "object",
    "description": "Problem details (RFC 9457); members beside the standard ones name the field, value or rule",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string", "enum": [kind.urn for kind in PROBLEMS.values()]},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "path": {"type": "string", "description": "where the offending field stands"},
    },
}

PLAN: dict[str, Any] = {
    "type": "object",
    "description": "A plan: in MessagePack `decision` is the canonical encoding whose SHA-256 is `digest`",
    "required": ["assessment", "decision", "digest", "schema"],
    "properties": {
        "assessment": MAP,
        "decision": MAP,
        "digest": DIGEST,
        "schema": {"type": "integer"},
    },
}


def obj(required: dict[str, Any], optional: dict[str, Any] | None = None, *, description: str = "") -> dict[str, Any]:
    """An object schema; `optional` members may be absent."""
    schema: dict[str, Any] = {
        "type": "object",
        "required": sorted(required),
        "properties": {**required, **(optional or {})},
    }
    if description:
        schema["description"] = description
    return schema


def both(schema: dict[str, Any], description: str) -> dict[str, Any]:
    """A response in either encoding."""
    return {
        "description": description,
        "content": {JSON_TYPE: {"schema": schema}, MSGPACK_TYPE: {"schema": {}}},
    }


def body_of(schema: dict[str, Any], description: str) -> dict[str, Any]:
    """A request body in either encoding, as `openapi_extra` of a route."""
    return {
        "requestBody": {
            "required": True,
            "description": description,
            "content": {JSON_TYPE: {"schema": schema}, MSGPACK_TYPE: {"schema": {}}},
        }
    }


def problems(*slugs: str, public: bool = False) -> dict[int | str, dict[str, Any]]:
    """Responses for these problem types, and those that every call has, grouped by status; `public` needs no token.

    A store that can be away can be damaged, so ``store-unavailable`` brings ``store-damaged`` with it.
    """
    grouped: dict[int, list[str]] = {}
    damaged = ("store-damaged",) if "store-unavailable" in slugs else ()
    for slug in (*slugs, *damaged, *(() if public else ("unauthorized", "forbidden")), "internal"):
        grouped.setdefault(PROBLEMS[slug].status, []).append(slug)
    return {
        status: {
            "description": "; ".join(f"`{slug}`: {PROBLEMS[slug].title}" for slug in found),
            "content": {
                "application/problem+json": {"schema": PROBLEM},
                "application/problem+msgpack": {"schema": {}},
            },
        }
        for status, found in grouped.items()
    }
