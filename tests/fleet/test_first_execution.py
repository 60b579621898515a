"""Graphs that are compared right before they first run, on two gloo ranks under torch.compile."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.gloo_pool import gloo_pool

pytestmark = pytest.mark.timeout(900)


def train(odd: bool, folder: str | None = None) -> list[dict[str, Any]]:
    return gloo_pool(2).run("tests.support.compile_ranks:first_executions", odd, folder, timeout_s=800.0)


def test_a_rank_whose_graph_was_rewritten_otherwise_stops_everyone_before_a_collective():
    for result in train(odd=True):
        assert result["error"] == "RanksDisagree", result
        assert "collectives of the graph" in result["message"]
        assert result["compared"] == ["0"]


def test_graphs_from_a_warm_cache_are_compared_too(tmp_path):
    cold, warm = train(odd=False, folder=str(tmp_path)), train(odd=False, folder=str(tmp_path))
    for before, after in zip(cold, warm, strict=True):
        assert before["compiled"] == 2
        assert (after["compiled"], after["hits"]) == (0, 1)
        assert before["compared"] == after["compared"] == ["0", "1"], "each graph once, not at every step"
        assert after["error"] is None
        assert after["launches"] == before["launches"] == {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}
