"""Reports of this rank to the server, for people to look at: sent in the background, never waited for."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from urllib.parse import quote

from bucketplan_client.errors import ClientError, ServerRefused, Where
from bucketplan_client.jitter import uniform
from bucketplan_client.reopening import ServerAttempt
from bucketplan_client.transport import PlanClient
from bucketplan_core.attempt import MAX_REPORT_ENTRIES, RankReport
from bucketplan_core.errors import DecodeError
from bucketplan_core.wire import WireValue, pack

__all__ = ["Reporter"]

_LOG = logging.getLogger(__name__)
_Packed = tuple[RankReport, WireValue]

_MOST_WAITING = 1_000
_BATCH_BYTES = 2**19
"""Half of what the server reads as one body of this call (1 MiB)."""
_TEXT_CHARACTERS = 200
"""Longest text of a skipped collective: as many of them as a report may hold stay below a batch."""
_ABOUT_A_REPORT = (400, 409, 413, 422)
"""What a server says of what one report holds, which others in the same call need not share."""
_DEADLINE_S = 20.0
_FIRST_PAUSE_S = 2.0
_LONGEST_PAUSE_S = 60.0
"""Between tries at a server that is away: reports are worth waiting for, and nobody waits for them."""
_SPREAD_S = 2.0
"""Ranks compile at the same moment; their reports need not arrive at the same moment."""


class Reporter:
    """Sends reports about one attempt, in batches, from a thread of its own.

    With `at_server` it follows the attempt's number there, and opens the attempt again where the server has lost it.
    What a server that is away does not take is sent again until `close`. A report that it refuses is logged
    as a warning and costs no other. What a report may not hold all of is shortened and says so.
    """

    def __init__(
        self,
        client: PlanClient,
        *,
        job: str,
        attempt: int,
        at_server: ServerAttempt | None = None,
        where: Where | None = None,
    ) -> None:
        self._client = client
        self._job = job
        self._attempt = attempt
        self._at_server = at_server
        self._where = where or client.where.at(job=job)
        self._waiting: deque[RankReport] = deque()
        self._num_taken = 0
        """Those that are being sent, which wait again where the server is away."""
        self._changed = threading.Condition()
        self._ends: float | None = None
        self._thread = threading.Thread(target=self._run, name="bucketplan-reports", daemon=True)
        self._thread.start()

    def send(self, report: RankReport) -> None:
        """Queue `report`; drops it, saying so, when the server is far behind."""
        with self._changed:
            if len(self._waiting) + self._num_taken < _MOST_WAITING:
                self._waiting.append(_shortened(report))
                self._changed.notify()
                return
        _LOG.warning("a report was dropped: %d are waiting", _MOST_WAITING)

    def close(self, timeout_s: float = 5.0) -> None:
        """Send what is waiting, for at most `timeout_s`."""
        with self._changed:
            self._ends = time.monotonic() + timeout_s
            self._changed.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        pause_s = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ends is not None)
                if not self._waiting:
                    return
                self._changed.wait_for(lambda: self._ends is not None, pause_s + uniform(0.0, _SPREAD_S))
                taken, last = list(self._waiting), self._ends is not None
                self._waiting.clear()
                self._num_taken = len(taken)
            left: list[RankReport] = []
            for batch in _batches(taken):
                left += [report for report, _ in batch] if left else self._deliver(batch)
            if left and last:
                _LOG.warning("%d reports were not delivered before the end of the attempt", len(left))
                return
            pause_s = min(max(_FIRST_PAUSE_S, 2 * pause_s), _LONGEST_PAUSE_S) if left else 0.0
            with self._changed:
                self._waiting.extendleft(reversed(left))
                self._num_taken = 0

    def _deliver(self, batch: Sequence[_Packed]) -> list[RankReport]:
        """Send these reports in one call, or each in its own where one may be refused; what is left to send."""
        try:
            self._post([tree for _, tree in batch])
        except ServerRefused as refused:
            refused.located(self._where)
            if len(batch) > 1 and refused.problem.status in _ABOUT_A_REPORT:
                return [left for report in batch for left in self._deliver([report])]
            if refused.problem.status < 500:
                reports = "a report was" if len(batch) == 1 else f"{len(batch)} reports were"
                _LOG.warning("%s refused: %s", reports, refused)
                return []
            _LOG.info("%d reports are not delivered yet: %s", len(batch), refused)
        except ClientError as error:
            _LOG.info("%d reports are not delivered yet: %s", len(batch), error.located(self._where))
        else:
            return []
        return [report for report, _ in batch]

    def _post(self, batch: Sequence[WireValue]) -> None:
        left_s = _DEADLINE_S if self._ends is None else min(_DEADLINE_S, self._ends - time.monotonic())
        until = time.monotonic() + left_s
        seen = 0 if self._at_server is None else self._at_server.num_openings
        try:
            self._send_batch(batch, until)
        except ServerRefused as refused:
            if self._at_server is None or refused.problem.slug != "unknown-attempt":
                raise
            self._at_server.open_again(seen, until=until)
            self._send_batch(batch, until)

    def _send_batch(self, batch: Sequence[WireValue], until: float) -> None:
        number = self._attempt if self._at_server is None else self._at_server.number
        path = f"/v1/jobs/{quote(self._job, safe='')}/attempts/{number}/reports"
        self._client.post(path, {"reports": batch}, deadline_s=max(0.0, until - time.monotonic()))


def _shortened(report: RankReport) -> RankReport:
    """`report` with no more entries and no longer texts than a report may hold."""
    skipped = [_cut(text) for text in report.skipped[:MAX_REPORT_ENTRIES]]
    if len(report.skipped) > MAX_REPORT_ENTRIES:
        skipped[-1] = f"and {len(report.skipped) - MAX_REPORT_ENTRIES + 1:,} more"
    return replace(
        report, skipped=tuple(skipped), statistics=dict(islice(sorted(report.statistics.items()), MAX_REPORT_ENTRIES))
    )


def _cut(text: str) -> str:
    return text if len(text) <= _TEXT_CHARACTERS else f"{text[: _TEXT_CHARACTERS - 3]}..."


def _batches(reports: Sequence[RankReport]) -> Iterator[list[_Packed]]:
    """The reports in their order, as many at a time as fit into `_BATCH_BYTES`; one that is larger comes alone."""
    batch: list[_Packed] = []
    num_bytes = 0
    for report in reports:
        tree = report.to_wire()
        try:
            size = len(pack(tree))
        except DecodeError as error:
            _LOG.warning("a report was dropped: %s", error)
            continue
        if batch and num_bytes + size > _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append((report, tree))
        num_bytes += size
    if batch:
        yield batch
