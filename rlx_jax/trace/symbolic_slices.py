"""Slices whose bounds are sizes of values: `x[:, :t.shape[1]]`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx_jax.errors import GraphError, ShapeError, shown
from rlx_jax.ir.graph import Value
from rlx_jax.ir.ops.shape import END, Bound, CutAxis, SizeOf
from rlx_jax.ir.types import Dim, DimLike, symbol

# A value of the program with an axis of a symbolic size, and the axis; ShapeError where there is none.
SizeHolder = Callable[[DimLike], tuple[Value, int]]


def is_cut(key: Any) -> bool:
    """Whether one place of a key is a slice with a symbolic bound."""
    return isinstance(key, slice) and any(isinstance(bound, Dim) for bound in (key.start, key.stop))


def places_of(keys: Sequence[Any], rank: int, where: str) -> list[tuple[int, slice]]:
    """The slices with symbolic bounds among the places of a key, each with its axis.

    Raises:
        GraphError: a step beside such a bound. ShapeError: more places than axes.
    """
    gap = next((i for i, k in enumerate(keys) if k is Ellipsis), len(keys))
    front = sum(k is not None for k in keys[:gap])
    behind = sum(k is not None for k in keys[gap + 1 :])
    if front + behind > rank and any(map(is_cut, keys)):
        raise ShapeError(f"{where}: {front + behind} indices for a value of rank {rank}")
    axes = iter([*range(front), *range(rank - behind, rank)])
    found = []
    for key in keys:
        axis = next(axes, 0) if key is not None and key is not Ellipsis else 0
        if is_cut(key):
            if key.step not in (None, 1):
                raise GraphError(f"{where}: a slice to a symbolic size has no step; got {key!r}")
            found.append((axis, key))
    return found


def cut_of(x: Value, axis: int, start: Any, stop: Any, holder: SizeHolder, where: str) -> tuple[CutAxis, list[Value]]:
    """The op that takes `start:stop` of an axis of x, and the values that lend it sizes.

    Raises:
        ShapeError: no value of the program has a size that is asked for. GraphError: a bound is no size.
    """
    lenders: list[Value] = []

    def size_of(dim: DimLike) -> SizeOf:
        value, at = holder(dim)
        if value != x and value not in lenders:
            lenders.append(value)
        return SizeOf(lenders.index(value) + 1 if value != x else 0, at)

    front = Bound() if start is None else _bound(start, size_of, where)
    end = END if stop is None else _bound(stop, size_of, where)
    return CutAxis(axis, front, end), lenders


def _bound(given: Any, size_of: Callable[[DimLike], SizeOf], where: str) -> Bound:
    """One bound: a size, or a sum of sizes and numbers, each added or taken away so many times. Where all are taken
    away it counts from the end."""
    if isinstance(given, int | np.integer) and not isinstance(given, bool):
        return Bound((), abs(int(given)), bool(given < 0))
    if not isinstance(given, Dim):
        raise GraphError(f"{where}: a bound is a number, or the size of a value (t.shape[1]); got {shown(given)}")
    dim = given.expr
    try:
        return Bound((size_of(dim),))
    except ShapeError:
        terms = counted_terms(dim)
        if not terms or sum(abs(count) for name, count in terms if name) > MOST_TERMS:
            raise
    from_end = all(count < 0 for _, count in terms)
    more, less, offset = list[SizeOf](), list[SizeOf](), 0
    for name, count in ((name, -n if from_end else n) for name, n in terms):
        if name:
            (more if count > 0 else less).extend([size_of(symbol(name))] * abs(count))
        else:
            offset += count
    return Bound(tuple(more), offset, from_end, tuple(less))


# Sizes of a bound are written out; nobody writes so many.
MOST_TERMS = 64
_TERM = re.compile(r"([+-]?) ?(?:(\d+)\*)?(\w+) ?")


def counted_terms(dim: DimLike) -> list[tuple[str, int]]:
    """`[("seq", 2), ("past", -1), ("", 3)]` of `2*seq - past + 3`: how often each symbol counts, and the number.
    Nothing where the dimension is no such sum."""
    text, at, found = str(dim), 0, list[tuple[str, int]]()
    while at < len(text):
        match = _TERM.match(text, at)
        if match is None or not (match[1] or at == 0) or not (match[3].isidentifier() or match[3].isdigit()):
            return []
        sign, times = -1 if match[1] == "-" else 1, int(match[2] or 1)
        number = match[3].isdigit()
        found.append(("" if number else match[3], sign * times * (int(match[3]) if number else 1)))
        at = match.end()
    return found
