"""Slices with symbolic bounds, which are sizes of other values: `x[:, :t.shape[1]]`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx_jax.errors import GraphError, ShapeError, shown
from rlx_jax.ir.graph import Value
from rlx_jax.ir.ops.shape import END, Bound, CutAxis, SizeOf
from rlx_jax.ir.types import Dim, DimLike, symbol

# A function that returns a value with an axis of a symbolic size, and the axis; a ShapeError if there is none.
SizeLookup = Callable[[DimLike], tuple[Value, int]]


def is_symbolic_slice(key: Any) -> bool:
    """Return whether one entry of an index is a slice with a symbolic bound."""
    return isinstance(key, slice) and any(isinstance(bound, Dim) for bound in (key.start, key.stop))


def find_symbolic_slices(keys: Sequence[Any], rank: int, where: str) -> list[tuple[int, slice]]:
    """Return the slices with symbolic bounds in an index, each with its axis.

    Raises:
        GraphError: such a slice has a step. ShapeError: more entries than axes.
    """
    ellipsis_position = next((i for i, k in enumerate(keys) if k is Ellipsis), len(keys))
    leading = sum(k is not None for k in keys[:ellipsis_position])
    trailing = sum(k is not None for k in keys[ellipsis_position + 1 :])
    if leading + trailing > rank and any(map(is_symbolic_slice, keys)):
        raise ShapeError(f"{where}: {leading + trailing} indices for a value of rank {rank}")
    axes = iter([*range(leading), *range(rank - trailing, rank)])
    slices = []
    for key in keys:
        axis = next(axes, 0) if key is not None and key is not Ellipsis else 0
        if is_symbolic_slice(key):
            if key.step not in (None, 1):
                raise GraphError(f"{where}: a slice to a symbolic size has no step; got {key!r}")
            slices.append((axis, key))
    return slices


def make_slice_op(
    x: Value, axis: int, start: Any, stop: Any, find_size: SizeLookup, where: str
) -> tuple[CutAxis, list[Value]]:
    """Return the op that slices `start:stop` of an axis of x, and the other values from which it reads sizes.

    Raises:
        ShapeError: no value of the program has a size of a bound. GraphError: a bound is no size.
    """
    size_values: list[Value] = []

    def size_of(dim: DimLike) -> SizeOf:
        value, size_axis = find_size(dim)
        if value != x and value not in size_values:
            size_values.append(value)
        return SizeOf(size_values.index(value) + 1 if value != x else 0, size_axis)

    start_bound = Bound() if start is None else _make_bound(start, size_of, where)
    stop_bound = END if stop is None else _make_bound(stop, size_of, where)
    return CutAxis(axis, start_bound, stop_bound), size_values


def _make_bound(bound: Any, size_of: Callable[[DimLike], SizeOf], where: str) -> Bound:
    """Return one bound: a size, or a sum of sizes and numbers with integer factors.

    If all factors are negative, the bound counts from the end.
    """
    if isinstance(bound, int | np.integer) and not isinstance(bound, bool):
        return Bound((), abs(int(bound)), bool(bound < 0))
    if not isinstance(bound, Dim):
        raise GraphError(f"{where}: a bound is a number, or the size of a value (t.shape[1]); got {shown(bound)}")
    dim = bound.expr
    try:
        return Bound((size_of(dim),))
    except ShapeError:
        terms = sum_terms(dim)
        if not terms or sum(abs(count) for name, count in terms if name) > MAX_TERMS:
            raise
    from_end = all(count < 0 for _, count in terms)
    added, subtracted, offset = list[SizeOf](), list[SizeOf](), 0
    for name, count in ((name, -n if from_end else n) for name, n in terms):
        if name:
            (added if count > 0 else subtracted).extend([size_of(symbol(name))] * abs(count))
        else:
            offset += count
    return Bound(tuple(added), offset, from_end, tuple(subtracted))


# Limit of the sizes in a bound, which the op lists one by one. No sensible slice has as many.
MAX_TERMS = 64
_TERM = re.compile(r"([+-]?) ?(?:(\d+)\*)?(\w+) ?")


def sum_terms(dim: DimLike) -> list[tuple[str, int]]:
    """Return the terms of a sum: `[("seq", 2), ("past", -1), ("", 3)]` for `2*seq - past + 3`, where `""` is the
    constant. The list is empty if the dimension is no such sum."""
    text, position, terms = str(dim), 0, list[tuple[str, int]]()
    while position < len(text):
        match = _TERM.match(text, position)
        if match is None or not (match[1] or position == 0) or not (match[3].isidentifier() or match[3].isdigit()):
            return []
        sign, times = -1 if match[1] == "-" else 1, int(match[2] or 1)
        is_constant = match[3].isdigit()
        terms.append(("" if is_constant else match[3], sign * times * (int(match[3]) if is_constant else 1)))
        position = match.end()
    return terms
