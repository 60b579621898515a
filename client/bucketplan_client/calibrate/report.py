"""The fit for people: a table with residuals, the distribution of errors on sizes not fitted, a plot in terminal and
PNG.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from bucketplan_client.calibrate.fit import FittedOp
from bucketplan_core.presets import MeasuredProfile

__all__ = ["error_line", "report_lines", "save_plot", "terminal_plot"]

_WIDTH, _HEIGHT = 64, 14


def report_lines(profile: MeasuredProfile, fits: Sequence[FittedOp]) -> list[str]:
    """Everything that was fitted, one sample a line, then the errors and the plots."""
    figures = profile.figures
    shape = profile.shape
    speeds = (figures.copy_bytes_per_us / 1_000, figures.memory_bytes_per_us / 1_000)
    lines = [
        f"profile {profile.name}: {shape.size} ranks on {shape.nodes} nodes, {profile.backend}, {profile.device}",
        f"packing copies {speeds[0]:.2f} GB/s, memory {speeds[1]:.2f} GB/s",
        f"one launch {figures.launch_ns / 1_000:.1f} us",
        f"compute takes {figures.slowdown_permille / 10:.1f}% longer beside communication",
        "compute " + ", ".join(f"{name} {rate / 1_000:.1f} GFLOP/s" for name, rate in figures.flops_per_us),
    ]
    for fit in fits:
        protocols = " or ".join(
            f"{p.alpha_ns / 1_000:.1f} us at {p.bytes_per_us / 1_000:.2f} GB/s" for p in fit.protocols
        )
        lines += ["", f"{fit.op}: {protocols}", f"{'bytes':>12} {'measured us':>12} {'predicted us':>12} {'error':>8}"]
        samples = [(sample, error, "") for sample, error in fit.fitted]
        samples += [(sample, error, "  not fitted") for sample, error in fit.held_out]
        for sample, error, mark in sorted(samples, key=lambda row: row[0].full_bytes):
            predicted = fit.predict_ns(sample.full_bytes) / 1_000
            lines.append(
                f"{sample.full_bytes:>12} {sample.time_ns / 1_000:>12.1f} {predicted:>12.1f} {error:>8.1%}{mark}"
            )
        lines += [
            error_line("fitted", [e for _, e in fit.fitted]),
            error_line("not fitted", [e for _, e in fit.held_out]),
        ]
        lines += [f"warning: {text}" for text in fit.warnings]
        lines += terminal_plot(fit)
    return lines


def error_line(name: str, errors: Sequence[float]) -> str:
    """The distribution of the absolute values of relative errors."""
    if not errors:
        return f"error on sizes {name}: none measured"
    sizes = sorted(abs(error) for error in errors)
    ninth = sizes[min(math.ceil(0.9 * len(sizes)), len(sizes)) - 1]
    return f"error on sizes {name}: median {median(sizes):.1%}, 90% within {ninth:.1%}, most {sizes[-1]:.1%}"


def terminal_plot(fit: FittedOp) -> list[str]:
    """Time over bytes on logarithmic axes: o measured and fitted, x measured and not fitted, . the model."""
    points = [(sample, "o") for sample, _ in fit.fitted] + [(sample, "x") for sample, _ in fit.held_out]
    xs = [math.log(max(sample.full_bytes, 1)) for sample, _ in points]
    low_x, high_x = min(xs), max(xs)
    curve = [math.exp(low_x + (high_x - low_x) * column / (_WIDTH - 1)) for column in range(_WIDTH)]
    model = [math.log(max(fit.predict_ns(round(size)), 1)) for size in curve]
    ys = [math.log(max(sample.time_ns, 1)) for sample, _ in points] + model
    low_y, high_y = min(ys), max(ys)

    def row(value: float) -> int:
        return round((high_y - value) / max(high_y - low_y, 1e-9) * (_HEIGHT - 1))

    grid = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    for column, value in enumerate(model):
        grid[row(value)][column] = "."
    for (sample, mark), x in zip(points, xs, strict=True):
        column = round((x - low_x) / max(high_x - low_x, 1e-9) * (_WIDTH - 1))
        grid[row(math.log(max(sample.time_ns, 1)))][column] = mark
    top, bottom = math.exp(high_y) / 1_000, math.exp(low_y) / 1_000
    labels = [f"{top:>10.1f} us"] + [" " * 13] * (_HEIGHT - 2) + [f"{bottom:>10.1f} us"]
    lines = [f"{label} |{''.join(cells)}" for label, cells in zip(labels, grid, strict=True)]
    lines.append(" " * 14 + "+" + "-" * _WIDTH)
    left, right = f"{round(math.exp(low_x))} bytes", f"{round(math.exp(high_x))} bytes"
    lines.append(" " * 15 + left + right.rjust(_WIDTH - len(left)))
    return lines


def save_plot(fits: Sequence[FittedOp], path: Path) -> None:
    """Write the same as PNG; needs matplotlib and raises `ImportError` without it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(fits), 4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, fit in zip(figure.subplots(1, len(fits), squeeze=False)[0], fits, strict=True):
        sizes = sorted(sample.full_bytes for sample, _ in (*fit.fitted, *fit.held_out))
        axes.loglog(sizes, [fit.predict_ns(size) / 1_000 for size in sizes], label="model")
        for rows, mark, label in ((fit.fitted, "o", "fitted"), (fit.held_out, "x", "not fitted")):
            axes.loglog([s.full_bytes for s, _ in rows], [s.time_ns / 1_000 for s, _ in rows], mark, label=label)
        axes.set_title(fit.op)
        axes.set_xlabel("bytes of the full tensor")
        axes.set_ylabel("microseconds")
        axes.legend()
    figure.savefig(path, format="png", dpi=120)
