"""Every parser, given documents that are almost right, reads exactly what was written or refuses with its own error."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketplan_core.fields import Fields
from bucketplan_core.hardware import Hardware
from bucketplan_core.plan import Decision, Plan
from bucketplan_core.planning import make_plan
from bucketplan_core.profile import CostProfile
from bucketplan_core.request import Request
from bucketplan_core.wire import from_json, pack, to_json, unpack
from tests.core.test_decoding import HARDWARE, small_request
from tests.support.counts import count, seeds
from tests.support.mutation import REFUSALS, mutated_json, mutated_msgpack, returns_equal_or_refuses
from tests.support.requests import random_profile, random_request

REQUEST = small_request()
PROFILE = random_profile(random.Random(0), REQUEST)
PLAN = make_plan(REQUEST, PROFILE)


def _read_hardware(data: bytes) -> Hardware:
    return Hardware.read(Fields(unpack(data), "hardware"))


Decode = Callable[[bytes], Any]
Encode = Callable[[Any], bytes]
PARSERS: dict[str, tuple[bytes, Decode, Encode]] = {
    "wire": (pack({"a": [1, -1, None], "b": {"c": b"\x00", "d": ["x", True]}}), unpack, pack),
    "request": (REQUEST.encoded, Request.decode, lambda request: pack(request.to_wire())),
    "profile": (
        PROFILE.encoded,
        lambda data: CostProfile.decode(data, REQUEST),
        lambda profile: pack(profile.to_wire()),
    ),
    "hardware": (pack(HARDWARE.to_wire()), _read_hardware, lambda hardware: pack(hardware.to_wire())),
    "decision": (PLAN.decision.encoded, Decision.decode, lambda decision: pack(decision.to_wire())),
    "plan": (
        PLAN.encoded,
        Plan.decode,
        lambda plan: pack(
            {
                "assessment": plan.assessment,
                "decision": pack(plan.decision.to_wire()),
                "digest": plan.digest,
                "schema": 1,
            }
        ),
    ),
}
JSON_PARSERS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "request": (REQUEST.to_wire(), Request.from_wire),
    "profile": (PROFILE.to_wire(), lambda tree: CostProfile.from_wire(tree, REQUEST)),
    "hardware": (HARDWARE.to_wire(), lambda tree: Hardware.read(Fields(tree, "hardware"))),
    "decision": (PLAN.decision.to_wire(), Decision.from_wire),
}


@pytest.mark.parametrize("parser", PARSERS)
def test_the_document_itself_is_read(parser: str) -> None:
    data, decode, encode = PARSERS[parser]
    assert returns_equal_or_refuses(decode, encode, data)


@pytest.mark.parametrize("parser", PARSERS)
@given(data=st.binary(max_size=64))
@settings(max_examples=count(test=60, soak=20_000))
def test_any_bytes_are_read_or_refused(parser: str, data: bytes) -> None:
    _, decode, encode = PARSERS[parser]
    returns_equal_or_refuses(decode, encode, data)


@pytest.mark.soak
@pytest.mark.parametrize("parser", PARSERS)
def test_documents_almost_right_are_read_as_they_are_or_refused(parser: str) -> None:
    data, decode, encode = PARSERS[parser]
    accepted = total = 0
    for seed in seeds(f"mutated {parser}", test=600, soak=100_000):
        total += 1
        accepted += returns_equal_or_refuses(decode, encode, mutated_msgpack(random.Random(seed), data))
    # Neither is the mutation so wild that all dies at the door, nor so tame that nothing is refused.
    assert 0 < accepted < total


@pytest.mark.soak
@pytest.mark.parametrize("parser", JSON_PARSERS)
def test_json_almost_right_is_read_or_refused(parser: str) -> None:
    tree, read = JSON_PARSERS[parser]
    text = to_json(tree)
    accepted = total = 0
    for seed in seeds(f"mutated {parser} in JSON", test=400, soak=100_000):
        total += 1
        try:
            document = read(from_json(mutated_json(random.Random(seed), text)))
        except REFUSALS:
            continue
        accepted += 1
        assert read(from_json(to_json(json.loads(json.dumps(_to_wire(document)))))) == document
    assert 0 < accepted < total


def _to_wire(document: Any) -> Any:
    return document.to_wire()


@pytest.mark.soak
def test_a_request_that_was_accepted_can_be_planned() -> None:
    """What validation lets through, however odd, no planner stumbles over: the service plans whatever it accepts."""
    planned = 0
    for seed in seeds("plan what was accepted", test=500, soak=50_000):
        rng = random.Random(seed)
        base = REQUEST if seed % 2 else random_request(rng)
        try:
            request = Request.decode(mutated_msgpack(rng, base.encoded))
        except REFUSALS:
            continue
        if request.options.planner in ("none/1", "size/1"):
            assert make_plan(request).decision.signature == request.signature
            planned += 1
    assert planned
