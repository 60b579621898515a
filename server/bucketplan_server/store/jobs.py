"""Attempts, epochs and reports in the store."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from sqlalchemy import ColumnElement, LargeBinary, RowMapping, Select, func, insert, or_, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from bucketplan_core.attempt import AttemptRequest
from bucketplan_core.epoch import Epoch
from bucketplan_core.fields import Fields
from bucketplan_core.wire import WireValue, digest_of, pack, unpack
from bucketplan_server.access.principal import SEPARATOR
from bucketplan_server.beside import SORTED_REPORTS, beside_now
from bucketplan_server.store.arrivals import Arrival, RefusedReport, sort_arrivals
from bucketplan_server.store.engine import Store
from bucketplan_server.store.events import Cause, append_event
from bucketplan_server.store.known import known_of
from bucketplan_server.store.pieces import pieces
from bucketplan_server.store.plans import ACTIVE_PLANS, IS_OVERRIDE, PLANNER_REVISION, insert_or_ignore
from bucketplan_server.store.tables import active, attempts, epochs, events, job_signatures, reports, revisions

__all__ = [
    "PRUNED",
    "Attempt",
    "Conflict",
    "Pruned",
    "StoredReport",
    "epoch_is_known_in",
    "load_attempt",
    "load_attempts",
    "load_epoch",
    "load_pruned",
    "load_reports",
    "load_reports_of",
    "mark_of_reports",
    "never_served",
    "of_namespace",
    "open_attempt",
    "opened_before",
    "ranks_that_reported",
    "reported_in",
    "store_reports",
]

_OVERRIDES_PER_QUERY = 500
_RANKS_PER_QUERY = 200
_RANKS_PER_LOOK = 1_000
_REPORTS_PER_QUERY = 500
PRUNED = "reports.pruned"
"""Kind of the events that say what retention deleted."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of a job as it was opened."""

    job: str
    attempt: int
    request: bytes
    epoch: str
    opened_ns: int
    actor: str


@dataclass(frozen=True, slots=True)
class Pruned:
    """How many reports of an attempt retention deleted, and when it first did."""

    num_reports: int
    since_ns: int


@dataclass(frozen=True, slots=True)
class StoredReport:
    """A report's canonical bytes, with the rank that it names."""

    rank: int
    encoded: bytes


class Conflict(Exception):
    """A call repeats a name with other content; `path` says where they differ, nothing was changed."""

    def __init__(self, path: str, detail: str) -> None:
        self.path = path
        self.detail = detail
        super().__init__(f"{path}: {detail}")


async def open_attempt(
    store: Store, job: str, request: AttemptRequest, make_epoch: Callable[[Mapping[str, str]], Epoch], cause: Cause
) -> tuple[Attempt, Epoch, bool]:
    """The attempt of this key, numbered and given an epoch if it is new; the flag says whether it is.

    `make_epoch` gets the overrides of the job (signature to decision digest) as they are now and makes the epoch of it.
    Raises `Conflict` when the key was used with another body.
    """
    held = request.held_epoch
    body = _body_of(request)
    async with store.write() as connection:
        known = await _opened_under(connection, job, request)
        if known is not None:
            return *known, False
        epoch = held or make_epoch(await _overrides(connection, job))
        last = await connection.scalar(select(func.max(attempts.c.attempt)).where(attempts.c.job == job))
        now = time.time_ns()
        await connection.execute(
            insert_or_ignore(connection, epochs).values(epoch=epoch.id, content=epoch.encoded, created_ns=now)
        )
        row = {
            "job": job,
            "attempt": (last or 0) + 1,
            "key": request.key,
            "request": body,
            "epoch": epoch.id,
            "opened_ns": now,
            "actor": cause.actor,
        }
        await connection.execute(insert(attempts).values(row))
        await append_event(
            connection,
            "attempt.opened",
            cause,
            at_ns=now,
            job=job,
            body={
                "adopted": held is not None,
                "attempt": (last or 0) + 1,
                "epoch": epoch.id,
                "request": digest_of(body),
            },
        )
    attempt = Attempt(job=job, attempt=(last or 0) + 1, request=body, epoch=epoch.id, opened_ns=now, actor=cause.actor)
    return attempt, epoch, True


async def opened_before(store: Store, job: str, request: AttemptRequest) -> tuple[Attempt, Epoch] | None:
    """The attempt that this key opened, None for a new one; raises `Conflict` as `open_attempt` does."""
    async with store.read() as connection:
        return await _opened_under(connection, job, request)


async def _opened_under(connection: AsyncConnection, job: str, request: AttemptRequest) -> tuple[Attempt, Epoch] | None:
    held = request.held_epoch
    query = select(attempts, epochs.c.content).join(epochs).where(attempts.c.job == job)
    known = (await connection.execute(query.where(attempts.c.key == request.key))).mappings().first()
    if known is None:
        return None
    if known["request"] != _body_of(request):
        raise Conflict("body.key", f"attempt {known['attempt']} was opened under this key with another body")
    if held is not None and held.id != known["epoch"]:
        raise Conflict("body.held_epoch", f"attempt {known['attempt']} was opened under epoch {known['epoch']}")
    return _attempt(known), Epoch.decode(known["content"])


def _body_of(request: AttemptRequest) -> bytes:
    return pack(replace(request, held_epoch=None).to_wire())


async def _overrides(connection: AsyncConnection, job: str) -> dict[str, str]:
    """Decision digests of the signatures whose plan for this job is not the planner's own.

    Only signatures that the job has reported, or that somebody activated for it by name, count: what is activated for
    others must not change this job's epoch.
    """
    reported = select(job_signatures.c.signature).where(job_signatures.c.job == job)
    mine = select(active.c.signature).where(active.c.job == job)
    query = (
        select(active.c.signature, revisions.c.digest, IS_OVERRIDE.label("is_override"))
        .select_from(ACTIVE_PLANS)
        .where(
            active.c.job.in_(("", job)),
            or_(active.c.signature.in_(reported), active.c.signature.in_(mine)),
        )
        # The job's own choice comes last and wins over the one for everybody.
        .order_by(active.c.job)
    )
    chosen = {row.signature: row for row in await connection.execute(query)}
    return {signature: row.digest for signature, row in chosen.items() if row.is_override}


async def load_epoch(store: Store, epoch: str) -> Epoch | None:
    async with store.read() as connection:
        content = await connection.scalar(select(epochs.c.content).where(epochs.c.epoch == epoch))
    return None if content is None else Epoch.decode(content)


async def epoch_is_known_in(store: Store, epoch: str, namespace: str) -> bool:
    """Whether a job of `namespace` opened an attempt under this epoch."""
    query = select(attempts.c.job).where(attempts.c.epoch == epoch, of_namespace(attempts.c.job, namespace)).limit(1)
    async with store.read() as connection:
        return await connection.scalar(query) is not None


async def never_served(store: Store, epoch: Epoch, namespace: str | None, *, only: str | None = None) -> frozenset[str]:
    """Signatures for which `epoch` fixes a revision that was never active, for everyone or for one of its jobs.

    Its jobs are those that were opened under it, in `namespace` where given. Only an epoch that was adopted has such;
    revisions that are not stored are among them. With `only` nothing but that signature is looked at.
    """
    mine = select(attempts.c.job).where(attempts.c.epoch == epoch.id)
    if namespace is not None:
        mine = mine.where(of_namespace(attempts.c.job, namespace))
    fixed = {one.signature: one.digest for one in epoch.overrides if only in (None, one.signature)}
    found: set[str] = set()
    # A leader may adopt thousands of overrides: few queries, and between two pieces others use the store.
    for piece in pieces(sorted(fixed), _OVERRIDES_PER_QUERY):
        async with store.read() as connection:
            stored = select(revisions.c.signature, revisions.c.revision, revisions.c.digest).where(
                revisions.c.signature.in_(piece), revisions.c.digest.in_({fixed[signature] for signature in piece})
            )
            numbers: dict[str, set[int]] = {signature: set() for signature in piece}
            for row in await connection.execute(stored):
                if row.digest == fixed[row.signature]:
                    numbers[row.signature].add(row.revision)
            left = {signature for signature in piece if PLANNER_REVISION not in numbers[signature]}
            activations = select(events.c.signature, events.c.body).where(
                events.c.signature.in_({signature for signature in left if numbers[signature]}),
                events.c.kind == "plan.activated",
                or_(events.c.job.is_(None), events.c.job.in_(mine)),
            )
            for event in await connection.execute(activations):
                if Fields(unpack(event.body), "event").raw("revision") in numbers[event.signature]:
                    left.discard(event.signature)
        found |= left
    return frozenset(found)


def reported_in(namespace: str) -> Select[tuple[str]]:
    """Signatures that jobs of `namespace` have reported."""
    return select(job_signatures.c.signature).where(of_namespace(job_signatures.c.job, namespace))


def of_namespace(job: ColumnElement[str], namespace: str) -> ColumnElement[bool]:
    """Whether a column's job is in `namespace`. Not LIKE: its wildcards are letters of real names."""
    prefix = f"{namespace}{SEPARATOR}"
    return func.substr(job, 1, len(prefix)) == prefix


async def load_attempt(store: Store, job: str, attempt: int) -> Attempt | None:
    async with store.read() as connection:
        query = select(attempts).where(attempts.c.job == job, attempts.c.attempt == attempt)
        row = (await connection.execute(query)).mappings().first()
    return None if row is None else _attempt(row)


async def load_attempts(store: Store, job: str, *, before: int | None, limit: int) -> list[Attempt]:
    """Attempts of a job, the newest first, those below `before` where it is given."""
    query = select(attempts).where(attempts.c.job == job).order_by(attempts.c.attempt.desc()).limit(limit)
    if before is not None:
        query = query.where(attempts.c.attempt < before)
    async with store.read() as connection:
        return [_attempt(row) for row in (await connection.execute(query)).mappings()]


async def store_reports(
    store: Store, job: str, attempt: int, arrived: Sequence[Arrival], cause: Cause
) -> tuple[int, list[RefusedReport | None]]:
    """Store what is new of these reports, in one transaction with one event.

    Answers how many were new, and for each report why it was refused, see `sort_arrivals`.
    """
    now = time.time_ns()
    async with store.write() as connection:
        known = await known_of(connection, job, attempt, arrived)
        found = await beside_now(len(arrived) > SORTED_REPORTS or bool(known.lists), sort_arrivals, known, arrived)
        if found.new:
            rows, listed = await beside_now(len(found.new) > SORTED_REPORTS, _rows, job, attempt, found.new, now)
            # In parts: the loop prepares the parameters of a statement, and others wait for it meanwhile.
            for piece in pieces(rows, _REPORTS_PER_QUERY):
                await connection.execute(insert(reports), piece)
            for signature in sorted({report.signature for report, _ in found.new if report.signature is not None}):
                named = insert_or_ignore(connection, job_signatures).values(job=job, signature=signature)
                await connection.execute(named)
            body: dict[str, WireValue] = {"attempt": attempt, "reports": listed}
            await append_event(connection, "reports.received", cause, at_ns=now, job=job, body=body)
    return len(found.new), found.refused


def _rows(
    job: str, attempt: int, new: Sequence[Arrival], now_ns: int
) -> tuple[list[dict[str, str | int | bytes]], list[WireValue]]:
    """The rows of reports, and how their event names them."""
    rows: list[dict[str, str | int | bytes]] = []
    listed: list[WireValue] = []
    for report, encoded in new:
        rows.append(
            {
                "job": job,
                "attempt": attempt,
                "rank": report.rank,
                "slot": report.slot,
                "ordinal": report.ordinal,
                "report": encoded,
                "received_ns": now_ns,
            }
        )
        listed.append([report.rank, report.slot, report.ordinal, digest_of(encoded)])
    return rows, listed


async def mark_of_reports(store: Store, job: str, attempt: int) -> tuple[int, int]:
    """How many reports an attempt has and when the last of them came: equal as long as its state does not change.

    Their number alone would not do: as many may come again after old ones were deleted.
    """
    async with store.read() as connection:
        query = select(func.count(), func.max(reports.c.received_ns)).where(
            reports.c.job == job, reports.c.attempt == attempt
        )
        count, last_ns = (await connection.execute(query)).one()
        return int(count), int(last_ns or 0)


async def load_pruned(store: Store, job: str, attempt: int) -> Pruned | None:
    """What retention deleted of an attempt's reports, None if nothing: the log says so."""
    # The body is canonical and `attempt` its first key, so that the database finds the few events that matter.
    start = pack({"attempt": attempt, "num_reports": 0, "signatures": []})
    start = start[: start.index(b"num_reports")]
    query = (
        select(events.c.at_ns, events.c.body)
        .where(events.c.job == job, events.c.kind == PRUNED)
        .where(func.substr(events.c.body, 1, len(start), type_=LargeBinary) == start)
        .order_by(events.c.seq)
    )
    async with store.read() as connection:
        rows = (await connection.execute(query)).all()
    if not rows:
        return None
    numbers = [Fields(unpack(row.body), "event").integer("num_reports") for row in rows]
    return Pruned(num_reports=sum(numbers), since_ns=rows[0].at_ns)


async def load_reports(store: Store, job: str, attempt: int) -> AsyncIterator[list[StoredReport]]:
    """Every report of an attempt as it was stored, by rank, slot and ordinal, in pieces of a transaction each.

    On SQLite reading holds the one connection, and all reports of a large attempt would hold it for seconds.
    """
    name = (reports.c.rank, reports.c.slot, reports.c.ordinal)
    query = (
        select(*name, reports.c.report)
        .where(reports.c.job == job, reports.c.attempt == attempt)
        .order_by(*name)
        .limit(_REPORTS_PER_QUERY)
    )
    last: tuple[int, str, int] | None = None
    while True:
        async with store.read() as connection:
            behind = query if last is None else query.where(tuple_(*name) > tuple_(*last))
            rows = (await connection.execute(behind)).all()
        if rows:
            yield [StoredReport(row.rank, row.report) for row in rows]
        if len(rows) < _REPORTS_PER_QUERY:
            return
        last = (rows[-1].rank, rows[-1].slot, rows[-1].ordinal)


async def ranks_that_reported(
    store: Store, job: str, attempt: int, slot: str, ordinal: int, ranks: Collection[int] | None
) -> dict[int, int]:
    """When each of these ranks that has reported this graph did (ns), of any rank where `ranks` is None."""
    graph = select(reports.c.rank, reports.c.received_ns).where(*_of_graph(job, attempt, slot, ordinal))
    asked = [None] if ranks is None else pieces(sorted(ranks), _RANKS_PER_LOOK)
    found: dict[int, int] = {}
    for part in asked:
        query = graph if part is None else graph.where(reports.c.rank.in_(part))
        async with store.read() as connection:
            found |= {row.rank: row.received_ns for row in await connection.execute(query)}
    return found


async def load_reports_of(
    store: Store, job: str, attempt: int, slot: str, ordinal: int, ranks: Collection[int]
) -> AsyncIterator[list[StoredReport]]:
    """What these ranks reported of one graph, in pieces of a transaction each."""
    graph = select(reports.c.rank, reports.c.report).where(*_of_graph(job, attempt, slot, ordinal))
    for part in pieces(sorted(ranks), _RANKS_PER_QUERY):
        async with store.read() as connection:
            rows = (await connection.execute(graph.where(reports.c.rank.in_(part)))).all()
        yield [StoredReport(row.rank, row.report) for row in rows]


def _of_graph(job: str, attempt: int, slot: str, ordinal: int) -> tuple[ColumnElement[bool], ...]:
    of_attempt = (reports.c.job == job, reports.c.attempt == attempt)
    return (*of_attempt, reports.c.slot == slot, reports.c.ordinal == ordinal)


def _attempt(row: RowMapping) -> Attempt:
    return Attempt(
        job=row["job"],
        attempt=row["attempt"],
        request=row["request"],
        epoch=row["epoch"],
        opened_ns=row["opened_ns"],
        actor=row["actor"],
    )
