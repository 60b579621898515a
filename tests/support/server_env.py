"""A virtual environment as the server's machine has it: `bucketplan[server]`, built as a wheel, and no torch."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.paths import BUILD, ROOT

_HOME = BUILD / "server-env"


def torch_free_environment() -> Path:
    """The environment's bin/ folder, with the package built from the working tree as it is now.

    Dependencies stay between runs for as long as pyproject.toml and constraints.txt are the same; the package itself
    is built again each time, so that a template or migration that the wheel forgets is found.
    """
    _HOME.mkdir(parents=True, exist_ok=True)
    with (_HOME / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _ensure_dependencies()
        _pip("install", "--no-deps", "--force-reinstall", str(ROOT))
    return _HOME / "venv" / "bin"


def environment_of_its_own() -> dict[str, str]:
    """The variables for a process of that environment: without PYTHONPATH, by which it would see this working tree."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def _ensure_dependencies() -> None:
    inputs = [(ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    wanted = hashlib.sha256(b"\0".join(inputs)).hexdigest()
    stamp = _HOME / "stamp"
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    stamp.unlink(missing_ok=True)
    shutil.rmtree(_HOME / "venv", ignore_errors=True)
    _run(sys.executable, "-m", "venv", str(_HOME / "venv"))
    _pip("install", f"{ROOT}[server]", "--constraint", str(ROOT / "constraints.txt"))
    stamp.write_text(wanted)


def _pip(*arguments: str) -> None:
    _run(str(_HOME / "venv" / "bin" / "python"), "-m", "pip", "--quiet", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(
        command, env=environment_of_its_own(), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
