"""One attempt of a job: who opened, which groups agree, where ranks differ, what changed since the one before."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import Response

from bucketplan_core.attempt import MAX_RANK
from bucketplan_server.access import Caller, needs
from bucketplan_server.access.principal import JOB_PATTERN
from bucketplan_server.http.state import AppState, State
from bucketplan_server.jobs.state import overall_state
from bucketplan_server.pages.render import page
from bucketplan_server.pages.routing import PageRoute, numbered_page, one_page, whole_number
from bucketplan_server.problems import Problem
from bucketplan_server.store.jobs import Attempt

__all__ = ["router"]

router = APIRouter(route_class=PageRoute, include_in_schema=False, dependencies=[needs("auditor")])
Job = Annotated[str, Path(pattern=JOB_PATTERN)]
_PAGE = 20
_Status = Mapping[str, Any]
_MOST_CHANGES = 100
_ROWS = 100
_CALLOUTS = 10
_HOLDERS = 50
_TEXT = 20_000


@router.get("/jobs/{job}")
async def job(request: Request, state: State, caller: Caller, job: Job) -> Response:
    before = whole_number(request.query_params.get("before", ""), "before", low=1, high=MAX_RANK)
    stored = caller.job(job)
    shown, last = await one_page(state, state.jobs.attempts(stored, before=before, limit=_PAGE + 1), _PAGE)
    if not shown and not await state.jobs.attempts(stored, before=None, limit=1):
        raise Problem("not-found", f"no attempt of job {job!r} was ever opened", fields={"path": "job", "value": job})
    return page(
        request,
        "job.html",
        attempts=list(zip(shown, await state.jobs.verdicts(shown), strict=True)),
        before=before,
        following=None if last is None else last.attempt,
        job=job,
        now_ns=time.time_ns(),
    )


@router.get("/jobs/{job}/attempts/{number}")
async def attempt(
    request: Request, state: State, caller: Caller, job: Job, number: Annotated[int, Path(ge=1, le=MAX_RANK)]
) -> Response:
    stored = caller.job(job)
    found = await state.jobs.attempt(stored, number)
    status = await state.jobs.status(found)
    earlier = await state.jobs.attempts(stored, before=number, limit=1)
    word, summary = overall_state(status)
    groups: Any = status["groups"]
    rows = [(group, slot) for group in groups for slot in group["slots"] or (None,)]
    differing = [(group, slot) for group, slot in rows if slot is not None and slot["state"] == "diverged"]
    shown, at, num_pages = numbered_page(request, rows, _ROWS, name="page")
    return page(
        request,
        "attempt.html",
        at=at,
        differing=differing[:_CALLOUTS],
        job=job,
        most_holders=_HOLDERS,
        most_text=_TEXT,
        num_differing=len(differing),
        num_pages=num_pages,
        number=number,
        rows=shown,
        since=await _since(state, earlier[0], found, status) if earlier else None,
        state_word=word,
        status=status,
        summary=summary,
    )


async def _since(state: AppState, earlier: Attempt, found: Attempt, status: _Status) -> dict[str, Any]:
    """What changed since an earlier attempt: options and overrides of the epoch, signatures by graph."""
    before, now = await state.jobs.epoch(earlier.epoch), await state.jobs.epoch(found.epoch)
    options_before, options_now = before.options.to_wire(), now.options.to_wire()
    old, new = _signatures(await state.jobs.status(earlier)), _signatures(status)
    names = sorted(old.keys() | new.keys())
    return {
        "number": earlier.attempt,
        "same_epoch": before.id == now.id,
        "options": [
            (name, options_before[name], options_now[name])
            for name in options_now
            if options_before[name] != options_now[name]
        ],
        "overrides": sorted(set(before.overrides) ^ set(now.overrides))[:_MOST_CHANGES],
        "graphs": [
            (slot, ordinal, old.get((slot, ordinal), []), new.get((slot, ordinal), []))
            for slot, ordinal in names
            if old.get((slot, ordinal)) != new.get((slot, ordinal))
        ][:_MOST_CHANGES],
        "num_graphs": len(names),
    }


def _signatures(status: _Status) -> dict[tuple[str, int], list[str]]:
    found: dict[tuple[str, int], set[str]] = {}
    for group in status["groups"]:
        for slot in group["slots"]:
            kept = found.setdefault((slot["slot"], slot["ordinal"]), set())
            kept.update(holder["signature"] for holder in slot["holders"] if holder["signature"] is not None)
    return {name: sorted(held) for name, held in found.items()}
