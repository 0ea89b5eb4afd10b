"""This module defines `LruCache`, a thread-safe cache that evicts the least recently used entry."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """A mapping of at most `limit` entries, safe to use from several threads.

    An evicted entry stays valid for code that still refers to it. `num_inserted` counts insertions, and `num_evicted`
    counts evictions.

    Args:
        limit: the number of entries.
        creation_lock: the lock for creating entries. Caches that create entries from entries of each other share it.
    """

    def __init__(self, limit: int, creation_lock: Any = None) -> None:
        self.limit, self.num_inserted, self.num_evicted = limit, 0, 0
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()
        self._creation_lock = creation_lock or threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return LruCache, (self.limit,)  # a copy is empty

    def get(self, key: K) -> V | None:
        """Return the entry, which counts as a use; None if there is none."""
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key]

    def __call__(self, key: K, make: Callable[[], V]) -> V:
        """Return the entry, created by `make` if there is none.

        Only one thread creates entries at a time, and each entry once. `make` may request other entries.
        """
        entry = self.get(key)
        if entry is not None:
            return entry
        with self._creation_lock:
            # Another thread may have created the entry while this one waited for the lock.
            entry = self.get(key)
            return self.insert(key, make()) if entry is None else entry

    def insert(self, key: K, value: V) -> V:
        """Insert an entry, evict the oldest ones over the limit, and return the value."""
        with self._lock:
            self._entries[key] = value
            self._entries.move_to_end(key)
            self.num_inserted += 1
            while len(self._entries) > self.limit:
                self._entries.popitem(last=False)
                self.num_evicted += 1
        return value

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[K]:
        """Iterate over a copy of the keys, the least recently used first."""
        with self._lock:
            return iter(list(self._entries))

    def items(self) -> list[tuple[K, V]]:
        """Return the keys and entries, the least recently used first."""
        with self._lock:
            return list(self._entries.items())

    def values(self) -> list[V]:
        """Return the entries, the least recently used first."""
        return [value for _, value in self.items()]
