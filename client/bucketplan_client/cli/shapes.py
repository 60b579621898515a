"""What each command reads of an answer, checked when it comes: JSON of another shape is no planning server's answer.

A shape is a type; a map of the keys that must fit, beside which there may be others; a list of one shape, that of every
entry; or a tuple of shapes, one of which must fit. A key that is missing counts as null.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

from bucketplan_client.answers import Answer
from bucketplan_client.errors import FOREIGN_REMEDY, CorruptAnswer, Where
from bucketplan_core.errors import DecodeError
from bucketplan_core.plan import Decision
from bucketplan_core.request import Request
from bucketplan_core.wire import IntegerText, WireValue

__all__ = [
    "ACTIVATED",
    "ATTEMPT",
    "ATTEMPTS",
    "DIFF",
    "EVENTS",
    "EXPLANATION",
    "PLAN",
    "PLANS",
    "REPLANNED",
    "REQUEST",
    "STORED_PROFILE",
    "TRACE",
    "VERIFIED",
    "Shape",
    "checked",
]

Shape: TypeAlias = "type | None | dict[str, Shape] | list[Shape] | tuple[Shape, ...]"

_MAYBE_COUNT: Final[Shape] = (int, None)
_BECAUSE: Final[Shape] = {"because": str}
_BUCKET: Final[dict[str, Shape]] = {
    "id": str,
    "members": [str],
    "bytes": int,
    "launch_gap": int,
    "wait_gap": int,
    "exposed_ns": int,
}

PLANS: Final[Shape] = {"plans": [{"signature": str, "created_ns": _MAYBE_COUNT}], "next": (str, None)}
PLAN: Final[Shape] = {"digest": str, "decision": Decision, "assessment": dict}
REQUEST: Final[Shape] = Request
DIFF: Final[Shape] = {
    "request": {"signature_a": str, "signature_b": str},
    "decision": {"digest_a": str, "digest_b": str},
}
EXPLANATION: Final[Shape] = {
    "step": {"step_ns": int, "bound_ns": int, "exposed_ns": int},
    "limits": {"memory_budget_bytes": _MAYBE_COUNT, "because": str, "peak_bytes": int},
    "buckets": [({**_BUCKET, "alone": str}, {**_BUCKET, "opened": _BECAUSE, "closed": _BECAUSE})],
}
TRACE: Final[Shape] = {"traceEvents": [dict]}
ATTEMPTS: Final[Shape] = {"attempts": [{"attempt": int, "epoch_id": str, "opened_by": str, "opened_ns": int}]}
ATTEMPT: Final[Shape] = {
    "job": str,
    "attempt": int,
    "epoch_id": str,
    "opening": {"state": str, "stalled": bool},
    "groups": [{"state": str, "slots": ([dict], None)}],
}
REPLANNED: Final[Shape] = {"revision": int, "signature": str}
ACTIVATED: Final[Shape] = {"revision": _MAYBE_COUNT, "before": _MAYBE_COUNT, "signature": str}
EVENTS: Final[Shape] = {"events": [{"seq": int, "at_ns": int, "kind": str}]}
VERIFIED: Final[Shape] = {"holds": bool, "num_events": int, "head": str, "findings": [dict]}
STORED_PROFILE: Final[Shape] = {"version": int, "digest": str}


def checked(answer: Answer, shape: Shape, *, where: Where) -> Any:
    """The document in `answer`; raises `CorruptAnswer` with the path of the first thing that does not fit `shape`."""
    try:
        document = answer.body
        _check(document, shape, "$")
    except DecodeError as error:
        raise CorruptAnswer(str(error), num_tries=answer.num_tries, where=where, remedy=FOREIGN_REMEDY) from error
    return document


def _check(value: WireValue, shape: Shape, path: str) -> None:
    if shape is Decision or shape is Request:
        shape.from_wire(value, path)
    elif isinstance(shape, tuple):
        _check_one_of(value, shape, path)
    elif isinstance(shape, dict):
        if not isinstance(value, dict):
            raise DecodeError(path, value, "must be a map")
        for key, inner in shape.items():
            _check(value.get(key), inner, f"{path}.{key}")
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise DecodeError(path, value, "must be a list")
        for index, entry in enumerate(value):
            _check(entry, shape[0], f"{path}[{index}]")
    elif not _is(value, shape):
        raise DecodeError(path, value, f"must be {_NAMES[shape]}")


def _check_one_of(value: WireValue, shapes: tuple[Shape, ...], path: str) -> None:
    wrong: DecodeError | None = None
    for shape in shapes:
        try:
            return _check(value, shape, path)
        except DecodeError as error:
            wrong = wrong or error
    assert wrong is not None, "a tuple of shapes holds some"
    raise wrong


def _is(value: WireValue, kind: type | None) -> bool:
    if kind is int:
        # JSON has integers above 2**53 as texts.
        return type(value) is int or isinstance(value, IntegerText)
    return value is None if kind is None else isinstance(value, kind)


_NAMES: Final[dict[type | None, str]] = {
    None: "null",
    bool: "true or false",
    dict: "a map",
    int: "an integer",
    str: "text",
}
