"""Random graphs under random plans: what a rewrite may change, and what it must refuse.

A legal plan leaves every output and every input that the graph writes as they were, whether a communication stream
reads early or late. An illegal one is refused before anything is touched. Each rule of legality is needed: with its
check switched off, plans that break it compute something else or leave no valid graph.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from bucketplan_client.capture.binding import Description
from bucketplan_client.capture.describe import describe_graph
from bucketplan_client.rewrite import apply as apply_module
from bucketplan_client.rewrite.apply import apply_plan
from bucketplan_client.rewrite.errors import RewriteError
from bucketplan_core.collectives import Options
from bucketplan_core.errors import IllegalPlan
from bucketplan_core.legality import RULES
from bucketplan_core.plan import Plan
from bucketplan_core.planning import make_plan
from tests.support.counts import seeds
from tests.support.fxgraphs import Case, c10d, free_storage, random_case, unknown_op
from tests.support.fxplans import BREAKERS, broken_plan, random_legal_plan
from tests.support.lockstep import run_lockstep

PLANS_A_GRAPH = 4
PARTS = 6
"""Parts of the graphs that are tests of their own, so that none takes long on a busy machine."""

Results = list[list[Tensor]]


def options_of(rng: random.Random) -> Options:
    strategy = rng.choice(("size", "size", "none"))
    cap = rng.choice((1, 40, 100, 300, 10**9))
    return Options(
        strategy=strategy,
        planner=f"{strategy}/1",
        placement=rng.choice(("original", "scheduled")),
        bucket_cap_bytes=cap,
        first_bucket_cap_bytes=rng.choice((cap, 60)),
        prefetch=rng.choice((0, 1, 2)),
        mixed_dtype=rng.random() < 0.4,
    )


def results(gm: fx.GraphModule, case: Case, seed: int, *, late_reads: bool) -> Results:
    """Outputs of every rank, and its inputs as the graph left them."""
    inputs = case.draw_inputs(seed)
    outputs = run_lockstep(gm, inputs, case.groups, late_reads=late_reads)
    return [
        [value for value in (*given, *pytree.tree_leaves(output)) if value is not None]
        for given, output in zip(inputs, outputs, strict=True)
    ]


def differing(wanted: Results, found: Results) -> str | None:
    for rank, (a, b) in enumerate(zip(wanted, found, strict=True)):
        for index, (one, other) in enumerate(zip(a, b, strict=True)):
            if one.dtype != other.dtype or one.stride() != other.stride() or not torch.equal(one, other):
                return f"rank {rank}, value {index}: {one} became {other}"
    return None


def snapshot(gm: fx.GraphModule) -> list[tuple[Any, ...]]:
    """Everything about a graph that a refused plan must leave alone."""
    return [
        (node, node.name, node.op, node.target, node.args, dict(node.kwargs), list(node.users), dict(node.meta))
        for node in gm.graph.nodes
    ] + [tuple(sorted(gm.meta.items()))]


def names_by_barrier_side(gm: fx.GraphModule, barriers: Sequence[fx.Node]) -> list[tuple[set[str], set[str]]]:
    """For each barrier, the launches and the waits that stand before it, those of a bucket by the members' names."""
    order = {node: index for index, node in enumerate(gm.graph.nodes)}
    found = []
    for barrier in barriers:
        launched: set[str] = set()
        waited: set[str] = set()
        for node in gm.graph.nodes:
            if order[node] > order[barrier] or node.op != "call_function":
                continue
            if node.target in COLLECTIVES:
                launched.update(members_of(node))
            elif node.target in (c10d.wait_tensor, c10d.wait_tensor.default):
                waited.update(members_of(node.all_input_nodes[0]))
        found.append((launched, waited))
    return found


COLLECTIVES = frozenset(
    target
    for packet in (c10d.all_gather_into_tensor, c10d.reduce_scatter_tensor, c10d.all_reduce)
    for target in (packet, packet.default)
)


def members_of(launch: fx.Node) -> list[str]:
    provenance = launch.meta.get("fsdp_bucket_provenance")
    return [launch.name] if provenance is None else [entry["launch"] for entry in provenance]


def fake_values_differ(gm: fx.GraphModule) -> str | None:
    """Run the graph under a fake mode of its own and compare with the recorded values, storage sharing included."""
    mode = FakeTensorMode()
    values: dict[fx.Node, Any] = {}
    here: dict[int, int] = {}
    there: dict[int, int] = {}
    with mode:
        for node in gm.graph.nodes:
            recorded = node.meta.get("val")
            if node.op == "placeholder":
                like = recorded
                values[node] = (
                    None if like is None else torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
                )
            elif node.op == "output" or node.target in (
                free_storage,
                torch.ops._dtensor.mesh_get_process_group.default,
            ):
                values[node] = "group"
                continue
            elif node.target in (c10d.wait_tensor, c10d.wait_tensor.default):
                # As execution does; the fake kernel would make a fresh tensor.
                values[node] = values[node.all_input_nodes[0]]
            else:
                args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
                call = getattr(args[0], node.target) if node.op == "call_method" else node.target
                values[node] = call(*(args[1:] if node.op == "call_method" else args), **kwargs)
            if recorded is None:
                if values[node] is not None:
                    return f"{node} has no value"
                continue
            for was, now in zip(pytree.tree_leaves(recorded), pytree.tree_leaves(values[node]), strict=True):
                if _facts(was) != _facts(now):
                    return f"{node} is {_facts(now)}, its value says {_facts(was)}"
                a, b = was.untyped_storage()._cdata, now.untyped_storage()._cdata
                if here.setdefault(a, b) != b or there.setdefault(b, a) != a:
                    return f"{node} shares its storage with others than its value does"
    return None


def _facts(value: Any) -> tuple[Any, ...]:
    assert isinstance(value, FakeTensor)
    return (tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device)


@lru_cache(maxsize=2)
def reference(seed: int) -> tuple[Case, Results]:
    case = random_case(seed)
    return case, results(case.graph_module, case, seed, late_reads=False)


def described(case: Case, options: Options) -> Description:
    return describe_graph(case.copy(), options=options, roles={name: f"{name}s" for name in case.mesh.groups})


def check_rewrite(case: Case, wanted: Results, seed: int, plan_seed: int) -> int:
    """Rewrite by one plan and hold the result against the original; returns the number of fused buckets."""
    rng = random.Random(plan_seed)
    description = described(case, options_of(rng))
    gm = description.binding.module
    if rng.random() < 0.3:
        plan = make_plan(description.request, description.profile)
    else:
        plan = random_legal_plan(description.request, plan_seed)
    barriers = [node for node in gm.graph.nodes if node.target is unknown_op]
    sides = names_by_barrier_side(gm, barriers)
    applied = apply_plan(description, Plan.decode(plan.encoded), recompile=False)
    gm.graph.lint()
    for late_reads in (False, True):
        difference = differing(wanted, results(gm, case, seed, late_reads=late_reads))
        assert difference is None, (plan_seed, late_reads, difference)
    assert names_by_barrier_side(gm, barriers) == sides, "a collective was moved across communication nobody knows"
    if case.builder.with_values and plan_seed % 9 == 0:
        assert fake_values_differ(gm) is None, (plan_seed, fake_values_differ(gm))
    again = applied.describe_again().request
    assert len(again.candidates) == sum(len(bucket.members) == 1 for bucket in plan.decision.buckets), (
        "a bucket is planned again"
    )
    return applied.num_buckets


@pytest.mark.soak
@pytest.mark.parametrize("part", range(PARTS))
def test_legal_plans_change_nothing_but_the_collectives(part: int) -> None:
    fused = 0
    for number in seeds(f"graphs of part {part}", test=60, soak=3_000):
        seed = PARTS * number + part
        case, wanted = reference(seed)
        assert differing(wanted, results(case.graph_module, case, seed, late_reads=True)) is None, "the graph races"
        for plan in range(PLANS_A_GRAPH):
            fused += check_rewrite(case, wanted, seed, PLANS_A_GRAPH * seed + plan)
    assert fused > 0


def broken_plans(rule: str, start: int) -> Iterator[tuple[Case, int, Description, Plan]]:
    """Graphs, each described with a plan that breaks `rule` and no rule checked before it; seeds count from `start`."""
    for seed in range(start, start + 100_000):
        case = random_case(seed)
        description = described(case, options_of(random.Random(seed)))
        for attempt in range(4):
            plan = broken_plan(description.request, rule, seed * 4 + attempt)
            if plan is not None:
                yield case, seed, description, plan


@pytest.mark.soak
@pytest.mark.parametrize("rule", RULES)
def test_illegal_plans_are_refused_before_anything_is_touched(rule: str) -> None:
    plans = broken_plans(rule, start=1_000)
    for _ in seeds(f"broken {rule}", test=70, soak=5_000):
        _, _, description, plan = next(plans)
        gm = description.binding.module
        before = snapshot(gm)
        with pytest.raises(IllegalPlan) as refused:
            apply_plan(description, plan)
        assert refused.value.rule == rule
        assert snapshot(gm) == before


def outcome_unchecked(case: Case, seed: int, description: Description, plan: Plan) -> str:
    """What comes of a plan that nobody checked: ``same``, ``wrong`` (numbers), ``invalid`` (no valid graph)."""
    gm = case.copy()
    description = describe_graph(gm, **description.binding.arguments)
    wanted = results(case.graph_module, case, seed, late_reads=False)
    try:
        apply_plan(description, plan, recompile=False)
        gm.graph.lint()
    except (RewriteError, KeyError, IndexError, RuntimeError, AssertionError):
        return "invalid"
    for late_reads in (False, True):
        try:
            found = results(gm, case, seed, late_reads=late_reads)
        except (RuntimeError, AssertionError, KeyError):
            return "wrong"
        if differing(wanted, found) is not None:
            return "wrong"
    return "same"


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_needed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the check off, plans that break the rule do harm: were they all harmless, the rule would be for nothing."""
    monkeypatch.setattr(apply_module, "check_decision", lambda request, decision: None)
    outcomes: dict[str, int] = {}
    for _, plan in zip(range(40), broken_plans(rule, start=5_000), strict=False):
        outcome = outcome_unchecked(*plan)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    assert outcomes.get("wrong", 0) + outcomes.get("invalid", 0) >= 3, outcomes


def test_every_rule_has_plans_that_break_it() -> None:
    assert set(BREAKERS) == set(RULES)
