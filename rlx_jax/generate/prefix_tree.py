"""`RadixTree`: token sequences that share their beginnings, with values within a byte budget. It has no I/O."""

from __future__ import annotations

import os.path
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

V = TypeVar("V")
TokenIds = tuple[int, ...]


@dataclass(eq=False)
class RadixNode:
    """A node of a `RadixTree`: the sequence from the root to it.

    Attributes:
        edge: the tokens from the parent to this node.
        length: number of tokens from the root.
        children: by the first token of their edges.
        rows: numbers of the rows that `add_row` ended here.
        has_value: whether the sequence has a value.
    """

    edge: TokenIds
    length: int
    children: dict[int, RadixNode] = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)
    has_value: bool = False


class TreeEntry(NamedTuple, Generic[V]):
    """The value of a sequence, its bytes, and whether it is never evicted."""

    value: V
    nbytes: int
    pinned: bool


class RadixTree(Generic[V]):
    """A map from token sequences to values that finds the longest sequence with which a prompt begins.

    Values that are not pinned are evicted, the least recently used first, so that all values fit a budget.

    Args:
        budget: bytes of all values together.

    Attributes:
        entries: the values by sequence, the latest use last.
    """

    def __init__(self, budget: int = 0) -> None:
        self.budget = budget
        self.entries: OrderedDict[TokenIds, TreeEntry[V]] = OrderedDict()
        self._root = RadixNode((), 0)  # nodes do not refer to their parents: without cycles values are freed at once

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
        self._insert(ids).has_value = True
        self.entries[ids] = TreeEntry(value, nbytes, pinned)
        return evicted

    def longest(self, ids: Sequence[int]) -> V | None:
        """Return the value of the longest stored sequence with which `ids` begins, which counts as a use."""
        best = next((node.length for node in reversed(self._path(ids)) if node.has_value), None)
        if best is None:
            return None
        self.entries.move_to_end(key := tuple(ids[:best]))
        return self.entries[key].value

    def remove(self, ids: TokenIds) -> V:
        """Remove the value of a sequence, and the nodes that nothing needs any more; return the value."""
        path = self._path(ids)
        path[-1].has_value = False
        for parent, node in zip(path[-2::-1], path[:0:-1], strict=True):
            if node.has_value or node.rows or len(node.children) > 1:
                break
            if not node.children:
                del parent.children[node.edge[0]]
                continue
            (child,) = node.children.values()
            child.edge = node.edge + child.edge
            parent.children[node.edge[0]] = child
            break
        return self.entries.pop(ids).value

    def add_row(self, ids: Sequence[int], row: int) -> None:
        """Add a sequence without a value, for `shared`."""
        self._insert(ids).rows.append(row)

    def shared(self, min_len: int) -> Iterator[tuple[int, list[int]]]:
        """Yield the longest sequences with which sets of two or more rows begin: those at which rows end or part.

        Args:
            min_len: shorter sequences are left out.

        Returns:
            the length of each sequence, and the numbers of the rows.
        """
        order, stack = [], [self._root]
        while stack:
            order.append(node := stack.pop())
            stack.extend(node.children.values())
        below: dict[RadixNode, list[int]] = {}
        for node in reversed(order):  # children first
            below[node] = [*node.rows, *(row for child in node.children.values() for row in below[child])]
            if node.length >= max(min_len, 1) and len(below[node]) > 1:
                yield node.length, below[node]

    def _path(self, ids: Sequence[int]) -> list[RadixNode]:
        """Return the nodes whose sequences begin `ids`, from the root on."""
        ids, path = tuple(ids), [self._root]
        while (start := path[-1].length) < len(ids):
            child = path[-1].children.get(ids[start])
            if child is None or ids[start : child.length] != child.edge:
                break
            path.append(child)
        return path

    def _insert(self, ids: Sequence[int]) -> RadixNode:
        """Return the node of a sequence, a new one if there is none."""
        node = self._path(ids)[-1]
        rest = tuple(ids[node.length :])
        child = node.children.get(rest[0]) if rest else None
        if child is not None:  # split its edge where the sequences part
            count = len(os.path.commonprefix([child.edge, rest]))
            middle = RadixNode(child.edge[:count], node.length + count, {child.edge[count]: child})
            node.children[rest[0]], child.edge = middle, child.edge[count:]
            node, rest = middle, rest[count:]
        if not rest:
            return node
        node.children[rest[0]] = new = RadixNode(rest, len(ids))
        return new
