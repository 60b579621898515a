"""Every error that leaves core, in one tree; `schedule.Unschedulable` stays between placement and planners.

    BucketplanError
    ├── DecodeError            a document is not what it should be: `path`, `value`, `reason`
    │   └── SchemaVersionError its schema number is not one that this build reads
    ├── SignatureMismatch      a document is not the content its name promises
    ├── IllegalPlan            a plan breaks a rule of legality: `rule`, `bucket`, `members`
    ├── PlanningError          a request cannot be planned as its options ask
    │   └── PlannerUnavailable this build does not hold the planner version that the request names
    └── GroupPlanMismatch      ranks of one group hold different plans: `holders`

Each carries its facts as fields, so that programs need not parse the sentence that people read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = [
    "BucketplanError",
    "DecodeError",
    "GroupPlanMismatch",
    "IllegalPlan",
    "PlannerUnavailable",
    "PlanningError",
    "SchemaVersionError",
    "SignatureMismatch",
    "describe_ranks",
]

_SHOWN_VALUE_CHARACTERS = 120
_SHOWN_RANK_RUNS = 32


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_VALUE_CHARACTERS else text[:_SHOWN_VALUE_CHARACTERS] + "..."


def describe_ranks(ranks: Sequence[int]) -> str:
    """Name ranks, neighbours as a run: ``rank 3``, ``ranks 0-6, 9``; past 32 runs it counts the rest."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    named = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:_SHOWN_RANK_RUNS]]
    unnamed = sum(last - first + 1 for first, last in runs[_SHOWN_RANK_RUNS:])
    tail = f" and {unnamed} more" if unnamed else ""
    return f"rank{'' if len(set(ranks)) == 1 else 's'} {', '.join(named)}{tail}"


def _restore(kind: type[BucketplanError], args: tuple[object, ...], state: dict[str, object]) -> BucketplanError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class BucketplanError(Exception):
    """Base of every error that bucketplan raises on purpose; crosses process borders with its fields."""

    def __reduce__(
        self,
    ) -> tuple[object, tuple[type[BucketplanError], tuple[object, ...], dict[str, object]]]:
        return (_restore, (type(self), self.args, dict(self.__dict__)))


class DecodeError(BucketplanError):
    """A document was refused; `path` names the offending field, `value` is what stood there."""

    def __init__(self, path: str, value: object, reason: str) -> None:
        self.path = path
        self.value = value
        self.reason = reason
        super().__init__(f"{path}: {reason} (got {_show(value)})")


class SchemaVersionError(DecodeError):
    """The document's schema version is not one of `supported`."""

    def __init__(self, path: str, value: object, supported: Sequence[int]) -> None:
        self.supported = tuple(supported)
        readable = ", ".join(str(version) for version in supported)
        super().__init__(
            path,
            value,
            f"unknown schema version; this build reads {readable}. Use matching releases",
        )


class SignatureMismatch(BucketplanError):
    """The name given to a document is not the hash of its content."""

    def __init__(self, *, claimed: str, actual: str, what: str = "request") -> None:
        self.claimed = claimed
        self.actual = actual
        self.what = what
        super().__init__(
            f"the {what} hashes to {actual}, but was sent as {claimed}; "
            "send the signature of exactly the bytes in the body"
        )


class IllegalPlan(BucketplanError):
    """A plan breaks `rule`; `bucket` and `members` say where. It is neither stored nor applied."""

    def __init__(
        self,
        rule: str,
        reason: str,
        *,
        bucket: str | None = None,
        members: Sequence[int] = (),
    ) -> None:
        self.rule = rule
        self.reason = reason
        self.bucket = bucket
        self.members = tuple(members)
        where = f" in bucket {bucket!r}" if bucket is not None else ""
        which = f" (candidates {', '.join(str(m) for m in self.members)})" if self.members else ""
        super().__init__(f"rule {rule!r} broken{where}{which}: {reason}")


class PlanningError(BucketplanError):
    """A request is well-formed but cannot be planned as its options ask; `option` names the culprit."""

    def __init__(self, option: str, value: object, reason: str) -> None:
        self.option = option
        self.value = value
        self.reason = reason
        super().__init__(f"option {option}={_show(value)}: {reason}")


class PlannerUnavailable(PlanningError):
    """The planner version that the request names is not part of this build."""

    def __init__(self, planner: str, available: Sequence[str]) -> None:
        self.planner = planner
        self.available = tuple(available)
        super().__init__(
            "planner",
            planner,
            f"this build holds {', '.join(available)}; use a release that has it",
        )


class GroupPlanMismatch(BucketplanError):
    """Ranks of one group hold different values; `holders` maps each value to the ranks that hold it."""

    def __init__(self, *, role: str, what: str, holders: Mapping[str, Sequence[int]]) -> None:
        self.role = role
        self.what = what
        self.holders = {value: tuple(ranks) for value, ranks in holders.items()}
        held = sorted(self.holders.items(), key=lambda item: (-len(item[1]), item[0]))
        parts = "; ".join(
            f"{describe_ranks(ranks)} hold{'s' if len(ranks) == 1 else ''} {value}" for value, ranks in held
        )
        super().__init__(
            f"group {role!r}: its ranks do not agree on the {what}: {parts}. "
            "Applying either would hang the job; compare the graphs of the odd ranks with the others"
        )
