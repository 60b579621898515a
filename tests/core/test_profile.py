"""Cost profiles and hardware figures: one document each, read for the request that they belong to."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings

from bucketplan_core.errors import DecodeError, SchemaVersionError
from bucketplan_core.fields import Fields
from bucketplan_core.hardware import Hardware
from bucketplan_core.planning import make_plan
from bucketplan_core.profile import CostProfile, WorkClass
from bucketplan_core.request import Request
from bucketplan_core.wire import digest_of, from_json, pack, to_json, unpack
from tests.core.test_decoding import canonical, small_request
from tests.support.counts import count
from tests.support.requests import random_hardware, random_profile, randoms, requests

REQUEST = small_request()
PROFILE = random_profile(random.Random(0), REQUEST)
TREE = PROFILE.to_wire()


def changed(path: str, value: Any) -> Any:
    tree: Any = copy.deepcopy(TREE)
    holder = tree
    *steps, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    for step in steps:
        holder = holder[step]
    holder[last] = value
    return tree


@given(requests(), randoms())
@settings(max_examples=count(test=60, soak=5_000))
def test_a_profile_reads_back_from_messagepack_and_from_json(request: Request, rng: random.Random) -> None:
    profile = random_profile(rng, request)
    decoded = CostProfile.decode(profile.encoded, request)
    assert decoded == profile
    assert decoded.digest == profile.digest == digest_of(profile.encoded)
    assert CostProfile.from_wire(from_json(to_json(profile.to_wire())), request) == profile
    profile.check(request)


@given(randoms())
@settings(max_examples=count(test=60, soak=5_000))
def test_hardware_reads_back_whatever_order_its_figures_came_in(rng: random.Random) -> None:
    hardware = random_hardware(rng, ["a", "b", "c"])
    turned = replace(
        hardware,
        flops_per_us=tuple(rng.sample(hardware.flops_per_us, len(hardware.flops_per_us))),
        collectives=tuple(rng.sample(hardware.collectives, len(hardware.collectives))),
    )
    assert turned == hardware
    assert Hardware.read(Fields(unpack(pack(turned.to_wire())), "hardware")) == hardware
    assert Hardware.read(Fields(from_json(to_json(hardware.to_wire())), "hardware")) == hardware


def test_classes_in_another_order_are_one_profile() -> None:
    turned = replace(PROFILE, work=PROFILE.work[::-1])
    assert turned == PROFILE
    assert turned.digest == PROFILE.digest


def test_the_profile_is_no_part_of_the_signature_nor_of_a_plan_that_uses_none() -> None:
    other = random_profile(random.Random(1), REQUEST)
    assert other.digest != PROFILE.digest
    plans = [make_plan(REQUEST, profile) for profile in (PROFILE, other, None)]
    assert len({plan.decision.encoded for plan in plans}) == 1
    assert [plan.assessment["profile"] for plan in plans] == [
        PROFILE.digest,
        other.digest,
        CostProfile.empty(REQUEST).digest,
    ]


@pytest.mark.parametrize(
    ("tree", "path", "reason"),
    [
        ([], "profile", "must be a map"),
        (changed("live_bytes", [1, 2, 3]), "profile.live_bytes", "must have 4 entries, one a segment"),
        (changed("live_bytes", []), "profile.live_bytes", "must have 4 entries"),
        (changed("live_bytes", None), "profile.live_bytes", "must be a list"),
        (changed("live_bytes.2", -1), "profile.live_bytes[2]", "must be between 0 and"),
        (changed("live_bytes.2", 2**63), "profile.live_bytes[2]", "integer outside"),
        (changed("live_bytes.2", 0.5), "profile.live_bytes[2]", "numbers must be integers"),
        (changed("fixed_bytes", [1]), "profile.fixed_bytes", "must have 2 entries, one a fixed collective"),
        (changed("work", []), "profile.work", "must be a map"),
        (changed("work.memory", 1), "profile.work.memory", "must be a map"),
        (changed("work.memory.flops", [0] * 5), "profile.work.memory.flops", "must have 4 entries"),
        (changed("work.memory.bytes_moved.0", "1"), "profile.work.memory.bytes_moved[0]", "must be an integer"),
        (changed("work.memory.seconds", []), "profile.work.memory.seconds", "unknown key"),
        (changed("work", {f"c{n}": {} for n in range(65)}), "profile.work", "at most 64 keys"),
        (changed("work", {"x" * 16_385: {}}), "profile.work", "at most 16384 characters"),
        (changed("colour", 1), "profile.colour", "unknown key"),
    ],
)
def test_a_wrong_field_is_named(tree: Any, path: str, reason: str) -> None:
    with pytest.raises(DecodeError) as refusal:
        CostProfile.decode(msgpack.packb(canonical(tree)), REQUEST)
    assert (refusal.value.path, reason in refusal.value.reason) == (path, True), str(refusal.value)


def test_another_schema_version_is_its_own_error() -> None:
    with pytest.raises(SchemaVersionError) as refusal:
        CostProfile.from_wire(changed("schema", 2), REQUEST)
    assert refusal.value.path == "profile.schema"


def test_a_class_that_appears_twice_is_refused_before_one_hides_the_other() -> None:
    work = WorkClass(name="memory", flops=(0,) * 4, bytes_moved=(1,) * 4)
    with pytest.raises(DecodeError, match=r"profile\.work: each class may appear once"):
        make_plan(REQUEST, CostProfile(work=(work, work), live_bytes=(0,) * 4, fixed_bytes=(0, 0)))
