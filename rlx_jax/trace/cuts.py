"""Slices whose bounds are sizes of values: `x[:, :t.shape[1]]`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx_jax.errors import GraphError, ShapeError, shown
from rlx_jax.ir.graph import Value
from rlx_jax.ir.ops.cut import END, Bound, CutAxis
from rlx_jax.ir.ops.shape import SizeOf
from rlx_jax.ir.types import Dim, DimLike, symbol, terms_of

SizeHolder = Callable[[DimLike], tuple[Value, int]]
"""A value of the program with an axis of a symbolic size, and the axis; ShapeError where there is none."""


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
    """One bound: a size, a sum of sizes and numbers, or minus one of these, which counts from the end."""
    if isinstance(given, int | np.integer) and not isinstance(given, bool):
        return Bound((), abs(int(given)), bool(given < 0))
    if not isinstance(given, Dim):
        raise GraphError(f"{where}: a bound is a number, or the size of a value (t.shape[1]); got {shown(given)}")
    dim = given.expr
    try:
        return Bound((size_of(dim),))
    except ShapeError:
        for terms, from_end in ((terms_of(dim), False), (terms_of(-dim), True)):
            if terms:
                sizes = tuple(size_of(symbol(t)) for t in terms if not t.isdigit())
                return Bound(sizes, sum(int(t) for t in terms if t.isdigit()), from_end)
        raise


def narrowed(start: Any, length: Any) -> tuple[Any, Any]:
    """The bounds of `length` entries from `start` on; behind the last one stands the end."""
    stop = start + length
    return start, None if not isinstance(stop, Dim) and stop == 0 else stop
