"""Ops that read and write by index, and arrays of numbers that follow from a shape, as methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx_jax.errors import DTypeError, GraphError, ShapeError, UnsupportedError, quote, shown
from rlx_jax.ir.graph import located
from rlx_jax.ir.inits import Init
from rlx_jax.ir.ops.custom import small_constant
from rlx_jax.ir.ops.index import Gather, GatherNd, Iota, Scatter, ScatterNd, Take, TakeAlongAxis, TakeRow
from rlx_jax.ir.ops.pointwise import FullLike
from rlx_jax.ir.param import Roles
from rlx_jax.ir.types import as_dim, as_dtype, is_static
from rlx_jax.trace.checks import check_count, items_of
from rlx_jax.trace.shapes import Shapes
from rlx_jax.trace.weight_part import WeightKey, WeightPart
from rlx_jax.trace.writer import Shape, V, is_number


class Indexing(Shapes[V]):
    """Rows by number, and numbers."""

    def gather(
        self, table: V | WeightKey, ids: V, *, shape: Sequence[int] | None = None, init: Init | None = None
    ) -> V:
        """`table[ids]`: table `[V, …]`, ids `[…]` integers in `[0, V)` → `[…ids, …]`.

        The table is a value, or the key of a weight; `shape` and `init` are those of a weight, needed only where no
        source has it: see `emit.param`.
        """
        return self.add_node(Gather(), self._table(table, None, shape, init), ids)

    def _table(self, table: V | WeightKey, roles: Roles | None, shape: Sequence[int] | None, init: Init | None) -> V:
        """A table as a value, of a key the weight."""
        if not isinstance(table, str | WeightPart):
            if (shape, init) != (None, None):
                raise GraphError(
                    f"{self.path}: shape and init are those of a weight under a key; emit.param(key, shape=…) takes "
                    "them"
                )
            return table
        sizes = (
            None if shape is None else items_of(shape, f"{self.path}: weight {quote(table)}: shape", "a list of sizes")
        )
        return self.weight(table, roles, shape=sizes, init=init)

    def take_row(self, x: V, index: V) -> V:
        """`y[b, 0] = x[b, index[b]]`: x `[B, S, …]`, index `[B]` integers → `[B, 1, …]`."""
        return self.add_node(TakeRow(), x, index)

    # -- any axis ----------------------------------------------------------------------------

    def take(self, x: V, indices: V, axis: int, *, mode: str = "fill") -> V:
        """`y[…, i…, …] = x[…, indices[i…], …]`: the axes of `indices` in the place of `axis`.

        Negative indices count from the end, others out of range give NaN (whole numbers the least of their dtype). With
        mode "wrap" all count round, with "clip" the nearest entry is read, the first for negative ones.
        """
        return self.add_node(Take(self._axis(x, axis), mode), x, indices)

    def take_along_axis(self, x: V, indices: V, axis: int, *, mode: str = "fill") -> V:
        """`y[…, i, …] = x[…, indices[…, i, …], …]`, an index for every entry; `mode` "fill" or "clip", see `take`."""
        return self.add_node(TakeAlongAxis(self._axis(x, axis), mode), x, indices)

    def gather_nd(self, x: V, indices: V, *, batch_dims: int = 0) -> V:
        """`y[i…] = x[indices[i…, 0], indices[i…, 1], …]` behind `batch_dims` axes that both have; see `GatherNd`."""
        return self.add_node(GatherNd(batch_dims), x, indices)

    def scatter(self, x: V, indices: V, updates: V, axis: int, *, kind: str = "set") -> V:
        """x with `updates` at `indices` along `axis`, which `take_along_axis` reads; kinds set, add, mul, min, max."""
        return self.add_node(Scatter(self._axis(x, axis), kind), x, indices, updates)

    put_along_axis = scatter

    def scatter_nd(self, x: V, indices: V, updates: V, *, kind: str = "set") -> V:
        """x with `updates` at `indices`, which `gather_nd` reads; kinds set, add, mul, min, max."""
        return self.add_node(ScatterNd(kind), x, indices, updates)

    def segment_sum(self, data: V, segment_ids: V, num_segments: int) -> V:
        """`y[s] = Σ data[i]` over the i with `segment_ids[i] = s`: `[N, …]`, `[N]` integers → `[num_segments, …]`.

        Ids out of range belong to no segment, negative ones among them, as in `jax.ops.segment_sum`.
        """
        found, ids = self.type_of(data), self.type_of(segment_ids)
        if not found.rank or ids.shape != found.shape[:1]:
            raise ShapeError(f"{self.path}: segment_sum: data is [N, …] and ids are [N], got {found} and {ids}")
        row = self.zeros_like(self.slice(data, np.s_[:1]))
        empty = self.tile(row, (num_segments, *(1,) * (found.rank - 1)))
        if np.issubdtype(ids.dtype, np.signedinteger):  # scatter_nd counts them from the end
            whole = self.cast(segment_ids, "i32")
            segment_ids = self.where(self.lt(whole, 0), num_segments, whole)
        return self.scatter_nd(empty, self.expand_dims(segment_ids, -1), data, kind="add")

    def one_hot(self, x: V, num_classes: int, dtype: Any = "f32", *, axis: int = -1) -> V:
        """1 where x is the index along the new `axis` of `num_classes`, else 0: no 1 where x is out of range."""
        if not np.issubdtype(self.type_of(x).dtype, np.integer):
            raise DTypeError(f"{self.path}: one_hot: classes are integers, got {self.type_of(x)}")
        check_count(num_classes, f"{self.path}: one_hot: num_classes", error=ShapeError)
        rank = self.type_of(x).rank + 1
        (at,) = self._new_axes(x, axis, 1)
        classes = np.arange(num_classes, dtype=np.int32).reshape([-1 if i == at else 1 for i in range(rank)])
        hot = self.eq(self.expand_dims(self.cast(x, "i32"), at), self.constant(classes))
        return self.cast(hot, dtype)

    def nonzero(self, x: V) -> V:
        """Refused: how many entries are not 0 is known when a program runs, and its shapes before."""
        raise UnsupportedError(
            f"{self.path}: nonzero has a shape that depends on the numbers of {self.type_of(x)}; those of a program "
            "are known before it runs: use where(condition, x, 0), or top_k of the condition with a fixed k"
        )

    # -- numbers -----------------------------------------------------------------------------

    def arange(self, start: float, stop: float | None = None, step: float = 1, *, dtype: Any = None) -> V:
        """`start, start + step, …` below `stop`, or 0, 1, … below `start`: a constant. The size of a value: `iota`."""
        for number in (start, stop, step):
            if number is not None and not is_number(number):
                raise GraphError(
                    f"{self.path}: arange takes numbers, got {shown(number)}; iota(x, axis) counts a value's"
                )
        if step == 0:
            raise GraphError(f"{self.path}: arange: step is 0")
        first, behind = (0, start) if stop is None else (start, stop)
        return self.constant(np.arange(first, behind, step), dtype)

    def eye(self, n: int, m: int | None = None, k: int = 0, *, dtype: Any = "f32") -> V:
        """1 on diagonal `k` of `[n, m]`, else 0: a constant."""
        return self.constant(np.eye(n, m, k), dtype)

    def full(self, shape: Shape | int, value: float, dtype: Any = None) -> V:
        """`value` in a shape of ints and symbolic sizes of inputs, in its own dtype or in `dtype`."""
        if not is_number(value):
            raise GraphError(f"{self.path}: full takes a number, got {shown(value)}")
        where = f"{self.path}: full"
        dims = items_of(shape, where, "a list of sizes") if not isinstance(shape, int) else (shape,)
        if len(dims) == 1 and is_static(as_dim(dims[0], where)):
            return self.constant(np.full(dims, value), dtype)
        return self.broadcast_to(self.constant(value, dtype), dims)

    def zeros(self, shape: Shape | int, dtype: Any = "f32") -> V:
        """0 in a shape of ints and symbolic sizes of inputs."""
        return self.full(shape, 0, dtype)

    def ones(self, shape: Shape | int, dtype: Any = "f32") -> V:
        """1 in a shape of ints and symbolic sizes of inputs."""
        return self.full(shape, 1, dtype)

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
