"""The methods for ops that move elements (axes, slices, repetition, gather and scatter) and for constant arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rlx_jax.errors import DTypeError, GraphError, ShapeError, UnsupportedError, check_integer, quote, shown
from rlx_jax.ir.graph import Value, locate_errors
from rlx_jax.ir.ops.custom import small_constant
from rlx_jax.ir.ops.index import Gather, GatherNd, Iota, Scatter, ScatterNd, Take, TakeAlongAxis, TakeRow
from rlx_jax.ir.ops.pointwise import FullLike
from rlx_jax.ir.ops.shape import (
    END,
    AxisOf,
    Bound,
    Concat,
    CutAxis,
    Expand,
    Narrow,
    Pad,
    RepeatHeads,
    Reshape,
    Shard,
    SizeOf,
    Slice,
    Tile,
    Transpose,
    merge_axes,
    reshape_to,
)
from rlx_jax.ir.param import Roles
from rlx_jax.ir.roles import check_roles
from rlx_jax.ir.types import Dim, Init, as_dim, as_dtype, is_static, symbol
from rlx_jax.trace.arithmetic import MAX_TERMS, Arithmetic, find_symbolic_slices, is_symbolic_slice, sum_terms
from rlx_jax.trace.checks import bind_kind, items_of
from rlx_jax.trace.parameters import WeightKey, WeightPart
from rlx_jax.trace.writer import Axes, Shape, V, is_integer, is_number


class Shapes(Arithmetic[V]):
    """Ops on axes, entries and sizes, and constant arrays."""

    def reshape(self, x: V, shape: Shape | int) -> V:
        """Reshape x to ints, at most one -1, and symbolic sizes of x; a product of symbolic sizes must be the -1."""
        sizes = shape if isinstance(shape, Sequence) and not isinstance(shape, str) else (shape,)
        with locate_errors(self.builder.current_origin):
            dims = [-1 if not isinstance(d, Dim | str) and d == -1 else as_dim(d, "reshape") for d in sizes]
            op = reshape_to(self.type_of(x), dims)
        return self.add_node(op, x)

    def transpose(self, x: V, perm: Sequence[int] | None = None) -> V:
        """Permute the axes of x; without `perm`, reverse them."""
        x_type = self.type_of(x)
        expected = f"the {x_type.rank} axes of {x_type} in their new order, as a list"
        axes = reversed(range(x_type.rank)) if perm is None else items_of(perm, f"{self.path}: transpose", expected)
        return self.add_node(Transpose(tuple(self._axis(x, axis) for axis in axes)), x)

    def slice(self, x: V, key: Any) -> V:
        """Return `x[key]` for ints, slices of ints, `None` and `...`; `numpy.s_[:, 1:]` writes a key.

        A bound of a slice may also be a symbolic size, or a sum of sizes: `x[:, :t.shape[1]]`.
        """
        keys = key if isinstance(key, tuple) else (key,)
        cuts = find_symbolic_slices(keys, self.type_of(x).rank, self.path)
        # Each symbolic slice is an op of its own; one Slice then does the rest of the index.
        for axis, cut in cuts:
            x = self._slice_symbolic(x, self._axis(x, axis), cut.start, cut.stop)
        keys = tuple(slice(None) if is_symbolic_slice(k) else k for k in keys)
        if cuts and all(k is Ellipsis or k == slice(None) for k in keys):
            return x
        return self.add_node(Slice(tuple(self._index_entry(k) for k in keys)), x)

    def _index_entry(self, key: Any) -> Any:
        """Return one index as the op takes it: an int, None, `...`, or (start, stop, step)."""
        if hasattr(key, "indices") and all(p is None or isinstance(p, int) for p in (key.start, key.stop, key.step)):
            return key.start, key.stop, key.step
        if key is None or key is Ellipsis or is_integer(key):
            return int(key) if is_integer(key) else key
        raise GraphError(
            f"{self.path}: a value is indexed with ints, slices of ints, None and ...; got {key!r} "
            "(gather(table, ids) reads rows)"
        )

    def _slice_symbolic(self, x: V, axis: int, start: Any, stop: Any) -> V:
        """Return `start:stop` of one axis, where a bound is a symbolic size."""
        others: list[Value] = []
        first = Bound() if start is None else self._bound(x, start, others)
        last = END if stop is None else self._bound(x, stop, others)
        return self.add_node(CutAxis(axis, first, last), x, *map(self.wrap, others))

    def _bound(self, x: V, bound: Any, others: list[Value]) -> Bound:
        """Return a bound of a slice of x: a size, or a sum of sizes and numbers with integer factors.

        If all factors are negative, it counts from the end. `others` is as in `_size_of`.
        """
        if is_integer(bound):
            return Bound((), abs(int(bound)), bool(bound < 0))
        if not isinstance(bound, Dim):
            raise GraphError(
                f"{self.path}: a bound is a number, or the size of a value (t.shape[1]); got {shown(bound)}"
            )
        try:
            return Bound((self._size_of(x, bound.expr, others),))
        except ShapeError:
            terms = sum_terms(bound.expr)
            if not terms or sum(abs(count) for name, count in terms if name) > MAX_TERMS:
                raise
        from_end = all(count < 0 for _, count in terms)
        added, subtracted, offset = list[SizeOf](), list[SizeOf](), 0
        for name, count in ((name, -n if from_end else n) for name, n in terms):
            if name:
                sizes = [self._size_of(x, symbol(name), others)] * abs(count)
                (added if count > 0 else subtracted).extend(sizes)
            else:
                offset += count
        return Bound(tuple(added), offset, from_end, tuple(subtracted))

    def shard(self, x: V, *roles: str | None) -> V:
        """Return x with a sharding constraint by the roles of its axes: `shard(x, "batch", "sequence", "heads")`.

        The roles are in `rlx_jax.ir.roles.ROLES`; None leaves an axis unconstrained. On one device this is x.
        """
        return self.add_node(Shard(check_roles(roles, self.type_of(x), f"{self.path}: shard")), x)

    def narrow(self, x: V, axis: int, start: int | Dim, length: int | Dim) -> V:
        """Return `length` elements of an axis from `start`, which counts from the end if negative; both may be
        symbolic."""
        if isinstance(start, Dim) or isinstance(length, Dim):
            stop: Any = start + length  # 0 after a negative start is the end of the axis
            return self._slice_symbolic(x, self._axis(x, axis), start, stop if isinstance(stop, Dim) or stop else None)
        return self.add_node(Narrow(self._axis(x, axis), start, length), x)

    def _parts(self, name: str, values: Sequence[V]) -> tuple[V, ...]:
        """Return the operands of concat or stack, of which there must be at least one."""
        parts = items_of(values, f"{self.path}: {name}", "a list of values, [a, b]")
        if not parts:
            raise GraphError(f"{self.path}: {name} of no values")
        return parts

    def concat(self, values: Sequence[V], axis: int = -1) -> V:
        """Concatenate values along `axis`."""
        parts = self._parts("concat", values)
        return self.add_node(Concat(self._axis(parts[0], axis)), *parts)

    def broadcast_to(self, x: V, shape: Shape) -> V:
        """Return x repeated along axes of 1, and along new leading axes, to `shape`: ints and symbolic sizes.

        Raises:
            ShapeError: x does not broadcast, or neither x nor an input of the program has a requested symbolic size.
        """
        others: list[Value] = []
        where = f"{self.path}: broadcast_to"
        dims = [as_dim(d, where) for d in items_of(shape, where, "a list of sizes")]
        target = tuple(d if is_static(d) else self._size_of(x, d, others) for d in dims)
        return self.add_node(Expand(target), x, *map(self.wrap, others))

    def _size_of(self, x: V, dim: Any, others: list[Value]) -> SizeOf:
        """Return where an op on x finds a symbolic size: an axis of x, its operand 0, or of an input of the program.

        The op reads only the sizes of its later operands, which `others` collects.
        """
        operand = self.unwrap(x)
        for value in (operand, *(self.builder.leaf(i) for i in self.builder.inputs)):
            dims = self.builder.type(value).shape
            if dim in dims:
                if value != operand and value not in others:
                    others.append(value)
                return SizeOf(others.index(value) + 1 if value in others else 0, dims.index(dim))
        raise ShapeError(f"{self.path}: no input of the program has an axis of size {dim}")

    # -- axes --------------------------------------------------------------------------------

    def _new_axes(self, x: V, axis: int | Sequence[int], num_new: int) -> set[int]:
        """Return distinct, non-negative axis numbers for an array with `num_new` more axes than x."""
        rank = self.type_of(x).rank + num_new
        axes = items_of(axis, self.path, "an axis") if isinstance(axis, Iterable) else (axis,)
        for a in axes:
            if not is_integer(a) or not -rank <= a < rank:
                raise ShapeError(f"{self.path}: an array of {rank} axes has no axis {a!r}")
        if len({int(a) % rank for a in axes}) < len(axes):
            raise ShapeError(f"{self.path}: an axis is repeated in {list(axes)}")
        return {int(a) % rank for a in axes}

    def expand_dims(self, x: V, axis: int | Sequence[int]) -> V:
        """Return x with new axes of 1 at these positions of the result."""
        num_new = len(tuple(axis)) if isinstance(axis, Iterable) else 1
        new_axes, old_axes = self._new_axes(x, axis, num_new), iter(range(self.type_of(x).rank))
        positions = range(self.type_of(x).rank + num_new)
        return self.add_node(Reshape(tuple(1 if i in new_axes else AxisOf(next(old_axes)) for i in positions)), x)

    def squeeze(self, x: V, axis: int | Sequence[int] | None = None) -> V:
        """Return x without the axes `axis`, or without all axes, of size 1."""
        x_type = self.type_of(x)
        ones = {i for i, d in enumerate(x_type.shape) if is_static(d) and d == 1}
        removed = ones if axis is None else self._new_axes(x, axis, 0)
        if removed - ones:
            raise ShapeError(f"{self.path}: squeeze: axis {min(removed - ones)} of {x_type} is not 1")
        return self.add_node(Reshape(tuple(AxisOf(i) for i in range(x_type.rank) if i not in removed)), x)

    def swapaxes(self, x: V, axis1: int, axis2: int) -> V:
        """Return x with two axes exchanged."""
        perm = list(range(self.type_of(x).rank))
        a, b = self._axis(x, axis1), self._axis(x, axis2)
        perm[a], perm[b] = b, a
        return self.add_node(Transpose(tuple(perm)), x)

    def moveaxis(self, x: V, source: int | Sequence[int], destination: int | Sequence[int]) -> V:
        """Return x with axes `source` moved to positions `destination`; the other axes keep their order."""
        rank = self.type_of(x).rank
        sources, destinations = (list(v) if isinstance(v, Iterable) else [v] for v in (source, destination))
        if len(self._new_axes(x, sources, 0)) != len(self._new_axes(x, destinations, 0)):
            raise ShapeError(f"{self.path}: moveaxis: {len(sources)} axes and {len(destinations)} destinations")
        source_of = {t % rank: f % rank for f, t in zip(sources, destinations, strict=True)}
        rest = iter(i for i in range(rank) if i not in source_of.values())
        return self.add_node(Transpose(tuple(source_of[i] if i in source_of else next(rest) for i in range(rank))), x)

    def stack(self, values: Sequence[V], axis: int = 0) -> V:
        """Stack values of one shape along a new axis."""
        parts = self._parts("stack", values)
        shapes = {self.type_of(p).shape for p in parts}
        if len(shapes) > 1:
            raise ShapeError(
                f"{self.path}: stack: values of one shape, got {', '.join(str(self.type_of(p)) for p in parts)}"
            )
        (at,) = self._new_axes(parts[0], axis, 1)
        return self.concat([self.expand_dims(p, at) for p in parts], at)

    # -- entries -----------------------------------------------------------------------------

    def flip(self, x: V, axis: Axes = None) -> V:
        """Return x with the entries of these axes, or of all, in reverse order."""
        axes = self._axes(x, axis)
        steps = (slice(None, None, -1 if i in axes else None) for i in range(self.type_of(x).rank))
        return self.slice(x, tuple(steps)) if axes else x

    def roll(self, x: V, shift: int | Sequence[int], axis: int | Sequence[int]) -> V:
        """Return x with the entries of `axis` shifted by `shift`, with wrap-around."""
        shifts = [shift] if not isinstance(shift, Iterable) else list(shift)
        axes = self._axes(x, axis)
        if len(shifts) != len(axes) or not all(map(is_integer, shifts)):
            raise ShapeError(f"{self.path}: roll: a whole number for each axis, got {shown(shift)} for {list(axes)}")
        for n, at in zip(map(int, shifts), axes, strict=True):
            size = self.type_of(x).shape[at]
            n = n % size if is_static(size) else n
            # A shift of 0 would slice by -0, which is not the end.
            if n:
                parts = slice(-n, None), slice(None, -n)
                x = self.concat([self.slice(x, (*(slice(None),) * at, part)) for part in parts], at)
        return x

    def pad(self, x: V, pad_width: Any, mode: str = "constant", *, constant_values: float = 0) -> V:
        """Return x padded at both ends of each axis, as `numpy.pad`: mode constant, edge, reflect, symmetric or wrap.

        `pad_width` is a pair (before, after) for each axis, one pair for all, or one number. Negative ones remove
        entries.
        """
        rank, where = self.type_of(x).rank, f"{self.path}: pad"
        try:
            widths = np.broadcast_to(np.asarray(pad_width), (rank, 2))
        except (TypeError, ValueError) as error:
            raise ShapeError(f"{where}: (before, after) for each of {rank} axes, got {shown(pad_width)}") from error
        if widths.dtype.kind not in "iu" and rank:
            raise ShapeError(f"{where}: widths are whole numbers, got {shown(pad_width)}")
        if not is_number(constant_values):
            raise GraphError(f"{where}: constant_values is a number, got {shown(constant_values)}")
        with locate_errors(self.builder.current_origin):
            small_constant(constant_values, self.type_of(x).dtype)  # refuses what the dtype cannot hold
        pairs = tuple((int(low), int(high)) for low, high in widths)
        return self.add_node(Pad(pairs, mode, float(constant_values)), x)

    def tile(self, x: V, reps: int | Sequence[int]) -> V:
        """Return x tiled `reps` times along each axis; fewer numbers are for the last axes, more add leading axes."""
        counts = items_of(reps, f"{self.path}: tile", "a list of counts") if isinstance(reps, Iterable) else (reps,)
        rank = self.type_of(x).rank
        if len(counts) > rank:
            x = self.expand_dims(x, range(len(counts) - rank))
        return self.add_node(Tile((*(1,) * (rank - len(counts)), *counts)), x)

    def repeat(self, x: V, repeats: int, axis: int) -> V:
        """Return x with each entry of `axis` repeated `repeats` times in a row."""
        at, rank = self._axis(x, axis), self.type_of(x).rank
        # A new axis after `axis`, tiled and merged with it, repeats each entry in place.
        tiled = self.tile(self.expand_dims(x, at + 1), [repeats if i == at + 1 else 1 for i in range(rank + 1)])
        return self.add_node(merge_axes(rank + 1, at), tiled)

    def _triangle(self, kind: str, x: V, k: V | int = 0) -> V:
        """Return the lower (`tril`) or upper (`triu`) triangle of x, with zeros elsewhere."""
        if self.type_of(x).rank < 2:
            raise ShapeError(f"{self.path}: a triangle of {self.type_of(x)}: expected 2 axes or more")
        rows, columns = (self.add_node(Iota(self._axis(x, axis)), x) for axis in (-2, -1))
        offset = self.sub(self.expand_dims(columns, 0), self.expand_dims(rows, 1))
        zero = False if self.type_of(x).dtype == np.bool_ else 0
        return self.where(self.le(offset, k) if kind == "tril" else self.ge(offset, k), x, zero)

    tril = bind_kind(_triangle, "tril", "x `[…, R, C]` with 0 above diagonal `k`: a number, or an i32 value of rank 0.")
    triu = bind_kind(_triangle, "triu", "x `[…, R, C]` with 0 below diagonal `k`: a number, or an i32 value of rank 0.")

    def repeat_heads(self, x: V, *, heads: int, times: int) -> V:
        """Repeat each of `heads` packed heads `times` times: `[…, K·D]` → `[…, K·times·D]`."""
        return self.add_node(RepeatHeads(heads, times), x)

    # -- rows by number ------------------------------------------------------------------------

    def gather(
        self, table: V | WeightKey, ids: V, *, shape: Sequence[int] | None = None, init: Init | None = None
    ) -> V:
        """Return `table[ids]`: table `[V, …]`, ids `[…]` integers in `[0, V)` → `[…ids, …]`.

        The table is a value, or the key of a weight. `shape` and `init` are only for a weight that no source has: see
        `emit.param`.
        """
        return self.add_node(Gather(), self._table(table, None, shape, init), ids)

    def _table(self, table: V | WeightKey, roles: Roles | None, shape: Sequence[int] | None, init: Init | None) -> V:
        """Return a table as a value; a key is read as a weight."""
        if not isinstance(table, str | WeightPart):
            if (shape, init) != (None, None):
                raise GraphError(
                    f"{self.path}: shape and init belong to a weight under a key: use emit.param(key, shape=…)"
                )
            return table
        sizes = (
            None if shape is None else items_of(shape, f"{self.path}: weight {quote(table)}: shape", "a list of sizes")
        )
        return self.weight(table, roles, shape=sizes, init=init)

    def take_row(self, x: V, index: V) -> V:
        """Return `y[b, 0] = x[b, index[b]]`: x `[B, S, …]`, index `[B]` integers → `[B, 1, …]`."""
        return self.add_node(TakeRow(), x, index)

    # -- any axis ----------------------------------------------------------------------------

    def take(self, x: V, indices: V, axis: int, *, mode: str = "fill") -> V:
        """Return `y[…, i…, …] = x[…, indices[i…], …]`, with the axes of `indices` in place of `axis`.

        Args:
            mode: treatment of indices out of range. With "fill", negative ones count from the end, and others give NaN
                (for integers the minimum of the dtype). "wrap" takes indices modulo the size. "clip" reads the nearest
                entry, which is the first for negative ones.
        """
        return self.add_node(Take(self._axis(x, axis), mode), x, indices)

    def take_along_axis(self, x: V, indices: V, axis: int, *, mode: str = "fill") -> V:
        """Return `y[…, i, …] = x[…, indices[…, i, …], …]`, an index per entry; `mode` as in `take`, without "wrap"."""
        return self.add_node(TakeAlongAxis(self._axis(x, axis), mode), x, indices)

    def gather_nd(self, x: V, indices: V, *, batch_dims: int = 0) -> V:
        """Return `y[i…] = x[indices[i…, 0], indices[i…, 1], …]` after `batch_dims` batch axes; see `GatherNd`."""
        return self.add_node(GatherNd(batch_dims), x, indices)

    def scatter(self, x: V, indices: V, updates: V, axis: int, *, kind: str = "set") -> V:
        """Return x updated at `indices` along `axis`, as in `take_along_axis`; `kind` is set, add, mul, min or max."""
        return self.add_node(Scatter(self._axis(x, axis), kind), x, indices, updates)

    put_along_axis = scatter

    def scatter_nd(self, x: V, indices: V, updates: V, *, kind: str = "set") -> V:
        """Return x updated at `indices`, as in `gather_nd`; `kind` is set, add, mul, min or max."""
        return self.add_node(ScatterNd(kind), x, indices, updates)

    def segment_sum(self, data: V, segment_ids: V, num_segments: int) -> V:
        """Return `y[s] = Σ data[i]` over all i with `segment_ids[i] = s`: `[N, …]`, ids `[N]` → `[num_segments, …]`.

        Ids out of range, also negative ones, belong to no segment, as in `jax.ops.segment_sum`.
        """
        data_type, ids = self.type_of(data), self.type_of(segment_ids)
        if not data_type.rank or ids.shape != data_type.shape[:1]:
            raise ShapeError(f"{self.path}: segment_sum: data is [N, …] and ids are [N], got {data_type} and {ids}")
        row = self.zeros_like(self.slice(data, np.s_[:1]))
        empty = self.tile(row, (num_segments, *(1,) * (data_type.rank - 1)))
        if np.issubdtype(ids.dtype, np.signedinteger):  # scatter_nd would count negative ids from the end
            int_ids = self.cast(segment_ids, "i32")
            segment_ids = self.where(self.lt(int_ids, 0), num_segments, int_ids)
        return self.scatter_nd(empty, self.expand_dims(segment_ids, -1), data, kind="add")

    def one_hot(self, x: V, num_classes: int, dtype: Any = "f32", *, axis: int = -1) -> V:
        """Return 1 at index x of a new `axis` of size `num_classes`, and 0 elsewhere; all 0 where x is out of range."""
        if not np.issubdtype(self.type_of(x).dtype, np.integer):
            raise DTypeError(f"{self.path}: one_hot: classes are integers, got {self.type_of(x)}")
        check_integer(f"{self.path}: one_hot: num_classes", num_classes, error_class=ShapeError)
        rank = self.type_of(x).rank + 1
        (at,) = self._new_axes(x, axis, 1)
        classes = np.arange(num_classes, dtype=np.int32).reshape([-1 if i == at else 1 for i in range(rank)])
        hot = self.eq(self.expand_dims(self.cast(x, "i32"), at), self.constant(classes))
        return self.cast(hot, dtype)

    def nonzero(self, x: V) -> V:
        """Raise an error: the number of nonzero entries is known only at run time, but shapes are static."""
        raise UnsupportedError(
            f"{self.path}: the shape of nonzero depends on the numbers of {self.type_of(x)}, but the shapes of a "
            "program are static: use where(condition, x, 0), or top_k of the condition with a fixed k"
        )

    # -- numbers -----------------------------------------------------------------------------

    def arange(self, start: float, stop: float | None = None, step: float = 1, *, dtype: Any = None) -> V:
        """Return the constant `start, start + step, …` below `stop`, or 0, 1, … below `start`; `iota` is for sizes of
        values."""
        for number in (start, stop, step):
            if number is not None and not is_number(number):
                raise GraphError(
                    f"{self.path}: arange takes numbers, got {shown(number)}; iota(x, axis) counts a value's"
                )
        if step == 0:
            raise GraphError(f"{self.path}: arange: step is 0")
        begin, end = (0, start) if stop is None else (start, stop)
        return self.constant(np.arange(begin, end, step), dtype)

    def eye(self, n: int, m: int | None = None, k: int = 0, *, dtype: Any = "f32") -> V:
        """Return a constant `[n, m]` with 1 on diagonal `k` and 0 elsewhere."""
        return self.constant(np.eye(n, m, k), dtype)

    def full(self, shape: Shape | int, value: float, dtype: Any = None) -> V:
        """Return `value` in a shape of ints and symbolic sizes of inputs, in its own dtype or in `dtype`."""
        if not is_number(value):
            raise GraphError(f"{self.path}: full takes a number, got {shown(value)}")
        where = f"{self.path}: full"
        dims = items_of(shape, where, "a list of sizes") if not isinstance(shape, int) else (shape,)
        if len(dims) == 1 and is_static(as_dim(dims[0], where)):
            return self.constant(np.full(dims, value), dtype)
        return self.broadcast_to(self.constant(value, dtype), dims)

    def zeros(self, shape: Shape | int, dtype: Any = "f32") -> V:
        """Return zeros in a shape of ints and symbolic sizes of inputs."""
        return self.full(shape, 0, dtype)

    def ones(self, shape: Shape | int, dtype: Any = "f32") -> V:
        """Return ones in a shape of ints and symbolic sizes of inputs."""
        return self.full(shape, 1, dtype)

    def iota(self, x: V, axis: int) -> V:
        """Return `0, 1, …` for one axis of x: i32 `[size]`."""
        return self.add_node(Iota(self._axis(x, axis)), x)

    def full_like(self, x: V, value: float, dtype: Any = None) -> V:
        """Return `value` in the shape of x, in its dtype or in `dtype`."""
        result_dtype = self.type_of(x).dtype if dtype is None else as_dtype(dtype)
        if not is_number(value):
            raise GraphError(f"{self.path}: full_like takes a number, got {shown(value)}")
        with locate_errors(self.builder.current_origin):
            small_constant(value, result_dtype)  # refuses what the dtype cannot hold
        return self.add_node(FullLike(float(value), result_dtype), x)

    def zeros_like(self, x: V, dtype: Any = None) -> V:
        """Return zeros in the shape of x."""
        return self.full_like(x, 0.0, dtype)

    def ones_like(self, x: V, dtype: Any = None) -> V:
        """Return ones in the shape of x."""
        return self.full_like(x, 1.0, dtype)
