"""Random valid requests: every kind, several groups and dtypes, edges in both directions, windows, fixed collectives.

`random_request` draws from any `random.Random`, so one generator serves Hypothesis (`requests`) and seeded loops.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from bucketplan_core.collectives import Candidate, FixedCollective, Group, Options
from bucketplan_core.hardware import CollectiveCost, Hardware, Protocol
from bucketplan_core.profile import CostProfile, WorkClass
from bucketplan_core.request import Request

STRATEGIES = ("none", "size", "module")
CAPS = (1, 48, 256, 4_096, 10**9)
_SHAPES = ((4,), (3, 5), (2, 2, 2), (7,), (0,), ())
_DTYPES = ("bfloat16", "float32")
_KINDS = ("fsdp_all_gather", "fsdp_all_gather_backward", "fsdp_reduce_scatter", "dp_all_reduce", "fixed")
_SCOPES = (None, "layers.0", "layers.1", "head")


@dataclass
class _Draft:
    """A collective before its orders are known."""

    kind: str
    group: str
    launch: int
    wait: int | None
    ties: tuple[int, int]
    launch_order: int = -1
    wait_order: int | None = None
    depends_on: list[int] = field(default_factory=list)


def random_options(rng: random.Random, *, strategies: Sequence[str] = STRATEGIES) -> Options:
    """Complete options with caps from tiny to boundless."""
    strategy = rng.choice(strategies)
    return Options(
        strategy=strategy,
        planner=f"{strategy}/1",
        placement=rng.choice(("original", "scheduled")),
        bucket_cap_bytes=rng.choice(CAPS),
        first_bucket_cap_bytes=rng.choice(CAPS),
        memory_budget_bytes=rng.choice((None, 0, 10**9)),
        prefetch=rng.choice((0, 1, 2, 5)),
        mixed_dtype=rng.random() < 0.3,
    )


def random_hardware(rng: random.Random, roles: Sequence[str]) -> Hardware:
    """Figures of any size for these groups; not every group and operation has one."""
    return Hardware(
        flops_per_us=tuple((name, rng.randrange(1, 10**9)) for name in ("matmul:bfloat16", "attention:bfloat16")),
        memory_bytes_per_us=rng.randrange(1, 10**7),
        copy_bytes_per_us=rng.randrange(1, 10**7),
        launch_ns=rng.randrange(10_000),
        slowdown_permille=rng.randrange(500),
        collectives=tuple(
            CollectiveCost(
                role,
                op,
                tuple(Protocol(rng.randrange(50_000), rng.randrange(1, 10**6)) for _ in range(rng.randint(1, 3))),
            )
            for role in roles
            for op in ("reduce_scatter", "all_gather")
            if rng.random() < 0.8
        ),
    )


def random_request(
    rng: random.Random,
    *,
    options: Options | None = None,
    max_collectives: int = 12,
    min_candidates: int = 0,
    kinds: Sequence[str] = _KINDS,
    edge_probability: float = 0.4,
) -> Request:
    """A valid request; `kinds` may repeat a kind to have more of it, ``fixed`` stands for fixed collectives."""
    chosen = options if options is not None else random_options(rng)
    num_segments = rng.randint(0, 12)
    groups = [_random_group(rng, role) for role in ("fsdp", "fsdp_expert", "replicate")[: rng.randint(1, 3)]]
    drafts = _random_drafts(rng, groups, num_segments, kinds, min_candidates, max_collectives)
    _number(drafts)
    _connect(rng, drafts, edge_probability)
    candidate_drafts = [draft for draft in drafts if draft.kind != "fixed"]
    fixed_drafts = [draft for draft in drafts if draft.kind == "fixed"]
    place = {id(draft): index for index, draft in enumerate(candidate_drafts + fixed_drafts)}
    for draft in drafts:
        draft.depends_on = sorted(place[id(drafts[index])] for index in draft.depends_on)
    sizes = {group.role: group.size for group in groups}
    wide = rng.random() < 0.5
    candidates = [
        _candidate(rng, draft, sizes[draft.group], num_segments, chosen, number, wide)
        for number, draft in enumerate(candidate_drafts)
    ]
    fixed = [
        FixedCollective(
            kind=rng.choice(("all_to_all", "all_reduce", "tp_all_gather")),
            group=rng.choice((draft.group, None)),
            launch=draft.launch,
            launch_order=draft.launch_order,
            wait=draft.wait,
            wait_order=draft.wait_order,
            depends_on=tuple(draft.depends_on),
            skipped=rng.choice((None, "mutated-input")),
        )
        for draft in fixed_drafts
    ]
    return Request.build(
        num_segments=num_segments,
        groups=groups,
        candidates=candidates,
        fixed=fixed,
        options=chosen,
        phase=rng.choice(("joint", "forward", "backward")),
    )


def random_profile(rng: random.Random, request: Request) -> CostProfile:
    """A cost profile of `request` with work in two classes."""

    def figures(limit: int, length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(limit) for _ in range(length))

    segments = request.num_segments
    return CostProfile(
        work=(
            WorkClass(name="memory", flops=(0,) * segments, bytes_moved=figures(10**9, segments)),
            WorkClass(name="matmul:bfloat16", flops=figures(10**12, segments), bytes_moved=figures(10**8, segments)),
        ),
        live_bytes=figures(10**10, segments),
        fixed_bytes=figures(10**8, len(request.fixed)),
    )


def randoms() -> st.SearchStrategy[random.Random]:
    """Random number generators by seed."""
    return st.integers(0, 2**32 - 1).map(random.Random)


@st.composite
def requests(
    draw: st.DrawFn,
    *,
    options: Options | None = None,
    max_collectives: int = 12,
    min_candidates: int = 0,
    kinds: Sequence[str] = _KINDS,
    edge_probability: float = 0.4,
) -> Request:
    """Random valid requests; arguments as of `random_request`.

    Their size shrinks. The rest comes from a seed: drawing each figure would take most of the time of a test.
    """
    return random_request(
        random.Random(draw(st.integers(0, 2**32 - 1))),
        options=options,
        max_collectives=draw(st.integers(min_candidates, max_collectives)),
        min_candidates=min_candidates,
        kinds=kinds,
        edge_probability=edge_probability,
    )


def _random_group(rng: random.Random, role: str) -> Group:
    size = rng.choice((1, 2, 3, 8))
    strides = (rng.choice((1, 8)), size - 1) if size > 1 and rng.random() < 0.5 else ()
    return Group(
        role=role, size=size, strides=strides, nodes=rng.randint(0, size), link=rng.choice((None, "nvlink", "efa"))
    )


def _random_drafts(
    rng: random.Random,
    groups: Sequence[Group],
    num_segments: int,
    kinds: Sequence[str],
    min_candidates: int,
    max_collectives: int,
) -> list[_Draft]:
    drafts: list[_Draft] = []
    num_candidates = 0
    wanted = rng.randint(min_candidates, max_collectives)
    movable = [kind for kind in kinds if kind != "fixed"]
    while len(drafts) < wanted or num_candidates < min_candidates:
        kind = rng.choice(kinds if len(drafts) < wanted else movable)
        launch = rng.randint(0, num_segments)
        wait: int | None = launch if rng.random() < 0.6 else rng.randint(launch, num_segments)
        if kind == "fixed" and rng.random() < 0.2:
            wait = None
        num_candidates += kind != "fixed"
        drafts.append(_Draft(kind, rng.choice(groups).role, launch, wait, (rng.randrange(100), rng.randrange(100))))
    return drafts


def _number(drafts: Sequence[_Draft]) -> None:
    """Number launches and waits by gap, then by tie; the wait of a collective comes after its launch."""
    events = []
    for index, draft in enumerate(drafts):
        launch_tie, wait_tie = draft.ties
        if draft.wait == draft.launch:
            wait_tie = max(wait_tie, launch_tie)
        events.append((draft.launch, launch_tie, index, 0))
        if draft.wait is not None:
            events.append((draft.wait, wait_tie, index, 1))
    for order, (_, _, index, is_wait) in enumerate(sorted(events)):
        if is_wait:
            drafts[index].wait_order = order
        else:
            drafts[index].launch_order = order


def _connect(rng: random.Random, drafts: Sequence[_Draft], probability: float) -> None:
    """Let collectives depend on such as were waited for before their launch, of any kind and group."""
    for draft in drafts:
        sources = [
            index
            for index, source in enumerate(drafts)
            if source.wait_order is not None and source.wait_order < draft.launch_order
        ]
        if sources and rng.random() < probability:
            draft.depends_on = sorted(set(rng.choices(sources, k=rng.randint(1, 2))))


def _candidate(
    rng: random.Random, draft: _Draft, group_size: int, num_segments: int, options: Options, number: int, wide: bool
) -> Candidate:
    assert draft.wait is not None
    assert draft.wait_order is not None
    shape = rng.choice(_SHAPES)
    unsharded = (group_size * (shape[0] if shape else 1), *shape[1:])
    is_gather = draft.kind.startswith("fsdp_all_gather")
    if draft.kind == "dp_all_reduce":
        input_shape = output_shape = shape
    else:
        input_shape, output_shape = (shape, unsharded) if is_gather else (unsharded, shape)
    latest_wait = num_segments if wide else rng.randint(draft.wait, num_segments)
    first_use = rng.choice((latest_wait, rng.randint(latest_wait, num_segments)))
    named = rng.random() < 0.8
    return Candidate(
        kind=draft.kind,
        group=draft.group,
        group_size=group_size,
        dtype=rng.choice(_DTYPES),
        device_type="cuda",
        reduce_op=None if is_gather else rng.choice(("sum", "sum", "avg")),
        input_shape=input_shape,
        output_shape=output_shape,
        param_name=f"layers.{number % 3}.weight{number}" if named else None,
        ordinal=number if named and rng.random() < 0.8 else None,
        state_idx=rng.choice((None, 2 * number)),
        module_fqns=(f"layers.{number % 3}",) if named else (),
        backward=draft.kind != "fsdp_all_gather",
        scope=rng.choice(_SCOPES) if options.strategy == "module" else None,
        earliest_launch=0 if wide else rng.choice((0, draft.launch, rng.randint(0, draft.launch))),
        launch=draft.launch,
        latest_launch=num_segments if wide else rng.randint(draft.launch, num_segments),
        wait=draft.wait,
        latest_wait=latest_wait,
        first_use=first_use,
        last_use=rng.randint(first_use, num_segments),
        launch_order=draft.launch_order,
        wait_order=draft.wait_order,
        depends_on=tuple(draft.depends_on),
    )
