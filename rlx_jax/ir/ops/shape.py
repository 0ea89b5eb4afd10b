"""Ops that move elements: axes, slices, concatenation, repetition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from rlx_jax.errors import DTypeError, ShapeError
from rlx_jax.ir.graph import Mir, TypeCache
from rlx_jax.ir.operands import check_axes
from rlx_jax.ir.traits import MOVEMENT, Types, each_once, first_moved, nothing, results_moved
from rlx_jax.ir.types import DimLike, TensorType, is_static

Array = jax.Array


@dataclass(frozen=True)
class AxisOf:
    """In a `Reshape` target: as long as axis `axis` of the operand."""

    axis: int

    def __str__(self) -> str:
        return f"@{self.axis}"


def _whole(op: Any, operands: Types, results: Types) -> int | None:
    """The same elements in the same order."""
    return 0


@dataclass(frozen=True)
class Reshape(Mir):
    """Reshape to `target`, whose entries are ints, axes of the operand (`AxisOf`), or one -1.

    A target never names a symbol, so that binding symbols needs no substitution.
    """

    traits = replace(MOVEMENT, bytes=nothing, view=_whole)

    target: tuple[int | AxisOf, ...]

    def _dims(self, shape: tuple[DimLike, ...]) -> tuple[DimLike, ...]:
        dims = [shape[t.axis] if isinstance(t, AxisOf) else t for t in self.target]
        if any(is_static(d) and d < 0 for d in dims):
            hole = next(i for i, d in enumerate(dims) if is_static(d) and d < 0)
            rest = math.prod(d for i, d in enumerate(dims) if i != hole)
            dims[hole] = math.prod(shape) // rest
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

    def text(self) -> str:
        return f"reshape([{', '.join(map(str, self.target))}])"


@dataclass(frozen=True)
class Shard(Mir):
    """x itself, and what its axes are (`rlx_jax.ir.roles`; None: not said): over a mesh it is divided by them."""

    traits = replace(MOVEMENT, widens=False, bytes=nothing, view=_whole)

    roles: tuple[str | None, ...]

    def check(self, *operands: TensorType) -> None:
        (x,) = operands
        if len(self.roles) != x.rank:
            raise ShapeError(f"shard: {x} and {len(self.roles)} roles")

    def eval(self, x: Array) -> Array:
        return x

    def text(self) -> str:
        return f"shard({', '.join(role or '-' for role in self.roles)})"


@dataclass(frozen=True)
class SizeOf:
    """In an `Expand` target: as long as axis `axis` of operand number `operand`."""

    operand: int
    axis: int

    def __str__(self) -> str:
        return f"@{self.operand}.{self.axis}"


def _check_lenders(op: str, sizes: Sequence[SizeOf], operands: Types) -> None:
    for size in sizes:
        if not 0 <= size.operand < len(operands):
            raise ShapeError(f"{op}: there is no operand {size.operand} of {len(operands)}")
        check_axes(op, size.axis, operands[size.operand])


@dataclass(frozen=True)
class Expand(Mir):
    """`x` broadcast to `target` as NumPy does it. Operands: x, then values that only lend the sizes of their axes.

    A target never names a symbol, so that binding symbols needs no substitution.
    """

    traits = replace(MOVEMENT, narrows=1, bytes=first_moved)

    target: tuple[int | SizeOf, ...]

    def _dims(self, shapes: Sequence[tuple[DimLike, ...]]) -> tuple[DimLike, ...]:
        return tuple(shapes[t.operand][t.axis] if isinstance(t, SizeOf) else t for t in self.target)

    def infer(self, types: TypeCache, *operands: TensorType) -> tuple[TensorType, ...]:
        x = operands[0]
        _check_lenders("expand", [size for size in self.target if isinstance(size, SizeOf)], operands)
        dims = self._dims([t.shape for t in operands])
        fits = zip(reversed(x.shape), reversed(dims), strict=False)
        if x.rank > len(dims) or any(not (is_static(have) and have == 1) and have != want for have, want in fits):
            raise ShapeError(f"{x} cannot be broadcast to [{', '.join(map(str, dims))}]")
        return (TensorType(dims, x.dtype),)

    def eval(self, x: Array, *lenders: Array) -> Array:
        return jnp.broadcast_to(x, self._dims([a.shape for a in (x, *lenders)]))

    def text(self) -> str:
        return f"expand([{', '.join(map(str, self.target))}])"


def reshape_to(x: TensorType, dims: Sequence[DimLike]) -> Reshape:
    """The reshape of `x` to sizes: ints, one -1, dimensions of `x`, or a product of them (`batch·seq`).

    Raises:
        ShapeError: a size that cannot be expressed, or another number of elements.
    """
    target: list[int | AxisOf] = []
    holes = sum(is_static(d) and d == -1 for d in dims)
    for dim in dims:
        if is_static(dim):
            target.append(int(dim))
        elif dim in x.shape:
            target.append(AxisOf(x.shape.index(dim)))
        elif not holes:
            holes = 1
            target.append(-1)  # a product such as batch·seq: what is left over
        else:
            raise ShapeError(f"reshape of {x} cannot express dimension {dim}")
    op = Reshape(tuple(target))
    (out,) = op.infer(TypeCache(), x)
    if any(w != got for w, got in zip(dims, out.shape, strict=True) if not (is_static(w) and w == -1)):
        raise ShapeError(f"{x} cannot be reshaped to {tuple(dims)}")
    return op


def split_axis(rank: int, axis: int, sizes: tuple[int, ...]) -> Reshape:
    """Reshape one axis of a rank-`rank` operand into several; one size may be -1."""
    axis %= rank
    return Reshape((*(AxisOf(i) for i in range(axis)), *sizes, *(AxisOf(i) for i in range(axis + 1, rank))))


def merge_axes(rank: int, axis: int) -> Reshape:
    """Merge axes `axis` and `axis + 1` of a rank-`rank` operand."""
    axis %= rank
    return Reshape((*(AxisOf(i) for i in range(axis)), -1, *(AxisOf(i) for i in range(axis + 2, rank))))


@dataclass(frozen=True)
class Transpose(Mir):
    """Permute the axes."""

    traits = MOVEMENT

    perm: tuple[int, ...]

    def check(self, *operands: TensorType) -> None:
        (x,) = operands
        if sorted(self.perm) != list(range(x.rank)):
            raise ShapeError(f"transpose: {self.perm} is not a permutation of the axes of {x}")

    def eval(self, x: Array) -> Array:
        return jnp.transpose(x, self.perm)

    def text(self) -> str:
        return f"transpose({list(self.perm)})"


def _leading_rows(op: Any, operands: Types, results: Types) -> int | None:
    """Rows of the first axis lie side by side."""
    (x,) = operands
    if op.axis % x.rank or not x.is_static:
        return None
    size = int(x.shape[0])
    start = op.start % size if op.start < 0 else op.start
    return int(start * x.nbytes // size)


@dataclass(frozen=True)
class Narrow(Mir):
    """Elements `start … start+length-1` of one axis. A negative start counts from the end."""

    traits = replace(MOVEMENT, bytes=results_moved, view=_leading_rows)
    operands = "x@axis"

    axis: int
    start: int
    length: int

    def check(self, *operands: TensorType) -> None:
        (x,) = operands
        size = x.shape[self.axis]
        if is_static(size):
            start = self.start if self.start >= 0 else size + self.start
            if start < 0 or self.length < 0 or start + self.length > size:
                raise ShapeError(f"narrow: {self.start} … +{self.length} is outside axis {self.axis} of {x}")
        elif not _is_below((self.start + self.length if self.start >= 0 else -self.start) - 1, size):
            raise ShapeError(
                f"narrow: {self.start} … +{self.length} of axis {self.axis} of {x}, which may have fewer entries: "
                "declare the input with a static size, or count by sizes of values (x.shape[1])"
            )

    def eval(self, x: Array) -> Array:
        size = x.shape[self.axis]
        start = self.start if self.start >= 0 else size + self.start
        return jax.lax.slice_in_dim(x, start, start + self.length, axis=self.axis)

    def text(self) -> str:
        return f"narrow({self.axis}, {self.start}, {self.length})"


@dataclass(frozen=True)
class SplitLast(Mir):
    """x `[…, N]` → its last axis in consecutive parts of these `sizes`, whose sum is N.

    A `Narrow` for each part means the same; here a gradient joins the parts, and would pad and add those of each.
    """

    traits = replace(MOVEMENT, bytes=each_once)
    operands = "x[…,N!]"

    sizes: tuple[int, ...]

    def check(self, *operands: TensorType) -> None:
        (x,) = operands
        if sum(self.sizes) != x.shape[-1] or min(self.sizes) < 0:
            raise ShapeError(f"split: parts of {list(self.sizes)} do not make up the last axis of {x}")

    def eval(self, x: Array) -> tuple[Array, ...]:
        return tuple(jax.lax.split(x, self.sizes, axis=x.ndim - 1))

    def text(self) -> str:
        return f"split_last({list(self.sizes)})"


# One place of a key: (start, stop, step) stands for a slice, which could not be hashed.
SliceKey = int | None | EllipsisType | tuple[int | None, int | None, int | None]


@dataclass(frozen=True)
class Slice(Mir):
    """`x[key]` for a key of ints, slices of ints, `None` and `...`."""

    traits = replace(MOVEMENT, bytes=results_moved)

    key: tuple[SliceKey, ...]

    def check(self, *operands: TensorType) -> None:
        (x,) = operands
        taken = [k for k in self.key if k is not None and k is not Ellipsis]
        if len(taken) > x.rank:
            raise ShapeError(f"slice: {len(taken)} indices for {x}")
        gap = next((i for i, k in enumerate(self.key) if k is Ellipsis), len(self.key))
        before = sum(k is not None for k in self.key[:gap])
        axes = [*range(before), *range(x.rank - (len(taken) - before), x.rank)]
        for k, axis in zip(taken, axes, strict=True):
            size = x.shape[axis]
            if isinstance(k, int) and is_static(size) and not -size <= k < size:  # jax would clamp it
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
    """Join operands along `axis`."""

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
    """Repeat each of `heads` heads of width `head_dim` consecutively `times` times: `[…, K·D]` → `[…, K·times·D]`."""

    traits = replace(MOVEMENT, widens=False)
    operands = "x[…,W!]"

    heads: int
    times: int

    def check(self, *operands: TensorType) -> None:
        (x,) = operands
        if x.shape[-1] % self.heads:
            raise ShapeError(f"repeat_heads: the last axis of {x} is not a multiple of {self.heads} heads")

    def eval(self, x: Array) -> Array:
        split = x.reshape(*x.shape[:-1], self.heads, x.shape[-1] // self.heads)
        return jnp.repeat(split, self.times, axis=-2).reshape(*x.shape[:-1], x.shape[-1] * self.times)


PAD_MODES = ("constant", "edge", "reflect", "symmetric", "wrap")


@dataclass(frozen=True)
class Pad(Mir):
    """x with (before, after) entries more on each axis: `value`, or by `mode` what `numpy.pad` repeats.

    `edge` repeats the last entry, `reflect` mirrors without it, `symmetric` with it, `wrap` goes on from the
    other side. Negative widths cut entries off.
    """

    traits = replace(MOVEMENT, widens=False)
    choices = {"mode": PAD_MODES}

    widths: tuple[tuple[int, int], ...]
    mode: str = "constant"
    value: float = 0.0

    def check(self, *operands: TensorType) -> None:
        (x,) = operands
        if len(self.widths) != x.rank:
            raise ShapeError(f"pad: {x} has {x.rank} axes, got widths for {len(self.widths)}: {list(self.widths)}")
        if self.value and self.mode != "constant":
            raise ShapeError(f"pad: a value is for the mode 'constant', got {self.value:g} and {self.mode!r}")

    def eval(self, x: Array) -> Array:
        if self.mode == "constant":
            return jax.lax.pad(x, jnp.full((), self.value, x.dtype), [(*pair, 0) for pair in self.widths])
        cut = tuple(slice(max(-low, 0), min(high, 0) or None) for low, high in self.widths)
        return jnp.pad(x[cut], [(max(low, 0), max(high, 0)) for low, high in self.widths], mode=self.mode)


@dataclass(frozen=True)
class Tile(Mir):
    """x repeated so many times along each axis, as a whole: `numpy.tile`."""

    traits = replace(MOVEMENT, widens=False)

    reps: tuple[int, ...]

    def check(self, *operands: TensorType) -> None:
        (x,) = operands
        if len(self.reps) != x.rank or any(isinstance(r, bool) or r < 1 for r in self.reps):
            raise ShapeError(f"tile: expected a number of at least 1 for each axis of {x}, got {self.reps}")

    def eval(self, x: Array) -> Array:
        return jnp.tile(x, self.reps)


# -- parts of an axis between bounds that are sizes of values ----------------------------------


@dataclass(frozen=True)
class Bound:
    """In a `CutAxis`: `offset` and all of `sizes` less those of `minus`, behind the front of the axis, or with
    `from_end` before its end. A size that counts twice stands there twice."""

    sizes: tuple[SizeOf, ...] = ()
    offset: int = 0
    from_end: bool = False
    minus: tuple[SizeOf, ...] = ()

    def at(self, size: DimLike, shapes: Sequence[tuple[DimLike, ...]]) -> DimLike:
        """The index on an axis of this size."""
        more, less = (sum(shapes[s.operand][s.axis] for s in sizes) for sizes in (self.sizes, self.minus))
        distance = more - less + self.offset
        return size - distance if self.from_end else distance

    def __str__(self) -> str:
        parts = [f"+{s}" for s in self.sizes] + [f"-{s}" for s in self.minus] + [f"{self.offset:+}"] * bool(self.offset)
        sum_ = "".join(parts).removeprefix("+") or "0"
        return f"end-({sum_})" if self.from_end else sum_


END = Bound(from_end=True)


@dataclass(frozen=True)
class CutAxis(Mir):
    """`x[…, start:stop, …]` along one axis. Operands: x, then values that only lend the sizes of their axes.

    The result has `stop − start` entries, exactly: of `a + b` entries, those from `a` on are `b`. Bounds never name a
    symbol, so that binding symbols needs no substitution.
    """

    traits = replace(MOVEMENT, narrows=1, bytes=results_moved)

    axis: int
    start: Bound = Bound()
    stop: Bound = END

    def _bounds(self, shapes: Sequence[tuple[DimLike, ...]]) -> tuple[DimLike, DimLike]:
        size = shapes[0][self.axis]
        return self.start.at(size, shapes), self.stop.at(size, shapes)

    def infer(self, types: TypeCache, *operands: TensorType) -> tuple[TensorType, ...]:
        x = operands[0]
        check_axes("cut", self.axis, x)
        bounds = (self.start, self.stop)
        _check_lenders("cut", [size for bound in bounds for size in (*bound.sizes, *bound.minus)], operands)
        start, stop = self._bounds([t.shape for t in operands])
        if _is_below(start, 0) or _is_below(x.shape[self.axis], stop) or _is_below(stop - start, 1):
            what = f"cut: {start}:{stop} along axis {self.axis} of {x}"
            raise ShapeError(f"{what}; expected at least one entry, and none outside")
        axis = self.axis % x.rank
        return (TensorType((*x.shape[:axis], stop - start, *x.shape[axis + 1 :]), x.dtype),)

    def eval(self, x: Array, *lenders: Array) -> Array:
        start, stop = self._bounds([a.shape for a in (x, *lenders)])
        return jax.lax.slice_in_dim(x, start, stop, axis=self.axis)

    def text(self) -> str:
        return f"cut({self.axis}, {self.start}:{self.stop})"


def _is_below(a: DimLike, b: DimLike) -> bool:
    """Whether a < b for every size of the symbols. What some sizes decide is asked again when they are bound."""
    try:
        return bool(a < b)
    except jex.InconclusiveDimensionOperation:
        return False
