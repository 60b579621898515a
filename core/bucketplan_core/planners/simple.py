"""Planners that follow a stated rule and look at no cost: `none`, `size`, `module`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bucketplan_core.collectives import Lane
from bucketplan_core.errors import PlanningError
from bucketplan_core.planners.base import Proposal
from bucketplan_core.profile import CostProfile
from bucketplan_core.request import Request
from bucketplan_core.schedule import legalize, place_original, place_scheduled

__all__ = ["ModulePlanner", "NonePlanner", "SizePlanner", "fill_by_size"]


def _placed(request: Request, buckets: Sequence[tuple[int, ...]]) -> Proposal:
    place = place_scheduled if request.options.placement == "scheduled" else place_original
    return Proposal(legalize(request, buckets, place))


def fill_by_size(
    request: Request, members: Iterable[int], *, first_cap_bytes: int, cap_bytes: int
) -> list[tuple[int, ...]]:
    """Cut `members` into runs of at most the cap that can be launched and waited for together.

    The first run has a cap of its own. Bytes are those of the unsharded tensors. A member above the cap stands alone.
    """
    buckets: list[list[int]] = []
    size_bytes = earliest = latest = 0
    for member in members:
        candidate = request.candidates[member]
        full_bytes = request.full_bytes[member]
        cap = cap_bytes if len(buckets) > 1 else first_cap_bytes
        if buckets and size_bytes + full_bytes <= cap:
            together_from = max(earliest, candidate.earliest_launch)
            together_to = min(latest, candidate.latest_launch, candidate.latest_wait)
            if together_from <= together_to:
                buckets[-1].append(member)
                size_bytes += full_bytes
                earliest, latest = together_from, together_to
                continue
        buckets.append([member])
        size_bytes = full_bytes
        earliest = candidate.earliest_launch
        latest = min(candidate.latest_launch, candidate.latest_wait)
    return [tuple(bucket) for bucket in buckets]


class NonePlanner:
    """Every candidate alone."""

    version = "none/1"
    uses_profile = False

    def propose(self, request: Request, profile: CostProfile) -> Proposal:
        return _placed(request, [(member,) for lane in request.lanes for member in lane.members])


class SizePlanner:
    """Lane order, a cap in bytes, the first bucket of a lane at a cap of its own."""

    version = "size/1"
    uses_profile = False

    def propose(self, request: Request, profile: CostProfile) -> Proposal:
        options = request.options
        return _placed(
            request,
            [
                bucket
                for lane in request.lanes
                for bucket in fill_by_size(
                    request,
                    lane.members,
                    first_cap_bytes=options.first_bucket_cap_bytes,
                    cap_bytes=options.bucket_cap_bytes,
                )
            ],
        )


class ModulePlanner:
    """One bucket a module scope and lane, split at the cap; candidates of no scope stay alone."""

    version = "module/1"
    uses_profile = False

    def propose(self, request: Request, profile: CostProfile) -> Proposal:
        if request.candidates and all(candidate.scope is None for candidate in request.candidates):
            raise PlanningError(
                "strategy",
                "module",
                "no candidate has a scope; give module paths or patterns, or use strategy size",
            )
        return _placed(
            request,
            [bucket for lane in request.lanes for bucket in self._of_lane(request, lane)],
        )

    def _of_lane(self, request: Request, lane: Lane) -> list[tuple[int, ...]]:
        cap = request.options.bucket_cap_bytes
        scopes: dict[str, list[int]] = {}
        alone: list[tuple[int, ...]] = []
        for member in lane.members:
            scope = request.candidates[member].scope
            if scope is None:
                alone.append((member,))
            else:
                scopes.setdefault(scope, []).append(member)
        fused = [
            bucket
            for members in scopes.values()
            for bucket in fill_by_size(request, members, first_cap_bytes=cap, cap_bytes=cap)
        ]
        return fused + alone
