"""Evidence of compiled graphs on real gloo ranks of which one compiles something that the others do not."""

from __future__ import annotations

import pytest

from bucketplan_client.failures import ABORT_STATUS
from tests.support.gloo_pool import RankFailure, gloo_pool

pytestmark = pytest.mark.timeout(900)

RANKS = "tests.support.compile_ranks:beside"


def test_metric_that_one_rank_compiles_ends_no_job():
    """It shifts torch's compile ids, which name the second model on one rank as the first on the other."""
    one, other = gloo_pool(2).run(RANKS, "metric", timeout_s=800.0)
    assert one["alarm"] is other["alarm"] is None
    for eager, compiled in [*one["losses"], *other["losses"]]:
        assert compiled == pytest.approx(eager, rel=1e-5)
    assert len(one["slots"]) == len(other["slots"]) == 4
    assert one["slots"] != other["slots"]


def test_model_that_one_rank_runs_ends_every_rank():
    with pytest.raises(RankFailure) as failed:
        gloo_pool(2).run(RANKS, "model", timeout_s=800.0)
    assert failed.value.tracebacks == dict.fromkeys((0, 1), f"the process ended with {ABORT_STATUS}")


def test_rank_that_cannot_install_the_pass_tells_the_others_why():
    one, other = gloo_pool(2).run("tests.support.compile_ranks:conflict_on_rank_1")
    assert one[0] == "RankFailed"
    assert other[0] == "CompileConflict"
    assert "suppress_errors" in one[1]
    assert "rank 1" in one[1]
    assert "rank 1, job 'conflict'" in other[1]
