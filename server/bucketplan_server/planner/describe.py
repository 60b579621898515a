"""What the store keeps of a request beside its bytes, so that it can be searched and audited."""

from __future__ import annotations

from bucketplan_core.errors import DecodeError
from bucketplan_core.request import Request

__all__ = ["request_facts"]


def request_facts(request: Request) -> dict[str, str | int]:
    """The columns of a signature that are copied from its request; lists of names hold one name a line.

    Raises `DecodeError` for a name with U+0000: PostgreSQL stores no such text.
    """
    candidates = request.candidates
    for index, candidate in enumerate(candidates):
        for name in (candidate.param_name or "", *candidate.module_fqns):
            _refuse_nul(f"request.candidates[{index}]", name)
    for index, group in enumerate(request.groups):
        _refuse_nul(f"request.groups[{index}].role", group.role)
    return {
        "groups": "\n".join(group.role for group in request.groups),
        "modules": "\n".join(sorted({name for c in candidates for name in c.module_fqns})),
        "num_candidates": len(candidates),
        "parameters": "\n".join(sorted({c.param_name for c in candidates if c.param_name})),
        "phase": request.phase,
        "strategy": request.options.strategy,
    }


def _refuse_nul(path: str, name: str) -> None:
    if "\0" in name:
        raise DecodeError(path, name, "a name must not hold U+0000")
