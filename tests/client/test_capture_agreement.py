"""What ranks must describe alike, and what must make a difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from bucketplan_client.capture.binding import Description
from bucketplan_client.capture.describe import describe_graph
from tests.support.fxgraphs import GraphBuilder, aten
from tests.support.rewriting import size_options

RANKS = 4


def step(
    *,
    group: str = "dp",
    prefix: str = "w",
    inputs: str = "primals_",
    order: tuple[int, ...] = (0, 1, 2),
    op: str = "avg",
    dtype: torch.dtype = torch.float32,
    columns: int = 3,
    size: int = RANKS,
    fqn: str = "layers.0",
    extra: Callable[[GraphBuilder, fx.Node], fx.Node] | None = None,
) -> fx.GraphModule:
    """One small step; the arguments change one thing each."""
    build = GraphBuilder()
    params = [build.tensor(f"{inputs}{index}", (index + 1, columns), dtype) for index in range(3)]
    for index, param in enumerate(params):
        param.meta["param_name"] = f"{prefix}{index}"
    hidden = build.tensor("hidden", (2,))
    waits = []
    for index in order:
        launch = build.all_gather(params[index], size, group)
        launch.meta["custom"] = {"module_fqn": fqn if index == 0 else "layers.1"}
        waits.append(build.wait(launch))
    outputs = [build.call(aten.mul.Tensor, wait, 2) for wait in waits]
    if extra is not None:
        outputs.append(extra(build, hidden))
    outputs += [build.wait(build.reduce_scatter(value, op, size, group)) for value in outputs[:3]]
    return build.module(*outputs)


def described(gm: fx.GraphModule, **arguments: Any) -> Description:
    return describe_graph(gm, options=size_options(), **arguments)


SAME = {
    "other names of inputs": lambda: step(inputs="arg_"),
    "another name of the group": lambda: step(group="134"),
    "other node names": lambda: renamed(step()),
    "other stack traces": lambda: with_traces(step()),
}


def renamed(gm: fx.GraphModule) -> fx.GraphModule:
    for index, node in enumerate(gm.graph.nodes):
        if node.op not in ("output", "placeholder"):
            node.name = f"n{index}"
    return gm


def with_traces(gm: fx.GraphModule) -> fx.GraphModule:
    for node in gm.graph.nodes:
        node.meta["stack_trace"] = "/home/somebody/train.py"
    return gm


@pytest.mark.parametrize("case", SAME)
def test_what_differs_between_ranks_is_not_in_the_signature(case: str) -> None:
    assert described(SAME[case]()).signature == described(step()).signature


DIFFERENT: dict[str, dict[str, Any]] = {
    "two parameters exchanged": {"order": (1, 0, 2)},
    "another reduce op": {"op": "sum"},
    "another dtype": {"dtype": torch.bfloat16},
    "another shape": {"columns": 4},
    "another group size": {"size": 2},
    "another module path": {"fqn": "layers.9"},
    "another name of a parameter": {"prefix": "v"},
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_what_ranks_must_agree_on_is_in_the_signature(case: str) -> None:
    assert described(step(**DIFFERENT[case])).signature != described(step()).signature


def test_a_barrier_between_collectives_makes_another_signature() -> None:
    def barrier(build: GraphBuilder, hidden: fx.Node) -> fx.Node:
        return build.call(torch.sin, hidden)

    assert described(step(extra=barrier)).signature != described(step()).signature


def test_sizes_that_only_hint_at_cost_are_in_the_profile_alone() -> None:
    def more_tokens(rows: int) -> Callable[[GraphBuilder, fx.Node], fx.Node]:
        return lambda build, hidden: build.call(aten.repeat.default, hidden, [rows, 1])

    few, many = (described(step(extra=more_tokens(rows))) for rows in (1, 1000))
    assert few.signature == many.signature
    assert few.profile != many.profile


def test_roles_are_the_callers_words() -> None:
    description = described(step(group="133"), roles={"133": "fsdp"})
    assert [group.role for group in description.request.groups] == ["fsdp"]
    assert description.local_groups == {"fsdp": "133"}


def test_nameless_groups_are_numbered_by_first_appearance() -> None:
    build = GraphBuilder()
    params = [build.tensor(f"w{index}", (2, 3)) for index in range(3)]
    names = ("zeta", "alpha", "zeta")
    waits = [build.wait(build.all_gather(param, RANKS, name)) for param, name in zip(params, names, strict=True)]
    description = described(build.module(*[build.call(aten.neg.default, wait) for wait in waits]))
    assert description.local_groups == {"g0": "zeta", "g1": "alpha"}


def test_two_groups_with_one_role_are_told_apart() -> None:
    build = GraphBuilder()
    params = [build.tensor(f"w{index}", (2, 3)) for index in range(2)]
    waits = [build.wait(build.all_gather(param, RANKS, name)) for param, name in zip(params, ("a", "b"), strict=True)]
    gm = build.module(*[build.call(aten.neg.default, wait) for wait in waits])
    description = described(gm, roles={"a": "fsdp", "b": "fsdp"})
    assert description.local_groups == {"fsdp": "a", "fsdp#2": "b"}


@contextmanager
def fake_job(rank: int, world: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def on_mesh(rank: int) -> Description:
    """The step over both dimensions of a live mesh, as rank `rank` of eight sees it."""
    with fake_job(rank, 8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        build = GraphBuilder()
        params = [build.tensor(f"w{index}", (2, 3)) for index in range(2)]
        shard, replicate = (mesh.get_group(name).group_name for name in ("shard", "replicate"))
        waits = [build.wait(build.all_gather(param, 4, shard)) for param in params]
        values = [build.call(aten.mul.Tensor, wait, 2) for wait in waits]
        reduced = [build.wait(build.reduce_scatter(value, "avg", 4, shard)) for value in values]
        reduced = [build.wait(build.all_reduce(value, "avg", replicate)) for value in reduced]
        return described(build.module(*values, *reduced))


def test_ranks_of_one_mesh_describe_it_alike() -> None:
    first, last = on_mesh(0), on_mesh(7)
    assert first.signature == last.signature
    # The live group tells the size of the replicas, which no argument of an all-reduce does.
    assert {group.role: group.size for group in first.request.groups} == {"replicate": 2, "shard": 4}
    kinds = {candidate.kind for candidate in first.request.candidates}
    assert kinds == {"fsdp_all_gather", "fsdp_reduce_scatter", "dp_all_reduce"}


def strided(rank: int) -> Description:
    """A group of every second rank, which nobody has named."""
    with fake_job(rank, 8):
        groups = [dist.new_group(list(range(first, 8, 2))) for first in (0, 1)]
        name = groups[rank % 2].group_name
        return described(step(group=name))


def test_a_nameless_live_group_is_known_by_its_pattern() -> None:
    even, odd = strided(2), strided(5)
    assert even.signature == odd.signature
    (group,) = even.request.groups
    assert (group.role, group.size, group.strides) == ("g0", 4, (2, 3))
