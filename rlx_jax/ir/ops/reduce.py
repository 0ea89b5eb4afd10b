"""Ops along an axis: reductions, softmax, running sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from rlx_jax.errors import DTypeError, ShapeError
from rlx_jax.ir.graph import Mir
from rlx_jax.ir.ops.shape import check_axis
from rlx_jax.ir.traits import REDUCTION
from rlx_jax.ir.types import TensorType, is_float

Array = jax.Array


REDUCE: dict[str, Callable[..., Array]] = {
    "sum": jnp.sum,
    "mean": jnp.mean,
    "max": jnp.max,
    "min": jnp.min,
    "prod": jnp.prod,
}


@dataclass(frozen=True)
class Reduce(Mir):
    """`sum`, `mean`, `max`, `min` or `prod` over `axes`, in the dtype of the operand: whole numbers are not widened.

    A mean needs floats, a sum and a product need numbers; cast what is none.
    """

    traits = REDUCTION

    kind: str
    axes: tuple[int, ...]
    keepdims: bool = False

    def check(self, *operands: TensorType) -> None:
        if self.kind not in REDUCE:
            raise ShapeError(f"unknown reduction {self.kind!r}; known are {', '.join(REDUCE)}")
        for axis in self.axes:
            check_axis(f"reduce_{self.kind}", axis, operands[0])
        dtype = operands[0].dtype
        if self.kind == "mean" and not jnp.issubdtype(dtype, jnp.inexact):
            raise DTypeError(f"reduce_mean: needs floats, got {operands[0]}; cast it to f32 first")
        if self.kind in ("sum", "prod") and dtype == jnp.bool_:
            raise DTypeError(f"reduce_{self.kind}: needs numbers, got {operands[0]}; cast it to i32 first")

    def eval(self, x: Array) -> Array:
        # jax.numpy sums small whole numbers in 32 bits, and says so in the result.
        whole = {"dtype": x.dtype} if self.kind in ("sum", "prod") and jnp.issubdtype(x.dtype, jnp.integer) else {}
        return REDUCE[self.kind](x, axis=self.axes, keepdims=self.keepdims, **whole)

    def text(self) -> str:
        return f"reduce_{self.kind}({list(self.axes)}{', keepdims' if self.keepdims else ''})"


@dataclass(frozen=True)
class Softmax(Mir):
    """`exp(x − max x) / Σ exp(x − max x)` along `axis`, in f32."""

    traits = REDUCTION

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

    traits = REDUCTION

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
