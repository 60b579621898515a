"""Bodies of answers, as they come from the network: bounded in size before and after they are inflated."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from bucketplan_client.lean_httpx import httpx

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ACCEPT_ENCODING", "MAX_ANSWER_BYTES", "BodyRefused", "read_body"]

ACCEPT_ENCODING = "gzip"
MAX_ANSWER_BYTES = 64 * 2**20
"""More than a plan of 20,000 candidates with all overrides of an epoch; a larger body is a mistake or an attack."""


class BodyRefused(Exception):
    """The body is not one that this client reads; the message says why."""


def read_body(headers: Mapping[str, str], parts: Iterable[bytes], *, ends: float) -> bytes:
    """The whole body without its content coding, which may be gzip, once.

    Raises `BodyRefused` for another coding, a damaged one, and more than `MAX_ANSWER_BYTES` before or after it is
    undone; `httpx.ReadTimeout` at the moment `ends` (`time.monotonic`).
    """
    named = [name.strip().lower() for name in headers.get("Content-Encoding", "").split(",")]
    codings = [name for name in named if name not in ("", "identity")]
    bounded = _bounded(parts, ends)
    if not codings:
        return b"".join(bounded)
    if codings not in (["gzip"], ["x-gzip"]):
        raise BodyRefused(f"its content coding is {', '.join(codings)!r}, and gzip, once, is all that was asked for")
    return _inflate(bounded)


def _bounded(parts: Iterable[bytes], ends: float) -> Iterator[bytes]:
    size_bytes = 0
    for part in parts:
        size_bytes += len(part)
        if size_bytes > MAX_ANSWER_BYTES:
            raise BodyRefused(f"its body is larger than {MAX_ANSWER_BYTES} bytes")
        if time.monotonic() > ends:
            raise httpx.ReadTimeout("the deadline has passed")
        yield part


def _inflate(parts: Iterable[bytes]) -> bytes:
    inflater = zlib.decompressobj(zlib.MAX_WBITS | 16)
    found = bytearray()
    try:
        for part in parts:
            # A bound of 0 would mean none.
            found += inflater.decompress(part, MAX_ANSWER_BYTES + 1 - len(found))
            if len(found) > MAX_ANSWER_BYTES:
                raise BodyRefused(f"its body inflates to more than {MAX_ANSWER_BYTES} bytes")
            if inflater.unused_data:
                raise BodyRefused("its compression is damaged: bytes follow its end")
    except zlib.error as error:
        raise BodyRefused(f"its compression is damaged: {error}") from error
    if not inflater.eof:
        raise BodyRefused("its compression is damaged: it ends early")
    return bytes(found)
