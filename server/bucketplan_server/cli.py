"""`bucketplan-server`: serve, migrate, verify, token, version. Settings are flags and variables `BUCKETPLAN_<NAME>`."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console

from bucketplan_core.fields import escaped
from bucketplan_server import __version__, cli_tokens
from bucketplan_server.settings import Settings, SettingsError, check_tls, load_settings

if TYPE_CHECKING:
    from bucketplan_server.audit import Verification

__all__ = ["app", "main"]

app = typer.Typer(
    name="bucketplan-server",
    help="The bucketplan service: one authoritative bucket plan for every rank of a fleet.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_errors = Console(stderr=True, soft_wrap=True, highlight=False)

T = TypeVar("T")
EXIT_USAGE = 2
EXIT_FAILED = 1


def _with_settings(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one flag a setting (all where none are named), so that flags and settings cannot drift apart."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters = [
            parameter
            for parameter in inspect.signature(command, eval_str=True).parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        annotations = dict(inspect.get_annotations(command, eval_str=True))
        annotations.pop("flags", None)
        for name, field in Settings.model_fields.items():
            if names and name not in names:
                continue
            kind = field.annotation if field.annotation in (int, float, bool) else str
            flag = f"--{name.replace('_', '-')}"
            option = typer.Option(
                f"{flag}/--no-{flag[2:]}" if kind is bool else flag,
                help=f"{field.description} [BUCKETPLAN_{name.upper()}, {field.default}]",
                show_default=False,
            )
            annotation = Annotated[kind | None, option]  # type: ignore[valid-type]  # known when it runs
            annotations[name] = annotation
            parameters.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            )
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what Typer reads
        command.__annotations__ = annotations
        return command

    return decorate


def _settings(flags: dict[str, Any]) -> Settings:
    try:
        return load_settings(**flags)
    except SettingsError as error:
        _fail(str(error), EXIT_USAGE)


def _fail(message: str, status: int = EXIT_FAILED) -> NoReturn:
    _errors.print(f"bucketplan-server: {escaped(message)}", markup=False)
    raise typer.Exit(status)


@contextlib.contextmanager
def _with_store(settings: Settings) -> Iterator[None]:
    """End the command with one line where the store cannot be used."""
    from bucketplan_server.store.engine import StoreDamaged, StoreError, without_password
    from bucketplan_server.store.errors import CannotOpen

    try:
        yield
    except StoreDamaged as error:
        _fail(f"{without_password(settings.database)}: {error}")
    except (CannotOpen, StoreError) as error:
        _fail(str(error))


@app.command()
@_with_settings()
def serve(**flags: Any) -> None:
    """Serve plans until SIGTERM. Flags win over the environment."""
    from bucketplan_server.logs import configure_logs
    from bucketplan_server.serve import run

    settings = _settings(flags)
    try:
        check_tls(settings)
    except SettingsError as error:
        _fail(str(error), EXIT_USAGE)
    configure_logs(settings.log_level, settings.log_format)
    with _with_store(settings):
        run(settings)


@app.command()
@_with_settings("database", "store_timeout_seconds")
def migrate(**flags: Any) -> None:
    """Bring the database to this release's tables (serve does it by itself at start)."""
    from bucketplan_server.store.engine import open_store, without_password
    from bucketplan_server.store.migrate import head_revision

    settings = _settings(flags)

    async def upgrade() -> None:
        store = await open_store(settings.database, timeout_seconds=settings.store_timeout_seconds)
        await store.close()

    with _with_store(settings):
        asyncio.run(upgrade())
    typer.echo(f"{without_password(settings.database)} is at migration {head_revision()}")


@app.command()
@_with_settings("database", "store_timeout_seconds")
def verify(
    replay: Annotated[bool, typer.Option(help="plan every revision again and compare")] = True,
    expect_head: Annotated[
        str | None, typer.Option(help="NUMBER:DIGEST of an event noted before; fails if the log no longer holds it")
    ] = None,
    **flags: Any,
) -> None:
    """Check a database offline: the event chain, every digest, every plan. Exit status 1 if anything is found."""
    from bucketplan_server.audit import verify as verify_store
    from bucketplan_server.planner.planned import RevisionJob
    from bucketplan_server.planner.revise import replay as replay_here
    from bucketplan_server.store.engine import open_for_reading

    settings = _settings(flags)
    head = None if expect_head is None else _read_head(expect_head)

    async def plan_again(job: RevisionJob, stored: bytes) -> str | None:
        return replay_here(job, stored)

    async def check() -> Verification:
        store = await open_for_reading(settings.database, timeout_seconds=settings.store_timeout_seconds)
        try:
            return await verify_store(store, plan_again if replay else None, expected_head=head)
        finally:
            await store.close()

    with _with_store(settings):
        found = asyncio.run(check())
    for finding in found.findings:
        _errors.print(escaped(f"{finding.where}: {finding.detail}"), markup=False)
    for skipped in found.unreplayed:
        typer.echo(escaped(f"not replayed: {skipped.where}: {skipped.detail}"))
    typer.echo(
        f"{found.num_events} events, {found.num_signatures} signatures, {found.num_revisions} revisions, "
        f"{found.num_replayed} replayed, {len(found.findings)} findings; head {found.num_events}:{found.head}"
    )
    if not found.holds:
        raise typer.Exit(EXIT_FAILED)


def _read_head(text: str) -> tuple[int, str]:
    number, _, digest = text.partition(":")
    if not number.isdecimal() or len(number) > 19 or len(digest) != 64:
        _fail(f"--expect-head: {text!r} is not NUMBER:DIGEST as verify prints it", EXIT_USAGE)
    return int(number), digest


app.add_typer(cli_tokens.app)


def _manage(settings: Settings, work: Callable[[], T]) -> T:
    try:
        with _with_store(settings):
            return work()
    except cli_tokens.TokenError as error:
        _fail(str(error), EXIT_USAGE)


@cli_tokens.app.command("create")
@_with_settings("database", "store_timeout_seconds", "refresh_seconds")
def token_create(
    name: cli_tokens.Name,
    role: Annotated[str, typer.Option(help="rank, auditor or operator.")],
    namespace: Annotated[str | None, typer.Option(help="Jobs of this namespace only; all where left out.")] = None,
    expires: Annotated[str | None, typer.Option(help="After a duration (90d, 12h) or at a moment; else never.")] = None,
    reason: cli_tokens.Reason = "token made",
    output: cli_tokens.SecretFile = None,
    **flags: Any,
) -> None:
    """Make a token and print its secret, once: only a hash of it is stored."""
    settings = _settings(flags)
    if output is not None and output.exists():
        _fail(f"--output: {output} exists; name a new file", EXIT_USAGE)
    secret = _manage(
        settings,
        lambda: cli_tokens.create(settings, name, role=role, namespace=namespace, expires=expires, reason=reason),
    )
    if output is None:
        typer.echo(secret)
        return
    try:
        cli_tokens.write_secret(output, secret)
    except OSError as error:
        _fail(f"--output: {output} cannot be written: {error.strerror}; revoke {name} and make another token")


@cli_tokens.app.command("list")
@_with_settings("database", "store_timeout_seconds")
def token_list(
    as_json: Annotated[bool, typer.Option("--json", help="Answer with JSON.")] = False, **flags: Any
) -> None:
    """List tokens with role, namespace and state; secrets are not known here."""
    settings = _settings(flags)
    cli_tokens.print_tokens(_manage(settings, lambda: cli_tokens.list_tokens(settings)), as_json=as_json)


@cli_tokens.app.command("revoke")
@_with_settings("database", "store_timeout_seconds", "refresh_seconds")
def token_revoke(name: cli_tokens.Name, reason: cli_tokens.Reason = "token revoked", **flags: Any) -> None:
    """Revoke a token for ever; running servers refuse it within their `refresh_seconds`."""
    settings = _settings(flags)
    _manage(settings, lambda: cli_tokens.revoke(settings, name, reason=reason))
    typer.echo(f"{name} is revoked")


@app.command()
@_with_settings("database")
def backup(
    target: Annotated[Path, typer.Argument(help="New file to write.", show_default=False)],
    **flags: Any,
) -> None:
    """Copy a SQLite database to a new file, beside a running server or without one."""
    from bucketplan_server.store.backup import back_up

    settings = _settings(flags)
    source = settings.sqlite_path
    if source is None:
        _fail("backup copies SQLite files; a PostgreSQL database is backed up with pg_dump --format=custom", EXIT_USAGE)
    with _with_store(settings):
        num_bytes = back_up(source, target)
    typer.echo(f"{target}: {num_bytes} bytes; check it with bucketplan-server verify --database {target}")


@app.command()
def version() -> None:
    """Print the release."""
    typer.echo(f"bucketplan-server {__version__} (Python {sys.version.split()[0]})")


def main() -> None:
    """Entry of the command `bucketplan-server`."""
    app()
