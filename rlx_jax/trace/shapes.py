"""Ops that move elements, as methods: axes, slices, concatenation, repetition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx_jax.errors import GraphError, ShapeError
from rlx_jax.ir.graph import Value, located
from rlx_jax.ir.ops.shape import Concat, Expand, Narrow, RepeatHeads, Shard, SizeOf, Slice, Transpose, reshape_to
from rlx_jax.ir.roles import check_roles
from rlx_jax.ir.types import Dim, as_dim, is_static
from rlx_jax.trace.along import Along
from rlx_jax.trace.checks import items_of
from rlx_jax.trace.cuts import cut_of, is_cut, narrowed, places_of
from rlx_jax.trace.writer import Shape, V


class Shapes(Along[V]):
    """Axes and sizes."""

    def reshape(self, x: V, shape: Shape | int) -> V:
        """Reshape to ints, one -1, or symbolic sizes of x; a product of those is -1."""
        wanted = shape if isinstance(shape, Sequence) and not isinstance(shape, str) else (shape,)
        with located(self.builder.here):
            dims = [-1 if not isinstance(d, Dim | str) and d == -1 else as_dim(d, "reshape") for d in wanted]
            op = reshape_to(self.type_of(x), dims)
        return self.add_node(op, x)

    reshape_ = reshape

    def transpose(self, x: V, perm: Sequence[int] | None = None) -> V:
        """Permute the axes; without `perm` reverse them."""
        found = self.type_of(x)
        expected = f"the {found.rank} axes of {found} in their new order, as a list"
        axes = reversed(range(found.rank)) if perm is None else items_of(perm, f"{self.path}: transpose", expected)
        return self.add_node(Transpose(tuple(self._axis(x, axis) for axis in axes)), x)

    transpose_ = transpose

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
            return self._cut(x, self._axis(x, axis), *narrowed(start, length))
        return self.add_node(Narrow(self._axis(x, axis), start, length), x)

    narrow_ = narrow

    def concat(self, values: Sequence[V], axis: int = -1) -> V:
        """Join values along `axis`."""
        parts = items_of(values, f"{self.path}: concat", "a list of values, [a, b]")
        if not parts:
            raise GraphError(f"{self.path}: concat of no values")
        return self.add_node(Concat(self._axis(parts[0], axis)), *parts)

    concat_ = concat

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

    def repeat_heads(self, x: V, *, heads: int, times: int) -> V:
        """Each of `heads` heads `times` times: `[…, K·D]` → `[…, K·times·D]`."""
        return self.add_node(RepeatHeads(heads, times), x)
