"""Documents of every released schema version: each is read, is written back as it was, and means what it meant.

How a version is recorded is said in tests/core/recorded/README.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bucketplan_core import CostProfile, Plan, Request, make_plan
from bucketplan_core.epoch import Epoch
from bucketplan_core.errors import SchemaVersionError
from bucketplan_core.groups import group_digests
from bucketplan_core.legality import check_decision
from bucketplan_core.plan import Decision
from bucketplan_core.request import SCHEMA_VERSION
from bucketplan_core.wire import from_json, pack, to_json, unpack

RECORDED = Path(__file__).parent / "recorded"
FOLDERS = sorted(RECORDED.glob("schema-*"))
NAMES = {folder: json.loads((folder / "names.json").read_text()) for folder in FOLDERS}
CASES = [pytest.param(folder, name, id=f"{folder.name}-{name}") for folder in FOLDERS for name in NAMES[folder]]


def read(folder: Path, name: str) -> tuple[Request, CostProfile, Plan, Epoch, dict[str, Any]]:
    request = Request.decode((folder / f"{name}.request").read_bytes())
    return (
        request,
        CostProfile.decode((folder / f"{name}.profile").read_bytes(), request),
        Plan.decode((folder / f"{name}.plan").read_bytes(), expected_signature=request.signature),
        Epoch.decode((folder / f"{name}.epoch").read_bytes()),
        NAMES[folder][name],
    )


def test_the_current_schema_version_is_recorded():
    assert RECORDED / f"schema-{SCHEMA_VERSION}" in FOLDERS
    assert {path.stem for folder in FOLDERS for path in folder.glob("*.request")} == {
        name for folder in FOLDERS for name in NAMES[folder]
    }


@pytest.mark.parametrize(("folder", "name"), CASES)
def test_documents_keep_their_names_and_bytes(folder, name):
    request, profile, plan, epoch, names = read(folder, name)
    assert request.signature == names["signature"]
    assert profile.digest == names["profile"]
    assert plan.digest == names["plan"]
    assert epoch.id == names["epoch"]
    # Written anew from what was read, not from the bytes that reading kept.
    for kind, tree in (
        ("request", request.to_wire()),
        ("profile", profile.to_wire()),
        ("epoch", epoch.to_wire()),
    ):
        assert pack(tree) == (folder / f"{name}.{kind}").read_bytes(), kind
    assert pack(plan.decision.to_wire()) == plan.decision.encoded
    assert Decision.from_wire(from_json(to_json(plan.decision.to_wire()))) == plan.decision
    assert Request.from_wire(from_json(to_json(request.to_wire()))).signature == names["signature"]


@pytest.mark.parametrize(("folder", "name"), CASES)
def test_planners_still_make_the_recorded_plans(folder, name):
    request, profile, plan, epoch, names = read(folder, name)
    assert make_plan(request, profile).digest == names["plan"]
    check_decision(request, plan.decision)
    assert group_digests(request, plan.decision) == names["groups"]
    assert epoch.digest_for(request.signature) == names["plan"]


@pytest.mark.parametrize("kind", ["request", "profile", "plan", "epoch"])
def test_documents_of_a_later_schema_are_refused_by_their_number(kind):
    folder = RECORDED / f"schema-{SCHEMA_VERSION}"
    name = next(iter(NAMES[folder]))
    tree = unpack((folder / f"{name}.{kind}").read_bytes())
    assert isinstance(tree, dict)
    later = pack({**tree, "schema": SCHEMA_VERSION + 1})
    request = read(folder, name)[0]
    with pytest.raises(SchemaVersionError) as refused:
        {
            "request": Request.decode,
            "profile": lambda data: CostProfile.decode(data, request),
            "plan": Plan.decode,
            "epoch": Epoch.decode,
        }[kind](later)
    assert refused.value.value == SCHEMA_VERSION + 1
    assert refused.value.supported == (SCHEMA_VERSION,)
