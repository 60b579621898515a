"""Every number that an operator can set is refused in one line that names it, or a server runs with it."""

import math
import subprocess
import sys
from typing import Any

import annotated_types
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketplan_core.wire import unpack
from bucketplan_server.settings import Settings, SettingsError, load_settings
from tests.server.test_attempts import open_attempt
from tests.support.documents import MSGPACK, plan_body, small_request
from tests.support.server import running_server

NUMBERS = {name: field for name, field in Settings.model_fields.items() if field.annotation in (int, float)}
EXTREMES = ("-1", "0", "nan", "inf", "-inf", "1e300", "1e30", "1e-300", "5e-324", str(10**12), str(2**63), str(10**40))


def bounds_of(name: str) -> tuple[Any, Any]:
    low = high = None
    for limit in NUMBERS[name].metadata:
        if isinstance(limit, annotated_types.Ge):
            low = limit.ge
        if isinstance(limit, annotated_types.Le):
            high = limit.le
    return low, high


def check(name: str, value: str) -> None:
    low, high = bounds_of(name)
    said = ""
    try:
        found = getattr(load_settings(**{name: value}), name)
    except SettingsError as error:
        said = str(error)
    if said:
        assert f"BUCKETPLAN_{name.upper()}" in said
        assert "\n" not in said
    else:
        assert math.isfinite(found)
        assert low <= found <= high


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_has_two_finite_bounds(name):
    low, high = bounds_of(name)
    assert low is not None
    assert high is not None
    assert math.isfinite(high)
    for value in (low, high, *EXTREMES):
        check(name, str(value))


@given(
    name=st.sampled_from(sorted(NUMBERS)), value=st.floats().map(repr) | st.integers().map(str) | st.text(max_size=8)
)
def test_any_value_is_taken_within_the_bounds_or_refused_by_name(name, value):
    if "\0" not in value:
        check(name, value)


@pytest.mark.parametrize("name", ["stall_seconds", "planner_timeout_seconds", "planner_memory_bytes", "backlog"])
def test_a_server_with_a_value_beyond_them_says_so_and_does_not_start(tmp_path, name):
    started = subprocess.run(
        [sys.executable, "-m", "bucketplan_server", "serve", "--database", str(tmp_path / "db")],
        env={f"BUCKETPLAN_{name.upper()}": "1e300"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert started.returncode == 2
    assert f"BUCKETPLAN_{name.upper()}" in started.stderr
    assert "Traceback" not in started.stderr


@pytest.mark.parametrize("end", [0, 1], ids=["least", "most"])
def test_a_server_works_at_the_ends_of_all_of_them(tmp_path, end):
    # The port is the test's; 64 processes, or one in 256 MiB, say nothing about the bounds of the others.
    apart = {"port", "planner_processes", "planner_memory_bytes"}
    values = {name: bounds_of(name)[end] for name in NUMBERS if name not in apart}
    if end == 1:
        values["planner_memory_bytes"] = bounds_of("planner_memory_bytes")[1]
    else:
        # Time enough to plan and to look at the answers.
        values |= {"planner_timeout_seconds": 60, "max_body_bytes": 2**20, "body_timeout_seconds": 30}
    with running_server(tmp_path, **values) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        answer = client.post("/v1/plans", content=plan_body(small_request(1)), headers=MSGPACK)
        assert answer.status_code == (202, 201)[end]
        assert unpack(open_attempt(client, "j", "key").content)["attempt"] == 1
        assert client.get("/v1/jobs/j/attempts/1").status_code == 200
        log = server.log.read_text()
    assert "Traceback" not in log
