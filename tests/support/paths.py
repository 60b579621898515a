"""Where things lie: the repository, its build folder, and the shared graphs."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"


def graphs_dir() -> Path:
    """The folder of recorded graphs; skips the calling test, saying why, where it is not laid out.

    `BUCKETPLAN_GRAPHS` names it, else it is `../shared/graphs` seen from the repository.
    """
    folder = Path(os.environ.get("BUCKETPLAN_GRAPHS") or ROOT.parent / "shared" / "graphs")
    if not folder.is_dir():
        pytest.skip(f"no recorded graphs at {folder}; set BUCKETPLAN_GRAPHS to their folder")
    return folder
