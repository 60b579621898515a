"""What the operating system must allow before thousands of ranks connect, checked at start.

With 1,024 open files uvicorn drops connections above that without a word in any log, so the limit is raised as far as
it may be and what is left is said.
"""

from __future__ import annotations

import resource
from pathlib import Path

import structlog

__all__ = ["prepare_limits"]

_RESERVED_FILES = 128
"""Files that are no connections: database, logs, pipes to planning processes."""
_SOMAXCONN = Path("/proc/sys/net/core/somaxconn")


def prepare_limits(*, expected_connections: int, backlog: int, somaxconn: Path = _SOMAXCONN) -> list[str]:
    """Raise the limit of open files to what is allowed; answers (and logs) a sentence for each limit too low."""
    log = structlog.get_logger("bucketplan_server")
    needed = expected_connections + _RESERVED_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        log.info("limit.raised", limit="nofile", was=soft, now=hard)
        soft = hard
    warnings = []
    if soft != resource.RLIM_INFINITY and soft < needed:
        warnings.append(
            f"open files are limited to {soft}, {expected_connections} connections need {needed}: those above the "
            f"limit will be dropped; raise it (ulimit -n {needed}, LimitNOFILE= of systemd) or lower "
            "BUCKETPLAN_EXPECTED_CONNECTIONS"
        )
    allowed = _read_number(somaxconn)
    if allowed is not None and allowed < backlog:
        warnings.append(
            f"the kernel queues at most {allowed} connections (net.core.somaxconn), {backlog} are wanted: a burst of "
            f"new connections may be refused; run sysctl -w net.core.somaxconn={backlog} or lower BUCKETPLAN_BACKLOG"
        )
    for warning in warnings:
        log.warning("limit.too_low", detail=warning)
    return warnings


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
