"""Who makes a call, what that allows, and in whose namespace its jobs are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from bucketplan_server.problems import Problem

__all__ = [
    "ANYONE",
    "JOB_PATTERN",
    "NAMESPACE_PATTERN",
    "NOBODY",
    "ROLES",
    "SEPARATOR",
    "Principal",
    "Role",
    "bare_job",
    "in_namespace",
    "namespace_of",
]

Role = Literal["rank", "auditor", "operator"]
ROLES: Final[tuple[Role, ...]] = ("rank", "auditor", "operator")
NAMESPACE_PATTERN = "[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
SEPARATOR = "~"
"""Unreserved in addresses (RFC 3986, 2.3) and in no job's name, so a job of a namespace has one address."""
JOB_PATTERN = f"^(?:{NAMESPACE_PATTERN}{SEPARATOR})?[A-Za-z0-9][A-Za-z0-9._:-]{{0,199}}$"
_JOB = re.compile(JOB_PATTERN)
_READERS: Mapping[Role, frozenset[Role]] = {
    "rank": frozenset(ROLES),
    "auditor": frozenset(("auditor", "operator")),
    "operator": frozenset(("operator",)),
}


@dataclass(frozen=True, slots=True)
class Principal:
    """Who makes a call: the token's `name` (the actor in the audit log), its `role` and `namespace`.

    `role` None may call only what needs no token. `namespace` None sees every job.
    """

    name: str
    role: Role | None
    namespace: str | None = None

    def has(self, role: Role, *, changes: bool = False) -> bool:
        """Whether a call that needs `role` is allowed; with `changes` one that changes state.

        An operator may do everything. An auditor reads whatever a rank reads, and changes nothing.
        """
        if self.role is None or self.role not in _READERS[role]:
            return False
        return not (changes and self.role == "auditor")

    def job(self, name: str) -> str:
        """The name under which a job of this caller is stored: ``namespace~job``, or `name` without a namespace.

        Raises `Problem`: ``forbidden`` for a job of another namespace, ``invalid-parameter`` for what is no name.
        """
        if _JOB.fullmatch(name) is None:
            raise Problem(
                "invalid-parameter",
                f"job: {name[:200]!r} is no job's name (letters, digits and ._:- ; an unscoped token writes "
                "NAMESPACE~JOB)",
                fields={"path": "job", "value": name[:200]},
            )
        if self.namespace is None:
            return name
        namespace, found, bare = name.rpartition(SEPARATOR)
        if found and namespace != self.namespace:
            raise Problem(
                "forbidden",
                f"job {name!r} belongs to namespace {namespace!r}, token {self.name!r} to {self.namespace!r}; use a "
                "token of that namespace or one without a namespace",
                fields={"path": "job", "value": name},
            )
        return f"{self.namespace}{SEPARATOR}{bare}"

    def everything(self, why: str) -> None:
        """Raises `Problem` ``forbidden`` for a caller whose token has a namespace; `why` the call reaches beyond it."""
        if self.namespace is not None:
            raise Problem(
                "forbidden",
                f"token {self.name!r} belongs to namespace {self.namespace!r}, and {why}; use a token without one",
                fields={"namespace": self.namespace, "token": self.name},
            )

    def sees(self, stored: str) -> bool:
        """Whether a job, by the name under which it is stored, is in this caller's namespace."""
        return self.namespace is None or in_namespace(stored, self.namespace)

    def shown(self, stored: str) -> str:
        """A stored job's name as this caller writes it."""
        return stored if self.namespace is None else bare_job(stored)


ANYONE = Principal("anonymous", "operator")
"""Whoever calls a server that needs no tokens: every role, every namespace."""
NOBODY = Principal("anonymous", None)
"""A caller without a token, of a server that needs one: what is public, nothing else."""


def bare_job(stored: str) -> str:
    """A job's name in its own words: without the namespace."""
    return stored.rpartition(SEPARATOR)[2]


def namespace_of(stored: str) -> str | None:
    """The namespace of a stored job, None for one without."""
    return stored.rpartition(SEPARATOR)[0] or None


def in_namespace(stored: str, namespace: str) -> bool:
    return stored.startswith(f"{namespace}{SEPARATOR}")
