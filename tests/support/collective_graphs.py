"""Small annotated graphs with collectives, built node by node: what a test wants to stand where, and nothing else.

    build = GraphBuilder({"fsdp": RankGroup(...)})
    shard = build.parameter("w", (6, 5))        # the full shape; the placeholder is this rank's shard
    full = build.gather(shard)                  # the wait
    build.output(build.call(aten.mul.Tensor, full, 2.0))
    module, inputs = build.module(), build.inputs(rank=0, seed=7)

Every node has a fake value, as in a traced graph; with `with_values` False the collectives have none and are called by
overload packet, as where a pass inserts them by hand.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from tests.support.fsdp_model import RankGroup

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

__all__ = ["GraphBuilder", "RandomJob", "aten", "c10d", "free_storage", "random_job"]


def free_storage(tensor: Tensor) -> None:
    """What a resharding pass does with a gathered parameter that nobody reads any more."""
    tensor.untyped_storage().resize_(0)


@dataclass(slots=True)
class _Source:
    """A placeholder: its local shape, and whether every rank holds a shard of one tensor or a tensor of its own."""

    node: fx.Node
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class GraphBuilder:
    """Builds one rank's graph; all ranks build the same but for the names of their groups."""

    groups: dict[str, RankGroup]
    with_values: bool = True
    graph: fx.Graph = field(default_factory=fx.Graph)
    _mode: FakeTensorMode = field(default_factory=FakeTensorMode)
    _shapes: dict[fx.Node, Tensor] = field(default_factory=dict)
    _sources: list[_Source] = field(default_factory=list)
    _outputs: list[fx.Node] = field(default_factory=list)
    _backward: bool = False

    def backward(self) -> None:
        """What follows belongs to the backward."""
        self._backward = True

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> fx.Node:
        """An input of this shape, with values of its own on every rank."""
        assert all(node.op == "placeholder" for node in self.graph.nodes), "inputs come first"
        node = self.graph.placeholder(name)
        with self._mode:
            self._record(node, torch.empty(shape, dtype=dtype))
        self._sources.append(_Source(node, shape, dtype))
        return node

    def parameter(
        self, name: str, full_shape: tuple[int, ...], *, role: str = "fsdp", dtype: torch.dtype = torch.float32
    ) -> fx.Node:
        """This rank's shard of a parameter."""
        size = self.groups[role].size
        assert full_shape[0] % size == 0
        node = self.tensor(name, (full_shape[0] // size, *full_shape[1:]), dtype)
        node.meta["param"] = (name, role, len(self._sources) - 1)
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        values = fx.map_arg((args, kwargs), lambda source: self._shapes[source])
        if target is not free_storage:
            with self._mode:
                self._record(node, target(*values[0], **values[1]))
        if self._backward:
            node.meta["autograd_backward"] = True
        return node

    def gather(self, source: fx.Node, *, param: fx.Node | None = None, launch_only: bool = False) -> fx.Node:
        """All-gather `source`, which is derived from `param` (itself by default); returns the wait."""
        name, role, index = (param or source).meta["param"]
        group = self.groups[role]
        kind = "fsdp_all_gather_backward" if self._backward else "fsdp_all_gather"
        launch = self.call(c10d.all_gather_into_tensor.default, source, group.size, group.name)
        self._annotate(launch, kind, group, name, None if self._backward else index)
        return launch if launch_only else self.wait(launch)

    def reduce_scatter(
        self, gradient: fx.Node, param: fx.Node, *, op: str = "avg", launch_only: bool = False
    ) -> fx.Node:
        name, role, index = param.meta["param"]
        group = self.groups[role]
        launch = self.call(c10d.reduce_scatter_tensor.default, gradient, op, group.size, group.name)
        self._annotate(launch, "fsdp_reduce_scatter", group, name, index)
        return launch if launch_only else self.wait(launch)

    def all_reduce(self, gradient: fx.Node, param: fx.Node, *, role: str, op: str = "avg") -> fx.Node:
        name, _, index = param.meta["param"]
        group = self.groups[role]
        launch = self.call(c10d.all_reduce.default, gradient, op, group.name)
        self._annotate(launch, "dp_all_reduce", group, name, index)
        return self.wait(launch)

    def wait(self, launch: fx.Node) -> fx.Node:
        node = self.call(c10d.wait_tensor.default, launch)
        node.meta["wait_for"] = launch.name
        return node

    def output(self, *nodes: fx.Node) -> None:
        """Return these too, in the order of the calls."""
        self._outputs.extend(nodes)

    def module(self) -> fx.GraphModule:
        self.graph.output(tuple(self._outputs))
        module = fx.GraphModule(torch.nn.Module(), self.graph)
        module.graph.lint()
        return module

    def inputs(self, *, rank: int, seed: int, positive: bool = False) -> list[Tensor]:
        """Fresh inputs of one rank, other ones on every rank. `positive` ones lie in [0.5, 1.5): no sum cancels."""
        generator = torch.Generator().manual_seed(seed * 1009 + rank)
        draw = torch.rand if positive else torch.randn
        drawn = [draw(source.shape, generator=generator, dtype=torch.float64) for source in self._sources]
        return [
            (value + 0.5 if positive else value).to(source.dtype)
            for value, source in zip(drawn, self._sources, strict=True)
        ]

    def _annotate(self, launch: fx.Node, kind: str, group: RankGroup, name: str, index: int | None) -> None:
        launch.meta |= {"comm_type": kind, "comm_group": group.role, "fsdp_degree": group.size, "param_name": name}
        if index is not None:
            launch.meta["state_idx"] = index

    def _record(self, node: fx.Node, value: Any) -> None:
        self._shapes[node] = value
        target: Any = node.target
        if self.with_values or not str(target).startswith("_c10d_functional"):
            node.meta["val"] = value
        else:
            node.target = target.overloadpacket


@dataclass(slots=True)
class RandomJob:
    """A random graph; `num_exact` leading outputs depend on gathers only, the rest on reductions."""

    builder: GraphBuilder
    module: fx.GraphModule
    num_exact: int


def random_job(seed: int, groups: dict[str, RankGroup], *, with_values: bool = True) -> RandomJob:
    """A random training-like graph over `groups`.

    Gathers with views and late readers, casts before gathers, inputs that are computed, forward and backward, gradients
    reduced over several groups, some results freed or overwritten.

    Ranks that pass equal seeds and roles get equal graphs.
    """
    rng = random.Random(seed)
    build = GraphBuilder(groups, with_values=with_values)
    roles = sorted(role for role in groups if role.startswith("fsdp"))
    params: list[fx.Node] = []
    for index in range(rng.randint(3, 10)):
        role = rng.choice(roles)
        size = groups[role].size
        shape: tuple[int, ...] = (size * rng.choice((1, 1, 2, 3, 7)),)
        for _ in range(rng.randint(0, 2)):
            shape = (*shape, rng.choice((1, 3, 4, 5)))
        dtype = rng.choice((torch.float32, torch.float32, torch.bfloat16))
        params.append(build.parameter(f"p{index}", shape, role=role, dtype=dtype))
    hidden = build.tensor("hidden", (4, 4))
    exact: list[fx.Node] = []
    reduced: list[fx.Node] = []
    for backward in (False, True):
        if backward:
            build.backward()
        order = rng.sample(params, len(params))
        unread: list[tuple[fx.Node, fx.Node]] = []
        for param in order:
            if rng.random() < 0.15:
                continue
            source = param
            if rng.random() < 0.3:
                source = build.call(aten._to_copy.default, source, dtype=rng.choice((torch.bfloat16, torch.float32)))
            if rng.random() < 0.15:
                # The input of this gather is computed, so that it cannot be launched before.
                source = build.call(aten.mul.Tensor, source, build.call(aten.mean.default, hidden))
            wait = build.gather(source, param=param)
            view = wait
            for _ in range(rng.randint(0, 3)):
                view = _random_view(rng, build, view)
            unread.append((wait, view))
            while unread and rng.random() < 0.7:
                hidden = _read(rng, build, unread.pop(rng.randrange(len(unread))), hidden, exact)
            if backward and rng.random() < 0.8:
                reduced.append(_reduce(rng, build, param, hidden))
        for pair in unread:
            hidden = _read(rng, build, pair, hidden, exact)
    exact.append(hidden)
    build.output(*exact, *reduced)
    return RandomJob(builder=build, module=build.module(), num_exact=len(exact))


def _random_view(rng: random.Random, build: GraphBuilder, source: fx.Node) -> fx.Node:
    value = build._shapes[source]
    choice = rng.randrange(4)
    if choice == 0 and value.dim() == 2:
        return build.call(aten.t.default, source)
    if choice == 1 and value.is_contiguous():
        return build.call(aten.view.default, source, [-1])
    if choice == 2:
        return build.call(aten.unsqueeze.default, source, 0)
    return build.call(aten.slice.Tensor, source, 0, 0, max(1, value.shape[0] - 1))


def _read(
    rng: random.Random,
    build: GraphBuilder,
    gathered: tuple[fx.Node, fx.Node],
    hidden: fx.Node,
    exact: list[fx.Node],
) -> fx.Node:
    wait, view = gathered
    exact.append(build.call(aten.mul.Tensor, view, 2.0))
    mean = build.call(aten.mean.default, build.call(aten._to_copy.default, view, dtype=torch.float32))
    hidden = build.call(aten.tanh.default, build.call(aten.add.Tensor, hidden, mean))
    fate = rng.random()
    if fate < 0.15:
        free = build.call(free_storage, wait)
        free.meta["comm_type"] = "fsdp_reshard_free_backward" if build._backward else "fsdp_reshard_free"
    elif fate < 0.3:
        build.call(aten.mul_.Tensor, wait, 0.0)
    return hidden


def _reduce(rng: random.Random, build: GraphBuilder, param: fx.Node, hidden: fx.Node) -> fx.Node:
    role = param.meta["param"][1]
    shard = build._shapes[param]
    full = [shard.shape[0] * build.groups[role].size, *shard.shape[1:]]
    scaled = build.call(aten.mul.Tensor, build.call(aten.cos.default, param), build.call(aten.mean.default, hidden))
    repeats = [build.groups[role].size, *([1] * (shard.dim() - 1))]
    gradient = build.call(aten.repeat.default, scaled, repeats)
    ramp = build.call(aten.arange.default, full[0], dtype=shard.dtype, device=torch.device("cpu"))
    ramp = build.call(aten.view.default, ramp, [full[0], *([1] * (shard.dim() - 1))])
    gradient = build.call(aten.add.Tensor, gradient, ramp)
    wait = build.reduce_scatter(gradient, param, op=rng.choice(("avg", "sum")))
    if "replicas" in build.groups and role == "fsdp_expert":
        wait = build.all_reduce(wait, param, role="replicas")
    if rng.random() < 0.3:
        return build.call(aten.mul.Tensor, wait, 0.5)
    return build.call(aten.view.default, wait, [-1]) if rng.random() < 0.3 else wait
