"""Ops that move elements, as methods: axes, slices, repetition, reading and writing by index; and arrays of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rlx_jax.errors import DTypeError, GraphError, ShapeError, UnsupportedError, quote, shown
from rlx_jax.ir.graph import Value, located
from rlx_jax.ir.initializers import Init
from rlx_jax.ir.ops.custom import small_constant
from rlx_jax.ir.ops.index import Gather, GatherNd, Iota, Scatter, ScatterNd, Take, TakeAlongAxis, TakeRow
from rlx_jax.ir.ops.pointwise import FullLike
from rlx_jax.ir.ops.shape import (
    AxisOf,
    Concat,
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
from rlx_jax.ir.types import Dim, as_dim, as_dtype, is_static
from rlx_jax.trace.arithmetic import Arithmetic
from rlx_jax.trace.checks import check_count, items_of, of_kind
from rlx_jax.trace.parameters import WeightKey, WeightPart
from rlx_jax.trace.symbolic_slices import cut_of, is_cut, places_of
from rlx_jax.trace.writer import Axes, Shape, V, is_number


class Shapes(Arithmetic[V]):
    """Axes and sizes."""

    def reshape(self, x: V, shape: Shape | int) -> V:
        """Reshape to ints, one -1, or symbolic sizes of x; a product of those is -1."""
        wanted = shape if isinstance(shape, Sequence) and not isinstance(shape, str) else (shape,)
        with located(self.builder.here):
            dims = [-1 if not isinstance(d, Dim | str) and d == -1 else as_dim(d, "reshape") for d in wanted]
            op = reshape_to(self.type_of(x), dims)
        return self.add_node(op, x)

    def transpose(self, x: V, perm: Sequence[int] | None = None) -> V:
        """Permute the axes; without `perm` reverse them."""
        found = self.type_of(x)
        expected = f"the {found.rank} axes of {found} in their new order, as a list"
        axes = reversed(range(found.rank)) if perm is None else items_of(perm, f"{self.path}: transpose", expected)
        return self.add_node(Transpose(tuple(self._axis(x, axis) for axis in axes)), x)

    def slice(self, x: V, key: Any) -> V:
        """`x[key]` for ints, slices of ints, `None` and `...`; `numpy.s_[:, 1:]` spells a key.

        A bound of a slice may be a symbolic size too, or a sum of them: `x[:, :t.shape[1]]` is what stands in front.
        """
        keys = key if isinstance(key, tuple) else (key,)
        cuts = places_of(keys, self.type_of(x).rank, self.path)
        for axis, cut in cuts:
            x = self._cut(x, self._axis(x, axis), cut.start, cut.stop)
        keys = tuple(slice(None) if is_cut(k) else k for k in keys)
        if cuts and all(k is Ellipsis or k == slice(None) for k in keys):
            return x
        return self.add_node(Slice(tuple(self._index(k) for k in keys)), x)

    def _index(self, key: Any) -> Any:
        if hasattr(key, "indices") and all(p is None or isinstance(p, int) for p in (key.start, key.stop, key.step)):
            return key.start, key.stop, key.step
        if key is None or key is Ellipsis or (isinstance(key, int) and not isinstance(key, bool)):
            return key
        raise GraphError(
            f"{self.path}: a value is indexed with ints, slices of ints, None and ...; got {key!r} "
            "(gather(table, ids) reads rows)"
        )

    def _cut(self, x: V, axis: int, start: Any, stop: Any) -> V:
        """`start:stop` of one axis, where a bound is a symbolic size."""
        own = self.own(x)
        op, lenders = cut_of(own, axis, start, stop, lambda dim: self._holder(own, dim), self.path)
        return self.add_node(op, x, *(self.wrap(lender) for lender in lenders))

    def shard(self, x: V, *roles: str | None) -> V:
        """x itself, and what each of its axes is (`rlx_jax.ir.roles.ROLES`; None: nothing said): `shard(x, "batch",
        "sequence", "heads")`. Over a mesh of devices it is divided by them; on one device it is x."""
        return self.add_node(Shard(check_roles(roles, self.type_of(x), f"{self.path}: shard")), x)

    def narrow(self, x: V, axis: int, start: int | Dim, length: int | Dim) -> V:
        """`length` elements of one axis from `start` on; a negative start counts from the end. Both may be symbolic."""
        if isinstance(start, Dim) or isinstance(length, Dim):
            stop: Any = start + length
            return self._cut(x, self._axis(x, axis), start, stop if isinstance(stop, Dim) or stop else None)
        return self.add_node(Narrow(self._axis(x, axis), start, length), x)

    def concat(self, values: Sequence[V], axis: int = -1) -> V:
        """Join values along `axis`."""
        parts = items_of(values, f"{self.path}: concat", "a list of values, [a, b]")
        if not parts:
            raise GraphError(f"{self.path}: concat of no values")
        return self.add_node(Concat(self._axis(parts[0], axis)), *parts)

    def broadcast_to(self, x: V, shape: Shape) -> V:
        """`x` repeated along axes of 1, and along new axes in front, up to `shape`: ints and symbolic sizes.

        Raises:
            ShapeError: it does not broadcast, or neither x nor an input of the program has a size that is asked for.
        """
        refs: list[Value] = []
        target: list[int | SizeOf] = []
        where = f"{self.path}: broadcast_to"
        for dim in (as_dim(d, where) for d in items_of(shape, where, "a list of sizes")):
            if is_static(dim):
                target.append(dim)
                continue
            value, axis = self._holder(self.own(x), dim)
            if value != self.own(x) and value not in refs:
                refs.append(value)
            target.append(SizeOf(refs.index(value) + 1 if value in refs else 0, axis))
        return self.add_node(Expand(tuple(target)), x, *(self.wrap(r) for r in refs))

    def _holder(self, x: Value, dim: Any) -> tuple[Value, int]:
        """A value with an axis of a symbolic size: x, or an input of the program."""
        for value in (x, *(self.builder.leaf(i) for i in self.builder.inputs)):
            dims = self.builder.type(value).shape
            if dim in dims:
                return value, dims.index(dim)
        raise ShapeError(f"{self.path}: no input of the program has an axis of size {dim}")

    # -- axes --------------------------------------------------------------------------------

    def _new_axes(self, x: V, axis: int | Sequence[int], more: int) -> set[int]:
        """Axis numbers of x with `more` axes, each once."""
        rank = self.type_of(x).rank + more
        given = items_of(axis, self.path, "an axis") if isinstance(axis, Iterable) else (axis,)
        for a in given:
            if isinstance(a, bool) or not isinstance(a, int | np.integer) or not -rank <= a < rank:
                raise ShapeError(f"{self.path}: an array of {rank} axes has no axis {a!r}")
        if len({int(a) % rank for a in given}) < len(given):
            raise ShapeError(f"{self.path}: an axis stands twice in {list(given)}")
        return {int(a) % rank for a in given}

    def expand_dims(self, x: V, axis: int | Sequence[int]) -> V:
        """New axes of 1, at these places of the result."""
        more = len(tuple(axis)) if isinstance(axis, Iterable) else 1
        new, old = self._new_axes(x, axis, more), iter(range(self.type_of(x).rank))
        places = range(self.type_of(x).rank + more)
        return self.add_node(Reshape(tuple(1 if i in new else AxisOf(next(old)) for i in places)), x)

    def squeeze(self, x: V, axis: int | Sequence[int] | None = None) -> V:
        """x without axes of 1: these, or all of them."""
        found = self.type_of(x)
        ones = {i for i, d in enumerate(found.shape) if is_static(d) and d == 1}
        gone = ones if axis is None else self._new_axes(x, axis, 0)
        if gone - ones:
            raise ShapeError(f"{self.path}: squeeze: axis {min(gone - ones)} of {found} is not 1")
        return self.add_node(Reshape(tuple(AxisOf(i) for i in range(found.rank) if i not in gone)), x)

    def swapaxes(self, x: V, axis1: int, axis2: int) -> V:
        """x with two axes in each other's place."""
        perm = list(range(self.type_of(x).rank))
        a, b = self._axis(x, axis1), self._axis(x, axis2)
        perm[a], perm[b] = b, a
        return self.add_node(Transpose(tuple(perm)), x)

    def moveaxis(self, x: V, source: int | Sequence[int], destination: int | Sequence[int]) -> V:
        """x with axes `source` at the places `destination`; the others keep their order."""
        rank = self.type_of(x).rank
        froms, tos = (list(v) if isinstance(v, Iterable) else [v] for v in (source, destination))
        if len(self._new_axes(x, froms, 0)) != len(self._new_axes(x, tos, 0)):
            raise ShapeError(f"{self.path}: moveaxis: {len(froms)} axes and {len(tos)} places")
        placed = {t % rank: f % rank for f, t in zip(froms, tos, strict=True)}
        rest = iter(i for i in range(rank) if i not in placed.values())
        return self.add_node(Transpose(tuple(placed[i] if i in placed else next(rest) for i in range(rank))), x)

    def stack(self, values: Sequence[V], axis: int = 0) -> V:
        """Join values of one shape along a new axis."""
        parts = items_of(values, f"{self.path}: stack", "a list of values, [a, b]")
        if not parts:
            raise GraphError(f"{self.path}: stack of no values")
        shapes = {self.type_of(p).shape for p in parts}
        if len(shapes) > 1:
            raise ShapeError(
                f"{self.path}: stack: values of one shape, got {', '.join(str(self.type_of(p)) for p in parts)}"
            )
        (at,) = self._new_axes(parts[0], axis, 1)
        return self.concat([self.expand_dims(p, at) for p in parts], at)

    # -- entries -----------------------------------------------------------------------------

    def _key(self, axis: int, taken: Any) -> tuple[Any, ...]:
        return (*(slice(None),) * axis, taken)

    def flip(self, x: V, axis: Axes = None) -> V:
        """x with the entries of these axes, or of all, in the opposite order."""
        axes = self._axes(x, axis)
        steps = (slice(None, None, -1 if i in axes else None) for i in range(self.type_of(x).rank))
        return self.slice(x, tuple(steps)) if axes else x

    def roll(self, x: V, shift: int | Sequence[int], axis: int | Sequence[int]) -> V:
        """x with the entries of `axis` moved on by `shift`, those beyond the end to the beginning."""
        shifts = [shift] if not isinstance(shift, Iterable) else list(shift)
        axes = self._axes(x, axis)
        if len(shifts) != len(axes) or any(isinstance(n, bool) or not isinstance(n, int) for n in shifts):
            raise ShapeError(f"{self.path}: roll: a whole number for each axis, got {shown(shift)} for {list(axes)}")
        for n, at in zip(shifts, axes, strict=True):
            size = self.type_of(x).shape[at]
            n = n % size if is_static(size) else n
            if n:
                parts = [self.slice(x, self._key(at, slice(-n, None))), self.slice(x, self._key(at, slice(None, -n)))]
                x = self.concat(parts, at)
        return x

    def pad(self, x: V, pad_width: Any, mode: str = "constant", *, constant_values: float = 0) -> V:
        """x with entries before and after each axis: `numpy.pad`, mode constant, edge, reflect, symmetric or wrap.

        `pad_width`: a (before, after) for each axis, one pair for all, or one number. Negative ones cut entries off.
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
        with located(self.builder.here):
            small_constant(constant_values, self.type_of(x).dtype)  # refuses what the dtype cannot hold
        pairs = tuple((int(low), int(high)) for low, high in widths)
        return self.add_node(Pad(pairs, mode, float(constant_values)), x)

    def tile(self, x: V, reps: int | Sequence[int]) -> V:
        """x as a whole so many times along each axis; fewer numbers are those of the last axes, more make new axes."""
        counts = items_of(reps, f"{self.path}: tile", "a list of counts") if isinstance(reps, Iterable) else (reps,)
        rank = self.type_of(x).rank
        if len(counts) > rank:
            x = self.expand_dims(x, range(len(counts) - rank))
        return self.add_node(Tile((*(1,) * (rank - len(counts)), *counts)), x)

    def repeat(self, x: V, repeats: int, axis: int) -> V:
        """Each entry of `axis` `repeats` times in a row."""
        at, rank = self._axis(x, axis), self.type_of(x).rank
        wide = self.tile(self.expand_dims(x, at + 1), [repeats if i == at + 1 else 1 for i in range(rank + 1)])
        return self.add_node(merge_axes(rank + 1, at), wide)

    def _triangle(self, kind: str, x: V, k: V | int = 0) -> V:
        if self.type_of(x).rank < 2:
            raise ShapeError(f"{self.path}: a triangle of {self.type_of(x)}: expected 2 axes or more")
        rows, columns = (self.add_node(Iota(self._axis(x, axis)), x) for axis in (-2, -1))
        ahead = self.sub(self.expand_dims(columns, 0), self.expand_dims(rows, 1))
        zero = False if self.type_of(x).dtype == np.bool_ else 0
        return self.where(self.le(ahead, k) if kind == "tril" else self.ge(ahead, k), x, zero)

    tril = of_kind(_triangle, "tril", "x `[…, R, C]` with 0 above diagonal `k`: a number, or an i32 value of rank 0.")
    triu = of_kind(_triangle, "triu", "x `[…, R, C]` with 0 below diagonal `k`: a number, or an i32 value of rank 0.")

    def repeat_heads(self, x: V, *, heads: int, times: int) -> V:
        """Each of `heads` heads `times` times: `[…, K·D]` → `[…, K·times·D]`."""
        return self.add_node(RepeatHeads(heads, times), x)

    # -- rows by number ------------------------------------------------------------------------

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
