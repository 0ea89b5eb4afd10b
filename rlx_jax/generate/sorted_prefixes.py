"""`PrefixMap`: values of token sequences within a byte budget; and the sequences with which several prompts begin.

Both sort sequences, as bytes, which are compared fast: sequences with a common beginning are then next to each other.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

import numpy as np

V = TypeVar("V")
TokenIds = tuple[int, ...]
ID_BYTES = 4


class MapEntry(NamedTuple, Generic[V]):
    """The value of a sequence, its bytes, and whether it is never evicted."""

    value: V
    nbytes: int
    pinned: bool


class PrefixMap(Generic[V]):
    """A map from token sequences to values that finds the longest sequence with which a prompt begins.

    Values that are not pinned are evicted, the least recently used first, so that all values fit a budget.

    Args:
        budget: bytes of all values together.

    Attributes:
        entries: the values by sequence, the latest use last.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.entries: OrderedDict[TokenIds, MapEntry[V]] = OrderedDict()
        self._keys: list[bytes] = []  # the sequences, sorted

    @property
    def nbytes(self) -> int:
        """Return the bytes of all values."""
        return sum(entry.nbytes for entry in self.entries.values())

    @property
    def pinned_bytes(self) -> int:
        """Return the bytes of values that are never evicted."""
        return sum(entry.nbytes for entry in self.entries.values() if entry.pinned)

    def put(self, ids: TokenIds, value: V, nbytes: int, pinned: bool = False) -> list[V] | None:
        """Store the value of a sequence.

        Returns:
            the values that were evicted or replaced; None if the value does not fit next to the pinned ones, and was
            not stored.
        """
        old = self.entries.get(ids)
        if nbytes + self.pinned_bytes - (old.nbytes if old is not None and old.pinned else 0) > self.budget:
            return None
        evicted = [] if old is None else [self.remove(ids)]
        for key in [key for key, entry in self.entries.items() if not entry.pinned]:
            if self.nbytes + nbytes <= self.budget:
                break
            evicted.append(self.remove(key))
        insort(self._keys, id_bytes(ids))
        self.entries[ids] = MapEntry(value, nbytes, pinned)
        return evicted

    def longest(self, ids: Sequence[int]) -> V | None:
        """Return the value of the longest stored sequence with which `ids` begins, which counts as a use."""
        key = id_bytes(ids)
        # A sequence with which `key` begins is not after it. The last one before it either is such a sequence, or what
        # it shares with `key` is the most that any can have.
        while index := bisect_right(self._keys, key):
            found = self._keys[index - 1]
            if key.startswith(found):
                best = tuple(ids[: len(found) // ID_BYTES])
                self.entries.move_to_end(best)
                return self.entries[best].value
            key = key[: ID_BYTES * common_len(key, found)]
        return None

    def remove(self, ids: TokenIds) -> V:
        """Remove the value of a sequence, and return it."""
        del self._keys[bisect_left(self._keys, id_bytes(ids))]
        return self.entries.pop(ids).value


def shared_prefixes(rows: Sequence[Sequence[int]], min_len: int) -> Iterator[tuple[int, list[int]]]:
    """Yield the longest sequences with which sets of two or more rows begin: those at which rows end or part.

    Args:
        rows: the rows.
        min_len: shorter sequences are left out.

    Returns:
        the length of each sequence, and the numbers of the rows.
    """
    keys = [id_bytes(row) for row in rows]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    # Of the sequences with which the latest row begins: their lengths, ascending, and the first row in the order.
    latest: list[tuple[int, int]] = []
    lengths = [common_len(keys[a], keys[b]) for a, b in pairwise(order)]
    for i, shared in enumerate((*lengths, 0)):
        first = i
        while latest and latest[-1][0] > shared:
            length, first = latest.pop()
            yield length, order[first : i + 1]
        if shared >= max(min_len, 1) and not (latest and latest[-1][0] == shared):
            latest.append((shared, first))


def id_bytes(ids: Sequence[int]) -> bytes:
    """Return token ids as bytes. Their order is not that of the ids, but sequences with a common beginning adjoin."""
    return array("i", ids).tobytes()


def common_len(first: bytes, second: bytes) -> int:
    """Return the number of tokens that both sequences begin with."""
    size = min(len(first), len(second))
    differs = np.frombuffer(first, np.int32, size // ID_BYTES) != np.frombuffer(second, np.int32, size // ID_BYTES)
    return int(differs.argmax()) if differs.any() else size // ID_BYTES
