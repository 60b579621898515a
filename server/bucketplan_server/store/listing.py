"""Signatures as people look for them: by job, name, group, strategy and time, a page at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, literal, select, tuple_

from bucketplan_server.store.engine import Store, plain_row
from bucketplan_server.store.jobs import reported_in
from bucketplan_server.store.tables import active, job_signatures, revisions, signatures

__all__ = ["PlanFilter", "list_plans"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFilter:
    """What to list; a field that is None leaves everything through.

    `job` is a name as stored; of `namespace` is what its jobs have reported.
    `parameter` and `module` are parts of a name, `group` a whole role. `since_ns` (included) and `until_ns` bound when
    the signature was stored.
    """

    job: str | None = None
    namespace: str | None = None
    signature_prefix: str | None = None
    parameter: str | None = None
    module: str | None = None
    group: str | None = None
    strategy: str | None = None
    since_ns: int | None = None
    until_ns: int | None = None


async def list_plans(
    store: Store, wanted: PlanFilter, *, before: tuple[int, str] | None, limit: int
) -> list[dict[str, Any]]:
    """The newest signatures first, those older than `before` (time and signature of the last one of a page)."""
    columns = ("signature", "created_ns", "actor", "strategy", "phase", "num_candidates", "groups", "profile")
    query = (
        select(*(signatures.c[name] for name in columns))
        .order_by(signatures.c.created_ns.desc(), signatures.c.signature.desc())
        .limit(limit)
    )
    if wanted.job is not None:
        reported = select(job_signatures.c.signature).where(job_signatures.c.job == wanted.job)
        query = query.where(signatures.c.signature.in_(reported))
    if wanted.namespace is not None:
        query = query.where(signatures.c.signature.in_(reported_in(wanted.namespace)))
    for column, part in ((signatures.c.parameters, wanted.parameter), (signatures.c.modules, wanted.module)):
        if part is not None:
            # Not LIKE: its wildcards are letters of real names, and SQLite's ignores case.
            found = func.strpos(column, part) if store.is_postgres else func.instr(column, part)
            query = query.where(found > 0)
    if wanted.group is not None:
        lines = literal("\n").concat(signatures.c.groups).concat("\n")
        line = f"\n{wanted.group}\n"
        query = query.where((func.strpos(lines, line) if store.is_postgres else func.instr(lines, line)) > 0)
    if wanted.signature_prefix is not None:
        beginning = func.substr(signatures.c.signature, 1, len(wanted.signature_prefix))
        query = query.where(beginning == wanted.signature_prefix)
    if wanted.strategy is not None:
        query = query.where(signatures.c.strategy == wanted.strategy)
    if wanted.since_ns is not None:
        query = query.where(signatures.c.created_ns >= wanted.since_ns)
    if wanted.until_ns is not None:
        query = query.where(signatures.c.created_ns < wanted.until_ns)
    if before is not None:
        query = query.where(tuple_(signatures.c.created_ns, signatures.c.signature) < tuple_(*before))
    # The page first, by the index of their times; what is active is looked up for its rows alone.
    listed = query.subquery("listed")
    whole = (
        select(listed, revisions.c.revision, revisions.c.digest, revisions.c.planner, revisions.c.origin)
        .join(active, (active.c.signature == listed.c.signature) & (active.c.job == ""))
        .join(revisions, (revisions.c.signature == listed.c.signature) & (revisions.c.revision == active.c.revision))
        .order_by(listed.c.created_ns.desc(), listed.c.signature.desc())
    )
    async with store.read() as connection:
        return [plain_row(row) for row in (await connection.execute(whole)).mappings()]
