"""How the ranks of a job open an attempt together: one value, written once, decides for all of them.

    every rank   puts its hello: versions, options, groups, epochs in its cache, its host
    leader       waits for all hellos, refuses what does not fit together, asks the server for the epoch, and writes
                 the outcome once: commit (with epoch, overrides, options), unbucketed, or abort
    every rank   reads the outcome and adopts it, or raises; none chooses by itself

Whoever loses patience first (a rank that waits for a dead leader, the leader that misses a rank) writes the outcome
that the configuration asks for in that case; whoever comes later finds it there. In mode `every_rank` each rank also
asks the server, under one key, so that the server answers all of them alike; the first answer in the store is
everyone's. The leader's mode counts. A rank that leaves early writes an abort first (`leave_opening`).

Everything here is pure: see `bucketplan_client.protocol` for how it is run, and the simulation in tests/fleet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from bucketplan_client.arguments import printable
from bucketplan_client.errors import Problem, ServerError, ServerRefused
from bucketplan_client.opening_documents import (
    Hello,
    OnUnavailable,
    Opened,
    Outcome,
    OutcomeKind,
    Source,
    shortened,
)
from bucketplan_client.opening_places import Seen, leave_word, seen_elsewhere
from bucketplan_client.protocol import Get, GetMany, Now, Protocol, Put, PutOnce, Wait
from bucketplan_core.attempt import AttemptRequest
from bucketplan_core.collectives import Options
from bucketplan_core.epoch import Epoch, complete_options
from bucketplan_core.errors import BucketplanError, DecodeError, describe_ranks
from bucketplan_core.fields import Fields
from bucketplan_core.wire import WireValue, pack, unpack

__all__ = [
    "AskServer",
    "Hello",
    "LoadEpoch",
    "OnUnavailable",
    "OpenMode",
    "Opened",
    "Outcome",
    "Setup",
    "Sleep",
    "Source",
    "leave_opening",
    "odd_option",
    "open_protocol",
]

OpenMode = Literal["leader", "every_rank"]

_MOST_SIDES = 4
_LOOK_S = 2.0
"""How often a rank that waits for the leader's draft looks for an outcome instead."""
_ASKS_FOR_PATIENCE = (408, 425, 429)
_VERSIONS = ("capture", "rewriter", "schema")
_NOT_GIVEN = object()
_FIRST = Seen(key="opening/0")


@dataclass(frozen=True, slots=True)
class AskServer:
    """Open the attempt at the server, at most until `until`. Result: `Opened`; raises `ServerError`."""

    request: AttemptRequest
    until: float


@dataclass(frozen=True, slots=True)
class LoadEpoch:
    """Read an epoch and its overrides from this rank's cache. Result: `Opened`, or None when it is not whole there."""

    epoch_id: str


@dataclass(frozen=True, slots=True)
class Sleep:
    """Wait for up to `most_s` seconds, a random share of it. Result: None."""

    most_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One rank's part in one opening.

    `participants` are the ranks that share a candidate's group, directly or through others, in ascending order; the
    first leads. `deadline_s` bounds the wait for ranks, `server_s` the server's part, `grace_s` how much longer ranks
    wait for the leader than it may take. `defaults` complete the options where no server does. `seen` is where the
    opening stands in the store.
    """

    job: str
    participants: tuple[int, ...]
    hello: Hello
    nonce: str
    defaults: Options
    mode: OpenMode = "leader"
    deadline_s: float = 300.0
    server_s: float = 60.0
    grace_s: float = 10.0
    jitter_s: float = 5.0
    seen: Seen = _FIRST

    @property
    def rank(self) -> int:
        return self.hello.rank

    @property
    def leader(self) -> int:
        return self.participants[0]

    @property
    def outcome(self) -> str:
        """Where the outcome stands in the store; the others so too."""
        return outcome_key(self.seen)

    @property
    def draft(self) -> str:
        return f"{self.seen.key}/draft"

    @property
    def answer(self) -> str:
        return f"{self.seen.key}/answer"

    def hello_of(self, rank: int) -> str:
        return _hello_key(self.seen, rank)


def open_protocol(setup: Setup) -> Protocol[Outcome]:
    """The outcome of this opening, the same on every rank that gets one; each ends within the sum of its times.

    Raises `DecodeError` where what stands in the store cannot be read.
    """
    started: float = yield Now()
    until = started + setup.deadline_s
    yield from leave_word(setup.rank, setup.seen)
    yield Put(setup.hello_of(setup.rank), setup.hello.encoded())
    if setup.rank == setup.leader:
        standing = yield from _lead(setup, until)
        return Outcome.decode(standing)
    if setup.mode == "every_rank":
        yield from _ask_as_well(setup, until)
    missing: tuple[str, ...] = yield Wait((setup.outcome,), until + setup.server_s + setup.grace_s)
    if missing:
        standing = yield from _give_up(setup, [setup.leader])
    else:
        (standing,) = yield GetMany((setup.outcome,))
    return Outcome.decode(standing)


def _lead(setup: Setup, until: float) -> Protocol[bytes]:
    keys = tuple(setup.hello_of(rank) for rank in setup.participants)
    missing: tuple[str, ...] = yield Wait(keys, until)
    if missing:
        gone = set(missing)
        return (yield from _give_up(setup, [r for r, k in zip(setup.participants, keys, strict=True) if k in gone]))
    found: Sequence[bytes] = yield GetMany(keys)
    decided: bytes | None = yield Get(setup.outcome)
    if decided is not None:
        return decided
    read = _judge_releases(setup, found) or _read_hellos(setup, found)
    if isinstance(read, Outcome):
        outcome = read
    else:
        outcome = judge_hellos(read, setup) or (yield from _decide(setup, read))
    standing: bytes = yield PutOnce(setup.outcome, _encoded(outcome, setup))
    return standing


def _give_up(setup: Setup, missing: Sequence[int]) -> Protocol[bytes]:
    """The outcome without `missing`. What they open of the same job in its stead ends with the same abort."""
    elsewhere: Mapping[int, Seen] = yield from seen_elsewhere(missing, setup.seen.key)
    data = _encoded(_without(setup, missing, elsewhere), setup)
    standing: bytes = yield PutOnce(setup.outcome, data)
    if standing == data and Outcome.decode(data).kind == "abort":
        for key in sorted({outcome_key(seen) for seen in elsewhere.values() if seen.is_of_job_of(setup.seen.key)}):
            yield PutOnce(key, data)
    return standing


def _encoded(outcome: Outcome, setup: Setup) -> bytes:
    return replace(outcome, participants=setup.hello.participants).encoded()


def leave_opening(hello: Hello, seen: Seen, *, nonce: str, reason: str, remedy: str) -> Protocol[None]:
    """End the opening `seen` that `hello.rank` takes no part in any more, unless it has ended; waits for nobody.

    The abort stands before the hello, which wakes a leader that has no rank but this one to wait for.
    """
    text = f"rank {hello.rank} left it: {reason}"
    abort = Outcome(kind="abort", nonce=nonce, reason=printable(text), remedy=printable(remedy), odd=(hello.rank,))
    yield PutOnce(outcome_key(seen), abort.encoded())
    yield Put(_hello_key(seen, hello.rank), hello.encoded())


def _decide(setup: Setup, hellos: Sequence[Hello]) -> Protocol[Outcome]:
    """What the leader wants the outcome to be once everybody is there and fits."""
    request = AttemptRequest(
        key=setup.nonce,
        participants=participants_of(hellos),
        options=setup.hello.options,
        topology=topology_of(hellos),
    )
    now: float = yield Now()
    server_until = now + setup.server_s
    try:
        if setup.mode == "leader":
            opened: Opened = yield AskServer(request, server_until)
        else:
            opened = yield from _collect_answers(setup, request, server_until)
    except ServerError as error:
        return (yield from _without_server(setup, hellos, request, error))
    return Outcome(kind="commit", nonce=setup.nonce, source="server", opened=opened)


def _collect_answers(setup: Setup, request: AttemptRequest, until: float) -> Protocol[Opened]:
    """Mode `every_rank`: the leader asks like everyone, then takes the answer that stood in the store first."""
    yield Put(setup.draft, pack(request.to_wire()))
    try:
        opened: Opened = yield AskServer(request, until)
    except ServerError:
        missing: tuple[str, ...] = yield Wait((setup.answer,), until)
        if missing:
            raise
        (standing,) = yield GetMany((setup.answer,))
    else:
        standing = yield PutOnce(setup.answer, pack(opened.to_wire()))
    return Opened.from_wire(unpack(standing), "answer")


def _ask_as_well(setup: Setup, until: float) -> Protocol[None]:
    while True:
        now: float = yield Now()
        missing: tuple[str, ...] = yield Wait((setup.draft,), min(now + _LOOK_S, until + setup.grace_s))
        if not missing:
            break
        # No draft comes where the leader has refused before it, or opens in mode `leader`.
        decided: bytes | None = yield Get(setup.outcome)
        if decided is not None or now >= until + setup.grace_s:
            return
    (draft,) = yield GetMany((setup.draft,))
    yield Sleep(min(setup.jitter_s, setup.server_s / 2))
    now = yield Now()
    try:
        opened: Opened = yield AskServer(AttemptRequest.read(Fields(unpack(draft), "draft")), now + setup.server_s / 2)
    except ServerError:
        return
    yield PutOnce(setup.answer, pack(opened.to_wire()))


def _without_server(
    setup: Setup, hellos: Sequence[Hello], request: AttemptRequest, error: ServerError
) -> Protocol[Outcome]:
    """The epoch that every rank holds, else what the configuration says for this case."""
    if isinstance(error, ServerRefused) and _is_our_mistake(error.problem):
        # Not the server's own trouble but a mistake in the configuration, which no fallback should hide.
        return Outcome(kind="abort", nonce=setup.nonce, reason=error.message, remedy=error.remedy)
    everywhere = set.intersection(*(set(hello.held) for hello in hellos))
    for epoch_id in setup.hello.held:
        if epoch_id in everywhere:
            held: Opened | None = yield LoadEpoch(epoch_id)
            if held is not None and _fits(held.epoch, setup, request):
                return Outcome(kind="commit", nonce=setup.nonce, source="cache", opened=held)
    choice = setup.hello.on_unavailable
    if choice == "unbucketed":
        return Outcome(kind="unbucketed", nonce=setup.nonce, reason=error.message, remedy=error.remedy)
    if choice == "error":
        return Outcome(kind="abort", nonce=setup.nonce, reason=error.message, remedy=error.remedy)
    named = profile_names(setup.hello.options.get("hardware"))
    if named:
        only = f"{error.message}; the figures of {', '.join(map(repr, named))} (option hardware) are stored there alone"
        return _abort(setup, only, remedy=f"{error.remedy}. Without the server, give the figures themselves")
    try:
        epoch = Epoch.build(
            job=setup.job,
            options=complete_options(setup.hello.options, setup.defaults),
            topology=request.topology,
            overrides={},
        )
    except BucketplanError as bad:
        return _abort(setup, str(bad), remedy="Correct the option")
    return Outcome(kind="commit", nonce=setup.nonce, source="local", opened=Opened(epoch=epoch), reason=error.message)


def _is_our_mistake(problem: Problem) -> bool:
    """Whether a planning server says that what was sent is wrong, so that waiting would not cure it.

    What has no problem type of ours, something on the way answered: a proxy, an ingress, a login page. That is a server
    which cannot be reached, as one is that asks for patience.
    """
    return bool(problem.slug) and 400 <= problem.status < 500 and problem.status not in _ASKS_FOR_PATIENCE


def _fits(epoch: Epoch, setup: Setup, request: AttemptRequest) -> bool:
    """Whether an epoch from the cache is of this job as it starts now: its options, its hosts, this capture version."""
    if epoch.job != setup.job or epoch.capture != setup.hello.capture or dict(epoch.topology) != dict(request.topology):
        return False
    return odd_option(epoch.options, setup.hello.options) is None


def odd_option(held: Options, given: Mapping[str, WireValue]) -> str | None:
    """The first option in `given`, as a user gave it, that `held` does not keep; None where `held` keeps all of them.

    A stored profile that is named as `hardware` stands in `held` as its figures. Neither options nor epochs hold the
    name, so that the figures of any profile do: which one they are of, only the server could say.
    """
    tree = held.to_wire()
    for name, value in given.items():
        if name == "hardware" and profile_names(value) and held.hardware is not None:
            continue
        if name not in tree or tree[name] != value:
            return name
    return None


def profile_names(hardware: WireValue) -> tuple[str, ...]:
    """The stored profiles that the option `hardware` names; empty where it holds figures or is wrong."""
    names = [hardware] if isinstance(hardware, str) else hardware
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return ()
    return tuple(str(name) for name in names)


def _judge_releases(setup: Setup, encoded: Sequence[bytes]) -> Outcome | None:
    """The kill switch, then whether one release wrote all hellos: another's may hold what this one cannot read.

    So the keys that are looked at here stand in the hello of every release.
    """
    trees = [_read_tree(data) for data in encoded]
    off = [rank for rank, tree in zip(setup.participants, trees, strict=True) if tree.get("disabled") is True]
    if off:
        return Outcome(
            kind="unbucketed",
            nonce=setup.nonce,
            reason=f"switched off on {describe_ranks(off)}",
            remedy="Unset BUCKETPLAN_DISABLE there to have buckets again",
        )
    for name in _VERSIONS:
        found: dict[str, list[int]] = {}
        for rank, tree in zip(setup.participants, trees, strict=True):
            found.setdefault(str(tree.get(name)), []).append(rank)
        if len(found) > 1:
            return _disagree(setup, f"{name} version", found, "Install one release of bucketplan on every host")
    return None


def _read_tree(data: bytes) -> Mapping[str, WireValue]:
    try:
        tree = unpack(data)
    except DecodeError:
        return {}
    return tree if isinstance(tree, Mapping) else {}


def _read_hellos(setup: Setup, encoded: Sequence[bytes]) -> list[Hello] | Outcome:
    hellos: list[Hello] = []
    for rank, data in zip(setup.participants, encoded, strict=True):
        try:
            hellos.append(Hello.decode(data))
        except DecodeError as error:
            remedy = f"Correct that on rank {rank}, and run one release of bucketplan on every host"
            return _abort(setup, f"what rank {rank} brought cannot be read: {error}", remedy=remedy, odd=[rank])
    return hellos


def judge_hellos(hellos: Sequence[Hello], setup: Setup) -> Outcome | None:
    """What keeps these ranks, all of one release, from opening together; None when nothing does."""
    differing = _differing_options(hellos)
    shown: tuple[tuple[str, Callable[[Hello], str]], ...] = (
        ("participants", lambda hello: hello.participants[:12]),
        ("options", lambda hello: _show(hello.options, differing)),
        ("choice of on_unavailable", lambda hello: hello.on_unavailable),
    )
    for what, value_of in shown:
        found = _by_value(hellos, value_of)
        if len(found) > 1:
            return _disagree(setup, what, found, "Give every rank the same configuration")
    return _judge_groups(hellos, setup)


def _judge_groups(hellos: Sequence[Hello], setup: Setup) -> Outcome | None:
    known = {hello.rank: hello for hello in hellos}
    listed: set[tuple[int, str]] = set()
    for hello in hellos:
        for role, members in hello.groups.items():
            digest = hello.group_digests.get(role)
            for member in members:
                if member not in known:
                    return _abort(
                        setup,
                        f"rank {member} is in group {role!r} of rank {hello.rank}, but is no participant",
                        remedy="Pass every rank that shares a group with another as participant",
                        odd=[hello.rank],
                    )
                if known[member].group_digests.get(role) != digest:
                    return _other_members(setup, role, hello.rank, member)
                listed.add((member, role))
    for hello in hellos:
        for role in hello.group_digests:
            if (hello.rank, role) not in listed:
                return _other_members(setup, role, setup.leader, hello.rank)
    return None


def _other_members(setup: Setup, role: str, rank: int, odd: int) -> Outcome:
    return _abort(
        setup,
        f"group {role!r} has other members on rank {odd} than on rank {rank}",
        remedy="Make the groups in the same order, with the same ranks, on every rank",
        odd=[odd],
    )


def participants_of(hellos: Sequence[Hello]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """The groups of each role, each once, in order of their first ranks."""
    found: dict[str, set[tuple[int, ...]]] = {}
    for hello in hellos:
        for role, members in hello.groups.items():
            found.setdefault(role, set()).add(members)
    return {role: tuple(sorted(groups)) for role, groups in sorted(found.items())}


def topology_of(hellos: Sequence[Hello]) -> dict[str, int]:
    """Hosts that a group of each role spans: the most over its groups, so that it is one figure for the whole job."""
    host_of = {hello.rank: hello.host for hello in hellos}
    return {
        role: max(len({host_of[member] for member in members}) for members in groups)
        for role, groups in participants_of(hellos).items()
    }


def _without(setup: Setup, missing: Sequence[int], elsewhere: Mapping[int, Seen]) -> Outcome:
    """The outcome when ranks are missing: without buckets they may still come and train, else the start has failed."""
    reason = f"nothing came from {describe_ranks(missing)} within {setup.deadline_s:g} s"
    remedy = f"Look at the log of rank {missing[0]}: it died, hangs, or never came here"
    failed = {rank: seen.failure for rank, seen in elsewhere.items() if seen.failure}
    if failed:
        rank, why = next(iter(failed.items()))
        reason += f"; rank {rank} could not open: {why}"
        remedy = f"Correct that on rank {rank}"
    elif elsewhere:
        rank, seen = next(iter(elsewhere.items()))
        reason += f"; rank {rank} was last seen to open with {seen.text}, this rank opens with {setup.seen.text}"
        remedy = f"Give the same job, participants and name on every rank that opens together, or else l{remedy[1:]}"
    kind: OutcomeKind = "unbucketed" if setup.hello.on_unavailable == "unbucketed" else "abort"
    return Outcome(kind=kind, nonce=setup.nonce, reason=reason, remedy=remedy, missing=tuple(missing))


def _disagree(setup: Setup, what: str, found: Mapping[str, Sequence[int]], remedy: str) -> Outcome:
    sides = sorted(found.items(), key=lambda item: (-len(item[1]), item[1]))
    held = "; ".join(
        f"{describe_ranks(ranks)} hold{'s' if len(ranks) == 1 else ''} {shortened(value)}"
        for value, ranks in sides[:_MOST_SIDES]
    )
    if len(sides) > _MOST_SIDES:
        held += f"; and {len(sides) - _MOST_SIDES} more values"
    odd = [rank for _, ranks in sides[1:] for rank in ranks]
    return _abort(setup, f"the ranks do not agree on the {what}: {held}", remedy=remedy, odd=odd)


def _abort(setup: Setup, reason: str, *, remedy: str, odd: Sequence[int] = ()) -> Outcome:
    return Outcome(kind="abort", nonce=setup.nonce, reason=reason, remedy=remedy, odd=tuple(sorted(odd)))


def _by_value(hellos: Sequence[Hello], value_of: Callable[[Hello], object]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for hello in hellos:
        found.setdefault(str(value_of(hello)), []).append(hello.rank)
    return found


def _differing_options(hellos: Sequence[Hello]) -> list[str]:
    names = sorted({name for hello in hellos for name in hello.options})
    return [name for name in names if len({repr(hello.options.get(name, _NOT_GIVEN)) for hello in hellos}) > 1]


def _show(options: Mapping[str, WireValue], names: Sequence[str]) -> str:
    """Those of `names` that are given."""
    return "{" + ", ".join(f"{name}={options[name]!r}" for name in names if name in options) + "}"


def outcome_key(seen: Seen) -> str:
    return f"{seen.key}/outcome"


def _hello_key(seen: Seen, rank: int) -> str:
    return f"{seen.key}/hello/{rank}"
