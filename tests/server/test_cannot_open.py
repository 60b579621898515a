"""A store that cannot be used ends a command with one line that names it and says what to do."""

import os
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bucketplan_server.cli import app
from bucketplan_server.store.engine import without_password
from tests.support.postgres import PostgresAddress, running_postgres

CREATE = ("token", "create", "me", "--role", "rank")
WRITING = (("migrate",), CREATE)
READING = (("verify",), ("token", "list"))
COMMANDS = (*WRITING, *READING)


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresAddress]:
    with running_postgres() as address:
        yield address


def refused(*arguments: object, status: int = 1) -> str:
    """The one line on standard error of a command that fails."""
    result = CliRunner().invoke(app, list(map(str, arguments)), env={"BUCKETPLAN_DATABASE": None})
    assert result.exit_code == status, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line.removeprefix("bucketplan-server: ")


def done(*arguments: object) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)), env={"BUCKETPLAN_DATABASE": None})
    assert result.exit_code == 0, result.output
    return result.stdout


def served(folder: Path, database: object) -> str:
    """The one line on standard error of a server that cannot start."""
    command = [sys.executable, "-m", "bucketplan_server", "serve", "--port", "0", "--database", str(database)]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1, ended.stderr
    (line,) = ended.stderr.splitlines()
    return line.removeprefix("bucketplan-server: ")


def a_folder(path: Path) -> None:
    path.mkdir()


def a_fifo(path: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    # Its address may be no longer than 107 bytes.
    with socket.socket(socket.AF_UNIX) as listening:
        here = Path.cwd()
        os.chdir(path.parent)
        try:
            listening.bind(path.name)
        finally:
            os.chdir(here)


def a_link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def a_link_to_no_folder(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere" / "x.db")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[-1])
@pytest.mark.parametrize("make", [a_folder, a_fifo, a_socket, a_link_to_itself, a_link_to_no_folder])
def test_what_is_no_file_is_named(tmp_path, make: Callable[[Path], None], command):
    database = tmp_path / "x.db"
    make(database)
    line = refused(*command, "--database", database)
    assert str(database if make is not a_link_to_no_folder or command in READING else tmp_path / "nowhere") in line
    assert "BUCKETPLAN_DATABASE" in line
    assert "hard links" not in line


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[-1])
def test_content_that_is_no_database_is_named(tmp_path, command):
    database = tmp_path / "x.db"
    database.write_text("no database " * 100)
    if command == ("verify",):
        verified = CliRunner().invoke(app, ["verify", "--database", str(database)])
        assert verified.exit_code == 1
        assert "3 findings" in verified.stdout
    else:
        line = refused(*command, "--database", database)
        assert line.startswith(f"{database}: the database file is damaged: file is not a database")
    assert database.read_text() == "no database " * 100


@pytest.mark.parametrize("command", READING, ids=lambda words: words[-1])
def test_another_programs_database_is_named(tmp_path, command):
    database = tmp_path / "x.db"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE theirs (a)")
        connection.commit()
    assert f"{database} cannot be opened: it holds no tables of a bucketplan-server" in refused(
        *command, "--database", database
    )


@pytest.mark.parametrize("command", WRITING, ids=lambda words: words[-1])
def test_a_file_of_several_names_is_named(tmp_path, command):
    database = tmp_path / "x.db"
    done("migrate", "--database", database)
    (tmp_path / "other").hardlink_to(database)
    assert f"{database} has 2 names (hard links)" in refused(*command, "--database", database)


@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_this_user_may_not_open_is_named_and_not_called_damaged(tmp_path, what):
    folder = tmp_path / "data"
    folder.mkdir()
    database = folder / "x.db"
    done("migrate", "--database", database)
    # Root may open everything, but for these capabilities.
    as_others = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    (database if what == "file" else folder).chmod(0o000)
    try:
        for words in (*COMMANDS, ("backup", str(tmp_path / "copy"))):
            command = [*as_others, sys.executable, "-m", "bucketplan_server", *words, "--database", str(database)]
            ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
            assert ended.returncode == 1, ended.stderr
            (line,) = ended.stderr.splitlines()
            assert str(database) in line
            assert "Permission denied; run this as the server's user" in line
    finally:
        (database if what == "file" else folder).chmod(0o700)


def test_a_server_beside_an_inbox_that_is_none_does_not_start(tmp_path):
    (tmp_path / "x.db.inbox").write_text("")
    line = served(tmp_path, tmp_path / "x.db")
    assert f"{tmp_path}/x.db.inbox is no folder in which the command line can leave its commands" in line
    assert "remove it" in line


def test_a_server_on_a_folder_does_not_start(tmp_path):
    assert f"{tmp_path} is no file" in served(tmp_path, tmp_path)


class TestBackup:
    @pytest.fixture
    def database(self, tmp_path: Path) -> Path:
        done("migrate", "--database", tmp_path / "x.db")
        return tmp_path / "x.db"

    def test_what_it_must_not_overwrite_stays(self, tmp_path, database):
        held = database.read_bytes()
        (tmp_path / "taken").write_text("mine")
        (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
        for target in (database, tmp_path / "taken", tmp_path / "dangling", tmp_path):
            assert refused("backup", target, "--database", database) == f"{target} exists; name a new file"
        assert (tmp_path / "taken").read_text() == "mine"
        assert database.read_bytes() == held

    def test_a_file_with_the_name_of_a_part_stays(self, tmp_path, database):
        (tmp_path / "copy.partial").write_text("mine")
        done("backup", tmp_path / "copy", "--database", database)
        assert (tmp_path / "copy.partial").read_text() == "mine"
        assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]

    def test_a_missing_folder_is_named(self, tmp_path, database):
        said = refused("backup", tmp_path / "no" / "copy", "--database", database)
        assert said == f"the folder {tmp_path}/no does not exist; make it, or name another file"

    def test_a_folder_that_takes_no_file_is_named(self, tmp_path, database):
        assert "cannot be written to /proc: " in refused("backup", "/proc/copy", "--database", database)

    @pytest.mark.parametrize("name", ["what?", "50%25", "a#b"])
    def test_a_file_may_have_any_name(self, tmp_path, database, name):
        database.rename(tmp_path / name)
        done("backup", tmp_path / "copy", "--database", tmp_path / name)
        done("verify", "--database", tmp_path / "copy")

    def test_a_source_that_is_missing_or_no_database_is_named(self, tmp_path):
        assert f"there is no file {tmp_path}/x.db" in refused(
            "backup", tmp_path / "copy", "--database", tmp_path / "x.db"
        )
        (tmp_path / "x.db").write_text("no database " * 100)
        said = refused("backup", tmp_path / "copy", "--database", tmp_path / "x.db")
        assert f"{tmp_path}/x.db is no SQLite database" in said
        assert [path.name for path in tmp_path.iterdir()] == ["x.db"]


@pytest.mark.parametrize(
    "database",
    [":memory:", "sqlite://", "sqlite:///:memory:", "postgresql://u@host:99999/x", "postgresql://u@host:abc/x", "a://"],
)
def test_an_address_that_can_be_none_is_wrong_usage(database):
    assert "--database (BUCKETPLAN_DATABASE): " in refused("migrate", "--database", database, status=2)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[-1])
@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("127.0.0.1:1/db?user=u&password=SECRET", "127.0.0.1:1/db?user=u&password=***"),
        ("u:SECRET@127.0.0.1:1/db?pass%77ord=SECRET", "u:***@127.0.0.1:1/db?password=***"),
        ("127.0.0.1:1/db?passfile=/SECRET&sslpassword=SECRET", "127.0.0.1:1/db?passfile=***&sslpassword=***"),
        ("127.0.0.1:1/db?user=u;password=SECRET", "127.0.0.1:1/db?user=***"),
        ("127.0.0.1:1/db&password=SECRET", "***"),
        ("u:p@SECRET@127.0.0.1:1/db", "***"),
    ],
)
def test_no_secret_of_an_address_is_shown(command, address, shown):
    line = refused(*command, "--database", f"postgresql://{address}")
    assert line.startswith(f"postgresql://{shown} cannot be opened: ")
    assert "SECRET" not in line


def test_an_address_that_cannot_be_read_is_not_shown():
    assert without_password("postgresql://u:SECRET@host:port/db") == "postgresql://***"


@pytest.mark.parametrize(
    "address", ["x=1.db", "sqlite:////a/x=1.db", "postgresql://u@h/db?host=%2Ftmp&sslmode=disable"]
)
def test_what_holds_no_secret_is_shown_as_it_was_given(address):
    assert without_password(address) == address


@pytest.mark.postgres
class TestPostgres:
    @pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[-1])
    @pytest.mark.parametrize(
        ("change", "says"),
        [
            (("postgres@/test", "postgres@/none"), "does not exist"),
            (("postgres@", "nobody@"), 'role "nobody" does not exist'),
            (("postgres@/", "postgres:secret@127.0.0.1:1/"), "Connect call failed"),
            (("?host=", "?nonsense=1&host="), "nonsense"),
            (("?host=", "?sslmode=bogus&host="), "bogus"),
        ],
        ids=["database", "role", "address", "parameter", "sslmode"],
    )
    def test_an_address_that_leads_nowhere_is_named_without_its_password(self, postgres, command, change, says):
        address = postgres.new_database()
        if "127.0.0.1" in change[1]:
            address = address.partition("?")[0]
        line = refused(*command, "--database", address.replace(*change))
        assert line.startswith("postgresql://")
        assert " cannot be opened: " in line
        assert says in line
        assert "BUCKETPLAN_DATABASE" in line
        assert "secret" not in line

    def test_rights_that_are_missing_are_named(self, postgres):
        address = postgres.new_database()
        postgres._server.psql("CREATE ROLE low LOGIN;")
        line = refused("migrate", "--database", address.replace("postgres@", "low@"))
        assert "postgresql://low@/" in line
        assert "permission denied for schema public" in line

    def test_a_database_without_tables_is_named(self, postgres):
        assert "holds no tables of a bucketplan-server" in refused("verify", "--database", postgres.new_database())

    def test_the_address_may_say_sslmode_as_pg_dump_reads_it(self, postgres):
        address = postgres.new_database().replace("?", "?sslmode=disable&")
        assert address in done("migrate", "--database", address)


@pytest.mark.parametrize("head", ["9" * 5_000 + ":" + "a" * 64, "9" * 20 + ":" + "a" * 64, "1:a", "-1:" + "a" * 64])
def test_a_head_that_no_log_can_have_is_named(tmp_path, head):
    done("migrate", "--database", tmp_path / "db")
    said = refused("verify", "--database", tmp_path / "db", "--expect-head", head, status=2)
    assert said.startswith("--expect-head: ")
