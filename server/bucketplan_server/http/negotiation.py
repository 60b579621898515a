"""Which encoding a caller sends and wants: MessagePack for ranks, JSON for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from bucketplan_server.problems import Problem

__all__ = ["JSON_TYPE", "MSGPACK_TYPE", "Encoding", "accepts_gzip", "body_encoding", "names_tag", "preferred"]

Encoding = Literal["json", "msgpack"]
MSGPACK_TYPE = "application/msgpack"
JSON_TYPE = "application/json"
_TYPES: Mapping[str, Encoding] = {
    MSGPACK_TYPE: "msgpack",
    "application/x-msgpack": "msgpack",
    "application/vnd.msgpack": "msgpack",
    "application/problem+msgpack": "msgpack",
    JSON_TYPE: "json",
    "application/problem+json": "json",
}


def body_encoding(content_type: str | None) -> Encoding:
    """The encoding that `Content-Type` names; raises ``unsupported-media-type``."""
    name, _, parameters = (content_type or "").partition(";")
    encoding = _TYPES.get(name.strip().lower())
    charset = parameters.strip().lower().replace('"', "").replace(" ", "")
    if encoding is None or (charset and charset != "charset=utf-8"):
        raise Problem(
            "unsupported-media-type",
            f"Content-Type is {content_type!r}; send {MSGPACK_TYPE} or {JSON_TYPE} (UTF-8)",
            fields={"path": "Content-Type", "value": content_type or "", "supported": [MSGPACK_TYPE, JSON_TYPE]},
        )
    return encoding


def preferred(accept: str | None, *, default: Encoding = "json") -> Encoding | None:
    """The encoding that `Accept` likes best, None if it takes neither; `default` where both are as welcome."""
    if accept is None or accept.strip() in ("", "*/*"):
        return default
    weights: dict[Encoding, tuple[float, int]] = {}
    for name, quality in _weighted(accept):
        for encoding, specificity in _matches(name):
            best = weights.get(encoding)
            if best is None or specificity > best[1]:
                weights[encoding] = (quality, specificity)
    welcome = {encoding: found for encoding, found in weights.items() if found[0] > 0}
    if not welcome:
        return None
    return max(welcome, key=lambda encoding: (*welcome[encoding], encoding == default))


def accepts_gzip(accept_encoding: str | None) -> bool:
    """Whether `Accept-Encoding` takes gzip."""
    qualities = dict(_weighted(accept_encoding or ""))
    return qualities.get("gzip", qualities.get("*", 0.0)) > 0


def _matches(name: str) -> list[tuple[Encoding, int]]:
    if name == "*/*":
        return [("json", 0), ("msgpack", 0)]
    if name == "application/*":
        return [("json", 1), ("msgpack", 1)]
    found = _TYPES.get(name)
    return [] if found is None else [(found, 2)]


def _weighted(header: str) -> list[tuple[str, float]]:
    """Entries of a list header with their q values; a q that cannot be read counts as refused."""
    entries = []
    for part in header.split(","):
        name, *parameters = (piece.strip().lower() for piece in part.split(";"))
        quality = 1.0
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.strip() == "q":
                try:
                    quality = float(value)
                except ValueError:
                    quality = 0.0
        if name:
            entries.append((name, quality))
    return entries


def names_tag(if_none_match: Sequence[str], tag: str) -> bool:
    """Whether the lines of `If-None-Match` name `tag`, weak or not, or ``*`` (RFC 9110, section 13.1.2)."""
    return any(line.strip() == "*" or f'"{tag}"' in line for line in if_none_match)
