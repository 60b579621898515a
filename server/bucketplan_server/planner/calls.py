"""Calls of functions in planning processes, as frames: which ones there are, and how arguments and results travel.

A call names one of `OPERATIONS`; its arguments and its result have the types that the function is annotated with.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar, Union, get_args, get_origin

from bucketplan_server.planner.frames import FrameError, frame, hints_of, read_as, to_tree, unframe
from bucketplan_server.problems import PROBLEMS, Refused

__all__ = ["OPERATIONS", "Failed", "frame_answer", "frame_call", "frame_failure", "name_of", "read_answer", "read_call"]

T = TypeVar("T")

OPERATIONS = frozenset(
    {
        "bucketplan_server.pages.figures:view_bucket",
        "bucketplan_server.pages.figures:view_plan",
        "bucketplan_server.planner.trace:trace_step",
        "bucketplan_server.planner.worker:canonicalize",
        "bucketplan_server.planner.worker:diff_plans",
        "bucketplan_server.planner.worker:explain_plan",
        "bucketplan_server.planner.worker:plan",
        "bucketplan_server.planner.worker:replay_revision",
        "bucketplan_server.planner.worker:revise",
        "bucketplan_server.planner.worker:warm_up",
    }
)
"""Everything that a planning process does when it is told to."""


class Failed(Exception):
    """A planning process met an error that is nobody's request: the text is its traceback there."""


def name_of(function: Callable[..., object]) -> str:
    """The operation that calls `function`; raises `ValueError` when it is none."""
    name = f"{function.__module__}:{function.__qualname__}"
    if name not in OPERATIONS:
        raise ValueError(f"{name} is not an operation of planning processes; list it in {__name__}.OPERATIONS")
    return name


def frame_call(function: Callable[..., object], *arguments: object) -> bytes:
    """The frame that asks a planning process for ``function(*arguments)``."""
    return frame({"arguments": to_tree(arguments), "operation": name_of(function)})


def read_call(body: bytes | bytearray) -> tuple[Callable[..., object], list[Any]]:
    """The function that a call names, imported now if it was not before, and its arguments; raises `FrameError`."""
    call = _map_of(unframe(body), {"arguments", "operation"}, "call")
    name, arguments = call["operation"], call["arguments"]
    if type(name) is not str or name not in OPERATIONS:
        raise FrameError("call.operation", f"{name!r:.200} is not an operation")
    module, _, attribute = name.partition(":")
    function = getattr(import_module(module), attribute)
    kinds = [kind for parameter, kind in hints_of(function).items() if parameter != "return"]
    if type(arguments) is not list or len(arguments) != len(kinds):
        raise FrameError("call.arguments", f"{name} takes {len(kinds)} arguments")
    return function, [
        read_as(kind, argument, path=f"call.arguments[{at}]")
        for at, (kind, argument) in enumerate(zip(kinds, arguments, strict=True))
    ]


def frame_answer(result: object) -> bytes:
    """The frame that a planning process answers a call with."""
    return frame({"refused" if isinstance(result, Refused) else "value": to_tree(result)})


def frame_failure(text: str) -> bytes:
    """The frame that a planning process answers when the call ended in an error that it does not know."""
    return frame({"failed": text})


def read_answer(function: Callable[..., T | Refused], body: bytes) -> T:
    """What ``function(...)`` returned in the planning process.

    Raises the `Problem` that it refused its arguments with, `Failed`, or `FrameError`.
    """
    answer = unframe(body)
    if type(answer) is not dict or len(answer) != 1:
        raise FrameError("answer", "one of value, refused and failed")
    ((outcome, tree),) = answer.items()
    if outcome == "failed":
        raise Failed(str(tree))
    if outcome == "refused":
        refused: Refused = read_as(Refused, tree, path="answer")
        if refused.slug not in PROBLEMS:
            raise FrameError("answer.slug", f"{refused.slug!r:.80} is no problem of this service")
        raise refused.problem()
    if outcome != "value":
        raise FrameError("answer", f"{outcome!r:.80} is not one of value, refused and failed")
    result: T = read_as(_without_refused(hints_of(function)["return"]), tree, path="answer")
    return result


def _without_refused(kind: Any) -> Any:
    if get_origin(kind) not in (Union, types.UnionType):
        return kind
    return Union[tuple(inner for inner in get_args(kind) if inner is not Refused)]  # noqa: UP007  # built at run time


def _map_of(tree: Any, keys: set[str], path: str) -> dict[str, Any]:
    if type(tree) is not dict or tree.keys() != keys:
        raise FrameError(path, f"a map of {', '.join(sorted(keys))}")
    return tree
