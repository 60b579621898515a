"""`bucketplan calibrate`: measure this host's devices in a job of its own, hand back the profile, store it by name."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from bucketplan_client.cli.output import EXIT_NEGATIVE, EXIT_USAGE, fail, failing_well, not_empty, print_json, working
from bucketplan_client.cli.shapes import STORED_PROFILE, checked
from bucketplan_client.files import read_small_file
from bucketplan_core.errors import DecodeError
from bucketplan_core.presets import MeasuredProfile
from bucketplan_core.wire import WireValue, from_json, to_json

__all__ = ["calibrate"]

_MAX_PROFILE_BYTES = 2**20
"""A profile holds a few protocols of each collective and group: some kilobytes."""
_STORABLE = re.compile("[A-Za-z0-9][A-Za-z0-9._:-]{0,199}")
_LEAST_SPAN = 16
"""Sizes double from the smallest to the largest, and a fit needs some of them."""


def calibrate(
    context: typer.Context,
    name: Annotated[str | None, typer.Option(help="Name of the profile; that of --store where left out.")] = None,
    ranks: Annotated[int, typer.Option(help="Processes on this host, one a device.", min=2)] = 8,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the profile here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write measured and fitted times here, as PNG.")] = None,
    store: Annotated[str | None, typer.Option(help="Store it on the server under this name.", metavar="NAME")] = None,
    measured: Annotated[
        Path | None, typer.Option("--from", help="Store this profile, written by --output, and measure nothing.")
    ] = None,
    reason: Annotated[
        str, typer.Option(help="Why it is stored; goes into the audit log.", callback=not_empty)
    ] = "calibrated",
    min_bytes: Annotated[int, typer.Option(help="Smallest full tensor.", min=4)] = 4_096,
    max_bytes: Annotated[int, typer.Option(help="Largest full tensor.", min=8)] = 1 << 30,
    repeats: Annotated[int, typer.Option(help="Timed repetitions of each size.", min=1)] = 20,
    matrix_size: Annotated[int, typer.Option(help="Side of the matrices that compute rates use.", min=16)] = 4_096,
    as_json: Annotated[bool, typer.Option("--json", help="Answer with the profile as JSON.")] = False,
) -> None:
    """Measure collectives, copies and launches of this host, or of the job that torchrun started.

    Needs a server only for --store. For several hosts start it on all of them:
    torchrun ... --no-python bucketplan calibrate --name NAME.
    """
    own_name = _name_of(name, store, measured)
    _refuse_what_would_lose_it(min_bytes, max_bytes, {"--output": output, "--plot": plot})
    if measured is not None:
        profile = replace(_read(context, measured), name=own_name)
        _store(context, profile, reason, kept=measured)
        if as_json:
            print_json(profile.to_wire())
        return
    given: dict[str, object] = {"name": own_name, "min-bytes": min_bytes, "max-bytes": max_bytes, "repeats": repeats}
    given |= {"matrix-size": matrix_size} | ({} if plot is None else {"plot": plot})
    with tempfile.TemporaryDirectory() as folder:
        path = output if output is not None else Path(folder) / "profile.json"
        if "RANK" in os.environ:
            from bucketplan_client.calibrate.__main__ import main as run_rank

            kept = output is not None or store is not None or as_json
            with contextlib.redirect_stdout(io.StringIO()) if as_json else contextlib.nullcontext():
                status = run_rank(_flags({**given, "output": path} if kept else given))
            if status or os.environ["RANK"] != "0":
                raise typer.Exit(status)
        else:
            report = _run_job(context, ranks, {**given, "output": path})
            if not as_json:
                sys.stdout.write(report)
        if store is not None:
            _store(context, _read(context, path), reason, kept=output)
        # Last, since an error is the one document on stdout.
        if as_json:
            print_json(from_json(path.read_bytes()))


def _name_of(name: str | None, store: str | None, measured: Path | None) -> str:
    """The profile's name, which is the one it is stored under."""
    if measured is not None and store is None:
        raise typer.BadParameter("say under which name with --store", param_hint="--from")
    if name is not None and store is not None and name != store:
        raise typer.BadParameter(
            f"the profile is named {name!r}, it cannot be stored as {store!r}", param_hint="--store"
        )
    if store is not None and _STORABLE.fullmatch(store) is None:
        raise typer.BadParameter(
            f"{store!r} is no name of a profile: a letter or digit, then up to 199 more of these and of ._:-",
            param_hint="--store",
        )
    found = name if name is not None else store
    if found is None:
        raise typer.BadParameter("name the profile with --name, or with --store to store it", param_hint="--name")
    return found


def _refuse_what_would_lose_it(min_bytes: int, max_bytes: int, paths: Mapping[str, Path | None]) -> None:
    """Raise wrong usage for what the job would find out when it has begun, or has measured."""
    if max_bytes < _LEAST_SPAN * min_bytes:
        raise typer.BadParameter(
            f"{max_bytes} is less than {_LEAST_SPAN} times --min-bytes {min_bytes}", param_hint="--max-bytes"
        )
    for option, path in paths.items():
        if path is None:
            continue
        if not path.absolute().parent.is_dir():
            raise typer.BadParameter(f"there is no folder {path.parent}", param_hint=option)
        if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            raise typer.BadParameter(f"{path} cannot be written", param_hint=option)


def _run_job(context: typer.Context, ranks: int, given: Mapping[str, object]) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "bucketplan_client.calibrate", *_flags(given)]
    with working(f"calibrating {ranks} ranks"):
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.stderr.write(done.stdout)
        problem = {"type": "urn:bucketplan:client:CalibrationFailed", "remedy": "Read the job's messages on stderr"}
        fail(context, "the calibration job failed; its messages are above", status=EXIT_NEGATIVE, problem=problem)
    return done.stdout


def _read(context: typer.Context, path: Path) -> MeasuredProfile:
    try:
        return MeasuredProfile.from_wire(from_json(read_small_file(path, most_bytes=_MAX_PROFILE_BYTES)))
    except (OSError, DecodeError) as error:
        problem = {"type": f"urn:bucketplan:client:{type(error).__name__}", "remedy": "Give a file of --output"}
        fail(context, f"{path} is no measured profile: {error}", status=EXIT_USAGE, problem=problem)


def _store(context: typer.Context, profile: MeasuredProfile, reason: str, *, kept: Path | None) -> None:
    """Send the profile; a measurement that cannot be stored is kept in a file, for `--from`."""
    body: dict[str, WireValue] = {"profile": profile.to_wire(), "reason": reason}
    stored: dict[str, Any] | None = None
    try:
        with failing_well(context), context.obj.connect() as client, working("storing the profile"):
            answer = client.put(f"/v1/profiles/{quote(profile.name, safe='')}", body)
            stored = checked(answer, STORED_PROFILE, where=client.where)
    finally:
        if stored is None:
            try:
                path = kept if kept is not None else _keep(profile)
                said = f"in {path}; store it with: bucketplan calibrate --store {profile.name} --from {path}"
            except OSError as error:
                said = f"in no file ({error}), so here it is:\n{to_json(profile.to_wire()).decode()}"
            sys.stderr.write(f"the profile is {said}\n")
    sys.stderr.write(f"stored as {profile.name}, version {stored['version']}, digest {stored['digest']}\n")


def _keep(profile: MeasuredProfile) -> Path:
    path = Path(f"{quote(profile.name, safe='')}.profile.json")
    path.write_bytes(to_json(profile.to_wire(), indent=2) + b"\n")
    return path


def _flags(given: Mapping[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in given.items()]
