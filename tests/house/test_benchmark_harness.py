"""The harness of tests/benchmarks: variants alternate, and results have the one form that people compare."""

import json

import pytest

from tests.benchmarks import harness
from tests.benchmarks.__main__ import main


def test_variants_alternate_and_take_turns_at_going_first():
    calls = []
    times = harness.side_by_side({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=4, warmup=0)
    assert "".join(calls) == "abbaabba"
    assert {name: len(found) for name, found in times.items()} == {"a": 4, "b": 4}


def test_warmup_rounds_run_and_are_not_measured():
    calls = []
    times = harness.side_by_side({"a": lambda: calls.append("a")}, rounds=2, warmup=3)
    assert len(calls) == 5
    assert len(times["a"]) == 2


def test_the_ratio_is_taken_within_rounds():
    # The ratio of the two medians would be 20 / 10 = 2; in two rounds of three the variant took half the time.
    times = {"new": [1, 30, 20], "old": [2, 10, 40]}
    assert harness.median_ratio(times, "new", to="old") == 0.5


def test_a_result_has_the_agreed_form(tmp_path):
    path = harness.write("demo", harness.Result({"step_ratio": 0.5, "payload_bytes": 3}, "two ranks"), folder=tmp_path)
    assert path.name == "demo.json"
    assert json.loads(path.read_text()) == {
        "name": "demo",
        "figures": {"step_ratio": 0.5, "payload_bytes": 3},
        "notes": "two ranks",
    }


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "fast", True, None])
def test_a_figure_that_is_no_number_is_refused_by_its_key(tmp_path, value):
    with pytest.raises(ValueError, match="'step_ratio' of benchmark demo"):
        harness.write("demo", harness.Result({"step_ratio": value}), folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_benchmark_is_an_error_that_names_it(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["no-such-benchmark"])
    assert stopped.value.code == 2
    assert "no benchmark named no-such-benchmark" in capsys.readouterr().err
