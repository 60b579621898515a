"""Plans on the wire: what a client accepts as the plan of its graph, and nothing else."""

from __future__ import annotations

import copy
from typing import Any

import msgpack
import pytest

from bucketplan_core.errors import DecodeError, SchemaVersionError, SignatureMismatch
from bucketplan_core.plan import Bucket, Decision, Plan, Step
from bucketplan_core.planning import make_plan
from bucketplan_core.wire import digest_of, from_json, pack, to_json
from tests.core.test_decoding import canonical, small_request

REQUEST = small_request()
PLAN = make_plan(REQUEST)
DECISION = PLAN.decision.to_wire()


def changed(path: str, value: Any) -> Any:
    tree: Any = copy.deepcopy(DECISION)
    holder = tree
    *steps, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    for step in steps:
        holder = holder[step]
    holder[last] = value
    return tree


def body(**fields: Any) -> bytes:
    whole = {"assessment": {}, "decision": PLAN.decision.encoded, "digest": PLAN.digest, "schema": 1} | fields
    return bytes(msgpack.packb(canonical(whole)))


def test_a_plan_reads_back_whole() -> None:
    plan = Plan.decode(PLAN.encoded, expected_signature=REQUEST.signature)
    assert plan == PLAN
    assert plan.encoded == PLAN.encoded
    assert plan.digest == PLAN.digest == digest_of(PLAN.decision.encoded)


def test_the_assessment_is_no_part_of_the_digest() -> None:
    other = Plan(decision=PLAN.decision, assessment={"step_ns": 7})
    assert other.digest == PLAN.digest
    assert other.encoded != PLAN.encoded
    assert Plan.decode(other.encoded).assessment == {"step_ns": 7}


def test_people_read_the_decision_as_a_map() -> None:
    shown = from_json(to_json(PLAN.to_people()))
    assert isinstance(shown, dict)
    assert Decision.from_wire(shown["decision"]) == PLAN.decision
    assert shown["digest"] == PLAN.digest


@pytest.mark.parametrize(
    ("data", "path", "reason"),
    [
        (body(digest="x"), "plan.digest", "must be 64 lower-case hex"),
        (body(digest="A" * 64), "plan.digest", "must be 64 lower-case hex"),
        (body(decision=DECISION), "plan.decision", "must be bytes"),
        (body(decision=b"\x80", digest=digest_of(b"\x80")), "plan.decision.schema", "required key is missing"),
        (body(assessment=[]), "plan.assessment", "must be a map"),
        (body(assessment={"a": 1.5}), "plan.assessment.a", "numbers must be integers"),
        (body(colour=1), "plan.colour", "unknown key"),
        (PLAN.encoded[:-1], "plan", "not a MessagePack document"),
        (PLAN.encoded + b"\xc0", "plan", "bytes follow"),
    ],
)
def test_a_malformed_answer_is_refused_where_it_is_wrong(data: bytes, path: str, reason: str) -> None:
    with pytest.raises(DecodeError) as refusal:
        Plan.decode(data)
    assert (refusal.value.path, reason in refusal.value.reason) == (path, True), str(refusal.value)


def test_another_schema_is_named() -> None:
    with pytest.raises(SchemaVersionError) as refusal:
        Plan.decode(body(schema=2))
    assert refusal.value.path == "plan.schema"
    tampered = pack(changed("schema", 9))
    with pytest.raises(SchemaVersionError) as refusal:
        Plan.decode(body(decision=tampered, digest=digest_of(tampered)))
    assert refusal.value.path == "plan.decision.schema"


def test_bytes_that_are_not_what_the_digest_says_are_refused() -> None:
    tampered = pack(changed("planner", "size/2"))
    with pytest.raises(SignatureMismatch) as refusal:
        Plan.decode(body(decision=tampered))
    assert refusal.value.claimed == PLAN.digest
    assert refusal.value.actual == digest_of(tampered)


def test_the_plan_of_another_graph_is_refused() -> None:
    other = small_request(prefetch=3)
    with pytest.raises(SignatureMismatch) as refusal:
        Plan.decode(PLAN.encoded, expected_signature=other.signature)
    assert refusal.value.claimed == other.signature
    assert refusal.value.actual == REQUEST.signature


D = "decision"


@pytest.mark.parametrize(
    ("tree", "path", "reason"),
    [
        (changed("signature", "0" * 63), f"{D}.signature", "64 lower-case hex"),
        (changed("profile", "x"), f"{D}.profile", "64 lower-case hex"),
        (changed("planner", ""), f"{D}.planner", "must not be empty"),
        (changed("buckets.id", None), f"{D}.buckets.id", "must be a list"),
        (changed("buckets.lane.0", -1), f"{D}.buckets.lane[0]", "must be between"),
        (changed("buckets.members.1.0", 1.0), f"{D}.buckets.members[1][0]", "numbers must be integers"),
        (changed("buckets.members.1", 2), f"{D}.buckets.members[1]", "must be a list"),
        (changed("buckets.rewrite.0", "pack"), f"{D}.buckets.rewrite[0]", "must be one of gather"),
        (changed("buckets.lane", [0]), f"{D}.buckets.lane", "must have 2 entries"),
        (changed("buckets.size", [1, 1]), f"{D}.buckets.size", "unknown key"),
        (changed("steps.op.0", 4), f"{D}.steps.op[0]", "must be between 0 and 3"),
        (changed("steps.op.0", True), f"{D}.steps.op[0]", "must be an integer"),
        (changed("steps.gap.2", "0"), f"{D}.steps.gap[2]", "must be an integer"),
        (changed("steps.gap.2", -1), f"{D}.steps.gap[2]", "must be between"),
        (changed("steps.gap.2", True), f"{D}.steps.gap[2]", "must be an integer"),
        (changed("steps.target.0", 2**63), f"{D}.steps.target[0]", "integer outside"),
        (changed("steps.target.0", 2**64 - 1), f"{D}.steps.target[0]", "integer outside"),
        (changed("buckets.members.1.0", 2**63), f"{D}.buckets.members[1][0]", "integer outside"),
        (changed("steps.target", []), f"{D}.steps.target", "entries"),
    ],
)
def test_a_wrong_field_of_a_decision_is_named(tree: Any, path: str, reason: str) -> None:
    with pytest.raises(DecodeError) as refusal:
        Decision.decode(msgpack.packb(canonical(tree)))
    assert (refusal.value.path, reason in refusal.value.reason) == (path, True), str(refusal.value)


def test_the_rows_read_are_rows_as_built() -> None:
    decision = Decision.decode(PLAN.decision.encoded)
    assert decision.steps == tuple(Step(step.gap, step.op, step.target) for step in PLAN.decision.steps)
    assert all(type(step.op) is type(PLAN.decision.steps[0].op) for step in decision.steps)
    assert decision.buckets == tuple(
        Bucket(id=b.id, lane=b.lane, members=b.members, rewrite=b.rewrite) for b in PLAN.decision.buckets
    )


def test_a_plan_says_in_one_line_what_it_is() -> None:
    assert repr(PLAN) == (
        f"Plan(Decision(size/1, signature {REQUEST.signature[:12]}, 3 candidates in 2 buckets, 1 fused of up to 2 "
        f"members), digest {PLAN.digest[:12]})"
    )
    assert "3 candidates in 2 lanes, 2 fixed, 4 segments" in repr(REQUEST)
