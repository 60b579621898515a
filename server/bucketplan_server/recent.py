"""What was used last, within a bound."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["Recent"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Values by key that weigh at most `most` together, the least recently read or put leaving first.

    `weigh` says what a value weighs for as long as it is kept, 1 where left out. One that weighs more than `most` is
    not kept.
    """

    def __init__(self, most: int, *, weigh: Callable[[V], int] = lambda _: 1) -> None:
        self._most = most
        self._weigh = weigh
        self._kept: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self.weight = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: K) -> V | None:
        found = self._kept.get(key)
        if found is None:
            return None
        self._kept.move_to_end(key)
        return found[0]

    def put(self, key: K, value: V) -> None:
        """Keep `value`, replacing what was there."""
        self.drop(key)
        weight = self._weigh(value)
        if weight > self._most:
            return
        self._kept[key] = (value, weight)
        self.weight += weight
        while self.weight > self._most:
            _, (_, left) = self._kept.popitem(last=False)
            self.weight -= left

    def drop(self, key: K) -> None:
        found = self._kept.pop(key, None)
        if found is not None:
            self.weight -= found[1]
