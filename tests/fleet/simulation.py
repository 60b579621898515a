"""Ranks, store and server in one thread and in virtual time: protocols under seeded faults.

The ranks are the generators that real ranks run (`bucketplan_client.protocol`). Every step takes a random time, so any
interleaving of the ranks' steps can come up; faults are drawn from the seed.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from bucketplan_client.errors import StoreFailed
from bucketplan_client.protocol import Get, GetMany, Now, Put, PutOnce, Wait

Perform = Callable[[int, Any, float], tuple[float, Any]]
"""Carries out a step that is none of the store's: (rank, step, now) to its duration and its result or exception."""


@dataclass(slots=True)
class _Waiter:
    rank: int
    life: int
    missing: set[str]
    keys: tuple[str, ...]


@dataclass(slots=True)
class Ended:
    """How one life of a rank ended: at which moment, with a value, an exception, or by being killed."""

    rank: int
    started: float
    at: float
    value: Any = None
    error: BaseException | None = None
    killed: bool = False


@dataclass(slots=True)
class Simulation:
    """One run. `start` adds ranks, `kill` ends them, `run` goes on until nothing is left to happen."""

    rng: random.Random
    perform: Perform
    step_s: float = 0.01
    """Longest time of one step of the store."""
    store_breaks_at: dict[int, float] = field(default_factory=dict)
    """From when on a rank cannot reach the store."""
    now: float = 0.0
    store: dict[str, bytes] = field(default_factory=dict)
    num_writes: dict[str, int] = field(default_factory=dict)
    ended: list[Ended] = field(default_factory=list)
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _count: int = 0
    _running: dict[int, tuple[Generator[Any, Any, Any], int, float]] = field(default_factory=dict)
    _lives: dict[int, int] = field(default_factory=dict)
    _waiting: dict[str, list[_Waiter]] = field(default_factory=dict)

    def at(self, moment: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (moment, self._count, action))

    def start(self, rank: int, protocol: Callable[[], Generator[Any, Any, Any]], moment: float) -> None:
        """Start `rank` at `moment`; a rank that is killed may be started again."""

        def begin() -> None:
            life = self._lives[rank] = self._lives.get(rank, 0) + 1
            self._running[rank] = (protocol(), life, self.now)
            self._resume(rank, life, None)

        self.at(moment, begin)

    def kill(self, rank: int, moment: float) -> None:
        def end() -> None:
            running = self._running.pop(rank, None)
            if running is not None:
                self.ended.append(Ended(rank, running[2], self.now, killed=True))

        self.at(moment, end)

    def run(self) -> None:
        while self._events:
            moment, _, action = heapq.heappop(self._events)
            assert moment >= self.now
            self.now = moment
            action()

    @property
    def unfinished(self) -> list[int]:
        """Ranks that neither ended nor were killed: they wait for ever."""
        return sorted(self._running)

    def _resume(self, rank: int, life: int, result: Any) -> None:
        running = self._running.get(rank)
        if running is None or running[1] != life:
            return
        protocol, _, started = running
        try:
            if isinstance(result, BaseException):
                step = protocol.throw(result)
            else:
                step = protocol.send(result)
        except StopIteration as done:
            del self._running[rank]
            self.ended.append(Ended(rank, started, self.now, value=done.value))
            return
        except Exception as error:
            del self._running[rank]
            self.ended.append(Ended(rank, started, self.now, error=error))
            return
        if isinstance(step, Now):
            self._resume(rank, life, self.now)
            return
        if isinstance(step, Put | PutOnce | Get | GetMany | Wait):
            # The step takes effect somewhere between being issued and being answered.
            self.at(self.now + self.rng.random() * self.step_s, lambda: self._take_effect(rank, life, step))
            return
        took_s, outcome = self.perform(rank, step, self.now)
        self.at(self.now + took_s, lambda: self._resume(rank, life, outcome))

    def _take_effect(self, rank: int, life: int, step: Any) -> None:
        running = self._running.get(rank)
        if running is None or running[1] != life:
            # A rank that was killed may still have its last write arrive.
            if isinstance(step, Put | PutOnce) and self.rng.random() < 0.5:
                self._write(step)
            return
        if self.now >= self.store_breaks_at.get(rank, float("inf")):
            self._resume(rank, life, StoreFailed(type(step).__name__, "connection reset"))
            return
        result: Any = None
        if isinstance(step, Put | PutOnce):
            result = self._write(step)
        elif isinstance(step, Get):
            result = self.store.get(step.key)
        elif isinstance(step, GetMany):
            result = [self.store[key] for key in step.keys]
        else:
            missing = {key for key in step.keys if key not in self.store}
            if missing and step.until > self.now:
                self._await(rank, life, step, missing)
                return
            result = tuple(key for key in step.keys if key in missing)
        self.at(self.now + self.rng.random() * self.step_s, lambda: self._resume(rank, life, result))

    def _write(self, step: Put | PutOnce) -> bytes | None:
        key = step.key
        if isinstance(step, PutOnce) and key in self.store:
            return self.store[key]
        self.store[key] = step.value
        self.num_writes[key] = self.num_writes.get(key, 0) + 1
        for waiter in self._waiting.pop(key, []):
            waiter.missing.discard(key)
            if not waiter.missing:
                life = waiter.life
                delay = self.rng.random() * self.step_s
                self.at(self.now + delay, lambda w=waiter, life=life: self._resume_waiter(w, life))
        return step.value if isinstance(step, PutOnce) else None

    def _await(self, rank: int, life: int, step: Wait, missing: set[str]) -> None:
        waiter = _Waiter(rank, life, missing, step.keys)
        for key in missing:
            self._waiting.setdefault(key, []).append(waiter)
        self.at(max(step.until, self.now), lambda: self._time_out(waiter))

    def _resume_waiter(self, waiter: _Waiter, life: int) -> None:
        if waiter.life == life and waiter.life > 0:
            waiter.life = 0
            self._resume(waiter.rank, life, ())

    def _time_out(self, waiter: _Waiter) -> None:
        life = waiter.life
        if life > 0 and waiter.missing:
            waiter.life = 0
            missing = tuple(key for key in waiter.keys if key in waiter.missing)
            self._resume(waiter.rank, life, missing)
