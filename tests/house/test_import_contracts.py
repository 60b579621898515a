"""The import contracts of pyproject.toml hold, and each of them notices what it forbids."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SOURCE_ROOTS = ("core", "server", "client")
CORE_IS_ALONE = "core imports neither torch nor the server nor the client"


def lint_imports(folder: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    # PYTHONPATH stands before the editable installation, so that a copy is judged by its own sources.
    env = os.environ | {"PYTHONPATH": os.pathsep.join(str(folder / root) for root in SOURCE_ROOTS)}
    return subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-logo", "--cache-dir", str(cache)],
        cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_contracts_hold(tmp_path):
    done = lint_imports(ROOT, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("package", "statement", "contract"),
    [
        ("core/bucketplan_core", "import torch.fx", CORE_IS_ALONE),
        (
            "core/bucketplan_core",
            "import bucketplan_server",
            CORE_IS_ALONE,
        ),
        ("core/bucketplan_core", "from fastapi import FastAPI", "core imports neither web nor database packages"),
        ("core/bucketplan_core", "import sqlalchemy.orm", "core imports neither web nor database packages"),
        ("server/bucketplan_server", "import torch", "server imports neither torch nor the client"),
        ("server/bucketplan_server", "import bucketplan_client", "server imports neither torch nor the client"),
        ("client/bucketplan_client", "import bucketplan_server", "client never imports the server"),
    ],
)
def test_a_forbidden_import_breaks_its_contract(tmp_path, package, statement, contract):
    for root in SOURCE_ROOTS:
        shutil.copytree(ROOT / root, tmp_path / root, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    # Inside a function, where no import at start-up would show it.
    (tmp_path / package / "intruder.py").write_text(f"def late() -> None:\n    {statement}\n")

    done = lint_imports(tmp_path, tmp_path / "cache")

    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{contract} BROKEN" in done.stdout
    assert "intruder" in done.stdout


def test_an_import_by_way_of_core_breaks_the_server_too(tmp_path):
    for root in SOURCE_ROOTS:
        shutil.copytree(ROOT / root, tmp_path / root, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "core/bucketplan_core/intruder.py").write_text("import torch\n")
    (tmp_path / "server/bucketplan_server/guest.py").write_text("import bucketplan_core.intruder\n")

    done = lint_imports(tmp_path, tmp_path / "cache")

    assert done.returncode == 1, done.stdout + done.stderr
    assert "server imports neither torch nor the client BROKEN" in done.stdout
