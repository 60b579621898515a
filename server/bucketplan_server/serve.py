"""Starting and stopping one server: limits, lock, migrations, planning process, sockets; then draining on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import time
from collections.abc import AsyncIterator
from types import FrameType

import structlog
import uvicorn

from bucketplan_server import __version__
from bucketplan_server.access.authenticate import Access
from bucketplan_server.access.service import TokenService
from bucketplan_server.access.tokens import TokenTable
from bucketplan_server.background import Background
from bucketplan_server.http.app import build_app
from bucketplan_server.http.front import TRUSTED_PROXIES, Front
from bucketplan_server.http.intake import Intake
from bucketplan_server.http.protocol import ServerProtocol
from bucketplan_server.http.state import AppState
from bucketplan_server.jobs.service import PRUNE_EVERY_SECONDS, JobService
from bucketplan_server.limits import prepare_limits
from bucketplan_server.metrics import Metrics
from bucketplan_server.planner.pool import PlannerPool
from bucketplan_server.revisions import RevisionService
from bucketplan_server.service import PlanService
from bucketplan_server.settings import Settings
from bucketplan_server.store.engine import open_store, without_password

__all__ = ["open_state", "run"]

_GRACE_BEYOND_WAIT_SECONDS = 10
"""What in-flight answers get beyond the longest wait of a post, before connections are cut."""

_LEAST_READ_SECONDS = 15.0
"""What reading a plan or a JSON body may take even where a post waits for no planning at all."""
_BODY_GRACE_SECONDS = 5.0
"""What a body on its way gets beyond the draining, to be answered before connections are cut."""


@contextlib.asynccontextmanager
async def open_state(settings: Settings) -> AsyncIterator[AppState]:
    """The parts of a server, ready to answer; closed in reverse order."""
    store = await open_store(settings.database, timeout_seconds=settings.store_timeout_seconds)
    pool = PlannerPool(
        processes=settings.planner_processes,
        memory_bytes=settings.planner_memory_bytes,
        timeout_seconds=settings.planner_timeout_seconds,
        retry_after_seconds=settings.retry_after_seconds,
        wait_seconds=max(settings.plan_wait_seconds, _LEAST_READ_SECONDS),
    )
    metrics = Metrics()
    plans = PlanService(settings, store, pool, metrics)
    jobs = JobService(settings, store, plans, metrics)
    revisions = RevisionService(settings, store, pool, plans)
    access = Access(
        TokenTable(required=settings.needs_tokens),
        metrics,
        on_loopback=settings.listens_on_loopback and not settings.allow_anonymous,
    )
    tokens = TokenService(settings, store, access.table)
    state = AppState(
        settings=settings,
        store=store,
        pool=pool,
        plans=plans,
        jobs=jobs,
        revisions=revisions,
        metrics=metrics,
        access=access,
        tokens=tokens,
        intake=Intake(
            most_bytes=max(settings.max_bodies_bytes, settings.max_body_bytes),
            timeout_seconds=settings.body_timeout_seconds,
            retry_after_seconds=settings.retry_after_seconds,
        ),
    )
    metrics.read_from("bucketplan_body_bytes", lambda: state.intake.held_bytes)
    metrics.read_from("bucketplan_store_errors_total", lambda: store.errors)
    metrics.read_from("bucketplan_planner_crashes_total", lambda: pool.crashes)
    metrics.read_from("bucketplan_ready", lambda: 0.0 if state.draining else 1.0)
    background = Background(store)
    try:
        await tokens.start()
        background.repeat("revisions", revisions.follow, every_seconds=settings.refresh_seconds)
        background.repeat("tokens", tokens.refresh, every_seconds=settings.refresh_seconds)
        background.repeat("token commands", tokens.carry_out_commands, every_seconds=settings.refresh_seconds)
        if settings.report_retention_days:
            background.repeat("retention", jobs.prune, every_seconds=PRUNE_EVERY_SECONDS)
        await pool.warm_up()
        yield state
    finally:
        await background.close()
        await plans.close()
        await pool.close()
        await store.close()


def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT, then drain: readiness off, connections taken a while more, in-flight finished.

    Raises `CannotOpen`, `StoreError` or `OSError` when the server cannot start.
    """
    prepare_limits(expected_connections=settings.expected_connections, backlog=settings.backlog)
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings))


async def _serve(settings: Settings) -> None:
    async with open_state(settings) as state:
        front = Front(
            build_app(state),
            access=state.access,
            memory=state.plans.memory,
            epochs=state.plans.epochs,
            metrics=state.metrics,
            intake=state.intake,
            max_body_bytes=settings.max_body_bytes,
            trusted_proxies=os.environ.get("FORWARDED_ALLOW_IPS", TRUSTED_PROXIES),
        )
        config = uvicorn.Config(
            front,
            host=settings.host,
            port=settings.port,
            loop="none",
            http=ServerProtocol,
            ws="none",
            lifespan="off",
            access_log=False,
            proxy_headers=False,  # the front reads them where they matter
            log_config=None,
            backlog=settings.backlog,
            server_header=False,
            ssl_certfile=settings.tls_certificate,
            ssl_keyfile=settings.tls_key,
            timeout_graceful_shutdown=int(settings.plan_wait_seconds) + _GRACE_BEYOND_WAIT_SECONDS,
        )
        server = DrainingServer(config, state)
        await server.serve()


class DrainingServer(uvicorn.Server):
    """uvicorn, but the first stop signal only turns readiness off; connections end after `drain_seconds`.

    A second signal ends the waiting. The process then exits with status 0.
    """

    def __init__(self, config: uvicorn.Config, state: AppState) -> None:
        super().__init__(config)
        self._state = state
        self._end_at = math.inf
        self._log = structlog.get_logger("bucketplan_server")

    async def startup(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]  # uvicorn names sockets only
        await super().startup()
        if self.started:
            port = self.servers[0].sockets[0].getsockname()[1]
            self._log.info(
                "server.listening",
                url=f"{'https' if self.config.is_ssl else 'http'}://{_for_url(self.config.host)}:{port}",
                database=without_password(self._state.settings.database),
                version=__version__,
            )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        seconds = 0.0 if self._state.draining else self._state.settings.drain_seconds
        self._state.draining = True
        self._end_at = time.monotonic() + seconds
        self._log.info("server.draining", signal=signal.Signals(sig).name, seconds=seconds)

    async def on_tick(self, counter: int) -> bool:
        if self._state.draining:
            # Not in the signal's handler, which may interrupt the event loop anywhere.
            self._state.plans.stop()
            self._state.intake.stop(self._state.settings.drain_seconds + _BODY_GRACE_SECONDS)
        return await super().on_tick(counter) or time.monotonic() >= self._end_at


def _for_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
