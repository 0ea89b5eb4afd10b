"""Ops along axes: reductions, softmax, and cumulative sums, products, maxima and minima."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import DTypeError, ShapeError
from rlx_jax.ir.graph import Mir
from rlx_jax.ir.operands import REDUCTION
from rlx_jax.ir.types import TensorType, is_float

Array = jax.Array


REDUCE: dict[str, Callable[..., Array]] = {
    # any: some entry is not 0, as bool; all: no entry is 0; var: Σ(x − mean)² / (n − ddof); std: √var
    **{name: getattr(jnp, name) for name in ("sum", "mean", "max", "min", "prod", "any", "all", "var", "std")},
    "logsumexp": jax.nn.logsumexp,  # ln Σ eˣ
}

# Cumulative reductions by name, and the value of each over no entries.
CUMULATIVE: dict[str, tuple[Callable[..., Array], float]] = {
    "sum": (jax.lax.cumsum, 0.0),
    "prod": (jax.lax.cumprod, 1.0),
    "max": (jax.lax.cummax, -math.inf),
    "min": (jax.lax.cummin, math.inf),
}


# Reductions that need floats.
FLOAT_REDUCTIONS = ("mean", "logsumexp", "var", "std")


@dataclass(frozen=True)
class Reduce(Mir):
    """Reduce `axes` by a function of `REDUCE`; the result has the dtype of the operand, so integers are not widened.

    `any` and `all` return bools. Mean, logsumexp, variance and standard deviation need floats, sum and product need
    numbers; cast other operands first. `ddof` is subtracted from the count in a variance or standard deviation.
    """

    traits = REDUCTION
    choices = {"kind": REDUCE}
    operands = "x@axes"
    notation = "reduce_{kind}({axes}{keepdims?, keepdims}{ddof?, ddof=*})"

    kind: str
    axes: tuple[int, ...]
    keepdims: bool = False
    ddof: int = 0

    def check(self, x: TensorType) -> None:
        if self.kind in FLOAT_REDUCTIONS and not jnp.issubdtype(x.dtype, jnp.inexact):
            raise DTypeError(f"reduce_{self.kind}: needs floats, got {x}; cast it to f32 first")
        if len({axis % x.rank for axis in self.axes}) < len(self.axes):
            raise ShapeError(f"reduce_{self.kind}: an axis is repeated in {list(self.axes)}")
        if self.ddof and self.kind not in ("var", "std"):
            raise ShapeError(f"reduce_{self.kind}: ddof is for a variance or deviation, got {self.ddof}")
        if self.kind in ("sum", "prod") and x.dtype == jnp.bool_:
            raise DTypeError(f"reduce_{self.kind}: needs numbers, got {x}; cast it to i32 first")

    def eval(self, x: Array) -> Array:
        # jax.numpy widens small integers in sums and products to 32 bits; `dtype` keeps the operand's dtype.
        dtype = {"dtype": x.dtype} if self.kind in ("sum", "prod") and jnp.issubdtype(x.dtype, jnp.integer) else {}
        if self.kind in ("var", "std", "logsumexp"):  # computed in f32
            ddof = {} if self.kind == "logsumexp" else {"ddof": self.ddof}
            result = REDUCE[self.kind](x.astype(jnp.float32), axis=self.axes, keepdims=self.keepdims, **ddof)
            return result.astype(x.dtype)
        return REDUCE[self.kind](x, axis=self.axes, keepdims=self.keepdims, **dtype)


@dataclass(frozen=True)
class Softmax(Mir):
    """Softmax along `axis`, `exp(x − max x) / Σ exp(x − max x)`, in f32."""

    traits = REDUCTION
    operands = "x:float@axis"

    axis: int = -1

    def eval(self, x: Array) -> Array:
        return jax.nn.softmax(x.astype(jnp.float32), axis=self.axis).astype(x.dtype)


@dataclass(frozen=True)
class LogSoftmax(Mir):
    """Log-softmax along `axis`, `x − max x − ln Σ exp(x − max x)`, in f32."""

    traits = REDUCTION
    operands = "x:float@axis"

    axis: int = -1

    def eval(self, x: Array) -> Array:
        return jax.nn.log_softmax(x.astype(jnp.float32), axis=self.axis).astype(x.dtype)


def _cumulate(x: Array, kind: str, axis: int, exclusive: bool, reverse: bool) -> Array:
    """Return the cumulative reduction `kind` of x along `axis`, in the dtype of x.

    Args:
        x: the array.
        kind: a name in `CUMULATIVE`.
        axis: the axis.
        exclusive: entry i excludes x_i.
        reverse: accumulate from the last entry.
    """
    fn, empty_value = CUMULATIVE[kind]
    axis %= x.ndim
    if exclusive:  # shift by one entry, with the value of an empty reduction at the edge
        edge = jnp.full((), _identity(empty_value, x.dtype), x.dtype)
        sides = (0, 1, 0) if reverse else (1, 0, 0)
        shifted = jax.lax.pad(x, edge, [sides if i == axis else (0, 0, 0) for i in range(x.ndim)])
        start = 1 if reverse else 0
        x = jax.lax.slice_in_dim(shifted, start, start + x.shape[axis], axis=axis)
    return fn(x, axis=axis, reverse=reverse)


def _identity(value: float, dtype: np.dtype[Any]) -> Any:
    """Return `value`, or for an infinity and an integer dtype the lowest or highest number of the dtype."""
    if is_float(dtype) or math.isfinite(value):
        return value
    return jnp.iinfo(dtype).min if value < 0 else jnp.iinfo(dtype).max


@dataclass(frozen=True)
class Cumulative(Mir):
    """Cumulative product, maximum or minimum (`prod`, `max`, `min`) of `x₀ … xᵢ` along `axis`.

    `reverse` reduces `xᵢ … xₙ`. `exclusive` excludes `xᵢ`; over no entries the product is 1, the maximum the lowest
    number of the dtype (−∞ for floats), the minimum the highest. See `Cumsum` for sums.
    """

    traits = REDUCTION
    choices = {"kind": ("prod", "max", "min")}
    operands = "x:num@axis"
    notation = "cum{kind}(axis={axis}{exclusive?,excl}{reverse?,reverse})"

    kind: str
    axis: int = -1
    exclusive: bool = False
    reverse: bool = False

    def eval(self, x: Array) -> Array:
        return _cumulate(x, self.kind, self.axis, self.exclusive, self.reverse)


@dataclass(frozen=True)
class Cumsum(Mir):
    """Cumulative sum `x₀ + … + xᵢ` along `axis`; floats are summed in f32.

    `exclusive` excludes `xᵢ`, so that the first result is 0. `reverse` sums `xᵢ + … + xₙ`.
    """

    traits = REDUCTION
    operands = "x:num@axis"
    notation = "cumsum(axis={axis}{exclusive?,excl}{reverse?,reverse})"

    axis: int = -1
    exclusive: bool = False
    reverse: bool = False

    def eval(self, x: Array) -> Array:
        values = x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
        return _cumulate(values, "sum", self.axis, self.exclusive, self.reverse).astype(x.dtype)
