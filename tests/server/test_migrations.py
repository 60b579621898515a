"""Migrations take as long as they take: the longest wait for the store is for calls."""

import asyncio
import contextlib
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import text

from bucketplan_server.store import migrate
from bucketplan_server.store.engine import StoreError, open_store
from tests.support.postgres import PostgresAddress, running_postgres

TIMEOUT_SECONDS = 2.0
# It fails if it is run twice, and gives the event loop a turn at every statement, as one long statement does.
SLOW_MIGRATION = f"""
import time
from alembic import op

revision = "0099"
down_revision = "{migrate.head_revision()}"

def upgrade():
    op.execute("CREATE TABLE slow (done INTEGER)")
    ends = time.monotonic() + 1.5 * {TIMEOUT_SECONDS}
    while time.monotonic() < ends:
        op.execute("SELECT 1")
    op.execute("INSERT INTO slow VALUES (1)")
"""


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresAddress]:
    with running_postgres() as address:
        yield address


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This release has one more migration, which takes longer than a call may wait for the store."""
    scripts = tmp_path / "migrations"
    shutil.copytree(Path(migrate.__file__).parent / "migrations", scripts)
    (scripts / "versions" / "0099_slow.py").write_text(SLOW_MIGRATION)
    monkeypatch.setattr(migrate, "_SCRIPTS", scripts)


async def opened(database: str) -> int:
    """How often the slow migration was done, by who opens the store then."""
    store = await open_store(database, timeout_seconds=TIMEOUT_SECONDS)
    try:
        async with store.read() as connection:
            return (await connection.execute(text("SELECT count(*) FROM slow"))).scalar_one()
    finally:
        await store.close()


@pytest.mark.usefixtures("slow")
def test_a_slow_migration_of_a_sqlite_file_is_not_cut(tmp_path):
    assert asyncio.run(opened(str(tmp_path / "store.db"))) == 1


@pytest.mark.postgres
@pytest.mark.usefixtures("slow")
def test_of_two_replicas_that_start_at_once_one_migrates_and_the_other_waits(postgres):
    async def both() -> list[int]:
        database = postgres.new_database()
        return await asyncio.gather(opened(database), opened(database))

    assert asyncio.run(both()) == [1, 1]


def test_reaching_the_database_is_bounded(tmp_path):
    database = tmp_path / "store.db"
    asyncio.run(open_and_close(database))
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreError, match=r"locked|in time"):
            asyncio.run(open_and_close(database, timeout_seconds=0.5))


async def open_and_close(database: Path, *, timeout_seconds: float = 30) -> None:
    store = await open_store(str(database), timeout_seconds=timeout_seconds)
    await store.close()
