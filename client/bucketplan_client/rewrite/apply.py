"""`apply_plan`: rewrite a described graph as its plan says, all of it or nothing.

Everything that can be refused is refused before the graph is touched: another graph's plan, a graph that changed
since it was described, an illegal plan. The rewrite then walks the plan's steps once, in their order, and emits each
right before the node that its gap is bound to. Work is linear in nodes and members.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from bucketplan_client.capture.binding import Description
from bucketplan_client.capture.describe import describe_graph
from bucketplan_client.capture.shapes import facts_of
from bucketplan_client.rewrite.emit import BucketEmitter, Member
from bucketplan_client.rewrite.errors import RewriteError, StalePlan
from bucketplan_client.rewrite.fakes import FakeValues
from bucketplan_client.rewrite.journal import Journal
from bucketplan_core.collectives import ALL_GATHER_KINDS, KINDS, REDUCE_KINDS
from bucketplan_core.legality import check_decision
from bucketplan_core.pause import collector_paused
from bucketplan_core.plan import Decision, Plan, StepOp
from bucketplan_core.request import Request

__all__ = ["Applied", "apply_ag_buckets", "apply_plan", "apply_rs_buckets"]

_STATISTICS = {
    "fsdp_ag_bucketing": (ALL_GATHER_KINDS, "ag", "copy_out_bytes"),
    "fsdp_rs_bucketing": (("fsdp_reduce_scatter",), "rs", "packed_input_bytes"),
    "dp_ar_bucketing": (("dp_all_reduce",), "ar", "packed_input_bytes"),
}


@dataclass(frozen=True)
class Applied:
    """What a rewrite did: `statistics` as published in the graph module's metadata, by key."""

    description: Description
    statistics: Mapping[str, Mapping[str, int]]
    _take_back: Callable[[], None] = field(repr=False, compare=False)

    def take_back(self) -> None:
        """Make the graph, its code and its metadata what they were; only right after the rewrite, before other changes.

        For a rank that learns that another one could not apply the plan.
        """
        self._take_back()

    @property
    def num_buckets(self) -> int:
        return sum(entry["buckets"] for entry in self.statistics.values())

    def describe_again(self) -> Description:
        """A new description of the rewritten graph: collectives of buckets are fixed now, the rest needs a new plan."""
        return describe_graph(self.description.binding.module, **self.description.binding.arguments)


def apply_ag_buckets(description: Description, plan: Plan, *, recompile: bool = True) -> Applied:
    """Apply the all-gather buckets of `plan` alone."""
    return apply_plan(description, plan, kinds=ALL_GATHER_KINDS, recompile=recompile)


def apply_rs_buckets(description: Description, plan: Plan, *, recompile: bool = True) -> Applied:
    """Apply the buckets of `plan` that reduce gradients: reduce-scatters, and the all-reduces that feed or follow them.

    One without the other would leave an all-reduce before the reduce-scatter that it reads.
    """
    return apply_plan(description, plan, kinds=REDUCE_KINDS, recompile=recompile)


def apply_plan(
    description: Description, plan: Plan, *, kinds: Collection[str] | None = None, recompile: bool = True
) -> Applied:
    """Rewrite the described graph in place as `plan` says, restricted to candidates of `kinds` where given.

    The result is in topological order at once. Raises `StalePlan` if the graph changed since it was described and
    `IllegalPlan` for a plan of another graph or one that breaks a rule, both before anything is touched;
    `RewriteError` when the rewritten graph would be invalid, after taking everything back. Statistics are published
    only after success. `recompile=False` leaves the module's code to the caller (hooks that own only the graph).
    """
    binding = description.binding
    graph = binding.module.graph
    change = binding.snapshot.first_change(graph) or _changed_tensor(description)
    if change is not None:
        raise StalePlan(change, signature=description.signature)
    check_decision(description.request, plan.decision)
    applied_kinds = frozenset(KINDS if kinds is None else kinds)
    journal = Journal(graph, binding.snapshot)
    recompiling = False
    with collector_paused():
        try:
            _Rewrite(description, plan.decision, applied_kinds, journal).run()
            _check_order(journal)
            journal.commit()
            recompiling = recompile and bool(journal.created or journal.moved)
            if recompiling:
                binding.module.recompile()
        except BaseException:
            journal.roll_back()
            if recompiling:
                binding.module.recompile()
            raise
    statistics = _statistics(description.request, plan.decision, applied_kinds)
    module, published = binding.module, dict(binding.module.meta)
    module.meta.update(statistics)

    def take_back() -> None:
        journal.roll_back()
        module.meta.clear()
        module.meta.update(published)
        if recompiling:
            module.recompile()

    return Applied(description, statistics, take_back)


def _changed_tensor(description: Description) -> str | None:
    """The first candidate whose tensor is no longer of the shape and dtype that the plan was made for, in words."""
    for candidate, nodes in zip(description.request.candidates, description.binding.candidates, strict=True):
        for node, shape in ((nodes.input, candidate.input_shape), (nodes.wait, candidate.output_shape)):
            facts = facts_of(node)
            if facts is None or facts.shape != shape or facts.dtype is not nodes.dtype:
                return f"node {node.name!r} is not {candidate.dtype} of shape {shape} any more"
    return None


class _Rewrite:
    """One pass over the steps of a decision."""

    def __init__(self, description: Description, decision: Decision, kinds: frozenset[str], journal: Journal) -> None:
        self._request = description.request
        self._binding = description.binding
        self._decision = decision
        self._kinds = kinds
        self._journal = journal
        self._graph = description.binding.module.graph
        self._emitters: dict[int, BucketEmitter] = {}
        self._touched: set[int] = set()
        self._renamed: dict[str, fx.Node] = {}
        self._settled: set[fx.Node] = set()
        # What launches read that can stand anywhere before them, as long as it stands where it did: views of results
        # that feed other candidates, and nodes that find a group.
        self._movable = {view for nodes in description.binding.candidates for view in nodes.feeds}
        self._movable |= {nodes.group for nodes in description.binding.candidates if isinstance(nodes.group, fx.Node)}

    def run(self) -> None:
        original = self._original_intervals()
        for anchor, steps in self._intervals():
            wanted = [(op, bucket) for op, bucket in steps if self._applies(bucket)]
            if wanted and not self._is_original(wanted, original.get(anchor, ())):
                self._emit(anchor, wanted)
        self._journal.redirect()
        if self._renamed:
            self._rename_gather_references()

    def _applies(self, bucket: int) -> bool:
        return self._request.lanes[self._decision.buckets[bucket].lane].kind in self._kinds

    def _intervals(self) -> list[tuple[fx.Node, list[tuple[StepOp, int]]]]:
        """Bucket steps in plan order, grouped by the node that they go right before: a fixed event or the gap's
        anchor.
        """
        found: list[tuple[fx.Node, list[tuple[StepOp, int]]]] = []
        gap, anchor = -1, None
        for step in reversed(self._decision.steps):
            if step.gap != gap:
                gap, anchor = step.gap, self._binding.gap_anchors[step.gap]
            if step.op is StepOp.FIXED_LAUNCH:
                anchor = self._binding.fixed[step.target][0]
            elif step.op is StepOp.FIXED_WAIT:
                anchor = self._binding.fixed[step.target][1]
            else:
                assert anchor is not None
                if not found or found[-1][0] is not anchor:
                    found.append((anchor, []))
                found[-1][1].append((step.op, step.target))
        for _, steps in found:
            steps.reverse()
        return found[::-1]

    def _original_intervals(self) -> dict[fx.Node, list[tuple[StepOp, int]]]:
        """The same grouping of launches and waits as they stand in the graph, with candidates in place of buckets."""
        position = self._binding.position
        events: list[tuple[int, fx.Node, StepOp | None, int]] = []
        for index, nodes in enumerate(self._binding.candidates):
            events.append((position[nodes.launch], nodes.launch, StepOp.LAUNCH, index))
            events.append((position[nodes.wait], nodes.wait, StepOp.WAIT, index))
        anchors = {*self._binding.gap_anchors}
        anchors.update(node for pair in self._binding.fixed for node in pair if node is not None)
        events += [(position[node], node, None, 0) for node in anchors]
        events.sort(key=lambda event: event[0])
        found: dict[fx.Node, list[tuple[StepOp, int]]] = {}
        pending: list[tuple[StepOp, int]] = []
        for _, node, op, index in events:
            if op is not None:
                pending.append((op, index))
            elif pending:
                found[node] = pending
                pending = []
        return found

    def _is_original(self, steps: Sequence[tuple[StepOp, int]], original: Sequence[tuple[StepOp, int]]) -> bool:
        """Whether an interval already stands as the plan wants it, so that nothing in it needs to be touched."""
        buckets = self._decision.buckets
        if any(len(buckets[bucket].members) > 1 for _, bucket in steps):
            return False
        wanted = [(op, buckets[bucket].members[0]) for op, bucket in steps]
        kept = [(op, index) for op, index in original if self._request.candidates[index].kind in self._kinds]
        if wanted != kept:
            return False
        return not any(
            dependency in self._touched
            for _, index in wanted
            for dependency in self._request.candidates[index].depends_on
        )

    def _emit(self, anchor: fx.Node, steps: Sequence[tuple[StepOp, int]]) -> None:
        with self._graph.inserting_before(anchor):
            for op, bucket in steps:
                members = self._decision.buckets[bucket].members
                self._touched.update(members)
                if op is StepOp.LAUNCH:
                    self._emit_launch(anchor, bucket)
                else:
                    self._emit_wait(anchor, bucket)

    def _emit_launch(self, anchor: fx.Node, index: int) -> None:
        bucket = self._decision.buckets[index]
        nodes = [self._binding.candidates[member] for member in bucket.members]
        self._hoist(anchor, [node for member in nodes for node in member.prep], [member.launch for member in nodes])
        if len(nodes) == 1:
            self._journal.move_before(anchor, nodes[0].launch)
            return
        members = [
            Member(self._request.candidates[member], self._binding.candidates[member]) for member in bucket.members
        ]
        fakes = FakeValues.like([node for member in nodes for node in (member.input, member.wait)])
        emitter = BucketEmitter(self._journal, fakes, bucket, self._request.lanes[bucket.lane], members)
        self._emitters[index] = emitter
        with fakes.building():
            launch = emitter.launch()
        for member in nodes:
            self._renamed[member.launch.name] = launch

    def _hoist(self, anchor: fx.Node, prep: Sequence[fx.Node], launches: Sequence[fx.Node]) -> None:
        """Bring preparation right before the anchor, and what it reads of attributes, groups and views from behind."""
        position = self._binding.position
        for reader in (*prep, *launches):
            for source in reader.all_input_nodes:
                if source.op == "get_attr" or source in self._movable:
                    self._hoist_source(anchor, source)
        for node in sorted(prep, key=position.__getitem__):
            self._journal.move_before(anchor, node)

    def _hoist_source(self, anchor: fx.Node, source: fx.Node) -> None:
        """Bring `source`, and what it is made of, before the anchor unless it stands there; anchors only go down, so
        what was moved once stands before every later one.
        """
        is_movable = source.op == "get_attr" or source in self._movable
        if not is_movable or source in self._settled:
            return
        if self._binding.position[source] < self._binding.position[anchor]:
            return
        for given in source.all_input_nodes:
            self._hoist_source(anchor, given)
        self._settle(anchor, source)

    def _settle(self, anchor: fx.Node, node: fx.Node) -> None:
        self._settled.add(node)
        self._journal.move_before(anchor, node)

    def _emit_wait(self, anchor: fx.Node, index: int) -> None:
        bucket = self._decision.buckets[index]
        nodes = [self._binding.candidates[member] for member in bucket.members]
        if len(nodes) == 1:
            self._journal.move_before(anchor, nodes[0].wait)
        else:
            self._replace_members(index, nodes)
        anchor_at = self._binding.position[anchor]
        views = [
            view
            for member in nodes
            for view in member.result
            if self._binding.position[view] < anchor_at or view in member.feeds
        ]
        for view in sorted(views, key=self._binding.position.__getitem__):
            self._settle(anchor, view)

    def _replace_members(self, index: int, nodes: Sequence[Any]) -> None:
        emitter = self._emitters[index]
        with emitter._fakes.building():
            outputs = emitter.wait()
            for member, output in zip(nodes, outputs, strict=True):
                if emitter._fakes.enabled:
                    for alias, value in emitter._fakes.aliases(member.wait, output):
                        self._journal.set_meta(alias, "val", value)
                self._journal.replace_uses(member.wait, output)
        for member in nodes:
            self._journal.obsolete(member.wait)
            self._journal.obsolete(member.launch)
        for cast in emitter.folded_casts():
            self._journal.obsolete(cast)

    def _rename_gather_references(self) -> None:
        """Metadata that named a removed launch names the bucket's; one scan, whatever the number of buckets."""
        for node in self._graph.nodes:
            named = node.meta.get("fsdp_ag_node")
            if named is None:
                continue
            launch = self._renamed.get(named.name if isinstance(named, fx.Node) else named)
            if launch is not None:
                self._journal.set_meta(node, "fsdp_ag_node", launch if isinstance(named, fx.Node) else launch.name)


def _check_order(journal: Journal) -> None:
    """The last net: every node that was made or moved stands between its inputs and its users."""
    gone = journal.to_erase
    for node in (*journal.created, *journal.moved):
        if node in gone:
            continue
        for source in node.all_input_nodes:
            if not source < node:
                raise RewriteError(node.name, f"its input {source.name!r} would come after it")
        for user in node.users:
            if user not in gone and not node < user:
                raise RewriteError(node.name, f"its user {user.name!r} would come before it")
    for node in gone:
        for user in node.users:
            if user not in gone:
                raise RewriteError(node.name, f"{user.name!r} would still read it after it is erased")


def _statistics(request: Request, decision: Decision, kinds: frozenset[str]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for key, (of_kinds, prefix, bytes_name) in _STATISTICS.items():
        if not kinds.intersection(of_kinds):
            continue
        of_kind = [b for b in decision.buckets if request.lanes[b.lane].kind in of_kinds]
        fused = [bucket for bucket in of_kind if len(bucket.members) > 1]
        members = [request.candidates[member] for bucket in fused for member in bucket.members]
        found[key] = {
            "buckets": len(fused),
            "original_collectives": len(members),
            bytes_name: sum(member.full_bytes for member in members),
            f"{prefix}_collectives_before": sum(len(bucket.members) for bucket in of_kind),
            f"{prefix}_collectives_after": len(of_kind),
        }
    return found
