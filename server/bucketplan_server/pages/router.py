"""Every page, as one router."""

from __future__ import annotations

from fastapi import APIRouter

from bucketplan_server.pages import attempt, change, compare, fleet, plan, session

__all__ = ["router"]

router = APIRouter()
for part in (fleet, plan, compare, change, attempt, session):
    router.include_router(part.router)
