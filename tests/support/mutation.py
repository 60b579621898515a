"""Structure-aware mutation of valid documents: what a parser gets is almost right, so that it is read to its depth."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import msgpack

from bucketplan_core.errors import DecodeError, SignatureMismatch

REFUSALS = (DecodeError, SignatureMismatch)
"""All that a decoder may raise (`SchemaVersionError` is a `DecodeError`)."""

_LEAVES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    7,
    2**31,
    2**63 - 1,
    2**63,
    -(2**63),
    1.0,
    0.5,
    float("inf"),
    "",
    "fsdp",
    "sum",
    "9007199254740993",
    "é" * 3,
    "x" * 16_385,
    "a" * 64,
    b"",
    b"\x80",
    [],
    [0],
    [[]],
    ["a"],
    [None, 1.5],
    {},
    {"a": 1},
    [[[[[1]]]]],
)


def mutated_tree(rng: random.Random, tree: Any) -> Any:
    """A copy of `tree` with one to three places changed."""
    root = [copy.deepcopy(tree)]
    for _ in range(rng.randint(1, 3)):
        holder, key = _random_place(rng, root)
        rng.choice(_CHANGES)(rng, holder, key)
    return root[0]


def mutated_msgpack(rng: random.Random, data: bytes) -> bytes:
    """A document near the one that `data` encodes: its tree changed, its keys shuffled, or its bytes damaged."""
    kind = rng.random()
    if kind < 0.7:
        tree = mutated_tree(rng, msgpack.unpackb(data))
        return bytes(msgpack.packb(_sorted(tree) if rng.random() < 0.9 else _shuffled(rng, tree)))
    return _damaged(rng, data)


def mutated_json(rng: random.Random, data: bytes) -> bytes:
    """The same for JSON; bytes in a changed place become text."""
    if rng.random() < 0.8:
        return json.dumps(mutated_tree(rng, json.loads(data)), default=repr, skipkeys=True).encode()
    return _damaged(rng, data)


def returns_equal_or_refuses(decode: Callable[[bytes], Any], encode: Callable[[Any], bytes], data: bytes) -> bool:
    """Whether `data` was accepted; fails unless it then is exactly what it encodes to, or was refused properly."""
    try:
        document = decode(data)
    except REFUSALS:
        return False
    assert encode(document) == data
    assert decode(encode(document)) == document
    return True


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value, key=str)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


def _shuffled(rng: random.Random, value: Any) -> Any:
    if isinstance(value, dict):
        keys = list(value)
        rng.shuffle(keys)
        return {key: _shuffled(rng, value[key]) for key in keys}
    return [_shuffled(rng, item) for item in value] if isinstance(value, list) else value


def _damaged(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    kind = rng.randrange(4)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data + bytes(rng.randrange(256) for _ in range(rng.randint(1, 9)))
    if kind == 2:
        return data[:at] + bytes([rng.randrange(256)]) + data[at:]
    return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]


def _random_place(rng: random.Random, root: list[Any]) -> tuple[Any, Any]:
    holder: Any = root
    key: Any = 0
    while True:
        value = holder[key]
        if not isinstance(value, dict | list) or not value or rng.random() < 0.15:
            return holder, key
        holder = value
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))


def _replace(rng: random.Random, holder: Any, key: Any) -> None:
    holder[key] = copy.deepcopy(rng.choice(_LEAVES))


def _nudge(rng: random.Random, holder: Any, key: Any) -> None:
    if type(holder[key]) is int:
        # MessagePack itself ends at these two.
        holder[key] = min(max(holder[key] + rng.choice((-1, 1)), -(2**63)), 2**64 - 1)
    elif isinstance(holder[key], str):
        holder[key] += "x"
    else:
        _replace(rng, holder, key)


def _delete(rng: random.Random, holder: Any, key: Any) -> None:
    del holder[key]
    if not holder and isinstance(holder, list):
        holder.append(None)


def _add(rng: random.Random, holder: Any, key: Any) -> None:
    if isinstance(holder, dict):
        holder[rng.choice(("unknown", "", "schema", "kind", 5, b"k"))] = copy.deepcopy(rng.choice(_LEAVES))
    else:
        holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(rng.choice((*_LEAVES, holder[key]))))


def _swap(rng: random.Random, holder: Any, key: Any) -> None:
    other = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
    holder[key], holder[other] = holder[other], holder[key]


def _deepen(rng: random.Random, holder: Any, key: Any) -> None:
    for _ in range(rng.choice((1, 40))):
        holder[key] = [holder[key]]


_CHANGES = (_replace, _replace, _nudge, _nudge, _nudge, _delete, _add, _swap, _deepen)
