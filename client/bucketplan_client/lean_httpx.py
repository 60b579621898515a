"""httpx, loaded when it is first used, and without its command line.

It is half of what importing this client would cost, and a rank without a server needs none of it. Importing httpx
imports its command line too where the packages for it happen to be installed: Click, Rich and Pygments, more than httpx
itself costs, in every training process. Loaded from here it leaves them out until ``httpx.main`` is called.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__all__ = ["httpx", "load"]

_NAME = "httpx._main"


def load() -> ModuleType:
    """The real httpx."""
    if "httpx" in sys.modules:
        # Loaded by somebody else, or by another thread at this moment: the import system makes us wait for it.
        return importlib.import_module("httpx")
    stand_in = ModuleType(_NAME)
    stand_in.main = _main  # type: ignore[attr-defined]  # a module of our own making
    sys.modules[_NAME] = stand_in
    try:
        return importlib.import_module("httpx")
    finally:
        sys.modules.pop(_NAME, None)


def _main() -> None:
    from httpx._main import main

    main()


class _Lazy(ModuleType):
    def __getattr__(self, name: str) -> Any:
        value = getattr(load(), name)
        setattr(self, name, value)
        return value


if TYPE_CHECKING:
    import httpx
else:
    httpx = _Lazy("httpx")
