"""Runs the benchmarks, each in a process of its own, and prints their figures in one table.

python -m tests.benchmarks            all of them
python -m tests.benchmarks NAME ...   these
python -m tests.benchmarks --list     their names
"""

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.benchmarks import harness


def available() -> list[str]:
    """The names of the benchmarks in this folder, sorted."""
    return sorted(path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py"))


def run_here(name: str) -> None:
    """Runs one benchmark in this process and writes its result."""
    harness.write(name, importlib.import_module(f"tests.benchmarks.bench_{name}").run())


def run_apart(names: list[str], console: Console) -> list[str]:
    """Runs each in a process of its own, so that none meets the threads and caches of another; returns the failed."""
    failed = []
    for name in names:
        console.print(f"benchmark {name}", highlight=False)
        (harness.RESULTS / f"{name}.json").unlink(missing_ok=True)
        done = subprocess.run([sys.executable, "-m", "tests.benchmarks", "--here", name], check=False)
        if done.returncode != 0:
            failed.append(name)
    return failed


def print_table(names: list[str], console: Console) -> None:
    table = Table("benchmark", "figure", "value", title="build/bench")
    for name in names:
        body = json.loads((harness.RESULTS / f"{name}.json").read_text())
        for row, (key, value) in enumerate(body["figures"].items()):
            table.add_row(name if row == 0 else "", key, f"{value:,}" if isinstance(value, int) else f"{value:,.4g}")
        if body["notes"]:
            table.add_row("", "", f"[dim]{body['notes']}[/dim]")
        table.add_section()
    console.print(table)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    known = available()
    if unknown := sorted(set(options.names) - set(known)):
        parser.error(f"no benchmark named {', '.join(unknown)}; there are {', '.join(known) or 'none'}")
    names = options.names or known
    if options.list:
        print("\n".join(known))
        return 0
    if not names:
        parser.error("there is no bench_*.py in tests/benchmarks")
    if options.here:
        for name in names:
            run_here(name)
        return 0
    console = Console()
    failed = run_apart(names, console)
    print_table([name for name in names if name not in failed], console)
    if failed:
        console.print(f"failed: {', '.join(failed)}", style="red", highlight=False)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
