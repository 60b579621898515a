"""Parameters of addresses that routes and pages share: digests, and the cursor of the list of plans."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import Path

from bucketplan_core.wire import MAX_INT

__all__ = ["CURSOR_PATTERN", "DIGEST_PATTERN", "Signature", "read_cursor", "write_cursor"]

DIGEST_PATTERN = "^[0-9a-f]{64}$"
"""SHA-256 in lower-case hex."""
CURSOR_PATTERN = "^[0-9]{1,19}-[0-9a-f]{64}$"
"""When the last plan of a page was stored, in ns since 1970, and its signature."""
Signature = Annotated[str, Path(pattern=DIGEST_PATTERN, description="signature of the request")]


def write_cursor(created_ns: int, signature: str) -> str:
    """The cursor of the plans stored before this one."""
    return f"{created_ns}-{signature}"


def read_cursor(cursor: str) -> tuple[int, str] | None:
    """The time and signature of a cursor, None where it is none."""
    created_ns, _, signature = cursor.partition("-")
    if re.fullmatch(CURSOR_PATTERN, cursor) is None or int(created_ns) > MAX_INT:
        return None
    return int(created_ns), signature
