"""From node positions to gaps: who owns which node, how far each collective may move, where segments are cut.

A node is *owned* by a candidate when it only prepares its input (and nothing else reads it) or is a pure view of its
result. Every other call is compute; positions count compute nodes, so that padding, casts and views of one rank
leave no trace. Marks (windows, launches, waits, uses, writes, barriers) cut the compute nodes into segments.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from bucketplan_client.capture.binding import CandidateNodes
from bucketplan_client.capture.ops import COPYING_VIEW_OPS, PREP_OPS, VIEW_OPS, changes_device, packet_of
from bucketplan_client.capture.parse import Collective
from bucketplan_client.capture.recognize import Recognised, is_backward_node
from bucketplan_client.capture.storage import StorageMap

__all__ = ["Timeline", "Window", "own_nodes"]


@dataclass(frozen=True, slots=True)
class Window:
    """Positions (compute nodes before it) of one candidate's limits, and the indices of what feeds it."""

    earliest_launch: int
    launch: int
    latest_launch: int
    wait: int
    latest_wait: int
    first_use: int
    last_use: int
    depends_on: tuple[int, ...]


def own_nodes(found: Sequence[Recognised], storage: StorageMap) -> list[CandidateNodes]:
    """The live nodes of each candidate: what prepares its input, what only views its result."""
    owned_prep: dict[fx.Node, int] = {}
    owned = []
    for number, entry in enumerate(found):
        prep = _own_prep(entry, storage)
        owned_prep.update(dict.fromkeys(prep, number))
        owned.append(prep)
    launches = {entry.collective.node for entry in found}
    result: list[CandidateNodes] = []
    for entry, prep in zip(found, owned, strict=True):
        views = _own_result(entry, storage, owned_prep)
        feeds = frozenset(node for node in views if any(user in launches or user in owned_prep for user in node.users))
        feeds = frozenset(_with_ancestors(feeds, set(views)))
        collective = entry.collective
        assert collective.input is not None
        result.append(
            CandidateNodes(
                launch=collective.node,
                wait=entry.wait,
                input=collective.input,
                group=collective.group,
                prep=tuple(prep),
                result=tuple(views),
                feeds=feeds,
                dtype=entry.input_facts.dtype,
                device=entry.input_facts.device,
            )
        )
    return result


def _with_ancestors(nodes: Collection[fx.Node], within: set[fx.Node]) -> set[fx.Node]:
    found = set(nodes)
    stack = list(nodes)
    while stack:
        for source in stack.pop().all_input_nodes:
            if source in within and source not in found:
                found.add(source)
                stack.append(source)
    return found


def _own_prep(entry: Recognised, storage: StorageMap) -> list[fx.Node]:
    """Nodes that only this launch reads, as long as they may be read at the launch instead of where they stand."""
    launch = entry.collective.node
    launch_at = storage.position[launch]
    owned: set[fx.Node] = set()
    stack = [source for source in launch.all_input_nodes if source is entry.collective.input]
    while stack:
        node = stack.pop()
        if node in owned or node.op not in ("call_function", "call_method"):
            continue
        if packet_of(node) not in PREP_OPS or changes_device(node):
            continue
        if any(user is not launch and user not in owned for user in node.users):
            continue
        at = storage.position[node]
        sources = node.all_input_nodes
        if any(isinstance(source.meta.get("val"), torch.SymInt) for source in sources):
            continue
        written = (storage.first_write_from(source, at) for source in sources)
        if any(position is not None and position < launch_at for position in written):
            continue
        owned.add(node)
        stack.extend(sources)
    return sorted(owned, key=storage.position.__getitem__)


def _own_result(entry: Recognised, storage: StorageMap, owned_prep: Mapping[fx.Node, int]) -> list[fx.Node]:
    """Views of the result that may be taken right behind the wait instead of where they stand.

    A view reads no numbers and may pass a write of the storage that it views, unless it may be a copy, or the write
    may have given the viewed tensor another shape.
    """
    owned = {entry.wait}
    views: list[fx.Node] = []
    wait_at = storage.position[entry.wait]
    written = storage.first_write_from(entry.wait, wait_at)
    reshaped = storage.first_reshape_from(entry.wait, wait_at)
    stack = [entry.wait]
    while stack:
        for user in stack.pop().users:
            if (
                user in owned
                or user in owned_prep
                or user.op != "call_function"
                or packet_of(user) not in VIEW_OPS
                or any(source not in owned for source in user.all_input_nodes)
                or (reshaped is not None and reshaped < storage.position[user])
                or (packet_of(user) in COPYING_VIEW_OPS and written is not None and written < storage.position[user])
            ):
                continue
            owned.add(user)
            views.append(user)
            stack.append(user)
    return sorted(views, key=storage.position.__getitem__)


class Timeline:
    """Positions of all compute nodes and the windows of all candidates of one graph."""

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        storage: StorageMap,
        candidates: Sequence[CandidateNodes],
        kinds: Sequence[str],
        fixed: Sequence[Collective],
        fixed_waits: Sequence[fx.Node | None],
    ) -> None:
        self.nodes = nodes
        self.storage = storage
        self.candidates = candidates
        self.kinds = kinds
        self.fixed = fixed
        self.fixed_waits = fixed_waits
        self._owner: dict[fx.Node, int] = {}
        steps: set[fx.Node] = set()
        for number, candidate in enumerate(candidates):
            steps.update((candidate.launch, candidate.wait))
            for node in (candidate.launch, candidate.wait, *candidate.prep, *candidate.result):
                self._owner[node] = number
        self._fixed_launch = {collective.node: number for number, collective in enumerate(fixed)}
        self._fixed_wait = {wait: number for number, wait in enumerate(fixed_waits) if wait is not None}
        self._lookups = self._group_lookups()
        self.is_compute = [
            node.op not in ("placeholder", "get_attr", "output")
            and node not in self._lookups
            and node not in self._owner
            and node not in self._fixed_launch
            and node not in self._fixed_wait
            for node in nodes
        ]
        self._before = [0]
        for compute in self.is_compute:
            self._before.append(self._before[-1] + compute)
        self.num_compute = self._before[-1]
        self.windows = self._windows()
        self._cuts = self._cut()

    def _group_lookups(self) -> set[fx.Node]:
        """Nodes that only find a group on the rank's own mesh: like attributes, they can stand anywhere."""
        groups = [candidate.group for candidate in self.candidates] + [collective.group for collective in self.fixed]
        barriers = frozenset(self.storage.barriers)
        return {
            group
            for group in groups
            if isinstance(group, fx.Node)
            and group.op == "call_function"
            and all(source.op in ("placeholder", "get_attr") for source in group.all_input_nodes)
            and self.storage.position[group] not in barriers
        }

    def at(self, node: fx.Node) -> int:
        """Compute nodes that stand before `node`."""
        return self._before[self.storage.position[node]]

    def _windows(self) -> list[Window]:
        first_backward = self._first_backward()
        order = sorted(
            range(len(self.candidates)), key=lambda number: self.storage.position[self.candidates[number].launch]
        )
        found: dict[int, Window] = {}
        for number in order:
            found[number] = self._window(number, found, first_backward)
        return [found[number] for number in range(len(self.candidates))]

    def _first_backward(self) -> int:
        """Position before which no backward gather may be launched: that would undo resharding."""
        marked = (
            self._before[index]
            for index, node in enumerate(self.nodes)
            if self.is_compute[index] and is_backward_node(node)
        )
        gathers = (
            self.at(candidate.launch)
            for candidate, kind in zip(self.candidates, self.kinds, strict=True)
            if kind == "fsdp_all_gather_backward"
        )
        return min((position for positions in (marked, gathers) for position in positions), default=0)

    def _window(self, number: int, found: Mapping[int, Window], first_backward: int) -> Window:
        candidate = self.candidates[number]
        launch, wait = candidate.launch, candidate.wait
        launch_at, wait_at = self.storage.position[launch], self.storage.position[wait]
        earliest = 0
        limits = [self.num_compute]
        depends_on: set[int] = set()
        for reader in (*candidate.prep, launch):
            read_at = self.storage.position[reader]
            for source in reader.all_input_nodes:
                if self._owner.get(source) == number and source not in candidate.result:
                    continue
                ready, feeding = self._ready(source, found)
                earliest = max(earliest, ready)
                if feeding is not None:
                    depends_on.add(feeding)
                written = self.storage.last_write_before(source, read_at)
                if written is not None:
                    earliest = max(earliest, self._before[written] + 1)
                written = self.storage.first_write_from(source, read_at)
                if written is not None:
                    limits.append(self._before[written])
        barrier = self.storage.last_barrier_before(launch_at)
        if barrier is not None:
            earliest = max(earliest, self._before[barrier] + 1)
        barrier = self.storage.first_barrier_from(launch_at)
        if barrier is not None:
            limits.append(self._before[barrier])
        if self.kinds[number] == "fsdp_all_gather_backward":
            earliest = max(earliest, min(first_backward, self.at(launch)))
        waits = [self.num_compute]
        for position in (
            self.storage.first_barrier_from(wait_at),
            self.storage.first_write_from(wait, wait_at),
            self.storage.first_write_from(candidate.input, launch_at),
        ):
            if position is not None:
                waits.append(self._before[position])
        first_use, last_use = self._uses(candidate)
        latest_wait = max(min(*waits, first_use), self.at(wait))
        position = self.at(launch)
        return Window(
            earliest_launch=min(earliest, position),
            launch=position,
            latest_launch=max(min(*limits, latest_wait), position),
            wait=self.at(wait),
            latest_wait=latest_wait,
            first_use=max(first_use, latest_wait),
            last_use=max(last_use, first_use),
            depends_on=tuple(sorted(depends_on)),
        )

    def _ready(self, source: fx.Node, found: Mapping[int, Window]) -> tuple[int, int | None]:
        """Position from which `source` can be read, and the collective that it is the direct result of.

        Through a candidate, readiness is that of the candidate's own input: the edge says the rest.
        """
        owner = self._owner.get(source)
        if owner is not None and owner in found:
            return found[owner].earliest_launch, owner
        if source in self._fixed_wait:
            return self.at(source), len(self.candidates) + self._fixed_wait[source]
        if source.op == "get_attr":
            return 0, None
        if source in self._lookups:
            return max((self._ready(given, found)[0] for given in source.all_input_nodes), default=0), None
        index = self.storage.position[source]
        return self._before[index] + self.is_compute[index], None

    def _uses(self, candidate: CandidateNodes) -> tuple[int, int]:
        """Positions of the first and of the last use; candidates that consume the result are edges, not uses."""
        first, last = self.num_compute, self.at(candidate.wait)
        own = {candidate.wait, *candidate.result}
        for node in own:
            for user in node.users:
                if user in own or user in self._owner:
                    continue
                position = self.num_compute if user.op == "output" else self.at(user)
                first, last = min(first, position), max(last, position)
        return first, last

    def fixed_depends_on(self, collective: Collective) -> tuple[int, ...]:
        """Candidates and fixed collectives whose results feed a fixed launch directly."""
        feeding: set[int] = set()
        for source in collective.node.all_input_nodes:
            owner = self._owner.get(source)
            if owner is not None and source is not self.candidates[owner].launch:
                feeding.add(owner)
            elif source in self._fixed_wait:
                feeding.add(len(self.candidates) + self._fixed_wait[source])
        return tuple(sorted(feeding))

    def _cut(self) -> list[int]:
        marks = {0, self.num_compute}
        for window in self.windows:
            marks.update(
                (
                    window.earliest_launch,
                    window.launch,
                    window.latest_launch,
                    window.wait,
                    window.latest_wait,
                    window.first_use,
                    min(window.last_use + 1, self.num_compute),
                )
            )
        for collective, wait in zip(self.fixed, self.fixed_waits, strict=True):
            marks.add(self.at(collective.node))
            if wait is not None:
                marks.add(self.at(wait))
        for barrier in self.storage.barriers:
            marks.update((self._before[barrier], self._before[barrier] + 1))
        return sorted(marks)

    @property
    def num_segments(self) -> int:
        return len(self._cuts) - 1

    def gap(self, position: int) -> int:
        """The gap at `position`, which must be a mark."""
        return bisect_left(self._cuts, position)

    def segment(self, position: int) -> int:
        """The segment that holds compute node number `position`; `num_segments` past the last."""
        return bisect_left(self._cuts, position + 1) - 1 if position < self.num_compute else self.num_segments

    def anchors(self, output: fx.Node) -> list[fx.Node]:
        """The node that each gap stands right before."""
        compute = [node for node, flag in zip(self.nodes, self.is_compute, strict=True) if flag]
        return [compute[cut] if cut < self.num_compute else output for cut in self._cuts]

    def segments_of_compute(self) -> list[tuple[int, fx.Node]]:
        """(segment, node) of every compute node, in graph order."""
        found = []
        segment, count = 0, 0
        for node, compute in zip(self.nodes, self.is_compute, strict=True):
            if not compute:
                continue
            while count >= self._cuts[segment + 1]:
                segment += 1
            found.append((segment, node))
            count += 1
        return found
