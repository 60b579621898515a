"""httpx without its command line.

Importing httpx imports its command line where the packages for it happen to be installed: Click, Rich and Pygments,
more than httpx itself costs, in every training process. Imported from here it leaves them out until ``httpx.main`` is
called.
"""

from __future__ import annotations

import sys
from types import ModuleType

__all__ = ["httpx"]

_NAME = "httpx._main"


def _main() -> None:
    from httpx._main import main

    main()


_lean = "httpx" not in sys.modules
if _lean:
    _stand_in = ModuleType(_NAME)
    _stand_in.main = _main  # type: ignore[attr-defined]
    sys.modules[_NAME] = _stand_in
try:
    import httpx
finally:
    if _lean:
        del sys.modules[_NAME]
