"""The epoch's id is a function of its content alone, and its reader takes nothing else."""

import os
import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketplan_core.collectives import Options
from bucketplan_core.epoch import Epoch, Override, complete_options
from bucketplan_core.errors import DecodeError, PlannerUnavailable, SchemaVersionError
from bucketplan_core.wire import pack, unpack

SIZE = Options(strategy="size", planner="size/1")
A, B, C = "a" * 64, "b" * 64, "c" * 64

digests = st.text("0123456789abcdef", min_size=64, max_size=64)


def epoch(**changes) -> Epoch:
    parts = {"job": "llama", "options": SIZE, "topology": {"tp": 1, "fsdp": 8}, "overrides": {B: C, A: C}}
    return Epoch.build(**{**parts, **changes})


def test_the_order_in_which_parts_arrive_changes_nothing():
    shuffled = epoch(topology={"fsdp": 8, "tp": 1}, overrides={A: C, B: C})
    assert shuffled.encoded == epoch().encoded
    assert shuffled.id == epoch().id
    assert epoch().overrides == (Override(A, C), Override(B, C))


def test_three_hash_seeds_give_one_id():
    code = (
        "from tests.core.test_epoch import epoch; print(epoch(topology={f'r{i}': i for i in {str(x) for x in range(9)} "
        "for i in [int(i)]}).id)"
    )
    ids = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(ids) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"job": "other"},
        {"options": Options(strategy="none", planner="none/1")},
        {"topology": {"tp": 1, "fsdp": 4}},
        {"overrides": {A: C}},
        {"overrides": {A: C, B: A}},
        {"capture": 2},
    ],
)
def test_whatever_can_change_a_plan_changes_the_id(change):
    assert epoch(**change).id != epoch().id


@given(st.dictionaries(digests, digests, max_size=6), st.dictionaries(st.text(max_size=5), st.integers(0, 99)))
def test_what_is_written_is_read_back(overrides, topology):
    made = epoch(overrides=overrides, topology=topology)
    assert Epoch.decode(made.encoded) == made
    assert Epoch.from_wire(made.to_wire()).id == made.id
    for signature, digest in overrides.items():
        assert made.digest_for(signature) == digest
    assert made.digest_for("0" * 63 + "x") is None


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"surprise": 1}, "epoch.surprise"),
        ({"job": ""}, "epoch.job"),
        ({"job": 1}, "epoch.job"),
        ({"capture": 0}, "epoch.capture"),
        ({"topology": {"fsdp": -1}}, "epoch.topology.fsdp"),
        ({"topology": {"fsdp": "8"}}, "epoch.topology.fsdp"),
        ({"topology": []}, "epoch.topology"),
        ({"overrides": {"digest": [C], "signature": []}}, "epoch.overrides.digest"),
        ({"overrides": {"digest": [C, C], "signature": [B, A]}}, "epoch.overrides.signature[1]"),
        ({"overrides": {"digest": [C, C], "signature": [A, A]}}, "epoch.overrides.signature[1]"),
        ({"overrides": {"digest": ["x"], "signature": [A]}}, "epoch.overrides.digest[0]"),
        ({"overrides": {"digest": [], "signature": [], "more": 1}}, "epoch.overrides.more"),
    ],
)
def test_a_bad_field_is_named(change, path):
    with pytest.raises(DecodeError) as refused:
        Epoch.from_wire({**epoch().to_wire(), **change})
    assert refused.value.path.startswith(path)


def test_another_schema_is_refused_as_such():
    with pytest.raises(SchemaVersionError):
        Epoch.from_wire({**epoch().to_wire(), "schema": 2})


def test_random_damage_is_refused_or_another_epoch():
    encoded = epoch().encoded
    draw = random.Random(0)
    for _ in range(2_000):
        damaged = bytearray(encoded)
        damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        try:
            read = Epoch.decode(bytes(damaged))
        except DecodeError:
            continue
        assert read.id != epoch().id
        assert read.encoded == pack(unpack(bytes(damaged)))


class TestCompleteOptions:
    def test_what_is_left_open_comes_from_the_defaults(self):
        completed = complete_options({"prefetch": 3}, SIZE)
        assert (completed.prefetch, completed.bucket_cap_bytes, completed.planner) == (
            3,
            SIZE.bucket_cap_bytes,
            "size/1",
        )

    def test_a_strategy_brings_its_newest_planner(self):
        assert complete_options({"strategy": "module"}, SIZE).planner.startswith("module/")

    def test_a_named_planner_stays(self):
        assert complete_options({"strategy": "none", "planner": "none/1"}, SIZE).planner == "none/1"

    def test_bad_fields_are_named(self):
        with pytest.raises(DecodeError) as refused:
            complete_options({"caps": 1}, SIZE)
        assert refused.value.path == "options.caps"
        with pytest.raises(DecodeError) as refused:
            complete_options({"strategy": "best"}, SIZE)
        assert refused.value.path == "options.strategy"
        with pytest.raises(DecodeError):
            complete_options({"strategy": "none", "planner": "size/1"}, SIZE)

    def test_a_strategy_without_a_planner_is_refused(self, monkeypatch):
        monkeypatch.setattr("bucketplan_core.planners.PLANNERS", ())
        with pytest.raises(PlannerUnavailable):
            complete_options({"strategy": "none"}, SIZE)
