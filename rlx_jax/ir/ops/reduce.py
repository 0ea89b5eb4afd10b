"""Ops along an axis: reductions, softmax, running sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.errors import DTypeError, ShapeError
from rlx_jax.ir.graph import Mir
from rlx_jax.ir.traits import REDUCTION
from rlx_jax.ir.types import TensorType, is_float

Array = jax.Array


REDUCE: dict[str, Callable[..., Array]] = {
    "sum": jnp.sum,
    "mean": jnp.mean,
    "max": jnp.max,
    "min": jnp.min,
    "prod": jnp.prod,
    "any": jnp.any,  # some entry is not 0, as bool
    "all": jnp.all,  # no entry is 0, as bool
    "logsumexp": jax.nn.logsumexp,  # ln Σ eˣ
    "var": jnp.var,  # Σ(x − mean)² / (n − ddof)
    "std": jnp.std,  # √var
}

# Running reductions, and what each gives of nothing.
CUMULATIVE: dict[str, tuple[Callable[..., Array], float]] = {
    "sum": (jax.lax.cumsum, 0.0),
    "prod": (jax.lax.cumprod, 1.0),
    "max": (jax.lax.cummax, -math.inf),
    "min": (jax.lax.cummin, math.inf),
}


OF_FLOATS = ("mean", "logsumexp", "var", "std")


@dataclass(frozen=True)
class Reduce(Mir):
    """A reduction of `REDUCE` over `axes`, in the dtype of the operand: whole numbers are not widened.

    `any` and `all` give bools. Means, logsumexp, variances and deviations need floats, a sum and a product need
    numbers; cast what is none. `ddof` is taken from the count in a variance or deviation.
    """

    traits = REDUCTION
    choices = {"kind": REDUCE}
    operands = "x@axes"

    kind: str
    axes: tuple[int, ...]
    keepdims: bool = False
    ddof: int = 0

    def check(self, *operands: TensorType) -> None:
        dtype = operands[0].dtype
        if self.kind in OF_FLOATS and not jnp.issubdtype(dtype, jnp.inexact):
            raise DTypeError(f"reduce_{self.kind}: needs floats, got {operands[0]}; cast it to f32 first")
        if len({axis % operands[0].rank for axis in self.axes}) < len(self.axes):
            raise ShapeError(f"reduce_{self.kind}: an axis stands twice in {list(self.axes)}")
        if self.ddof and self.kind not in ("var", "std"):
            raise ShapeError(f"reduce_{self.kind}: ddof is for a variance or deviation, got {self.ddof}")
        if self.kind in ("sum", "prod") and dtype == jnp.bool_:
            raise DTypeError(f"reduce_{self.kind}: needs numbers, got {operands[0]}; cast it to i32 first")

    def eval(self, x: Array) -> Array:
        # jax.numpy sums small whole numbers in 32 bits, and says so in the result.
        whole = {"dtype": x.dtype} if self.kind in ("sum", "prod") and jnp.issubdtype(x.dtype, jnp.integer) else {}
        if self.kind in ("var", "std", "logsumexp"):  # statistics are taken in f32
            more = {} if self.kind == "logsumexp" else {"ddof": self.ddof}
            wide = REDUCE[self.kind](x.astype(jnp.float32), axis=self.axes, keepdims=self.keepdims, **more)
            return wide.astype(x.dtype)
        return REDUCE[self.kind](x, axis=self.axes, keepdims=self.keepdims, **whole)

    def text(self) -> str:
        notes = [", keepdims"] * self.keepdims + ([f", ddof={self.ddof}"] if self.ddof else [])
        return f"reduce_{self.kind}({list(self.axes)}{''.join(notes)})"


@dataclass(frozen=True)
class Softmax(Mir):
    """`exp(x − max x) / Σ exp(x − max x)` along `axis`, in f32."""

    traits = REDUCTION
    operands = "x:float@axis"

    axis: int = -1

    def eval(self, x: Array) -> Array:
        return jax.nn.softmax(x.astype(jnp.float32), axis=self.axis).astype(x.dtype)


@dataclass(frozen=True)
class LogSoftmax(Mir):
    """`x − max x − ln Σ exp(x − max x)` along `axis`, in f32."""

    traits = REDUCTION
    operands = "x:float@axis"

    axis: int = -1

    def eval(self, x: Array) -> Array:
        return jax.nn.log_softmax(x.astype(jnp.float32), axis=self.axis).astype(x.dtype)


def _running(x: Array, kind: str, axis: int, exclusive: bool, reverse: bool) -> Array:
    """A running reduction in x's own dtype: from the last entry on if `reverse`, without each entry if `exclusive`."""
    fn, nothing = CUMULATIVE[kind]
    axis %= x.ndim
    if exclusive:  # the first entry in the order of the sum stands before them all
        edge = jnp.full((), _least(nothing, x.dtype), x.dtype)
        sides = (0, 1, 0) if reverse else (1, 0, 0)
        shifted = jax.lax.pad(x, edge, [sides if i == axis else (0, 0, 0) for i in range(x.ndim)])
        start = 1 if reverse else 0
        x = jax.lax.slice_in_dim(shifted, start, start + x.shape[axis], axis=axis)
    return fn(x, axis=axis, reverse=reverse)


def _least(value: float, dtype: np.dtype[Any]) -> Any:
    """An infinity as whole numbers have it."""
    if is_float(dtype) or math.isfinite(value):
        return value
    return jnp.iinfo(dtype).min if value < 0 else jnp.iinfo(dtype).max


@dataclass(frozen=True)
class Cumulative(Mir):
    """The running product, maximum or minimum (`prod`, `max`, `min`) of `x₀ … xᵢ` along `axis`.

    `reverse`: of `xᵢ … xₙ`. `exclusive`: without `xᵢ`; of nothing the product is 1, the maximum the least number of the
    dtype (−∞ for floats), the minimum the largest. `Cumsum` has the sums.
    """

    traits = REDUCTION
    choices = {"kind": ("prod", "max", "min")}
    operands = "x:num@axis"

    kind: str
    axis: int = -1
    exclusive: bool = False
    reverse: bool = False

    def eval(self, x: Array) -> Array:
        return _running(x, self.kind, self.axis, self.exclusive, self.reverse)

    def text(self) -> str:
        notes = [",excl"] * self.exclusive + [",reverse"] * self.reverse
        return f"cum{self.kind}(axis={self.axis}{''.join(notes)})"


@dataclass(frozen=True)
class Cumsum(Mir):
    """The running sum `x₀ + … + xᵢ` along `axis`, floats in f32.

    `exclusive`: without `xᵢ`, so that the first is 0. `reverse`: `xᵢ + … + xₙ`, so that the last is the first sum.
    """

    traits = REDUCTION
    operands = "x:num@axis"

    axis: int = -1
    exclusive: bool = False
    reverse: bool = False

    def eval(self, x: Array) -> Array:
        wide = x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
        return _running(wide, "sum", self.axis, self.exclusive, self.reverse).astype(x.dtype)

    def text(self) -> str:
        notes = [",excl"] * self.exclusive + [",reverse"] * self.reverse
        return f"cumsum(axis={self.axis}{''.join(notes)})"
