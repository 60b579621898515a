"""A request that is not exactly right is refused with the path of the field that is wrong."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketplan_core.collectives import Candidate, FixedCollective, Group, Options
from bucketplan_core.columns import MAX_CANDIDATES, candidates_to_wire, fixed_to_wire
from bucketplan_core.errors import DecodeError, SchemaVersionError
from bucketplan_core.fields import MAX_STRING_CHARACTERS
from bucketplan_core.hardware import CollectiveCost, Hardware, Protocol
from bucketplan_core.request import MAX_SEGMENTS, Request
from bucketplan_core.wire import from_json, to_json
from tests.support.counts import count
from tests.support.requests import requests

HARDWARE = Hardware(
    flops_per_us=(("matmul:bfloat16", 700_000_000), ("matmul:float32", 40_000_000)),
    memory_bytes_per_us=2_000_000,
    copy_bytes_per_us=1_500_000,
    launch_ns=5_000,
    slowdown_permille=20,
    collectives=(
        CollectiveCost("dp", "all_gather", (Protocol(9_000, 20_000), Protocol(30_000, 300_000))),
        CollectiveCost("dp", "reduce_scatter", (Protocol(9_000, 20_000),)),
    ),
)


def small_request(**options: Any) -> Request:
    """Two gathers, a reduce-scatter that waits for the second's neighbour, and two fixed collectives."""
    gather = Candidate(
        kind="fsdp_all_gather",
        group="dp",
        group_size=2,
        dtype="bfloat16",
        device_type="cuda",
        input_shape=(2, 3),
        output_shape=(4, 3),
        earliest_launch=0,
        launch=0,
        latest_launch=1,
        wait=0,
        latest_wait=1,
        first_use=1,
        last_use=3,
        launch_order=0,
        wait_order=1,
        param_name="a",
        ordinal=0,
        state_idx=0,
        module_fqns=("layers.0",),
    )
    second = replace(gather, param_name="b", ordinal=1, state_idx=2, launch=1, wait=1, launch_order=2, wait_order=3)
    scatter = replace(
        gather,
        kind="fsdp_reduce_scatter",
        reduce_op="sum",
        input_shape=(4, 3),
        output_shape=(2, 3),
        launch=2,
        wait=2,
        latest_launch=2,
        latest_wait=4,
        first_use=4,
        last_use=4,
        launch_order=6,
        wait_order=7,
        backward=True,
        depends_on=(3,),
    )
    reduce_tp = FixedCollective(kind="all_reduce", group="tp", launch=2, launch_order=4, wait=2, wait_order=5)
    odd = FixedCollective(kind="broadcast", group=None, launch=3, launch_order=8, skipped="no-wait", depends_on=(2,))
    return Request.build(
        num_segments=4,
        groups=[Group(role="tp", size=2, strides=(1, 1)), Group(role="dp", size=2, nodes=1, link="efa")],
        candidates=[gather, second, scatter],
        fixed=[reduce_tp, odd],
        options=replace(Options(strategy="size", planner="size/1", hardware=HARDWARE), **options),
    )


TREE = small_request().to_wire()


def changed(path: str, value: Any) -> Any:
    """The tree of the small request with the entry at `path` replaced; keys and indices separated by dots."""
    tree = copy.deepcopy(TREE)
    holder: Any = tree
    *steps, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    for step in steps:
        holder = holder[step]
    holder[last] = value
    return tree


def without(path: str) -> Any:
    tree = copy.deepcopy(TREE)
    holder: Any = tree
    *steps, last = path.split(".")
    for step in steps:
        holder = holder[step]
    del holder[last]
    return tree


def canonical(value: Any) -> Any:
    """`value` with sorted keys, so that only what the test is about is wrong with it."""
    if isinstance(value, dict):
        return {key: canonical(value[key]) for key in sorted(value, key=str)}
    return [canonical(item) for item in value] if isinstance(value, list | tuple) else value


def holds_bytes(value: Any) -> bool:
    """Whether this tree has no form in JSON."""
    if isinstance(value, dict | list):
        return any(map(holds_bytes, value.values() if isinstance(value, dict) else value))
    return isinstance(value, bytes)


C = "request.candidates"
F = "request.fixed"
O = "request.options"  # noqa: E741  (one letter, as C and F)
WRONG: list[tuple[Any, str, str]] = [
    # What stands there is of another type.
    ([], "request", "must be a map"),
    (changed("num_segments", "4"), "request.num_segments", "must be an integer"),
    (changed("num_segments", True), "request.num_segments", "must be an integer"),
    (changed("num_segments", None), "request.num_segments", "must be an integer"),
    (changed("num_segments", 4.0), "request.num_segments", "numbers must be integers"),
    (changed("phase", 1), "request.phase", "must be text"),
    (changed("groups", {}), "request.groups", "must be a list"),
    (changed("groups.1", []), "request.groups[1]", "must be a map"),
    (changed("groups.0.role", b"dp"), "request.groups[0].role", "must be text"),
    (changed("groups.0.strides", None), "request.groups[0].strides", "must be a list"),
    (changed("groups.1.strides", [1, "1"]), "request.groups[1].strides[1]", "must be an integer"),
    (changed("groups.0.link", 3), "request.groups[0].link", "must be text"),
    (changed("candidates", []), C, "must be a map"),
    (changed("candidates.kind", None), f"{C}.kind", "must be a list"),
    (changed("candidates.kind.1", 2), f"{C}.kind[1]", "must be text"),
    (changed("candidates.launch.2", "2"), f"{C}.launch[2]", "must be an integer"),
    (changed("candidates.launch.2", 2.5), f"{C}.launch[2]", "numbers must be integers"),
    (changed("candidates.backward.0", 0), f"{C}.backward[0]", "must be true or false"),
    (changed("candidates.input_shape.1", 6), f"{C}.input_shape[1]", "must be a list"),
    (changed("candidates.input_shape.1.0", None), f"{C}.input_shape[1][0]", "must be an integer"),
    (changed("candidates.module_fqns.2.0", 7), f"{C}.module_fqns[2][0]", "must be text"),
    (changed("candidates.ordinal.1", "1"), f"{C}.ordinal[1]", "must be an integer"),
    (changed("candidates.param_name.1", 1), f"{C}.param_name[1]", "must be text"),
    (changed("candidates.depends_on.2", None), f"{C}.depends_on[2]", "must be a list"),
    (changed("fixed.wait.0", "2"), f"{F}.wait[0]", "must be an integer"),
    (changed("options", None), O, "must be a map"),
    (changed("options.mixed_dtype", 1), f"{O}.mixed_dtype", "must be true or false"),
    (changed("options.hardware", []), f"{O}.hardware", "must be a map"),
    (changed("options.hardware.flops_per_us", []), f"{O}.hardware.flops_per_us", "must be a map"),
    (changed("options.hardware.collectives.1", 1), f"{O}.hardware.collectives[1]", "must be a map"),
    # It is out of range.
    (changed("num_segments", -1), "request.num_segments", "must be between 0 and"),
    (changed("num_segments", MAX_SEGMENTS + 1), "request.num_segments", "must be between 0 and"),
    (changed("num_segments", 2**63), "request.num_segments", "integer outside"),
    (changed("capture", 0), "request.capture", "must be between 1 and"),
    (changed("phase", "sideways"), "request.phase", "must be one of backward, forward, joint"),
    (changed("groups.0.role", ""), "request.groups[0].role", "must not be empty"),
    (changed("groups.0.size", 0), "request.groups[0].size", "must be between 1 and"),
    (changed("groups.0.nodes", 3), "request.groups[0].nodes", "cannot span more hosts"),
    (changed("groups.0.role", "x" * (MAX_STRING_CHARACTERS + 1)), "request.groups[0].role", "at most 16384"),
    (changed("groups.1.strides", [1]), "request.groups[1].strides", "pairs of step and repeats"),
    (changed("groups.1.strides", [0, 1]), "request.groups[1].strides", "positive steps"),
    (changed("groups.1.strides", [1, 2]), "request.groups[1].strides", "2 ranks"),
    (changed("candidates.kind.1", "all_gather"), f"{C}.kind[1]", "must be one of dp_all_reduce"),
    (changed("candidates.dtype.0", "bf16"), f"{C}.dtype[0]", "must be one of bfloat16"),
    (changed("candidates.reduce_op.2", "mean"), f"{C}.reduce_op[2]", "must be one of avg"),
    (changed("candidates.launch.1", 5), f"{C}.launch[1]", "must be between 0 and 4"),
    (changed("candidates.group_size.1", 0), f"{C}.group_size[1]", "must be between 1 and"),
    (changed("candidates.group_size.1", -2), f"{C}.group_size[1]", "must be between 1 and"),
    (changed("candidates.input_shape.0.1", -3), f"{C}.input_shape[0][1]", "must be between 0 and"),
    (changed("candidates.input_shape.0.1", 2**63), f"{C}.input_shape[0][1]", "integer outside"),
    (changed("candidates.input_shape.0", [1] * 65), f"{C}.input_shape[0]", "at most 64 entries"),
    (changed("candidates.depends_on.2", list(range(1_001))), f"{C}.depends_on[2]", "at most 1000 entries"),
    (changed("candidates.param_name.0", "x" * 16_385), f"{C}.param_name[0]", "at most 16384 characters"),
    (changed("candidates.device_type.0", ""), f"{C}.device_type[0]", "must not be empty"),
    (changed("candidates.kind", ["dp_all_reduce"] * (MAX_CANDIDATES + 1)), f"{C}.kind", "at most 20000 entries"),
    (changed("fixed.kind.1", ""), f"{F}.kind[1]", "must not be empty"),
    (changed("options.strategy", "best"), f"{O}.strategy", "must be one of auto, module, none, size"),
    (changed("options.bucket_cap_bytes", 0), f"{O}.bucket_cap_bytes", "must be between 1 and"),
    (changed("options.prefetch", 10_001), f"{O}.prefetch", "must be between 0 and 10000"),
    (changed("options.placement", "keep"), f"{O}.placement", "must be one of original, scheduled"),
    (
        changed("options.hardware.flops_per_us", {f"c{n}": 1 for n in range(65)}),
        f"{O}.hardware.flops_per_us",
        "at most 64 keys",
    ),
    (
        changed("options.hardware.flops_per_us", {"x" * 16_385: 1}),
        f"{O}.hardware.flops_per_us",
        "at most 16384 characters",
    ),
    (
        changed("options.hardware.collectives.0.op", "gather"),
        f"{O}.hardware.collectives[0].op",
        "must be one of all_gather",
    ),
    (
        changed("options.hardware.collectives.0.bytes_per_us.1", 0),
        f"{O}.hardware.collectives[0].bytes_per_us[1]",
        "must be between 1 and",
    ),
    (changed("options.hardware.collectives.1.alpha_ns", []), f"{O}.hardware.collectives[1].bytes_per_us", "0 entries"),
    # A key is missing, or nobody asked for it.
    (without("schema"), "request.schema", "required key is missing"),
    (without("candidates.kind"), f"{C}.kind", "required key is missing"),
    (without("candidates.state_idx"), f"{C}.state_idx", "required key is missing"),
    (without("options.planner"), f"{O}.planner", "required key is missing"),
    (changed("colour", 1), "request.colour", "unknown key"),
    (changed("candidates.weight", []), f"{C}.weight", "unknown key"),
    (changed("groups.1.name", "x"), "request.groups[1].name", "unknown key"),
    (changed("options.verbose", True), f"{O}.verbose", "unknown key"),
    (changed("fixed.bytes", [1, 2]), f"{F}.bytes", "unknown key"),
    (changed("options.hardware.name", "h100"), f"{O}.hardware.name", "unknown key"),
    (changed("options.hardware.collectives.0.name", ""), f"{O}.hardware.collectives[0].name", "unknown key"),
    # Columns differ in length.
    (changed("candidates.dtype", ["bfloat16"] * 2), f"{C}.dtype", "must have 3 entries"),
    (changed("candidates.kind", []), f"{C}.group", "must have 0 entries"),
    (changed("fixed.group", ["tp"]), f"{F}.group", "must have 2 entries"),
    # Fields contradict each other.
    (changed("groups.1.role", "dp"), "request.groups[1].role", "each role once"),
    (changed("groups.1.role", "ab"), "request.groups[1].role", "sorted by role"),
    (changed("candidates.group.1", "ep"), f"{C}.group[1]", "is not a role in groups"),
    (changed("candidates.earliest_launch.1", 2), f"{C}.launch[1]", "must lie in [earliest_launch 2"),
    (changed("candidates.latest_launch.1", 0), f"{C}.launch[1]", "latest_launch 0]"),
    (changed("candidates.latest_wait.1", 0), f"{C}.wait[1]", "latest_wait 0]"),
    (changed("candidates.first_use.1", 0), f"{C}.latest_wait[1]", "must not come after first_use 0"),
    (changed("candidates.last_use.1", 0), f"{C}.last_use[1]", "must not come before first_use 1"),
    (changed("candidates.reduce_op.0", "sum"), f"{C}.reduce_op[0]", "must be null for gathers"),
    (changed("candidates.reduce_op.2", None), f"{C}.reduce_op[2]", "is required for reductions"),
    (changed("candidates.output_shape.0", [4, 4]), f"{C}.output_shape[0]", "does not fit input_shape (2, 3)"),
    (changed("candidates.output_shape.2", [4, 3]), f"{C}.output_shape[2]", "does not fit input_shape (4, 3)"),
    (changed("candidates.group_size.0", 3), f"{C}.output_shape[0]", "at group_size 3"),
    (changed("candidates.scope.0", "layers.0"), f"{C}.scope[0]", "must be null unless the strategy is module"),
    (changed("candidates.launch_order.1", 0), f"{C}.launch_order[1]", "must be sorted by launch_order"),
    (changed("candidates.wait_order.0", 0), f"{C}.wait_order[0]", "must come after launch_order"),
    (changed("candidates.wait_order.2", 9), f"{F}.launch_order[1]", "7 expected"),
    (changed("candidates.wait_order.1", 12), f"{F}.launch_order[0]", "3 expected"),
    (changed("fixed.launch.0", 0), f"{F}.launch_order[0]", "stands at gap 0, after an event at gap 1"),
    (changed("fixed.group.0", "ep"), f"{F}.group[0]", "is not a role in groups"),
    (changed("fixed.wait.0", None), f"{F}.wait_order[0]", "must be null exactly where wait is"),
    (changed("fixed.wait_order.0", None), f"{F}.wait_order[0]", "must be null exactly where wait is"),
    (changed("fixed.launch.0", 3), f"{F}.wait[0]", "must not come before launch 3"),
    (changed("fixed.launch_order.1", 4), f"{F}.launch_order[1]", "must be sorted"),
    (changed("candidates.depends_on.2", [5]), f"{C}.depends_on[2][0]", "there are only 5 collectives"),
    (changed("candidates.depends_on.2", [3, 0]), f"{C}.depends_on[2][1]", "must be sorted"),
    (changed("candidates.depends_on.2", [3, 3]), f"{C}.depends_on[2][1]", "each index once"),
    (changed("candidates.depends_on.2", [2]), f"{C}.depends_on[2][0]", "must be waited for before the launch"),
    (changed("candidates.depends_on.2", [4]), f"{C}.depends_on[2][0]", "must be waited for before the launch"),
    (changed("candidates.depends_on.0", [1]), f"{C}.depends_on[0][0]", "must be waited for before the launch"),
    (changed("fixed.depends_on.0", [2]), f"{F}.depends_on[0][0]", "must be waited for before the launch"),
    (changed("options.planner", "none/1"), f"{O}.planner", "must be a version of strategy 'size'"),
    (changed("options.hardware.collectives.1.op", "all_gather"), f"{O}.hardware.collectives[1]", "each pair once"),
    (changed("options.hardware.collectives.0.op", "reduce_scatter"), f"{O}.hardware.collectives[1]", "sorted by group"),
]


@pytest.mark.parametrize(("tree", "path", "reason"), WRONG, ids=[f"{path} {reason}" for _, path, reason in WRONG])
def test_a_wrong_field_is_named(tree: Any, path: str, reason: str) -> None:
    with pytest.raises(DecodeError) as refusal:
        Request.decode(msgpack.packb(canonical(tree)))
    assert (refusal.value.path, reason in refusal.value.reason) == (path, True), str(refusal.value)


WRONG_IN_JSON = [case for case in WRONG if not holds_bytes(case[0])]


@pytest.mark.parametrize(
    ("tree", "path", "reason"), WRONG_IN_JSON, ids=[f"{path} {reason}" for _, path, reason in WRONG_IN_JSON]
)
def test_json_names_the_same_field(tree: Any, path: str, reason: str) -> None:
    with pytest.raises(DecodeError) as refusal:
        Request.from_wire(from_json(json.dumps(tree).encode(), root="request"))
    assert (refusal.value.path, reason in refusal.value.reason) == (path, True), str(refusal.value)


@pytest.mark.parametrize("schema", [0, 2, "1", True, None, 2**62])
def test_another_schema_version_is_its_own_error(schema: Any) -> None:
    with pytest.raises(SchemaVersionError, match="this build reads 1") as refusal:
        Request.decode(msgpack.packb(canonical(changed("schema", schema))))
    assert refusal.value.path == "request.schema"
    assert refusal.value.supported == (1,)


def test_a_tensor_too_large_to_count_with_is_refused() -> None:
    tree = changed("candidates.input_shape.0", [2**54])
    tree["candidates"]["output_shape"][0] = [2**55]
    with pytest.raises(DecodeError, match=r"candidates\.output_shape\[0\]: tensor is larger than 2\*\*55 bytes"):
        Request.from_wire(tree)


def test_a_number_that_json_shows_as_text_reads_back_as_the_number() -> None:
    request = small_request(memory_budget_bytes=2**62, bucket_cap_bytes=2**53)
    shown = to_json(request.to_wire())
    assert b'"memory_budget_bytes": "4611686018427387904"' in shown
    assert Request.from_wire(from_json(shown)) == request


def test_text_that_looks_like_a_large_number_stays_text() -> None:
    request = small_request()
    tree = changed("candidates.param_name.0", "9007199254740993")
    read = Request.from_wire(from_json(to_json(tree)))
    assert read.candidates[0].param_name == "9007199254740993"
    assert type(read.candidates[0].param_name) is str
    assert read.signature != request.signature


@pytest.mark.parametrize("length", [MAX_STRING_CHARACTERS])
def test_the_longest_name_is_read(length: int) -> None:
    tree = changed("candidates.param_name.0", "é" * length)
    assert Request.from_wire(tree).candidates[0].param_name == "é" * length


BUILD_ERRORS: list[tuple[str, Callable[[Candidate], Candidate], str]] = [
    ("float position", lambda c: replace(c, launch=0.0), "request.candidates.launch[0]"),
    ("bool for a number", lambda c: replace(c, group_size=True), "request.candidates.group_size[0]"),
    ("numeric text", lambda c: replace(c, ordinal="3"), "request.candidates.ordinal[0]"),
    ("unknown dtype", lambda c: replace(c, dtype="float12"), "request.candidates.dtype[0]"),
    ("missing order", lambda c: replace(c, launch_order=None), "request.candidates.launch_order[0]"),
    ("lone surrogate", lambda c: replace(c, param_name="\ud800"), "request.candidates.param_name[0]"),
    ("edge to nothing", lambda c: replace(c, depends_on=(9,)), "request.candidates.depends_on[0][0]"),
    ("edge backwards", lambda c: replace(c, depends_on=(-1,)), "request.candidates.depends_on[0][0]"),
    ("edge of text", lambda c: replace(c, depends_on=("a",)), "request.candidates.depends_on[0][0]"),
]


@pytest.mark.parametrize(("change", "path"), [case[1:] for case in BUILD_ERRORS], ids=[c[0] for c in BUILD_ERRORS])
def test_building_checks_what_decoding_checks(change: Callable[[Candidate], Candidate], path: str) -> None:
    request = small_request()
    first, *others = request.candidates
    with pytest.raises(DecodeError) as refusal:
        Request.build(
            num_segments=4,
            groups=request.groups,
            candidates=[change(first), *others],
            fixed=request.fixed,
            options=request.options,
        )
    assert refusal.value.path == path


def test_options_that_no_request_can_hold_are_refused_when_they_are_set() -> None:
    with pytest.raises(DecodeError) as refusal:
        small_request().with_options(Options(strategy="size", planner="size/1", bucket_cap_bytes=0))
    assert refusal.value.path == "request.options.bucket_cap_bytes"


def test_scopes_go_when_the_strategy_needs_none() -> None:
    options = Options(strategy="module", planner="module/1")
    tree = changed("options", options.to_wire())
    tree["candidates"]["scope"] = ["layers.0", None, "layers.0"]
    request = Request.from_wire(tree)
    assert request.with_options(Options(strategy="module", planner="module/1", prefetch=3)).candidates[0].scope
    sized = request.with_options(small_request().options)
    assert sized == small_request()
    assert sized.signature == small_request().signature


def test_columns_name_exactly_the_fields_of_their_rows() -> None:
    assert set(candidates_to_wire([])) == set(Candidate.__slots__)
    assert set(fixed_to_wire([])) == set(FixedCollective.__slots__)


@given(requests())
@settings(max_examples=count(test=60, soak=10_000))
def test_a_request_reads_back_from_messagepack_and_from_json(request: Request) -> None:
    decoded = Request.decode(request.encoded)
    assert decoded == request
    assert decoded.signature == request.signature
    assert Request.from_wire(from_json(to_json(request.to_wire()))) == request


@given(st.data())
@settings(max_examples=count(test=30, soak=2_000))
def test_rows_read_at_once_equal_rows_built_one_by_one(data: st.DataObject) -> None:
    request = data.draw(requests(min_candidates=1))
    for candidate in Request.decode(request.encoded).candidates:
        fields = {name: getattr(candidate, name) for name in Candidate.__slots__}
        assert Candidate(**fields) == candidate
        assert hash(Candidate(**fields)) == hash(candidate)
