"""How `bucketplan explain` shows the server's explanation: what limits the step, then each bucket with its reasons."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bucketplan_client.cli.output import facts, table

__all__ = ["show_explanation"]

_SHOWN_MEMBERS = 2


def show_explanation(found: Mapping[str, Any]) -> None:
    """Print the tree of `bucketplan_core.explain`; integers that JSON made texts are read back."""
    step, limits = found["step"], found["limits"]
    budget = limits.get("memory_budget_bytes")
    facts(
        {
            "step": f"{_ms(step['step_ns'])} ms, lower bound {_ms(step['bound_ns'])} ms",
            "exposed": f"{_ms(step['exposed_ns'])} ms",
            "limited by": limits["because"],
            "peak": f"{_mb(limits['peak_bytes'])} MB"
            + ("" if budget is None else f" of {_mb(budget)} MB{', tight' if limits.get('memory_is_tight') else ''}"),
        }
    )
    columns = ("bucket", "members", "MB", "launch", "wait", "exposed us", "why it is as it is")
    table(columns, map(_row, found["buckets"]), empty="no buckets")


def _row(bucket: Mapping[str, Any]) -> tuple[object, ...]:
    names = bucket["members"]
    more = f" and {len(names) - _SHOWN_MEMBERS} more" if len(names) > _SHOWN_MEMBERS else ""
    return (
        bucket["id"],
        ", ".join(names[:_SHOWN_MEMBERS]) + more,
        _mb(bucket["bytes"]),
        f"gap {bucket['launch_gap']}",
        f"gap {bucket['wait_gap']}",
        f"{int(bucket['exposed_ns']) / 1e3:.1f}",
        _why(bucket),
    )


def _why(bucket: Mapping[str, Any]) -> str:
    if "alone" in bucket:
        return f"alone: {bucket['alone']}"
    return f"opened: {bucket['opened']['because']}; closed: {bucket['closed']['because']}"


def _ms(nanoseconds: object) -> str:
    return f"{int(str(nanoseconds)) / 1e6:.3f}"


def _mb(num_bytes: object) -> str:
    return f"{int(str(num_bytes)) / 1e6:.1f}"
