"""Servers inside the test's process, called through ASGI: for tests that make many small calls and kill nothing.

with in_process([str(tmp_path / "store.db")]) as servers:
    answer = servers.run(servers.call("GET", "/healthz"))
"""

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import httpx
from starlette.types import ASGIApp

from bucketplan_server.http.app import build_app
from bucketplan_server.http.front import Front
from bucketplan_server.http.state import AppState
from bucketplan_server.serve import open_state
from bucketplan_server.settings import Settings

T = TypeVar("T")


class InProcess:
    """One server a database address, all on one event loop that runs while `run` does."""

    def __init__(self, runner: asyncio.Runner, states: Sequence[AppState]) -> None:
        self._runner = runner
        self.states = states
        self._clients = [
            httpx.AsyncClient(transport=httpx.ASGITransport(front_of(state)), base_url="http://127.0.0.1")
            for state in states
        ]

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    async def call(
        self, method: str, path: str, *, replica: int = 0, content: bytes | None = None, **headers: str
    ) -> httpx.Response:
        """One call of a replica; keywords are headers, with underscores for dashes."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self._clients[replica % len(self._clients)].request(method, path, content=content, headers=named)


@contextlib.contextmanager
def in_process(databases: Sequence[str], **settings: Any) -> Iterator[InProcess]:
    """Servers on these databases with these settings; a database that is named twice is shared.

    Not for tests in `tests/server/pages`: the browser that they share keeps an event loop running in their thread.
    """
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()

        async def opened() -> list[AppState]:
            return [
                await stack.enter_async_context(open_state(Settings(database=database, **settings)))
                for database in databases
            ]

        try:
            yield InProcess(runner, runner.run(opened()))
        finally:
            runner.run(stack.aclose())


def front_of(state: AppState, app: ASGIApp | None = None) -> Front:
    """What a server of `state` serves; `app` takes the place of its own routes."""
    return Front(
        build_app(state) if app is None else app,
        access=state.access,
        memory=state.plans.memory,
        epochs=state.plans.epochs,
        metrics=state.metrics,
        intake=state.intake,
        max_body_bytes=state.settings.max_body_bytes,
    )
