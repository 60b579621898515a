"""Waiting for something on behalf of a caller, for as long as the caller waits too."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

__all__ = ["while_connected"]

T = TypeVar("T")


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the caller goes away; raises `ClientDisconnect` then.

    Raises ``unauthorized`` where the caller's token ended meanwhile, whatever came of the work.

    The protocol server lets a handler run on for a connection that ended, so those who left would go on waiting beside
    those who came again. The body of the call must have been read, or be none.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        request.app.state.parts.access.check_again(request.scope)
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
