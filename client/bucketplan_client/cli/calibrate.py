"""`bucketplan calibrate`: start the calibration job on this host's devices and hand back the profile it measured."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from bucketplan_client.cli.output import EXIT_NEGATIVE, print_json, working
from bucketplan_core.wire import from_json

__all__ = ["calibrate"]


def calibrate(
    name: Annotated[str, typer.Option(help="Name of the profile.")],
    ranks: Annotated[int, typer.Option(help="Processes on this host, one a device.", min=2)] = 8,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the profile here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write measured and fitted times here, as PNG.")] = None,
    min_bytes: Annotated[int, typer.Option(help="Smallest full tensor.", min=4)] = 4_096,
    max_bytes: Annotated[int, typer.Option(help="Largest full tensor.", min=8)] = 1 << 30,
    repeats: Annotated[int, typer.Option(help="Timed repetitions of each size.", min=1)] = 20,
    matrix_size: Annotated[int, typer.Option(help="Side of the matrices that compute rates use.", min=16)] = 4_096,
    as_json: Annotated[bool, typer.Option("--json", help="Answer with the profile as JSON.")] = False,
) -> None:
    """Measure collectives, copies and launches of this host, or of the job that torchrun started; needs no server.

    For several hosts start it on all of them: torchrun ... --no-python bucketplan calibrate --name NAME.
    """
    given: dict[str, object] = {"name": name, "min-bytes": min_bytes, "max-bytes": max_bytes, "repeats": repeats}
    given |= {"matrix-size": matrix_size} | ({} if plot is None else {"plot": plot})
    if "RANK" in os.environ:
        from bucketplan_client.calibrate.__main__ import main as run_rank

        given |= {} if output is None else {"output": output}
        raise typer.Exit(run_rank(_flags(given)))
    with tempfile.TemporaryDirectory() as folder:
        profile = output if output is not None else Path(folder) / "profile.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += ["-m", "bucketplan_client.calibrate", *_flags({**given, "output": profile})]
        with working(f"calibrating {ranks} ranks"):
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            sys.stderr.write(done.stdout + "error: the calibration job failed; its messages are above\n")
            raise typer.Exit(EXIT_NEGATIVE)
        if as_json:
            print_json(from_json(profile.read_bytes()))
        else:
            sys.stdout.write(done.stdout)


def _flags(given: Mapping[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in given.items()]
