"""Where an opened attempt takes its plans from, and when it may go on without the server.

After a commit (signature, epoch) -> plan is a function: an override from the epoch, else what the planner gives. So a
rank may take the plan from wherever it finds it first: the epoch's overrides, its cache, the job's store, the server,
and last from the planner in its own process, which gives the same bytes. Nothing here waits for another rank.

Going on without the server is refused where it might give a second plan: for a planner version that this build lacks,
and for planners that read a cost profile unless the profile is one that all ranks share (the server binds the first one
it gets; in an attempt that opened without a server the job's store does).

What a rank is about to use it first writes into the store, once; a rank that finds another decision there adopts it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING

from bucketplan_client.cache import PlanCache
from bucketplan_client.errors import (
    ClientError,
    CorruptAnswer,
    DeadlineExceeded,
    FallbackRefused,
    ServerError,
    ServerRefused,
    ServerUnreachable,
    Where,
)
from bucketplan_client.opening_protocol import Opened, Source
from bucketplan_client.store import JobStore
from bucketplan_client.transport import PlanClient
from bucketplan_core.errors import PlannerUnavailable
from bucketplan_core.plan import Plan
from bucketplan_core.profile import CostProfile
from bucketplan_core.request import Request

if TYPE_CHECKING:
    from bucketplan_core.planners import Planner

__all__ = ["DEFAULT_DEADLINE_S", "AttemptPlans"]

_LOG = logging.getLogger(__name__)

DEFAULT_DEADLINE_S = 60.0
_SERVER_PAUSE_S = 30.0
"""How long a server that did not answer is left alone: an outage costs one deadline, not one for each graph."""
_GO_ON_STATUS = frozenset({429, 500, 502, 503, 504})


class AttemptPlans:
    """The plans of one attempt, as a `PlanSource`; `taken` counts where they came from, `topology` is the epoch's."""

    def __init__(
        self,
        opened: Opened,
        *,
        source: Source,
        client: PlanClient | None,
        cache: PlanCache | None,
        store: JobStore | None,
        where: Where,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> None:
        self.taken: Counter[str] = Counter()
        self.address = client.address if client is not None else None
        self.topology = dict(opened.epoch.topology)
        self._opened = opened
        self._source = source
        self._client = client
        self._cache = cache
        self._store = store
        self._where = where
        self._deadline_s = deadline_s
        self._server_from = 0.0

    def __repr__(self) -> str:
        return f"AttemptPlans({self._opened.epoch!r}, {dict(self.taken)})"

    def plan(self, request: Request, profile: CostProfile | None = None) -> Plan:
        """The plan of `request` under the attempt's epoch; raises `FallbackRefused`, `ServerRefused`, `StoreFailed`."""
        signature = request.signature
        where = self._where.at(signature=signature)
        try:
            plan, source = self._find(request, profile, where)
            plan = self._adopt(plan, where)
        except ClientError as error:
            # What the transport or the store raises knows neither the job nor, often, the rank.
            error.located(where)
            raise
        self.taken[source] += 1
        _LOG.debug("plan %s of signature %s from %s", plan.digest[:12], signature[:12], source)
        if self._cache is not None and source != "cache" and self._is_for_ever(request):
            self._cache.keep(plan, self._opened.epoch)
        return plan

    def _is_for_ever(self, request: Request) -> bool:
        """Whether this plan is what the server would give too, so that a later attempt may find it in the cache.

        A plan made from a profile that this attempt agreed on by itself is right for this attempt only.
        """
        return self._source != "local" or not _planner(request.options.planner).uses_profile

    def _find(self, request: Request, profile: CostProfile | None, where: Where) -> tuple[Plan, str]:
        signature, epoch = request.signature, self._opened.epoch
        encoded = self._opened.overrides.get(signature)
        if encoded is not None:
            return Plan.decode(encoded, expected_signature=signature), "override"
        if epoch.digest_for(signature) is not None:
            raise FallbackRefused(
                "override-missing",
                f"the epoch overrides signature {signature[:12]}, and the bytes of that plan did not come with it",
                where=where,
            )
        if self._cache is not None:
            cached = self._cache.plan(signature, epoch)
            if cached is not None:
                return cached, "cache"
        stored = self._from_store(signature)
        if stored is not None:
            return stored, "store"
        unavailable: ServerError | None = None
        if self._client is not None and self._source == "server" and time.monotonic() >= self._server_from:
            try:
                plan = self._client.plan(request, profile, epoch=epoch.id, deadline_s=self._deadline_s)
            except (ServerUnreachable, DeadlineExceeded, CorruptAnswer) as error:
                unavailable = error
            except ServerRefused as error:
                if error.problem.slug != "unknown-epoch" and error.problem.status not in _GO_ON_STATUS:
                    raise
                unavailable = error
            else:
                return plan, "server"
            self._server_from = time.monotonic() + _SERVER_PAUSE_S
            _LOG.warning("planning in this process: %s", unavailable.message)
        return self._make(request, profile, where, unavailable), "local"

    def _make(
        self, request: Request, profile: CostProfile | None, where: Where, unavailable: ServerError | None
    ) -> Plan:
        try:
            planner = _planner(request.options.planner)
        except PlannerUnavailable as error:
            raise FallbackRefused("foreign-planner", str(error), where=where) from unavailable
        from bucketplan_core.planning import make_plan

        if not planner.uses_profile:
            return make_plan(request, profile)
        if self._source != "local":
            raise FallbackRefused(
                "unbound-profile",
                f"planner {planner.version} reads a cost profile, and which one this signature was planned with "
                "is known to the server only",
                where=where,
            ) from unavailable
        return make_plan(request, self._shared_profile(request, profile))

    def _shared_profile(self, request: Request, profile: CostProfile | None) -> CostProfile:
        """The profile that came first to the job's store; durations and sizes that ranks guess differ between them."""
        mine = profile if profile is not None else CostProfile.empty(request)
        if self._store is None:
            return mine
        standing = self._store.put_once(f"profile/{request.signature}", mine.encoded)
        return mine if standing == mine.encoded else CostProfile.decode(standing, request)

    def _from_store(self, signature: str) -> Plan | None:
        if self._store is None:
            return None
        digest = self._store.get(f"decision/{signature}")
        return None if digest is None else self._stored(signature, digest.decode())

    def _stored(self, signature: str, digest: str) -> Plan | None:
        assert self._store is not None
        encoded = self._store.get(f"plan/{digest}")
        return None if encoded is None else Plan.decode(encoded, expected_signature=signature)

    def _adopt(self, plan: Plan, where: Where) -> Plan:
        """Write what this rank is about to use, once; what stands there already is what all ranks use."""
        if self._store is None:
            return plan
        signature = plan.decision.signature
        # The bytes first: whoever reads the digest finds them.
        if self._store.get(f"decision/{signature}") is None:
            self._store.put(f"plan/{plan.digest}", plan.encoded)
        standing = self._store.put_once(f"decision/{signature}", plan.digest.encode()).decode()
        if standing == plan.digest:
            return plan
        _LOG.error(
            "signature %s: this rank was given plan %s, another rank uses %s already; adopting that one",
            signature[:12],
            plan.digest[:12],
            standing[:12],
        )
        adopted = self._stored(signature, standing)
        if adopted is None:
            raise FallbackRefused("adopted-plan-missing", f"the bytes of plan {standing[:12]} are gone", where=where)
        return adopted


def _planner(version: str) -> Planner:
    # Planners are half of what core takes to import, and a rank whose plans come from the server runs none.
    from bucketplan_core.planners import find_planner

    return find_planner(version)
