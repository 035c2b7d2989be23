"""`Cache`: the plans of operations by their keys, bounded, with a lookup that costs one `dict.get`.

It keeps two generations. A plan that is found in the old one moves to the young one. When the young
one is full the old one is forgotten. So what was used among the last `size` distinct keys is kept,
without the bookkeeping of an exact order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

__all__ = ["Cache", "structure_key"]

V = TypeVar("V")


class Cache(Generic[V]):
    """A table that forgets what was not used for long; `forgotten(value)` is called for that.

    `young` has most of what `get` finds: callers that count nanoseconds look there first.

    >>> cache = Cache(2, print)
    >>> for number in range(5):
    ...     cache.put(number, f"number {number}")
    number 0
    number 1
    >>> cache.get(4), cache.get(0)
    ('number 4', None)
    """

    def __init__(self, size: int, forgotten: Callable[[V], object]) -> None:
        self._size = size
        self._forgotten = forgotten
        self.young: dict[Hashable, V] = {}
        self._old: dict[Hashable, V] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> V | None:
        """Return the value of `key`, or None. Raises TypeError if it cannot be hashed."""
        found = self.young.get(key)
        if found is not None:
            return found
        found = self._old.pop(key, None)
        if found is not None:
            self.put(key, found)
        return found

    def put(self, key: Hashable, value: V) -> None:
        """Keep `value`, which must not be None."""
        forgotten: dict[Hashable, V] = {}
        if len(self.young) >= self._size:
            with self._lock:
                if len(self.young) >= self._size:  # no other thread was first
                    forgotten, self._old, self.young = self._old, self.young, {}
        for value_of_old in forgotten.values():
            self._forgotten(value_of_old)
        self.young[key] = value


def structure_key(spec: Any) -> Any:
    """Return a key for the structure of arguments: in torch 2.6 a TreeSpec has no hash."""
    try:
        hash(spec)
    except TypeError:
        return repr(spec)
    return spec
