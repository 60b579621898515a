"""How commands answer: a table for people, JSON for programs, errors with their exit status."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from bucketplan_client.arguments import BadArgument, is_unicode
from bucketplan_client.errors import (
    BadAddress,
    BadToken,
    ClientError,
    CorruptAnswer,
    DeadlineExceeded,
    ServerRefused,
    ServerUnreachable,
)
from bucketplan_core.fields import escaped
from bucketplan_core.wire import MAX_INT, to_json

__all__ = [
    "EXIT_CODES",
    "EXIT_CORRUPT",
    "EXIT_NEGATIVE",
    "EXIT_OUTPUT",
    "EXIT_REFUSED",
    "EXIT_UNREACHABLE",
    "EXIT_USAGE",
    "Command",
    "JsonErrors",
    "facts",
    "fail",
    "failing_well",
    "integer_of",
    "moment",
    "not_dots",
    "not_empty",
    "print_json",
    "table",
    "working",
]

EXIT_NEGATIVE = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_REFUSED = 4
EXIT_CORRUPT = 5
EXIT_OUTPUT = 6

EXIT_CODES = """Exit status: 0 done; 1 the answer is no (plans differ, verification failed, doctor found something, an
attempt diverged or its opening stalled); 2 wrong usage; 3 the server could not be reached in time; 4 it refused; 5
its answer failed verification; 6 the answer could not be written to stdout. With --json every error is {"error":
{"type", "exit_status", "message", ...}} on stdout, wrong usage too."""

_MOST_DIGITS = 100
"""Leading zeros among them."""

# The library whose errors these are stands inside Typer and has no public name there.
_USAGE_ERROR: Any = typer.BadParameter.__mro__[1]


# Names come from users' models and jobs: they are text, never markup.
class _OutputFailed(Exception):
    """Who reads stdout has gone; as an OSError Click would end it with the status of a no."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise _OutputFailed


_out = _Console(markup=False, highlight=False, soft_wrap=True)
_err = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)


def print_json(document: Any) -> None:
    """Print `document` as indented JSON with sorted keys; characters that are not printable are escaped."""
    lines = to_json(document, indent=2).decode("utf-8").split("\n")
    try:
        sys.stdout.writelines(f"{line if _is_shown(line) else _json_escaped(line)}\n" for line in lines)
    except BrokenPipeError:
        raise _OutputFailed from None


def _is_shown(line: str) -> bool:
    try:
        line.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return line.isprintable()


def _json_escaped(line: str) -> str:
    """The same JSON without what stdout cannot encode or a terminal obeys, such as U+009B."""
    return "".join(c if _is_shown(c) else re.sub("(....)", r"\\u\1", c.encode("utf-16-be").hex()) for c in line)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str) -> None:
    """Print rows under headings, or `empty` where there are none."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        shown.add_column(column, overflow="fold")
    for row in rows:
        shown.add_row(*(Text(_cell(value)) for value in row))
    if shown.row_count:
        _out.print(shown)
    else:
        _out.print(empty)


def facts(pairs: Mapping[str, object]) -> None:
    """Print names and values, one a line."""
    shown = {escaped(name): value for name, value in pairs.items()}
    width = max(map(len, shown), default=0)
    for name, value in shown.items():
        _out.print(f"{name:<{width}}  {_cell(value)}")


def moment(nanoseconds: object) -> str:
    """Nanoseconds since 1970 as a time in UTC."""
    # JSON has integers above 2**53 as texts.
    if not str(nanoseconds).isdecimal():
        return "-"
    return datetime.fromtimestamp(int(str(nanoseconds)) // 1_000_000_000, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return escaped(", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value))


@contextmanager
def working(what: str) -> Iterator[None]:
    """Show on the terminal that `what` is going on and for how long; nothing where stderr is no terminal."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=_err, transient=True, disable=not _err.is_terminal) as progress:
        progress.add_task(what, total=None)
        yield


@contextmanager
def failing_well(context: typer.Context) -> Iterator[None]:
    """End the command with the message and status of an error of the client; with ``--json`` as JSON on stdout."""
    try:
        yield
    except ClientError as error:
        problem: dict[str, Any] = {"type": f"urn:bucketplan:client:{type(error).__name__}"}
        if isinstance(error, ServerRefused):
            refused = error.problem
            problem = {"type": refused.type, "title": refused.title, "status": refused.status, "detail": refused.detail}
        here = {name: value for name, value in asdict(error.where).items() if value is not None}
        fail(context, str(error), status=_status_of(error), problem={**problem, "remedy": error.remedy, "where": here})


def fail(context: typer.Context, message: str, *, status: int, problem: Mapping[str, Any]) -> NoReturn:
    """End the command with `status` and `message`; with ``--json`` as ``{"error": ...}`` on stdout, `problem` in it."""
    if context.params.get("as_json"):
        print_json({"error": {**problem, "exit_status": status, "message": message}})
    else:
        _err.print(f"error: {escaped(message, lines=True)}")
    raise typer.Exit(status) from None


def _refuse_what_cannot_be_sent(context: Any) -> None:
    """Raise wrong usage that names the option, for texts that are no UTF-8 and integers that no document holds."""
    for parameter in context.command.params:
        if parameter.name == "token":  # a secret, which its own check does not quote
            continue
        given = context.params.get(parameter.name)
        for value in given if isinstance(given, list | tuple) else [given]:
            if isinstance(value, str) and not is_unicode(value):
                raise typer.BadParameter(f"{value!r} is no UTF-8", ctx=context, param=parameter)
            if isinstance(value, int) and not -MAX_INT <= value <= MAX_INT:
                raise typer.BadParameter(f"{value} is above {MAX_INT}", ctx=context, param=parameter)


def _refuse_output(reason: str | None) -> NoReturn:
    """End with the status of an answer not written; in silence where the reader wants no more, as `head` does."""
    if sys.stderr is not None and reason is not None:
        with suppress(OSError):
            sys.stderr.write(f"error: the answer could not be written to stdout: {reason}\n")
    if sys.stdout is not None:
        # What is left in its buffer would be tried again, and complained of, when Python ends.
        with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
    sys.exit(EXIT_OUTPUT)


class Command(TyperCommand):
    """A command whose arguments are all such that a request can hold them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        left = super().parse_args(ctx, args)
        _refuse_what_cannot_be_sent(ctx)
        return left


class JsonErrors(TyperGroup):
    """The application, whose wrong usage is an ``{"error": ...}`` on stdout where the arguments hold ``--json``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        left = super().parse_args(ctx, args)
        _refuse_what_cannot_be_sent(ctx)
        return left

    def main(self, *args: Any, **named: Any) -> Any:
        """Run it; what stdout does not take ends with one line on stderr, and escaped what its encoding lacks."""
        if not named.get("standalone_mode", True):
            return self._main(*args, **named)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        if sys.stdout is None:
            _refuse_output("it is closed")
        ended: SystemExit | None = None
        try:
            try:
                self._main(*args, **named)
            except SystemExit as status:
                ended = status
            sys.stdout.flush()
        except (BrokenPipeError, _OutputFailed):
            _refuse_output(None)
        except OSError as error:
            _refuse_output(error.strerror or str(error))
        if ended is None:
            return None
        raise ended

    def _main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        as_json = standalone_mode and "--json" in given
        alone = standalone_mode and not as_json
        try:
            status = super().main(given, prog_name, complete_var, alone, windows_expand_args, **extra)
        except _USAGE_ERROR as error:
            if not as_json:
                raise
            problem = {"type": f"urn:bucketplan:client:{type(error).__name__}", "remedy": "See --help of the command"}
            status = error.exit_code
            print_json({"error": {**problem, "exit_status": status, "message": error.format_message()}})
        except typer.Abort:
            if not as_json:
                raise
            status = EXIT_NEGATIVE
        if not as_json:
            return status
        sys.exit(status if isinstance(status, int) else 0)


def integer_of(text: str) -> int | None:
    """The integer that `text` spells, None where it spells none that a document can hold."""
    # Python parses no more than some thousand digits.
    if not text.removeprefix("-").isdecimal() or len(text) > _MOST_DIGITS:
        return None
    value = int(text)
    return value if -MAX_INT <= value <= MAX_INT else None


def not_dots(value: str | None) -> str | None:
    """Refuse an empty name, and those that a URL leaves out of its path."""
    if value in (".", ".."):
        raise typer.BadParameter(f"{value!r} is no name: URLs leave it out")
    return not_empty(value)


def not_empty(value: str | None) -> str | None:
    """Refuse an empty argument or option, which is what an unset variable of a shell gives."""
    if value is not None and not value.strip():
        raise typer.BadParameter("it is empty; is a variable unset?")
    return value


def _status_of(error: ClientError) -> int:
    if isinstance(error, BadAddress | BadArgument | BadToken):
        return EXIT_USAGE
    if isinstance(error, ServerUnreachable | DeadlineExceeded):
        return EXIT_UNREACHABLE
    if isinstance(error, ServerRefused):
        return EXIT_REFUSED
    return EXIT_CORRUPT if isinstance(error, CorruptAnswer) else EXIT_NEGATIVE
