"""What crosses the socket between the server and a planning process: length-framed MessagePack, typed at both ends.

A frame is 8 bytes of length, big-endian, and one MessagePack document of plain values: nothing in it names code, so
reading one can build dataclasses that the reader asked for and nothing else. Unlike documents of the service, frames
may hold floats (places in drawings), which no hash covers.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgpack

__all__ = ["HEADER_BYTES", "FrameError", "body_length", "frame", "hints_of", "read_as", "to_tree", "unframe"]

T = TypeVar("T")
HEADER_BYTES = 8
_LEAVES = frozenset({type(None), bool, int, float, str, bytes})
_SEQUENCES = (list, tuple, Sequence)
_MAPS = (dict, Mapping)


class FrameError(Exception):
    """A frame does not hold what its reader expects; `path` names where, as in ``answer.buckets[3].id``."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem

    def __reduce__(self) -> tuple[type[FrameError], tuple[str, str]]:
        return type(self), (self.path, self.problem)


def frame(tree: object) -> bytes:
    """`tree`, plain values only, with its length in front; raises `TypeError` for anything else."""
    body = msgpack.packb(tree, use_bin_type=True, strict_types=True)
    return b"".join((len(body).to_bytes(HEADER_BYTES, "big"), body))


def body_length(header: bytes | bytearray) -> int:
    """How many bytes follow the `HEADER_BYTES` of a frame."""
    return int.from_bytes(header, "big")


def unframe(body: bytes | bytearray) -> Any:
    """The plain values of a frame's body; raises `FrameError`."""
    try:
        return msgpack.unpackb(body, raw=False, strict_map_key=True, ext_hook=_no_extension)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise FrameError("frame", f"not a frame: {error or type(error).__name__}") from None


def to_tree(value: object) -> Any:
    """`value` as plain values: dataclasses as maps of their fields, every sequence as a list."""
    kind = type(value)
    if kind in _LEAVES:
        return value
    if kind is list or kind is tuple:
        return [to_tree(item) for item in value]  # type: ignore[attr-defined]  # a list or tuple
    if isinstance(value, Mapping):
        return {key: to_tree(item) for key, item in value.items()}
    if is_dataclass(value):
        return {field.name: to_tree(getattr(value, field.name)) for field in fields(value)}
    for plain in (str, int, float):
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, Sequence):
        return [to_tree(item) for item in value]
    raise TypeError(f"{kind.__name__} does not cross to or from a planning process")


def read_as(kind: Any, tree: object, *, path: str) -> Any:
    """The value of type `kind` that `to_tree` made `tree` of; raises `FrameError` for any other tree.

    `kind` is built of dataclasses, `Literal`, unions of leaves or with None, tuples, lists and maps with text keys;
    what is annotated `Any` or `WireValue` stays plain.
    """
    return _reader(kind)(tree, path)


@cache
def hints_of(annotated: Any) -> Mapping[str, Any]:
    """The annotations of a function or dataclass, `WireValue` as `Any`."""
    return get_type_hints(annotated, localns={"WireValue": Any})


_Reader = Callable[[Any, str], Any]


@cache
def _reader(kind: Any) -> _Reader:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda tree, _path: tree
    if kind is float:
        return _leaf(float, int)
    if kind in _LEAVES:
        return _leaf(kind)
    if origin is Literal:
        return _one_of(arguments)
    if origin is Union or origin is types.UnionType:
        return _union(arguments)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return _tuple(arguments)
    if origin in _SEQUENCES:
        return _list(arguments[0], tuple if origin is tuple else list)
    if origin in _MAPS and arguments[0] is str:
        return _map(arguments[1])
    if is_dataclass(kind) and isinstance(kind, type):
        return _dataclass(kind)
    raise TypeError(f"{kind} does not cross to or from a planning process")


def _leaf(*kinds: type) -> _Reader:
    def read(tree: Any, path: str) -> Any:
        if type(tree) not in kinds:
            raise FrameError(path, f"{type(tree).__name__}, not {' or '.join(kind.__name__ for kind in kinds)}")
        return tree

    return read


def _one_of(values: tuple[object, ...]) -> _Reader:
    def read(tree: Any, path: str) -> Any:
        if type(tree) not in _LEAVES or tree not in values:
            raise FrameError(path, f"{tree!r:.80}, not one of {values}")
        return tree

    return read


def _union(kinds: tuple[Any, ...]) -> _Reader:
    if _LEAVES.issuperset(kinds):
        return _leaf(*kinds)
    others = [kind for kind in kinds if kind is not type(None)]
    if len(others) != 1 or len(others) == len(kinds):
        raise TypeError(f"a union of {kinds} cannot be told apart on the wire")
    inner = _reader(others[0])
    return lambda tree, path: None if tree is None else inner(tree, path)


def _tuple(kinds: tuple[Any, ...]) -> _Reader:
    readers = [_reader(kind) for kind in kinds]

    def read(tree: Any, path: str) -> Any:
        items = _checked(tree, list, path)
        if len(items) != len(readers):
            raise FrameError(path, f"{len(items)} items, not {len(readers)}")
        return tuple(
            reader(item, f"{path}[{at}]") for at, (reader, item) in enumerate(zip(readers, items, strict=True))
        )

    return read


def _list(kind: Any, build: Callable[[list[Any]], Any]) -> _Reader:
    reader = _reader(kind)
    leaf = kind if kind in _LEAVES and kind is not float else None

    def read(tree: Any, path: str) -> Any:
        items = _checked(tree, list, path)
        if leaf is not None and set(map(type, items)) <= {leaf}:
            return build(items)  # long lists of numbers and names are checked at once
        return build([reader(item, f"{path}[{at}]") for at, item in enumerate(items)])

    return read


def _map(kind: Any) -> _Reader:
    reader = _reader(kind)

    def read(tree: Any, path: str) -> Any:
        items = _checked(tree, dict, path)
        return {_checked(key, str, path): reader(item, f"{path}.{key}") for key, item in items.items()}

    return read


def _dataclass(kind: type) -> _Reader:
    hints = hints_of(kind)
    readers = {field.name: _reader(hints[field.name]) for field in fields(kind)}

    def read(tree: Any, path: str) -> Any:
        items = _checked(tree, dict, path)
        if items.keys() != readers.keys():
            odd = sorted(map(str, items.keys() ^ readers.keys()))
            raise FrameError(path, f"not the fields of {kind.__name__}: {', '.join(odd)[:200]}")
        return kind(**{name: reader(items[name], f"{path}.{name}") for name, reader in readers.items()})

    return read


def _checked(tree: Any, kind: type[T], path: str) -> T:
    if type(tree) is not kind:
        raise FrameError(path, f"{type(tree).__name__}, not {kind.__name__}")
    return tree


def _no_extension(code: int, _data: bytes) -> object:
    raise ValueError(f"extension type {code}")
