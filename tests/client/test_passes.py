"""The bucketing pass on real gloo ranks: it rewrites on every rank, or raises on every rank."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import fx

from bucketplan_client.passes import FsdpBucketingPass, LocalPlans, disabled_by_environment
from bucketplan_client.testing import InMemoryPlanServer
from bucketplan_core import Options
from tests.support.gloo_pool import gloo_pool

RANKS = "tests.client.pass_ranks"
OPTIONS = Options(strategy="size", planner="size/1")


class TestNoOp:
    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            ({"enabled": False}, "switched off by the configuration"),
            ({"fsdp_enabled": False}, "fsdp is switched off"),
            ({"data_parallel_mode": "ddp"}, "'ddp'"),
            ({}, "torch.distributed is not initialised"),
        ],
    )
    def test_returns_the_graph_as_it_was_and_says_why(self, arguments: dict[str, Any], reason: str, caplog):
        gm = fx.symbolic_trace(torch.nn.Linear(2, 2))
        before = str(gm.graph)
        with caplog.at_level(logging.INFO, "bucketplan_client.passes"):
            assert FsdpBucketingPass(LocalPlans(), options=OPTIONS, **arguments)(gm) is gm
        assert str(gm.graph) == before
        assert [record.levelno for record in caplog.records] == [logging.INFO]
        assert reason in caplog.text

    @pytest.mark.parametrize(("value", "expected"), [("1", True), ("true", True), ("0", False), ("", False)])
    def test_kill_switch_reads_the_usual_words(self, value, expected, monkeypatch):
        monkeypatch.setenv("BUCKETPLAN_DISABLE", value)
        assert disabled_by_environment() is expected

    def test_world_of_one_rank_is_left_alone(self):
        assert gloo_pool(1).run(f"{RANKS}:skip_alone") == [True]


class TestApply:
    def test_two_ranks_apply_the_servers_plan_and_compute_the_same(self):
        server = InMemoryPlanServer()
        with server.listening() as address:
            first, second = gloo_pool(2).run(f"{RANKS}:apply_from_server", address)
        assert server.num_plannings == 1
        assert first["statistics"] == second["statistics"]
        gathers = first["statistics"]["fsdp_ag_bucketing"]
        assert gathers["ag_collectives_after"] < gathers["ag_collectives_before"]
        assert first["bitwise"]
        assert second["bitwise"]
        assert first["same_module"]
        assert len(first["lines"]) == 1
        assert "bucketed" in first["lines"][0]


class TestDisagreement:
    @pytest.mark.parametrize(
        ("case", "kind"),
        [
            ("options", "RanksDisagree"),
            ("graph", "RanksDisagree"),
            ("kinds", "RanksDisagree"),
            ("file name", "RankFailed"),
            ("planning", "RankFailed"),
            ("describing", "RankFailed"),
            ("applying", "RankFailed"),
        ],
    )
    def test_every_rank_raises_the_same_and_keeps_its_graph(self, case, kind):
        outcomes = gloo_pool(2).run(f"{RANKS}:disagree", case, 1)
        assert [outcome["kind"] for outcome in outcomes] == [kind, kind]
        assert outcomes[0]["facts"] == outcomes[1]["facts"]
        assert [outcome["rank"] for outcome in outcomes] == [0, 1]
        assert all(outcome["intact"] for outcome in outcomes)

    @pytest.mark.parametrize("odd", [0, 1])
    @pytest.mark.parametrize("case", ["interrupted while planning", "interrupted while applying"])
    def test_interrupted_rank_is_named_and_keeps_its_interrupt(self, case, odd):
        outcomes = gloo_pool(2).run(f"{RANKS}:disagree", case, odd)
        assert outcomes[odd]["kind"] == "KeyboardInterrupt"
        assert outcomes[1 - odd]["kind"] == "RankFailed"
        assert f"rank {odd} said: the bucketing pass failed to run: KeyboardInterrupt" in outcomes[1 - odd]["text"]
        assert all(outcome["intact"] for outcome in outcomes)

    def test_error_names_the_option_that_differs(self):
        (outcome, _) = gloo_pool(2).run(f"{RANKS}:disagree", "options", 1)
        assert "options.bucket_cap_bytes" in outcome["text"]
        assert "20000 on rank 0" in outcome["text"]
        assert "7000 on rank 1" in outcome["text"]

    def test_failure_of_one_expert_group_reaches_ranks_of_the_other(self):
        outcomes = gloo_pool(4).run(f"{RANKS}:disagree", "planning", 3, 2)
        assert {outcome["kind"] for outcome in outcomes} == {"RankFailed"}
        assert all("no space left" in outcome["text"] for outcome in outcomes)
        assert all(outcome["intact"] for outcome in outcomes)
