"""Canonical MessagePack and JSON: one document, one byte string, and the path of whatever is wrong."""

from __future__ import annotations

import json
import math
from itertools import permutations
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketplan_core import wire
from bucketplan_core.errors import DecodeError
from bucketplan_core.wire import MAX_DEPTH, MAX_INT, IntegerText, from_json, pack, to_json, unpack
from tests.support.counts import count

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_LEAF = st.none() | st.booleans() | st.integers(-(2**63), MAX_INT) | _TEXT | st.binary(max_size=8)
_TREES = st.recursive(
    _LEAF, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(_TEXT, inner, max_size=5), max_leaves=25
)


def _nested(depth: int, leaf: Any = 1) -> Any:
    for _ in range(depth):
        leaf = [leaf]
    return leaf


@given(_TREES)
@settings(max_examples=count(test=120, soak=20_000))
def test_what_is_packed_is_unpacked_as_it_was(tree: Any) -> None:
    assert unpack(pack(tree)) == tree


@given(_TREES)
@settings(max_examples=count(test=120, soak=20_000))
def test_the_slow_reader_reads_what_the_fast_one_reads(tree: Any) -> None:
    assert wire._unpack_with_paths(pack(tree), "$") == tree


@given(st.binary(max_size=40) | _TREES.map(msgpack.packb))
@settings(max_examples=count(test=300, soak=100_000))
def test_fast_and_slow_reader_accept_the_same_bytes(data: bytes) -> None:
    def outcome(read: Any) -> Any:
        try:
            return "read", read()
        except DecodeError as refusal:
            return "refused", refusal.path

    assert outcome(lambda: unpack(data)) == outcome(lambda: wire._unpack_with_paths(data, "$"))


@given(_TREES)
@settings(max_examples=count(test=120, soak=20_000))
def test_json_reads_back_but_for_bytes(tree: Any) -> None:
    def as_read(value: Any) -> Any:
        if isinstance(value, bytes):
            return value.hex()
        if isinstance(value, dict):
            return {key: as_read(item) for key, item in value.items()}
        if isinstance(value, list):
            return [as_read(item) for item in value]
        return str(value) if type(value) is int and abs(value) > 2**53 - 1 else value

    assert from_json(to_json(tree)) == as_read(tree)


def test_the_order_in_which_keys_were_put_does_not_show() -> None:
    encoded = {pack(dict(order)) for order in permutations({"b": 1, "a": [2], "aa": {"y": 1, "x": 2}}.items())}
    assert encoded == {msgpack.packb({"a": [2], "aa": {"x": 2, "y": 1}, "b": 1})}


@pytest.mark.parametrize(
    ("data", "path", "reason"),
    [
        (b"", "$", "not a MessagePack document"),
        (b"\xc1", "$", "not a MessagePack document"),
        (pack({"a": [1, 2]})[:-1], "$", "not a MessagePack document"),
        (pack({"a": 1}) + b"\x00", "$", "bytes follow the end"),
        (msgpack.packb({"b": 1, "a": 2}), "$", "not canonical"),
        (b"\x81\xa1a\xcc\x01", "$", "not canonical"),  # 1 in two bytes
        (b"\x81\xd9\x01a\x01", "$", "not canonical"),  # the key's length in two bytes
        (b"\xdc\x00\x01\x01", "$", "not canonical"),  # the list's length in three bytes
        (b"\x82\xa1a\x01\xa1a\x02", "$.a", "key appears twice"),
        (b"\x81\xa1a\x82\xa1b\x01\xa1b\x01", "$.a.b", "key appears twice"),
        (msgpack.packb({"a": [1, 2.0]}), "$.a[1]", "numbers must be integers"),
        (msgpack.packb({"a": [[1], [math.nan]]}), "$.a[1][0]", "numbers must be integers"),
        (msgpack.packb({"a": [1, 2**63]}), "$.a[1]", "integer outside"),
        (msgpack.packb([[1], [2**64 - 1]]), "$[1][0]", "integer outside"),
        (msgpack.packb({"a": {5: 1}}), "$.a", "keys must be strings"),
        (msgpack.packb({"a": {b"k": 1}}), "$.a", "keys must be strings"),
        (msgpack.packb({"a": [msgpack.ExtType(4, b"x")]}), "$.a[0]", "extension types"),
        (msgpack.packb({"a": msgpack.Timestamp(1)}), "$.a", "type Timestamp"),
        (b"\x91\xa1\xff", "$", "not a MessagePack document"),  # no UTF-8
        (msgpack.packb(_nested(MAX_DEPTH + 1)), "$" + "[0]" * (MAX_DEPTH + 1), "nested deeper"),
        (b"\x91" * 100_000 + b"\x00", "$", "not a MessagePack document"),
        (b"\x81\xa1a" * 5_000 + b"\x00", "$", "not a MessagePack document"),
        (b"\xdd\xff\xff\xff\xff", "$", "not a MessagePack document"),  # a list of four billion entries
    ],
)
def test_messagepack_that_pack_would_not_write_is_refused_where_it_is_wrong(
    data: bytes, path: str, reason: str
) -> None:
    with pytest.raises(DecodeError) as refusal:
        unpack(data)
    assert refusal.value.path == path
    assert reason in refusal.value.reason


@pytest.mark.parametrize(
    ("data", "path", "reason"),
    [
        (b"", "$", "not a JSON document"),
        (b"{", "$", "not a JSON document"),
        (b"\xff", "$", "not a JSON document"),
        (b"\xef\xbb\xbf{}", "$", "not a JSON document"),
        (b"{} {}", "$", "not a JSON document"),
        (b'{"a": 1, "a": 1}', "$.a", "key appears twice"),
        (b'{"a": [1, 1.5]}', "$.a[1]", "numbers must be integers"),
        (b'{"a": {"b": 1e3}}', "$.a.b", "numbers must be integers"),
        (b'{"a": NaN}', "$.a", "numbers must be integers"),
        (b'{"a": [-Infinity]}', "$.a[0]", "numbers must be integers"),
        (b'{"a": [9223372036854775808]}', "$.a[0]", "integer outside"),
        (b'{"a": [' + b"9" * 5_000 + b"]}", "$.a[0]", "integer outside"),
        (b'{"a": ["\\ud800"]}', "$.a[0]", "valid Unicode"),
        (b'{"\\ud800": 1}', "$", "valid Unicode"),
        (json.dumps(_nested(MAX_DEPTH + 1)).encode(), "$" + "[0]" * (MAX_DEPTH + 1), "nested deeper"),
        (b"[" * 200_000, "$", "not a JSON document"),
    ],
)
def test_json_is_refused_where_it_is_wrong(data: bytes, path: str, reason: str) -> None:
    with pytest.raises(DecodeError) as refusal:
        from_json(data)
    assert refusal.value.path == path
    assert reason in refusal.value.reason


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": 1.0}, "$.a"),
        ({"a": [1, 2**63]}, "$.a[1]"),
        ({"a": [[1], [-(2**63) - 1]]}, "$.a[1][0]"),
        ({"a": ["b", "\ud800"]}, "$.a[1]"),
        ({"a": [["\udfff"]]}, "$.a[0][0]"),
        ({"\ud800": 1}, "$"),
        ({1: 2}, "$"),
        ({"a": {3}}, "$.a"),
        ({"a": object()}, "$.a"),
        ({"a": bytearray(b"x")}, "$.a"),
        (_nested(MAX_DEPTH + 1), "$" + "[0]" * (MAX_DEPTH + 1)),
    ],
)
def test_what_has_no_canonical_form_is_not_packed(value: Any, path: str) -> None:
    with pytest.raises(DecodeError) as refusal:
        pack(value)
    assert refusal.value.path == path


@pytest.mark.parametrize("leaf", [1, "a", [], {}, [[]]])
def test_the_deepest_allowed_nesting_is_read_and_one_more_is_not(leaf: Any) -> None:
    tree = _nested(MAX_DEPTH - (1 if leaf == [[]] else 0), leaf)
    assert unpack(pack(tree)) == tree
    with pytest.raises(DecodeError, match="nested deeper"):
        unpack(msgpack.packb([tree]))


def test_tuples_and_lists_are_one_document() -> None:
    assert pack({"a": (1, (2, 3)), "b": [("x",), ["y"]]}) == pack({"a": [1, [2, 3]], "b": [["x"], ["y"]]})


def test_paths_start_at_the_root_that_the_caller_names() -> None:
    for read, data in ((unpack, msgpack.packb({"a": 1.5})), (from_json, b'{"a": 1.5}')):
        with pytest.raises(DecodeError, match=r"^request\.a: numbers must be integers"):
            read(data, root="request")
    with pytest.raises(DecodeError, match=r"^request\.a: "):
        pack({"a": 1.5}, root="request")


def test_json_shows_integers_that_javascript_would_round_as_text_and_takes_them_back() -> None:
    assert to_json({"a": 2**53 - 1, "b": 2**53, "c": -(2**53)}) == (
        b'{"a": 9007199254740991, "b": "9007199254740992", "c": "-9007199254740992"}'
    )
    read = from_json(to_json([2**53, MAX_INT, -MAX_INT - 1]))
    assert [type(value) for value in read] == [IntegerText] * 3
    assert [int(value) for value in read] == [2**53, MAX_INT, -MAX_INT - 1]
    assert all(type(value) is str for value in from_json(b'["9007199254740991", "09007199254740993", "1", "x"]'))
