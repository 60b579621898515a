"""What the ranks of one group must hold in common, as one digest a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bucketplan_core.errors import GroupPlanMismatch
from bucketplan_core.plan import Decision, StepOp
from bucketplan_core.request import Request
from bucketplan_core.wire import WireValue, digest_of, pack

__all__ = ["group_digest", "group_digests", "validate_group_plans"]


def group_digest(request: Request, decision: Decision, role: str) -> str:
    """SHA-256 over everything of `role` that its ranks issue: collectives, payloads, and the order of launches and waits.

    Buckets in launch order with kind, dtype, op, members' identity and shapes in payload order; the steps of the group,
    fixed collectives included. Ranks of one group may differ elsewhere (pipeline stages, other groups).
    """
    sizes = {group.role: group.size for group in request.groups}
    position: dict[int, int] = {}
    steps: list[WireValue] = []
    for step in decision.steps:
        if step.op in (StepOp.LAUNCH, StepOp.WAIT):
            if request.lanes[decision.buckets[step.target].lane].group != role:
                continue
            number = position.setdefault(step.target, len(position))
            steps.append([int(step.op), number])
        elif request.fixed[step.target].group == role:
            steps.append([int(step.op), request.fixed[step.target].kind])
    buckets: list[WireValue] = []
    for index in position:
        bucket = decision.buckets[index]
        lane = request.lanes[bucket.lane]
        members: list[WireValue] = []
        for member in bucket.members:
            c = request.candidates[member]
            members.append(
                [
                    c.ordinal,
                    c.state_idx,
                    c.param_name,
                    c.dtype,
                    list(c.input_shape),
                    list(c.output_shape),
                ],
            )
        buckets.append(
            [
                lane.kind,
                lane.wire_dtype,
                lane.device_type,
                lane.reduce_op,
                bucket.rewrite,
                members,
            ]
        )
    return digest_of(
        pack({"buckets": buckets, "role": role, "size": sizes[role], "steps": steps})
    )


def group_digests(request: Request, decision: Decision) -> dict[str, str]:
    """The digest of every group that has a candidate, by role."""
    roles = sorted({candidate.group for candidate in request.candidates})
    return {role: group_digest(request, decision, role) for role in roles}


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
        _agree(
            role,
            "member list",
            {rank: ",".join(map(str, found)) for rank, found in members.items()},
        )


def _agree(role: str, what: str, values: Mapping[int, str]) -> None:
    holders: dict[str, list[int]] = {}
    for rank in sorted(values):
        holders.setdefault(values[rank], []).append(rank)
    if len(holders) > 1:
        raise GroupPlanMismatch(role=role, what=what, holders=holders)
