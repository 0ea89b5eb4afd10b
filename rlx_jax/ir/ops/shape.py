"""Ops that move elements: reshape, broadcast, transpose, slice, split, concatenate, pad and repeat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import EllipsisType
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import DTypeError, ShapeError
from rlx_jax.ir.graph import Mir, TypeCache
from rlx_jax.ir.operands import MOVEMENT, Types, all_moved, check_axes, first_moved, results_moved, zero
from rlx_jax.ir.types import DimLike, TensorType, is_static

Array = jax.Array


@dataclass(frozen=True)
class AxisOf:
    """Entry of a `Reshape` target: the size of axis `axis` of the operand."""

    axis: int

    def __str__(self) -> str:
        return f"@{self.axis}"


def _full_view(op: Any, operands: Types, results: Types) -> int | None:
    """Return byte offset 0: the result is a view of the full operand."""
    return 0


@dataclass(frozen=True)
class Reshape(Mir):
    """Reshape to `target`, a tuple of ints, axes of the operand (`AxisOf`) and at most one -1.

    A target never contains a symbol, so that binding symbols needs no substitution.
    """

    traits = replace(MOVEMENT, bytes=zero, view=_full_view)
    notation = "reshape({target})"

    target: tuple[int | AxisOf, ...]

    def _dims(self, shape: tuple[DimLike, ...]) -> tuple[DimLike, ...]:
        """Return the target sizes for an operand of this shape, with the -1 resolved."""
        dims = [shape[t.axis] if isinstance(t, AxisOf) else t for t in self.target]
        if any(is_static(d) and d < 0 for d in dims):
            inferred = next(i for i, d in enumerate(dims) if is_static(d) and d < 0)
            other_elements = math.prod(d for i, d in enumerate(dims) if i != inferred)
            dims[inferred] = math.prod(shape) // other_elements
        return tuple(dims)

    def infer(self, types: TypeCache, *operands: TensorType) -> tuple[TensorType, ...]:
        (x,) = operands
        if sum(1 for t in self.target if t == -1) > 1:
            raise ShapeError(f"reshape: more than one -1 in {self.target}")
        dims = self._dims(x.shape)
        # jax accepts a symbolic target without comparing element counts.
        if math.prod(dims) != math.prod(x.shape):
            raise ShapeError(f"reshape: {x} has {math.prod(x.shape)} elements, the target {dims} {math.prod(dims)}")
        return (TensorType(dims, x.dtype),)

    def eval(self, x: Array) -> Array:
        return x.reshape(self._dims(x.shape))


@dataclass(frozen=True)
class Shard(Mir):
    """Identity that assigns roles to the axes of x (`rlx_jax.ir.roles`; None for no role); a mesh shards x by them."""

    traits = replace(MOVEMENT, widens=False, bytes=zero, view=_full_view)

    roles: tuple[str | None, ...]

    def check(self, x: TensorType) -> None:
        if len(self.roles) != x.rank:
            raise ShapeError(f"shard: {x} and {len(self.roles)} roles")

    def eval(self, x: Array) -> Array:
        return x

    def text(self) -> str:
        return f"shard({', '.join(role or '-' for role in self.roles)})"


@dataclass(frozen=True)
class SizeOf:
    """Entry of an `Expand` target or of a `Bound`: the size of axis `axis` of operand number `operand`."""

    operand: int
    axis: int

    def __str__(self) -> str:
        return f"@{self.operand}.{self.axis}"


def _check_size_refs(op: str, sizes: Sequence[SizeOf], operands: Types) -> None:
    """Check that `sizes` refer to axes that the operands have.

    Raises:
        ShapeError: an operand or an axis does not exist; the message begins with `op`.
    """
    for size in sizes:
        if not 0 <= size.operand < len(operands):
            raise ShapeError(f"{op}: there is no operand {size.operand} of {len(operands)}")
        check_axes(op, size.axis, operands[size.operand])


@dataclass(frozen=True)
class Expand(Mir):
    """Broadcast `x` to `target` by NumPy's rules.

    Operands: x, then values of which only the sizes of axes are read. A target never contains a symbol, so that
    binding symbols needs no substitution.
    """

    traits = replace(MOVEMENT, narrows=1, bytes=first_moved)
    notation = "expand({target})"

    target: tuple[int | SizeOf, ...]

    def _dims(self, shapes: Sequence[tuple[DimLike, ...]]) -> tuple[DimLike, ...]:
        """Return the target sizes for operands of these shapes."""
        return tuple(shapes[t.operand][t.axis] if isinstance(t, SizeOf) else t for t in self.target)

    def infer(self, types: TypeCache, *operands: TensorType) -> tuple[TensorType, ...]:
        x = operands[0]
        _check_size_refs("expand", [size for size in self.target if isinstance(size, SizeOf)], operands)
        dims = self._dims([t.shape for t in operands])
        pairs = zip(reversed(x.shape), reversed(dims), strict=False)
        if x.rank > len(dims) or any(not (is_static(old) and old == 1) and old != new for old, new in pairs):
            raise ShapeError(f"{x} cannot be broadcast to [{', '.join(map(str, dims))}]")
        return (TensorType(dims, x.dtype),)

    def eval(self, x: Array, *size_operands: Array) -> Array:
        return jnp.broadcast_to(x, self._dims([a.shape for a in (x, *size_operands)]))


def reshape_to(x: TensorType, dims: Sequence[DimLike]) -> Reshape:
    """Return the reshape of `x` to `dims`: ints, at most one -1, dimensions of `x`, or a product of them (`batch·seq`).

    Raises:
        ShapeError: a size cannot be expressed, or the number of elements differs.
    """
    target: list[int | AxisOf] = []
    num_inferred = sum(is_static(d) and d == -1 for d in dims)
    for dim in dims:
        if is_static(dim):
            target.append(int(dim))
        elif dim in x.shape:
            target.append(AxisOf(x.shape.index(dim)))
        elif not num_inferred:
            num_inferred = 1
            target.append(-1)  # a product such as batch·seq: reshape infers it; the check below compares it
        else:
            raise ShapeError(f"reshape of {x} cannot express dimension {dim}")
    op = Reshape(tuple(target))
    (out,) = op.infer(TypeCache(), x)
    if any(old != new for old, new in zip(dims, out.shape, strict=True) if not (is_static(old) and old == -1)):
        raise ShapeError(f"{x} cannot be reshaped to {tuple(dims)}")
    return op


def split_axis(rank: int, axis: int, sizes: tuple[int, ...]) -> Reshape:
    """Return the reshape that splits one axis of a rank-`rank` operand into `sizes`, of which one may be -1."""
    axis %= rank
    return Reshape((*(AxisOf(i) for i in range(axis)), *sizes, *(AxisOf(i) for i in range(axis + 1, rank))))


def merge_axes(rank: int, axis: int) -> Reshape:
    """Return the reshape that merges axes `axis` and `axis + 1` of a rank-`rank` operand."""
    axis %= rank
    return Reshape((*(AxisOf(i) for i in range(axis)), -1, *(AxisOf(i) for i in range(axis + 2, rank))))


@dataclass(frozen=True)
class Transpose(Mir):
    """Permute the axes: axis i of the result is axis `perm[i]` of the operand."""

    traits = MOVEMENT
    notation = "transpose({perm})"

    perm: tuple[int, ...]

    def check(self, x: TensorType) -> None:
        if sorted(self.perm) != list(range(x.rank)):
            raise ShapeError(f"transpose: {self.perm} is not a permutation of the axes of {x}")

    def eval(self, x: Array) -> Array:
        return jnp.transpose(x, self.perm)


def _leading_rows(op: Any, operands: Types, results: Types) -> int | None:
    """Return the byte offset of a slice of the first axis, or None if the slice is no contiguous view."""
    (x,) = operands
    if op.axis % x.rank or not x.is_static:
        return None
    size = int(x.shape[0])
    start = op.start % size if op.start < 0 else op.start
    return int(start * x.nbytes // size)


@dataclass(frozen=True)
class Narrow(Mir):
    """Select elements `start … start+length-1` of one axis; a negative start counts from the end."""

    traits = replace(MOVEMENT, bytes=results_moved, view=_leading_rows)
    operands = "x@axis"
    notation = "narrow({axis}, {start}, {length})"

    axis: int
    start: int
    length: int

    def check(self, x: TensorType) -> None:
        size = x.shape[self.axis]
        if is_static(size):
            start = self.start if self.start >= 0 else size + self.start
            if start < 0 or self.length < 0 or start + self.length > size:
                raise ShapeError(f"narrow: {self.start} … +{self.length} is outside axis {self.axis} of {x}")
        # On a symbolic axis, the last index that is read must exist for every size.
        elif not _is_below((self.start + self.length if self.start >= 0 else -self.start) - 1, size):
            raise ShapeError(
                f"narrow: {self.start} … +{self.length} of axis {self.axis} of {x}, which may have fewer entries: "
                "declare the input with a static size, or count by sizes of values (x.shape[1])"
            )

    def eval(self, x: Array) -> Array:
        size = x.shape[self.axis]
        start = self.start if self.start >= 0 else size + self.start
        return jax.lax.slice_in_dim(x, start, start + self.length, axis=self.axis)


@dataclass(frozen=True)
class SplitLast(Mir):
    """Split the last axis of x `[…, N]` into consecutive parts of these `sizes`, which add up to N.

    A `Narrow` for each part has the same value. The gradient of this op concatenates the gradients of the parts, where
    separate slices would pad each gradient to the full size and add them.
    """

    traits = replace(MOVEMENT, bytes=all_moved)
    operands = "x[…,N!]"
    notation = "split_last({sizes})"

    sizes: tuple[int, ...]

    def check(self, x: TensorType) -> None:
        if sum(self.sizes) != x.shape[-1] or min(self.sizes) < 0:
            raise ShapeError(f"split: parts of {list(self.sizes)} do not make up the last axis of {x}")

    def eval(self, x: Array) -> tuple[Array, ...]:
        return tuple(jax.lax.split(x, self.sizes, axis=x.ndim - 1))


# One entry of an index: slices are (start, stop, step), because Python 3.11 cannot hash a `slice`.
SliceKey = int | None | EllipsisType | tuple[int | None, int | None, int | None]


@dataclass(frozen=True)
class Slice(Mir):
    """Index x by NumPy's basic indexing, `x[key]`; `key` has ints, slices of ints, `None` and `...`."""

    traits = replace(MOVEMENT, bytes=results_moved)

    key: tuple[SliceKey, ...]

    def check(self, x: TensorType) -> None:
        indices = [k for k in self.key if k is not None and k is not Ellipsis]
        if len(indices) > x.rank:
            raise ShapeError(f"slice: {len(indices)} indices for {x}")
        ellipsis_at = next((i for i, k in enumerate(self.key) if k is Ellipsis), len(self.key))
        num_leading = sum(k is not None for k in self.key[:ellipsis_at])
        axes = [*range(num_leading), *range(x.rank - (len(indices) - num_leading), x.rank)]
        for k, axis in zip(indices, axes, strict=True):
            size = x.shape[axis]
            if isinstance(k, int) and is_static(size) and not -size <= k < size:  # JAX would silently clamp it
                raise ShapeError(f"slice: index {k} is outside axis {axis} of {x}")

    def eval(self, x: Array) -> Array:
        return x[tuple(slice(*k) if isinstance(k, tuple) else k for k in self.key)]

    def text(self) -> str:
        def one(k: Any) -> str:
            if isinstance(k, tuple):
                return ":".join("" if v is None else str(v) for v in k).removesuffix(":")
            return "..." if k is Ellipsis else str(k)

        return f"slice[{', '.join(one(k) for k in self.key)}]"


@dataclass(frozen=True)
class Concat(Mir):
    """Concatenate the operands along `axis`."""

    traits = MOVEMENT
    operands = "x@axis *"

    axis: int

    def check(self, *operands: TensorType) -> None:
        if len({t.dtype for t in operands}) > 1:
            raise DTypeError(f"concat: operands have dtypes {', '.join(map(str, operands))}")

    def eval(self, *arrays: Array) -> Array:
        return jnp.concatenate(arrays, axis=self.axis)


@dataclass(frozen=True)
class RepeatHeads(Mir):
    """Repeat each of `heads` heads of width D `times` times, copies adjacent: `[…, K·D]` → `[…, K·times·D]`."""

    traits = replace(MOVEMENT, widens=False)
    operands = "x[…,W!]"

    heads: int
    times: int

    def check(self, x: TensorType) -> None:
        if x.shape[-1] % self.heads:
            raise ShapeError(f"repeat_heads: the last axis of {x} is not a multiple of {self.heads} heads")

    def eval(self, x: Array) -> Array:
        by_head = x.reshape(*x.shape[:-1], self.heads, x.shape[-1] // self.heads)
        return jnp.repeat(by_head, self.times, axis=-2).reshape(*x.shape[:-1], x.shape[-1] * self.times)


PAD_MODES = ("constant", "edge", "reflect", "symmetric", "wrap")


@dataclass(frozen=True)
class Pad(Mir):
    """Pad each axis of x with (before, after) entries, with `value` or by a `mode` of `numpy.pad`.

    `edge` repeats the last entry, `reflect` mirrors around it, `symmetric` mirrors including it, `wrap` continues from
    the other side. Negative widths remove entries.
    """

    traits = replace(MOVEMENT, widens=False)
    choices = {"mode": PAD_MODES}

    widths: tuple[tuple[int, int], ...]
    mode: str = "constant"
    value: float = 0.0

    def check(self, x: TensorType) -> None:
        if len(self.widths) != x.rank:
            raise ShapeError(f"pad: {x} has {x.rank} axes, got widths for {len(self.widths)}: {list(self.widths)}")
        if self.value and self.mode != "constant":
            raise ShapeError(f"pad: a value needs the mode 'constant', got {self.value:g} and {self.mode!r}")

    def eval(self, x: Array) -> Array:
        if self.mode == "constant":
            return jax.lax.pad(x, jnp.full((), self.value, x.dtype), [(*pair, 0) for pair in self.widths])
        # jnp.pad rejects negative widths, so the removed entries are sliced away first.
        kept_slices = tuple(slice(max(-low, 0), min(high, 0) or None) for low, high in self.widths)
        return jnp.pad(x[kept_slices], [(max(low, 0), max(high, 0)) for low, high in self.widths], mode=self.mode)


@dataclass(frozen=True)
class Tile(Mir):
    """Repeat the full array `reps[i]` times along axis i, as `numpy.tile` does."""

    traits = replace(MOVEMENT, widens=False)

    reps: tuple[int, ...]

    def check(self, x: TensorType) -> None:
        if len(self.reps) != x.rank or any(isinstance(r, bool) or r < 1 for r in self.reps):
            raise ShapeError(f"tile: expected a number of at least 1 for each axis of {x}, got {self.reps}")

    def eval(self, x: Array) -> Array:
        return jnp.tile(x, self.reps)


@dataclass(frozen=True)
class Bound:
    """Bound of a `CutAxis`: the distance `offset + Σ sizes − Σ minus` from the start of the axis, or from its end.

    A size that counts twice is listed twice.
    """

    sizes: tuple[SizeOf, ...] = ()
    offset: int = 0
    from_end: bool = False
    minus: tuple[SizeOf, ...] = ()

    def resolve(self, size: DimLike, shapes: Sequence[tuple[DimLike, ...]]) -> DimLike:
        """Return the index on an axis of this `size`, for operands of these `shapes`."""
        added, subtracted = (sum(shapes[s.operand][s.axis] for s in sizes) for sizes in (self.sizes, self.minus))
        distance = added - subtracted + self.offset
        return size - distance if self.from_end else distance

    def __str__(self) -> str:
        terms = [f"+{s}" for s in self.sizes] + [f"-{s}" for s in self.minus] + [f"{self.offset:+}"] * bool(self.offset)
        distance = "".join(terms).removeprefix("+") or "0"
        return f"end-({distance})" if self.from_end else distance


END = Bound(from_end=True)


@dataclass(frozen=True)
class CutAxis(Mir):
    """Slice one axis, `x[…, start:stop, …]`, between bounds that depend on sizes of values.

    Operands: x, then values of which only the sizes of axes are read. The result has exactly `stop − start` entries,
    as a symbolic size: for an axis of size `a + b`, the slice from `a` to the end has size `b`. Bounds never contain a
    symbol, so that binding symbols needs no substitution.
    """

    traits = replace(MOVEMENT, narrows=1, bytes=results_moved, size_dependent=True)  # a part may not be there
    notation = "cut({axis}, {start}:{stop})"

    axis: int
    start: Bound = Bound()
    stop: Bound = END

    def _bounds(self, shapes: Sequence[tuple[DimLike, ...]]) -> tuple[DimLike, DimLike]:
        """Return the start and stop indices for operands of these shapes."""
        size = shapes[0][self.axis]
        return self.start.resolve(size, shapes), self.stop.resolve(size, shapes)

    def infer(self, types: TypeCache, *operands: TensorType) -> tuple[TensorType, ...]:
        x = operands[0]
        check_axes("cut", self.axis, x)
        bounds = (self.start, self.stop)
        _check_size_refs("cut", [size for bound in bounds for size in (*bound.sizes, *bound.minus)], operands)
        start, stop = self._bounds([t.shape for t in operands])
        if _is_below(start, 0) or _is_below(x.shape[self.axis], stop) or _is_below(stop - start, 1):
            cut_text = f"cut: {start}:{stop} along axis {self.axis} of {x}"
            raise ShapeError(f"{cut_text}; expected at least one entry, and none outside")
        axis = self.axis % x.rank
        return (TensorType((*x.shape[:axis], stop - start, *x.shape[axis + 1 :]), x.dtype),)

    def eval(self, x: Array, *size_operands: Array) -> Array:
        start, stop = self._bounds([a.shape for a in (x, *size_operands)])
        return jax.lax.slice_in_dim(x, start, stop, axis=self.axis)


def _is_below(a: DimLike, b: DimLike) -> bool:
    """Return whether a < b for every value of the symbols.

    An inequality that only some values satisfy gives False; it is checked again when the symbols are bound.
    """
    try:
        return bool(a < b)
    except jex.InconclusiveDimensionOperation:
        return False
