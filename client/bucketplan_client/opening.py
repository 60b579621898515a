"""`open_attempt`: before any graph is built, the ranks of a job agree on everything that can change a plan.

    attempt = open_attempt(PlanClient(), job="llama", groups={"fsdp": dist.group.WORLD}, options={"strategy": "auto"})
    bucketing = FsdpBucketingPass(attempt.plans, options=attempt.options, ...)

Afterwards (signature, epoch) -> plan is a function, whatever becomes of the server, and no rank waits for another. The
protocol is in `bucketplan_client.opening_protocol`; this module runs it on the job's store and the server.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from bucketplan_client.agreement import GroupView, Report, agree_in_time, withdraw_in_time
from bucketplan_client.arguments import BadArgument, is_unicode, printable
from bucketplan_client.background import in_background
from bucketplan_client.cache import DEFAULT_CACHE, DefaultCache, PlanCache, default_cache
from bucketplan_client.environment import disabled_by_environment, job_from_environment
from bucketplan_client.errors import (
    AgreementError,
    ClientError,
    CorruptAnswer,
    DeadlineExceeded,
    OpeningAborted,
    ServerUnreachable,
    Where,
)
from bucketplan_client.evidence import Evidence, abort_process
from bucketplan_client.fallback import DEFAULT_DEADLINE_S, AttemptPlans
from bucketplan_client.jitter import uniform
from bucketplan_client.membership import GroupLike, is_distributed, this_rank
from bucketplan_client.opened_epochs import load_epoch, read_opened, remember, verify_overrides
from bucketplan_client.opening_arguments import (
    is_rank,
    read_groups,
    read_options,
    refuse_bad_choices,
    refuse_bad_parts,
    refuse_bad_place,
    refuse_bad_seconds,
    store_of,
)
from bucketplan_client.opening_places import PREFIX, Openings, Seen, leave_word
from bucketplan_client.opening_protocol import (
    AskServer,
    Hello,
    LoadEpoch,
    OnUnavailable,
    Opened,
    OpenMode,
    Outcome,
    Setup,
    Sleep,
    Source,
    leave_opening,
    odd_option,
    open_protocol,
)
from bucketplan_client.reopening import ServerAttempt
from bucketplan_client.reports import Reporter
from bucketplan_client.rewrite import REWRITER_VERSION
from bucketplan_client.store import LONGEST_CALL_S, JobStore, drive, drive_apart
from bucketplan_client.transport import PlanClient, schema_refused
from bucketplan_core.attempt import OPEN_SLOT, AttemptRequest, RankReport
from bucketplan_core.collectives import Options
from bucketplan_core.epoch import Epoch
from bucketplan_core.errors import BucketplanError, DecodeError, SchemaVersionError, describe_ranks
from bucketplan_core.request import CAPTURE_VERSION, SCHEMA_VERSION
from bucketplan_core.wire import WireValue, digest_of, pack

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

__all__ = ["Attempt", "open_attempt"]

_LOG = logging.getLogger(__name__)

_SERVER_SLACK_S = 0.5
"""How long after its deadline a call to the server may still end by itself, with the error that says more."""
_LEAST_CALL_S = 5.0
"""A call of the store takes milliseconds, on a busy host some more."""
_HOST_VARIABLE = "BUCKETPLAN_HOST"
_openings = Openings()


class Attempt:
    """One opened attempt of a job, as one rank holds it; every rank of `participants` holds the same.

    `bucketed` is False where the attempt runs without buckets (`reason` says why): `epoch`, `options` and `plans` are
    then None. `uuid` is what compile caches must be keyed by. `number` is the server's, None where it was not asked.
    """

    def __init__(
        self,
        *,
        job: str,
        rank: int,
        participants: tuple[int, ...],
        outcome: Outcome,
        store: JobStore,
        client: PlanClient | None,
        cache: PlanCache | None,
        groups: Mapping[str, tuple[int, ...]],
        where: Where,
        on_mismatch: Callable[[ClientError], None],
        plan_s: float,
        asked: AttemptRequest | None = None,
    ) -> None:
        opened = outcome.opened
        self.job = job
        self.rank = rank
        self.participants = participants
        self.bucketed = opened is not None
        self.reason = outcome.reason
        self.source: Source | None = outcome.source if opened is not None else None
        self.groups = dict(groups)
        self.number = None if opened is None else opened.attempt
        self.epoch: Epoch | None = None if opened is None else opened.epoch
        self.options: Options | None = None if opened is None else opened.epoch.options
        self.topology: dict[str, int] = {} if opened is None else dict(opened.epoch.topology)
        self.uuid = uuid_of(outcome)
        self.store = store.scoped(outcome.nonce or "opening")
        self.where = where
        self.plans: AttemptPlans | None = None
        at_server: ServerAttempt | None = None
        if client is not None and opened is not None and opened.attempt is not None:
            at_server = ServerAttempt(
                client,
                job=job,
                number=opened.attempt,
                epoch=opened.epoch,
                store=self.store,
                num_ranks=len(participants),
            )
            if asked is not None:
                at_server.remember(asked)
        if opened is not None:
            self.plans = AttemptPlans(
                opened,
                source=outcome.source,
                client=client,
                cache=cache,
                store=self.store,
                where=where,
                deadline_s=plan_s,
                at_server=at_server,
            )
        self.evidence = Evidence(self.store, rank=rank, where=where, on_mismatch=on_mismatch)
        self.ordinals: Counter[str] = Counter()
        """How many graphs of each slot this rank has reported."""
        self.reported: set[tuple[str, str]] = set()
        """Those of them that are compared, by slot and digests."""
        self.executions = itertools.count()
        """Numbers of the graphs that are compared right before they first run."""
        self._names: Counter[str] = Counter()
        self._reporter: Reporter | None = None
        if client is not None and at_server is not None:
            self._reporter = Reporter(client, job=job, attempt=at_server.number, at_server=at_server, where=where)
            self.report(RankReport(rank=rank, slot=OPEN_SLOT, uuid=self.uuid, members=self.groups))

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = repr(self.epoch) if self.bucketed else f"unbucketed: {self.reason}"
        return f"Attempt({self.job!r}, number {self.number}, {state})"

    def next_name(self, kind: str) -> str:
        """``kind/0``, ``kind/1`` ...: names in the attempt's store for what all ranks make in the same order."""
        self._names[kind] += 1
        return f"{kind}/{self._names[kind] - 1}"

    def report(self, report: RankReport) -> None:
        """Send `report` to the server in the background, where there is one."""
        if self._reporter is not None:
            self._reporter.send(report)

    def compare(self, what: str, value: str, *, deadline_s: float = 120.0) -> None:
        """Return once every participant brought the same `value` of `what`; else raise `AgreementError`, alike on all.

        For what the opening does not know, such as the fingerprint of a compiler pass. Call it on every participant.
        A rank that is interrupted here, or fails, tells the others. Each call is a comparison of its own, also of what
        was compared before.
        """
        report, key = self._report_on(value), self.next_name(f"compare/{what}")
        try:
            drive(agree_in_time(report, key=key, deadline_s=deadline_s, where=self.where, what=what), self.store)
        except AgreementError:
            raise
        except BaseException as error:
            self._withdraw(key, what, error)
            raise

    def withdraw(self, what: str, error: BaseException) -> None:
        """Take part in the comparison of `what` with `error` in place of a value: the others raise `RankFailed`.

        For a rank that cannot come to it. Takes a few seconds at most, whatever the store does, and raises nothing.
        """
        self._withdraw(self.next_name(f"compare/{what}"), what, error)

    def _withdraw(self, key: str, what: str, error: BaseException) -> None:
        reason = error.message if isinstance(error, ClientError) else f"{type(error).__name__}: {error}"
        report = replace(self._report_on(None), failure=f"it left the comparison of the {what}: {reason}")
        withdraw_in_time(self.store, report, keys=(key,))

    def _report_on(self, value: str | None) -> Report:
        view = GroupView(role="participants", members=self.participants, digest=value)
        return Report(rank=self.rank, groups=(view,))

    def compare_first_execution(
        self, slot: str, digests: Mapping[str, str], *, deadline_s: float = 300.0, signature: str | None = None
    ) -> None:
        """Before graph `slot` runs for the first time, compare its group digests (by role) within each group.

        It catches what a compile cache replays, since the graph runs on every rank whether a hook was called or not.
        Each call is a comparison of its own, also of a `slot` that was compared before. Raises `AgreementError`, alike
        on all ranks of a group.
        """
        views = tuple(
            GroupView(role=role, members=members, digest=digests.get(role)) for role, members in self.groups.items()
        )
        report = Report(rank=self.rank, groups=views, signature=signature)
        key, what = self.next_name(f"first/{slot}"), "collectives of the graph"
        try:
            drive(agree_in_time(report, key=key, deadline_s=deadline_s, where=self.where, what=what), self.store)
        except Exception:
            raise
        except BaseException as error:
            # The others would wait for a rank that was interrupted here until their deadline.
            reason = f"it was interrupted before graph {slot} ran: {type(error).__name__}: {error}"
            withdraw_in_time(self.store, replace(report, failure=reason), keys=(key,))
            raise

    def close(self) -> None:
        """Stop watching and send the reports that are waiting."""
        self.evidence.close()
        if self._reporter is not None:
            self._reporter.close()
            self._reporter = None


def uuid_of(outcome: Outcome) -> str:
    """What ranks of one attempt have in common and another attempt with other plans has not; 64 hex characters.

    The epoch's content (options, overrides and capture version among it), the rewriter, and whether there are buckets
    at all. Two attempts with one epoch share it, so that a restart finds its compile cache warm; except where plans
    were made from a profile that only one attempt has in common.
    """
    if outcome.opened is None:
        return digest_of(pack({"mode": "unbucketed"}))
    epoch = outcome.opened.epoch
    # Ranks that find no server plan what they miss from a profile of this attempt, which no compile cache may replay.
    own_profile = outcome.source != "server" and _uses_profile(epoch.options.planner)
    return digest_of(
        pack(
            {
                "epoch": epoch.id,
                "mode": "bucketed",
                "profile": outcome.nonce if own_profile else "bound",
                "rewriter": REWRITER_VERSION,
                "schema": SCHEMA_VERSION,
            }
        )
    )


def _uses_profile(version: str) -> bool:
    from bucketplan_core.planners import find_planner

    return find_planner(version).uses_profile


def _defaults() -> Options:
    from bucketplan_core.planners import current_version

    return Options(strategy="size", planner=current_version("size"))


def open_attempt(
    client: PlanClient | None,
    *,
    groups: Mapping[str, GroupLike],
    job: str | None = None,
    options: Mapping[str, WireValue] | None = None,
    participants: Sequence[int] | None = None,
    mode: OpenMode = "leader",
    on_unavailable: OnUnavailable = "local",
    deadline_s: float = 300.0,
    server_s: float = 60.0,
    grace_s: float = 10.0,
    plan_s: float = DEFAULT_DEADLINE_S,
    store: Store | None = None,
    cache: PlanCache | DefaultCache | None = DEFAULT_CACHE,
    defaults: Options | None = None,
    disabled: bool | None = None,
    rank: int | None = None,
    name: str | None = None,
    on_mismatch: Callable[[ClientError], None] = abort_process,
) -> Attempt:
    """Open an attempt of `job` together with the other ranks; call it on every participant, before any graph is built.

    `groups` are this rank's groups that hold parameters, by role. `participants` are the ranks that share such a group,
    directly or through others: one pipeline stage, not the world, where there are stages (default: all ranks).
    `options` are planning options that the user fixes; the server's defaults, or `defaults` (`size`) without a
    server, complete them. With `client` None there is no server. The outcome is one of: a commit, no buckets at all
    (`Attempt.bucketed` is False), or `OpeningAborted` on every rank. `on_unavailable` says which where the server
    cannot be reached and not every rank holds an epoch of this job in its `cache`, which is by default that of the host
    (``BUCKETPLAN_CACHE``), where there is a server; None switches it off on this rank. `disabled` defaults to
    ``BUCKETPLAN_DISABLE``; one rank is enough. `plan_s` bounds one look for a plan at the server. `name` tells this
    opening from others of this job and of these participants on the same store, and must be new and the same on all of
    them; without it each process counts its openings of this job and of these participants, so that sub-groups may open
    attempts of their own before or after.

    Raises `BadArgument` before anything else, of which the other ranks are told; `OpeningAborted` naming missing or odd
    ranks, and `StoreFailed`, both within `deadline_s` plus `server_s` and a few seconds; where the store goes silent at
    the end of that, after up to `deadline_s` more, at most a minute. Whatever else ends it on one rank, an interrupt
    too, ends it on all. The first participant's `mode` decides for all.
    """
    rank = this_rank() if rank is None else rank
    if isinstance(cache, DefaultCache):
        # Without a server there is nothing to bridge the absence of.
        cache = None if client is None else default_cache()
    where = Where(rank=rank, job=job, server=getattr(client, "address", None))
    members: dict[str, tuple[int, ...]] = {}
    wrong: BadArgument | None = None
    try:
        job = job or job_from_environment()
        where = where.at(job=job)
        refuse_bad_place(job=job, rank=rank, participants=participants, name=name)
        base = store_of(store)
        try:
            members = read_groups(groups, rank)
        except BadArgument as error:
            wrong = error  # raised below, once the other ranks can be told
        ranks = tuple(sorted(participants)) if participants is not None else _all_ranks(members, rank)
        if rank not in ranks:
            raise BadArgument("rank", rank, f"one of the participants ({describe_ranks(ranks)})")
    except BadArgument as error:
        _leave_word(store, rank, where, error)
        raise error.located(where) from error.__cause__
    place = _openings.place(job, ranks, rank=rank, name=name)
    seen = Seen.at(place)
    root = JobStore(base, prefix=f"bucketplan/{quote(job, safe='')}", where=where)
    opening_store = JobStore(base, prefix=PREFIX, where=where, call_s=_longest_call_s(deadline_s))
    nonce = uuid.uuid4().hex
    hello = Hello(
        rank=rank,
        capture=CAPTURE_VERSION,
        rewriter=REWRITER_VERSION,
        schema=SCHEMA_VERSION,
        participants=place.digest,
    )
    try:
        if wrong is not None:
            raise wrong
        refuse_bad_choices(mode=mode, on_unavailable=on_unavailable, cache=cache)
        refuse_bad_parts(client=client, defaults=defaults, on_mismatch=on_mismatch)
        given = read_options(options)
        refuse_bad_seconds(deadline_s=deadline_s, server_s=server_s, grace_s=grace_s, plan_s=plan_s)
        setup = Setup(
            job=job,
            participants=ranks,
            nonce=nonce,
            defaults=defaults or _defaults(),
            mode=mode,
            deadline_s=deadline_s,
            server_s=server_s,
            grace_s=grace_s,
            seen=seen,
            hello=replace(
                hello,
                host=_host(),
                options=given,
                on_unavailable=on_unavailable,
                disabled=disabled_by_environment() if disabled is None else disabled,
                groups=members,
                held=tuple(cache.epochs(job)) if cache is not None else (),
            ),
        )
        asked: list[AttemptRequest] = []
        outcome = drive(
            open_protocol(setup),
            opening_store,
            other=lambda step: _perform(step, job, client, cache, where, grace_s, asked),
        )
    except BaseException as error:
        _leave(opening_store, hello, seen, nonce, error)
        if isinstance(error, BucketplanError):
            typed = _typed(error, where)
            raise typed from typed.__cause__
        raise
    try:
        _verify(outcome, setup)
    except BucketplanError as error:
        raise _typed(error, where) from error
    if outcome.kind == "abort":
        raise OpeningAborted(
            outcome.reason, remedy=outcome.remedy, where=where, missing=outcome.missing, odd=outcome.odd
        )
    if cache is not None and outcome.opened is not None:
        remember(cache, outcome.opened)
    attempt = Attempt(
        job=job,
        rank=rank,
        participants=ranks,
        outcome=outcome,
        store=root,
        client=client if outcome.source == "server" else None,
        cache=cache,
        groups=members,
        where=where,
        on_mismatch=on_mismatch,
        plan_s=plan_s,
        asked=asked[0] if asked and rank == ranks[0] else None,
    )
    _tell(attempt, outcome)
    return attempt


def _longest_call_s(deadline_s: object) -> float:
    """How long the opening waits for one answer of a store that stands still; bad deadlines are refused elsewhere."""
    if not isinstance(deadline_s, int | float):
        return LONGEST_CALL_S
    # In this order, so that what is no number at all is the least.
    return max(_LEAST_CALL_S, min(LONGEST_CALL_S, deadline_s))


def _typed(error: BucketplanError, where: Where) -> ClientError:
    if isinstance(error, ClientError):
        return error.located(where)
    refused = OpeningAborted(
        f"its outcome cannot be adopted: {error}",
        remedy="Install one release of bucketplan on every host and start the job again",
        where=where,
    )
    refused.__cause__ = error
    return refused


def _leave(store: JobStore, hello: Hello, seen: Seen, nonce: str, error: BaseException) -> None:
    """Tell the ranks that wait for this one why it leaves, on a connection of its own, or give up; raises nothing."""
    what = error.message if isinstance(error, ClientError) else f"{type(error).__name__}: {error}"
    remedy = error.remedy if isinstance(error, BadArgument) else f"Look at the log of rank {hello.rank}"
    leaving = leave_opening(hello, seen, nonce=nonce, reason=what, remedy=remedy)
    drive_apart(leaving, store, told="leaves the opening")


def _leave_word(store: Store | None, rank: int, where: Where, error: BadArgument) -> None:
    """Say why this rank has no place in any opening, for those who will miss it; raises nothing.

    Which opening they wait in, nobody can tell here: they read it at their deadline.
    """
    if not is_rank(rank):
        return
    try:
        base = store_of(store)
    except BadArgument:
        return  # there is nobody else
    word = leave_word(rank, Seen(failure=error.message))
    drive_apart(word, JobStore(base, prefix=PREFIX, where=where), told="has no place in the opening")


def _all_ranks(members: Mapping[str, tuple[int, ...]], rank: int) -> tuple[int, ...]:
    if is_distributed():
        import torch.distributed as dist

        return tuple(range(dist.get_world_size()))
    return tuple(sorted({rank, *(member for ranks in members.values() for member in ranks)}))


def _perform(
    step: Any,
    job: str,
    client: PlanClient | None,
    cache: PlanCache | None,
    where: Where,
    grace_s: float,
    asked: list[AttemptRequest],
) -> Any:
    match step:
        case AskServer(request, until):
            asked.append(request)
            return _ask_in_time(
                lambda: ask_server(client, job, request, until=until, where=where),
                until=until + min(_SERVER_SLACK_S, grace_s / 2),
                where=where,
            )
        case LoadEpoch(epoch_id):
            return load_epoch(cache, job, epoch_id)
        case Sleep(most_s):
            time.sleep(uniform(0.0, most_s))
            return None
    raise AssertionError(f"unknown step {step!r}")


def _ask_in_time(ask: Callable[[], Opened], *, until: float, where: Where) -> Opened:
    """What `ask` returns; raises `DeadlineExceeded` at `until`, whatever `ask` is doing then.

    The other ranks wait for the leader no longer than the protocol says. A transport that keeps to no deadline must
    cost the job its server, not its start.
    """
    started = time.monotonic()
    future = in_background(ask, name="bucketplan-open")
    try:
        return future.result(max(0.0, until - started))
    except TimeoutError as error:
        if future.done():
            raise
        elapsed_s = time.monotonic() - started
        raise DeadlineExceeded("the call did not return by itself", elapsed_s=elapsed_s, where=where) from error


def ask_server(client: PlanClient | None, job: str, request: AttemptRequest, *, until: float, where: Where) -> Opened:
    """Open an attempt at the server; raises `ServerError`. Epoch and overrides are verified against their digests."""
    if client is None:
        raise ServerUnreachable("no server is configured", num_tries=0, where=where)
    answer = client.post(
        f"/v1/jobs/{quote(job, safe='')}/attempts",
        request.to_wire(),
        deadline_s=max(0.0, until - time.monotonic()),
    )
    try:
        return read_opened(answer.body)
    except SchemaVersionError as error:
        raise schema_refused(error, num_tries=answer.num_tries, where=where) from error
    except BucketplanError as error:
        raise CorruptAnswer(str(error), num_tries=answer.num_tries, where=where) from error


def _verify(outcome: Outcome, setup: Setup) -> None:
    """Whether this rank can do what was decided: it may have come late, restarted, with another release."""
    if outcome.kind != "abort" and outcome.participants != setup.hello.participants:
        ranks = describe_ranks(setup.participants)
        raise DecodeError("outcome.participants", outcome.participants, f"this rank opens with {ranks}")
    if outcome.opened is None:
        return
    epoch = outcome.opened.epoch
    if epoch.capture != setup.hello.capture:
        raise DecodeError("epoch.capture", epoch.capture, f"this release describes graphs by version {CAPTURE_VERSION}")
    if epoch.job != setup.job:
        raise DecodeError("epoch.job", epoch.job, f"this rank opens job {setup.job!r}")
    odd = odd_option(epoch.options, setup.hello.options)
    if odd is not None:
        held, given = epoch.options.to_wire().get(odd), setup.hello.options[odd]
        raise DecodeError(f"epoch.options.{odd}", held, f"this rank was configured with {given!r}")
    verify_overrides(outcome.opened)


def _host() -> str:
    """What tells this host from others; raises `BadArgument` for a ``BUCKETPLAN_HOST`` that is no text."""
    given = os.environ.get(_HOST_VARIABLE, "")
    if not is_unicode(given):
        raise BadArgument(_HOST_VARIABLE, given, "a name in valid Unicode")
    return given or printable(socket.gethostname())


def _tell(attempt: Attempt, outcome: Outcome) -> None:
    if not attempt.bucketed:
        _LOG.warning("job %s runs without buckets: %s. %s", attempt.job, outcome.reason, outcome.remedy)
        return
    assert attempt.epoch is not None
    _LOG.info(
        "opened attempt %s of job %s: epoch %s from %s, %s, %d overrides",
        attempt.number if attempt.number is not None else "without a number",
        attempt.job,
        attempt.epoch.id[:12],
        outcome.source,
        attempt.epoch.options.planner,
        len(attempt.epoch.overrides),
    )
    if outcome.source != "server":
        _LOG.warning("the planning server was not there: %s", outcome.reason or "its epoch came from the cache")
