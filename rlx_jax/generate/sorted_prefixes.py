"""The sequences of token ids with which several prompts begin, and which of some sequences one prompt begins with.

Sequences are sorted as bytes, which are compared fast: sequences with a common beginning are then next to each other.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

ID_BYTES = 4


def longest_prefix(keys: Sequence[bytes], ids: Sequence[int]) -> tuple[int, ...] | None:
    """Return the longest of some sequences with which `ids` begins; `keys` are the sequences as bytes, sorted."""
    key = id_bytes(ids)
    # A sequence with which `key` begins is not after it. The last one before it either is such a sequence, or what it
    # shares with `key` is the most that any can have.
    while index := bisect_right(keys, key):
        candidate = keys[index - 1]
        if key.startswith(candidate):
            return tuple(ids[: len(candidate) // ID_BYTES])
        key = key[: ID_BYTES * common_len(key, candidate)]
    return None


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
    """Return token ids as bytes. They sort differently from the ids, but sequences with a common beginning adjoin."""
    return array("i", ids).tobytes()


def common_len(first: bytes, second: bytes) -> int:
    """Return the number of tokens that both sequences begin with."""
    size = min(len(first), len(second))
    differs = np.frombuffer(first, np.int32, size // ID_BYTES) != np.frombuffer(second, np.int32, size // ID_BYTES)
    return int(differs.argmax()) if differs.any() else size // ID_BYTES
