"""What the ranks of one group must hold in common, as one digest a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bucketplan_core.collectives import Lane
from bucketplan_core.errors import GroupPlanMismatch
from bucketplan_core.plan import Bucket, Decision, StepOp
from bucketplan_core.request import Request
from bucketplan_core.wire import WireValue, digest_of, pack

__all__ = ["group_digest", "group_digests", "validate_group_plans"]


def group_digest(request: Request, decision: Decision, role: str) -> str:
    """SHA-256 over everything of `role` that its ranks issue: collectives, payloads, order of launches and waits.

    Buckets in launch order with kind, dtype, op, members' identity and shapes in payload order; the steps of the group,
    fixed collectives included. Ranks of one group may differ elsewhere (pipeline stages, other groups).
    """
    return _digests(request, decision, [role])[role]


def group_digests(request: Request, decision: Decision) -> dict[str, str]:
    """The digest of every group that has a candidate, by role; one pass over the decision for all of them."""
    return _digests(request, decision, sorted({candidate.group for candidate in request.candidates}))


def _digests(request: Request, decision: Decision, roles: Sequence[str]) -> dict[str, str]:
    wanted = frozenset(roles)
    contents = {group.role: _GroupContent(group.role, group.size) for group in request.groups if group.role in wanted}
    for step in decision.steps:
        if step.op > StepOp.WAIT:
            fixed = request.fixed[step.target]
            content = contents.get(fixed.group) if fixed.group is not None else None
            if content is not None:
                content.ops.append(int(step.op))
                content.targets.append(fixed.kind)
            continue
        bucket = decision.buckets[step.target]
        lane = request.lanes[bucket.lane]
        content = contents.get(lane.group)
        if content is not None:
            content.ops.append(int(step.op))
            content.targets.append(content.number(step.target, bucket, lane))
    return {role: contents[role].digest(request) for role in roles}


class _GroupContent:
    """What one group issues, gathered in step order."""

    def __init__(self, role: str, size: int) -> None:
        self.role = role
        self.size = size
        self.ops: list[WireValue] = []
        self.targets: list[WireValue] = []
        self._numbers: dict[int, int] = {}
        self._buckets: list[tuple[Bucket, Lane]] = []

    def number(self, index: int, bucket: Bucket, lane: Lane) -> int:
        """The bucket's number in this group, by first appearance."""
        number = self._numbers.setdefault(index, len(self._buckets))
        if number == len(self._buckets):
            self._buckets.append((bucket, lane))
        return number

    def digest(self, request: Request) -> str:
        members = [request.candidates[member] for bucket, _ in self._buckets for member in bucket.members]
        content: dict[str, WireValue] = {
            "buckets": {
                "device_type": [lane.device_type for _, lane in self._buckets],
                "group_size": [lane.group_size for _, lane in self._buckets],
                "kind": [lane.kind for _, lane in self._buckets],
                "num_members": [len(bucket.members) for bucket, _ in self._buckets],
                "reduce_op": [lane.reduce_op for _, lane in self._buckets],
                "rewrite": [bucket.rewrite for bucket, _ in self._buckets],
                "wire_dtype": [lane.wire_dtype for _, lane in self._buckets],
            },
            "members": {
                "dtype": [c.dtype for c in members],
                "input_shape": [list(c.input_shape) for c in members],
                "ordinal": [c.ordinal for c in members],
                "output_shape": [list(c.output_shape) for c in members],
                "param_name": [c.param_name for c in members],
                "state_idx": [c.state_idx for c in members],
            },
            "role": self.role,
            "size": self.size,
            "steps": {"op": self.ops, "target": self.targets},
        }
        return digest_of(pack(content))


def validate_group_plans(
    role: str,
    digests: Mapping[int, str],
    members: Mapping[int, Sequence[int]] | None = None,
) -> None:
    """Raise `GroupPlanMismatch` unless all ranks report one digest, and, where given, one member list.

    `digests` maps each rank to its digest of the group, `members` each rank to the ranks it believes the group has, in
    group order. The error lists which ranks hold which value.
    """
    _agree(role, "plan", digests)
    if members is not None:
        _agree(role, "member list", {rank: ",".join(map(str, found)) for rank, found in members.items()})


def _agree(role: str, what: str, values: Mapping[int, str]) -> None:
    holders: dict[str, list[int]] = {}
    for rank in sorted(values):
        holders.setdefault(values[rank], []).append(rank)
    if len(holders) > 1:
        raise GroupPlanMismatch(role=role, what=what, holders=holders)
