"""Differences of requests and decisions: each change named once, where it is, with both values."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from bucketplan_core.collectives import Options
from bucketplan_core.diff import ABSENT, Difference, diff_decisions, diff_requests, first_difference
from bucketplan_core.plan import Decision
from bucketplan_core.planning import make_plan
from bucketplan_core.profile import CostProfile
from bucketplan_core.request import Request
from bucketplan_core.schedule import Placement, decide
from bucketplan_core.wire import from_json, pack, to_json, unpack
from tests.core.test_decoding import small_request
from tests.core.test_planners import gathers, needs_graph, options
from tests.core.test_schedule import gather, identical, request_of, work_of
from tests.core.test_signature import CHANGES, rebuilt, shuffled
from tests.support.counts import count
from tests.support.decisions import random_legal_decision
from tests.support.graphs import load_graph
from tests.support.requests import random_profile, randoms, requests


def fields_of(a: Request, b: Request) -> dict[str, set[str]]:
    """Changed fields by label."""
    diff = diff_requests(a, b)
    return {c.label: {f.path for f in c.fields} for c in (*diff.changed, *diff.fixed_changed)}


@given(requests(), randoms())
@settings(max_examples=count(test=80, soak=5_000))
def test_a_request_does_not_differ_from_itself(request: Request, rng: random.Random) -> None:
    diff = diff_requests(request, shuffled(request, rng))
    assert diff.is_empty
    assert first_difference(request, shuffled(request, rng)) is None
    assert not any((diff.fields, diff.groups, diff.added, diff.removed, diff.changed, diff.fixed_changed))


@given(requests(), requests())
@settings(max_examples=count(test=100, soak=10_000))
def test_two_requests_differ_exactly_where_their_signatures_do(a: Request, b: Request) -> None:
    diff = diff_requests(a, b)
    found = first_difference(a, b)
    assert diff.is_empty == (a.signature == b.signature) == (found is None)
    assert len(a.candidates) - len(diff.removed) == len(b.candidates) - len(diff.added)
    tree = diff.to_wire()
    assert unpack(pack(tree)) == tree
    assert from_json(to_json(tree)) == tree
    back = diff_requests(b, a)
    assert [view.label for view in back.added] == [view.label for view in diff.removed]
    assert {c.label: {f.path for f in c.fields} for c in back.changed}.keys() == {c.label for c in diff.changed}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_changes_the_signature_is_named(change: Callable[[Request], Request]) -> None:
    a = small_request()
    b = change(a)
    diff = diff_requests(a, b)
    assert (
        diff.fields
        or diff.groups
        or diff.changed
        or diff.added
        or diff.removed
        or diff.fixed_changed
        or (diff.fixed_added and diff.fixed_removed)
    )
    assert first_difference(a, b) is not None


def test_one_changed_field_is_one_difference() -> None:
    a = small_request()
    b = CHANGES["dtype"](a)
    (change,) = diff_requests(a, b).changed
    assert (change.label, change.index_a, change.index_b) == ("fsdp_all_gather a on 'dp'", 0, 0)
    assert change.fields == (Difference(path="dtype", a="bfloat16", b="float16"),)
    assert diff_requests(a, b).changes_by_field() == {"dtype": 1}
    assert diff_requests(a, CHANGES["cap"](a)).fields == (
        Difference(path="options.bucket_cap_bytes", a=500_000_000, b=1),
    )
    assert diff_requests(a, CHANGES["group link"](a)).groups == (Difference(path="groups[dp].link", a="efa", b=None),)


def test_one_more_candidate_is_one_difference_whatever_it_shifts() -> None:
    """Indices, edges and order numbers of all others shift; none of that is a difference of theirs."""
    a = gathers(6)
    first = replace(a.candidates[0], param_name="new", ordinal=99)
    shifted = [replace(c, launch_order=c.launch_order + 2, wait_order=c.wait_order + 2) for c in a.candidates]
    edge = replace(shifted[5], depends_on=(3,))
    b = rebuilt(a, candidates=[first, *shifted[:5], edge])
    with_edge = rebuilt(a, candidates=[*a.candidates[:5], replace(a.candidates[5], depends_on=(2,))])
    diff = diff_requests(with_edge, b)
    assert [view.label for view in diff.added] == ["fsdp_all_gather new on 'dp'"]
    assert diff.removed == diff.changed == ()
    assert [view.label for view in diff_requests(b, with_edge).removed] == ["fsdp_all_gather new on 'dp'"]


def test_only_what_changed_places_is_out_of_order() -> None:
    a = identical(6)
    named = [replace(c, param_name=f"p{k}") for k, c in enumerate(a.candidates)]
    a = rebuilt(a, candidates=named)
    last_first = [
        replace(c, launch_order=2 * place, wait_order=2 * place + 1) for place, c in enumerate([named[5], *named[:5]])
    ]
    assert fields_of(a, rebuilt(a, candidates=last_first)) == {
        "fsdp_all_gather p5 on 'a'": {"launch_order", "wait_order"}
    }


def test_another_edge_is_named_by_what_it_leads_to() -> None:
    a = small_request()
    b = CHANGES["an edge"](a)
    (change,) = diff_requests(a, b).changed
    assert change.fields == (Difference(path="depends_on", a=["fixed all_reduce #1 on 'tp'"], b=[]),)


def test_nameless_candidates_are_matched_by_modules_and_occurrence() -> None:
    def reductions(*modules: str) -> Request:
        base = small_request().candidates[2]
        return rebuilt(
            small_request(),
            fixed=[],
            candidates=[
                replace(
                    base,
                    param_name=None,
                    ordinal=None,
                    module_fqns=(module,),
                    launch_order=2 * k,
                    wait_order=2 * k + 1,
                    depends_on=(),
                )
                for k, module in enumerate(modules)
            ],
        )

    diff = diff_requests(reductions("x", "y", "y"), reductions("w", "x", "y", "y"))
    assert [view.label for view in diff.added] == ["fsdp_reduce_scatter w on 'dp'"]
    assert diff.changed == diff.removed == ()
    diff = diff_requests(reductions("x", "y", "y"), reductions("x", "y"))
    assert [view.label for view in diff.removed] == ["fsdp_reduce_scatter y #2 on 'dp'"]


def test_the_first_difference_of_requests_names_the_cause_and_the_collective() -> None:
    a = small_request()
    for change, path, values, where in (
        ("dtype", "request.candidates.dtype[0]", ("bfloat16", "float16"), "fsdp_all_gather a on 'dp'"),
        ("reduce op", "request.candidates.reduce_op[2]", ("sum", "avg"), "fsdp_reduce_scatter a on 'dp'"),
        ("fixed kind", "request.fixed.kind[0]", ("all_reduce", "all_gather"), None),
        ("cap", "request.options.bucket_cap_bytes", (500_000_000, 1), None),
        ("phase", "request.phase", ("joint", "forward"), None),
        ("group link", "request.groups[0].link", ("efa", None), None),
        ("segments", "request.num_segments", (4, 5), None),
    ):
        found = first_difference(a, CHANGES[change](a))
        assert found is not None
        assert (found.path, (found.a, found.b)) == (path, values)
        if where is not None:
            assert found.where == where
    found = first_difference(a, CHANGES["dtype"](a), path="rank 3")
    assert str(found) == "rank 3.candidates.dtype[0] (fsdp_all_gather a on 'dp'): 'bfloat16' against 'float16'"


def test_the_first_difference_of_tables_is_the_first_row_that_differs() -> None:
    """One gather is missing on one rank: the row where the two lists part, not a column that comes early by name."""
    a = gathers(5)
    kept = [
        replace(c, launch_order=2 * k, wait_order=2 * k + 1)
        for k, c in enumerate(c for i, c in enumerate(a.candidates) if i != 2)
    ]
    found = first_difference(a, rebuilt(a, candidates=kept))
    assert found is not None
    assert (found.path, found.a, found.b) == ("request.candidates.param_name[2]", "p2", "p3")
    assert found.where == "fsdp_all_gather p2 on 'dp' / fsdp_all_gather p3 on 'dp'"
    found = first_difference(a, rebuilt(a, candidates=a.candidates[:4]))
    assert found is not None
    assert (found.path, found.a, found.b) == ("request.candidates.length", 5, 4)


def test_first_differences_of_plain_trees() -> None:
    assert first_difference({"a": 1}, {"a": 1}) is None
    for a, b, path, values in (
        ({"a": 1}, {"b": 1}, "$.a", (1, ABSENT)),
        ({"a": [1, 2]}, {"a": [1]}, "$.a.length", (2, 1)),
        ({"x": 1, "a": [1, {"b": None}]}, {"x": 1, "a": [1, {"b": 0}]}, "$.a[1].b", (None, 0)),
        (1, True, "$", (1, True)),
        ([], {}, "$", ([], {})),
        ({"a": "x"}, {"a": b"x"}, "$.a", ("x", b"x")),
    ):
        found = first_difference(a, b)
        assert found is not None
        assert (found.path, (found.a, found.b)) == (path, values)


def test_first_differences_of_decisions_and_profiles() -> None:
    request = gathers(4)
    a, b = (make_plan(request.with_options(replace(request.options, bucket_cap_bytes=cap))) for cap in (24, 10**9))
    other_signature = first_difference(a.decision, b.decision)
    assert other_signature is not None
    assert other_signature.path == "decision.signature"
    moved = replace(a.decision, steps=(*a.decision.steps[:-1], replace(a.decision.steps[-1], gap=4)))
    found = first_difference(a.decision, moved)
    assert found is not None
    assert (found.path, found.b) == (f"decision.steps.gap[{len(moved.steps) - 1}]", 4)
    profile = random_profile(random.Random(0), request)
    empty = first_difference(profile, CostProfile.empty(request))
    assert empty is not None
    assert empty.path.startswith("costprofile.")


def decision_of(request: Request, *placements: Placement) -> Decision:
    return decide(request, "manual/1", placements)


def four() -> Request:
    return request_of(
        [
            gather("a", param_name=f"p{k}", ordinal=k, launch_order=2 * k, wait_order=2 * k + 1, launch=k, wait=k)
            for k in range(4)
        ]
    )


P = Placement


@pytest.mark.parametrize(
    ("before", "after", "kinds", "num_unchanged"),
    [
        ([P((0, 1), 1, 2), P((2, 3), 2, 3)], [P((0, 1), 1, 2), P((2, 3), 2, 3)], [], 2),
        ([P((0, 1), 1, 2), P((2, 3), 2, 3)], [P((0, 1, 2, 3), 1, 2)], ["merged"], 0),
        ([P((0, 1, 2), 1, 2), P((3,), 2, 3)], [P((0,), 1, 1), P((1, 2), 1, 2), P((3,), 2, 3)], ["split"], 1),
        ([P((0, 1), 1, 2), P((2, 3), 2, 3)], [P((0, 1), 0, 2), P((2, 3), 2, 4)], ["moved", "moved"], 0),
        ([P((0, 1), 1, 2), P((2, 3), 2, 3)], [P((0,), 1, 2), P((1, 2, 3), 1, 2)], ["regrouped"], 0),
        (
            [P((0, 1), 0, 1), P((2, 3), 2, 3)],
            [P((0,), 0, 1), P((1,), 0, 1), P((2, 3), 1, 3)],
            ["split", "moved"],
            0,
        ),
    ],
)
def test_buckets_merged_split_and_moved(
    before: list[Placement], after: list[Placement], kinds: list[str], num_unchanged: int
) -> None:
    request = four()
    diff = diff_decisions(request, decision_of(request, *before), request, decision_of(request, *after))
    assert [change.kind for change in diff.changes] == kinds
    assert diff.num_unchanged == num_unchanged
    assert diff.is_empty == (not kinds)


def test_a_moved_bucket_shows_its_gaps_before_and_after() -> None:
    request = four()
    a = decision_of(request, P((0, 1), 1, 2), P((2, 3), 2, 3))
    b = decision_of(request, P((0, 1), 0, 2), P((2, 3), 2, 3))
    (change,) = diff_decisions(request, a, request, b).changes
    (old,), (new,) = change.before, change.after
    assert old.members == new.members == ("fsdp_all_gather p0 on 'a'", "fsdp_all_gather p1 on 'a'")
    assert ((old.launch, old.wait), (new.launch, new.wait)) == ((1, 2), (0, 2))


def test_another_payload_order_and_another_issue_order_are_seen() -> None:
    request = four()
    a = decision_of(request, P((0, 1), 1, 2), P((2, 3), 1, 2))
    turned = replace(a, buckets=(replace(a.buckets[0], members=(1, 0)), a.buckets[1]))
    diff = diff_decisions(request, a, request, turned)
    assert [change.kind for change in diff.changes] == ["reordered"]
    first_last = decision_of(request, P((2, 3), 1, 2), P((0, 1), 1, 2))
    diff = diff_decisions(request, a, request, first_last)
    assert diff.changes == ()
    assert diff.issue_order_changed
    assert not diff.is_empty


def test_decisions_of_requests_with_other_candidates() -> None:
    a, b = four(), gathers(1)
    renamed = rebuilt(a, candidates=[replace(a.candidates[0], param_name="other"), *a.candidates[1:]])
    buckets = (P((0, 1), 1, 2), P((2, 3), 2, 3))
    diff = diff_decisions(a, decision_of(a, *buckets), renamed, decision_of(renamed, *buckets))
    assert [change.kind for change in diff.changes] == ["changed"]
    assert diff.num_unchanged == 1
    diff = diff_decisions(a, decision_of(a, *buckets), b, make_plan(b).decision)
    assert sorted(change.kind for change in diff.changes) == ["added", "removed", "removed"]


@given(requests(min_candidates=1), randoms())
@settings(max_examples=count(test=100, soak=10_000))
def test_every_bucket_of_both_sides_is_accounted_for(request: Request, rng: random.Random) -> None:
    a, b = random_legal_decision(rng, request), random_legal_decision(rng, request)
    diff = diff_decisions(request, a, request, b)
    assert sum(len(change.before) for change in diff.changes) + diff.num_unchanged == len(a.buckets)
    assert sum(len(change.after) for change in diff.changes) + diff.num_unchanged == len(b.buckets)
    same_buckets = {bucket.members for bucket in a.buckets} == {bucket.members for bucket in b.buckets}
    assert (a.steps == b.steps and same_buckets) == diff.is_empty
    tree = diff.to_wire()
    assert unpack(pack(tree)) == tree
    assert diff_decisions(request, a, request, a).is_empty


@needs_graph("tt_llama3_8b_fsdp64")
def test_plans_of_a_recorded_graph_at_two_caps() -> None:
    small, _ = load_graph("tt_llama3_8b_fsdp64", options("size", "original", bucket_cap_bytes=50_000_000))
    large = small.with_options(replace(small.options, bucket_cap_bytes=400_000_000))
    diff = diff_requests(small, large)
    assert [field.path for field in diff.fields] == ["options.bucket_cap_bytes"]
    assert diff.changed == ()
    plans = diff_decisions(small, make_plan(small).decision, large, make_plan(large).decision)
    assert plans.count("merged") > 5
    assert plans.count("added") == plans.count("removed") == 0


def test_work_grows_in_proportion_to_candidates() -> None:
    def work(num: int) -> int:
        a = identical(num, bucket_cap_bytes=320)
        b = a.with_options(Options(strategy="none", planner="none/1"))
        plans = make_plan(a).decision, make_plan(b).decision
        return work_of(lambda: (diff_requests(a, b), diff_decisions(a, plans[0], b, plans[1]), first_difference(a, b)))

    assert work(400) < 2.5 * work(200)


def test_results_hold_plain_values_only() -> None:
    a = small_request()
    b: Any = CHANGES["two parameters swapped"](a)
    tree = diff_requests(a, b).to_wire()
    assert unpack(pack(tree)) == tree
    found = first_difference(a, b)
    assert found is not None
    assert unpack(pack(found.to_wire())) == found.to_wire()
