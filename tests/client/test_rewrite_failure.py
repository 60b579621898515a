"""A rewrite is all or nothing: whatever goes wrong half-way, the graph is as it was, and can be rewritten still."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from bucketplan_client.capture.binding import Description
from bucketplan_client.capture.describe import describe_graph
from bucketplan_client.rewrite import apply as apply_module
from bucketplan_client.rewrite.apply import apply_ag_buckets, apply_plan, apply_rs_buckets
from bucketplan_client.rewrite.errors import RewriteError, StalePlan
from bucketplan_client.rewrite.fakes import FakeValues
from bucketplan_client.rewrite.journal import Journal
from bucketplan_core.errors import IllegalPlan
from bucketplan_core.plan import Plan
from bucketplan_core.planning import make_plan
from tests.support.fxgraphs import GraphBuilder, aten
from tests.support.rewriting import assert_same_results, size_options

RANKS = 4
GROUPS = {"dp": [[0, 1, 2, 3]], "row": [[0, 1], [2, 3]]}


class InjectedError(Exception):
    pass


def everything() -> tuple[GraphBuilder, fx.GraphModule]:
    """A graph whose rewrite creates, moves, retargets, relabels and replaces nodes."""
    build = GraphBuilder()
    params = [build.tensor(f"w{index}", (1 + index % 2, 3)) for index in range(4)]
    casts = [build.call(aten._to_copy.default, param, dtype=torch.bfloat16) for param in params]
    launches = [build.all_gather(cast, RANKS, "dp") for cast in casts]
    waits = [build.wait(launch) for launch in launches]
    views = [build.call(aten.view.default, wait, [-1]) for wait in waits]
    used = [build.call(aten.mul.Tensor, view, 2) for view in views]
    for node, launch in zip(used, launches, strict=True):
        node.meta["fsdp_ag_node"] = launch.name
    lone = build.call(aten.mul.Tensor, build.wait(build.all_gather(params[0], 2, "row")), 3)
    reduced = []
    for node, wait in zip(used, waits, strict=True):
        gradient = build.call(aten._to_copy.default, node, dtype=torch.float32)
        gradient = build.method("contiguous", build.call(aten.view.default, gradient, list(build.shape(wait))))
        reduced.append(build.wait(build.reduce_scatter(gradient, "avg", RANKS, "dp")))
    return build, build.module(*used, lone, *[build.call(aten.view.default, wait, [-1]) for wait in reduced])


def snapshot(gm: fx.GraphModule) -> list[tuple[Any, ...]]:
    return [
        (node, node.name, node.op, node.target, node.args, dict(node.kwargs), list(node.users), dict(node.meta))
        for node in gm.graph.nodes
    ]


def prepared() -> tuple[GraphBuilder, fx.GraphModule, Description, Plan]:
    build, gm = everything()
    description = describe_graph(gm, options=size_options(placement="scheduled"))
    plan = make_plan(description.request)
    assert sorted(len(bucket.members) for bucket in plan.decision.buckets) == [1, 4, 4]
    return build, gm, description, plan


class FailingAt:
    """Raises at one call of a method, counted from 0; counts calls where `at` is None."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, at: int | None, *, after: bool) -> None:
        self.calls = 0
        original: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            number = self.calls
            self.calls += 1
            if number == at and not after:
                raise InjectedError
            result = original(*args, **kwargs)
            if number == at:
                raise InjectedError
            return result

        monkeypatch.setattr(owner, name, call)


OPERATIONS = (
    (Journal, "create"),
    (Journal, "move_before"),
    (Journal, "retarget"),
    (Journal, "set_meta"),
    (Journal, "replace_uses"),
    (Journal, "redirect"),
    (Journal, "current"),
    (Journal, "obsolete"),
    (FakeValues, "set"),
    (FakeValues, "behind"),
    (Journal, "commit"),
    (fx.Graph, "erase_node"),
)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "name"), OPERATIONS, ids=lambda value: getattr(value, "__name__", value))
def test_a_failure_at_any_operation_leaves_the_graph_as_it_was(owner: type, name: str, after: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        counting = FailingAt(patch, owner, name, None, after=after)
        _, _, description, plan = prepared()
        apply_plan(description, plan, recompile=False)
    assert counting.calls > 0, "the rewrite does not use this operation"
    build, gm, description, plan = prepared()
    original = everything()[1]
    before, meta, code = snapshot(gm), dict(gm.meta), gm.code
    for at in range(counting.calls):
        with pytest.MonkeyPatch.context() as patch:
            FailingAt(patch, owner, name, at, after=after)
            with pytest.raises(InjectedError):
                apply_plan(description, plan)
        assert snapshot(gm) == before, at
        assert (gm.meta, gm.code) == (meta, code), at
        gm.graph.lint()
    apply_plan(description, plan)
    assert "fsdp_ag_bucketing" in gm.meta
    assert_same_results(original, gm, build.draw_inputs(RANKS, 1), GROUPS)


def test_code_that_cannot_be_generated_leaves_the_graph_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    build, gm, description, plan = prepared()
    before, meta, code = snapshot(gm), dict(gm.meta), gm.code
    recompile, calls = gm.recompile, []

    def fails_once() -> Any:
        calls.append(len(gm.graph.nodes))
        if len(calls) == 1:
            raise InjectedError
        return recompile()

    monkeypatch.setattr(gm, "recompile", fails_once)
    with pytest.raises(InjectedError):
        apply_plan(description, plan)
    assert len(calls) == 2, "the code is that of the graph again"
    assert (snapshot(gm), gm.meta, gm.code) == (before, meta, code)
    gm.graph.lint()
    apply_plan(description, plan)
    assert_same_results(everything()[1], gm, build.draw_inputs(RANKS, 1), GROUPS)


def test_a_rewrite_that_succeeded_can_be_taken_back() -> None:
    build, gm, description, plan = prepared()
    before, meta, code = snapshot(gm), dict(gm.meta), gm.code
    apply_plan(description, plan).take_back()
    assert (snapshot(gm), gm.meta, gm.code) == (before, meta, code)
    gm.graph.lint()
    apply_plan(description, plan)
    assert_same_results(everything()[1], gm, build.draw_inputs(RANKS, 1), GROUPS)


def test_an_order_that_would_be_invalid_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    _, gm, description, plan = prepared()
    before = snapshot(gm)
    steps = list(plan.decision.steps)
    monkeypatch.setattr(apply_module, "check_decision", lambda request, decision: None)
    late = [index for index, step in enumerate(steps) if step.op == 1]
    moved = [step.__class__(0, step.op, step.target) if index in late else step for index, step in enumerate(steps)]
    launches = [step for step in moved if step.op == 0]
    broken = Plan(
        decision=plan.decision.__class__(
            signature=plan.decision.signature,
            planner=plan.decision.planner,
            buckets=plan.decision.buckets,
            steps=tuple(sorted(step.__class__(0, step.op, step.target) for step in launches))
            + tuple(step for step in moved if step.op != 0),
        )
    )
    with pytest.raises(RewriteError) as refused:
        apply_plan(description, broken)
    assert refused.value.node
    assert snapshot(gm) == before


def other_argument(gm: fx.GraphModule) -> None:
    node = next(node for node in gm.graph.nodes if node.target is aten.mul.Tensor)
    node.args = (node.args[0], 5)


def other_target(gm: fx.GraphModule) -> None:
    next(node for node in gm.graph.nodes if node.target is aten.mul.Tensor).target = aten.add.Tensor


def other_keyword(gm: fx.GraphModule) -> None:
    next(node for node in gm.graph.nodes if node.kwargs).kwargs = {"dtype": torch.float16}


def other_metadata(gm: fx.GraphModule) -> None:
    next(node for node in gm.graph.nodes if "all_gather" in node.name).meta["param_name"] = "other"


def other_annotation(gm: fx.GraphModule) -> None:
    next(node for node in gm.graph.nodes if "all_gather" in node.name).meta["comm_type"] = "fsdp_all_gather"


def other_shape(gm: fx.GraphModule) -> None:
    node = next(node for node in gm.graph.nodes if node.target is aten._to_copy.default)
    with node.meta["val"].fake_mode:
        node.meta["val"] = torch.empty(7, 7)


def more_nodes(gm: fx.GraphModule) -> None:
    last = next(node for node in gm.graph.nodes if node.op == "output")
    with gm.graph.inserting_before(last):
        gm.graph.call_function(aten.neg.default, (next(iter(gm.graph.nodes)),))


def fewer_nodes(gm: fx.GraphModule) -> None:
    output = next(node for node in gm.graph.nodes if node.op == "output")
    output.args = (output.args[0][:-1],)
    gm.graph.eliminate_dead_code()


def other_order(gm: fx.GraphModule) -> None:
    casts = [node for node in gm.graph.nodes if node.target is aten._to_copy.default]
    casts[0].prepend(casts[1])


CHANGES = (
    other_argument,
    other_target,
    other_keyword,
    other_metadata,
    other_annotation,
    other_shape,
    more_nodes,
    fewer_nodes,
    other_order,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_plan_for_a_graph_that_changed_is_refused(change: Callable[[fx.GraphModule], None]) -> None:
    _, gm, description, plan = prepared()
    change(gm)
    before = snapshot(gm)
    with pytest.raises(StalePlan) as refused:
        apply_plan(description, plan)
    assert refused.value.change in str(refused.value)
    assert snapshot(gm) == before
    assert gm.meta == {}


def test_a_plan_for_another_graph_is_refused() -> None:
    _, gm, description, _ = prepared()
    build = GraphBuilder()
    wait = build.wait(build.all_gather(build.tensor("w", (2, 3)), RANKS, "dp"))
    other = describe_graph(build.module(build.call(aten.neg.default, wait)), options=size_options())
    before = snapshot(gm)
    with pytest.raises(IllegalPlan) as refused:
        apply_plan(description, make_plan(other.request))
    assert refused.value.rule == "signature"
    assert snapshot(gm) == before


def test_a_plan_is_applied_once() -> None:
    _, _, description, plan = prepared()
    apply_plan(description, plan)
    with pytest.raises(StalePlan):
        apply_plan(description, plan)


def test_gathers_then_reductions_each_by_their_own_plan() -> None:
    build, gm, description, plan = prepared()
    original = everything()[1]
    first = apply_ag_buckets(description, plan)
    with pytest.raises(StalePlan):
        apply_rs_buckets(description, plan)
    again = first.describe_again()
    assert {candidate.kind for candidate in again.request.candidates} == {"fsdp_all_gather", "fsdp_reduce_scatter"}
    rest = make_plan(again.request)
    assert sorted(len(bucket.members) for bucket in rest.decision.buckets) == [1, 4]
    apply_rs_buckets(again, rest)
    assert gm.meta["fsdp_ag_bucketing"]["buckets"] == 1
    assert gm.meta["fsdp_rs_bucketing"]["buckets"] == 1
    assert_same_results(original, gm, build.draw_inputs(RANKS, 2), GROUPS)


def test_a_graph_without_buckets_is_not_touched() -> None:
    build = GraphBuilder()
    wait = build.wait(build.all_gather(build.tensor("w", (2, 3)), RANKS, "dp"))
    gm = build.module(build.call(aten.neg.default, wait))
    description = describe_graph(gm, options=size_options())
    before = snapshot(gm)
    apply_plan(description, make_plan(description.request))
    assert snapshot(gm) == before
