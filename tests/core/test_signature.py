"""One graph, one signature, whatever order its parts came in; and another for whatever ranks must have in common."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings

from bucketplan_core.collectives import Candidate, FixedCollective, Group, Options
from bucketplan_core.planning import make_plan
from bucketplan_core.request import Request
from bucketplan_core.wire import from_json, to_json
from tests.core.test_decoding import HARDWARE, small_request
from tests.support.counts import count
from tests.support.paths import ROOT
from tests.support.requests import random_hardware, random_profile, random_request, randoms, requests


def shuffled(request: Request, rng: random.Random) -> Request:
    """The same parts handed over in another order, edges renumbered to match."""
    num_candidates = len(request.candidates)
    order = rng.sample(range(num_candidates), num_candidates)
    fixed_order = rng.sample(range(len(request.fixed)), len(request.fixed))
    place = {old: new for new, old in enumerate(order)}
    place |= {num_candidates + old: num_candidates + new for new, old in enumerate(fixed_order)}

    def edges(depends_on: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(rng.sample([place[edge] for edge in depends_on], len(depends_on)))

    return Request.build(
        num_segments=request.num_segments,
        groups=rng.sample(request.groups, len(request.groups)),
        candidates=[replace(request.candidates[i], depends_on=edges(request.candidates[i].depends_on)) for i in order],
        fixed=[replace(request.fixed[i], depends_on=edges(request.fixed[i].depends_on)) for i in fixed_order],
        options=request.options,
        phase=request.phase,
    )


def reordered(value: object, rng: random.Random) -> object:
    """The same tree with the keys of every map in another order."""
    if isinstance(value, dict):
        return {key: reordered(value[key], rng) for key in rng.sample(list(value), len(value))}
    return [reordered(item, rng) for item in value] if isinstance(value, list) else value


@given(requests(min_candidates=1), randoms())
@settings(max_examples=count(test=60, soak=10_000))
def test_arrival_order_shows_neither_in_the_signature_nor_in_the_plan(request: Request, rng: random.Random) -> None:
    options = replace(request.options, strategy="size", planner="size/1")
    request = request.with_options(options)
    other = shuffled(request, rng)
    assert other == request
    assert other.encoded == request.encoded
    assert make_plan(other).encoded == make_plan(request).encoded


@given(requests(), randoms())
@settings(max_examples=count(test=40, soak=5_000))
def test_key_order_shows_nowhere(request: Request, rng: random.Random) -> None:
    tree = reordered(request.to_wire(), rng)
    assert Request.from_wire(tree).signature == request.signature  # type: ignore[arg-type]  # trees are typed as object
    assert Request.from_wire(from_json(to_json(tree))).signature == request.signature  # type: ignore[arg-type]  # trees are typed as object


def test_hardware_figures_in_any_order_are_one_profile() -> None:
    turned = replace(HARDWARE, flops_per_us=HARDWARE.flops_per_us[::-1], collectives=HARDWARE.collectives[::-1])
    assert turned == HARDWARE
    assert small_request(hardware=turned).signature == small_request(hardware=HARDWARE).signature


_PRINT_DIGESTS = """
import random, sys
from bucketplan_core.planning import make_plan
from bucketplan_core.groups import group_digests
from tests.core.test_signature import many_requests
for request, profile in many_requests():
    plan = make_plan(request, profile)
    print(request.signature, plan.digest, plan.encoded.hex(), sorted(group_digests(request, plan.decision).items()))
"""


def many_requests() -> list:
    """Twenty requests with their profiles, the same in every process."""
    found = []
    for seed in range(20):
        rng = random.Random(seed)
        options = Options(
            strategy="size",
            planner="size/1",
            placement=rng.choice(("original", "scheduled")),
            bucket_cap_bytes=1_000,
            mixed_dtype=rng.random() < 0.5,
            hardware=random_hardware(rng, ["fsdp", "replicate"]),
        )
        request = random_request(rng, options=options, min_candidates=8, max_collectives=24)
        found.append((request, random_profile(rng, request)))
    return found


def test_three_hash_seeds_give_the_same_bytes() -> None:
    printed = set()
    for seed in ("0", "1", "4242"):
        done = subprocess.run(
            [sys.executable, "-c", _PRINT_DIGESTS],
            env=os.environ | {"PYTHONHASHSEED": seed},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        printed.add(done.stdout)
    assert len(printed) == 1
    assert len(printed.pop().splitlines()) == 20


def _candidate(index: int, **fields: object) -> Callable[[Request], Request]:
    def change(request: Request) -> Request:
        candidates = list(request.candidates)
        candidates[index] = replace(candidates[index], **fields)  # type: ignore[arg-type]  # callers name fields of the class
        return rebuilt(request, candidates=candidates)

    return change


def rebuilt(request: Request, **parts: object) -> Request:
    given = {
        name: getattr(request, name) for name in ("num_segments", "groups", "candidates", "fixed", "options", "phase")
    }
    return Request.build(**(given | parts))  # type: ignore[arg-type]  # callers name its parameters


def _swap_parameters(request: Request) -> Request:
    a, b, *others = request.candidates
    names = ("param_name", "ordinal", "state_idx", "module_fqns")
    swapped = [
        replace(a, **{name: getattr(b, name) for name in names}),
        replace(b, **{name: getattr(a, name) for name in names}),
    ]
    return rebuilt(request, candidates=[*swapped, *others])


def _fixed(**fields: object) -> Callable[[Request], Request]:
    return lambda request: rebuilt(request, fixed=[replace(request.fixed[0], **fields), *request.fixed[1:]])  # type: ignore[arg-type]  # callers name fields of the class


def _group(**fields: object) -> Callable[[Request], Request]:
    return lambda request: rebuilt(request, groups=[replace(request.groups[0], **fields), *request.groups[1:]])  # type: ignore[arg-type]  # callers name fields of the class


def _options(**fields: object) -> Callable[[Request], Request]:
    return lambda request: request.with_options(replace(request.options, **fields))  # type: ignore[arg-type]  # callers name fields of the class


def _role(role: str) -> Callable[[Request], Request]:
    return lambda request: rebuilt(
        request,
        groups=[replace(request.groups[0], role=role), *request.groups[1:]],
        candidates=[replace(c, group=role) for c in request.candidates],
    )


CHANGES: dict[str, Callable[[Request], Request]] = {
    "two parameters swapped": _swap_parameters,
    "kind": _candidate(0, kind="fsdp_all_gather_backward"),
    "reduce op": _candidate(2, reduce_op="avg"),
    "dtype": _candidate(0, dtype="float16"),
    "device type": _candidate(0, device_type="xpu"),
    "shape": _candidate(0, input_shape=(3, 2), output_shape=(6, 2)),
    "group size of a candidate": _candidate(0, group_size=4, output_shape=(8, 3)),
    "group size": _group(size=4, strides=()),
    "group rank pattern": _group(strides=(8, 1)),
    "group nodes": _group(nodes=2),
    "group link": _group(link=None),
    "group role": _role("data"),
    "one module path": _candidate(1, module_fqns=("layers.1",)),
    "parameter name": _candidate(1, param_name="c"),
    "parameter ordinal": _candidate(1, ordinal=5),
    "state index": _candidate(1, state_idx=None),
    "backward flag": _candidate(1, backward=True),
    "earliest launch": _candidate(1, earliest_launch=1),
    "latest launch": _candidate(0, latest_launch=0),
    "latest wait": _candidate(2, latest_wait=3),
    "first use": _candidate(0, latest_wait=0, first_use=0),
    "last use": _candidate(0, last_use=2),
    "an edge": _candidate(2, depends_on=()),
    "fixed kind": _fixed(kind="all_gather"),
    "fixed group": _fixed(group=None),
    "fixed skip reason": _fixed(skipped="aliased"),
    "fixed launch": lambda request: rebuilt(request, fixed=[request.fixed[0], replace(request.fixed[1], launch=4)]),
    "segments": lambda request: rebuilt(request, num_segments=5),
    "phase": lambda request: rebuilt(request, phase="forward"),
    "capture version": lambda request: rebuilt(request, capture=2),
    "strategy": _options(strategy="none", planner="none/1"),
    "planner version": _options(planner="size/2"),
    "placement": _options(placement="scheduled"),
    "cap": _options(bucket_cap_bytes=1),
    "first cap": _options(first_bucket_cap_bytes=1),
    "memory budget": _options(memory_budget_bytes=0),
    "prefetch": _options(prefetch=2),
    "mixed dtype": _options(mixed_dtype=True),
    "no hardware": _options(hardware=None),
    "a hardware figure": _options(hardware=replace(HARDWARE, launch_ns=5_001)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_ranks_must_share_changes_the_signature(change: Callable[[Request], Request]) -> None:
    assert change(small_request()).signature != small_request().signature


def test_no_two_changes_give_one_signature() -> None:
    signatures = {name: change(small_request()).signature for name, change in CHANGES.items()}
    assert len(set(signatures.values())) == len(CHANGES)


def test_every_field_is_part_of_the_signature() -> None:
    """A field that no change above touches is one whose loss nobody would notice."""
    base = small_request()

    def differing(kind: type, pick: Callable[[Request], object]) -> set[str]:
        found: set[str] = set()
        for change in CHANGES.values():
            rows = zip(pick(base), pick(change(base)), strict=True)  # type: ignore[call-overload]  # each pick is a list of records
            found |= {name for a, b in rows for name in kind.__slots__ if getattr(a, name) != getattr(b, name)}
        return found

    # Launch, wait and their numbers move together; the recorded graphs cover them.
    timeline = {"launch", "wait", "launch_order", "wait_order"}
    assert differing(Candidate, lambda r: r.candidates) >= set(Candidate.__slots__) - timeline - {"scope"}
    assert differing(FixedCollective, lambda r: r.fixed) >= set(FixedCollective.__slots__) - timeline - {"depends_on"}
    assert differing(Group, lambda r: r.groups) == set(Group.__slots__)
    assert differing(Options, lambda r: (r.options,)) == set(Options.__slots__)


@given(requests(min_candidates=2))
@settings(max_examples=count(test=40, soak=5_000))
def test_one_changed_shape_or_name_anywhere_changes_the_signature(request: Request) -> None:
    for index, candidate in enumerate(request.candidates):
        renamed = _candidate(index, param_name=f"{candidate.param_name}!")(request)
        reshaped = _candidate(
            index, input_shape=(*candidate.input_shape, 1), output_shape=(*candidate.output_shape, 1)
        )(request)
        assert len({request.signature, renamed.signature, reshaped.signature}) == 3
