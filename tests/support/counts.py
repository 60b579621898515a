"""How many cases a test takes: few and always the same in `make test`, many and resumable in `make soak`.

A test that scales carries `@pytest.mark.soak` and takes its number from here:

    @pytest.mark.soak
    def test_every_schedule_agrees():
        for seed in seeds("schedules", test=40, soak=10_000):
            ...

    @pytest.mark.soak
    @settings(max_examples=count(test=200, soak=20_000))
    @given(...)
    def test_decoder_never_crashes(body): ...

Environment: `BUCKETPLAN_SOAK=1` takes the soak counts. `SEED_START=N` begins at seed N, to resume or to repeat.
A failing test reports the seed it was at.
"""

import os
import sys
import time
from collections.abc import Iterator

_PROGRESS_EVERY_S = 10.0

_current: dict[str, int] = {}
"""The seed that each loop of the running test is at; conftest clears it before a test and reports it on failure."""


def soaking() -> bool:
    """Whether the soak counts are in force."""
    return os.environ.get("BUCKETPLAN_SOAK", "") not in ("", "0")


def count(*, test: int, soak: int) -> int:
    """The number of cases: `test` in `make test`, `soak` in `make soak`."""
    if not 0 < test <= soak:
        raise ValueError(f"counts must satisfy 0 < test <= soak, got test={test}, soak={soak}")
    return soak if soaking() else test


def seed_start() -> int:
    """The first seed, from `SEED_START`; 0 where it is not set."""
    text = os.environ.get("SEED_START") or "0"
    try:
        start = int(text)
    except ValueError:
        raise ValueError(f"SEED_START must be a whole number, got {text!r}") from None
    if start < 0:
        raise ValueError(f"SEED_START must not be negative, got {start}")
    return start


def seeds(name: str, *, test: int, soak: int) -> Iterator[int]:
    """Seeds from `SEED_START` on, up to the soak count, or as many as `test` says outside a soak.

    A soak resumed at seed N ends where the whole one would have; a test run from seed N takes its usual number.
    `name` stands before the seed in progress lines and failure reports.
    """
    start = seed_start()
    number = count(test=test, soak=soak)
    stop = number if soaking() else start + number
    if start >= stop:
        raise ValueError(f"SEED_START={start} leaves no seed of {name}: its soak ends at {stop - 1}")
    _say(f"{name}: seeds {start} to {stop - 1}")
    said = time.monotonic()
    for seed in range(start, stop):
        _current[name] = seed
        yield seed
        if time.monotonic() - said > _PROGRESS_EVERY_S:
            said = time.monotonic()
            _say(f"{name}: seed {seed} passed, {stop - 1 - seed} to go (resume with SEED_START={seed + 1})")
    _current.pop(name, None)
    _say(f"{name}: seeds {start} to {stop - 1} passed")


def clear_current_seeds() -> None:
    """Forgets the seeds of the test before."""
    _current.clear()


def describe_current_seeds() -> str:
    """One line for each unfinished loop of the running test, with how to repeat it; empty if there is none."""
    return "\n".join(
        f"{name}: stopped at seed {seed}; repeat with SEED_START={seed}" for name, seed in _current.items()
    )


def _say(line: str) -> None:
    # Captured in `make test`; in a soak pytest runs with -s, so a person sees where it stands.
    print(line, file=sys.stderr if soaking() else sys.stdout, flush=True)
