"""A store with much in it: rows that a server wrote once, written again under other names, without their audit trail.

with crowded_server(tmp_path, request, profile, Crowd(num_jobs=1_000)) as server:
    httpx.get(f"{server.url}/jobs")
"""

import contextlib
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import Connection, Table, create_engine, insert, select

from bucketplan_core.attempt import AttemptRequest, RankReport
from bucketplan_core.profile import CostProfile
from bucketplan_core.request import Request
from bucketplan_core.wire import pack
from bucketplan_server.store.events import event_digest
from bucketplan_server.store.tables import active, attempts, events, reports, revisions, signatures
from tests.support.documents import MSGPACK, plan_body
from tests.support.server import RunningServer, running_server

JOB = "many"
_AT_ONCE = 500
_RANKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """How much there is: jobs, attempts and reporting ranks of one job, revisions of one signature, plans, events."""

    num_jobs: int
    num_attempts: int
    num_revisions: int
    num_plans: int
    num_events: int


@contextlib.contextmanager
def crowded_server(
    folder: Path, request: Request, profile: CostProfile, crowd: Crowd, **settings: object
) -> Iterator[RunningServer]:
    """A server on a SQLite file with `crowd` in it; each job but `JOB` has one attempt, each plan one revision."""
    with running_server(folder, **settings) as server:
        with httpx.Client(base_url=server.url, timeout=120, headers=MSGPACK) as client:
            _fill_once(client, request, profile)
        server.kill()
        engine = create_engine(f"sqlite:///{server.database}")
        with engine.begin() as connection:
            _multiply(connection, request.signature, crowd)
        engine.dispose()
        server.restart()
        yield server


def _fill_once(client: httpx.Client, request: Request, profile: CostProfile) -> None:
    assert client.post("/v1/plans", content=plan_body(request, profile)).status_code == 201
    opening = AttemptRequest(key="first", participants={"fsdp": (tuple(range(_RANKS)),)}, options={"strategy": "size"})
    assert client.post(f"/v1/jobs/{JOB}/attempts", content=pack(opening.to_wire())).status_code == 201
    said = [
        RankReport(rank=rank, slot=slot, signature=signature)
        for rank in range(_RANKS)
        for slot, signature in (("open", None), ("forward", request.signature))
    ]
    body = pack({"reports": [one.to_wire() for one in said]})
    assert client.post(f"/v1/jobs/{JOB}/attempts/1/reports", content=body).is_success


def _multiply(connection: Connection, signature: str, crowd: Crowd) -> None:
    def first(table: Table, **where: Any) -> dict[str, Any]:
        query = select(table)
        for name, value in where.items():
            query = query.where(table.c[name] == value)
        return dict(connection.execute(query).mappings().one())

    def write(table: Table, rows: Iterator[dict[str, Any]]) -> None:
        for part in iter(lambda: list(itertools.islice(rows, _AT_ONCE)), []):
            connection.execute(insert(table), part)

    plan, own, served = first(signatures), first(revisions), first(active)
    others = [(n, hashlib.sha256(str(n).encode()).hexdigest()) for n in range(1, crowd.num_plans)]
    at_ns = plan["created_ns"]
    write(signatures, (plan | {"signature": name, "created_ns": at_ns + n} for n, name in others))
    write(revisions, (own | {"signature": name} for _, name in others))
    write(active, (served | {"signature": name} for _, name in others))
    write(revisions, (own | {"revision": n, "origin": "replan"} for n in range(2, crowd.num_revisions + 1)))
    write(active, (served | {"job": f"job-{n:05}", "revision": crowd.num_revisions} for n in range(crowd.num_jobs)))
    opened, said = first(attempts), [dict(row) for row in connection.execute(select(reports)).mappings()]
    again = [{"attempt": n, "key": str(n), "opened_ns": at_ns + n} for n in range(2, crowd.num_attempts + 1)]
    again += [{"job": f"job-{n:05}", "opened_ns": at_ns + n} for n in range(1, crowd.num_jobs)]
    write(attempts, (opened | other for other in again))
    names: Sequence[dict[str, Any]] = [{k: other[k] for k in ("job", "attempt") if k in other} for other in again]
    write(reports, (report | other for other in names for report in said))
    write(events, _events(connection, crowd.num_events))


def _events(connection: Connection, most: int) -> Iterator[dict[str, Any]]:
    """Events of the kinds that are there, chained to the last of them."""
    there = [dict(row) for row in connection.execute(select(events).order_by(events.c.seq)).mappings()]
    previous = there[-1]["digest"]
    for seq in range(len(there) + 1, most + 1):
        row = there[seq % len(there)] | {"seq": seq, "previous": previous}
        previous = row["digest"] = event_digest(row)
        yield row
