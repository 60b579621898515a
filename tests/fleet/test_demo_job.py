"""The demo's own training job: its sharded graph trains as the plain model does, and says so in its metadata."""

from collections import Counter

import pytest

from tests.support.gloo_pool import gloo_pool


@pytest.mark.parametrize(("num_ranks", "layout", "tied_head"), [(2, "two_groups", True), (4, "hybrid", False)])
def test_sharded_graph_trains_as_unsharded_eager_does(num_ranks, layout, tied_head):
    results = gloo_pool(num_ranks).run("tests.support.demo_ranks:small_beside_eager", layout, tied_head, 4)
    for result in results:
        assert result["sharded"] == pytest.approx(result["eager"], rel=2e-6)
        assert result["sharded"][-1] < result["sharded"][0]
        kinds = Counter((kind, param) for kind, param, _ in result["launches"])
        for param in result["params"]:
            assert kinds["fsdp_all_gather", param] == 1
            assert kinds["fsdp_reduce_scatter", param] == 1
            # The root's parameters stay gathered between forward and backward, the blocks' do not.
            assert kinds["fsdp_all_gather_backward", param] == int(param.startswith("blocks."))
            assert kinds["dp_all_reduce", param] == int(layout == "hybrid" and ".experts." in param)
        for kind, param, parts in result["readers"]:
            if kind == "fsdp_all_gather":
                # What is resharded is not kept for the backward.
                assert parts == {"forward"} if param.startswith("blocks.") else "forward" in parts
            elif kind == "fsdp_all_gather_backward":
                assert parts == {"backward"}
            else:
                assert parts <= {"backward", "output"}
                assert parts
        assert ("head.weight" in result["params"]) is not tied_head
        assert {group for _, param, group in result["launches"] if ".experts." not in param} == {"fsdp"}
    assert results[0]["sharded"] != results[1]["sharded"], "ranks must train on batches of their own"
