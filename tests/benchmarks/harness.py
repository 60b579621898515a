"""What benchmarks share: measuring variants side by side, and the one form of their results.

A benchmark is a module `bench_NAME.py` here with

    def run() -> Result: ...

`make bench` runs each in a process of its own and writes `build/bench/NAME.json`:
`{"name": NAME, "figures": {key: number}, "notes": text}`. Keys are stable: people compare them between revisions.
"""

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import BUILD

RESULTS = BUILD / "bench"


@dataclass(frozen=True, slots=True)
class Result:
    """Figures by stable key, with their units in the keys (`_ns`, `_bytes`, `_ratio`), and how they were taken."""

    figures: Mapping[str, int | float]
    notes: str = ""


def side_by_side(variants: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int = 1) -> dict[str, list[int]]:
    """Wall times in nanoseconds of each variant, one a round, in `rounds` rounds after `warmup` unmeasured ones.

    Every round runs every variant once, each round starting with the next one, so that what drifts (clock speed,
    caches, other load) falls on all of them alike. Compare them by `median_ratio`.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    names = list(variants)
    times: dict[str, list[int]] = {name: [] for name in names}
    for number in range(-warmup, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            started = time.perf_counter_ns()
            variants[name]()
            elapsed = time.perf_counter_ns() - started
            if number >= 0:
                times[name].append(elapsed)
    return times


def median_ratio(times: Mapping[str, list[int]], variant: str, *, to: str) -> float:
    """The median over rounds of variant's time divided by `to`'s time in the same round."""
    return statistics.median(a / b for a, b in zip(times[variant], times[to], strict=True))


def write(name: str, result: Result, *, folder: Path = RESULTS) -> Path:
    """Writes a result and returns its file; a figure that is no finite number is a `ValueError` that names its key."""
    for key, value in result.figures.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"figure {key!r} of benchmark {name} must be a finite number, got {value!r}")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    body = {"name": name, "figures": dict(result.figures), "notes": result.notes}
    path.write_text(json.dumps(body, indent=2, ensure_ascii=False) + "\n")
    return path
