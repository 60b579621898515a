"""Reading a decoded tree field by field, with the path of whatever is wrong.

`Fields` consumes one map: every reader names a key, checks type and range, and `finish` refuses what nobody asked for.
`column_*` readers take a whole array, because candidates travel column-wise and come in thousands: one check over all
of it accepts, and only an array that fails is read entry by entry, for the path of the first wrong one.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from typing import TypeVar, cast

from bucketplan_core.errors import DecodeError, SchemaVersionError
from bucketplan_core.wire import MAX_INT, IntegerText, WireValue

__all__ = ["MAX_STRING_CHARACTERS", "Fields", "escaped", "has_controls", "is_digest"]

MAX_STRING_CHARACTERS = 16_384
"""Longest name: parameter paths of generated models reach kilobytes; nothing legitimate reaches this."""
_HEX_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_CONTROLS_BUT_LINES = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]|\r(?!\n)"
)
_INTS = frozenset({int})
_TEXTS = frozenset({str})
_FLAGS = frozenset({bool})
_LISTS = frozenset({list})
_TOP_BYTE = 7 if sys.byteorder == "little" else 0

T = TypeVar("T")


def is_digest(text: str) -> bool:
    """Whether `text` is a SHA-256 as documents and addresses have it: 64 lower-case hex characters."""
    return _HEX_DIGEST.match(text) is not None


def has_controls(text: str, *, lines: bool) -> bool:
    """Whether `text` holds what a person's text must not: characters that a terminal or a reader's eye obeys.

    These are the C0 and C1 controls (ECMA-48), the embeddings, overrides and isolates that reorder the text around them
    (Unicode UAX #9; marks such as U+200F and right-to-left letters are fine), and lone surrogates, which no encoding
    holds. With `lines`, ends of lines (LF, CR LF, U+2028, U+2029) and tabs are allowed.
    """
    return (_CONTROLS_BUT_LINES if lines else _CONTROLS).search(text) is not None


def escaped(text: str, *, lines: bool = False) -> str:
    """`text` for a terminal: whatever is not printable as Python's `repr` writes it; with `lines`, LF stays.

    For what others stored: a log may be older than a rule of `has_controls`.
    """
    if text.isprintable():
        return text
    kept = "\n" if lines else ""
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode("ascii") for c in text)


class Fields:
    """A map being read; `path` is where it stands in the document."""

    def __init__(self, value: WireValue, path: str) -> None:
        if not isinstance(value, dict):
            raise DecodeError(path, value, "must be a map")
        self._left: dict[str, WireValue] = dict(value)
        self.path = path

    def finish(self) -> None:
        """Refuse keys that no reader consumed."""
        for key in sorted(self._left, key=str):
            raise DecodeError(f"{self.path}.{key}", self._left[key], "unknown key")

    def peek(self, key: str) -> list[WireValue]:
        """The array under `key` without consuming it, empty when there is none: its length sizes other columns."""
        value = self._left.get(key)
        return value if isinstance(value, list) else []

    def raw(self, key: str) -> WireValue:
        if key not in self._left:
            raise DecodeError(self._at(key), None, "required key is missing")
        value: WireValue = self._left.pop(key)
        return value

    def schema(self, supported: Sequence[int]) -> int:
        value = self.raw("schema")
        if type(value) is not int or value not in supported:
            raise SchemaVersionError(self._at("schema"), value, supported)
        return value

    def integer(self, key: str, *, low: int = 0, high: int = MAX_INT) -> int:
        return _int(self.raw(key), self._at(key), low, high)

    def optional_integer(self, key: str, *, low: int = 0, high: int = MAX_INT) -> int | None:
        value = self.raw(key)
        return None if value is None else _int(value, self._at(key), low, high)

    def flag(self, key: str) -> bool:
        return _bool(self.raw(key), self._at(key))

    def text(self, key: str, *, choices: Collection[str] | None = None) -> str:
        return _str(self.raw(key), self._at(key), choices)

    def name(self, key: str) -> str:
        """Text that must not be empty."""
        value = self.text(key)
        if not value:
            raise DecodeError(self._at(key), value, "must not be empty")
        return value

    def plain_text(self, key: str, *, limit: int = MAX_STRING_CHARACTERS, lines: bool = False) -> str:
        """Text that is not empty and passes `has_controls`; with `lines` it may have several lines and tabs."""
        value = self.name(key)
        if len(value) > limit:
            raise DecodeError(self._at(key), f"{len(value)} characters", f"at most {limit} characters are allowed")
        if has_controls(value, lines=lines):
            raise DecodeError(self._at(key), value, "must hold no control characters")
        return value

    def optional_text(self, key: str) -> str | None:
        value = self.raw(key)
        return None if value is None else _str(value, self._at(key), None)

    def digest(self, key: str) -> str:
        return _digest(self.raw(key), self._at(key))

    def optional_digest(self, key: str) -> str | None:
        value = self.raw(key)
        return None if value is None else _digest(value, self._at(key))

    def submap(self, key: str) -> Fields:
        return Fields(self.raw(key), self._at(key))

    def optional_submap(self, key: str) -> Fields | None:
        value = self.raw(key)
        return None if value is None else Fields(value, self._at(key))

    def keys(self, *, limit: int) -> list[str]:
        """Keys not read yet, sorted: for maps whose keys are data."""
        if len(self._left) > limit:
            raise DecodeError(self.path, f"{len(self._left)} keys", f"at most {limit} keys are allowed")
        for key in self._left:
            if type(key) is not str or len(key) > MAX_STRING_CHARACTERS:
                raise DecodeError(self.path, key, f"keys must be text of at most {MAX_STRING_CHARACTERS} characters")
        return sorted(self._left)

    def array(self, key: str, *, limit: int) -> list[WireValue]:
        value = self.raw(key)
        if not isinstance(value, list):
            raise DecodeError(self._at(key), value, "must be a list")
        if len(value) > limit:
            raise DecodeError(self._at(key), f"{len(value)} entries", f"at most {limit} entries are allowed")
        return value

    def column_length(self, key: str, *, limit: int) -> int:
        """Entries of the column that sizes the others, 0 where it is missing: its own reader says so."""
        num_entries = len(self.peek(key))
        if num_entries > limit:
            raise DecodeError(self._at(key), f"{num_entries} entries", f"at most {limit} entries are allowed")
        return num_entries

    def column(self, key: str, length: int, read: Callable[[WireValue, str], T]) -> list[T]:
        """One array of `length` entries, each read by `read(value, path)`."""
        return self._each(key, self._column(key, length), read)

    def column_int(self, key: str, length: int, *, low: int = 0, high: int = MAX_INT) -> list[int]:
        values = self._column(key, length)
        if set(map(type, values)) <= _INTS and _all_between(cast("list[int]", values), low, high):
            return cast("list[int]", values)
        return self._each(key, values, lambda value, path: _int(value, path, low, high))

    def column_optional_int(self, key: str, length: int, *, low: int = 0, high: int = MAX_INT) -> list[int | None]:
        values = self._column(key, length)
        present = [value for value in values if value is not None]
        if set(map(type, present)) <= _INTS and _all_between(cast("list[int]", present), low, high):
            return cast("list[int | None]", values)
        return self._each(key, values, lambda value, path: None if value is None else _int(value, path, low, high))

    def column_bool(self, key: str, length: int) -> list[bool]:
        values = self._column(key, length)
        if set(map(type, values)) <= _FLAGS:
            return cast("list[bool]", values)
        return self._each(key, values, _bool)

    def column_str(self, key: str, length: int, *, choices: Collection[str] | None = None) -> list[str]:
        values = self._column(key, length)
        if set(map(type, values)) <= _TEXTS and _all_allowed(cast("list[str]", values), choices):
            return cast("list[str]", values)
        return self._each(key, values, lambda value, path: _str(value, path, choices))

    def column_optional_str(self, key: str, length: int, *, choices: Collection[str] | None = None) -> list[str | None]:
        values = self._column(key, length)
        present = [value for value in values if value is not None]
        if set(map(type, present)) <= _TEXTS and _all_allowed(cast("list[str]", present), choices):
            return cast("list[str | None]", values)
        return self._each(key, values, lambda value, path: None if value is None else _str(value, path, choices))

    def column_ints(self, key: str, length: int, *, low: int = 0, limit: int) -> list[tuple[int, ...]]:
        return list(map(tuple, self.column_int_lists(key, length, low=low, limit=limit)))

    def column_int_lists(self, key: str, length: int, *, low: int = 0, limit: int) -> Sequence[Sequence[int]]:
        """`column_ints` as the lists that were read: for a reader that may never need the rows."""
        values = self._column(key, length)
        inner = _flattened(values, limit)
        if (
            inner is not None
            and set(map(type, inner)) <= _INTS
            and _all_between(cast("list[int]", inner), low, MAX_INT)
        ):
            return cast("list[list[int]]", values)
        return self._each(key, values, lambda value, path: _ints(value, path, low, limit))

    def column_strs(self, key: str, length: int, *, limit: int) -> list[tuple[str, ...]]:
        values = self._column(key, length)
        inner = _flattened(values, limit)
        if inner is not None and set(map(type, inner)) <= _TEXTS and _all_allowed(cast("list[str]", inner), None):
            return list(map(tuple, cast("list[list[str]]", values)))
        return self._each(key, values, lambda value, path: _strs(value, path, limit))

    def _column(self, key: str, length: int) -> list[WireValue]:
        values = self.array(key, limit=MAX_INT)
        if len(values) != length:
            raise DecodeError(
                self._at(key), f"{len(values)} entries", f"must have {length} entries, as the other columns"
            )
        return values

    def _each(self, key: str, values: list[WireValue], read: Callable[[WireValue, str], T]) -> list[T]:
        return [read(value, f"{self._at(key)}[{index}]") for index, value in enumerate(values)]

    def _at(self, key: str) -> str:
        return f"{self.path}.{key}"


def _all_between(values: list[int], low: int, high: int) -> bool:
    if low == 0 and high == MAX_INT:
        # A third of the time of min and max: the array takes 0 to 2**64-1, and the top byte of each says whether the
        # sign bit of 64 bits stays free.
        try:
            return array("Q", values).tobytes()[_TOP_BYTE::8].isascii()
        except OverflowError:
            return False
    return not values or (low <= min(values) and max(values) <= high)


def _all_allowed(values: list[str], choices: Collection[str] | None) -> bool:
    if choices is not None:
        return set(values) <= set(choices)
    return not values or max(map(len, values)) <= MAX_STRING_CHARACTERS


def _flattened(values: list[WireValue], limit: int) -> list[WireValue] | None:
    """All entries of these lists in one, or None where one is no list or longer than `limit`."""
    if not set(map(type, values)) <= _LISTS:
        return None
    lists = cast("list[list[WireValue]]", values)
    inner = list(chain.from_iterable(lists))
    if len(inner) > limit and max(map(len, lists)) > limit:
        return None
    return inner


def _int(value: WireValue, path: str, low: int, high: int) -> int:
    if type(value) is IntegerText:
        value = int(value)
    if type(value) is not int:
        raise DecodeError(path, value, "must be an integer")
    if not low <= value <= high:
        raise DecodeError(path, value, f"must be between {low} and {high}")
    return value


def _bool(value: WireValue, path: str) -> bool:
    if type(value) is not bool:
        raise DecodeError(path, value, "must be true or false")
    return value


def _str(value: WireValue, path: str, choices: Collection[str] | None) -> str:
    if type(value) is IntegerText:
        value = str(value)
    if type(value) is not str:
        raise DecodeError(path, value, "must be text")
    if choices is not None:
        if value not in choices:
            raise DecodeError(path, value, f"must be one of {', '.join(sorted(choices))}")
    elif len(value) > MAX_STRING_CHARACTERS:
        raise DecodeError(path, f"{len(value)} characters", f"at most {MAX_STRING_CHARACTERS} characters are allowed")
    return value


def _digest(value: WireValue, path: str) -> str:
    if type(value) is not str or not is_digest(value):
        raise DecodeError(path, value, "must be 64 lower-case hex characters")
    return value


def _ints(value: WireValue, path: str, low: int, limit: int) -> tuple[int, ...]:
    return tuple(_int(item, f"{path}[{index}]", low, MAX_INT) for index, item in enumerate(_list(value, path, limit)))


def _strs(value: WireValue, path: str, limit: int) -> tuple[str, ...]:
    return tuple(_str(item, f"{path}[{index}]", None) for index, item in enumerate(_list(value, path, limit)))


def _list(value: WireValue, path: str, limit: int) -> list[WireValue]:
    if not isinstance(value, list):
        raise DecodeError(path, value, "must be a list")
    if len(value) > limit:
        raise DecodeError(path, f"{len(value)} entries", f"at most {limit} entries are allowed")
    return value
