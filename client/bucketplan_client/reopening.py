"""A running attempt is opened at the server again where the server lost it: its database was restored or made new.

Every rank of the attempt may find that out, at any moment, and all of them send one and the same call: under the key of
the first opening, with the epoch that they hold, which the server adopts. So it does not matter which rank is first,
and the first one tells the others through the job's store.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from dataclasses import replace
from urllib.parse import quote

from bucketplan_client.errors import CorruptAnswer, ServerError
from bucketplan_client.jitter import uniform
from bucketplan_client.store import JobStore
from bucketplan_client.transport import PlanClient
from bucketplan_core.attempt import AttemptRequest
from bucketplan_core.epoch import Epoch
from bucketplan_core.errors import DecodeError
from bucketplan_core.fields import Fields
from bucketplan_core.wire import WireValue, pack, unpack

__all__ = ["ServerAttempt"]

_LOG = logging.getLogger(__name__)

_SPREAD_S = 1.0
"""Ranks that compile together lose the server's attempt together; one of them is enough to open it."""
_ASKED, _AGAIN = "asked", "opened-again"


class ServerAttempt:
    """One attempt as the server knows it: its `number` there, which opening it again may change.

    `epoch` is what its ranks hold, `store` the attempt's part of the job's store.
    """

    def __init__(
        self, client: PlanClient, *, job: str, number: int, epoch: Epoch, store: JobStore, num_ranks: int
    ) -> None:
        self._client = client
        self._where = client.where.at(job=job)
        self._job = job
        self._number = number
        self._epoch = epoch
        self._store = store
        self._num_ranks = num_ranks
        self._num_openings = 0
        self._adopted: bytes | None = None
        self._lock = threading.Lock()

    @property
    def number(self) -> int:
        return self._number

    @property
    def num_openings(self) -> int:
        """How often it was opened again; a caller that was refused says what this was when it asked."""
        return self._num_openings

    def remember(self, request: AttemptRequest) -> None:
        """Keep what the attempt was opened with, for whichever rank opens it again."""
        self._store.put(_ASKED, pack(request.to_wire()))

    def open_again(self, num_openings: int, *, until: float) -> None:
        """Return once the server knows the attempt again, as far as this rank can tell, at most until `until`.

        Returns at once where it was opened again since the caller read `num_openings`. Raises `ServerError` where the
        server refuses or cannot be asked, and `StoreFailed`.
        """
        with self._lock:
            if self._num_openings != num_openings or self._adopt():
                return
            if self._num_ranks > 1:
                left_s = max(0.0, until - time.monotonic())
                time.sleep(uniform(0.0, min(_SPREAD_S, left_s / 4)))
                if self._adopt():
                    return
            number = self._ask(until)
            self._adopted = f"{number}:{uuid.uuid4().hex}".encode()
            self._store.put(_AGAIN, self._adopted)
            self._take(number)
            _LOG.warning(
                "the server had lost the attempt; it was opened again as attempt %d of job %s", number, self._job
            )

    def _adopt(self) -> bool:
        """Take what another rank wrote since this one looked."""
        standing = self._store.get(_AGAIN)
        if standing is None or standing == self._adopted:
            return False
        self._adopted = standing
        self._take(int(standing.partition(b":")[0]))
        return True

    def _take(self, number: int) -> None:
        self._number = number
        self._num_openings += 1

    def _ask(self, until: float) -> int:
        answer = self._client.post(
            f"/v1/jobs/{quote(self._job, safe='')}/attempts",
            self._request().to_wire(),
            deadline_s=max(0.0, until - time.monotonic()),
        )
        try:
            return self._read(answer.body)
        except DecodeError as error:
            raise CorruptAnswer(str(error), num_tries=answer.num_tries, where=self._where) from error

    def _request(self) -> AttemptRequest:
        asked = self._store.get(_ASKED)
        if asked is None:
            raise ServerError(
                "what the attempt was opened with is not in the job's store",
                remedy="Start the job again",
                where=self._where,
            )
        request = AttemptRequest.read(Fields(unpack(asked), "asked"))
        options = dict(request.options)
        if self._epoch.options.hardware is not None and "hardware" in options:
            # The profiles that it may have named are lost with the rest; the epoch has their figures.
            options["hardware"] = self._epoch.options.hardware.to_wire()
        return replace(request, options=options, held_epoch=self._epoch)

    def _read(self, tree: WireValue) -> int:
        fields = Fields(tree, "opened")
        adopted = fields.digest("epoch_id")
        if adopted != self._epoch.id:
            raise DecodeError("opened.epoch_id", adopted, f"the attempt runs under epoch {self._epoch.id}")
        return fields.integer("attempt", low=1)
