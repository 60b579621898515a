"""Where an opened attempt takes its plans from, and when it may go on without the server.

After a commit (signature, epoch) -> plan is a function: an override from the epoch, else what the planner gives. So a
rank may take the plan from wherever it finds it first: the epoch's overrides, its cache, the job's store, the server,
and last from the planner in its own process, which gives the same bytes. Nothing here waits for another rank.

Whatever the server answers instead of a plan, or does not, is a reason to go on without it, and decides nothing. Going
on is refused where it might give a second plan: for a planner version that this build lacks, and for planners that read
a cost profile unless the profile is one that all ranks share (the server binds the first one it gets; in an attempt
that opened without a server, from the ranks' caches too, the job's store does). A server that has lost the attempt is
given it back first (`bucketplan_client.reopening`).

What a rank is about to use it first writes into the store, once; a rank that finds another decision there adopts it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING

from bucketplan_client.cache import PlanCache
from bucketplan_client.errors import ClientError, FallbackRefused, ServerError, ServerRefused, Where
from bucketplan_client.opening_protocol import Opened, Source
from bucketplan_client.reopening import ServerAttempt
from bucketplan_client.store import JobStore
from bucketplan_client.transport import PlanClient
from bucketplan_core.errors import BucketplanError, PlannerUnavailable
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
_CANNOT_PLAN = "cannot-plan"
_MOST_OPENINGS = 2
"""For one plan: once because another rank's opening may be of an earlier loss."""


class AttemptPlans:
    """The plans of one attempt, as a `PlanSource`; `taken` counts where they came from, `topology` is the epoch's.

    `where` is this rank, the job and the server, for what fails around them.
    """

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
        at_server: ServerAttempt | None = None,
    ) -> None:
        self.taken: Counter[str] = Counter()
        self.topology = dict(opened.epoch.topology)
        self.where = where
        self._opened = opened
        self._source = source
        self._client = client
        self._cache = cache
        self._store = store
        self._deadline_s = deadline_s
        self._at_server = at_server
        self._server_from = 0.0
        self._unavailable: ServerError | None = None

    def __repr__(self) -> str:
        return f"AttemptPlans({self._opened.epoch!r}, {dict(self.taken)})"

    def plan(self, request: Request, profile: CostProfile | None = None) -> Plan:
        """The plan of `request` under the attempt's epoch; raises `FallbackRefused`, `ServerRefused`, `StoreFailed`."""
        signature = request.signature
        where = self.where.at(signature=signature)
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
        return self._source == "server" or not _planner(request.options.planner).uses_profile

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
        refused = self._reason_against(request.options.planner)
        answer: ServerError | None = None
        if self._client is not None and self._source == "server":
            # Where nothing else can give the plan, a server that was away a moment ago is asked all the same.
            if refused is not None or time.monotonic() >= self._server_from:
                try:
                    return self._ask(self._client, request, profile), "server"
                except ServerError as error:
                    self._unavailable = answer = error.located(where)
                    self._server_from = time.monotonic() + _SERVER_PAUSE_S
            if refused is None and self._unavailable is not None:
                _LOG.warning("planning in this process: %s", self._unavailable)
        cannot = answer if isinstance(answer, ServerRefused) and answer.problem.slug == _CANNOT_PLAN else None
        if refused is not None:
            if cannot is not None:
                raise cannot
            rule, reason = refused
            raise FallbackRefused(rule, reason, where=where, unavailable=self._unavailable) from self._unavailable
        try:
            return self._make(request, profile), "local"
        except BucketplanError as error:
            # The planner says the same here as there, and the server's problem says what to change.
            raise (cannot or error) from (error if cannot else error.__cause__)

    def _ask(self, client: PlanClient, request: Request, profile: CostProfile | None) -> Plan:
        """The server's plan; an attempt that it does not know any more is opened there again."""
        until = time.monotonic() + self._deadline_s
        for num_left in reversed(range(_MOST_OPENINGS + 1)):
            seen = 0 if self._at_server is None else self._at_server.num_openings
            left_s = max(0.0, until - time.monotonic())
            try:
                return client.plan(request, profile, epoch=self._opened.epoch.id, deadline_s=left_s)
            except ServerRefused as error:
                if error.problem.slug != "unknown-epoch" or self._at_server is None or not num_left:
                    raise
                self._at_server.open_again(seen, until=until)
        raise AssertionError("the last try returns or raises")

    def _reason_against(self, version: str) -> tuple[str, str] | None:
        """Why this rank may not plan with `version` by itself: rule and words; None where it may."""
        try:
            planner = _planner(version)
        except PlannerUnavailable as error:
            return "foreign-planner", str(error)
        if planner.uses_profile and self._source == "server":
            reads = f"planner {planner.version} reads a cost profile"
            return "unbound-profile", f"{reads}, and which one this signature was planned with only the server knows"
        return None

    def _make(self, request: Request, profile: CostProfile | None) -> Plan:
        from bucketplan_core.planning import make_plan

        if not _planner(request.options.planner).uses_profile:
            return make_plan(request, profile)
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
