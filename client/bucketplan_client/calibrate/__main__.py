"""`torchrun ... -m bucketplan_client.calibrate`: the calibration job of one rank."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bucketplan_client.calibrate.job import CalibrationPlan, run_job
from bucketplan_client.errors import ClientError


def main(arguments: list[str] | None = None) -> int:
    """Entry point of every rank; rank 0 prints the report."""
    parser = argparse.ArgumentParser(prog="bucketplan_client.calibrate", description=run_job.__doc__)
    parser.add_argument("--name", required=True, help="name of the profile")
    parser.add_argument("--output", type=Path, help="write the profile here, as JSON")
    parser.add_argument("--plot", type=Path, help="write the plot here, as PNG")
    parser.add_argument("--min-bytes", type=int, default=4_096, help="smallest full tensor")
    parser.add_argument("--max-bytes", type=int, default=1 << 30, help="largest full tensor")
    parser.add_argument("--repeats", type=int, default=20, help="timed repetitions of each size")
    parser.add_argument("--matrix-size", type=int, default=4_096, help="side of the matrices that compute rates use")
    given = parser.parse_args(arguments)
    try:
        plan = CalibrationPlan(
            name=given.name,
            min_bytes=given.min_bytes,
            max_bytes=given.max_bytes,
            repeats=given.repeats,
            matrix_size=given.matrix_size,
        )
        lines = run_job(plan, output=given.output, plot=given.plot)
    except (ClientError, RuntimeError, ValueError) as error:
        sys.stderr.write(f"calibrate: {error}\n")
        return 2
    if lines:
        sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
