"""Ops that move elements: axes, slices, concatenation, gathers; and reductions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import jax
import jax.numpy as jnp

from rlx_jax.errors import DTypeError, ShapeError
from rlx_jax.ir.graph import Mir, TypeCache
from rlx_jax.ir.types import DimLike, TensorType, is_float, is_static

Array = jax.Array


def check_axis(op: str, axis: int, x: TensorType) -> None:
    """The operand has that axis."""
    if not -x.rank <= axis < x.rank:
        raise ShapeError(f"{op}: {x} has no axis {axis}")


@dataclass(frozen=True)
class AxisOf:
    """In a `Reshape` target: as long as axis `axis` of the operand."""

    axis: int

    def __str__(self) -> str:
        return f"@{self.axis}"


@dataclass(frozen=True)
class Reshape(Mir):
    """Reshape to `target`, whose entries are ints, axes of the operand (`AxisOf`), or one -1.

    A target never names a symbol, so that binding symbols needs no substitution.
    """

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

    perm: tuple[int, ...]

    def check(self, *operands: TensorType) -> None:
        (x,) = operands
        if sorted(self.perm) != list(range(x.rank)):
            raise ShapeError(f"transpose: {self.perm} is not a permutation of the axes of {x}")

    def eval(self, x: Array) -> Array:
        return jnp.transpose(x, self.perm)

    def text(self) -> str:
        return f"transpose({list(self.perm)})"


@dataclass(frozen=True)
class Narrow(Mir):
    """Elements `start … start+length-1` of one axis. A negative start counts from the end."""

    axis: int
    start: int
    length: int

    def check(self, *operands: TensorType) -> None:
        (x,) = operands
        check_axis("narrow", self.axis, x)
        size = x.shape[self.axis]
        if is_static(size):
            start = self.start if self.start >= 0 else size + self.start
            if start < 0 or self.length < 0 or start + self.length > size:
                raise ShapeError(f"narrow: {self.start} … +{self.length} is outside axis {self.axis} of {x}")

    def eval(self, x: Array) -> Array:
        size = x.shape[self.axis]
        start = self.start if self.start >= 0 else size + self.start
        return jax.lax.slice_in_dim(x, start, start + self.length, axis=self.axis)

    def text(self) -> str:
        return f"narrow({self.axis}, {self.start}, {self.length})"


SliceKey = int | None | EllipsisType | tuple[int | None, int | None, int | None]
"""One place of a key: (start, stop, step) stands for a slice, which could not be hashed."""


@dataclass(frozen=True)
class Slice(Mir):
    """`x[key]` for a key of ints, slices of ints, `None` and `...`."""

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

    axis: int

    def check(self, *operands: TensorType) -> None:
        if len({t.dtype for t in operands}) > 1:
            raise DTypeError(f"concat: operands have dtypes {', '.join(map(str, operands))}")

    def eval(self, *arrays: Array) -> Array:
        return jnp.concatenate(arrays, axis=self.axis)


@dataclass(frozen=True)
class Gather(Mir):
    """Rows of a table: `table[ids]`, table `[V, …]`, ids `[…]` integers in `[0, V)` → `[…ids, …]`.

    Ids are checked on the host before a model is called; here an id out of range reads the nearest row.
    """

    def check(self, *operands: TensorType) -> None:
        table, ids = operands
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise DTypeError(f"gather: ids are integers, got {ids}")
        if not table.rank:
            raise ShapeError(f"gather: the table has rows, got {table}")

    def eval(self, table: Array, ids: Array) -> Array:
        return jnp.take(table, ids, axis=0, mode="clip")


@dataclass(frozen=True)
class TakeRow(Mir):
    """`y[b, 0] = x[b, index[b]]`: x `[B, S, …]` (or `[1, S, …]`, shared by all rows), index `[B]` → `[B, 1, …]`."""

    def check(self, *operands: TensorType) -> None:
        x, index = operands
        shared = x.rank > 1 and is_static(x.shape[0]) and x.shape[0] == 1
        if (
            x.rank < 2
            or index.rank != 1
            or not (shared or index.shape == x.shape[:1])
            or not jnp.issubdtype(index.dtype, jnp.integer)
        ):
            raise ShapeError(f"take_row: x is [B,S,…] and the index [B] integers, got {x} and {index}")

    def eval(self, x: Array, index: Array) -> Array:
        if x.shape[0] is not index.shape[0] and x.shape[0] == 1:
            return jnp.take(x[0], index, axis=0, mode="clip")[:, None]
        if x.shape[1] == 1:  # a symbolic size is never 1 here
            return x
        at = index.reshape(-1, *(1,) * (x.ndim - 1))
        return jnp.take_along_axis(x, at, axis=1, mode="clip")


@dataclass(frozen=True)
class Iota(Mir):
    """`0, 1, …` along `axis` of the operand, as int32 of shape `[size]`."""

    axis: int

    def check(self, *operands: TensorType) -> None:
        check_axis("iota", self.axis, operands[0])

    def eval(self, x: Array) -> Array:
        return jnp.arange(x.shape[self.axis], dtype=jnp.int32)


REDUCE: dict[str, Callable[..., Array]] = {
    "sum": jnp.sum,
    "mean": jnp.mean,
    "max": jnp.max,
    "min": jnp.min,
    "prod": jnp.prod,
}


@dataclass(frozen=True)
class Reduce(Mir):
    """`sum`, `mean`, `max`, `min` or `prod` over `axes`."""

    kind: str
    axes: tuple[int, ...]
    keepdims: bool = False

    def check(self, *operands: TensorType) -> None:
        if self.kind not in REDUCE:
            raise ShapeError(f"unknown reduction {self.kind!r}; known are {', '.join(REDUCE)}")
        for axis in self.axes:
            check_axis(f"reduce_{self.kind}", axis, operands[0])

    def eval(self, x: Array) -> Array:
        return REDUCE[self.kind](x, axis=self.axes, keepdims=self.keepdims)

    def text(self) -> str:
        return f"reduce_{self.kind}({list(self.axes)}{', keepdims' if self.keepdims else ''})"


@dataclass(frozen=True)
class Softmax(Mir):
    """`exp(x − max x) / Σ exp(x − max x)` along `axis`, in f32."""

    axis: int = -1

    def check(self, *operands: TensorType) -> None:
        check_axis("softmax", self.axis, operands[0])
        if not is_float(operands[0].dtype):
            raise DTypeError(f"softmax: needs a floating operand, got {operands[0]}")

    def eval(self, x: Array) -> Array:
        return jax.nn.softmax(x.astype(jnp.float32), axis=self.axis).astype(x.dtype)


@dataclass(frozen=True)
class Cumsum(Mir):
    """The running sum `x₀ + … + xᵢ` along `axis`, floats in f32; `exclusive`: without `xᵢ`, so that the first is 0."""

    axis: int = -1
    exclusive: bool = False

    def check(self, *operands: TensorType) -> None:
        check_axis("cumsum", self.axis, operands[0])
        if operands[0].dtype == jnp.bool_:
            raise DTypeError(f"cumsum: needs numbers, got {operands[0]}; cast it")

    def eval(self, x: Array) -> Array:
        axis = self.axis % x.ndim
        if self.exclusive:
            shifted = jnp.pad(x, [(int(i == axis), 0) for i in range(x.ndim)])
            x = jax.lax.slice_in_dim(shifted, 0, x.shape[axis], axis=axis)
        wide = jnp.float32 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
        return jnp.cumsum(x, axis=axis, dtype=wide).astype(x.dtype)

    def text(self) -> str:
        return f"cumsum(axis={self.axis}{',excl' if self.exclusive else ''})"


@dataclass(frozen=True)
class RepeatHeads(Mir):
    """Repeat each of `heads` heads of width `head_dim` consecutively `times` times: `[…, K·D]` → `[…, K·times·D]`."""

    heads: int
    times: int

    def check(self, *operands: TensorType) -> None:
        (x,) = operands
        if not x.rank or not is_static(x.shape[-1]) or x.shape[-1] % self.heads:
            raise ShapeError(f"repeat_heads: the last axis of {x} is not a multiple of {self.heads} heads")

    def eval(self, x: Array) -> Array:
        split = x.reshape(*x.shape[:-1], self.heads, x.shape[-1] // self.heads)
        return jnp.repeat(split, self.times, axis=-2).reshape(*x.shape[:-1], x.shape[-1] * self.times)
