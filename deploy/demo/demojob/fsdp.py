"""Shards a joint graph on dimension 0: every parameter gathered where it is used, every gradient reduced.

Drawn for one linear weight ``p`` that is resharded between forward and backward; ``[...]`` marks what this pass adds::

    forward    p > [all_gather > wait >] t > mm
    backward   p > [all_gather > wait > t >] mm
               mm > t > [reduce_scatter(avg) > wait >] output

The collectives carry the metadata that bucketplan's client reads: `comm_type`, `comm_group`, `fsdp_degree`,
`param_name`, `state_idx`, and on waits `wait_for`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

from demojob.trace import JointGraph

__all__ = ["FsdpPolicy", "RankGroup", "ShardedGraph", "shard_graph"]

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional

VIEWS = frozenset(
    {
        _aten.alias.default,
        _aten.expand.default,
        _aten.permute.default,
        _aten.select.int,
        _aten.slice.Tensor,
        _aten.squeeze.dim,
        _aten.t.default,
        _aten.transpose.int,
        _aten.unsqueeze.default,
        _aten.view.default,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """A process group: `role` is its name in the job's words, `name` what torch generated for it."""

    role: str
    name: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpPolicy:
    """How to shard.

    `group_of` gives each parameter's group; `reshard` says whether it is freed after the forward and gathered again.
    `replicas_of` names the group over which shards are replicated (hybrid sharding), if any: their reduced gradients
    are averaged over it. Every gradient is reduced where it is ready, or just before the output with `reduce_last`.
    """

    group_of: Callable[[str], RankGroup]
    reshard: Callable[[str], bool] = lambda _: True
    replicas_of: Callable[[str], RankGroup | None] = lambda _: None
    reduce_last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedGraph:
    """The graph after sharding: parameters come in, and gradients go out, as this rank's shards where `is_sharded`.

    A parameter whose dimension 0 its group does not divide stays whole, and its gradient is all-reduced.
    """

    gm: fx.GraphModule
    param_names: tuple[str, ...]
    is_sharded: tuple[bool, ...]
    roles: dict[str, str]
    """Torch's group names to roles."""


def shard_graph(joint: JointGraph, policy: FsdpPolicy) -> ShardedGraph:
    """Shard the graph of `joint` in place. Every rank of a job must call it with an equal graph and policy."""
    gm = joint.gm
    builder = _Builder(gm)
    position = {node: index for index, node in enumerate(gm.graph.nodes)}
    output = gm.graph.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]  # a traced output is a list
    is_sharded = []
    roles: dict[str, str] = {}
    for index, (name, param) in enumerate(zip(joint.param_names, joint.param_nodes, strict=True)):
        group = policy.group_of(name)
        roles[group.name] = group.role
        common = {"param_name": name, "param_node": param.name, "state_idx": index}
        sharded = param.meta["val"].shape[0] % group.size == 0
        is_sharded.append(sharded)
        if sharded:
            _gather_where_used(builder, position, param, group, common, reshard=policy.reshard(name))
        gradient = results[index + 1]
        before = output if policy.reduce_last else _behind(gradient)
        value = builder.contiguous(gradient, before)
        if sharded:
            value = builder.collective(
                "fsdp_reduce_scatter",
                group,
                value,
                before,
                common,
                backward=True,
            )
        replicas = policy.replicas_of(name) if sharded else group
        if replicas is not None and replicas.size > 1:
            roles[replicas.name] = replicas.role
            value = builder.collective("dp_all_reduce", replicas, value, before, common, backward=True)
        results[index + 1] = value
    output.args = (tuple(results),)
    gm.graph.lint()
    gm.recompile()
    return ShardedGraph(gm=gm, param_names=joint.param_names, is_sharded=tuple(is_sharded), roles=roles)


def _behind(node: fx.Node) -> fx.Node:
    """The place right after `node`; several results of one call are unpacked together first."""
    following = node.next
    while following.op == "call_function" and following.target.__name__ == "getitem":  # type: ignore[union-attr]  # a call_function
        following = following.next
    return following


def _gather_where_used(
    builder: _Builder,
    position: dict[fx.Node, int],
    param: fx.Node,
    group: RankGroup,
    common: dict[str, Any],
    *,
    reshard: bool,
) -> None:
    views = _views_of(param)
    full = param.meta["val"]
    param.meta["val"] = builder.shard_of(full, group.size)
    param.meta["tensor_meta"] = None
    users = list(param.users)
    backward_readers: list[tuple[fx.Node, fx.Node]] = []
    if reshard:
        backward_readers = [
            (reader, source)
            for source in (param, *views)
            for reader in source.users
            if reader.meta.get("autograd_backward") and reader.op != "output"
        ]
    late = {reader for reader, source in backward_readers if source is param}
    early = [user for user in users if user not in late]
    gathered = param
    if early:
        before = min(early, key=position.__getitem__) if reshard else _first_compute(builder.gm)
        gathered = builder.collective("fsdp_all_gather", group, param, before, common, backward=False)
        for user in early:
            user.replace_input_with(param, gathered)
    if not backward_readers:
        return
    before = min((reader for reader, _ in backward_readers), key=position.__getitem__)
    regathered = builder.collective("fsdp_all_gather_backward", group, param, before, common, backward=True)
    replacement = dict.fromkeys((param, gathered), regathered)
    for view in views:
        clone = builder.copy_view(view, replacement, before)
        clone.meta["fsdp_ag_node"] = regathered.meta["wait_for"]
        replacement[view] = clone
    for reader, source in backward_readers:
        reader.replace_input_with(source, replacement[source])
    for view in reversed(views):
        for unread in (replacement[view], view):
            if not unread.users:
                builder.gm.graph.erase_node(unread)


def _first_compute(gm: fx.GraphModule) -> fx.Node:
    return next(node for node in gm.graph.nodes if node.op != "placeholder")


def _views_of(param: fx.Node) -> list[fx.Node]:
    """The forward's views of a parameter, each after the one it looks at."""
    views: list[fx.Node] = []
    sources = [param]
    while sources:
        source = sources.pop(0)
        for user in source.users:
            if user.target in VIEWS and not user.meta.get("autograd_backward"):
                views.append(user)
                sources.append(user)
    return views


@dataclass(slots=True)
class _Builder:
    """Inserts nodes together with their fake values."""

    gm: fx.GraphModule
    _mode: FakeTensorMode = field(init=False)

    def __post_init__(self) -> None:
        self._mode = next(iter(self.gm.graph.nodes)).meta["val"].fake_mode

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], before: fx.Node) -> fx.Node:
        with self.gm.graph.inserting_before(before):
            node = self.gm.graph.call_function(target, args, kwargs)
        values = fx.map_arg((args, kwargs), lambda source: source.meta["val"])
        with self._mode:
            node.meta["val"] = target(*values[0], **values[1])
        return node

    def collective(
        self,
        kind: str,
        group: RankGroup,
        source: fx.Node,
        before: fx.Node,
        common: dict[str, Any],
        *,
        backward: bool,
    ) -> fx.Node:
        """The wait of a new, annotated collective over `source`."""
        if kind == "fsdp_reduce_scatter":
            target, args = _c10d.reduce_scatter_tensor.default, (source, "avg", group.size, group.name)
        elif kind == "dp_all_reduce":
            target, args = _c10d.all_reduce.default, (source, "avg", group.name)
        else:
            target, args = _c10d.all_gather_into_tensor.default, (source, group.size, group.name)
        launch = self.call(target, args, {}, before)
        wait = self.call(_c10d.wait_tensor.default, (launch,), {}, before)
        launch.meta |= common | {"comm_type": kind, "comm_group": group.role, "fsdp_degree": group.size}
        wait.meta["wait_for"] = launch.name
        if backward:
            launch.meta["autograd_backward"] = wait.meta["autograd_backward"] = True
        return wait

    def contiguous(self, source: fx.Node, before: fx.Node) -> fx.Node:
        """`source`, copied if a collective could not send it as it lies."""
        if source.meta["val"].is_contiguous():
            return source
        clone = self.call(_aten.clone.default, (source,), {"memory_format": torch.contiguous_format}, before)
        clone.meta["autograd_backward"] = True
        return clone

    def copy_view(self, view: fx.Node, replacement: dict[fx.Node, fx.Node], before: fx.Node) -> fx.Node:
        args, kwargs = fx.map_arg((view.args, dict(view.kwargs)), lambda source: replacement.get(source, source))
        clone = self.call(view.target, args, kwargs, before)
        clone.meta["autograd_backward"] = True
        return clone

    def shard_of(self, full: Tensor, num_shards: int) -> Tensor:
        with self._mode:
            return full.new_empty((full.shape[0] // num_shards, *full.shape[1:]))
