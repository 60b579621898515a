"""Every error that the service answers, in one shape: problem details (RFC 9457) with a stable type.

`PROBLEMS` is the whole list. A `Problem` is raised wherever a request cannot be answered and becomes a body in the
caller's encoding in one place (`bucketplan_server.http.answers`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bucketplan_core import errors
from bucketplan_core.wire import WireValue

__all__ = ["PROBLEMS", "Problem", "ProblemType", "Refused", "refuse"]

_URN = "urn:bucketplan:problem:"
_SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class ProblemType:
    """One kind of error: what its `type` ends in, its HTTP status, and the title that never changes."""

    slug: str
    status: int
    title: str

    @property
    def urn(self) -> str:
        return _URN + self.slug


_TYPES = (
    ProblemType("invalid-body", 400, "The body is not what this call takes"),
    ProblemType("invalid-parameter", 400, "A parameter of the address or a header is not valid"),
    ProblemType("unauthorized", 401, "The call needs a valid token"),
    ProblemType("forbidden", 403, "The token does not allow this call"),
    ProblemType("not-found", 404, "There is nothing at this address"),
    ProblemType("unknown-signature", 404, "No plan is stored for this signature"),
    ProblemType("unknown-epoch", 404, "No such epoch is stored"),
    ProblemType("unknown-attempt", 404, "No such attempt of this job was opened"),
    ProblemType("unknown-profile", 404, "No hardware profile of this name is stored"),
    ProblemType("unknown-revision", 404, "The signature has no such revision"),
    ProblemType("method-not-allowed", 405, "The address does not take this method"),
    ProblemType("not-acceptable", 406, "None of the accepted media types can be answered"),
    ProblemType("body-timeout", 408, "The body did not arrive in time"),
    ProblemType("conflict", 409, "The call contradicts what is stored"),
    ProblemType("body-too-large", 413, "The body is larger than this server takes"),
    ProblemType("unsupported-media-type", 415, "The body's media type or encoding is not taken"),
    ProblemType("signature-mismatch", 422, "The content does not hash to the name it was sent under"),
    ProblemType("schema-version", 422, "The document's schema version is not one that this server reads"),
    ProblemType("unknown-planner", 422, "This server does not hold the planner version"),
    ProblemType("cannot-plan", 422, "The request cannot be planned as its options ask"),
    ProblemType("illegal-plan", 422, "The plan breaks a rule of legality"),
    ProblemType("internal", 500, "The server failed in a way that is its own fault"),
    ProblemType("unconfirmed", 500, "The store did not say whether it made the change"),
    ProblemType("quarantined", 503, "The stored plan is damaged and is not served"),
    ProblemType("busy", 503, "The server has more to do than it may queue"),
    ProblemType("planner-failed", 503, "The planning process ended before it had a plan"),
    ProblemType("store-unavailable", 503, "The store cannot be read or written now"),
    ProblemType("store-damaged", 503, "The store is damaged; only an operator can mend it"),
)

PROBLEMS: Mapping[str, ProblemType] = {kind.slug: kind for kind in _TYPES}
"""Every problem type by its slug, the last part of the `type` member."""


class Problem(Exception):
    """A request that is answered with an error; `slug` names the type, `fields` are members of the body beside it."""

    def __init__(
        self,
        slug: str,
        detail: str,
        *,
        fields: Mapping[str, WireValue] | None = None,
        headers: Mapping[str, str] | None = None,
        status: int | None = None,
    ) -> None:
        self.kind = PROBLEMS[slug]
        self.detail = detail
        self.fields = dict(fields or {})
        self.headers = dict(headers or {})
        self.status = self.kind.status if status is None else status
        super().__init__(f"{slug}: {detail}")

    @property
    def slug(self) -> str:
        return self.kind.slug

    def to_wire(self) -> dict[str, WireValue]:
        return {
            **self.fields,
            "detail": self.detail,
            "status": self.status,
            "title": self.kind.title,
            "type": self.kind.urn,
        }


@dataclass(frozen=True, slots=True)
class Refused:
    """A `Problem` as plain data: what a planning process hands back, since exceptions with fields do not travel."""

    slug: str
    detail: str
    fields: dict[str, WireValue] = field(default_factory=dict)

    def problem(self) -> Problem:
        return Problem(self.slug, self.detail, fields=self.fields)


def refuse(error: errors.BucketplanError, *, document: str | None = None) -> Refused:
    """What core's errors are to a caller, with the offending field, value or rule as members.

    `document` replaces the root in the paths of errors that speak of a whole encoded document.
    """
    match error:
        case errors.DecodeError():
            path = error.path
            if document is not None and path.startswith("$"):
                path = document + path[1:]
            slug = "schema-version" if isinstance(error, errors.SchemaVersionError) else "invalid-body"
            shown = _show(error.value)
            return Refused(slug, f"{path}: {error.reason} (got {shown})", {"path": path, "value": shown})
        case errors.SignatureMismatch():
            return Refused("signature-mismatch", str(error), {"claimed": error.claimed, "actual": error.actual})
        case errors.IllegalPlan():
            return Refused(
                "illegal-plan",
                str(error),
                {"rule": error.rule, "bucket": error.bucket, "members": list(error.members)},
            )
        case errors.PlannerUnavailable():
            return Refused(
                "unknown-planner", str(error), {"planner": error.planner, "available": list(error.available)}
            )
        case errors.PlanningError():
            return Refused("cannot-plan", str(error), {"path": f"options.{error.option}", "value": _show(error.value)})
    return Refused("invalid-body", str(error))


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
