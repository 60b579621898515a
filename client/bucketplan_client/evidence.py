"""Evidence that ranks compiled the same: written at each compilation, compared by whoever comes second.

When a compile cache hits, no hook runs, so ranks cannot compare inside the compiler without waiting for ever. Instead
the first rank of a group that compiles a graph writes what it will issue; every later one finds it there and compares,
and none waits. On a difference it raises the alarm in the store, and a watcher on every rank of the job ends its
process with both sides in the message, instead of leaving all of them in a collective that never completes.
"""

from __future__ import annotations

import logging
import sys
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence

from bucketplan_client.agreement import describe_difference
from bucketplan_client.errors import ClientError, RanksDisagree, StoreFailed, Where
from bucketplan_client.failures import end_process
from bucketplan_client.protocol import members_digest
from bucketplan_client.store import JobStore
from bucketplan_core.groups import group_digests
from bucketplan_core.plan import Plan
from bucketplan_core.request import Request
from bucketplan_core.wire import pack, unpack

__all__ = ["Evidence", "abort_process"]

_LOG = logging.getLogger(__name__)

_POLL_S = 1.0
_END_S = 5.0
"""How long the end of an attempt waits for its watcher, which may be in a call of the store."""


def abort_process(error: ClientError) -> None:
    """End this process with `error` on stderr and the status `failures.ABORT_STATUS`."""
    print(f"bucketplan: {error}", file=sys.stderr, flush=True)  # noqa: T201  (logging may not be flushed before exit)
    end_process()


class Evidence:
    """The evidence of one rank of one attempt; `on_mismatch` is called once, on a thread of its own, on every rank."""

    def __init__(
        self,
        store: JobStore,
        *,
        rank: int,
        where: Where,
        on_mismatch: Callable[[ClientError], None] = abort_process,
        poll_s: float = _POLL_S,
    ) -> None:
        self._store = store
        self._rank = rank
        self._where = where
        self._on_mismatch = on_mismatch
        self._poll_s = poll_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._noted: dict[tuple[str, str], set[str]] = {}

    def watch(self) -> None:
        """Start the watcher, unless it runs."""
        if self._thread is None:
            own = self._store.separate()
            self._thread = threading.Thread(target=self._watch, args=(own,), name="bucketplan-watch", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        thread, self._thread = self._thread, None
        # `on_mismatch`, on the watcher itself, may close; and a store that answers nothing must not hold up the end.
        if thread is not None and thread is not threading.current_thread():
            thread.join(_END_S)

    def note(
        self,
        sequence: str,
        request: Request,
        plan: Plan,
        groups: Mapping[str, Sequence[int]],
    ) -> bool:
        """Write, or compare with, what each of this rank's `groups` (members by role) will issue for one graph.

        Ranks of a group issue its collectives in one order, so a graph is named by its place among those with
        collectives of the group, in a `sequence` that a rank compiles in order (forward, backward): what a rank
        compiles beside them, such as a metric without collectives, shifts nothing, and a graph with collectives that
        others do not have is found. What was noted before, and is compiled again under other guards, has its place
        already. Call it only while every graph of the group went through it: torch's compile ids, which count whatever
        a rank compiles, name other graphs on other ranks. Returns False after raising the alarm.
        """
        digests = group_digests(request, plan.decision)
        self._store.put_once(f"description/{request.signature}", zlib.compress(request.encoded))
        for role in sorted(digests):
            members = list(groups.get(role, ()))
            noted = self._noted.setdefault((sequence, role), set())
            if len(members) < 2 or digests[role] in noted:
                continue
            number = len(noted)
            noted.add(digests[role])
            group = members_digest(members)[:16]
            mine = pack({"digest": digests[role], "rank": self._rank, "signature": request.signature})
            standing = self._store.put_once(f"evidence/{sequence}/{number}/{role}/{group}", mine)
            if standing != mine and not self._same(standing, digests[role]):
                self._alarm(f"{sequence} {number}", role, standing, mine)
                return False
        return True

    def _same(self, standing: bytes, digest: str) -> bool:
        tree = unpack(standing)
        return isinstance(tree, dict) and tree["digest"] == digest

    def _alarm(self, slot: str, role: str, standing: bytes, mine: bytes) -> None:
        first, second = unpack(standing), unpack(mine)
        assert isinstance(first, dict)
        assert isinstance(second, dict)
        sides = [self._store.get(f"description/{side['signature']}") for side in (first, second)]
        difference = ""
        if sides[0] is not None and sides[1] is not None:
            difference = describe_difference(
                zlib.decompress(sides[0]), zlib.decompress(sides[1]), int(str(first["rank"])), self._rank
            )
        self._store.put_once(
            "alarm",
            pack({"difference": difference, "first": first, "role": role, "second": second, "slot": slot}),
        )

    def _watch(self, store: JobStore) -> None:
        while not self._stop.wait(self._poll_s):
            try:
                found = store.get("alarm")
            except StoreFailed as error:
                # The store ends with the job; a rank that still trains then hears of it from its own collectives.
                _LOG.info("no longer watching for mismatches: %s", error.message)
                return
            if found is not None:
                self._on_mismatch(_mismatch(found, self._where))
                return


def _mismatch(alarm: bytes, where: Where) -> RanksDisagree:
    tree = unpack(alarm)
    assert isinstance(tree, dict)
    first, second = tree["first"], tree["second"]
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    # A rank that is neither of the two sides is shown the signature of the first to come.
    mine = second if second["rank"] == where.rank else first
    return RanksDisagree(
        role=str(tree["role"]),
        what=f"collectives of compiled graph {tree['slot']}",
        holders={str(side["digest"]): [int(str(side["rank"]))] for side in (first, second)},
        difference=str(tree["difference"]) or None,
        where=where.at(signature=str(mine["signature"])),
    )
