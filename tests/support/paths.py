"""Where things lie: the repository, its build folder, and the shared graphs."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
GRAPHS_DIR = Path(os.environ.get("BUCKETPLAN_GRAPHS") or ROOT.parent / "shared" / "graphs")
"""`BUCKETPLAN_GRAPHS` names the folder of recorded graphs, else it is `../shared/graphs` seen from the repository."""


def graphs_dir() -> Path:
    """The folder of recorded graphs; skips the calling test, saying why, where it is not laid out."""
    if not GRAPHS_DIR.is_dir():
        pytest.skip(f"no recorded graphs at {GRAPHS_DIR}; set BUCKETPLAN_GRAPHS to their folder")
    return GRAPHS_DIR
