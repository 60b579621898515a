"""The counts that bound `make test` and that `make soak` grows and resumes."""

import pytest

from tests.support import counts


@pytest.fixture(autouse=True)
def no_soak(monkeypatch):
    monkeypatch.delenv("BUCKETPLAN_SOAK", raising=False)
    monkeypatch.delenv("SEED_START", raising=False)
    yield
    counts.clear_current_seeds()


def test_a_test_run_takes_the_small_count_from_zero():
    assert counts.count(test=3, soak=10) == 3
    assert list(counts.seeds("walk", test=3, soak=10)) == [0, 1, 2]


def test_a_soak_takes_the_large_count_and_resumes_to_the_same_end(monkeypatch):
    monkeypatch.setenv("BUCKETPLAN_SOAK", "1")
    assert list(counts.seeds("walk", test=3, soak=6)) == [0, 1, 2, 3, 4, 5]
    monkeypatch.setenv("SEED_START", "4")
    assert list(counts.seeds("walk", test=3, soak=6)) == [4, 5]


def test_a_test_run_repeats_any_seed(monkeypatch):
    monkeypatch.setenv("SEED_START", "7")
    assert list(counts.seeds("walk", test=2, soak=6)) == [7, 8]


def test_an_unfinished_loop_is_reported_with_how_to_repeat_it():
    for seed in counts.seeds("walk", test=3, soak=10):
        if seed == 1:
            break
    assert counts.describe_current_seeds() == "walk: stopped at seed 1; repeat with SEED_START=1"


def test_a_finished_loop_is_not_reported():
    assert list(counts.seeds("walk", test=3, soak=10))
    assert counts.describe_current_seeds() == ""


@pytest.mark.parametrize("text", ["x", "-1", "1.5"])
def test_a_seed_that_is_no_number_is_refused_by_name(monkeypatch, text):
    monkeypatch.setenv("SEED_START", text)
    with pytest.raises(ValueError, match="SEED_START must"):
        list(counts.seeds("walk", test=3, soak=10))


def test_a_start_past_the_end_is_an_error_and_no_silent_pass(monkeypatch):
    monkeypatch.setenv("BUCKETPLAN_SOAK", "1")
    monkeypatch.setenv("SEED_START", "10")
    with pytest.raises(ValueError, match="leaves no seed of walk: its soak ends at 9"):
        list(counts.seeds("walk", test=3, soak=10))


def test_the_failure_report_names_the_seed(run_tests):
    output = run_tests(
        "from tests.support.counts import seeds\n"
        "def test_it():\n"
        "    for seed in seeds('walk', test=5, soak=9):\n"
        "        assert seed != 3\n"
    )
    assert "walk: stopped at seed 3; repeat with SEED_START=3" in output
    assert "1 failed" in output


@pytest.fixture
def run_tests():
    """Runs a test file under this suite's own conftest, in a process of its own."""
    import shutil
    import subprocess
    import sys
    import uuid

    from tests.support.paths import BUILD, ROOT

    folder = BUILD / "house" / uuid.uuid4().hex
    folder.mkdir(parents=True)

    def run(source: str) -> str:
        (folder / "test_inner.py").write_text(source)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-o", f"cache_dir={folder}", str(folder)],
            cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.stdout + done.stderr

    yield run
    shutil.rmtree(folder)
