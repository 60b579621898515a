"""A changed byte anywhere in the database is found and named, online and offline; an honest one verifies."""

import asyncio
import contextlib
import itertools
import random
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from bucketplan_core.attempt import RankReport
from bucketplan_server import cli_tokens
from bucketplan_server.audit import Verification, verify
from bucketplan_server.planner.revise import replay
from bucketplan_server.settings import load_settings
from bucketplan_server.store.engine import StoreDamaged, open_for_reading, open_store
from bucketplan_server.store.migrate import SchemaUnclear, head_revision
from tests.server.test_attempts import open_attempt, report
from tests.server.test_profiles import measured
from tests.server.test_revisions import known, send
from tests.support import counts
from tests.support.server import RunningServer, running_server

TABLES = (
    "active", "attempts", "epochs", "events", "hardware_profiles", "job_signatures", "profiles", "quarantine",
    "reports", "revisions", "signatures", "tokens",
)  # fmt: skip


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database in which everything has happened once, closed."""
    with running_server(tmp_path_factory.mktemp("history")) as server, httpx.Client(base_url=server.url) as client:
        first, second, damaged = (known(client, number) for number in range(3))
        send(client, first.signature, "revisions", options={"strategy": "none"})
        send(client, first.signature, "revisions", buckets=[[0, 1]])
        send(client, first.signature, "activate", revision=3)
        send(client, second.signature, "revisions", options={"prefetch": 3})
        send(client, second.signature, "activate", revision=2, job="mine")
        open_attempt(client, "mine", "a")
        report(client, "mine", 1, RankReport(rank=0, slot="open", uuid="u"))
        report(client, "mine", 1, RankReport(rank=0, slot="joint", signature=first.signature))
        open_attempt(client, "mine", "b")
        client.put("/v1/profiles/lab", json={"profile": measured("lab"), "reason": "new"}).raise_for_status()
        server.kill()
        # One plan is damaged, found and repaired, so that the quarantine holds a row.
        with contextlib.closing(sqlite3.connect(server.database)) as connection:
            (plan,) = connection.execute(
                "SELECT plan FROM revisions WHERE signature = ?", [damaged.signature]
            ).fetchone()
            connection.execute("UPDATE revisions SET plan = x'00' WHERE signature = ?", [damaged.signature])
            connection.commit()
            server.restart()
            assert client.get(f"/v1/plans/{damaged.signature}").status_code == 503
            online = client.get("/v1/events/verify?replay=true").json()
            assert not online["holds"]
            assert any(damaged.signature in finding["where"] for finding in online["findings"])
            server.kill()
            connection.execute("UPDATE revisions SET plan = ? WHERE signature = ?", [plan, damaged.signature])
            connection.commit()
        server.restart()
        online = client.get("/v1/events/verify?replay=true").json()
        assert online["findings"] == []
        assert (online["holds"], online["num_replayed"], online["num_revisions"]) == (True, 6, 6)
        server.terminate()
        database = Path(server.database)
        settings = load_settings(database=str(database))
        secret = cli_tokens.create(settings, "ci", role="auditor", namespace=None, expires="90d", reason="made")
        database.with_name("secret").write_text(secret)
        return database


def check(database: Path, *, plan_again: bool = False, head: tuple[int, str] | None = None) -> Verification:
    async def again(job, stored):
        return replay(job, stored)

    async def run() -> Verification:
        store = await open_for_reading(str(database), timeout_seconds=30)
        try:
            return await verify(store, again if plan_again else None, expected_head=head)
        finally:
            await store.close()

    return asyncio.run(run())


@contextlib.contextmanager
def checker(database: Path) -> Iterator[Callable[[], Verification]]:
    """`check` for many changes of one file: statements are compiled once, which takes longer than they do."""
    with asyncio.Runner() as runner:
        store = runner.run(open_for_reading(str(database), timeout_seconds=30))
        try:
            yield lambda: runner.run(verify(store, None))
        finally:
            runner.run(store.close())


@contextlib.contextmanager
def activations(server: RunningServer) -> Iterator[None]:
    """Operators who change what is served, one transaction after the other, until the block ends."""
    stop = threading.Event()

    def flip(number: int) -> int:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            signature = known(client, number).signature
            send(client, signature, "revisions", options={"strategy": "none"}).raise_for_status()
            for count in itertools.count(1):
                send(client, signature, "activate", revision=1 + count % 2).raise_for_status()
                if stop.is_set():
                    return count
        raise AssertionError

    with ThreadPoolExecutor() as pool:
        flips = [pool.submit(flip, number) for number in range(3)]
        try:
            wait_for_events(server, 9)
            yield
        finally:
            stop.set()
    assert min(flip.result() for flip in flips) > 1


def wait_for_events(server: RunningServer, number: int) -> None:
    deadline = time.monotonic() + 30
    while not httpx.get(f"{server.url}/v1/events?after={number - 1}&limit=1").json()["events"]:
        assert time.monotonic() < deadline, "nothing happens"
        time.sleep(0.01)


def columns(database: Path) -> list[tuple[str, str]]:
    with contextlib.closing(sqlite3.connect(database)) as connection:
        return [
            (table, row[1]) for table in TABLES for row in connection.execute(f"PRAGMA table_info({table})").fetchall()
        ]


def other(value: object) -> object:
    """Another value of the same type, as little different as can be."""
    if isinstance(value, bytes):
        return value[:-1] + bytes([value[-1] ^ 1])
    if isinstance(value, str):
        return value[:-1] + ("0" if value[-1:] != "0" else "1") if value else "x"
    return 1 if value is None else value + 1


def test_an_honest_history_verifies_with_every_plan_planned_again(history):
    found = check(history, plan_again=True)
    assert found.findings == ()
    assert found.num_replayed == found.num_revisions == 6
    assert found.unreplayed == ()


def test_a_verification_beside_a_working_server_finds_nothing(tmp_path):
    with running_server(tmp_path) as server, activations(server):
        assert [check(server.database).findings for _ in range(12)] == [()] * 12


def test_every_cell_of_the_database_is_covered(history, tmp_path):
    """Each cell is changed in a copy; the verification must name its table."""
    missed = []
    copy = tmp_path / "copy.db"
    for table, column in columns(history):
        with contextlib.closing(sqlite3.connect(history)) as connection:
            rows = connection.execute(f"SELECT rowid, {column} FROM {table}").fetchall()
        assert rows, f"{table} is empty: the history above must fill it"
        shutil.copyfile(history, copy)
        with contextlib.closing(sqlite3.connect(copy)) as connection:
            connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", [other(rows[-1][1]), rows[-1][0]])
            connection.commit()
        if not any(finding.where.startswith(table) for finding in check(copy).findings):
            missed.append(f"{table}.{column}")
    assert missed == []


WRONG = {
    "null": "NULL",
    "text": "'text'",
    "bytes that are no UTF-8": "CAST(x'80ff' AS TEXT)",
    "blob": "x'80ff'",
    "int": "-5",
    "float": "1.5",
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_value_of_any_type_in_any_column_is_a_finding_and_stops_nothing(history, tmp_path, kind):
    copy = tmp_path / "copy.db"
    shutil.copyfile(history, copy)
    with contextlib.closing(sqlite3.connect(copy)) as connection:
        # As a damaged file may hold it: SQLite itself would refuse to write NULL into most columns.
        connection.execute("PRAGMA writable_schema=ON")
        connection.execute("UPDATE sqlite_master SET sql = replace(sql, 'NOT NULL', '') WHERE type = 'table'")
        connection.commit()
    missed = []
    with checker(copy) as again, contextlib.closing(sqlite3.connect(copy)) as connection:
        for table, column in columns(history):
            rowid, before = connection.execute(
                f"SELECT max(rowid), {column} FROM {table} WHERE rowid = (SELECT max(rowid) FROM {table})"
            ).fetchone()
            connection.execute(f"UPDATE {table} SET {column} = {WRONG[kind]} WHERE rowid = ?", [rowid])
            connection.commit()
            if before is not None or kind != "null":
                named = [finding.where for finding in again().findings]
                if not any(where.startswith(table) for where in named):
                    missed.append((table, column, named))
            connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", [before, rowid])
            connection.commit()
        assert missed == []
        left = {finding.where.partition(" ")[0] for finding in again().findings}
        assert left == {"table"}, "every change was taken back but that of the schema"


def test_the_type_and_the_column_are_named(history, tmp_path):
    copy = tmp_path / "copy.db"
    shutil.copyfile(history, copy)
    with contextlib.closing(sqlite3.connect(copy)) as connection:
        connection.execute("UPDATE attempts SET request = 'text' WHERE job = 'mine' AND attempt = 1")
        connection.execute("UPDATE tokens SET hash = x'00'")
        connection.commit()
    found = {finding.where: finding.detail for finding in check(copy).findings}
    assert found["attempts[mine, 1].request"] == "is of type text, must be blob"
    assert found["tokens[ci].hash"] == "is of type blob, must be text"


@pytest.fixture
def damaged_index(history, tmp_path) -> Path:
    """One byte of a key in the index of `active` is another, so that the row is not found by its signature."""
    copy = tmp_path / "copy.db"
    shutil.copyfile(history, copy)
    with contextlib.closing(sqlite3.connect(copy)) as connection:
        (size,) = connection.execute("PRAGMA page_size").fetchone()
        (page,) = connection.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = 'sqlite_autoindex_active_1'"
        ).fetchone()
        (signature,) = connection.execute("SELECT signature FROM active WHERE job = '' AND revision = 3").fetchone()
    content = bytearray(copy.read_bytes())
    at = content.index(signature.encode(), (page - 1) * size, page * size) + 63
    content[at] = ord("1") if content[at] == ord("0") else ord("0")
    copy.write_bytes(content)
    return copy


def test_a_damaged_index_is_found_and_no_server_starts_on_it(damaged_index):
    found = check(damaged_index).findings
    assert any(finding.where == "database" and "active" in finding.detail for finding in found), found
    with pytest.raises(StoreDamaged, match=r"active.*verify.*backup"):
        asyncio.run(open_store(str(damaged_index), timeout_seconds=30))
    command = [sys.executable, "-m", "bucketplan_server", "serve", "--port", "0", "--database", str(damaged_index)]
    refused = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (refused.returncode, "Traceback" in refused.stderr) == (1, False)
    assert "sqlite_autoindex_active_1" in refused.stderr
    assert "verify" in refused.stderr
    assert "backup" in refused.stderr


def test_damage_that_comes_while_a_server_runs_is_found_online_and_no_404(history, tmp_path):
    copy = tmp_path / "bucketplan.db"
    shutil.copyfile(history, copy)
    caller = {"Authorization": f"Bearer {history.with_name('secret').read_text()}"}
    with (
        running_server(tmp_path, database=str(copy)) as server,
        httpx.Client(base_url=server.url, headers=caller) as client,
    ):
        assert client.get("/v1/events/verify").json()["holds"]
        signatures = [plan["signature"] for plan in client.get("/v1/plans").json()["plans"]]
        content = copy.read_bytes()
        copy.write_bytes(content[:100] + b"\xff" * (len(content) - 100))
        for signature in signatures:
            answer = client.get(f"/v1/plans/{signature}")
            assert answer.status_code in (200, 503), answer.text
        answer = client.get("/v1/jobs/another/attempts")
        assert answer.status_code in (200, 503)
        found = client.get("/v1/events/verify").json()
        assert not found["holds"]
        assert any(finding["where"] == "database" for finding in found["findings"])
        server.kill()


def test_a_row_that_names_a_missing_one_is_found(history, tmp_path):
    copy = tmp_path / "copy.db"
    shutil.copyfile(history, copy)
    with contextlib.closing(sqlite3.connect(copy)) as connection:
        connection.execute("DELETE FROM signatures")
        connection.commit()
    assert any("names a row of signatures" in finding.detail for finding in check(copy).findings)


@pytest.mark.parametrize("change", ["DELETE FROM", "UPDATE", "DROP TABLE"])
def test_a_lost_migration_is_found_and_the_server_says_what_is_wrong(history, tmp_path, change):
    copy = tmp_path / "copy.db"
    shutil.copyfile(history, copy)
    with contextlib.closing(sqlite3.connect(copy)) as connection:
        connection.execute(f"{change} alembic_version" + (" SET version_num = '0001'" if change == "UPDATE" else ""))
        connection.commit()
    (finding,) = check(copy).findings
    assert finding.where == "alembic_version.version_num"
    if change != "DROP TABLE":
        assert head_revision() in finding.detail
    with pytest.raises(SchemaUnclear, match=r"alembic_version.*verify.*backup"):
        asyncio.run(open_store(str(copy), timeout_seconds=30))
    command = [sys.executable, "-m", "bucketplan_server", "serve", "--port", "0", "--database", str(copy)]
    refused = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (refused.returncode, "Traceback" in refused.stderr) == (1, False)
    assert "alembic_version" in refused.stderr


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ("CREATE TRIGGER evil AFTER INSERT ON events BEGIN UPDATE active SET revision = 2; END", "trigger evil"),
        ("DROP INDEX ix_events_signature", "index ix_events_signature"),
        ("CREATE TABLE extra (x)", "table extra"),
        ("ALTER TABLE tokens ADD COLUMN extra TEXT", "table tokens"),
    ],
)
def test_a_schema_that_the_migrations_did_not_make_is_found(history, tmp_path, change, where):
    database = tmp_path / "changed.db"
    shutil.copyfile(history, database)
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.execute(change)
        connection.commit()
    assert [finding.where for finding in check(database).findings] == [where]


@pytest.mark.soak
def test_a_random_bit_anywhere_is_found_and_named(history, tmp_path):
    copy = tmp_path / "copy.db"
    with contextlib.closing(sqlite3.connect(history)) as connection:
        cells = [
            (table, column, rowid, value)
            for table, column in columns(history)
            for rowid, value in connection.execute(f"SELECT rowid, {column} FROM {table}").fetchall()
            if value not in (None, "", b"")
        ]
    for seed in counts.seeds("bit flips", test=40, soak=2_000):
        dice = random.Random(seed)
        table, column, rowid, value = dice.choice(cells)
        shutil.copyfile(history, copy)
        with contextlib.closing(sqlite3.connect(copy)) as connection:
            try:
                connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", [flipped(value, dice), rowid])
            except sqlite3.IntegrityError:
                continue  # the bit makes another row's key, which the database itself refuses
            connection.commit()
        named = [finding.where for finding in check(copy).findings]
        assert any(where.startswith(table) for where in named), (seed, table, column, named)


def flipped(value: object, dice: random.Random) -> object:
    if isinstance(value, int):
        return value ^ 1 << dice.randrange(16)
    data = bytearray(value if isinstance(value, bytes) else value.encode())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(7)
    return bytes(data) if isinstance(value, bytes) else data.decode("latin-1")


@pytest.mark.parametrize("table", TABLES)
def test_a_deleted_row_is_missed(history, tmp_path, table):
    copy = tmp_path / "copy.db"
    shutil.copyfile(history, copy)
    with contextlib.closing(sqlite3.connect(copy)) as connection:
        connection.execute(f"DELETE FROM {table} WHERE rowid = (SELECT min(rowid) FROM {table})")
        connection.commit()
    assert check(copy).findings


def test_a_log_that_was_cut_is_found_by_who_noted_its_head(history, tmp_path):
    before = check(history)
    noted = (before.num_events, before.head)
    assert check(history, head=noted).holds
    copy = tmp_path / "copy.db"
    shutil.copyfile(history, copy)
    with contextlib.closing(sqlite3.connect(copy)) as connection:
        connection.execute("DELETE FROM events WHERE seq = ?", [noted[0]])
        connection.execute("DELETE FROM tokens WHERE name = 'ci'")
        connection.commit()
    assert check(copy).holds, "what the last event spoke of is gone with it: only a noted head can tell"
    (finding,) = check(copy, head=noted).findings
    assert "cut or rewritten" in finding.detail


def test_a_plan_that_its_planner_would_not_make_is_found_by_replaying(history, tmp_path):
    """All digests and the chain forged to fit: only planning again can tell."""
    copy = tmp_path / "copy.db"
    shutil.copyfile(history, copy)
    from bucketplan_server.store.events import event_digest

    with contextlib.closing(sqlite3.connect(copy)) as connection:
        connection.row_factory = sqlite3.Row
        wrong = connection.execute("SELECT * FROM revisions WHERE revision = 2 AND planner = 'none/1'").fetchone()
        connection.execute(
            "UPDATE revisions SET plan = ?, plan_sha256 = ?, digest = ? WHERE signature = ? AND revision = 1",
            [wrong["plan"], wrong["plan_sha256"], wrong["digest"], wrong["signature"]],
        )
        from bucketplan_core.wire import pack, unpack

        previous = "0" * 64
        for row in connection.execute("SELECT * FROM events ORDER BY seq").fetchall():
            event = dict(row)
            if event["kind"] == "plan.created" and event["signature"] == wrong["signature"]:
                forged = {"digest": wrong["digest"], "plan_sha256": wrong["plan_sha256"]}
                event["body"] = pack({**unpack(event["body"]), **forged})
            event["previous"] = previous
            event["digest"] = previous = event_digest(event)
            connection.execute(
                "UPDATE events SET body = ?, previous = ?, digest = ? WHERE seq = ?",
                [event["body"], event["previous"], event["digest"], event["seq"]],
            )
        connection.commit()
    assert check(copy).holds
    (finding,) = check(copy, plan_again=True).findings
    assert finding.where == f"revisions[{wrong['signature']}, 1].plan"
    assert "planning it again" in finding.detail


def test_the_command_verifies_offline_and_fails_loudly(history, tmp_path):
    command = [sys.executable, "-m", "bucketplan_server", "verify", "--database"]
    good = subprocess.run([*command, str(history)], capture_output=True, text=True, check=False)
    assert (good.returncode, good.stderr) == (0, "")
    assert "0 findings" in good.stdout
    head = good.stdout.rsplit(" ", 1)[1].strip()
    assert subprocess.run([*command, str(history), "--expect-head", head], check=False).returncode == 0
    copy = tmp_path / "copy.db"
    shutil.copyfile(history, copy)
    with contextlib.closing(sqlite3.connect(copy)) as connection:
        connection.execute("UPDATE events SET reason = 'another' WHERE seq = 1")
        connection.commit()
    bad = subprocess.run([*command, str(copy)], capture_output=True, text=True, check=False)
    assert bad.returncode == 1
    assert "events[1]" in bad.stderr
    missing = subprocess.run([*command, str(tmp_path / "none.db")], capture_output=True, text=True, check=False)
    assert (missing.returncode, "Traceback" in missing.stderr) == (1, False)


def test_events_are_read_with_filters(client):
    request = known(client, 500)
    open_attempt(client, "listed", "a")
    events = client.get(f"/v1/events?signature={request.signature}").json()["events"]
    assert [event["kind"] for event in events] == ["plan.created"]
    assert events[0]["body"]["planner"] == "size/1"
    assert [event["kind"] for event in client.get("/v1/events?job=listed").json()["events"]] == ["attempt.opened"]
    first = client.get("/v1/events?limit=1").json()["events"][0]
    assert client.get("/v1/events?limit=1&after=1").json()["events"][0]["previous"] == first["digest"]
