"""Errors carry their facts as fields, across processes too, and say what is wrong in a sentence."""

from __future__ import annotations

import pickle

import pytest

from bucketplan_core import errors
from bucketplan_core.errors import (
    BucketplanError,
    DecodeError,
    GroupPlanMismatch,
    IllegalPlan,
    PlannerUnavailable,
    PlanningError,
    SchemaVersionError,
    SignatureMismatch,
    describe_ranks,
)

ALL: list[BucketplanError] = [
    BucketplanError("plain"),
    DecodeError("request.candidates.kind[3]", 7, "must be text"),
    SchemaVersionError("request.schema", 9, (1, 2)),
    SignatureMismatch(claimed="a" * 64, actual="b" * 64),
    IllegalPlan("lane", "the candidate is of another lane", bucket="fsdp/0/1", members=[3, 4]),
    IllegalPlan("signature", "made for another graph"),
    PlanningError("strategy", "module", "no candidate has a scope"),
    PlannerUnavailable("size/9", ["none/1", "size/1"]),
    GroupPlanMismatch(role="fsdp", what="plan", holders={"aa": [0, 1], "bb": [2]}),
]


@pytest.mark.parametrize("error", ALL, ids=lambda error: type(error).__name__)
def test_an_error_crosses_a_process_border_as_it_was(error: BucketplanError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.args == error.args
    assert vars(copy) == vars(error)


def test_every_error_is_tested_and_drawn_in_the_tree() -> None:
    classes = {name for name in errors.__all__ if name != "describe_ranks"}
    assert {type(error).__name__ for error in ALL} == classes
    assert errors.__doc__ is not None
    assert all(name in errors.__doc__ for name in classes)


def test_sentences_name_field_value_and_place() -> None:
    assert str(ALL[1]) == "request.candidates.kind[3]: must be text (got 7)"
    assert str(ALL[2]) == "request.schema: unknown schema version; this build reads 1, 2. Use matching releases (got 9)"
    assert str(ALL[4]) == (
        "rule 'lane' broken in bucket 'fsdp/0/1' (candidates 3, 4): the candidate is of another lane"
    )
    assert "option strategy='module'" in str(ALL[6])


def test_a_long_value_is_shown_in_part() -> None:
    assert len(str(DecodeError("request", "x" * 10**6, "must be a map"))) < 200


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([5, 3], "ranks 3, 5"),
        (range(7), "ranks 0-6"),
        ([9, 0, 1, 2, 11, 12], "ranks 0-2, 9, 11-12"),
        (range(0, 128, 2), "ranks " + ", ".join(map(str, range(0, 64, 2))) + " and 32 more"),
    ],
)
def test_ranks_are_named_as_runs(ranks: list[int], text: str) -> None:
    assert describe_ranks(ranks) == text
