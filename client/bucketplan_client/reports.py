"""Reports of this rank to the server, for people to look at: sent in the background, never waited for."""

from __future__ import annotations

import logging
import queue
import threading
from urllib.parse import quote

from bucketplan_client.errors import ClientError
from bucketplan_client.jitter import uniform
from bucketplan_client.transport import PlanClient
from bucketplan_core.attempt import RankReport

__all__ = ["Reporter"]

_LOG = logging.getLogger(__name__)

_MOST_WAITING = 1_000
_DEADLINE_S = 20.0
_SPREAD_S = 2.0
"""Ranks compile at the same moment; their reports need not arrive at the same moment."""


class Reporter:
    """Sends reports about one attempt, in batches, from a thread of its own."""

    def __init__(self, client: PlanClient, *, job: str, attempt: int) -> None:
        self._client = client
        self._path = f"/v1/jobs/{quote(job, safe='')}/attempts/{attempt}/reports"
        self._closing = threading.Event()
        self._waiting: queue.Queue[RankReport | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="bucketplan-reports", daemon=True)
        self._thread.start()

    def send(self, report: RankReport) -> None:
        """Queue `report`; drops it, saying so, when the server is far behind."""
        try:
            self._waiting.put_nowait(report)
        except queue.Full:
            _LOG.warning("a report was dropped: %d are waiting", _MOST_WAITING)

    def close(self, timeout_s: float = 5.0) -> None:
        """Send what is waiting, for at most `timeout_s`."""
        self._closing.set()
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (report := self._waiting.get()) is not None:
            self._closing.wait(uniform(0.0, _SPREAD_S))
            batch = [report]
            last = False
            while not self._waiting.empty() and not last:
                more = self._waiting.get_nowait()
                last = more is None
                batch += [] if more is None else [more]
            try:
                self._client.post(self._path, {"reports": [each.to_wire() for each in batch]}, deadline_s=_DEADLINE_S)
            except ClientError as error:
                _LOG.info("%d reports were not delivered: %s", len(batch), error.message)
            if last:
                return
