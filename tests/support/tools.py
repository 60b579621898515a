"""Programs of the distribution that tests use: found, or the test is skipped, or in CI it fails."""

import os
import shutil
import sys
from pathlib import Path

import pytest

_REQUIRED = "BUCKETPLAN_REQUIRE_TOOLS"
_SYSTEM_FOLDERS = ("/usr/sbin", "/usr/local/sbin", "/sbin")
"""Daemons live there, outside the PATH of an ordinary user."""


def tool(name: str, *, package: str) -> str:
    """Path of a program; skips the calling test where it is missing, and fails it under `BUCKETPLAN_REQUIRE_TOOLS`.

    `package` is the Debian package that brings it. `.ci/run` installs all of them and sets the variable.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", ""), *_SYSTEM_FOLDERS])
    found = shutil.which(name, path=path)
    if found is None:
        reason = f"{name} is not installed; apt-get install {package}"
        if os.environ.get(_REQUIRED, "") not in ("", "0"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found
