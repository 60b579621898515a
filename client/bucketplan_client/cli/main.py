"""`bucketplan`: read, compare, explain and pin plans; look at jobs; check a host. Each command answers in JSON too."""

from __future__ import annotations

import re
import shlex
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from bucketplan_client.cli.calibrate import calibrate
from bucketplan_client.cli.doctor import Check, examine
from bucketplan_client.cli.explanation import show_explanation
from bucketplan_client.cli.output import (
    EXIT_CODES,
    EXIT_NEGATIVE,
    EXIT_REFUSED,
    EXIT_USAGE,
    Command,
    JsonErrors,
    facts,
    fail,
    failing_well,
    integer_of,
    moment,
    not_dots,
    not_empty,
    print_json,
    table,
    working,
)
from bucketplan_client.cli.shapes import (
    ACTIVATED,
    ATTEMPT,
    ATTEMPTS,
    DIFF,
    EVENTS,
    EXPLANATION,
    PLAN,
    PLANS,
    REPLANNED,
    REQUEST,
    TRACE,
    VERIFIED,
    Shape,
    checked,
)
from bucketplan_client.environment import split_secrets
from bucketplan_client.errors import FOREIGN_REMEDY, CorruptAnswer, DeadlineExceeded
from bucketplan_client.transport import JSON, PlanClient
from bucketplan_core.plan import Decision
from bucketplan_core.request import Request

__all__ = ["app", "main"]

app = typer.Typer(
    name="bucketplan",
    cls=JsonErrors,
    help=f"The planning service for communication buckets, asked over HTTP.\n\n{EXIT_CODES}",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@dataclass(frozen=True, slots=True)
class _Server:
    address: str | None
    token: str | None = field(repr=False)
    timeout_s: float

    def connect(self) -> PlanClient:
        return PlanClient(self.address, token=self.token, deadline_s=self.timeout_s)


_HEX = re.compile(r"[0-9a-f]{1,64}")


def _signature(value: str | None) -> str | None:
    """Refuse what no signature begins with: it goes into the address of a call."""
    if not_empty(value) is not None and _HEX.fullmatch(str(value)) is None:
        raise typer.BadParameter(f"{value!r} is no signature, which is 64 of 0-9a-f, nor the first of these")
    return value


AsJson = Annotated[bool, typer.Option("--json", help="Answer with JSON.")]
Signature = Annotated[
    str,
    typer.Argument(help="Signature of the plan, or its first characters.", metavar="SIGNATURE", callback=_signature),
]
Revision = Annotated[int | None, typer.Option(help="Revision; the active one where left out.", min=1)]
Reason = Annotated[str, typer.Option(help="Why; goes into the audit log.", callback=not_empty)]


@app.callback()
def _connect(
    context: typer.Context,
    server: Annotated[str | None, typer.Option(envvar="BUCKETPLAN_SERVER", help="Address of the server.")] = None,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="BUCKETPLAN_TOKEN",
            help="Bearer token; `ps` shows it, BUCKETPLAN_TOKEN_FILE does not.",
            show_envvar=True,
        ),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that one call may take in all.", min=0.1)] = 30.0,
) -> None:
    context.obj = _Server(server, token, timeout)


def _get(context: typer.Context, path: str, shape: Shape, *, deadline_s: float | None = None, **params: object) -> Any:
    given = {name: str(value) for name, value in params.items() if value is not None}
    with failing_well(context), context.obj.connect() as client:
        answer = client.get(path, params=given, accept=JSON, deadline_s=deadline_s)
        return checked(answer, shape, where=client.where_of(path))


def _post(context: typer.Context, path: str, body: dict[str, Any], shape: Shape) -> Any:
    with failing_well(context), context.obj.connect() as client, working("waiting for the server"):
        return checked(client.post(path, body, repeatable=False), shape, where=client.where_of(path))


def _whole(context: typer.Context, signature: str) -> str:
    """A signature from its first characters, as long as one stored plan begins with them."""
    if len(signature) == 64:
        return signature
    cursor: str | None = None
    seen: set[str] = set()
    found: set[str] = set()
    ends = time.monotonic() + context.obj.timeout_s
    while True:
        left_s = max(0.0, ends - time.monotonic())
        page = _get(context, "/v1/plans", PLANS, deadline_s=left_s, limit=1000, cursor=cursor)
        found |= {row["signature"] for row in page["plans"] if row["signature"].startswith(signature)}
        cursor = page.get("next")
        if cursor is None:
            break
        with failing_well(context):
            if cursor in seen:
                raise CorruptAnswer(f"$.next: {cursor!r} leads back to a page already read", remedy=FOREIGN_REMEDY)
            if time.monotonic() > ends:
                took_s = context.obj.timeout_s
                raise DeadlineExceeded("the list of plans has not ended", num_tries=len(seen) + 1, elapsed_s=took_s)
        seen.add(cursor)
    if len(found) == 1:
        return found.pop()
    if not found:
        unknown = {"type": "urn:bucketplan:problem:unknown-signature", "status": 404}
        fail(context, f"{signature!r}: no stored plan begins with it", status=EXIT_REFUSED, problem=unknown)
    raise typer.BadParameter(f"{signature!r}: {len(found)} plans begin with it", param_hint="SIGNATURE")


@app.command(cls=Command)
def plans(
    context: typer.Context,
    job: Annotated[str | None, typer.Option(help="Plans that this job has reported.", callback=not_empty)] = None,
    parameter: Annotated[str | None, typer.Option(help="Part of a parameter's name.")] = None,
    module: Annotated[str | None, typer.Option(help="Part of a module's path.")] = None,
    group: Annotated[str | None, typer.Option(help="Role of a group.")] = None,
    strategy: Annotated[str | None, typer.Option(help="none, size, module or auto.")] = None,
    limit: Annotated[int, typer.Option(help="Most plans shown.", min=1, max=1000)] = 50,
    as_json: AsJson = False,
) -> None:
    """List stored plans, the newest first."""
    page = _get(
        context,
        "/v1/plans",
        PLANS,
        job=job,
        parameter=parameter,
        module=module,
        group=group,
        strategy=strategy,
        limit=limit,
    )
    if as_json:
        print_json(page)
        return
    table(
        ("signature", "strategy", "groups", "candidates", "stored (UTC)"),
        (
            (row["signature"][:12], row.get("strategy"), row.get("groups"), row.get("num_candidates"), _made(row))
            for row in page["plans"]
        ),
        empty="no plan is stored that fits",
    )


def _made(row: dict[str, Any]) -> str:
    return moment(row.get("created_ns"))


@app.command(cls=Command)
def show(context: typer.Context, signature: Signature, revision: Revision = None, as_json: AsJson = False) -> None:
    """Show one plan: its buckets, with what is in them."""
    whole = _whole(context, signature)
    path = f"/v1/plans/{whole}" if revision is None else f"/v1/plans/{whole}/revisions/{revision}"
    plan = _get(context, path, PLAN)
    request = _get(context, f"/v1/plans/{whole}/request", REQUEST)
    with failing_well(context):
        _check_plan(whole, plan, request)
    if as_json:
        print_json({"plan": plan, "request": request})
        return
    decision, candidates = plan["decision"], request["candidates"]
    facts(
        {
            "signature": whole,
            "decision": plan["digest"],
            "planner": decision["planner"],
            "groups": [f"{group['role']} ({group['size']} ranks)" for group in request["groups"]],
            **{name: value for name, value in sorted(plan["assessment"].items()) if isinstance(value, int | str)},
        }
    )
    buckets = decision["buckets"]
    table(
        ("bucket", "rewrite", "members", "first", "last"),
        (
            (name, rewrite, len(members), _name(candidates, members[0]), _name(candidates, members[-1]))
            for name, rewrite, members in zip(buckets["id"], buckets["rewrite"], buckets["members"], strict=True)
        ),
        empty="the plan has no buckets",
    )


def _check_plan(signature: str, plan: dict[str, Any], request: dict[str, Any]) -> None:
    decision = Decision.from_wire(plan["decision"])
    held = {"request": Request.from_wire(request).signature, "decision": decision.signature}
    for what, actual in held.items():
        if actual != signature:
            raise CorruptAnswer(f"the {what} is that of {actual}, and {signature} was asked for", remedy=FOREIGN_REMEDY)
    if decision.digest != plan["digest"]:
        raise CorruptAnswer(f"the decision hashes to {decision.digest} and not to {plan['digest']!r}")


def _name(candidates: dict[str, list[Any]], member: int) -> str:
    return candidates["param_name"][member] or f"candidate {member}"


_NAMES_OF_DIFF = frozenset({"digest_a", "digest_b", "num_unchanged", "signature_a", "signature_b"})


@app.command(cls=Command)
def diff(
    context: typer.Context,
    a: Annotated[str, typer.Argument(help="Signature of one plan.", callback=_signature)],
    b: Annotated[str, typer.Argument(help="Signature of the other.", callback=_signature)],
    revision_a: Revision = None,
    revision_b: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Compare two plans and the graphs they are for; exit status 1 where they differ."""
    found = _get(
        context,
        "/v1/diff",
        DIFF,
        a=_whole(context, a),
        b=_whole(context, b),
        revision_a=revision_a,
        revision_b=revision_b,
    )
    if as_json:
        print_json(found)
    else:
        rows = [
            (part, name, _brief(value))
            for part in ("request", "decision")
            for name, value in found[part].items()
            if name not in _NAMES_OF_DIFF and _brief(value)
        ]
        table(("part", "what", "from a to b"), rows, empty="nothing differs")
    if found["request"]["signature_a"] != found["request"]["signature_b"] or (
        found["decision"]["digest_a"] != found["decision"]["digest_b"]
    ):
        raise typer.Exit(EXIT_NEGATIVE)


def _odd_slots(slots: list[dict[str, Any]]) -> str:
    """What the graphs of a group say in which its ranks do not agree, with the first field that differs."""
    said = []
    for slot in slots:
        if slot.get("state") != "agreed":
            first = _brief(slot.get("difference"))
            said.append(f"{slot.get('slot')} {slot.get('ordinal')}: {slot.get('summary')}{first and f' ({first})'}")
    return _brief(said)


def _brief(value: Any) -> str:
    """A line for what differs, empty for what does not."""
    if value in (None, [], {}, 0, ""):
        return ""
    if isinstance(value, list):
        shown = "; ".join(_brief(item) for item in value[:3])
        return shown + (f"; and {len(value) - 3} more" if len(value) > 3 else "")
    if isinstance(value, dict):
        return ", ".join(f"{name} {_brief(item)}" for name, item in sorted(value.items()) if _brief(item))
    return str(value)


@app.command(cls=Command)
def explain(context: typer.Context, signature: Signature, revision: Revision = None, as_json: AsJson = False) -> None:
    """Say why each bucket is as it is, and what limits the step."""
    with working("explaining"):
        found = _get(context, f"/v1/plans/{_whole(context, signature)}/explain", EXPLANATION, revision=revision)
    if as_json:
        print_json(found)
        return
    show_explanation(found)


@app.command(cls=Command)
def trace(
    context: typer.Context,
    signature: Signature,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path("bucketplan-trace.json"),
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Write the simulated step as a Chrome trace, for ui.perfetto.dev."""
    with working("simulating"):
        found = _get(context, f"/v1/plans/{_whole(context, signature)}/trace", TRACE, revision=revision)
    if as_json:
        print_json(found)
        return
    import json

    try:
        output.write_text(json.dumps(found, sort_keys=True), encoding="utf-8")
    except OSError as error:
        problem = {"type": "urn:bucketplan:client:OSError", "remedy": "Name another file with --output"}
        fail(context, f"{output} cannot be written: {error}", status=EXIT_USAGE, problem=problem)
    facts({"written": str(output), "open it at": "https://ui.perfetto.dev"})


@app.command(cls=Command)
def job(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the job.", metavar="JOB", callback=not_dots)],
    attempt: Annotated[int | None, typer.Argument(help="Number of the attempt; lists all where left out.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the attempts of a job, or the state of one; exit status 1 where ranks diverged or its opening stalled."""
    from urllib.parse import quote

    path = f"/v1/jobs/{quote(name, safe='')}/attempts"
    if attempt is None:
        found = _get(context, path, ATTEMPTS)
        if not found["attempts"]:
            unknown = {"type": "urn:bucketplan:problem:unknown-attempt", "status": 404}
            fail(context, f"job {name!r} has no attempts", status=EXIT_REFUSED, problem=unknown)
        if as_json:
            print_json(found)
            return
        table(
            ("attempt", "epoch", "opened by", "opened (UTC)"),
            (
                (row["attempt"], row["epoch_id"][:12], row["opened_by"], moment(row["opened_ns"]))
                for row in found["attempts"]
            ),
            empty="no attempts",
        )
        return
    state = _get(context, f"{path}/{attempt}", ATTEMPT)
    if as_json:
        print_json(state)
    else:
        facts({"job": state["job"], "attempt": state["attempt"], "epoch": state["epoch_id"], **_flat(state["opening"])})
        table(
            ("group", "members", "state", "details"),
            (
                (row.get("role"), _count(row.get("members")), row.get("state"), _odd_slots(row.get("slots") or []))
                for row in state["groups"]
            ),
            empty="no compilation was reported",
        )
    opening = state["opening"]
    diverged = any(part["state"] == "diverged" for part in (opening, *state["groups"]))
    if diverged or opening["stalled"]:
        raise typer.Exit(EXIT_NEGATIVE)


def _flat(opening: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sorted(opening.items()) if not isinstance(value, dict)}


def _count(members: Any) -> str:
    return f"{len(members)} ranks" if isinstance(members, list) else "-"


@app.command(cls=Command)
def replan(
    context: typer.Context,
    signature: Signature,
    reason: Reason,
    option: Annotated[list[str], typer.Option("--set", help="NAME=VALUE, as strategy=auto; may be repeated.")],
    as_json: AsJson = False,
) -> None:
    """Add a revision planned with other options; it is not active until you activate it."""
    options = _options(option)
    path = f"/v1/plans/{_whole(context, signature)}/revisions"
    made = _post(context, path, {"options": options, "reason": reason}, REPLANNED)
    if as_json:
        print_json(made)
    else:
        facts({"stored as revision": made["revision"], "to serve it": _activation(context, made, reason)})


def _activation(context: typer.Context, made: dict[str, Any], reason: str) -> str:
    """The command that serves the revision `made`, for a shell; without the token, which belongs on no screen."""
    root = context.find_root()
    told = root.get_parameter_source("server")
    by_hand = (
        ["--server", split_secrets(root.obj.address)[0]] if told is not None and told.name == "COMMANDLINE" else []
    )
    revision = str(made["revision"])
    return shlex.join(
        ["bucketplan", *by_hand, "activate", made["signature"], "--revision", revision, "--reason", reason]
    )


def _options(given: list[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--set")
        words: dict[str, Any] = {"true": True, "false": False, "null": None}
        number = integer_of(value)
        if number is None and value.removeprefix("-").isdecimal():
            shown = value if len(value) <= 40 else f"{value[:40]}..."
            raise typer.BadParameter(f"{name}={shown} is larger than any integer of a plan", param_hint="--set")
        options[name] = words.get(value, value) if number is None else number
    return options


@app.command(cls=Command)
def activate(
    context: typer.Context,
    signature: Signature,
    reason: Reason,
    revision: Annotated[int | None, typer.Option(help="Revision to serve.", min=1)] = None,
    for_job: Annotated[str | None, typer.Option("--job", help="Only for this job.", callback=not_empty)] = None,
    as_everyone: Annotated[
        bool, typer.Option("--as-everyone", help="Take back what the job has of its own: serve it what everyone is.")
    ] = False,
    expected: Annotated[int | None, typer.Option(help="Refuse unless this revision is active now.", min=1)] = None,
    as_json: AsJson = False,
) -> None:
    """Serve a revision to attempts that open from now on; also how to roll back."""
    if as_everyone == (revision is not None):
        raise typer.BadParameter("give a number, or --as-everyone, and not both", param_hint="--revision")
    if as_everyone and not for_job:
        raise typer.BadParameter("needs --job: everyone is served some revision", param_hint="--as-everyone")
    body: dict[str, Any] = {"reason": reason, "revision": revision}
    body |= {"job": for_job} if for_job else {}
    body |= {"expected": expected} if expected else {}
    done = _post(context, f"/v1/plans/{_whole(context, signature)}/activate", body, ACTIVATED)
    if as_json:
        print_json(done)
    else:
        active = "as for everyone" if as_everyone else done.get("revision")
        facts({"active": active, "before": done.get("before"), "open attempts": "keep the epoch they have"})


@app.command(cls=Command)
def events(
    context: typer.Context,
    after: Annotated[int, typer.Option(help="Only events behind this number.", min=0)] = 0,
    limit: Annotated[int, typer.Option(help="Most events shown.", min=1, max=1000)] = 100,
    signature: Annotated[str | None, typer.Option(help="Only events of this plan.", callback=_signature)] = None,
    for_job: Annotated[str | None, typer.Option("--job", help="Only events of this job.", callback=not_empty)] = None,
    as_json: AsJson = False,
) -> None:
    """Show the audit log, the oldest event first."""
    wanted = None if signature is None else _whole(context, signature)
    found = _get(context, "/v1/events", EVENTS, after=after, limit=limit, signature=wanted, job=for_job)
    if as_json:
        print_json(found)
        return
    table(
        ("number", "when (UTC)", "kind", "actor", "reason"),
        (
            (row.get("seq"), moment(row.get("at_ns")), row.get("kind"), row.get("actor"), row.get("reason"))
            for row in found["events"]
        ),
        empty="no events",
    )


@app.command(cls=Command)
def verify(
    context: typer.Context,
    replay: Annotated[bool, typer.Option(help="Plan every revision again.")] = False,
    as_json: AsJson = False,
) -> None:
    """Have the server walk its audit chain and recompute every digest; exit status 1 where something does not hold."""
    with working("verifying"):
        found = _get(context, "/v1/events/verify", VERIFIED, replay=str(replay).lower())
    if as_json:
        print_json(found)
    else:
        facts({"holds": found["holds"], "events": found["num_events"], "head of the chain": found["head"]})
        if found["findings"]:
            table(("finding",), ([_brief(finding)] for finding in found["findings"]), empty="")
    if not found["holds"]:
        raise typer.Exit(EXIT_NEGATIVE)


@app.command(cls=Command)
def doctor(context: typer.Context, as_json: AsJson = False) -> None:
    """Check server, token, clock, versions, cache and process group from this host, and say what to do."""
    with working("checking"):
        checks = examine(context.obj.address, token=context.obj.token, timeout_s=context.obj.timeout_s)
    if as_json:
        print_json({"checks": [check.to_wire() for check in checks], "healthy": all(check.ok for check in checks)})
    else:
        facts({f"{'ok' if check.ok else 'NO'}  {check.name}": _found(check) for check in checks})
    if not all(check.ok for check in checks):
        raise typer.Exit(EXIT_NEGATIVE)


app.command(cls=Command)(calibrate)


def _found(check: Check) -> str:
    return check.found if check.ok else f"{check.found}. {check.remedy}"


def main() -> None:
    """Run the command line."""
    app()
