"""A cache with a limit: what was not used for longest goes first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Lru(Generic[K, V]):
    """A mapping of at most `limit` entries, safe to use from several threads.

    What is put out is only forgotten: whoever holds it goes on with it. `made` counts the entries put in, `evicted`
    those put out. Caches whose entries are made of each other's share the lock `making`.
    """

    def __init__(self, limit: int, making: Any = None) -> None:
        self.limit, self.made, self.evicted = limit, 0, 0
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()
        self._making = making or threading.RLock()

    def get(self, key: K) -> V | None:
        """The entry, which counts as a use; None if it is not there."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key]

    def __call__(self, key: K, make: Callable[[], V]) -> V:
        """The entry, made if it is not there: once, and one at a time, whoever asks. `make` may ask for others."""
        found = self.get(key)
        if found is not None:
            return found
        with self._making:
            found = self.get(key)
            return self.put(key, make()) if found is None else found

    def put(self, key: K, value: V) -> V:
        """Put in an entry, and out what is over the limit."""
        with self._lock:
            self._entries[key] = value
            self._entries.move_to_end(key)
            self.made += 1
            while len(self._entries) > self.limit:
                self._entries.popitem(last=False)
                self.evicted += 1
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[K]:
        """The keys, the one that goes first at the front."""
        with self._lock:
            return iter(list(self._entries))

    def items(self) -> list[tuple[K, V]]:
        """The entries with their keys in the same order."""
        with self._lock:
            return list(self._entries.items())

    def values(self) -> list[V]:
        """The entries alone."""
        return [value for _, value in self.items()]
