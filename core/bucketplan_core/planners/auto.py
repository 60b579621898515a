"""`auto`: the buckets, launches and waits of least simulated step time within the memory budget.

Under placement `scheduled` it chooses grouping, launch and wait points, under `original` the grouping only. Without
figures of the hardware it does not pretend: it plans as `size` does at the request's caps and says so in the
assessment.

`memory_budget_bytes` bounds the peak of activations and collectives' buffers as the simulator counts them. Its
default is the peak of the graph as traced plus the larger of 1 GiB and the two largest module blocks, which is what
one block in use and one ahead need. A budget that no plan meets is an error that names the least one. `prefetch` is
the depth that the baselines are issued at; `auto` itself issues as far ahead as the budget lets it, and one bucket
ahead is the space in which its lane planner is exact.
"""

from __future__ import annotations

from bucketplan_core.bound import lower_bound_ns
from bucketplan_core.cost import CostModel
from bucketplan_core.errors import PlanningError
from bucketplan_core.planners.auto_groups import block_of
from bucketplan_core.planners.auto_place import ORIGINAL, Ahead, Trial, Workbench
from bucketplan_core.planners.auto_polish import polish
from bucketplan_core.planners.auto_search import Search
from bucketplan_core.planners.base import Proposal
from bucketplan_core.planners.simple import SizePlanner
from bucketplan_core.profile import CostProfile
from bucketplan_core.request import Request
from bucketplan_core.wire import WireValue

__all__ = ["FALLBACK", "AutoPlanner", "default_budget_bytes"]

FALLBACK = "hardware is unknown: planned as size/1 at the caps given; name a preset or measure one"
"""What a plan says that `auto` made without figures."""
_LEAN_BUDGET = 20_000
"""Simulated steps that the search for the least peak may take from each of its starts."""
_LEAN_ROUNDS = 8
"""Searches for less than the least peak known, each of that many steps before it polishes; one that finds none ends
them."""
_GIB = 2**30


def default_budget_bytes(cost: CostModel, as_traced: Trial | None = None) -> int:
    """The memory budget where the request leaves it open: peak as traced plus max(1 GiB, the two largest blocks).

    `as_traced` is the trial of every candidate alone at its original place, where the caller has it.
    """
    traced = as_traced or trial_as_traced(cost)
    blocks: dict[str, int] = {}
    for index, candidate in enumerate(cost.request.candidates):
        if candidate.kind == "fsdp_all_gather" or (candidate.is_gather and cost.request.phase == "backward"):
            name = block_of(cost.request, index)
            blocks[name] = blocks.get(name, 0) + cost.full_bytes[index]
    return traced.peak_bytes + max(_GIB, sum(sorted(blocks.values())[-2:]))


def trial_as_traced(cost: CostModel) -> Trial:
    """Every candidate alone where it stood."""
    alone = [(m,) for lane in cost.request.lanes for m in lane.members]
    found = Workbench(cost, None).evaluate(alone, ORIGINAL)
    assert found is not None  # the original schedule is legal by construction of requests
    return found


def _below(search: Search, least: Trial) -> Trial:
    """A plan of less memory, where this search finds one under budgets that shrink; else `least`."""
    for _ in range(_LEAN_ROUNDS):
        found = Search(
            bench=Workbench(search.bench.cost, least.peak_bytes - 1),
            bound_ns=search.bound_ns,
            placement=search.placement,
            as_traced=search.as_traced,
            step_budget=_LEAN_BUDGET,
        ).run()
        if found is None:
            break
        least = found
    return least


class AutoPlanner:
    """Least simulated step time; never worse than `none` and `size` at the usual caps within the same budget."""

    version = "auto/1"
    uses_profile = True

    def propose(self, request: Request, profile: CostProfile) -> Proposal:
        if request.options.hardware is None:
            proposal = SizePlanner().propose(request, profile)
            return Proposal(
                proposal.placements,
                {"fallback": FALLBACK},
            )
        cost = CostModel.build(request, profile)
        given = request.options.memory_budget_bytes
        as_traced = trial_as_traced(cost)
        budget = default_budget_bytes(cost, as_traced) if given is None else given
        bench = Workbench(cost, budget)
        search = Search(
            bench=bench,
            bound_ns=lower_bound_ns(cost),
            placement=request.options.placement,
            as_traced=as_traced,
        )
        best = search.run() or self._leanest(search, request)
        return Proposal(best.placements, self._notes(search, best, budget, given is None), cost)

    def _leanest(self, search: Search, request: Request) -> Trial:
        """The plan of least memory, where the search found none within the budget; an error if even that exceeds it."""
        bench = search.bench
        assert bench.budget_bytes is not None
        unbounded = Workbench(bench.cost, None)
        alone = [(m,) for m in range(len(request.candidates))]
        plans = [search.as_traced]
        if request.options.placement != "original":
            plans += [unbounded.lean(), unbounded.lean(reduce_late=True), unbounded.evaluate(alone, Ahead(0))]
            plans += [polish(unbounded, plan, _LEAN_BUDGET, least_memory=True) for plan in plans if plan is not None]
        least = min((plan for plan in plans if plan is not None), key=lambda plan: (plan.peak_bytes, plan.rank))
        if least.peak_bytes > bench.budget_bytes:
            least = _below(search, least)
        if least.peak_bytes > bench.budget_bytes:
            raise PlanningError(
                "memory_budget_bytes",
                bench.budget_bytes,
                "no plan was found within it, and none whose peak is below that of the leanest found, from one-member "
                f"buckets at their latest launch on, which is {least.peak_bytes} bytes",
            )
        return least

    def _notes(self, search: Search, best: Trial, budget: int, is_default: bool) -> dict[str, WireValue]:
        rule = best.rule
        return {
            "memory_budget_bytes": budget,
            "memory_budget_is_default": is_default,
            "search": {
                "exact": search.exact,
                "exact_reasons": list(search.exact_reasons),
                "issued_ahead_permille": rule.permille if isinstance(rule, Ahead) else None,
                "rule": "ahead" if isinstance(rule, Ahead) else rule.name,
                "simulated_steps": search.bench.spent,
                "trials": search.tried,
            },
        }
