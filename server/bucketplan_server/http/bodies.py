"""Reading request bodies: capped while they arrive and while they inflate, never after."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Callable
from functools import partial

import msgpack
from starlette.requests import Request

from bucketplan_core.errors import DecodeError
from bucketplan_core.fields import Fields
from bucketplan_core.wire import WireValue, from_json, unpack
from bucketplan_server.beside import DECODED_BYTES, beside
from bucketplan_server.http.negotiation import body_encoding
from bucketplan_server.problems import Problem, refuse

__all__ = ["PlanBody", "read_body", "read_document", "read_plan_body", "too_large"]

_GZIP_WINDOW = 16 + zlib.MAX_WBITS
MAX_DOCUMENT_BYTES = 2**20
"""Largest body of the small calls (attempts, reports, operators): they are decoded beside the hot path."""


def too_large(limit: int, *, of_call: bool = False, inflated: bool = False) -> Problem:
    """A body above `limit`, which is the server's setting or, `of_call`, what this call takes on any server."""
    whose = (
        "the most that this call takes on any server" if of_call else "the limit that BUCKETPLAN_MAX_BODY_BYTES sets"
    )
    return Problem(
        "body-too-large",
        f"the body{' is gzip that inflates to more' if inflated else ' is larger'} than {limit} bytes, {whose}",
        fields={"limit_bytes": limit},
        headers={"Connection": "close"},
    )


async def read_body(request: Request, *, most: int | None = None) -> bytes:
    """The body, inflated, of at most `BUCKETPLAN_MAX_BODY_BYTES` and of at most `most` where that is less.

    Raises ``body-too-large`` at the first byte above the limit, without reading on, and ``unauthorized`` where the
    caller's token ended while the body came.
    """
    parts = request.app.state.parts
    data = await _read(request, parts.settings.max_body_bytes, most)
    parts.access.check_again(request.scope)
    return data


async def _read(request: Request, set_limit: int, most: int | None) -> bytes:
    limit = set_limit if most is None else min(most, set_limit)
    of_call = limit < set_limit
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding in ("", "identity"):
        return await _collect(request.stream(), limit, partial(too_large, limit, of_call=of_call))
    if encoding not in ("gzip", "x-gzip"):
        raise Problem(
            "unsupported-media-type",
            f"Content-Encoding is {encoding!r}; send the body as it is or as gzip",
            fields={"path": "Content-Encoding", "value": encoding},
            headers={"Accept-Encoding": "gzip, identity", "Connection": "close"},
        )
    refusal = partial(too_large, limit, of_call=of_call, inflated=True)
    return await _collect(_inflate(request.stream(), limit), limit, refusal)


async def _collect(chunks: AsyncIterator[bytes], limit: int, refusal: Callable[[], Problem]) -> bytes:
    collected = bytearray()
    async for chunk in chunks:
        collected += chunk
        if len(collected) > limit:
            raise refusal()
    return bytes(collected)


async def _inflate(chunks: AsyncIterator[bytes], limit: int) -> AsyncIterator[bytes]:
    inflater = zlib.decompressobj(_GZIP_WINDOW)
    try:
        async for chunk in chunks:
            if inflater.eof and chunk:
                raise _bad_gzip("bytes follow the end of the gzip stream")
            left = chunk
            while left:
                # One byte above the limit is enough to know; a bomb is never inflated further.
                yield inflater.decompress(left, limit + 1)
                left = inflater.unconsumed_tail
    except zlib.error as error:
        raise _bad_gzip(str(error)) from None
    if not inflater.eof or inflater.unused_data:
        raise _bad_gzip("the gzip stream is truncated or followed by other bytes")


def _bad_gzip(reason: str) -> Problem:
    return Problem("invalid-body", f"body: not a gzip stream: {reason}", fields={"path": "body", "value": "gzip"})


class PlanBody:
    """The MessagePack body of a post: documents still encoded, so that a known signature costs no decoding."""

    __slots__ = ("profile", "request", "signature")

    def __init__(self, signature: str, request: bytes, profile: bytes | None) -> None:
        self.signature = signature
        self.request = request
        self.profile = profile


def read_plan_body(data: bytes) -> PlanBody:
    """Read ``{"profile": bin | nil, "request": bin, "signature": str}``; raises ``invalid-body`` naming the field.

    Nothing nests here, so lists and deeper maps are refused at their header, before anything is allocated for them.
    """
    try:
        msgpack.unpackb(data, max_array_len=0, max_map_len=8, max_ext_len=0, object_pairs_hook=_only_one())
        fields = Fields(unpack(data), "body")
        signature = fields.digest("signature")
        request = fields.raw("request")
        if type(request) is not bytes:
            raise DecodeError("body.request", request, "must be bytes: the canonical encoding of the request")
        profile = fields.raw("profile")
        if profile is not None and type(profile) is not bytes:
            raise DecodeError("body.profile", profile, "must be bytes or nil: the canonical encoding of the profile")
        fields.finish()
    except DecodeError as error:
        raise refuse(error, document="body").problem() from None
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        reason = str(error) or type(error).__name__
        problem = DecodeError("body", f"{len(data)} bytes", f"not a MessagePack map of texts and bytes: {reason}")
        raise refuse(problem).problem() from None
    return PlanBody(signature, request, profile)


def _only_one() -> Callable[[object], None]:
    """A hook that lets one map pass: children end before their parents, so the second call means nesting."""
    seen: list[bool] = []

    def hook(_pairs: object) -> None:
        if seen:
            raise DecodeError("body", "a map inside a map", "must be one map of texts and bytes")
        seen.append(True)

    return hook


async def read_document(request: Request, *, path: str = "body") -> Fields:
    """The body of a small call as fields to read, from either encoding; raises `Problem`."""
    encoding = body_encoding(request.headers.get("content-type"))
    data = await read_body(request, most=MAX_DOCUMENT_BYTES)
    try:
        decode: Callable[[bytes], WireValue] = unpack if encoding == "msgpack" else from_json
        return Fields(await beside(len(data) > DECODED_BYTES, decode, data), path)
    except DecodeError as error:
        raise refuse(error, document=path).problem() from None
