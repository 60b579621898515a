"""Starting a console script whose packages come with an extra of the distribution."""

from __future__ import annotations

import importlib
import sys

__all__ = ["run_program"]

_EXIT_USAGE = 2


def run_program(program: str, module: str, *, extra: str) -> None:
    """Call `main` of `module`; where a package of others is missing, end with status 2 and one line on stderr.

    `program` is what the user typed, `extra` what has to be installed for it.
    """
    try:
        importlib.import_module(module).main()
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if not package or package.startswith("bucketplan"):
            raise
        sys.stderr.write(f"{program}: {package} is not installed; pip install 'bucketplan[{extra}]' installs it\n")
        sys.exit(_EXIT_USAGE)
