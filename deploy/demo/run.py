"""The whole of bucketplan in one sitting: a server, a training job on two ranks, a crash, and the same plans again.

    1  start the server on a fresh SQLite file
    2  train a transformer on two gloo ranks three ways, each bucketed as the server says; compare the losses
    3  kill the server with SIGKILL, delete the job's own plan cache, start the server again on the same file
    4  train once more; the server must plan nothing a second time

Exits with 0 only if everything held. ``--keep-serving`` leaves the server up to look at its plans.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from demojob.server import PlanningServer, ServerDidNotStart
from rich import box
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parents[1] / "build" / "demo"
"""Emptied at every start, unless `--folder` names another."""
NUM_RANKS = 2
TRAIN_TIMEOUT_S = 240.0

Ways = dict[str, dict[str, Any]]
"""What one rank found, by way of bucketing."""

# A log is not 80 columns wide: the table's columns would be cut.
console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)


class DemoFailed(Exception):
    """A step of the demo did not finish; the message says which."""


@dataclass(slots=True)
class Checks:
    """What must hold, each said as it is checked."""

    failed: list[str] = field(default_factory=list)

    def that(self, claim: str, holds: bool, seen: str = "") -> None:
        mark = "[green]holds[/]" if holds else "[bold red]FAILS[/]"
        console.print(f"  {mark}  {claim}{f' ({seen})' if seen else ''}")
        if not holds:
            self.failed.append(claim)


def main() -> int:
    args = _arguments()
    signal.signal(signal.SIGTERM, _interrupt)
    started = time.monotonic()
    checks = Checks()
    try:
        _heading("A planning server on a fresh database")
        shutil.rmtree(args.folder, ignore_errors=True)
        args.folder.mkdir(parents=True)
        with PlanningServer(args.folder) as server:
            signature = _demonstrate(server, args.folder, checks, num_steps=args.steps)
            console.print(
                f"\n{'All of it held' if not checks.failed else 'NOT all of it held'}, "
                f"{time.monotonic() - started:.0f} s."
            )
            _say_where(server, signature, keep_serving=args.keep_serving)
            if args.keep_serving:
                server.detach()
    except (DemoFailed, ServerDidNotStart) as error:
        console.print(f"[bold red]The demo did not finish:[/] {error}", markup=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    return 1 if checks.failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on two ranks with plans from a planning server.")
    parser.add_argument("--keep-serving", action="store_true", help="leave the server running at the end")
    parser.add_argument("--steps", type=int, default=20, help="training steps of the first run (default 20)")
    parser.add_argument(
        "--folder", type=Path, default=FOLDER, help=f"working folder, emptied (default {_shown(FOLDER)})"
    )
    args = parser.parse_args()
    # The ranks run in another working folder.
    args.folder = args.folder.resolve()
    return args


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _demonstrate(server: PlanningServer, folder: Path, checks: Checks, *, num_steps: int) -> str:
    """Run all steps; returns the signature of a plan worth looking at."""
    server.start()
    console.print(f"    {server.address}, process {server.process_id}, plans in {_shown(server.database)}")

    _heading(f"Training on {NUM_RANKS} ranks three ways, each with its plan from the server")
    cache = folder / "cache"
    first = _train(server, cache, folder / "first", num_steps)
    console.print(_table(first))
    _check_training(checks, first)
    planned = server.metric("bucketplan_plannings_total", outcome="stored")
    checks.that("each way was planned once for both ranks", planned == len(first[0]), f"{planned:.0f} plannings")

    _heading("SIGKILL for the server, and a new one on the same database; the job loses its plan cache too")
    server.kill()
    checks.that("the job had kept its plans on disk", any(cache.rglob("*.plan")))
    shutil.rmtree(cache)
    server.start()
    console.print(f"    {server.address}, process {server.process_id}")

    _heading("Training again")
    second = _train(server, cache, folder / "second", max(2, num_steps // 4))
    planned = server.metric("bucketplan_plannings_total", outcome="stored")
    misses = server.metric("bucketplan_plan_misses_total")
    stored = server.metric("bucketplan_plan_hits_total", source="store")
    checks.that(
        "nothing was planned a second time",
        planned == 0 and misses == 0 and stored >= 1,
        f"{planned:.0f} plannings and {misses:.0f} misses since the restart, {stored:.0f} plans read from the database",
    )
    taken = sum((Counter(way["taken_from"]) for ways in second for way in ways.values()), Counter())
    sources = ", ".join(f"{number} from the {source}" for source, number in sorted(taken.items()))
    # The second rank of a host may find what the first has just put into the cache.
    asked = all(any("server" in ways[name]["taken_from"] for ways in second) for name in first[0])
    checks.that(
        "the server was asked for each plan, and no rank planned by itself", asked and "local" not in taken, sources
    )
    for fact in ("signature", "digest"):
        same = all(way[fact] == ways[name][fact] for ways in second for name, way in first[0].items())
        checks.that(f"the {fact}s are those of before the crash", same)
    same = all(
        now[name]["losses"] == then[name]["losses"][: len(now[name]["losses"])]
        for then, now in zip(first, second, strict=True)
        for name in then
    )
    checks.that("the losses are those of before the crash, bit for bit", same)
    signature: str = first[0]["module"]["signature"]
    checks.that("the plan can be read", server.plan(signature)["digest"] == first[0]["module"]["digest"])
    return signature


def _train(server: PlanningServer, cache: Path, out: Path, num_steps: int) -> list[Ways]:
    """Run the job under torchrun; what each rank found. Raises `DemoFailed`."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(NUM_RANKS)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--no-python", sys.executable),
        *(
            str(HERE / "train.py"),
            "--server",
            server.address,
            "--cache",
            str(cache),
            "--out",
            str(out),
            "--steps",
            str(num_steps),
        ),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    for name in [name for name in environment if name.startswith("BUCKETPLAN_")]:
        del environment[name]
    job = subprocess.Popen(command, env=environment, cwd=HERE, start_new_session=True)
    try:
        status = job.wait(timeout=TRAIN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise DemoFailed(f"the job was still running after {TRAIN_TIMEOUT_S:.0f} s") from None
    finally:
        _end(job)
    if status:
        raise DemoFailed(f"the job ended with status {status}; its ranks said why above")
    found: list[Ways] = json.loads((out / "result.json").read_text())
    return found


def _end(job: subprocess.Popen[bytes]) -> None:
    """Make sure that neither torchrun nor a rank outlives this step."""
    if job.poll() is None:
        job.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(timeout=20.0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    job.wait()


def _check_training(checks: Checks, ranks: list[Ways]) -> None:
    ways = ranks[0]
    plain = ways["none"]
    same_everywhere = all(
        rank[name][fact] == ways[name][fact]
        for rank in ranks
        for name in ways
        for fact in ("signature", "digest", "losses")
    )
    checks.that("both ranks had the same signatures, plans and losses", same_everywhere)
    for name in ("size", "module"):
        equal = all(rank[name]["losses"] == rank["none"]["losses"] for rank in ranks)
        checks.that(f"{name}: losses equal to those without buckets, bit for bit", equal)
        equal = all(rank[name]["shards_sha256"] == rank["none"]["shards_sha256"] for rank in ranks)
        checks.that(f"{name}: so is every parameter at the end", equal)
        fewer = ways[name]["num_after"] < ways[name]["num_before"] == plain["num_after"]
        checks.that(f"{name}: fewer collectives", fewer, f"{plain['num_after']} became {ways[name]['num_after']}")
    console.print(
        "         Gathers only move bytes. Reductions over two ranks are sums of two terms, which have one order,\n"
        "         so gloo gives the same bits for a bucket as for its members; over more ranks the order depends on\n"
        "         where in the buffer a value lies, and fp32 gradients agree to about 1e-6."
    )
    checks.that(
        "the model learns",
        plain["losses"][-1] < 0.8 * plain["losses"][0],
        f"loss {plain['losses'][0]:.3f} to {plain['losses'][-1]:.3f}",
    )


def _table(ranks: list[Ways]) -> Table:
    """Fits 80 columns, so that logs show it as terminals do."""
    table = Table(title="one training step on rank 0", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "collectives", "buckets", "packed", "time", "losses", "plan"):
        table.add_column(heading, justify="left" if heading in ("", "plan") else "right", no_wrap=True)
    plain = statistics.median(ranks[0]["none"]["step_ns"])
    for name, way in ranks[0].items():
        table.add_row(
            "no buckets" if name == "none" else name,
            str(way["num_after"]),
            str(way["num_buckets"]),
            f"{way['packed_bytes'] / 2**20:.1f} MiB",
            f"{statistics.median(way['step_ns']) / plain:.2f}",
            f"{way['losses'][0]:.3f}, {way['losses'][-1]:.3f}",
            way["signature"][:8],
        )
    table.caption = "time: median step as a ratio to no buckets, the ways taking turns in one run"
    table.caption_justify = "left"
    return table


def _say_where(server: PlanningServer, signature: str, *, keep_serving: bool) -> None:
    console.print(f"The plan of way 'module' as JSON: {server.address}/v1/plans/{signature}")
    if keep_serving:
        console.print(f"The server keeps running as process {server.process_id}; end it with: kill {server.process_id}")
        console.print(f"Its page, for a browser: {server.address}/plans/{signature}")
        return
    console.print(
        f"The server ends now; to read it: .venv/bin/bucketplan-server serve --port {server.port} "
        f"--database {_shown(server.database)}\n(or make the demo with --keep-serving: "
        ".venv/bin/python deploy/demo/run.py --keep-serving)"
    )
    console.print(f"Its page, for a browser: {server.address}/plans/{signature}")


def _heading(text: str) -> None:
    console.print(f"\n[bold]{text}[/]")


def _shown(path: Path) -> str:
    return os.path.relpath(path)


if __name__ == "__main__":
    sys.exit(main())
