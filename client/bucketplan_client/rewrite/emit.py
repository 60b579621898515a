"""The nodes of one bucket: packing, the collective, its wait, and each member's part of the result.

    gather   [flatten]*n > cat(0) > [cast] > all_gather > wait > view(ranks, -1) > split(1) > [item > clone > reshape]*n
    scatter  [view(ranks, -1)]*n > cat(1) > flatten > reduce_scatter > wait > split(0) > [item > reshape]*n
    reduce   [flatten]*n > cat(0) > all_reduce > wait > split(0) > [item > reshape]*n

Gathered members get storage of their own, so that freeing or overwriting one parameter leaves the others intact;
reduced members are views of the bucket.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from bucketplan_client.capture.binding import CandidateNodes
from bucketplan_client.capture.ops import CAST_OPS, packet_of
from bucketplan_client.rewrite.fakes import FakeValues, empty
from bucketplan_client.rewrite.journal import Journal
from bucketplan_core.collectives import Candidate, Lane
from bucketplan_core.plan import Bucket

__all__ = ["BucketEmitter", "Member"]

aten = torch.ops.aten
_c10d = torch.ops._c10d_functional


@dataclass(frozen=True, slots=True)
class Member:
    """One candidate of a bucket with its live nodes."""

    candidate: Candidate
    nodes: CandidateNodes


class BucketEmitter:
    """Emits one fused bucket: `launch` and `wait` each at the graph's insertion point, in this order."""

    def __init__(
        self, journal: Journal, fakes: FakeValues, bucket: Bucket, lane: Lane, members: Sequence[Member]
    ) -> None:
        self._journal = journal
        self._fakes = fakes
        self._bucket = bucket
        self._lane = lane
        self._members = members
        self._ranks = lane.group_size
        self._as_bytes = lane.wire_dtype == "bytes"
        self._dtype = torch.uint8 if self._as_bytes else members[0].nodes.dtype
        self._shared_meta = self._shared(members)
        self.launch_node: fx.Node | None = None
        self._wait_node: fx.Node | None = None

    def _shared(self, members: Sequence[Member]) -> dict[str, Any]:
        """Metadata of every created node; provenance is one shared record a bucket, whatever its size."""
        first = members[0]
        fqns = tuple(dict.fromkeys(fqn for member in members for fqn in member.candidate.module_fqns))
        shared: dict[str, Any] = {
            "autograd_backward": first.candidate.backward,
            "fsdp_bucket_id": self._bucket.id,
            "fsdp_bucket_module_fqns": fqns,
            "fsdp_bucket_provenance": tuple(
                {
                    "launch": member.nodes.launch.name,
                    "param_name": member.candidate.param_name,
                    "stack_trace": member.nodes.launch.meta.get("stack_trace"),
                    "nn_module_stack": member.nodes.launch.meta.get("nn_module_stack")
                    or member.nodes.launch.meta.get("fwd_nn_module_stack"),
                }
                for member in members
            ),
        }
        for key in ("stack_trace", "nn_module_stack", "fwd_nn_module_stack", "partitioner_tag", "seq_nr"):
            if key in first.nodes.launch.meta:
                shared[key] = first.nodes.launch.meta[key]
        return shared

    def _create(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        *,
        meta: torch.Tensor | None = None,
        **marks: Any,
    ) -> fx.Node:
        node = self._journal.create(target, args, kwargs)
        node.meta.update(self._shared_meta)
        node.meta.update(marks)
        if self._fakes.enabled and meta is not None:
            self._fakes.set(node, meta)
        return node

    def _meta(self, node: fx.Node) -> torch.Tensor:
        return self._fakes.meta(node)

    def _reshape(self, source: fx.Node, shape: Sequence[int], **marks: Any) -> fx.Node:
        """A view where the fake value tells that one is possible, else a reshape (which may copy)."""
        known = self._fakes.behind(source)
        if known is None:
            value = source.meta.get("val")
            contiguous = isinstance(value, torch.Tensor) and value.is_contiguous()
            return self._create(
                aten.view.default if contiguous else aten.reshape.default, (source, list(shape)), **marks
            )
        target = aten.view.default if known.is_contiguous() else aten.reshape.default
        return self._create(target, (source, list(shape)), meta=known.reshape(tuple(shape)), **marks)

    def launch(self) -> fx.Node:
        """Packing and the collective; returns the launch."""
        packed = self._pack_scatter() if self._lane.kind == "fsdp_reduce_scatter" else self._pack_flat()
        group = self._members[0].nodes.group
        kind = self._lane.kind
        total_in = sum(member.candidate.input_numel for member in self._members)
        total_out = sum(member.candidate.output_numel for member in self._members)
        if self._as_bytes:
            total_in = sum(member.candidate.input_bytes for member in self._members)
            total_out = sum(member.candidate.output_bytes for member in self._members)
        marks: dict[str, Any] = {
            "comm_type": kind,
            "comm_group": self._members[0].nodes.launch.meta.get("comm_group", self._lane.group),
            "fsdp_degree": self._ranks,
            "fsdp_bucket_members": [member.candidate.param_name for member in self._members],
            "fsdp_bucket_spec": {
                "input_shape": (total_in,),
                "output_shape": (total_out,),
                "dtype": self._dtype,
                "device": self._members[0].nodes.device,
            },
        }
        if self._bucket.rewrite == "gather":
            full_bytes = sum(member.candidate.full_bytes for member in self._members)
            marks |= {"fsdp_unsharded_nbytes": full_bytes, "fsdp_bucket_workspace_nbytes": full_bytes}
            target: Callable[..., Any] = _c10d.all_gather_into_tensor.default
            args: tuple[Any, ...] = (packed, self._ranks, group)
        elif self._bucket.rewrite == "scatter":
            target = _c10d.reduce_scatter_tensor.default
            args = (packed, self._lane.reduce_op, self._ranks, group)
        else:
            target, args = _c10d.all_reduce.default, (packed, self._lane.reduce_op, group)
        self.launch_node = self._create(target, args, meta=empty((total_out,), self._dtype), **marks)
        return self.launch_node

    def _pack_flat(self) -> fx.Node:
        prepare: dict[str, Any] = {"fsdp_bucket_prepare": self._bucket.id}
        folded = self._common_cast()
        flat = []
        for member in self._members:
            source = member.nodes.input if folded is None else member.nodes.input.all_input_nodes[0]
            source = self._journal.current(source)
            node = self._reshape(source, [member.candidate.input_numel], **prepare)
            if self._as_bytes and member.nodes.dtype is not torch.uint8:
                node = self._create(
                    aten.view.dtype,
                    (node, torch.uint8),
                    meta=self._meta(node).view(torch.uint8) if self._fakes.enabled else None,
                    **prepare,
                )
            flat.append(node)
        dtype = self._dtype if folded is None else folded
        total = sum(m.candidate.input_bytes if self._as_bytes else m.candidate.input_numel for m in self._members)
        packed = self._create(aten.cat.default, (flat,), meta=empty((total,), dtype), **prepare)
        if folded is None or folded is self._dtype:
            return packed
        cast_target = self._members[0].nodes.input.target
        args, kwargs = _cast_arguments(self._members[0].nodes.input, packed)
        assert callable(cast_target)
        return self._create(cast_target, args, kwargs, meta=empty((total,), self._dtype), **prepare)

    def _common_cast(self) -> torch.dtype | None:
        """The dtype before the cast that ends every member's preparation, None where they differ: one cast of the
        bucket.
        """
        if self._as_bytes or self._bucket.rewrite != "gather":
            return None
        first = self._members[0].nodes.input
        sources: set[torch.dtype] = set()
        for member in self._members:
            node = member.nodes.input
            if node not in member.nodes.prep or packet_of(node) not in CAST_OPS or node.target is not first.target:
                return None
            if any(_is_strided_format(value) for value in (*node.args, *node.kwargs.values())):
                return None
            if node.args[1:] != first.args[1:] or dict(node.kwargs) != dict(first.kwargs):
                return None
            if len(node.all_input_nodes) != 1 or node.args[:1] != (node.all_input_nodes[0],):
                return None
            value = node.all_input_nodes[0].meta.get("val")
            if not isinstance(value, torch.Tensor):
                return None
            sources.add(value.dtype)
        return sources.pop() if len(sources) == 1 else None

    def folded_casts(self) -> list[fx.Node]:
        """Casts that packing took over; nothing reads them any more."""
        return [member.nodes.input for member in self._members] if self._common_cast() is not None else []

    def _pack_scatter(self) -> fx.Node:
        prepare: dict[str, Any] = {"fsdp_bucket_prepare": self._bucket.id}
        rows = []
        for member in self._members:
            source = member.nodes.input
            if source in member.nodes.prep and packet_of(source) in (aten.contiguous, "contiguous", aten.clone):
                self._expose_layout(member, source)
            columns = member.candidate.input_numel // self._ranks
            rows.append(self._reshape(self._journal.current(source), [self._ranks, columns], **prepare))
        total = sum(member.candidate.input_numel for member in self._members)
        packed = self._create(
            aten.cat.default,
            (rows, 1),
            meta=empty((self._ranks, total // self._ranks), self._dtype),
            **prepare,
        )
        return self._reshape(packed, [total], **prepare)

    def _expose_layout(self, member: Member, node: fx.Node) -> None:
        """Later overlap passes look for the layout node of a reduce-scatter's input as a plain ``aten.contiguous``.

        A clone stays one: inside Inductor `contiguous` has no lowering, and a clone is its decomposition.
        """
        if packet_of(node) is not aten.clone:
            self._journal.retarget(node, aten.contiguous.default)
        for key, value in (
            ("autograd_backward", True),
            ("fsdp_bucket_id", self._bucket.id),
            ("fsdp_bucket_prepare", self._bucket.id),
            ("fsdp_reduce_scatter_prepare", member.nodes.launch.name),
        ):
            self._journal.set_meta(node, key, value)

    def wait(self) -> list[fx.Node]:
        """The wait and each member's output, in payload order."""
        launch = self.launch_node
        assert launch is not None
        self._wait_node = self._create(
            _c10d.wait_tensor.default,
            (launch,),
            meta=self._meta(launch) if self._fakes.enabled else None,
            wait_for=launch.name,
        )
        return self._split_gathered() if self._bucket.rewrite == "gather" else self._split_reduced()

    def _split_gathered(self) -> list[fx.Node]:
        wait = self._wait_node
        assert wait is not None
        ranks = self._ranks
        columns = [m.candidate.input_bytes if self._as_bytes else m.candidate.input_numel for m in self._members]
        rows = self._create(
            aten.view.default,
            (wait, [ranks, sum(columns)]),
            meta=self._meta(wait).view(ranks, sum(columns)) if self._fakes.enabled else None,
        )
        split, pieces = self._split(rows, columns, 1)
        outputs = []
        for member, width, piece in zip(self._members, columns, self._items(split, pieces), strict=True):
            copied = self._create(
                aten.clone.default,
                (piece,),
                {"memory_format": torch.contiguous_format},
                meta=empty((ranks, width), self._dtype) if self._fakes.enabled else None,
                fsdp_bucket_copy_out=self._bucket.id,
            )
            if self._as_bytes and member.nodes.dtype is not torch.uint8:
                if not width:
                    # Rows of no bytes have a stride that is no multiple of the element's; a flat tensor has none.
                    copied = self._reshape(copied, [0])
                copied = self._create(
                    aten.view.dtype,
                    (copied, member.nodes.dtype),
                    meta=self._meta(copied).view(member.nodes.dtype) if self._fakes.enabled else None,
                )
            outputs.append(self._output(copied, member))
        return outputs

    def _split_reduced(self) -> list[fx.Node]:
        wait = self._wait_node
        assert wait is not None
        split, pieces = self._split(wait, [member.candidate.output_numel for member in self._members], 0)
        return [
            self._output(item, member) for item, member in zip(self._items(split, pieces), self._members, strict=True)
        ]

    def _split(self, source: fx.Node, sizes: list[int], dim: int) -> tuple[fx.Node, Sequence[torch.Tensor]]:
        node = self._create(aten.split_with_sizes.default, (source, sizes, dim))
        return node, self._meta(source).split_with_sizes(sizes, dim) if self._fakes.enabled else ()

    def _items(self, split: fx.Node, pieces: Sequence[torch.Tensor]) -> Iterator[fx.Node]:
        """One element node a member; the list's fake value holds the elements' own."""
        values: list[Any] = []
        for index in range(len(self._members)):
            item = self._create(operator.getitem, (split, index), meta=pieces[index] if pieces else None)
            values.append(item.meta.get("val"))
            yield item
        if self._fakes.enabled:
            split.meta["val"] = values

    def _output(self, source: fx.Node, member: Member) -> fx.Node:
        shape = list(member.candidate.output_shape)
        return self._create(
            aten.view.default,
            (source, shape),
            meta=self._meta(source).view(shape) if self._fakes.enabled else None,
            param_name=member.candidate.param_name,
            state_idx=member.candidate.state_idx,
        )


def _is_strided_format(value: Any) -> bool:
    """Whether an argument of a cast asks for strides that a flat buffer cannot have."""
    return isinstance(value, torch.memory_format) and value not in (torch.contiguous_format, torch.preserve_format)


def _cast_arguments(cast: fx.Node, source: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (source, *cast.args[1:]), dict(cast.kwargs)
