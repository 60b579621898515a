"""`describe_graph`: from a live fx graph to the request and cost profile that the planning service sees."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Protocol

from torch import fx

from bucketplan_client.capture.binding import Binding, CandidateNodes, Description, GraphSnapshot, Skipped
from bucketplan_client.capture.costs import cost_profile
from bucketplan_client.capture.groups import GroupRoles
from bucketplan_client.capture.names import module_fqns_of, parameter_name
from bucketplan_client.capture.parse import Collective, is_wait, parse_collective
from bucketplan_client.capture.recognize import Recognised, is_backward_node, recognise
from bucketplan_client.capture.storage import StorageMap
from bucketplan_client.capture.timeline import Timeline, own_nodes
from bucketplan_core.collectives import ALL_GATHER_KINDS, Candidate, FixedCollective, Options
from bucketplan_core.pause import collector_paused
from bucketplan_core.request import Request

__all__ = ["ScopeLike", "describe_graph"]


class ScopeLike(Protocol):
    """A module scope resolved against the live model: its name and the parameters in it."""

    @property
    def name(self) -> str: ...

    @property
    def param_names(self) -> Collection[str]: ...


def describe_graph(
    gm: fx.GraphModule,
    *,
    options: Options,
    phase: str = "joint",
    roles: Mapping[str, str] | None = None,
    scopes: Sequence[ScopeLike] = (),
    only_roles: Collection[str] | None = None,
    exclude: Collection[str] = (),
    compute_ops: Collection[str] = (),
    topology: Mapping[str, int] | None = None,
) -> Description:
    """Describe the collectives of `gm` and what surrounds them; two ranks of one group get one signature.

    `phase` is ``joint``, ``forward`` or ``backward``. `roles` maps this process's group names to the job's words;
    `scopes` are used under strategy `module` only. `only_roles` restricts candidates to these groups, `exclude`
    holds parameter name patterns (``*`` wildcards) that stay alone. `compute_ops` are custom operators
    (``ns::name``, ``ns::*``) vouched to neither communicate nor have effects beyond their schema; others are
    barriers. `topology` holds the hosts that the groups of each role span, as the attempt agreed on them
    (`Attempt.topology`). The graph is not changed.

    Raises `bucketplan_core.errors.DecodeError` when the graph cannot be expressed as a request (too many candidates).
    """
    arguments: dict[str, Any] = {
        "options": options,
        "phase": phase,
        "roles": dict(roles or {}),
        "scopes": tuple(scopes),
        "only_roles": None if only_roles is None else frozenset(only_roles),
        "exclude": tuple(exclude),
        "compute_ops": frozenset(compute_ops),
        "topology": dict(topology or {}),
    }
    with collector_paused():
        return _describe(gm, arguments)


def _describe(gm: fx.GraphModule, arguments: Mapping[str, Any]) -> Description:
    nodes = list(gm.graph.nodes)
    output = nodes[-1]
    storage = StorageMap(nodes, arguments["compute_ops"])
    collectives = [found for found in map(parse_collective, nodes) if found is not None]
    recognised, skipped = recognise(
        collectives,
        storage,
        output,
        phase=arguments["phase"],
        compute_ops=arguments["compute_ops"],
    )
    groups = GroupRoles(collectives, arguments["roles"], arguments["topology"])
    recognised = _deselect(recognised, skipped, groups, arguments)
    chosen = {entry.collective.node for entry in recognised}
    fixed = [collective for collective in collectives if collective.node not in chosen]
    fixed_waits = [_single_wait(collective) for collective in fixed]
    candidates = own_nodes(recognised, storage)
    kinds = [entry.kind for entry in recognised]
    timeline = Timeline(nodes, storage, candidates, kinds, fixed, fixed_waits)
    request = _request(timeline, recognised, candidates, fixed, fixed_waits, groups, skipped, arguments)
    return Description(
        request=request,
        profile=cost_profile(timeline, storage, candidates, fixed),
        skipped=tuple(
            Skipped(node.name, rule, reason)
            for node, (rule, reason) in sorted(skipped.items(), key=lambda item: storage.position[item[0]])
        ),
        local_groups=groups.local_names,
        binding=Binding(
            module=gm,
            snapshot=GraphSnapshot(nodes),
            position=storage.position,
            candidates=tuple(candidates),
            fixed=tuple((collective.node, wait) for collective, wait in zip(fixed, fixed_waits, strict=True)),
            gap_anchors=tuple(timeline.anchors(output)),
            arguments=arguments,
        ),
    )


def _deselect(
    recognised: list[Recognised],
    skipped: dict[fx.Node, tuple[str, str]],
    groups: GroupRoles,
    arguments: Mapping[str, Any],
) -> list[Recognised]:
    """Take out what the caller excluded, or whose group size nobody knows."""
    kept = []
    for entry in recognised:
        role = groups.role(entry.collective)
        name = parameter_name(entry)
        if arguments["only_roles"] is not None and role not in arguments["only_roles"]:
            skipped[entry.collective.node] = ("role-not-selected", f"group {role!r} is not among the roles to bucket")
        elif name is not None and any(fnmatchcase(name, pattern) for pattern in arguments["exclude"]):
            skipped[entry.collective.node] = ("excluded", f"parameter {name!r} is excluded by the configuration")
        elif groups.size(entry.collective) < 2:
            skipped[entry.collective.node] = ("unknown-group", f"the size of group {role!r} is unknown, or 1")
        else:
            kept.append(entry)
    return kept


def _single_wait(collective: Collective) -> fx.Node | None:
    """The one wait of a fixed collective; none where there are several, or where it is not a direct user."""
    if len(collective.waits) != 1:
        return None
    wait = collective.waits[0]
    return None if any(is_wait(source) for source in wait.all_input_nodes) else wait


def _request(
    timeline: Timeline,
    recognised: Sequence[Recognised],
    candidates: Sequence[CandidateNodes],
    fixed: Sequence[Collective],
    fixed_waits: Sequence[fx.Node | None],
    groups: GroupRoles,
    skipped: Mapping[fx.Node, tuple[str, str]],
    arguments: Mapping[str, Any],
) -> Request:
    options: Options = arguments["options"]
    order = _event_order(timeline, candidates, fixed, fixed_waits)
    scopes = _Scopes(arguments["scopes"] if options.strategy == "module" else ())
    ordinal_of = _source_ordinals(timeline.nodes)
    described = []
    for entry, nodes, window in zip(recognised, candidates, timeline.windows, strict=True):
        meta = entry.collective.node.meta
        name = parameter_name(entry)
        state_idx = meta.get("state_idx") if type(meta.get("state_idx")) is int else None
        modules = module_fqns_of(entry, nodes, name)
        ordinal = state_idx
        if ordinal is None:
            ordinal = ordinal_of.get(entry.source) if entry.source is not None else entry.output_slot
        described.append(
            Candidate(
                kind=entry.kind,
                group=groups.role(entry.collective),
                group_size=groups.size(entry.collective),
                dtype=entry.input_facts.dtype_name,
                device_type=entry.input_facts.device.type if entry.input_facts.device is not None else "unknown",
                reduce_op=None if entry.kind in ALL_GATHER_KINDS else entry.collective.reduce_op,
                input_shape=entry.input_facts.shape,
                output_shape=entry.output_facts.shape,
                param_name=name,
                ordinal=ordinal,
                state_idx=state_idx,
                module_fqns=modules,
                backward=entry.kind == "fsdp_all_gather_backward" or _is_backward(entry, arguments["phase"]),
                scope=scopes.of(name, modules),
                earliest_launch=timeline.gap(window.earliest_launch),
                launch=timeline.gap(window.launch),
                latest_launch=timeline.gap(window.latest_launch),
                wait=timeline.gap(window.wait),
                latest_wait=timeline.gap(window.latest_wait),
                first_use=timeline.gap(window.first_use),
                last_use=timeline.segment(window.last_use),
                launch_order=order[nodes.launch],
                wait_order=order[nodes.wait],
                depends_on=window.depends_on,
            )
        )
    return Request.build(
        num_segments=timeline.num_segments,
        groups=groups.groups,
        candidates=described,
        fixed=[
            FixedCollective(
                kind=collective.op,
                group=groups.role(collective),
                launch=timeline.gap(timeline.at(collective.node)),
                launch_order=order[collective.node],
                wait=None if wait is None else timeline.gap(timeline.at(wait)),
                wait_order=None if wait is None else order[wait],
                depends_on=timeline.fixed_depends_on(collective),
                skipped=skipped[collective.node][0] if collective.node in skipped else None,
            )
            for collective, wait in zip(fixed, fixed_waits, strict=True)
        ],
        options=options,
        phase=arguments["phase"],
    )


def _is_backward(entry: Recognised, phase: str) -> bool:
    return phase == "backward" or is_backward_node(entry.collective.node)


def _event_order(
    timeline: Timeline,
    candidates: Sequence[CandidateNodes],
    fixed: Sequence[Collective],
    fixed_waits: Sequence[fx.Node | None],
) -> dict[fx.Node, int]:
    events = [node for nodes in candidates for node in (nodes.launch, nodes.wait)]
    events += [collective.node for collective in fixed]
    events += [wait for wait in fixed_waits if wait is not None]
    events.sort(key=timeline.storage.position.__getitem__)
    return {node: number for number, node in enumerate(events)}


class _Scopes:
    """The scope of a parameter by its name; of one that the tracer gave no name, by the module that it stands in."""

    def __init__(self, scopes: Sequence[ScopeLike]) -> None:
        self._of_parameter: dict[str, str] = {}
        self._of_module: dict[str, set[str]] = {}
        for scope in scopes:
            for name in scope.param_names:
                self._of_parameter[name] = scope.name
                parts = name.split(".")
                for length in range(1, len(parts)):
                    self._of_module.setdefault(".".join(parts[:length]), set()).add(scope.name)

    def of(self, name: str | None, modules: Collection[str]) -> str | None:
        if name is not None and name in self._of_parameter:
            return self._of_parameter[name]
        found = {scope for module in modules for scope in self._of_module.get(module, ())}
        return found.pop() if len(found) == 1 else None


def _source_ordinals(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Position of each placeholder among the inputs; attributes follow, in order of first appearance of their path."""
    ordinals: dict[fx.Node, int] = {}
    for node in nodes:
        if node.op == "placeholder":
            ordinals[node] = len(ordinals)
    paths: dict[str, int] = {}
    first = len(ordinals)
    for node in nodes:
        if node.op == "get_attr":
            ordinals[node] = first + paths.setdefault(str(node.target), len(paths))
    return ordinals
