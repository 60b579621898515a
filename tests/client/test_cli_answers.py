"""Commands against a server whose answers are JSON of any shape: a documented status, and never a traceback."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from bucketplan_client.cli import main
from bucketplan_core.planning import make_plan
from bucketplan_core.wire import to_json
from tests.client.requests import small_request
from tests.support.counts import count

REQUEST = small_request()
SIGNATURE = REQUEST.signature
_BUCKET = {"id": "b0", "members": ["a.weight"], "bytes": 8, "launch_gap": 0, "wait_gap": 1, "exposed_ns": 5}
ANSWERS: dict[str, Any] = {
    f"/v1/plans/{SIGNATURE}": json.loads(to_json(make_plan(REQUEST).to_people())),
    f"/v1/plans/{SIGNATURE}/request": json.loads(to_json(REQUEST.to_wire())),
    f"/v1/plans/{SIGNATURE}/explain": {
        "step": {"step_ns": 9, "bound_ns": 8, "exposed_ns": 1},
        "limits": {"memory_budget_bytes": 1, "because": "compute", "peak_bytes": 1, "memory_is_tight": True},
        "buckets": [
            {**_BUCKET, "alone": "nothing fits"},
            {**_BUCKET, "opened": {"because": "x"}, "closed": {"because": "y"}},
        ],
    },
    f"/v1/plans/{SIGNATURE}/trace": {"traceEvents": [{}]},
    f"/v1/plans/{SIGNATURE}/revisions": {"revision": 2, "signature": SIGNATURE},
    f"/v1/plans/{SIGNATURE}/activate": {"before": 1, "job": "", "revision": 2, "signature": SIGNATURE},
    "/v1/plans": {"next": None, "plans": [{"created_ns": 1, "groups": ["fsdp"], "signature": SIGNATURE}]},
    "/v1/diff": {
        "request": {"signature_a": SIGNATURE, "signature_b": SIGNATURE},
        "decision": {"digest_a": "d", "digest_b": "d", "moved": [{"member": 1}]},
    },
    "/v1/jobs/j/attempts": {"attempts": [{"attempt": 1, "epoch_id": "e", "opened_by": "me", "opened_ns": 1}]},
    "/v1/jobs/j/attempts/1": {
        "attempt": 1,
        "epoch_id": "e",
        "groups": [{"role": "fsdp", "members": [0], "state": "agreed", "slots": [{"state": "agreed"}]}],
        "job": "j",
        "opening": {"state": "agreed", "stalled": False},
    },
    "/v1/events": {"events": [{"actor": "me", "at_ns": 1, "kind": "k", "reason": "r", "seq": 1}]},
    "/v1/events/verify": {"findings": [], "head": "h", "holds": True, "num_events": 1},
}
READING = [
    ("plans",),
    ("show", SIGNATURE),
    ("show", SIGNATURE[:6]),
    ("diff", SIGNATURE, SIGNATURE),
    ("explain", SIGNATURE),
    ("trace", SIGNATURE, "--output", "/dev/null"),
    ("job", "j"),
    ("job", "j", "1"),
    ("events",),
    ("verify",),
]
CHANGING = [
    ("replan", SIGNATURE, "--reason", "r", "--set", "strategy=auto"),
    ("activate", SIGNATURE, "--reason", "r", "--revision", "2"),
]
COMMANDS = [*READING, *CHANGING]

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.just("99999999999999999999"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@contextmanager
def answering(answer: Callable[[str], Any]) -> Iterator[None]:
    """Every call of the commands is answered with the JSON that `answer` gives for its path."""

    def respond(request: httpx.Request) -> httpx.Response:
        body = json.dumps(answer(request.url.path))
        return httpx.Response(200, content=body, headers={"Content-Type": "application/json"})

    client = partial(main.PlanClient, transport=httpx.MockTransport(respond))
    with mock.patch.object(main, "PlanClient", client):
        yield


def run(*arguments: str) -> Any:
    # Short, since a body that is no document of ours (a number beyond 64 bits) is asked for until the deadline.
    return CliRunner().invoke(main.app, ["--server", "http://stub", "--timeout", "0.1", *arguments])


def check(result: Any, *, as_json: bool) -> None:
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code in {0, 1, 2, 3, 4, 5}
    if as_json:
        document = json.loads(result.stdout)
        if result.exit_code > 1:
            assert document["error"]["exit_status"] == result.exit_code


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key in tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield from places(tree[key], (*path, key))


def replaced(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    changed = copy.deepcopy(tree)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_answers_of_a_planning_server_are_shown(command):
    for arguments in (command, (*command, "--json")):
        with answering(ANSWERS.__getitem__):
            result = run(*arguments)
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("body", [{}, [], None, 7, {"plans": None}, {"plans": [{}], "attempts": [{}], "events": [{}]}])
def test_json_of_another_shape_is_no_answer(command, body, as_json):
    with answering(lambda _: body):
        result = run(*command, *(["--json"] if as_json else []))
    check(result, as_json=as_json)
    assert result.exit_code == 5, result.output
    assert "BUCKETPLAN_SERVER" in result.output


@pytest.mark.soak
@settings(max_examples=count(test=150, soak=5_000))
@given(data=st.data(), command=st.sampled_from(COMMANDS), as_json=st.booleans())
def test_any_json_gives_a_documented_status(data, command, as_json):
    path, answer = data.draw(st.sampled_from(sorted(ANSWERS.items())))
    changed = replaced(answer, data.draw(st.sampled_from(list(places(answer)))), data.draw(values))
    everything = data.draw(st.booleans())
    with answering(lambda asked: changed if everything or asked == path else ANSWERS[asked]):
        check(run(*command, *(["--json"] if as_json else [])), as_json=as_json)


def test_a_plan_of_another_signature_is_no_answer():
    other = small_request(num_params=6).signature
    with answering(lambda path: ANSWERS[path.replace(other, SIGNATURE)]):
        result = run("show", other)
    assert result.exit_code == 5
    assert f"{other} was asked for" in result.output


def test_a_list_that_leads_back_to_itself_ends():
    with answering(lambda _: {"plans": [], "next": "7"}):
        result = run("show", "abc")
    assert result.exit_code == 5
    assert "already read" in result.output


def test_a_list_without_end_ends_at_the_deadline():
    cursors = itertools.count()
    with answering(lambda _: {"plans": [], "next": str(next(cursors))}):
        result = run("show", "abc")
    assert result.exit_code == 3, result.output
