"""`verify`: walk the chain, recompute every signature and digest, compare every row with its event, replay every plan.

Rows are read before the events that must speak of them, and only events older than the first read must have rows, so
that a server may go on working meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select

from bucketplan_core.attempt import OPEN_SLOT, AttemptRequest, RankReport
from bucketplan_core.epoch import Epoch
from bucketplan_core.errors import BucketplanError
from bucketplan_core.fields import Fields
from bucketplan_core.plan import Plan
from bucketplan_core.presets import MeasuredProfile
from bucketplan_core.request import Request
from bucketplan_core.wire import WireValue, digest_of, unpack
from bucketplan_server.audit.chain import Chain, Event, Finding
from bucketplan_server.audit.rows import TypedRows
from bucketplan_server.audit.tokens import compare_tokens
from bucketplan_server.planner.describe import request_facts
from bucketplan_server.planner.planned import RevisionJob
from bucketplan_server.store.engine import Store, StoreError
from bucketplan_server.store.integrity import file_damage, foreign_key_damage
from bucketplan_server.store.plans import PLANNER_REVISION
from bucketplan_server.store.tables import (
    active,
    attempts,
    epochs,
    events,
    hardware_profiles,
    job_signatures,
    profiles,
    quarantine,
    reports,
    revisions,
    signatures,
    tokens,
)

__all__ = ["Finding", "Verification", "verify"]

Replay = Callable[[RevisionJob, bytes], Awaitable[str | None]]


@dataclass(frozen=True, slots=True)
class Verification:
    """What was checked and found. `head` is the last event's digest: who keeps it elsewhere can tell if one was cut.

    `unreplayed` are plans whose planner version this release no longer holds; they are no findings.
    """

    num_events: int
    head: str
    num_signatures: int
    num_revisions: int
    num_replayed: int
    unreplayed: tuple[Finding, ...]
    findings: tuple[Finding, ...]

    @property
    def holds(self) -> bool:
        return not self.findings

    def to_wire(self) -> dict[str, WireValue]:
        return {
            "findings": [finding.to_wire() for finding in self.findings],
            "head": self.head,
            "holds": self.holds,
            "num_events": self.num_events,
            "num_replayed": self.num_replayed,
            "num_revisions": self.num_revisions,
            "num_signatures": self.num_signatures,
            "unreplayed": [finding.to_wire() for finding in self.unreplayed],
        }


async def verify(store: Store, replay: Replay | None, *, expected_head: tuple[int, str] | None = None) -> Verification:
    """Check everything; `replay` plans a revision again and says what is wrong with it (None: skip that).

    `expected_head` is number and digest of an event that was noted before: a log that was cut or rewritten since no
    longer holds it. Raises `StoreError`.
    """
    run = _Run(store, replay)
    await run.run(expected_head)
    chain = run.chain
    return Verification(
        num_events=chain.num_events,
        head=chain.head,
        num_signatures=run.num_signatures,
        num_revisions=run.num_revisions,
        num_replayed=run.num_replayed,
        unreplayed=tuple(run.unreplayed),
        findings=tuple(chain.findings),
    )


class _Run:
    """One verification: the rows as they were read, to be compared with the chain."""

    def __init__(self, store: Store, replay: Replay | None) -> None:
        self._store = store
        self._replay = replay
        self.chain = Chain()
        self._rows = TypedRows(store, self._find)
        self.unreplayed: list[Finding] = []
        self.num_signatures = self.num_revisions = self.num_replayed = 0
        self._signatures: dict[str, tuple[str, int, str]] = {}
        self._revisions: dict[tuple[str, int], dict[str, Any]] = {}
        self._attempts: dict[tuple[str, int], dict[str, Any]] = {}
        self._reports: dict[tuple[str, int, int, str, int], tuple[str, int]] = {}
        self._quarantined: dict[tuple[str, int], tuple[int, str]] = {}
        self._reported: set[tuple[str, str]] = set()
        self._kept: tuple[set[tuple[str, str]], set[tuple[str, str]]] = (set(), set())
        self._profiles: set[str] = set()
        self._hardware: dict[tuple[str, int], dict[str, Any]] = {}
        self._epochs: dict[str, int] = {}

    async def run(self, expected_head: tuple[int, str] | None) -> None:
        """Note every finding. Of a file that SQLite finds damaged, as much is checked as can be read."""
        path = self._store.path
        if path is not None:
            for said in await asyncio.to_thread(file_damage, path):
                self._find("database", f"the file is damaged: {said}")
            for where, detail in await asyncio.to_thread(foreign_key_damage, path):
                self._find(where, detail)
        try:
            await self._check(expected_head)
        except StoreError as error:
            if not self.chain.findings:
                raise
            self._find("database", f"cannot be read further: {error}")

    async def _check(self, expected_head: tuple[int, str] | None) -> None:
        async with self._store.read() as connection:
            head = await self._rows.last(connection, events.c.seq)
            await self._rows.note_migration(connection)
        await self._read_profiles()
        await self._read_signatures()
        await self._read_revisions()
        await self._read_jobs()
        async with self._store.read() as connection:
            pointers = await self._rows.all(connection, active)
            held = await self._rows.all(connection, tokens)
            marked = await self._rows.all(connection, quarantine)
            self.chain.active_until = await self._rows.last(connection, events.c.seq)
        self._quarantined = {(row["signature"], row["revision"]): (row["found_ns"], row["detail"]) for row in marked}
        noted = None
        async for rows in self._rows.pages(events):
            self.chain.walk(rows)
            if expected_head is not None:
                noted = next((row["digest"] for row in rows if row["seq"] == expected_head[0]), noted)
        if expected_head is not None and noted != expected_head[1]:
            self._find(
                f"events[{expected_head[0]}].digest",
                f"was {expected_head[1]} when it was noted, is {noted or 'missing'}: the log was cut or rewritten",
            )
        self._compare_revisions(head)
        self._compare_active({(row["signature"], row["job"]): (row["revision"], row["changed_ns"]) for row in pointers})
        self._compare_jobs(head)
        self._compare_hardware(head)
        self.chain.findings += compare_tokens(held, self.chain.tokens_created, self.chain.tokens_revoked)

    def _find(self, where: str, detail: str) -> None:
        self.chain.findings.append(Finding(where, detail))

    async def _read_profiles(self) -> None:
        async for rows in self._rows.pages(profiles):
            for row in rows:
                self._profiles.add(row["digest"])
                self._check_hash(f"profiles[{row['digest']}]", row["profile"], row["digest"])

        async for rows in self._rows.pages(hardware_profiles):
            for row in rows:
                where = f"hardware_profiles[{row['name']}, {row['version']}]"
                self._hardware[row["name"], row["version"]] = row
                if self._check_hash(f"{where}.profile", row["profile"], row["digest"]):
                    try:
                        MeasuredProfile.from_wire(unpack(row["profile"]))
                    except BucketplanError as error:
                        self._find(f"{where}.profile", f"cannot be read: {error}")

    async def _read_signatures(self) -> None:
        async for rows in self._rows.pages(signatures):
            for row in rows:
                signature = row["signature"]
                self.num_signatures += 1
                self._signatures[signature] = (row["profile"], row["created_ns"], row["actor"])
                where = f"signatures[{signature}]"
                if not self._check_hash(f"{where}.request", row["request"], signature):
                    continue
                try:
                    facts = await asyncio.to_thread(lambda data: request_facts(Request.decode(data)), row["request"])
                except BucketplanError as error:
                    self._find(f"{where}.request", f"cannot be read: {error}")
                    continue
                for column, value in facts.items():
                    if row[column] != value:
                        self._find(f"{where}.{column}", f"is {row[column]!r}, the request says {value!r}")

    async def _read_revisions(self) -> None:
        async for rows in self._rows.pages(revisions):
            for row in rows:
                self.num_revisions += 1
                where = f"revisions[{row['signature']}, {row['revision']}]"
                plan = row.pop("plan")
                row["options_digest"] = digest_of(row["options"]) if isinstance(row["options"], bytes) else ""
                self._revisions[row["signature"], row["revision"]] = row
                if self._check_hash(f"{where}.plan", plan, row["plan_sha256"]):
                    await self._check_plan(where, row, plan)

    async def _check_plan(self, where: str, row: Mapping[str, Any], plan: bytes) -> None:
        try:
            digest = Plan.decode(plan, expected_signature=row["signature"]).digest
        except BucketplanError as error:
            self._find(f"{where}.plan", f"cannot be read: {error}")
            return
        if digest != row["digest"]:
            self._find(f"{where}.digest", f"is {row['digest']}, the decision hashes to {digest}")
        if self._replay is None:
            return
        query = (
            select(signatures.c.request, profiles.c.profile)
            .join(profiles, profiles.c.digest == signatures.c.profile)
            .where(signatures.c.signature == row["signature"])
        )
        async with self._store.read() as connection:
            found = (await connection.execute(query)).first()
        if found is None:
            self._find(where, "its request or profile is missing")
            return
        job = RevisionJob(
            signature=row["signature"],
            request=found.request,
            profile=found.profile,
            origin=row["origin"],
            options=row["options"],
        )
        wrong = await self._replay(job, plan)
        if wrong is not None and wrong.startswith("unavailable"):
            self.unreplayed.append(Finding(where, wrong))
        elif wrong is not None:
            self._find(f"{where}.plan", wrong)
        else:
            self.num_replayed += 1

    async def _read_jobs(self) -> None:
        async for rows in self._rows.pages(epochs):
            for row in rows:
                where = f"epochs[{row['epoch']}]"
                self._epochs[row["epoch"]] = row["created_ns"]
                if self._check_hash(f"{where}.content", row["content"], row["epoch"]):
                    try:
                        Epoch.decode(row["content"])
                    except BucketplanError as error:
                        self._find(f"{where}.content", f"cannot be read: {error}")
        async for rows in self._rows.pages(attempts):
            for row in rows:
                self._attempts[row["job"], row["attempt"]] = row
        # Once before the reports and once after: a report that comes meanwhile is then no finding either way.
        before = await self._job_signatures()
        async for rows in self._rows.pages(reports):
            for row in rows:
                name = (row["job"], row["attempt"], row["rank"], row["slot"], row["ordinal"])
                self._reports[name] = (digest_of(row["report"]), row["received_ns"])
                try:
                    report = RankReport.read(Fields(unpack(row["report"]), "report"))
                except BucketplanError as error:
                    self._find(f"reports{list(name)}.report", f"cannot be read: {error}")
                    continue
                if (report.rank, report.slot, report.ordinal) != name[2:]:
                    self._find(f"reports{list(name)}", "stands under another name than its content")
                if report.signature is not None:
                    self._reported.add((row["job"], report.signature))
        self._kept = (before, await self._job_signatures())

    async def _job_signatures(self) -> set[tuple[str, str]]:
        kept: set[tuple[str, str]] = set()
        async for rows in self._rows.pages(job_signatures):
            kept.update((row["job"], row["signature"]) for row in rows)
        return kept

    def _compare_revisions(self, head: int) -> None:
        for name, event in self.chain.revisions.items():
            if event.seq <= head and name not in self._revisions:
                self._find(f"revisions[{name[0]}, {name[1]}]", f"is missing, event {event.seq} says it was stored")
            if event.seq <= head and name[0] not in self._signatures:
                self._find(f"signatures[{name[0]}]", f"is missing, event {event.seq} speaks of it")
            profile = event.body.get("profile")
            if event.seq <= head and profile is not None and profile not in self._profiles:
                self._find(f"profiles[{profile}]", f"is missing, event {event.seq} bound it to {name[0]}")
        for (signature, revision), row in self._revisions.items():
            where = f"revisions[{signature}, {revision}]"
            found = self.chain.revisions.get((signature, revision))
            if found is None:
                self._find(where, "no event says that it was stored")
                continue
            said = {**found.body, "created_ns": found.at_ns, "actor": found.actor, "reason": found.reason}
            said["parent"] = found.body.get("parent")
            is_now = {**row, "options": row["options_digest"]}
            for column in (
                "digest", "options", "origin", "parent", "plan_sha256", "planner", "created_ns", "actor", "reason",
            ):  # fmt: skip
                self._compare(f"{where}.{column}", is_now[column], said.get(column), found)
            if revision == PLANNER_REVISION and signature in self._signatures:
                profile, created_ns, actor = self._signatures[signature]
                at = f"signatures[{signature}]"
                self._compare(f"{at}.profile", profile, said.get("profile"), found)
                self._compare(f"{at}.created_ns", created_ns, found.at_ns, found)
                self._compare(f"{at}.actor", actor, found.actor, found)
        for signature in self._signatures:
            if (signature, PLANNER_REVISION) not in self._revisions:
                self._find(
                    f"revisions[{signature}, {PLANNER_REVISION}]",
                    "is missing: the signature has no plan of the planner",
                )
        for name, event in self.chain.quarantined.items():
            row_found = self._quarantined.get(name)
            expected = (event.at_ns, event.body.get("detail"))
            if row_found != expected:
                self._find(f"quarantine[{name[0]}, {name[1]}]", f"is {row_found}, event {event.seq} says {expected}")
        for name in self._quarantined.keys() - self.chain.quarantined.keys():
            self._find(f"quarantine[{name[0]}, {name[1]}]", "no event says so")

    def _compare_hardware(self, head: int) -> None:
        for name, event in self.chain.hardware.items():
            if event.seq <= head and name not in self._hardware:
                self._find(f"hardware_profiles[{name[0]}, {name[1]}]", f"is missing, event {event.seq} stored it")
        for name, row in self._hardware.items():
            where = f"hardware_profiles[{name[0]}, {name[1]}]"
            found = self.chain.hardware.get(name)
            if found is None:
                self._find(where, "no event says that it was stored")
                continue
            said = {**found.body, "created_ns": found.at_ns, "actor": found.actor, "reason": found.reason}
            for column in ("digest", "created_ns", "actor", "reason"):
                self._compare(f"{where}.{column}", row[column], said.get(column), found)

    def _compare_active(self, pointers: Mapping[tuple[str, str], tuple[int, int]]) -> None:
        for key in sorted(pointers.keys() | self.chain.active.keys()):
            found, said = pointers.get(key), self.chain.active.get(key)
            if found != said:
                self._find(
                    f"active[{key[0]}, {key[1] or 'everyone'}]", f"is revision and time {found}, the events say {said}"
                )

    def _compare_jobs(self, head: int) -> None:
        first_use: dict[str, Event] = {}
        for event in self.chain.attempts.values():
            first_use.setdefault(event.body.get("epoch", ""), event)
        for epoch, created_ns in self._epochs.items():
            if epoch not in first_use:
                self._find(f"epochs[{epoch}]", "no attempt was opened under it")
            else:
                self._compare(f"epochs[{epoch}].created_ns", created_ns, first_use[epoch].at_ns, first_use[epoch])
        for name, event in self.chain.attempts.items():
            if event.seq <= head and name not in self._attempts:
                self._find(f"attempts[{name[0]}, {name[1]}]", f"is missing, event {event.seq} says it was opened")
            under = event.body.get("epoch")
            if event.seq <= head and under not in self._epochs:
                self._find(f"epochs[{under}]", f"is missing, attempt {name[1]} of {name[0]} was opened under it")
        for name, row in self._attempts.items():
            where = f"attempts[{name[0]}, {name[1]}]"
            found = self.chain.attempts.get(name)
            if found is None:
                self._find(where, "no event says that it was opened")
                continue
            self._compare(f"{where}.epoch", row["epoch"], found.body.get("epoch"), found)
            self._compare(f"{where}.request", digest_of(row["request"]), found.body.get("request"), found)
            self._compare(f"{where}.opened_ns", row["opened_ns"], found.at_ns, found)
            self._compare(f"{where}.actor", row["actor"], found.actor, found)
            if digest_of(row["request"]) == found.body.get("request"):
                try:
                    key = AttemptRequest.read(Fields(unpack(row["request"]), "request")).key
                except BucketplanError as error:
                    self._find(f"{where}.request", f"cannot be read: {error}")
                    continue
                if row["key"] != key:
                    self._find(f"{where}.key", f"is {row['key']!r}, the leader's body says {key!r}")
        for report, (seq, digest) in self.chain.reports.items():
            pruned = report[3] != OPEN_SLOT and self.chain.pruned.get(report[:2], 0) > seq
            if report not in self._reports and pruned:
                continue
            if seq <= head and report not in self._reports:
                self._find(f"reports{list(report)}", f"is missing, event {seq} says it was received")
            elif report in self._reports and self._reports[report] != (digest, self.chain.report_times[seq]):
                self._find(f"reports{list(report)}", f"is not what event {seq} says was received")
        for report in self._reports.keys() - self.chain.reports.keys():
            self._find(f"reports{list(report)}", "no event says that it was received")
        before, after = self._kept
        reported = self._reported | self.chain.pruned_signatures
        for job, signature in sorted(reported - after):
            self._find(f"job_signatures[{job}, {signature}]", "is missing, a report names it")
        for job, signature in sorted(before - reported):
            self._find(f"job_signatures[{job}, {signature}]", "no report names it")

    def _compare(self, where: str, found: object, said: object, event: Event) -> None:
        if found != said:
            self._find(where, f"is {found!r}, event {event.seq} says {said!r}")

    def _check_hash(self, where: str, data: object, digest: str) -> bool:
        actual = digest_of(data) if isinstance(data, bytes) else f"nothing: it is {type(data).__name__}, not bytes"
        if actual != digest:
            self._find(where, f"hashes to {actual}, its name is {digest}")
        return actual == digest
