"""Ops that read and write by index, and arrays of numbers that follow from a shape, as methods."""

from __future__ import annotations

from typing import Any

from rlx_jax.errors import GraphError, shown
from rlx_jax.ir.graph import located
from rlx_jax.ir.ops.custom import small_constant
from rlx_jax.ir.ops.index import Gather, Iota, TakeRow
from rlx_jax.ir.ops.pointwise import FullLike
from rlx_jax.ir.types import as_dtype
from rlx_jax.trace.shapes import Shapes
from rlx_jax.trace.writer import V, is_number


class Indexing(Shapes[V]):
    """Rows by number, and numbers."""

    def gather(self, table: V, ids: V) -> V:
        """`table[ids]`: table `[V, …]`, ids `[…]` integers in `[0, V)` → `[…ids, …]`."""
        return self.add_node(Gather(), table, ids)

    gather_ = gather

    def take_row(self, x: V, index: V) -> V:
        """`y[b, 0] = x[b, index[b]]`: x `[B, S, …]`, index `[B]` integers → `[B, 1, …]`."""
        return self.add_node(TakeRow(), x, index)

    def iota(self, x: V, axis: int) -> V:
        """`0, 1, …` along one axis of x: i32 `[size]`."""
        return self.add_node(Iota(self._axis(x, axis)), x)

    def full_like(self, x: V, value: float, dtype: Any = None) -> V:
        """`value` in the shape of x, in its dtype or in `dtype`."""
        chosen = self.type_of(x).dtype if dtype is None else as_dtype(dtype)
        if not is_number(value):
            raise GraphError(f"{self.path}: full_like takes a number, got {shown(value)}")
        with located(self.builder.here):
            small_constant(value, chosen)  # refuses what the dtype cannot hold
        return self.add_node(FullLike(float(value), chosen), x)

    def zeros_like(self, x: V, dtype: Any = None) -> V:
        """0 in the shape of x."""
        return self.full_like(x, 0.0, dtype)

    def ones_like(self, x: V, dtype: Any = None) -> V:
        """1 in the shape of x."""
        return self.full_like(x, 1.0, dtype)
