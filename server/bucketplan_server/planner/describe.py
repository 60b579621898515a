"""What the store keeps of a request beside its bytes, so that it can be searched and audited."""

from __future__ import annotations

from bucketplan_core.request import Request

__all__ = ["request_facts"]


def request_facts(request: Request) -> dict[str, str | int]:
    """The columns of a signature that are copied from its request; lists of names hold one name a line."""
    candidates = request.candidates
    return {
        "groups": "\n".join(group.role for group in request.groups),
        "modules": "\n".join(sorted({name for c in candidates for name in c.module_fqns})),
        "num_candidates": len(candidates),
        "parameters": "\n".join(sorted({c.param_name for c in candidates if c.param_name})),
        "phase": request.phase,
        "strategy": request.options.strategy,
    }
