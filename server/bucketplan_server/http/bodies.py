"""Reading request bodies: capped while they arrive and while they inflate, never after."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Callable

import msgpack
from starlette.requests import Request

from bucketplan_core.errors import DecodeError
from bucketplan_core.fields import Fields
from bucketplan_core.wire import WireValue, from_json, unpack
from bucketplan_server.beside import DECODED_BYTES, beside
from bucketplan_server.http.intake import Intake
from bucketplan_server.http.negotiation import body_encoding
from bucketplan_server.problems import Problem, refuse

__all__ = ["PlanBody", "read_body", "read_document", "read_plan_body", "too_large"]

_GZIP_WINDOW = 16 + zlib.MAX_WBITS
_INFLATED_BYTES = 2**17
"""Inflated at a time: 0.3 ms of the event loop, and no more beside the body."""
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

    Raises ``body-too-large`` at the first byte above the limit, without reading on, ``busy`` where the bodies of all
    calls are too many bytes, ``body-timeout``, and ``unauthorized`` where the caller's token ended while the body came.
    """
    parts = request.app.state.parts
    data = await _read(request, parts.intake, parts.settings.max_body_bytes, most)
    parts.access.check_again(request.scope)
    return data


async def _read(request: Request, intake: Intake, set_limit: int, most: int | None) -> bytes:
    limit = set_limit if most is None else min(most, set_limit)
    of_call = limit < set_limit
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    pieces, inflated = intake.parts(request), False
    if encoding in ("gzip", "x-gzip"):
        pieces, inflated = _inflate(pieces, limit), True
    elif encoding not in ("", "identity"):
        raise Problem(
            "unsupported-media-type",
            f"Content-Encoding is {encoding!r}; send the body as it is or as gzip",
            fields={"path": "Content-Encoding", "value": encoding},
            headers={"Accept-Encoding": "gzip, identity", "Connection": "close"},
        )
    collected = bytearray()
    async for piece in pieces:
        if len(collected) + len(piece) > limit:
            raise too_large(limit, of_call=of_call, inflated=inflated)
        intake.take(request.scope, len(piece))
        collected += piece
    return bytes(collected)


async def _inflate(parts: AsyncIterator[bytes], limit: int) -> AsyncIterator[bytes]:
    """The content of a gzip stream in small pieces, at most one byte more than `limit`: a bomb is inflated no further.

    What one part begins with is inflated on the loop; what is left of it then is large, and goes to a thread.
    """
    inflater = zlib.decompressobj(_GZIP_WINDOW)
    num_bytes = 0
    try:
        async for part in parts:
            if inflater.eof:
                raise _bad_gzip("bytes follow the end of the gzip stream")
            left, is_large = part, False
            while left and num_bytes <= limit:
                most = min(_INFLATED_BYTES, limit + 1 - num_bytes)
                piece = await beside(is_large, inflater.decompress, left, most)
                num_bytes += len(piece)
                yield piece
                left, is_large = inflater.unconsumed_tail, True
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
