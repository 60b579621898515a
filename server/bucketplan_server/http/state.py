"""What the routes share: one `AppState` a server, found on the application."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from fastapi import Depends
from starlette.requests import Request

from bucketplan_server.access.authenticate import Access
from bucketplan_server.access.dependency import principal_of
from bucketplan_server.access.principal import ANYONE
from bucketplan_server.access.service import TokenService
from bucketplan_server.audit import Verification, verify
from bucketplan_server.http.intake import Intake
from bucketplan_server.http.waiting import while_connected
from bucketplan_server.jobs.service import JobService
from bucketplan_server.metrics import Metrics
from bucketplan_server.planner.pool import PlannerPool
from bucketplan_server.revisions import RevisionService
from bucketplan_server.service import PlanService
from bucketplan_server.settings import Settings
from bucketplan_server.store.engine import Store, StoreError
from bucketplan_server.store.events import Cause

__all__ = ["MOST_VERIFICATIONS", "AppState", "State", "cause_of", "verified"]

MOST_VERIFICATIONS = 4
"""One runs at a time, and takes minutes on a large store: who comes behind three others had better come again."""


@dataclass(slots=True)
class AppState:
    """The parts of a running server; `draining` is set by the stop signal, one verification runs at a time."""

    settings: Settings
    store: Store
    pool: PlannerPool
    plans: PlanService
    jobs: JobService
    revisions: RevisionService
    metrics: Metrics
    access: Access
    tokens: TokenService
    intake: Intake
    draining: bool = field(default=False)
    verifying: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_verifying: int = field(default=0)


async def _state(request: Request) -> AppState:
    # Asynchronous, because FastAPI hands every other dependency to a thread.
    state: AppState = request.app.state.parts
    return state


async def verified(request: Request, state: AppState, *, replay: bool) -> Verification:
    """The log verified for this caller, for as long as they wait; with `replay` every revision is planned again.

    Raises ``busy`` where `MOST_VERIFICATIONS` run or wait, and ``store-unavailable``.
    """
    if state.num_verifying >= MOST_VERIFICATIONS:
        raise state.plans.busy("verifications run or wait", MOST_VERIFICATIONS)

    async def in_turn() -> Verification:
        async with state.verifying:
            return await verify(state.store, state.pool.replay if replay else None)

    state.num_verifying += 1
    try:
        return await while_connected(request, in_turn())
    except StoreError as error:
        raise state.plans.store_unavailable(error) from None
    finally:
        state.num_verifying -= 1


State = Annotated[AppState, Depends(_state)]


def cause_of(request: Request, reason: str, *, is_shared: bool = False) -> Cause:
    """Who made this call, for the audit log, which refuses the change where their token ended meanwhile.

    A change that is made for others too, who wait for it, is not theirs alone: `is_shared`.
    """
    principal = principal_of(request)
    client = request.client
    actor = f"{principal.name}@{client.host}" if principal is ANYONE and client is not None else principal.name
    if is_shared:
        return Cause(actor, reason)
    state: AppState = request.app.state.parts
    return Cause(actor, reason, partial(state.access.check_again, request.scope))
