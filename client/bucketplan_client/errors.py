"""Every error that the client raises, in one tree.

    ClientError                    `where` (rank, job, signature, server) and `remedy`
    ├── ServerError                talking to the server failed
    │   ├── ServerUnreachable      no connection could be made within the deadline
    │   ├── DeadlineExceeded       the server was reached, but gave no whole answer within the deadline
    │   ├── ServerRefused          it answered with a problem: `problem`
    │   │   └── AccessRefused      401 or 403: the token does not allow the call
    │   ├── CorruptAnswer          it answered what fails verification: `reason`
    │   ├── BadAddress             the server's address is no http or https URL: `address`
    │   └── BadToken               the token cannot be read or sent: `reason`; the secret itself is never shown
    ├── ScopeError                 module scopes do not fit the live model
    │   ├── UnknownScope           no module has that path: `spec`, `similar`
    │   ├── EmptyScope             its modules hold no parameter: `spec`
    │   └── OverlappingScopes      two scopes claim one module or parameter: `first`, `second`, `shared`
    ├── AgreementError             ranks of one job do not hold the same; raised alike on all of them
    │   ├── RanksDisagree          `holders`, `odd_ranks`, `difference`
    │   ├── RankFailed             a rank could not take part: `failures`
    │   └── RanksMissing           nothing was heard of them within the deadline: `missing`
    ├── OpeningAborted             the attempt was not opened: `outcome`
    ├── StoreFailed                the job's rendezvous store did not answer
    ├── CacheDamaged               a file of the plan cache is not what its name promises: `path` (reported, not raised)
    ├── FallbackRefused            no rank may go on without the server here: `rule`
    ├── PassFailed                 describing, planning or rewriting a graph failed: `step`, `cause`
    ├── StalePlan                  the graph is not the described one any more: `change` (rewrite/errors.py)
    ├── RewriteError               the rewrite was taken back: `node`, `reason` (rewrite/errors.py)
    ├── BadArgument                an argument is nothing that the call takes: `option`, `value` (arguments.py)
    ├── LatencyTooLong           what was measured fits no profile: `op`, `alpha_ns`, `most_ns` (calibrate/fit.py)
    ├── CompileConflict            an option of torch.compile gets in the way (inductor_options.py)
    └── PipelineConflict           an option of torchtitan gets in the way (torchtitan.py)

Errors of `bucketplan_core` say what is wrong with a document. These add where it happened and what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from bucketplan_core.errors import BucketplanError, describe_ranks

__all__ = [
    "FOREIGN_REMEDY",
    "AccessRefused",
    "AgreementError",
    "BadAddress",
    "BadToken",
    "CacheDamaged",
    "ClientError",
    "CorruptAnswer",
    "DeadlineExceeded",
    "EmptyScope",
    "FallbackRefused",
    "OpeningAborted",
    "OverlappingScopes",
    "PassFailed",
    "Problem",
    "RankFailed",
    "RanksDisagree",
    "RanksMissing",
    "ScopeError",
    "ServerError",
    "ServerRefused",
    "ServerUnreachable",
    "StoreFailed",
    "UnknownScope",
    "Where",
    "located",
]

_PROBLEM_PREFIX = "urn:bucketplan:problem:"
_SHOWN_SIGNATURE_CHARACTERS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Where an error happened; None where it does not apply or is not known."""

    rank: int | None = None
    job: str | None = None
    signature: str | None = None
    server: str | None = None

    def at(self, **changes: Any) -> Where:
        """The same place with some facts added."""
        return replace(self, **changes)

    def __str__(self) -> str:
        parts = [
            None if self.rank is None else f"rank {self.rank}",
            None if self.job is None else f"job {self.job!r}",
            None if self.signature is None else f"signature {self.signature[:_SHOWN_SIGNATURE_CHARACTERS]}",
            None if self.server is None else f"server {self.server}",
        ]
        return ", ".join(part for part in parts if part is not None)


_NOWHERE = Where()

ErrorT = TypeVar("ErrorT", bound="ClientError")


class ClientError(BucketplanError):
    """Base of the client's errors: `message`, then where it happened, then `remedy`, one sentence on what to do."""

    def __init__(self, message: str, *, remedy: str, where: Where = _NOWHERE) -> None:
        self.message = message
        self.remedy = remedy
        self.where = where
        super().__init__(message)

    def __str__(self) -> str:
        place = str(self.where)
        return f"{self.message}{f' ({place})' if place else ''}. {self.remedy}"

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross process boundaries (worker pools, launchers), and pickle calls constructors without keywords.
        return _rebuild, (type(self), self.args, self.__dict__)

    def located(self: ErrorT, where: Where) -> ErrorT:
        """Fill in what `where` knows and the error does not; returns the error itself."""
        mine = self.where
        self.where = Where(
            rank=where.rank if mine.rank is None else mine.rank,
            job=where.job if mine.job is None else mine.job,
            signature=where.signature if mine.signature is None else mine.signature,
            server=where.server if mine.server is None else mine.server,
        )
        return self


@contextmanager
def located(where: Where) -> Iterator[None]:
    """Inside, errors of the client are told `where` they happen, as far as they do not know it."""
    try:
        yield
    except ClientError as error:
        error.located(where)
        raise


def _rebuild(kind: type[ClientError], args: tuple[Any, ...], state: dict[str, Any]) -> ClientError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A problem details document (RFC 9457) as the server sent it; `extra` holds its further members."""

    type: str
    title: str
    status: int
    detail: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def slug(self) -> str:
        """The stable name of the problem: ``unknown-signature``; empty for a type that is not bucketplan's."""
        return self.type.removeprefix(_PROBLEM_PREFIX) if self.type.startswith(_PROBLEM_PREFIX) else ""

    def __str__(self) -> str:
        facts = ", ".join(f"{key}={self.extra[key]!r}" for key in sorted(self.extra))
        said = self.detail or self.title
        return f"{self.status} {self.slug or self.type}: {said}{f' [{facts}]' if facts else ''}"


class ServerError(ClientError):
    """Talking to the planning server failed; `num_tries` requests were made."""

    num_tries: int = 1


class ServerUnreachable(ServerError):
    """No connection to the server could be made within the deadline."""

    def __init__(self, reason: str, *, num_tries: int = 1, elapsed_s: float = 0.0, where: Where = _NOWHERE) -> None:
        self.reason = reason
        self.num_tries = num_tries
        self.elapsed_s = elapsed_s
        super().__init__(
            f"the planning server could not be reached in {elapsed_s:.1f} s and {_times(num_tries)}: {reason}",
            where=where,
            remedy="Check that bucketplan-server runs at that address and that this host may connect to it "
            "(`bucketplan doctor` checks both)",
        )


class DeadlineExceeded(ServerError):
    """The server was reached but gave no whole answer within the deadline."""

    def __init__(self, reason: str, *, num_tries: int = 1, elapsed_s: float = 0.0, where: Where = _NOWHERE) -> None:
        self.reason = reason
        self.num_tries = num_tries
        self.elapsed_s = elapsed_s
        super().__init__(
            f"no answer of the planning server in {elapsed_s:.1f} s and {_times(num_tries)}: {reason}",
            where=where,
            remedy="Look at the server's load and planning times, or give the client a longer deadline",
        )


_REMEDIES = {
    "unauthorized": "Give the client a valid token (BUCKETPLAN_TOKEN or BUCKETPLAN_TOKEN_FILE)",
    "forbidden": "Use a token whose role and job namespace allow this call",
    "schema-version": "Use releases of client and server that read the same schema version",
    "unknown-planner": "Use a server release that holds this planner version, or leave the planner open",
    "cannot-plan": "Change the option that the problem names",
    "body-too-large": "Send less, or raise the server's BUCKETPLAN_MAX_BODY_BYTES where a graph is that large",
    "unknown-signature": "Post the request first, or check the signature for a typing error",
    "unknown-attempt": "Check job and attempt number; `bucketplan job` lists the attempts of a job",
    "store-unavailable": "Look at the server's database and disk; known plans are still served",
    "store-damaged": "Stop the server, run `bucketplan-server verify` on its database, and restore a backup",
    "unconfirmed": "Look at what is stored now before you repeat the call",
    "busy": "Try again later, or give the server more capacity",
    "conflict": "Read the current state again and repeat the call on it",
}
FOREIGN_REMEDY = "Set BUCKETPLAN_SERVER to the server itself, or look at the proxy or gateway on the way to it"
_DEFAULT_REMEDY = "The problem says what to change; the server's log has the same request id"


def _remedy_of(problem: Problem) -> str:
    if not problem.slug:
        return _REMEDIES["unauthorized"] if problem.status == 401 else FOREIGN_REMEDY
    return _REMEDIES.get(problem.slug, _DEFAULT_REMEDY)


class ServerRefused(ServerError):
    """The server answered with a problem that repeating the call would not cure."""

    def __init__(self, problem: Problem, *, num_tries: int = 1, where: Where = _NOWHERE) -> None:
        self.problem = problem
        self.num_tries = num_tries
        super().__init__(
            f"the planning server refused: {problem}",
            where=where,
            remedy=_remedy_of(problem),
        )


class AccessRefused(ServerRefused):
    """The server wants a valid token (401), or another one than this caller's (403). Never tried again."""


class CorruptAnswer(ServerError):
    """What the server answered failed verification, however often it was asked."""

    def __init__(self, reason: str, *, num_tries: int = 1, where: Where = _NOWHERE, remedy: str | None = None) -> None:
        self.reason = reason
        self.num_tries = num_tries
        super().__init__(
            f"the answer of the planning server failed verification {_times(num_tries)}: {reason}",
            where=where,
            remedy=remedy
            or "Look for a proxy that changes bodies, or a damaged server store (`bucketplan-server verify`)",
        )


class BadAddress(ServerError):
    """The server's address is no http or https URL."""

    def __init__(self, address: str, reason: str, *, where: Where = _NOWHERE) -> None:
        self.address = address
        self.reason = reason
        super().__init__(
            f"{address!r} is no address of a planning server: {reason}",
            where=where,
            remedy="Set BUCKETPLAN_SERVER to a URL such as http://plans.example:8321",
        )


class BadToken(ServerError):
    """The token cannot be read or sent; `reason` does not hold it."""

    def __init__(self, reason: str, *, where: Where = _NOWHERE) -> None:
        self.reason = reason
        super().__init__(
            f"the token for the planning server cannot be used: {reason}",
            where=where,
            remedy="Set BUCKETPLAN_TOKEN, or BUCKETPLAN_TOKEN_FILE to a file with the token alone",
        )


class ScopeError(ClientError):
    """Module scopes do not fit the live model."""


class UnknownScope(ScopeError):
    """No module of the model has the path or matches the pattern `spec`; `similar` are paths close to it."""

    def __init__(
        self, spec: str, similar: Sequence[str] = (), *, reason: str = "matches no module of the model"
    ) -> None:
        self.spec = spec
        self.similar = tuple(similar)
        near = f"; close to it are {', '.join(map(repr, similar))}" if similar else ""
        super().__init__(
            f"module scope {spec!r} {reason}{near}",
            remedy="Give paths as in model.named_modules(); `*` matches one component, `**` any number",
        )


class EmptyScope(ScopeError):
    """The modules of `spec` hold no parameter of their own."""

    def __init__(self, spec: str, reason: str = "its modules hold no parameters") -> None:
        self.spec = spec
        self.reason = reason
        super().__init__(f"module scope {spec!r} is empty: {reason}", remedy="Remove it from the list of scopes")


class OverlappingScopes(ScopeError):
    """Scopes `first` and `second` both claim `shared`, a module path or parameter name."""

    def __init__(self, first: str, second: str, shared: str) -> None:
        self.first = first
        self.second = second
        self.shared = shared
        both = f"scopes {first!r} and {second!r} both" if first != second else f"scope {first!r} twice"
        super().__init__(
            f"module {both} claim{'s' if first == second else ''} {shared!r}",
            remedy="Name each module once: either the parent or its children",
        )


class AgreementError(ClientError):
    """Ranks of one job do not hold the same; every rank of the comparison raises this alike."""


class RanksDisagree(AgreementError):
    """Ranks of the group `role` hold different values of `what`.

    `holders` maps each value to the ranks that hold it, `odd_ranks` are those outside the largest holding, `difference`
    says where the descriptions of one rank of each side first differ.
    """

    def __init__(
        self,
        *,
        role: str,
        what: str,
        holders: Mapping[str, Sequence[int]],
        difference: str | None = None,
        where: Where = _NOWHERE,
    ) -> None:
        self.role = role
        self.what = what
        self.holders = {value: tuple(sorted(ranks)) for value, ranks in holders.items()}
        ordered = sorted(self.holders.items(), key=lambda item: (-len(item[1]), item[1]))
        self.odd_ranks = tuple(sorted(rank for _, ranks in ordered[1:] for rank in ranks))
        self.difference = difference
        held = "; ".join(
            f"{describe_ranks(ranks)} hold{'s' if len(ranks) == 1 else ''} {_shorten(value)}"
            for value, ranks in ordered
        )
        first = f"; they first differ at {difference}" if difference else ""
        super().__init__(
            f"group {role!r} does not agree on the {what}: {held}{first}",
            where=where,
            remedy="Give the odd ranks the same code, configuration and model as the others; nothing was applied",
        )


class RankFailed(AgreementError):
    """Ranks of the group `role` failed before the comparison; `failures` maps each to what happened there."""

    def __init__(self, *, role: str, failures: Mapping[int, str], where: Where = _NOWHERE) -> None:
        self.role = role
        self.failures = dict(sorted(failures.items()))
        first, reason = next(iter(self.failures.items()))
        super().__init__(
            f"{describe_ranks(tuple(self.failures))} of group {role!r} failed; rank {first} said: {reason}",
            where=where,
            remedy=f"Cure the failure of rank {first}; no rank of the group applied a plan",
        )


class RanksMissing(AgreementError):
    """Nothing was heard of `missing` within the deadline."""

    def __init__(self, *, role: str, missing: Sequence[int], what: str, where: Where = _NOWHERE) -> None:
        self.role = role
        self.missing = tuple(missing)
        self.what = what
        super().__init__(
            f"{what} in {role!r}: nothing came from {describe_ranks(self.missing)} within the deadline",
            where=where,
            remedy=f"Look at the log of rank {self.missing[0]}: it died, hangs, or never came here",
        )


class OpeningAborted(ClientError):
    """The attempt was not opened; every participant that reads the outcome raises this with the same `outcome`.

    `missing` are the ranks that did not come, `odd` those that differ from the others.
    """

    def __init__(
        self,
        outcome: str,
        *,
        remedy: str,
        missing: Sequence[int] = (),
        odd: Sequence[int] = (),
        where: Where = _NOWHERE,
    ) -> None:
        self.outcome = outcome
        self.missing = tuple(missing)
        self.odd = tuple(odd)
        super().__init__(f"the job attempt was not opened: {outcome}", where=where, remedy=remedy)


class StoreFailed(ClientError):
    """The job's rendezvous store did not answer; without it no rank may choose by itself."""

    def __init__(self, operation: str, reason: str, *, where: Where = _NOWHERE) -> None:
        self.operation = operation
        self.reason = reason
        super().__init__(
            f"the job's store failed at {operation}: {reason}",
            where=where,
            remedy="Look at the rank that hosts the store (rank 0 or the elastic agent) and start the job again",
        )


class CacheDamaged(ClientError):
    """A file of the plan cache was not what its name promises; it was discarded."""

    def __init__(self, path: str, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(
            f"cached file {path} is damaged and was discarded: {reason}",
            remedy="Nothing needs doing; if it happens again, check that disk",
        )


class FallbackRefused(ClientError):
    """Going on without the server would risk a second plan; `rule` says why it is refused here.

    `unavailable` is what became of asking the server, where it was asked.
    """

    def __init__(
        self, rule: str, reason: str, *, where: Where = _NOWHERE, unavailable: ServerError | None = None
    ) -> None:
        self.rule = rule
        self.reason = reason
        self.unavailable = unavailable
        asked = "" if unavailable is None else f". {unavailable.message}"
        first = "Bring the server back" if unavailable is None else unavailable.remedy
        super().__init__(
            f"planning without the server is refused: {reason}{asked}",
            where=where,
            remedy=f"{first}, and start the attempt again",
        )


class PassFailed(ClientError):
    """`step` (describe, plan, agree, apply) of a pass failed with `cause`; the graph is untouched."""

    def __init__(self, step: str, cause: BaseException, *, where: Where = _NOWHERE) -> None:
        self.step = step
        self.cause = cause
        super().__init__(
            f"the bucketing pass failed to {step}: {type(cause).__name__}: {cause}",
            where=where,
            remedy="The graph is as it was; cure the cause, or switch bucketing off everywhere (BUCKETPLAN_DISABLE=1)",
        )


def _times(number: int) -> str:
    return "1 try" if number == 1 else f"{number} tries"


def _shorten(value: str) -> str:
    """Digests by their first characters: enough to tell them apart, and a line stays readable."""
    return value[:_SHOWN_SIGNATURE_CHARACTERS] if len(value) == 64 and " " not in value else value
