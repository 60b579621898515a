"""Who may call what: tokens, roles, namespaces of jobs."""

from bucketplan_server.access.dependency import Caller, needs, needs_nothing, principal_of
from bucketplan_server.access.principal import ANYONE, NOBODY, ROLES, Principal, Role

__all__ = ["ANYONE", "NOBODY", "ROLES", "Caller", "Principal", "Role", "needs", "needs_nothing", "principal_of"]
