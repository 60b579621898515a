"""Canonical MessagePack and JSON: one byte string for one document, and strict reading of both.

What crosses a wire is a tree of ``None``, ``bool``, ``int``, ``str``, ``bytes``, lists and string-keyed maps. Floats do
not exist here: a float that reaches a hash makes two machines disagree. The canonical form has sorted keys and the
shortest encoding of every number and length; reading refuses whatever would not be written that way, so a document and
its hash are one to one. What is accepted is found by checks of whole lists; only what is refused is walked value by
value, for the path of the culprit.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import ge
from typing import Any, TypeAlias, cast

import msgpack

from bucketplan_core.errors import DecodeError

__all__ = [
    "MAX_INT",
    "IntegerText",
    "WireValue",
    "digest_of",
    "from_json",
    "pack",
    "to_json",
    "unpack",
    "unpack_for_reader",
]

WireValue: TypeAlias = "None | bool | int | str | bytes | Sequence[WireValue] | Mapping[str, WireValue]"

MAX_INT = 2**63 - 1
"""Largest integer on the wire: what every database and language of the fleet can hold signed."""
MIN_INT = -(2**63)
MAX_DEPTH = 32
MAX_SAFE_JSON_INT = 2**53 - 1
"""Integers above this lose digits in JavaScript; JSON for people shows them as strings (RFC 8259, section 6)."""

_ROOT = "$"
_OUTSIDE = "integer outside [-2**63, 2**63-1]"
_INT_CHARACTERS = len(str(MIN_INT))
_FEWEST_LARGE_CHARACTERS = len(str(MAX_SAFE_JSON_INT))
_INTEGER = re.compile(r"-?[1-9][0-9]*\Z", re.ASCII)
_LEAVES = frozenset({int, str, bool, bytes, type(None)})
_ONLY_TEXT = frozenset({str})
_ONLY_LISTS: frozenset[type] = frozenset({list})
_ONLY_SEQUENCES: frozenset[type] = frozenset({list, tuple})


class IntegerText(str):
    """Text of a JSON document that `to_json` may have written for an integer above `MAX_SAFE_JSON_INT`.

    It is plain text to whoever reads text; a reader of integers takes its value, so that JSON written here reads back.
    """

    __slots__ = ()


class _Pairs(list[Any]):
    """A map as it was read, with repeated keys still visible."""


@dataclass(frozen=True, slots=True)
class _Refused:
    """Stands where a parser met something outside the format, until its path is known."""

    value: object
    reason: str


def digest_of(data: bytes) -> str:
    """SHA-256 of `data` as 64 lower-case hex characters."""
    return hashlib.sha256(data).hexdigest()


def pack(value: WireValue, *, root: str = _ROOT) -> bytes:
    """Encode `value` canonically; raises `DecodeError` with the path, below `root`, of what has no canonical form."""
    return cast(bytes, msgpack.packb(_sorted(value, root, 0), use_bin_type=True))


def unpack(data: bytes, *, root: str = _ROOT) -> WireValue:
    """Decode canonical MessagePack; raises `DecodeError` for anything that `pack` would not have written.

    Paths in errors start with `root`.
    """
    try:
        tree = msgpack.unpackb(data, raw=False, strict_map_key=True)
        # The parser keeps keys in the order in which they came, and a repeated key shrinks the map: with sorted keys
        # and nothing foreign in it, only a canonical document is written back as the same bytes.
        if _is_clean(tree, 0) and _repacked(tree, len(data)) == data:
            return cast(WireValue, tree)
    except (ValueError, TypeError, RecursionError, OverflowError, msgpack.UnpackException):
        pass  # the slow way names what is wrong
    return _unpack_with_paths(data, root)


def unpack_for_reader(data: bytes) -> WireValue:
    """`unpack` for a reader that checks type and range of everything in every list, as columns are read by `Fields`.

    A third of the time of reading a plan was spent on looking at each entry twice. Raises `DecodeError` without a path
    for what is not canonical, and leaves entries of lists to the reader; `unpack` names what is wrong.
    """
    try:
        tree = msgpack.unpackb(data, raw=False, strict_map_key=True)
        if _is_clean(tree, 0, into_lists=False) and _repacked(tree, len(data)) == data:
            return cast(WireValue, tree)
    except (ValueError, TypeError, RecursionError, OverflowError, msgpack.UnpackException):
        pass
    raise DecodeError(_ROOT, f"{len(data)} bytes", "not a canonical document")


def _unpack_with_paths(data: bytes, root: str) -> WireValue:
    """What `unpack` guarantees, at a quarter of its speed; finds the path of whatever is wrong."""
    try:
        raw = msgpack.unpackb(
            data, raw=False, strict_map_key=False, object_pairs_hook=_Pairs, ext_hook=_refused_extension
        )
    except msgpack.ExtraData as error:
        raise DecodeError(root, f"{len(error.extra)} bytes", "bytes follow the end of the document") from None
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise DecodeError(root, f"{len(data)} bytes", f"not a MessagePack document: {_reason(error)}") from None
    tree = _plain(raw, root, 0)
    if pack(tree, root=root) != data:
        raise DecodeError(
            root, f"{len(data)} bytes", "not canonical: keys must be sorted, numbers and lengths shortest"
        )
    return tree


def to_json(value: WireValue, *, indent: int | None = None) -> bytes:
    """Encode for people: sorted keys, bytes as hex, integers above 2**53-1 as strings; `from_json` reads them back."""
    text = json.dumps(_for_people(value), sort_keys=True, indent=indent, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace")


def from_json(data: bytes, *, root: str = _ROOT) -> WireValue:
    """Decode JSON strictly: no floats, no repeated keys; raises `DecodeError` with the path below `root`.

    Strings that spell an integer above 2**53-1 come as `IntegerText`.
    """
    try:
        raw = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_Pairs,
            parse_int=_json_integer,
            parse_float=_refused_float,
            parse_constant=_refused_float,
        )
    except (ValueError, RecursionError) as error:
        raise DecodeError(root, f"{len(data)} bytes", f"not a JSON document: {_reason(error)}") from None
    return _plain(raw, root, 0, integer_texts=True)


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _refused_extension(code: int, _data: bytes) -> _Refused:
    return _Refused(f"extension type {code}", "extension types are not part of the format")


def _refused_float(text: str) -> _Refused:
    return _Refused(text, "numbers must be integers")


def _json_integer(text: str) -> int | _Refused:
    # Python refuses to parse thousands of digits, and without a path.
    return int(text) if len(text) <= _INT_CHARACTERS else _Refused(text, _OUTSIDE)


def _repacked(tree: Any, num_bytes: int) -> bytes:
    """What `tree` is as MessagePack; `num_bytes` is what it is expected to take.

    The packer's own first buffer has 256 KiB: fetching its pages took longer than packing a plan of 50 KB into them.
    """
    packer = msgpack.Packer(use_bin_type=True, strict_types=True, buf_size=num_bytes + 64)
    return cast(bytes, packer.pack(tree))


def _is_clean(tree: Any, depth: int, *, into_lists: bool = True) -> bool:
    """Whether `tree`, as parsed, holds sorted string keys and allowed values only; whole lists are checked at once."""
    kind = type(tree)
    if depth > MAX_DEPTH:
        return False
    if kind is dict:
        keys = list(tree)
        if set(map(type, keys)) - _ONLY_TEXT or any(map(ge, keys, keys[1:])):
            return False
        return all(_is_clean(item, depth + 1, into_lists=into_lists) for item in tree.values())
    if kind is list:
        if not into_lists:
            return True
        kinds = set(map(type, tree))
        if kinds <= _LEAVES:
            return depth < MAX_DEPTH and _below_limit(tree, kinds)
        if kinds == _ONLY_LISTS:
            inner = list(chain.from_iterable(tree))
            inner_kinds = set(map(type, inner))
            if inner_kinds <= _LEAVES:
                return depth + 1 < MAX_DEPTH and _below_limit(inner, inner_kinds)
        return all(_is_clean(item, depth + 1) for item in tree)
    return kind in _LEAVES and (kind is not int or MIN_INT <= tree <= MAX_INT)


def _below_limit(items: list[Any], kinds: set[type]) -> bool:
    """Whether no integer among `items`, leaves all, is above 63 bits; MessagePack has none below -2**63."""
    return int not in kinds or max(_integers(items, kinds)) <= MAX_INT


def _in_range(items: list[Any], kinds: set[type]) -> bool:
    """Whether the integers among `items`, leaves all, fit 64 bits with a sign."""
    return int not in kinds or (min(_integers(items, kinds)) >= MIN_INT and _below_limit(items, kinds))


def _integers(items: list[Any], kinds: set[type]) -> list[int]:
    return items if len(kinds) == 1 else [item for item in items if type(item) is int]


def _plain(value: Any, path: str, depth: int, *, integer_texts: bool = False) -> WireValue:
    """Turn what a parser read into plain lists and dicts, refusing repeats, floats and depth with the path."""
    if depth > MAX_DEPTH:
        raise DecodeError(path, "...", f"nested deeper than {MAX_DEPTH} levels")
    kind = type(value)
    if kind is _Pairs:
        plain: dict[str, WireValue] = {}
        for key, item in value:
            if type(key) is not str:
                raise DecodeError(path, key, "keys must be strings")
            _check_text(key, path)
            if key in plain:
                raise DecodeError(f"{path}.{key}", key, "key appears twice")
            plain[key] = _plain(item, f"{path}.{key}", depth + 1, integer_texts=integer_texts)
        return plain
    if kind is list:
        return [
            _plain(item, f"{path}[{index}]", depth + 1, integer_texts=integer_texts) for index, item in enumerate(value)
        ]
    if kind is int:
        if not MIN_INT <= value <= MAX_INT:
            raise DecodeError(path, value, _OUTSIDE)
        return cast(int, value)
    if kind is str:
        _check_text(value, path)
        return IntegerText(value) if integer_texts and _spells_large_integer(value) else cast(str, value)
    if value is None or kind is bool or kind is bytes:
        return cast("bool | bytes | None", value)
    if kind is _Refused:
        raise DecodeError(path, value.value, value.reason)
    if kind is float:
        raise DecodeError(path, value, "numbers must be integers")
    raise DecodeError(path, value, f"type {kind.__name__} is not part of the format")


def _spells_large_integer(text: str) -> bool:
    return (
        _FEWEST_LARGE_CHARACTERS <= len(text) <= _INT_CHARACTERS
        and _INTEGER.match(text) is not None
        and abs(int(text)) > MAX_SAFE_JSON_INT
        and MIN_INT <= int(text) <= MAX_INT
    )


def _check_text(value: str, path: str) -> None:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise DecodeError(path, value, "text must be valid Unicode (lone surrogate found)") from None


def _sorted(value: WireValue, path: str, depth: int) -> Any:
    """`value` as plain lists and dicts with sorted keys; the values of a list of leaves are checked at once."""
    if depth > MAX_DEPTH:
        raise DecodeError(path, "...", f"nested deeper than {MAX_DEPTH} levels")
    kind = type(value)
    if kind in _LEAVES:
        if type(value) is int and not MIN_INT <= value <= MAX_INT:
            raise DecodeError(path, value, _OUTSIDE)
        if type(value) is str:
            _check_text(value, path)
        return value
    if kind is list or kind is tuple:
        return _sorted_list(cast("Sequence[WireValue]", value), path, depth)
    if isinstance(value, Mapping):
        for key in value:
            if type(key) is not str:
                raise DecodeError(path, key, "keys must be strings")
            _check_text(key, path)
        return {key: _sorted(value[key], f"{path}.{key}", depth + 1) for key in sorted(value)}
    if isinstance(value, str):
        return _sorted(str(value), path, depth)
    if isinstance(value, int):
        return _sorted(int(value), path, depth)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return _sorted_list(value, path, depth)
    raise DecodeError(path, value, f"type {kind.__name__} is not part of the format")


def _sorted_list(value: Sequence[WireValue], path: str, depth: int) -> list[Any]:
    kinds = set(map(type, value))
    if kinds <= _LEAVES and _is_encodable(value, kinds) and depth < MAX_DEPTH:
        return list(value)
    if kinds <= _ONLY_SEQUENCES and depth + 1 < MAX_DEPTH:
        inner: list[Any] = list(chain.from_iterable(cast("Sequence[list[Any]]", value)))
        inner_kinds = set(map(type, inner))
        if inner_kinds <= _LEAVES and _is_encodable(inner, inner_kinds):
            return list(value)
    return [_sorted(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]


def _is_encodable(items: Sequence[Any], kinds: set[type]) -> bool:
    """Whether these leaves have a canonical form: integers of 64 bits, text without lone surrogates."""
    if str in kinds:
        try:
            "".join(items if len(kinds) == 1 else [item for item in items if type(item) is str]).encode("utf-8")
        except UnicodeEncodeError:
            return False
    return _in_range(list(items), kinds)


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
