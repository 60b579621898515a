"""Answers of a planning server: what a body holds, whether it came whole, and what else may have answered."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from bucketplan_client.errors import Problem
from bucketplan_core.errors import DecodeError, SignatureMismatch
from bucketplan_core.plan import Plan
from bucketplan_core.wire import WireValue, from_json, unpack

__all__ = [
    "Answer",
    "NotOurs",
    "check_content_digest",
    "check_media_type",
    "content_digest",
    "read_document",
    "read_plan",
    "read_problem",
    "retry_after_s",
]

_SHOWN_BYTES = 60
"""How much of a body that no planning server sent is quoted; enough to know a login page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One successful answer: decoded `body` where there is one, and what its headers say."""

    status: int
    content: bytes
    headers: Mapping[str, str]
    num_tries: int = 1

    @property
    def body(self) -> WireValue:
        """The document in the body; raises `DecodeError` when it is none."""
        return _decode(self.content, self.headers)


def read_plan(answer: Answer, signature: str) -> Plan:
    """The plan in an answer; raises `DecodeError` and `SignatureMismatch` where it is not that of `signature`."""
    plan = Plan.decode(answer.content, expected_signature=signature)
    tag = answer.headers.get("ETag")
    if tag is not None and tag.removeprefix("W/").strip('"') != plan.digest:
        raise SignatureMismatch(claimed=tag, actual=plan.digest, what="plan named by ETag")
    return plan


def read_document(answer: Answer) -> Answer:
    """The answer, whose body is a document; raises `DecodeError` where it is none."""
    _decode(answer.content, answer.headers)
    return answer


def _decode(content: bytes, headers: Mapping[str, str]) -> WireValue:
    kind = _media_type(headers)
    if kind.endswith("msgpack"):
        return unpack(content)
    if kind.endswith("json"):
        return from_json(content)
    raise DecodeError("$", kind, "the answer is neither MessagePack nor JSON")


class NotOurs(DecodeError):
    """A good answer, but of something else: a captive portal, a login page, the default page of an ingress."""


def check_media_type(answer: Answer) -> None:
    """Raises `NotOurs` for a body that no planning server sends."""
    kind = _media_type(answer.headers)
    if kind.endswith(("msgpack", "json")) or (not kind and not answer.content):
        return
    begins = answer.content[:_SHOWN_BYTES].decode("utf-8", "backslashreplace")
    raise NotOurs("$", kind[:60], f"neither MessagePack nor JSON came, and no planning server sends {begins!r}")


def _media_type(headers: Mapping[str, str]) -> str:
    return headers.get("Content-Type", "").partition(";")[0].strip().lower()


def read_problem(answer: Answer) -> Problem:
    """The problem in an answer, or one made of what else came, when something on the way answered."""
    try:
        body = _decode(answer.content, answer.headers)
    except DecodeError:
        body = None
    fields: dict[str, Any] = dict(body) if isinstance(body, Mapping) else {}
    known = {key: fields.pop(key, None) for key in ("type", "title", "status", "detail")}
    return Problem(
        type=str(known["type"] or "about:blank"),
        title=str(known["title"] or f"HTTP status {answer.status}"),
        status=answer.status,
        detail=str(known["detail"] or ("" if known["title"] else _what_came(answer))),
        extra=fields,
    )


def _what_came(answer: Answer) -> str:
    """What answered instead of a planning server, as far as the answer tells."""
    location = answer.headers.get("Location")
    if 300 <= answer.status < 400 and location:
        return f"a proxy redirected to {location[:200]!r}; set BUCKETPLAN_SERVER to the server itself"
    kind = _media_type(answer.headers)
    what = f"a body of type {kind[:60]!r}" if kind and answer.content else "no document"
    return f"HTTP status {answer.status} with {what}, as no planning server answers; something on the way did"


def retry_after_s(headers: Mapping[str, str], default: float) -> float:
    """Seconds that `Retry-After` asks for (RFC 9110, section 10.2.3: a number of seconds or a date)."""
    text = headers.get("Retry-After", "").strip()
    if not text:
        return default
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return default


def content_digest(body: bytes) -> str:
    """RFC 9530 `Content-Digest`: a body that was changed on the way is told from one that was sent wrongly."""
    return f"sha-256=:{base64.b64encode(hashlib.sha256(body).digest()).decode('ascii')}:"


def check_content_digest(answer: Answer) -> None:
    """Raises `SignatureMismatch` for a body that is not the one its server named."""
    claimed = answer.headers.get("Content-Digest")
    if claimed is None or not claimed.startswith("sha-256=") or "Content-Encoding" in answer.headers:
        return
    actual = content_digest(answer.content)
    if claimed.strip() != actual:
        raise SignatureMismatch(claimed=claimed, actual=actual, what="body named by Content-Digest")
