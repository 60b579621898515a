"""Calibration fits what it measures, says how well, and runs as a job on real ranks."""

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketplan_client.calibrate.__main__ import main as run_rank
from bucketplan_client.calibrate.fit import LatencyTooLong, Sample, fit_collective, round_figure
from bucketplan_client.calibrate.job import CalibrationPlan, calibrate
from bucketplan_client.calibrate.report import error_line, report_lines, save_plot, terminal_plot
from bucketplan_core.cost import CollectiveModel
from bucketplan_core.errors import PlanningError
from bucketplan_core.hardware import Protocol
from bucketplan_core.presets import GroupShape, MeasuredProfile, resolve_measured
from bucketplan_core.wire import from_json
from tests.support.gloo_pool import gloo_pool
from tests.support.paths import ROOT

SIZES = [4_096 << k for k in range(19)]
SMALL = CalibrationPlan(name="test", min_bytes=4_096, max_bytes=1 << 20, repeats=3, matrix_size=64)


def samples_of(op, ranks, protocols, sizes=SIZES):
    model = CollectiveModel.of(op, ranks, protocols)
    return [Sample(size, model.time_ns(size)) for size in sizes]


@given(
    op=st.sampled_from(["all_gather", "reduce_scatter", "all_reduce"]),
    ranks=st.sampled_from([2, 8, 64]),
    alpha=st.integers(1_000, 1_000_000),
    rate=st.integers(1_000, 400_000),
    faster=st.integers(2, 20),
    later=st.integers(2, 10),
    two=st.booleans(),
)
def test_protocols_that_were_there_are_found_within_their_rounding(op, ranks, alpha, rate, faster, later, two):
    protocols = [Protocol(alpha, rate)] + ([Protocol(alpha * later, rate * faster)] if two else [])
    fit = fit_collective(op, ranks, samples_of(op, ranks, protocols), samples_of(op, ranks, protocols, [12_345_678]))
    assert len(fit.protocols) <= 3
    worst = max(abs(error) for _, error in (*fit.fitted, *fit.held_out))
    # One line is exact but for two digits of each figure; the knee of two lies inside a run of the fit.
    assert worst < (0.35 if two else 0.06)


def test_a_fitted_envelope_is_concave_so_that_one_launch_is_never_slower_than_two():
    noisy = [Sample(size, 20_000 + size // 100 + (size * 7919) % 9_000) for size in SIZES]
    fit = fit_collective("all_gather", 8, noisy)
    alphas = [p.alpha_ns for p in fit.protocols]
    rates = [p.bytes_per_us for p in fit.protocols]
    assert alphas == sorted(alphas)
    assert rates == sorted(rates)


def test_one_size_is_refused_and_flat_times_are_latency_only():
    with pytest.raises(ValueError, match="at least two sizes"):
        fit_collective("all_gather", 2, [Sample(8, 5), Sample(8, 6)])
    fit = fit_collective("all_gather", 2, [Sample(size, 50_000) for size in SIZES])
    assert fit.predict_ns(4_096) - 50_000 in (0, 1)
    assert fit.predict_ns(1 << 30) - 50_000 in (0, 1)  # a whole nanosecond for the bytes, however fast


def test_times_that_no_envelope_follows_and_times_of_zero_are_warned_of():
    def warnings(times):
        return fit_collective("all_gather", 8, [Sample(size, time) for size, time in times]).warnings

    [convex] = warnings([(2**k, 4**k) for k in range(1, 12)])
    assert "rise ever slower" in convex
    [zero] = warnings([(1_000, 0), (2_000, 0)])
    assert "every measured time is 0" in zero
    assert warnings([(size, 20_000 + size // 100) for size in SIZES]) == []
    assert warnings([(size, min(5_000 + size // 2, 60_000 + size // 20)) for size in SIZES]) == []


def test_a_latency_that_no_profile_holds_is_named():
    with pytest.raises(LatencyTooLong, match=r"all_gather: a latency of \d+ ns was fitted") as caught:
        fit_collective("all_gather", 8, [Sample(2**50, 2**60), Sample(2**53, 2**62)])
    assert caught.value.alpha_ns > caught.value.most_ns == 2**50


def test_a_rank_of_the_job_says_what_was_measured_and_what_to_do(monkeypatch, capsys):
    def measure(*_, **__):
        raise LatencyTooLong("all_gather", 2**60)

    monkeypatch.setattr("bucketplan_client.calibrate.__main__.run_job", measure)
    assert run_rank(["--name", "x"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("calibrate: all_gather: a latency of 1152921504606846976 ns was fitted")
    assert "measure again" in message


@given(st.floats(0, 1e15))
def test_figures_keep_two_digits(value):
    rounded = round_figure(value)
    assert len(str(rounded).rstrip("0")) <= 2 or rounded < 100
    assert abs(rounded - value) <= max(0.05 * value, 0.5)


def test_the_report_shows_errors_of_sizes_that_were_not_fitted_and_a_plot():
    fit = fit_collective(
        "all_gather", 8, samples_of("all_gather", 8, [Protocol(30_000, 360_000)]), [Sample(10_000, 60_000)]
    )
    assert error_line("not fitted", [e for _, e in fit.held_out]).startswith("error on sizes not fitted: median 50.0%")
    assert error_line("not fitted", []) == "error on sizes not fitted: none measured"
    plot = "\n".join(terminal_plot(fit))
    assert plot.count("o") >= 10
    assert "x" in plot


@pytest.mark.parametrize("bad", [{"min_bytes": 2}, {"max_bytes": 5_000}, {"repeats": 0}])
def test_plans_that_measure_nothing_are_refused(bad):
    with pytest.raises(ValueError, match="must be at least"):
        CalibrationPlan(**({"name": "x"} | bad))


def test_outside_a_job_the_command_says_how_to_start_one():
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-m", "bucketplan_client.calibrate", "--name", "x"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "torchrun --nproc-per-node N -m bucketplan_client.calibrate" in done.stderr


def calibrated():
    profile, fits = calibrate(SMALL)
    return profile.to_wire(), report_lines(profile, fits)


def test_two_ranks_measure_and_fit_the_same_profile_which_resolves_for_their_shape_only():
    (first, lines), (second, _) = gloo_pool(2).run("tests.client.test_calibrate:calibrated")
    assert first == second
    print("\n".join(line for line in lines if line.startswith("error on sizes")))
    profile = MeasuredProfile.from_wire(first)
    assert profile.shape == GroupShape(2, 1)
    assert profile.backend == "gloo"
    hardware = resolve_measured([profile], {"fsdp": GroupShape(2, 1), "alone": GroupShape(1, 1)})
    assert {(cost.group, cost.op) for cost in hardware.collectives} == {
        ("fsdp", op) for op in ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")
    }
    with pytest.raises(PlanningError, match="nobody measured 8 ranks on 1 nodes, as group 'fsdp' has"):
        resolve_measured([profile], {"fsdp": GroupShape(8, 1)})


def test_the_job_writes_profile_and_plot(tmp_path):
    output, plot = tmp_path / "profile.json", tmp_path / "fit.png"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "bucketplan_client.calibrate", "--name", "two-ranks", "--output", str(output), "--plot", str(plot),
        "--max-bytes", "1048576", "--repeats", "2", "--matrix-size", "64",
    ]  # fmt: skip
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("error on sizes not fitted: median") == 3
    assert MeasuredProfile.from_wire(from_json(output.read_bytes())).name == "two-ranks"
    assert json.loads(output.read_text())["size"] == 2
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_plot_is_a_picture_of_all_operations(tmp_path):
    fits = [
        fit_collective(op, 8, samples_of(op, 8, [Protocol(30_000, 360_000)])) for op in ("all_gather", "all_reduce")
    ]
    save_plot(fits, tmp_path / "fit.png")
    assert (tmp_path / "fit.png").read_bytes().startswith(b"\x89PNG")
