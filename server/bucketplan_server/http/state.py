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
from bucketplan_server.jobs.service import JobService
from bucketplan_server.metrics import Metrics
from bucketplan_server.planner.pool import PlannerPool
from bucketplan_server.revisions import RevisionService
from bucketplan_server.service import PlanService
from bucketplan_server.settings import Settings
from bucketplan_server.store.engine import Store
from bucketplan_server.store.events import Cause

__all__ = ["AppState", "State", "cause_of"]


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
    draining: bool = field(default=False)
    verifying: asyncio.Lock = field(default_factory=asyncio.Lock)


async def _state(request: Request) -> AppState:
    # Asynchronous, because FastAPI hands every other dependency to a thread.
    state: AppState = request.app.state.parts
    return state


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
