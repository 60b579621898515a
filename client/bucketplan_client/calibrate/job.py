"""The calibration job: every rank measures, every rank fits the same figures, rank 0 reports.

torchrun --nproc-per-node 8 -m bucketplan_client.calibrate --name h100-node --output h100-node.json --plot fit.png
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from bucketplan_client.calibrate import measure
from bucketplan_client.calibrate.fit import FittedOp, fit_collective, round_figure
from bucketplan_client.calibrate.report import report_lines, save_plot
from bucketplan_core.hardware import CollectiveCost, Hardware, Protocol
from bucketplan_core.presets import GroupShape, MeasuredProfile
from bucketplan_core.wire import to_json

__all__ = ["CalibrationPlan", "calibrate", "run_job"]

_ROLE = "measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationPlan:
    """What to measure: sizes of the full tensor in bytes, doubling from `min_bytes` to `max_bytes`.

    Every third size from the second on is kept out of the fit, never the first or the last.
    """

    name: str
    min_bytes: int = 4_096
    max_bytes: int = 1 << 30
    repeats: int = 20
    matrix_size: int = 4_096

    def __post_init__(self) -> None:
        if not self.min_bytes >= 4 or self.max_bytes < 16 * self.min_bytes:
            raise ValueError(f"max_bytes {self.max_bytes} must be at least 16 times min_bytes {self.min_bytes}")
        if self.repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {self.repeats}")

    @property
    def sizes(self) -> list[int]:
        found = [self.min_bytes]
        while found[-1] * 2 <= self.max_bytes:
            found.append(found[-1] * 2)
        return found


def calibrate(
    plan: CalibrationPlan, group: dist.ProcessGroup | None = None
) -> tuple[MeasuredProfile, tuple[FittedOp, ...]]:
    """Measure on every rank of `group` (default: the world) and fit; all ranks return the same. Collective."""
    device = _device()
    ranks = dist.get_world_size(group)
    if ranks < 2:
        raise ValueError("a group of one rank has no collectives to measure; start at least two")
    fits = []
    for op in measure.OPS:
        samples = measure.collective_samples(op, plan.sizes, plan.repeats, device, group)
        last = len(samples) - 1
        kept = [sample for number, sample in enumerate(samples) if number % 3 != 1 or number == last]
        fits.append(fit_collective(op, ranks, kept, [sample for sample in samples if sample not in kept]))
    size = plan.matrix_size
    rates, memory = measure.compute_rates(plan.repeats, device, group, size=size)
    figures = Hardware(
        flops_per_us=tuple(sorted((name, max(round_figure(rate), 1)) for name, rate in rates.items())),
        memory_bytes_per_us=max(round_figure(memory), 1),
        copy_bytes_per_us=max(round_figure(measure.copy_rate(plan.max_bytes // 4, plan.repeats, device, group)), 1),
        launch_ns=round_figure(measure.launch_ns(plan.repeats, device, group)),
        slowdown_permille=round_figure(
            measure.slowdown_permille(plan.repeats, device, group, full_bytes=plan.max_bytes, size=size // 4)
        ),
        collectives=tuple(
            CollectiveCost(_ROLE, op, protocols) for op, protocols in sorted(_with_all_to_all(fits).items())
        ),
    )
    shape = GroupShape(ranks, _num_nodes(group))
    backend, name = dist.get_backend(group), _device_name(device)
    return MeasuredProfile(name=plan.name, shape=shape, backend=backend, device=name, figures=figures), tuple(fits)


def _with_all_to_all(fits: Sequence[FittedOp]) -> dict[str, tuple[Protocol, ...]]:
    """All-to-alls are nobody's candidates; they are costed like an all-gather of the same bytes."""
    found: dict[str, tuple[Protocol, ...]] = {fit.op: fit.protocols for fit in fits}
    found["all_to_all"] = found["all_gather"]
    return found


def _device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", "0")))


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _num_nodes(group: dist.ProcessGroup | None) -> int:
    names: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(names, socket.gethostname(), group=group)
    return len(set(names))


def run_job(plan: CalibrationPlan, *, output: Path | None, plot: Path | None, timeout_s: float = 600.0) -> list[str]:
    """Join the job that torchrun started, calibrate its world, and on rank 0 write `output` and `plot`.

    Returns the report's lines on rank 0, nothing elsewhere. Raises `RuntimeError` outside torchrun.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise RuntimeError(
            "calibration runs on every rank of a job: torchrun --nproc-per-node N -m bucketplan_client.calibrate ..."
        )
    device = _device()
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
    joined = not dist.is_initialized()
    if joined:
        dist.init_process_group(dist.get_default_backend_for_device(device.type), timeout=timedelta(seconds=timeout_s))
    try:
        profile, fits = calibrate(plan)
        if dist.get_rank() != 0:
            return []
        lines = report_lines(profile, fits)
        if output is not None:
            document = to_json(profile.to_wire(), indent=2)
            try:
                output.write_bytes(document + b"\n")
            except OSError as error:
                raise RuntimeError(f"{output} cannot be written: {error}; it is:\n{document.decode()}") from error
            lines += ["", f"profile written to {output}"]
        if plot is not None:
            save_plot(fits, plot)
            lines.append(f"plot written to {plot}")
        return lines
    finally:
        if joined:
            dist.destroy_process_group()
