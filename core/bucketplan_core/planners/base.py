"""What a planner is: a pure function of a request and its bound cost profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bucketplan_core.cost import CostModel
from bucketplan_core.profile import CostProfile
from bucketplan_core.request import Request
from bucketplan_core.schedule import Placement
from bucketplan_core.wire import WireValue

__all__ = ["Planner", "Proposal"]


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a planner proposes: placements that cover every candidate, and what people should know of it.

    `cost` is the cost model it was judged by, where there was one, so that the assessment need not build it again.
    """

    placements: Sequence[Placement]
    notes: Mapping[str, WireValue] = field(default_factory=dict)
    cost: CostModel | None = None


class Planner(Protocol):
    """One strategy's algorithm at one version; the same request and profile give the same proposal, for ever.

    `version` is what `Options.planner` names (``size/1``). `uses_profile` says whether the decision depends on the cost
    profile, so that its digest must be part of the decision. No clock, no randomness, no float in a decision.
    """

    @property
    def version(self) -> str: ...

    @property
    def uses_profile(self) -> bool: ...

    def propose(self, request: Request, profile: CostProfile) -> Proposal: ...
