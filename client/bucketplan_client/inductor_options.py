"""What Inductor and Dynamo must and must not do beside a plan, and the settings that see to it.

A plan is one order of launches and waits. Inductor has passes of its own that bucket collectives again or move them
after our hook has run; beside those the ranks would issue something that nobody planned. What we can switch off
without taking anything from the user, `settings` switches off. What the user switched on to do the same job,
`refuse_conflicts` names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from bucketplan_client.errors import ClientError

__all__ = [
    "INDUCTOR_SETTINGS",
    "CompileConflict",
    "hook_without",
    "num_replayed",
    "passes_of",
    "refuse_conflicts",
    "refuse_undone_settings",
    "settings_of",
]

INDUCTOR_SETTINGS: Mapping[str, bool] = MappingProxyType(
    {
        # Buffers are reused by the order of calls in the wrapper. A launch that the plan moved up reads its input on
        # the communication stream until its wait, far behind the last call that names the buffer.
        "allow_buffer_reuse": False,
        # Re-sorts the scheduler's nodes for least memory, which carries each launch back to its first use.
        "reorder_for_peak_memory": False,
        # Raises launches and sinks waits by a heuristic of its own: the plan's order would be lost.
        "reorder_for_compute_comm_overlap": False,
    }
)
"""Options of `torch._inductor.config` that must have these values while planned graphs are compiled."""

_BUCKETING = {
    "bucket_all_gathers_fx": ("none",),
    "bucket_reduce_scatters_fx": ("none",),
    "bucket_all_reduces_fx": ("none",),
    "dedup_reduce_scatters": (False,),
    "_fuse_ddp_communication": (False,),
    "aten_distributed_optimizations.enable_overlap_scheduling": (False,),
    "aten_distributed_optimizations.collective_bucketing": (False, None),
    "aten_distributed_optimizations.allow_comms_decompositions": (False,),
    "aten_distributed_optimizations.enable_low_contention_collectives": (False,),
}
"""Inductor's own passes on collectives and the values under which they stay out of the way."""


_CACHE_HITS = (
    ("aot_autograd", "autograd_cache_hit"),
    ("inductor", "fxgraph_cache_hit"),
    ("dynamo_cache", "dynamo_cache_hit"),
)
"""Torch's counters of graphs for which no hook is called."""

_ABSENT = object()
"""The value of an option that this version of torch does not have."""


class CompileConflict(ClientError):
    """An option of torch's compiler defeats the plan: `option`, its `value`, and why the two cannot be together."""

    def __init__(self, option: str, value: object, why: str, *, remedy: str) -> None:
        self.option = option
        self.value = value
        self.why = why
        super().__init__(f"{option} is {value!r}, but {why}", remedy=remedy)


def settings_of(config: Any) -> dict[str, bool]:
    """Those of `INDUCTOR_SETTINGS` that this version of torch has."""
    return {option: value for option, value in INDUCTOR_SETTINGS.items() if _value(config, option) is not _ABSENT}


def refuse_conflicts() -> None:
    """Raise `CompileConflict` if a setting of torch lets ranks run other collectives than those planned."""
    import torch._dynamo.config as dynamo
    import torch._inductor.compile_fx as compile_fx
    import torch._inductor.config as inductor

    if dynamo.suppress_errors:
        raise CompileConflict(
            "torch._dynamo.config.suppress_errors",
            True,
            "a rank on which the pass fails would go on without buckets while the others use them, and hang",
            remedy="Set it to False, or unset TORCHDYNAMO_SUPPRESS_ERRORS, on every rank",
        )
    for option, allowed in _BUCKETING.items():
        value = _value(inductor, option)
        if value is not _ABSENT and value not in allowed:
            raise CompileConflict(
                f"torch._inductor.config.{option}",
                value,
                "Inductor would rewrite the planned collectives after the plan was applied",
                remedy=f"Set it to {allowed[0]!r}, or do not install the bucketing pass",
            )
    mode = getattr(compile_fx, "fx_compile_mode", None)
    if mode is not None and mode.name != "NORMAL":
        raise CompileConflict(
            "torch._inductor.compile_fx.fx_compile_mode",
            mode.name,
            "passes would run in another process, which is in no process group and holds no plans",
            remedy="Unset TORCHINDUCTOR_FX_COMPILE_MODE",
        )


def refuse_undone_settings() -> None:
    """Raise `CompileConflict` if something set an option of ours back after the pass was installed."""
    import torch._inductor.config as inductor

    for option, wanted in INDUCTOR_SETTINGS.items():
        value = _value(inductor, option)
        if value is not _ABSENT and value != wanted:
            raise CompileConflict(
                f"torch._inductor.config.{option}",
                value,
                "it was set after the bucketing pass was installed and would let Inductor undo the plan's order",
                remedy="Leave it alone (also in torch.compile's options) while the pass is installed",
            )


def passes_of(hook: Any) -> tuple[Any, ...]:
    """The passes that the value of a hook stands for, in the order in which they run; the links of chains as well."""
    if hook is None:
        return ()
    if isinstance(hook, list | tuple):
        return tuple(one for part in hook for one in passes_of(part))
    return (*(one for part in getattr(hook, "bucketplan_links", ()) for one in passes_of(part)), hook)


def hook_without(hook: Any, unwanted: Callable[[Any], bool]) -> Any:
    """The value of a hook without its `unwanted` passes, in the form in which it was set; None if nothing is left."""
    if isinstance(hook, list | tuple):
        kept = type(hook)(one for part in hook if (one := hook_without(part, unwanted)) is not None)
        return kept or None
    if hook is None or unwanted(hook):
        return None
    links = getattr(hook, "bucketplan_links", ())
    if not any(unwanted(one) for one in passes_of(list(links))):
        return hook
    kept = [one for part in links if (one := hook_without(part, unwanted)) is not None]
    return type(hook)(*kept) if len(kept) > 1 else next(iter(kept), None)


def _value(config: Any, option: str) -> Any:
    found = config
    for part in option.split("."):
        found = getattr(found, part, _ABSENT)
    return found


def num_replayed() -> int:
    """How many graphs this process took from torch's compile caches so far, whatever is in them."""
    from torch._dynamo.utils import counters

    return sum(int(counters[part][name]) for part, name in _CACHE_HITS if part in counters)
