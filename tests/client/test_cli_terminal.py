"""A log or a graph may hold what a terminal obeys, written before it was refused: commands show it escaped."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from bucketplan_client.cli.main import app
from bucketplan_client.cli.output import facts, print_json, table
from bucketplan_client.transport import PlanClient
from bucketplan_core.request import Request
from bucketplan_server.store.engine import open_store
from bucketplan_server.store.events import Cause, append_event
from tests.client.requests import small_request
from tests.support.server import RunningServer, running_server

HOSTILE = "a\x1b[2J\x9b1m\x7f\u202eb\r\nserver"
SHOWN = r"a\x1b[2J\x9b1m\x7f\u202eb\r\nserver"


def named(request: Request) -> Request:
    first, *others = request.candidates
    return replace(request, candidates=(replace(first, param_name=HOSTILE), *others))


REQUEST = named(small_request())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("terminal")
    asyncio.run(write_event(folder / "bucketplan.db"))
    with running_server(folder) as running:
        with PlanClient(running.url) as client:
            client.plan(REQUEST)
        yield running


async def write_event(database: Path) -> None:
    store = await open_store(str(database), timeout_seconds=30)
    try:
        async with store.write() as connection:
            await append_event(connection, "token.created", Cause(HOSTILE, HOSTILE), at_ns=1, body={"name": HOSTILE})
    finally:
        await store.close()


def call(server: RunningServer, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["--server", server.url, *arguments], env={"COLUMNS": "500"})
    assert result.output.replace("\n", "").isprintable(), ascii(result.output)
    return result.output


def test_the_log_is_shown_escaped_one_event_a_line(server):
    log = call(server, "events")
    assert log.count(SHOWN) == 2
    assert len(log.splitlines()) == 3
    found = json.loads(call(server, "events", "--json"))["events"]
    assert (found[0]["actor"], found[0]["reason"]) == (HOSTILE, HOSTILE)


def test_names_in_a_plan_are_shown_escaped(server):
    assert SHOWN in call(server, "show", REQUEST.signature)
    shown = json.loads(call(server, "show", REQUEST.signature, "--json"))
    assert shown["request"]["candidates"]["param_name"][0] == HOSTILE


texts = st.text(st.characters(exclude_categories=("Cs",)) | st.sampled_from(HOSTILE), max_size=20)


def printed(show: Callable[[], None]) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        show()
    assert output.getvalue().replace("\n", "").isprintable(), ascii(output.getvalue())
    return output.getvalue()


@given(name=texts, value=texts, other=texts)
def test_whatever_is_printed_obeys_nothing(name, value, other):
    document = {name: [value, {other: name}], "\U000e0001": 1}
    assert json.loads(printed(lambda: print_json(document))) == document
    printed(lambda: facts({name: value, other: [value]}))
    printed(lambda: table(("a", "b"), [(name, value), (other, None)], empty=""))
