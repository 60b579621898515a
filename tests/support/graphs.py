"""Loader for recorded real graphs: facts about collectives and compute, turned into requests and cost profiles."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from bucketplan_core.collectives import Candidate, FixedCollective, Group, Options
from bucketplan_core.profile import CostProfile, WorkClass
from bucketplan_core.request import Request
from tests.support.paths import GRAPHS_DIR

SIZE_OPTIONS = Options(strategy="size", planner="size/1")


def graph_names() -> list[str]:
    """Names of the recorded graphs, sorted; empty where the folder is absent."""
    return sorted(path.stem for path in GRAPHS_DIR.glob("*.json"))


@lru_cache(maxsize=16)
def _read(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((GRAPHS_DIR / f"{name}.json").read_text())
    return loaded


def _kind(recorded: str, backward: bool) -> str:
    if recorded == "all_gather":
        return "fsdp_all_gather_backward" if backward else "fsdp_all_gather"
    return {"reduce_scatter": "fsdp_reduce_scatter", "all_reduce": "dp_all_reduce"}[recorded]


def load_graph(name: str, options: Options = SIZE_OPTIONS) -> tuple[Request, CostProfile]:
    """The request and cost profile of one recorded graph.

    The files hold neither orders inside a gap nor edges: launches and waits are numbered by gap, candidates in file
    order with each wait right behind its launch, and a collective depends on another of a different lane whose
    result is first used at its launch and that is ready no earlier than that.
    """
    data = _read(name)
    columns, others, segments = data["candidates"], data["other_collectives"], data["segments"]
    num_segments = len(segments["live_bytes"])
    num_candidates = len(columns["kind"])
    is_backward_graph = "_bw_" in name
    events = []
    for fixed, table in ((0, columns), (1, others)):
        for i in range(len(table["kind"])):
            events.append((table["launch"][i], table["ready"][i], fixed, i, table["wait"][i]))
    events.sort()
    launch_order: dict[tuple[int, int], int] = {}
    wait_order: dict[tuple[int, int], int] = {}
    pending: list[tuple[int, int, int]] = []
    number = 0
    for launch, _, fixed, i, wait in events:
        for due in sorted(p for p in pending if p[0] < launch):
            wait_order[due[1:]] = number
            number += 1
        pending = [p for p in pending if p[0] >= launch]
        launch_order[(fixed, i)] = number
        number += 1
        if wait == launch:
            wait_order[(fixed, i)] = number
            number += 1
        else:
            pending.append((wait, fixed, i))
    for due in sorted(pending):
        wait_order[due[1:]] = number
        number += 1
    edges = _edges(columns, num_candidates)
    candidates = []
    for i in range(num_candidates):
        first_use = columns["first_use"][i]
        for consumer, sources in edges.items():
            if i in sources:
                first_use = max(first_use, columns["wait"][consumer], columns["first_use"][consumer])
        earliest = columns["ready"][i]
        for source in edges.get(i, ()):
            earliest = min(earliest, columns["ready"][source])
        backward = bool(columns["backward"][i]) or is_backward_graph
        candidates.append(
            Candidate(
                kind=_kind(columns["kind"][i], backward),
                group=columns["role"][i],
                group_size=columns["group_size"][i],
                dtype=columns["dtype"][i],
                device_type="cuda",
                reduce_op=columns["reduce_op"][i],
                input_shape=tuple(columns["input_shape"][i]),
                output_shape=tuple(columns["output_shape"][i]),
                param_name=columns["param_name"][i],
                module_fqns=(columns["module_fqn"][i],) if columns["module_fqn"][i] else (),
                backward=backward,
                earliest_launch=earliest,
                launch=columns["launch"][i],
                latest_launch=first_use,
                wait=columns["wait"][i],
                latest_wait=first_use,
                first_use=first_use,
                last_use=max(columns["last_use"][i], first_use),
                launch_order=launch_order[(0, i)],
                wait_order=wait_order[(0, i)],
                depends_on=tuple(edges.get(i, ())),
            )
        )
    fixed_collectives = [
        FixedCollective(
            kind=others["kind"][i],
            group=others["role"][i],
            launch=others["launch"][i],
            launch_order=launch_order[(1, i)],
            wait=others["wait"][i],
            wait_order=wait_order[(1, i)],
        )
        for i in range(len(others["kind"]))
    ]
    request = Request.build(
        num_segments=num_segments,
        groups=[Group(role=g["role"], size=g["size"], nodes=g["nodes_of_8"], strides=()) for g in data["groups"]],
        candidates=candidates,
        fixed=fixed_collectives,
        options=options,
        phase="backward" if is_backward_graph else "forward" if "_fw_" in name else "joint",
    )
    zeros = (0,) * num_segments
    order = sorted(range(len(fixed_collectives)), key=lambda i: fixed_collectives[i].launch_order)
    profile = CostProfile(
        work=tuple(
            WorkClass(
                name=work_class,
                flops=tuple(work["flops"]) if "flops" in work else zeros,
                bytes_moved=tuple(work["bytes_moved"]),
            )
            for work_class, work in sorted(segments["work"].items())
        ),
        live_bytes=tuple(segments["live_bytes"]),
        fixed_bytes=tuple(max(_int(others["input_bytes"][i]), _int(others["output_bytes"][i])) for i in order),
    )
    return request, profile


def _int(value: object) -> int:
    return value if isinstance(value, int) else 0


def _edges(columns: dict[str, list[Any]], num_candidates: int) -> dict[int, list[int]]:
    """Gradient all-reduces feed the reduce-scatter of the same tensor, launched right where their result is first
    used.
    """
    by_launch: dict[int, list[int]] = {}
    for i in range(num_candidates):
        if columns["kind"][i] == "reduce_scatter":
            by_launch.setdefault(columns["launch"][i], []).append(i)
    edges: dict[int, list[int]] = {}
    for i in range(num_candidates):
        if columns["kind"][i] != "all_reduce":
            continue
        for consumer in by_launch.get(columns["first_use"][i], ()):
            if columns["input_shape"][consumer] == columns["output_shape"][i] and consumer not in edges:
                edges[consumer] = [i]
                break
    return edges
