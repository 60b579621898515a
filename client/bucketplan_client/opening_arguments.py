"""What `open_attempt` takes, checked before anything is sent: a wrong argument is the caller's, not the fleet's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bucketplan_client.arguments import BadArgument, is_unicode
from bucketplan_client.cache import PlanCache
from bucketplan_client.membership import GroupLike, members_of
from bucketplan_client.store import default_store
from bucketplan_client.transport import PlanClient
from bucketplan_core.attempt import MAX_RANK
from bucketplan_core.collectives import Options
from bucketplan_core.errors import DecodeError, describe_ranks
from bucketplan_core.wire import WireValue, pack, unpack

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

__all__ = [
    "is_rank",
    "read_groups",
    "read_options",
    "refuse_bad_choices",
    "refuse_bad_parts",
    "refuse_bad_place",
    "refuse_bad_seconds",
    "store_of",
]

_MAX_SECONDS = 365 * 86_400
_CHOICES = {"mode": ("leader", "every_rank"), "on_unavailable": ("local", "unbucketed", "error")}


def refuse_bad_place(*, job: object, rank: object, participants: Sequence[int] | None, name: object) -> None:
    """Raise `BadArgument` for what names an opening in the job's store: without it the others cannot be told."""
    if not _is_name(job):
        raise BadArgument("job", job, "a name in valid Unicode")
    if name is not None and not _is_name(name):
        raise BadArgument("name", name, "a name in valid Unicode, or None")
    if not is_rank(rank):
        raise BadArgument("rank", rank, f"a rank between 0 and {MAX_RANK}")
    if participants is None:
        return
    _refuse_bad_ranks("participants", participants)
    if rank not in participants:
        raise BadArgument(
            "rank",
            rank,
            f"one of the participants ({describe_ranks(participants)})",
            remedy="Call it on participants only",
        )


def read_groups(groups: Mapping[str, GroupLike], rank: int) -> dict[str, tuple[int, ...]]:
    """Members of this rank's groups by role, in group order; raises `BadArgument`."""
    if not isinstance(groups, Mapping):
        raise BadArgument("groups", groups, "a mapping of roles to process groups or ranks")
    read: dict[str, tuple[int, ...]] = {}
    for role, group in groups.items():
        if not _is_name(role):
            raise BadArgument("a role of groups", role, "a name in valid Unicode", remedy="Correct the role's name")
        option = f"groups[{role!r}]"
        try:
            members = members_of(group)
        except LookupError:
            raise BadArgument(option, group, "a process group of this process, its name, or ranks") from None
        except TypeError:
            raise BadArgument(option, group, "a process group, its name, or ranks") from None
        _refuse_bad_ranks(option, members)
        if rank not in members:
            raise BadArgument(
                option, members, f"ranks with rank {rank} among them", remedy="Give each rank its own groups"
            )
        read[role] = members
    return read


def refuse_bad_choices(*, cache: object, **choices: object) -> None:
    """Raise `BadArgument` for a `mode` or `on_unavailable` that is none, and a cache that is no `PlanCache`."""
    for option, value in choices.items():
        if not isinstance(value, str) or value not in _CHOICES[option]:
            raise BadArgument(option, value, " or ".join(map(repr, _CHOICES[option])))
    if cache is not None and not isinstance(cache, PlanCache):
        raise BadArgument("cache", cache, "a PlanCache, or None")


def refuse_bad_parts(*, client: object, defaults: object, on_mismatch: object) -> None:
    """Raise `BadArgument` for a `client` that is no `PlanClient`, `defaults` that are no `Options`, and no callable."""
    if client is not None and not isinstance(client, PlanClient):
        raise BadArgument("client", client, "a PlanClient, or None", remedy="Make it with PlanClient(address)")
    if defaults is not None and not isinstance(defaults, Options):
        raise BadArgument("defaults", defaults, "Options, or None")
    if not callable(on_mismatch):
        raise BadArgument("on_mismatch", on_mismatch, "a function of one error")


def store_of(store: Store | None) -> Store:
    """The job's rendezvous store, by default that of torch.distributed; raises `BadArgument` where there is none."""
    from torch.distributed import distributed_c10d

    if store is None:
        try:
            return default_store()
        except ValueError as error:
            remedy = "Call torch.distributed.init_process_group first, or pass store="
            raise BadArgument("store", None, "a store, since there is no process group", remedy=remedy) from error
    if not isinstance(store, distributed_c10d.Store):
        raise BadArgument("store", store, "a store of torch.distributed, or None")
    return store


def read_options(options: Mapping[str, WireValue] | None) -> dict[str, WireValue]:
    """The options as other ranks read them, tuples as lists; raises `BadArgument` for what no wire carries.

    Which options there are, the server knows.
    """
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise BadArgument("options", options, "a mapping of option names to values")
    try:
        encoded = pack(dict(options), root="options")
    except DecodeError as error:
        remedy = f"Correct the option, alike on every rank: {error.reason}"
        raise BadArgument(error.path, error.value, "an integer, a text or a truth value", remedy=remedy) from None
    read = unpack(encoded)
    assert isinstance(read, dict), "a map is read back as one"
    return read


def refuse_bad_seconds(**seconds: Any) -> None:
    """Raise `BadArgument` for the first of `seconds` that is no finite time of at most a year."""
    for option, value in seconds.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not 0 <= value <= _MAX_SECONDS:
            raise BadArgument(option, value, f"seconds, at least 0 and at most {_MAX_SECONDS:,} (a year)")


def _refuse_bad_ranks(option: str, ranks: object) -> None:
    if not isinstance(ranks, Sequence | set | frozenset) or not ranks or not all(map(is_rank, ranks)):
        raise BadArgument(option, ranks, f"ranks between 0 and {MAX_RANK}, at least one")
    if len(set(ranks)) != len(ranks):
        raise BadArgument(option, ranks, "ranks, each of them once")


def is_rank(value: object) -> bool:
    """Whether `value` is a rank."""
    return type(value) is int and 0 <= value <= MAX_RANK


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value) and is_unicode(value)
