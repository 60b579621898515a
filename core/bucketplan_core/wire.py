"""Canonical MessagePack and JSON: one byte string for one document, and strict reading of both.

What crosses a wire is a tree of ``None``, ``bool``, ``int``, ``str``, ``bytes``, lists and string-keyed maps. Floats do
not exist here: a float that reaches a hash makes two machines disagree. The canonical form has sorted keys and the shortest
encoding of every number and length; reading refuses whatever would not be written that way, so a document and its hash
are one to one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import msgpack

from bucketplan_core.errors import DecodeError

__all__ = [
    "MAX_INT",
    "WireValue",
    "digest_of",
    "from_json",
    "pack",
    "to_json",
    "unpack",
]

WireValue: TypeAlias = (
    "None | bool | int | str | bytes | Sequence[WireValue] | Mapping[str, WireValue]"
)

MAX_INT = 2**63 - 1
"""Largest integer on the wire: what every database and language of the fleet can hold signed."""
MIN_INT = -(2**63)
MAX_DEPTH = 32
MAX_SAFE_JSON_INT = 2**53 - 1
"""Integers above this lose digits in JavaScript; JSON for people shows them as strings (RFC 8259, section 6)."""

_ROOT = "$"


class _Pairs(list[Any]):
    """A map as it was read, with repeated keys still visible."""


def digest_of(data: bytes) -> str:
    """SHA-256 of `data` as 64 lower-case hex characters."""
    return hashlib.sha256(data).hexdigest()


def pack(value: WireValue) -> bytes:
    """Encode `value` canonically; raises `DecodeError` with the path of what has no canonical form."""
    return cast(bytes, msgpack.packb(_sorted(value, _ROOT, 0), use_bin_type=True))


def unpack(data: bytes) -> WireValue:
    """Decode canonical MessagePack; raises `DecodeError` for anything that `pack` would not have written."""
    try:
        raw = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=_Pairs,
            ext_hook=_refuse_extension,
        )
    except DecodeError:
        raise
    except msgpack.ExtraData as error:
        raise DecodeError(
            _ROOT, f"{len(error.extra)} bytes", "bytes follow the end of the document"
        ) from None
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise DecodeError(
            _ROOT, f"{len(data)} bytes", f"not a MessagePack document: {_reason(error)}"
        ) from None
    tree = _plain(raw, _ROOT, 0)
    if pack(tree) != data:
        raise DecodeError(
            _ROOT,
            f"{len(data)} bytes",
            "not canonical: keys must be sorted, numbers and lengths shortest",
        )
    return tree


def to_json(value: WireValue, *, indent: int | None = None) -> bytes:
    """Encode for people: sorted keys, bytes as hex, integers above 2**53-1 as strings."""
    text = json.dumps(
        _for_people(value),
        sort_keys=True,
        indent=indent,
        ensure_ascii=False,
        allow_nan=False,
    )
    return text.encode("utf-8", "backslashreplace")


def from_json(data: bytes) -> WireValue:
    """Decode JSON strictly: no floats, no repeated keys; integers may come as numbers only."""
    try:
        raw = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_Pairs,
            parse_float=_refuse_float,
            parse_constant=_refuse_float,
        )
    except DecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise DecodeError(
            _ROOT, f"{len(data)} bytes", f"not a JSON document: {_reason(error)}"
        ) from None
    return _plain(raw, _ROOT, 0)


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _refuse_extension(code: int, data: bytes) -> Any:
    raise DecodeError(
        _ROOT, f"extension type {code}", "extension types are not part of the format"
    )


def _refuse_float(text: str) -> Any:
    raise DecodeError(_ROOT, text, "numbers must be integers")


def _plain(value: Any, path: str, depth: int) -> WireValue:
    """Turn what a parser read into plain lists and dicts, refusing repeats, floats and depth with the path."""
    if depth > MAX_DEPTH:
        raise DecodeError(path, "...", f"nested deeper than {MAX_DEPTH} levels")
    kind = type(value)
    if kind is _Pairs:
        plain: dict[str, WireValue] = {}
        for key, item in value:
            if type(key) is not str:
                raise DecodeError(path, key, "keys must be strings")
            if key in plain:
                raise DecodeError(f"{path}.{key}", key, "key appears twice")
            plain[key] = _plain(item, f"{path}.{key}", depth + 1)
        return plain
    if kind is list:
        if all(type(item) is int for item in value):
            for index, item in enumerate(value):
                if not MIN_INT <= item <= MAX_INT:
                    raise DecodeError(
                        f"{path}[{index}]", item, "integer outside [-2**63, 2**63-1]"
                    )
            return cast(WireValue, value)
        return [
            _plain(item, f"{path}[{index}]", depth + 1)
            for index, item in enumerate(value)
        ]
    if kind is int:
        if not MIN_INT <= value <= MAX_INT:
            raise DecodeError(path, value, "integer outside [-2**63, 2**63-1]")
        return cast(int, value)
    if kind is float:
        raise DecodeError(path, value, "numbers must be integers")
    if kind is str:
        _check_text(value, path)
        return cast(str, value)
    if value is None or kind is bool or kind is bytes:
        return cast("bool | bytes | None", value)
    raise DecodeError(path, value, f"type {kind.__name__} is not part of the format")


def _check_text(value: str, path: str) -> None:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise DecodeError(
            path, value, "text must be valid Unicode (lone surrogate found)"
        ) from None


def _sorted(value: WireValue, path: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise DecodeError(path, "...", f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, Mapping):
        for key in value:
            if type(key) is not str:
                raise DecodeError(path, key, "keys must be strings")
        return {
            key: _sorted(value[key], f"{path}.{key}", depth + 1)
            for key in sorted(value)
        }
    if isinstance(value, str):
        _check_text(value, path)
        return value
    if value is None or isinstance(value, bool | bytes):
        return value
    if isinstance(value, int):
        if not MIN_INT <= value <= MAX_INT:
            raise DecodeError(path, value, "integer outside [-2**63, 2**63-1]")
        return int(value)
    if isinstance(value, Sequence):
        if all(type(item) is int and MIN_INT <= item <= MAX_INT for item in value):
            return list(value)
        return [
            _sorted(item, f"{path}[{index}]", depth + 1)
            for index, item in enumerate(value)
        ]
    raise DecodeError(
        path, value, f"type {type(value).__name__} is not part of the format"
    )


def _for_people(value: WireValue) -> Any:
    if isinstance(value, Mapping):
        return {key: _for_people(item) for key, item in value.items()}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, int):
        return value if abs(value) <= MAX_SAFE_JSON_INT else str(value)
    return [_for_people(item) for item in value]
