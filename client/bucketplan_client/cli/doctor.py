"""`bucketplan doctor`: what keeps this host from getting plans, check by check, each with what to do about it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from urllib.parse import quote

from bucketplan_client.answers import Answer
from bucketplan_client.arguments import BadArgument
from bucketplan_client.cache import default_cache, default_cache_folder
from bucketplan_client.environment import DISABLE_VARIABLE, disabled_by_environment, job_from_environment
from bucketplan_client.errors import BadAddress, BadToken, ClientError, ServerRefused
from bucketplan_client.lean_httpx import httpx
from bucketplan_client.transport import JSON, PlanClient
from bucketplan_core.attempt import MAX_RANK
from bucketplan_core.request import CAPTURE_VERSION, SCHEMA_VERSION
from bucketplan_core.wire import WireValue

__all__ = ["Check", "examine"]

_MOST_CLOCK_SKEW_S = 30.0
_PROBE_BYTES = 64 * 2**10
"""More than a file system keeps beside its blocks: an empty file can still be made where no block is left."""
_GROUP_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check: what was found, and what to do where it is not well."""

    name: str
    ok: bool
    found: str
    remedy: str = ""

    def to_wire(self) -> dict[str, WireValue]:
        return {"found": self.found, "name": self.name, "ok": self.ok, "remedy": self.remedy}


def examine(address: str | None, *, token: str | None, timeout_s: float) -> list[Check]:
    """All checks in order; later ones are left out where an earlier one makes them pointless."""
    checks = [_switch()]
    try:
        client = PlanClient(address, token=token, deadline_s=min(timeout_s, 10.0))
    except (BadAddress, BadToken) as error:
        return [*checks, Check(name="server", ok=False, found=error.message, remedy=error.remedy), *_host()]
    with client:
        checks += _server(client)
    return [*checks, *_host()]


def _switch() -> Check:
    off = disabled_by_environment()
    value = os.environ.get(DISABLE_VARIABLE, "not set")
    return Check(
        name="kill switch",
        ok=not off,
        found=f"{DISABLE_VARIABLE} is {value}",
        remedy="Unset it to have buckets; one rank that has it set switches off the whole attempt" if off else "",
    )


def _server(client: PlanClient) -> list[Check]:
    checks = [_name(client.address)]
    if not checks[0].ok:
        return checks
    try:
        before = time.time()
        ready = client.get("/readyz", accept=JSON)
        after = time.time()
    except ClientError as error:
        return [*checks, Check(name="server", ok=False, found=error.message, remedy=error.remedy)]
    checks.append(Check(name="server", ok=True, found=f"{client.address} is ready"))
    checks += _clock(ready, before, after)
    checks += _access(client)
    checks += _versions(ready.body)
    return checks


def _name(address: str) -> Check:
    url = httpx.URL(address)
    try:
        # The host in the form in which the client asks for it; Python's own is that of an older IDNA.
        found = socket.getaddrinfo(url.raw_host, url.port or (443 if url.scheme == "https" else 80))
    except OSError as error:
        return Check(
            name="name",
            ok=False,
            found=f"{url.host} cannot be resolved: {error}",
            remedy="Check the spelling of the address and this host's DNS",
        )
    return Check(name="name", ok=True, found=f"{url.host} is {found[0][4][0]}")


def _clock(answer: Answer, before: float, after: float) -> list[Check]:
    text = answer.headers.get("Date")
    if text is None:
        return []
    try:
        server_s = parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):
        return []
    # The header has whole seconds, and the answer was written somewhere between the two readings.
    skew_s = max(0.0, before - server_s - 1.0, server_s - after)
    ok = skew_s <= _MOST_CLOCK_SKEW_S
    return [
        Check(
            name="clock",
            ok=ok,
            found=f"differs by {skew_s:.0f} s from the server's",
            remedy="" if ok else "Synchronise this host's clock (chrony, ntpd): reports and logs cannot be matched",
        )
    ]


def _access(client: PlanClient) -> list[Check]:
    """Whether this caller may do what a rank does, for the job that the environment names; nothing is stored."""
    try:
        # A signature that nobody has: 404 says that the call itself was allowed.
        client.known_plan("0" * 64)
    except ClientError as error:
        return [_refused("token", error)]
    checks = []
    try:
        job = job_from_environment()
    except BadArgument as error:
        job = ""
        checks.append(Check(name="job", ok=False, found=error.message, remedy=error.remedy))
    try:
        # No reports, of an attempt that no job has: whoever may report is told that there is none.
        client.post(f"/v1/jobs/{quote(job or 'doctor', safe='')}/attempts/{MAX_RANK}/reports", {"reports": []})
        stored: object = None
    except ServerRefused as error:
        problem = error.problem
        if "needs" in problem.extra:
            held, name = problem.extra.get("role"), problem.extra.get("token")
            return [
                *checks,
                Check(
                    name="token",
                    ok=False,
                    found=f"token {name!r} has the role {held!r}, with which no attempt can be opened",
                    remedy="Ranks need a token of the role 'rank': bucketplan-server token create NAME --role rank",
                ),
            ]
        if problem.slug == "invalid-parameter" or (problem.slug == "forbidden" and problem.extra.get("path") == "job"):
            refused = Check(name="job", ok=False, found=problem.detail, remedy=_JOB_REMEDIES[problem.status == 403])
            return [_role(client), *checks, refused]
        if problem.slug != "unknown-attempt":
            return [*checks, _refused("token", error)]
        stored = problem.extra.get("job")
    except ClientError as error:
        return [*checks, _refused("token", error)]
    if job:
        namespace, scoped, _ = str(stored or "").rpartition("~")
        where = f", in namespace {namespace!r}" if scoped else ""
        checks.append(Check(name="job", ok=True, found=f"{job!r}{where}; this caller may open and report its attempts"))
    return [_role(client), *checks]


_JOB_REMEDIES = {
    False: "Name the job with letters, digits and ._:- (BUCKETPLAN_JOB)",
    True: "Use a token of the job's namespace, or name the job without one (BUCKETPLAN_JOB)",
}


def _role(client: PlanClient) -> Check:
    """What the token of a caller who may do what ranks do allows beyond that."""
    try:
        client.get("/v1/profiles", accept=JSON)
    except ServerRefused as error:
        extra = error.problem.extra
        if "needs" in extra:
            return Check(
                name="token", ok=True, found=f"token {extra.get('token')!r} has the role {extra.get('role')!r}"
            )
        return _refused("token", error)
    except ClientError as error:
        return _refused("token", error)
    found = "this caller is an operator, or the server needs no tokens; ranks need no more than the role 'rank'"
    return Check(name="token", ok=True, found=found)


def _refused(name: str, error: ClientError) -> Check:
    found = str(error.problem) if isinstance(error, ServerRefused) else error.message
    return Check(name=name, ok=False, found=found, remedy=error.remedy)


def _versions(ready: WireValue) -> list[Check]:
    """What decides whether client and server understand each other; releases are named and decide nothing."""
    from importlib.metadata import version

    from bucketplan_core.planners import PLANNERS

    said = ready if isinstance(ready, Mapping) else {}
    found = f"client {version('bucketplan')}, server {said.get('version', 'unknown')!s}"
    if "schema" not in said:
        return [Check(name="versions", ok=True, found=f"{found}; this server does not say which schema it speaks")]
    offered = said.get("planners")
    theirs = {str(planner) for planner in offered} if isinstance(offered, list | tuple) else set()
    mine = {planner.version for planner in PLANNERS}
    schema_ok, capture_ok = said["schema"] == SCHEMA_VERSION, said.get("capture") == CAPTURE_VERSION
    return [
        Check(name="versions", ok=True, found=found),
        Check(
            name="schema",
            ok=schema_ok,
            found=f"client {SCHEMA_VERSION}, server {said['schema']!r}",
            remedy="" if schema_ok else "Install a client and a server of one schema version; no call works until then",
        ),
        Check(
            name="capture",
            ok=capture_ok,
            found=f"client {CAPTURE_VERSION}, server {said.get('capture')!r}",
            remedy="" if capture_ok else "Install releases of one capture version; attempts do not open otherwise",
        ),
        Check(
            name="planners",
            ok=mine == theirs,
            found=_planners(mine, theirs),
            remedy=""
            if mine == theirs
            else "Use planner versions that both hold: without the server, ranks cannot plan by one that they lack",
        ),
    ]


def _planners(mine: set[str], theirs: set[str]) -> str:
    sides = {"on both sides": mine & theirs, "only in the client": mine - theirs, "only in the server": theirs - mine}
    return "; ".join(f"{', '.join(sorted(held))} {where}" for where, held in sides.items() if held)


def _host() -> list[Check]:
    return [_cache(), _group()]


def _cache() -> Check:
    folder = default_cache_folder()
    if default_cache() is None:
        found = f"none ({folder}): a start while the server is away has no epoch to go on with"
        return Check(name="cache", ok=True, found=found)
    probe = folder / f".doctor-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with probe.open("wb") as file:
                file.write(b"\0" * _PROBE_BYTES)
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        return Check(
            name="cache",
            ok=False,
            found=f"{folder} cannot be written: {error}",
            remedy="Set BUCKETPLAN_CACHE to a folder on a local disk with room that this user may write",
        )
    return Check(name="cache", ok=True, found=str(folder))


def _group() -> Check:
    present = [name for name in _GROUP_VARIABLES if os.environ.get(name)]
    if not present:
        return Check(name="group", ok=True, found="not under a launcher; nothing to check here")
    missing = [name for name in _GROUP_VARIABLES if name not in present]
    if missing:
        return Check(
            name="group",
            ok=False,
            found=f"{', '.join(missing)} not set",
            remedy="Start the job with torchrun or srun, so that torch.distributed finds its ranks",
        )
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    try:
        with socket.create_connection((host, int(port)), timeout=5.0):
            pass
    except (OSError, ValueError) as error:
        return Check(
            name="group",
            ok=False,
            found=f"the store at {host}:{port} cannot be reached: {error}",
            remedy="Start rank 0 first, and check that this host may connect to it",
        )
    try:
        job = job_from_environment()
    except BadArgument as error:
        return Check(name="group", ok=False, found=error.message, remedy=error.remedy)
    rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
    return Check(name="group", ok=True, found=f"rank {rank} of {world} of job {job!r}, store at {host}:{port}")
