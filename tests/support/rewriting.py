"""Describe, plan and apply in one call, and compare what a rewritten graph computes with the original."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from bucketplan_client.capture.binding import Description
from bucketplan_client.capture.describe import describe_graph
from bucketplan_client.capture.parse import is_functional_collective
from bucketplan_client.rewrite.apply import Applied, apply_plan
from bucketplan_core.collectives import Options
from bucketplan_core.plan import Plan
from bucketplan_core.planning import make_plan
from tests.support.fxgraphs import GraphBuilder
from tests.support.lockstep import run_lockstep

__all__ = ["Rewritten", "assert_same_results", "created_nodes", "launches", "rewrite", "rules", "size_options"]

Build = Callable[[], tuple[GraphBuilder, fx.GraphModule]]


@dataclass(frozen=True)
class Rewritten:
    """A graph after one rewrite, with all that led to it."""

    gm: fx.GraphModule
    description: Description
    plan: Plan
    applied: Applied

    @property
    def sizes(self) -> list[int]:
        """Members of each bucket, largest first."""
        return sorted((len(bucket.members) for bucket in self.plan.decision.buckets), reverse=True)


def size_options(**options: Any) -> Options:
    """Strategy `size` with no cap that matters, unless `options` say otherwise."""
    return Options(**{"strategy": "size", "planner": "size/1"} | options)


def rewrite(
    gm: fx.GraphModule, *, kinds: Sequence[str] | None = None, describe: Any = None, **options: Any
) -> Rewritten:
    """Describe `gm`, make its plan, apply it in place, and lint."""
    description = describe_graph(gm, options=size_options(**options), **(describe or {}))
    plan = make_plan(description.request, description.profile)
    applied = apply_plan(description, plan, kinds=kinds)
    gm.graph.lint()
    return Rewritten(gm, description, plan, applied)


def rules(description: Description) -> dict[str, str]:
    """The rule by which each skipped launch was left alone."""
    return {entry.node: entry.rule for entry in description.skipped}


def launches(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if is_functional_collective(node)]


def created_nodes(gm: fx.GraphModule, before: Sequence[fx.Node]) -> list[fx.Node]:
    known = set(before)
    return [node for node in gm.graph.nodes if node not in known]


def assert_same_results(
    original: fx.GraphModule | Sequence[fx.GraphModule],
    rewritten: fx.GraphModule | Sequence[fx.GraphModule],
    inputs: Sequence[Sequence[Any]],
    groups: Mapping[Any, Sequence[Sequence[int]]],
) -> None:
    """Every rank gets the same outputs and written inputs from both, bit for bit, however late a launch reads."""
    wanted = _run(original, inputs, groups, late_reads=False)
    for late_reads in (False, True):
        found = _run(rewritten, inputs, groups, late_reads=late_reads)
        for rank, (a, b) in enumerate(zip(wanted, found, strict=True)):
            for index, (one, other) in enumerate(zip(a, b, strict=True)):
                assert one.dtype == other.dtype, (rank, index)
                assert torch.equal(one, other), (rank, index, late_reads, one, other)


def _run(
    gm: fx.GraphModule | Sequence[fx.GraphModule],
    inputs: Sequence[Sequence[Any]],
    groups: Mapping[Any, Sequence[Sequence[int]]],
    *,
    late_reads: bool,
) -> list[list[Tensor]]:
    given = copy.deepcopy([list(values) for values in inputs])
    outputs = run_lockstep(gm, given, groups, late_reads=late_reads)
    return [
        [value for value in (*left, *pytree.tree_leaves(output)) if isinstance(value, Tensor)]
        for left, output in zip(given, outputs, strict=True)
    ]
