"""Build fx graphs with functional collectives the way tracers leave them, one node at a time or at random.

    build = GraphBuilder()
    shard = build.tensor("w", (2, 3))
    full = build.wait(build.all_gather(shard, 4, "fsdp"))
    module = build.module(build.call(aten.mul.Tensor, full, 2.0))

Every node carries the fake value that tracing would give it, unless `with_values` is False, as in hand-written passes.
`random_case(seed)` makes small training steps in which everything happens that a rewriter must respect: several
groups, casts before gathers, gathers that depend on each other, writes to parameters, activations and results, views,
shared inputs, hybrid sharding, storage frees, communication that nobody knows.
"""

from __future__ import annotations

import copy
import operator
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed.tensor  # registers _dtensor::mesh_get_process_group
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule

from bucketplan_client.capture.parse import group_key

__all__ = [
    "MESHES",
    "Case",
    "GraphBuilder",
    "Mesh",
    "aten",
    "c10d",
    "free_storage",
    "prims",
    "random_case",
    "unknown_op",
]

aten = torch.ops.aten
prims = torch.ops.prims
c10d = torch.ops._c10d_functional

RankLists = tuple[tuple[int, ...], ...]


def unknown_op(tensor: Tensor) -> Tensor:
    """Stands for a custom communication op: fx sees a Python function, nothing may be moved across it."""
    return tensor + 1


def free_storage(tensor: Tensor) -> None:
    """What a resharding pass does with a gathered parameter that nobody reads any more."""
    tensor.untyped_storage().resize_(0)


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks and their groups by name; `replicas` names the group that reduces what `shards` has scattered."""

    num_ranks: int
    groups: Mapping[str, RankLists]
    hybrid: tuple[str, str]

    def size(self, group: str) -> int:
        return len(self.groups[group][0])


def _grid(rows: int, columns: int) -> Mesh:
    ranks = rows * columns
    return Mesh(
        num_ranks=ranks,
        groups={
            "world": (tuple(range(ranks)),),
            "row": tuple(tuple(range(r * columns, (r + 1) * columns)) for r in range(rows)),
            "column": tuple(tuple(range(c, ranks, columns)) for c in range(columns)),
        },
        hybrid=("row", "column"),
    )


MESHES = (_grid(2, 2), _grid(2, 2), _grid(2, 2), _grid(2, 3), _grid(2, 4))
"""Two-dimensional meshes of 4 to 8 ranks; the smallest is drawn most often."""


@dataclass
class GraphBuilder:
    """Builds one graph; `value` holds a meta tensor for every node, even where nodes carry no fake value."""

    with_values: bool = True
    graph: fx.Graph = field(default_factory=fx.Graph)
    mode: FakeTensorMode = field(default_factory=FakeTensorMode)
    value: dict[fx.Node, Any] = field(default_factory=dict)
    root: torch.nn.Module = field(default_factory=torch.nn.Module)
    inputs: list[tuple[tuple[int, ...], torch.dtype] | None] = field(default_factory=list)
    """Shape and dtype of each placeholder, None for one that is no tensor."""

    def tensor(self, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> fx.Node:
        """A placeholder."""
        node = self.graph.placeholder(name)
        self.inputs.append((tuple(shape), dtype))
        return self._note(node, torch.empty(tuple(shape), dtype=dtype, device="meta"))

    def opaque(self, name: str) -> fx.Node:
        """A placeholder that is no tensor, such as a device mesh."""
        self.inputs.append(None)
        return self.graph.placeholder(name)

    def attribute(self, name: str, value: Tensor) -> fx.Node:
        """A `get_attr` of a buffer, which is made at the first call for its name."""
        known = next((node for node in self.value if node.op == "get_attr" and node.target == name), None)
        if known is None:
            self.root.register_buffer(name, value)
        node = self.graph.get_attr(name)
        return self._note(node, torch.empty_like(value, device="meta") if known is None else self.value[known])

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        if target is free_storage:
            node.meta["comm_type"] = "fsdp_reshard_free"
            return node
        given = fx.map_arg((args, kwargs), self.value.__getitem__)
        return self._note(node, target(*given[0], **given[1]))

    def method(self, name: str, *args: Any) -> fx.Node:
        node = self.graph.call_method(name, args)
        given = fx.map_arg(args, self.value.__getitem__)
        return self._note(node, getattr(given[0], name)(*given[1:]))

    def all_gather(self, source: fx.Node, size: int, group: Any, *, form: str = "positional") -> fx.Node:
        names = ("input", "group_size", "group_name")
        return self._collective(c10d.all_gather_into_tensor, names, (source, size, group), form)

    def reduce_scatter(self, source: fx.Node, op: str, size: int, group: Any, *, form: str = "positional") -> fx.Node:
        names = ("input", "reduce_op", "group_size", "group_name")
        return self._collective(c10d.reduce_scatter_tensor, names, (source, op, size, group), form)

    def all_reduce(self, source: fx.Node, op: str, group: Any, *, form: str = "positional") -> fx.Node:
        return self._collective(c10d.all_reduce, ("input", "reduce_op", "group_name"), (source, op, group), form)

    def _collective(self, packet: Any, names: Sequence[str], values: Sequence[Any], form: str) -> fx.Node:
        """`form` is how tracers write the call: ``positional``, ``keyword`` or ``packet`` (no overload chosen)."""
        if form == "keyword":
            node = self.graph.call_function(packet.default, (), dict(zip(names, values, strict=True)))
        else:
            target = packet if form == "packet" else packet.default
            node = self.graph.call_function(target, tuple(values))
        plain = [self.value[value] if isinstance(value, fx.Node) and value in self.value else value for value in values]
        plain[-1] = "group"
        return self._note(node, packet.default(*plain))

    def wait(self, launch: fx.Node, *, form: str = "positional") -> fx.Node:
        node = self.graph.call_function(c10d.wait_tensor if form == "packet" else c10d.wait_tensor.default, (launch,))
        return self._note(node, self.value[launch])

    def mesh_group(self, mesh: fx.Node, dim: int) -> fx.Node:
        """The group argument of graphs that are compiled on one rank for all."""
        return self.graph.call_function(torch.ops._dtensor.mesh_get_process_group.default, (mesh, dim))

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        return tuple(self.value[node].shape)

    def module(self, *outputs: fx.Node) -> fx.GraphModule:
        self.graph.output(tuple(outputs))
        self.graph.lint()
        # Code is generated when a module is called; most tests look at graphs only.
        return _LazyGraphModule(self.root, self.graph)

    def draw_inputs(self, num_ranks: int, seed: int) -> list[list[Any]]:
        """Small whole numbers for every rank and placeholder, so that sums are exact in any order."""
        generator = torch.Generator().manual_seed(seed)
        return [
            [
                None if spec is None else torch.randint(-4, 5, spec[0], generator=generator).to(spec[1])
                for spec in self.inputs
            ]
            for _ in range(num_ranks)
        ]

    def _note(self, node: fx.Node, value: Any) -> fx.Node:
        self.value[node] = value
        if self.with_values:
            node.meta["val"] = pytree.tree_map_only(Tensor, self._fake, value)
        return node

    def _fake(self, value: Tensor) -> FakeTensor:
        return FakeTensor(self.mode, value, torch.device("cpu"))


@dataclass(frozen=True, slots=True)
class Case:
    """A graph with its mesh; `copy` gives a module of its own to rewrite, with the same node names."""

    builder: GraphBuilder
    graph_module: fx.GraphModule
    mesh: Mesh

    @property
    def groups(self) -> dict[Any, RankLists]:
        """Rank lists by the key of the group argument as it stands in the graph."""
        found: dict[Any, RankLists] = dict(self.mesh.groups)
        names = list(self.mesh.groups)
        for node in self.graph_module.graph.nodes:
            if node.target is torch.ops._dtensor.mesh_get_process_group.default:
                found[group_key(node)] = self.mesh.groups[names[node.args[1]]]
        return found

    def copy(self) -> fx.GraphModule:
        graph = fx.Graph()
        output = graph.graph_copy(self.graph_module.graph, val_map := {})
        graph.output(output)
        for old, new in val_map.items():
            new.meta = copy.copy(old.meta)
        return _LazyGraphModule(copy.deepcopy(self.builder.root), graph)

    def draw_inputs(self, seed: int) -> list[list[Any]]:
        return self.builder.draw_inputs(self.mesh.num_ranks, seed)


@dataclass(slots=True)
class _Parameter:
    node: fx.Node
    group: Any
    size: int
    full: tuple[int, ...]
    name: str
    index: int
    is_whole: bool = False


@dataclass(slots=True)
class _Gathered:
    wait: fx.Node
    view: fx.Node
    parameter: _Parameter


def random_case(seed: int) -> Case:
    """A random small training step; equal seeds give equal graphs."""
    return _Generator(seed).run()


class _Generator:
    """Draws one graph. `hidden` is the activation (3, 4); it stays made of small whole numbers."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.mesh = self.rng.choice(MESHES)
        self.build = GraphBuilder(with_values=self.rng.random() < 0.93)
        self.annotated = self.rng.random() < 0.5
        self.outputs: list[fx.Node] = []
        self.unread: list[_Gathered] = []
        self.unwaited: list[tuple[fx.Node, _Parameter, tuple[int, ...]]] = []
        self.read: list[_Gathered] = []
        self.casts: dict[fx.Node, fx.Node] = {}
        self.backward = False

    def run(self) -> Case:
        rng, build = self.rng, self.build
        self.parameters = [self._parameter(index) for index in range(rng.choice((2, 3, 3, 4, 5)))]
        self.scales = build.tensor("scales", (4,))
        self.mesh_input = build.opaque("mesh") if rng.random() < 0.1 else None
        self.group_nodes: dict[str, fx.Node] = {}
        self.ramp = build.tensor("ramp", (32,))
        self.hidden = build.tensor("hidden", (3, 4))
        for self.backward in (False, True):
            order = rng.sample(self.parameters, len(self.parameters))
            if rng.random() < 0.2:
                order.append(rng.choice(order))
            for parameter in order:
                self._maybe_disturb()
                if rng.random() < 0.9:
                    self._gather(parameter)
                while self.unread and rng.random() < 0.6:
                    self._use(self.unread.pop(rng.randrange(len(self.unread))))
                if self.backward and rng.random() < 0.85:
                    self._reduce(parameter)
            self._finish_waits()
            for gathered in self.unread:
                self._use(gathered)
            self.unread = []
        for parameter in self.parameters:
            if rng.random() < 0.15:
                self._write(aten.copy_.default, parameter.node, build.call(aten.mul.Tensor, parameter.node, 2))
        self.outputs.append(self.hidden)
        return Case(build, build.module(*self.outputs), self.mesh)

    def _parameter(self, index: int) -> _Parameter:
        rng = self.rng
        group = rng.choice([name for name in self.mesh.groups if name != "column" or rng.random() < 0.4])
        size = self.mesh.size(group)
        shard: tuple[int, ...] = (rng.choice((1, 1, 2, 3)),)
        for _ in range(rng.choice((0, 1, 1, 1, 2))):
            shard = (*shard, rng.choice((1, 2, 3)))
        dtype = rng.choice((torch.float32, torch.float32, torch.bfloat16))
        name = f"layers.{index // 2}.w{index}"
        node = self.build.tensor(f"w{index}", shard, dtype)
        return _Parameter(node, group, size, (shard[0] * size, *shard[1:]), name, index)

    def _form(self) -> str:
        return self.rng.choice(("positional", "positional", "keyword", "packet"))

    def _group(self, name: str) -> Any:
        """The group argument: its name, or the node that looks it up on the rank's own mesh."""
        if self.mesh_input is None:
            return name
        if name not in self.group_nodes or self.rng.random() < 0.3:
            dim = list(self.mesh.groups).index(name)
            self.group_nodes[name] = self.build.mesh_group(self.mesh_input, dim)
        return self.group_nodes[name]

    def _annotate(self, launch: fx.Node, kind: str, parameter: _Parameter) -> None:
        if self.backward:
            launch.meta["autograd_backward"] = True
        if self.annotated:
            launch.meta |= {
                "comm_type": kind,
                "comm_group": parameter.group,
                "fsdp_degree": parameter.size,
                "param_name": parameter.name,
            }
            if not self.backward:
                launch.meta["state_idx"] = parameter.index

    def _gather(self, parameter: _Parameter) -> None:
        rng, build = self.rng, self.build
        source = parameter.node
        if rng.random() < 0.45:
            source = self._cast(source)
        if rng.random() < 0.1:
            source = build.call(aten.clone.default, source)
        if rng.random() < 0.12:
            ends = [0, 0] * (len(parameter.full) - 1) + [0, 1]
            source = build.call(aten.constant_pad_nd.default, source, ends, 0)
        if len(parameter.full) == 2 and rng.random() < 0.1:
            source = build.call(aten.t.default, source)
        elif rng.random() < 0.1:
            source = build.call(aten.view.default, source, [-1])
        if self.annotated and rng.random() < 0.12:
            # Only an annotation makes a candidate of a gather whose input is computed.
            source = build.call(aten.mul.Tensor, source, self._scalar(build.value[source].dtype))
        elif self.annotated and self.read and rng.random() < 0.1:
            # A gather of what another gather brought: sharding over two dimensions of the mesh.
            inner = rng.choice(self.read)
            source = build.call(aten.view.default, inner.wait, [-1])
            if rng.random() < 0.5:
                self.outputs.append(build.call(aten.add.Tensor, source, 3))
        launch = build.all_gather(source, parameter.size, self._group(parameter.group), form=self._form())
        self._annotate(launch, "fsdp_all_gather_backward" if self.backward else "fsdp_all_gather", parameter)
        self.unwaited.append((launch, parameter, build.shape(launch)))
        if rng.random() < 0.7:
            self._finish_waits()

    def _cast(self, source: fx.Node) -> fx.Node:
        rng, build = self.rng, self.build
        if source in self.casts and rng.random() < 0.3:
            return self.casts[source]
        dtype = rng.choice((torch.bfloat16, torch.float32))
        form = rng.randrange(3)
        if form == 0:
            cast = build.call(prims.convert_element_type.default, source, dtype)
        elif form == 1:
            cast = build.call(aten._to_copy.default, source, dtype=dtype)
        else:
            cast = build.call(aten.to.dtype, source, dtype)
        self.casts[source] = cast
        return cast

    def _finish_waits(self) -> None:
        for launch, parameter, shape in self.unwaited:
            wait = self.build.wait(launch, form=self.rng.choice(("positional", "packet")))
            view = wait
            for _ in range(self.rng.choice((0, 1, 1, 2))):
                view = self._view(view)
            assert shape == self.build.shape(wait)
            odd = self.rng.random()
            if odd < 0.02:
                continue  # a result that nobody reads
            if odd < 0.04:
                view = self.build.wait(launch)
            elif odd < 0.06:
                view = self.build.wait(wait)
            self.unread.append(_Gathered(wait, view, parameter))
        self.unwaited = []

    def _view(self, source: fx.Node) -> fx.Node:
        rng, build = self.rng, self.build
        value = build.value[source]
        choice = rng.randrange(6)
        if choice == 0 and value.dim() == 2:
            return build.call(aten.t.default, source)
        if choice == 1 and value.is_contiguous():
            return build.call(aten.view.default, source, [-1])
        if choice == 2:
            return build.call(aten.unsqueeze.default, source, 0)
        if choice == 3 and value.dim() and value.shape[0] > 1:
            pieces = build.call(aten.split.Tensor, source, max(1, value.shape[0] // 2))
            return build.call(operator.getitem, pieces, rng.randrange(len(build.value[pieces])))
        if choice == 4 and value.dim():
            # No pure view of the closed list: compute that shares the result's storage.
            return build.call(aten.as_strided.default, source, list(value.shape), list(value.stride()))
        if value.dim():
            return build.call(aten.slice.Tensor, source, 0, 0, max(1, value.shape[0] - 1))
        return source

    def _scalar(self, dtype: torch.dtype = torch.float32) -> fx.Node:
        """A small whole number that depends on all of `hidden`."""
        total = self.build.call(aten.sum.default, self.hidden)
        small = self.build.call(aten.remainder.Scalar, total, 3)
        return self.build.call(aten._to_copy.default, small, dtype=dtype) if dtype is not torch.float32 else small

    def _use(self, gathered: _Gathered) -> None:
        """Read a gathered parameter; what was read is an output, so that its value at this moment is checked."""
        rng, build = self.rng, self.build
        read = build.call(aten.mul.Tensor, gathered.view, 2)
        self.outputs.append(read)
        total = build.call(aten.sum.default, build.call(aten._to_copy.default, read, dtype=torch.float32))
        mixed = build.call(aten.add.Tensor, self.hidden, build.call(aten.mul.Tensor, self.scales, total))
        self.hidden = build.call(aten.remainder.Scalar, mixed, 7)
        fate = rng.random()
        if fate < 0.08:
            self._write(free_storage, gathered.wait)
            return
        if fate < 0.2:
            self._write(aten.mul_.Tensor, gathered.wait, 0)
        elif fate < 0.3:
            self.outputs.append(gathered.wait if rng.random() < 0.5 else gathered.view)
        self.read.append(gathered)

    def _write(self, target: Any, node: fx.Node, *args: Any) -> fx.Node:
        """Write `node` in place; a collective that still reads its storage is waited for first, as a trace would."""
        storage = self.build.value[node].untyped_storage()._cdata
        in_flight = (self.build.value[launch.all_input_nodes[0]] for launch, _, _ in self.unwaited)
        if any(value.untyped_storage()._cdata == storage for value in in_flight):
            self._finish_waits()
        return self.build.call(target, node, *args)

    def _maybe_disturb(self) -> None:
        """Something between collectives that they must not be moved across, or that only looks so."""
        rng, build = self.rng, self.build
        what = rng.random()
        parameter = rng.choice(self.parameters)
        if what < 0.08:
            self._write(aten.add_.Tensor, parameter.node, 1)
            self.casts.pop(parameter.node, None)
        elif what < 0.12:
            self._write(aten.copy_.default, parameter.node, build.call(aten.neg.default, parameter.node))
            self.casts.pop(parameter.node, None)
        elif what < 0.16:
            row = build.call(aten.select.int, parameter.node, 0, 0)
            self._write(aten.add_.Tensor, row, 2)
            self.casts.pop(parameter.node, None)
        elif what < 0.2:
            self.hidden = self._write(aten.add_.Tensor, self.hidden, 1)
        elif what < 0.24:
            self.hidden = build.call(unknown_op, self.hidden)
        elif what < 0.3:
            self._activation_collective()
        elif what < 0.33 and self.read:
            gathered = rng.choice(self.read)
            self.outputs.append(build.call(aten.add.Tensor, gathered.view, 1))
        elif what < 0.36 and self.read:
            self._write(aten.add_.Tensor, rng.choice(self.read).wait, 1)

    def _activation_collective(self) -> None:
        """Tensor parallelism: reduce activations over a row, which compute then reads."""
        rng, build = self.rng, self.build
        group = rng.choice(tuple(self.mesh.groups))
        if rng.random() < 0.5:
            launch = build.all_reduce(
                build.call(aten.add.Tensor, self.hidden, 1), "sum", self._group(group), form=self._form()
            )
            self.hidden = build.call(aten.remainder.Scalar, build.wait(launch), 7)
            return
        launch = build.all_gather(
            build.call(aten.mul.Tensor, self.hidden, 2), self.mesh.size(group), self._group(group), form=self._form()
        )
        first = build.call(aten.slice.Tensor, build.wait(launch), 0, 3, 6)
        self.hidden = build.call(aten.remainder.Scalar, build.call(aten.add.Tensor, self.hidden, first), 7)

    def _reduce(self, parameter: _Parameter) -> None:
        rng, build = self.rng, self.build
        gradient = build.call(
            aten.expand.default,
            build.call(aten.view.default, self._scalar(), [1] * len(parameter.full)),
            list(parameter.full),
        )
        ramp = build.call(aten.slice.Tensor, self.ramp, 0, 0, parameter.full[0])
        ramp = build.call(aten.view.default, ramp, [parameter.full[0], *[1] * (len(parameter.full) - 1)])
        gradient = build.call(aten.add.Tensor, gradient, ramp)
        if rng.random() < 0.2:
            gradient = build.call(aten._to_copy.default, gradient, dtype=torch.bfloat16)
        if rng.random() < 0.15:
            gradient = build.call(aten.clone.default, gradient, memory_format=torch.contiguous_format)
        elif rng.random() < 0.1:
            gradient = build.method("contiguous", gradient)
        if rng.random() < 0.12:
            pieces = build.call(aten.split.Tensor, gradient, parameter.full[0] // parameter.size)
            parts = [build.call(operator.getitem, pieces, index) for index in range(parameter.size)]
            gradient = build.call(aten.cat.default, parts)
        op = rng.choice(("sum", "sum", "avg", "max"))
        hybrid = parameter.group == self.mesh.hybrid[0] and rng.random() < 0.6
        before = hybrid and rng.random() < 0.5
        if before:
            gradient = self._all_reduce(gradient, parameter)
        launch = build.reduce_scatter(gradient, op, parameter.size, self._group(parameter.group), form=self._form())
        self._annotate(launch, "fsdp_reduce_scatter", parameter)
        fate = rng.random()
        if 0.15 < fate < 0.3:
            self.hidden = build.call(aten.neg.default, self.hidden)
        wait = build.wait(launch)
        if fate < 0.15:
            # The gradient's buffer is used again once the collective has read it.
            self._write(aten.mul_.Tensor, gradient, 0)
        if hybrid and not before:
            wait = self._all_reduce(wait, parameter)
        self._finish_gradient(wait, parameter)

    def _all_reduce(self, gradient: fx.Node, parameter: _Parameter) -> fx.Node:
        build = self.build
        launch = build.all_reduce(
            gradient, self.rng.choice(("sum", "avg")), self._group(self.mesh.hybrid[1]), form=self._form()
        )
        if self.annotated:
            self._annotate(launch, "dp_all_reduce", parameter)
            launch.meta["comm_group"] = self.mesh.hybrid[1]
            launch.meta["fsdp_degree"] = self.mesh.size(self.mesh.hybrid[1])
        wait = build.wait(launch)
        if self.rng.random() < 0.2:
            wait = build.call(aten.view.default, wait, list(build.shape(wait)))
        return wait

    def _finish_gradient(self, wait: fx.Node, parameter: _Parameter) -> None:
        rng, build = self.rng, self.build
        fate = rng.random()
        if fate < 0.15:
            wait = build.call(aten._to_copy.default, wait, dtype=torch.float32)
        elif fate < 0.3:
            wait = build.call(aten.mul.Tensor, wait, 0.5)
        elif fate < 0.4:
            self._write(aten.add_.Tensor, wait, 1)
        elif fate < 0.5:
            wait = build.call(aten.view.default, wait, [-1])
        elif fate < 0.58:
            # A gradient that compute reads is no gradient that may be held back.
            total = build.call(aten.sum.default, build.call(aten._to_copy.default, wait, dtype=torch.float32))
            self.hidden = build.call(aten.remainder.Scalar, build.call(aten.add.Tensor, self.hidden, total), 7)
        elif fate < 0.7:
            wait = build.call(aten.add.Tensor, wait, build.call(aten.zeros_like.default, wait))
        self.outputs.append(wait)
