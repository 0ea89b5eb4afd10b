"""Ops along axes: reductions, softmax, norms, and cumulative sums, products, maxima and minima."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import DTypeError, GraphError, ShapeError
from rlx_jax.ir.graph import Mir
from rlx_jax.ir.operands import NORM, REDUCTION
from rlx_jax.ir.ops.pointwise import same_rank
from rlx_jax.ir.types import TensorType, is_float

REDUCE: dict[str, Callable[..., Array]] = {
    # any: some entry is not 0, as bool; all: no entry is 0; var: Σ(x − mean)² / (n − ddof); std: √var
    **{name: getattr(jnp, name) for name in ("sum", "mean", "max", "min", "prod", "any", "all", "var", "std")},
    "logsumexp": jax.nn.logsumexp,  # ln Σ eˣ
}

# Cumulative reductions by name, and the value of each over no entries.
CUMULATIVE: dict[str, tuple[Callable[..., Array], float]] = {
    "sum": (lax.cumsum, 0.0),
    "prod": (lax.cumprod, 1.0),
    "max": (lax.cummax, -math.inf),
    "min": (lax.cummin, math.inf),
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
        shifted = lax.pad(x, edge, [sides if i == axis else (0, 0, 0) for i in range(x.ndim)])
        start = 1 if reverse else 0
        x = lax.slice_in_dim(shifted, start, start + x.shape[axis], axis=axis)
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


def check_norm(op: str, x: TensorType, scales: Sequence[TensorType], first: int = 1) -> None:
    """Check the weights of a norm of `x` over its last axis.

    Args:
        op: name of the op, for messages.
        x: type of the normalised value.
        scales: types of the weights, `[H]` or the last axes of x.
        first: index of the first weight among the operands.

    Raises:
        ShapeError: a weight has another shape.
    """
    for operand_index, scale in enumerate(scales, first):
        if not 0 < scale.rank <= x.rank or scale.shape != x.shape[-scale.rank :]:
            raise ShapeError(
                f"{op}: x is {x}, so weights are [{x.shape[-1]}], or its last axes; got {scale}"
            ).at_operands(operand_index)


@dataclass(frozen=True)
class RmsNormOp(Mir):
    """RMSNorm over the last axis: `x · (mean(x²) + ε)^(−1/2) ⊙ (offset + γ) [+ β]`, with the mean in f32.

    γ and β are `[H]`, or have the shape of the last axes of x (`[N, H]`: weights for each head).

    Rounding follows Hugging Face's models, which matters in bf16 only. Without an offset (Llama) the normalised value
    is rounded to the dtype of x before γ is applied. With an offset (Gemma: 1) everything is f32, offset + γ too, and
    is rounded once.
    """

    traits = NORM
    operands = "x:float gamma:x beta?:x"

    eps: float
    offset: float = 0.0

    def check(self, *operands: TensorType) -> None:
        check_norm("rms_norm", operands[0], operands[1:])

    def eval(self, x: Array, gamma: Array, beta: Array | None = None) -> Array:
        x_f32 = x.astype(jnp.float32)
        normed = x_f32 * lax.rsqrt(jnp.mean(x_f32 * x_f32, axis=-1, keepdims=True) + self.eps)
        if self.offset:  # f32 weights make the product below f32, which is then rounded once
            gamma = gamma.astype(jnp.float32) + self.offset
        y = jnp.multiply(*same_rank(normed.astype(gamma.dtype), gamma)).astype(x.dtype)
        return y if beta is None else jnp.add(*same_rank(y, beta))

    @classmethod
    def name(cls) -> str:
        return "rms_norm"


@dataclass(frozen=True)
class LayerNormOp(Mir):
    """LayerNorm over the last axis: `(x − mean x) · (var x + ε)^(−1/2) [⊙ γ] [+ β]`, biased two-pass variance, in f32.

    Operands: x, then γ if `scaled`, then β if `shifted`. Both are `[H]`, or have the shape of the last axes of x.
    """

    traits = NORM
    operands = "x:float gamma?scaled:x beta?shifted:x"

    eps: float
    scaled: bool = True
    shifted: bool = True

    def check(self, *operands: TensorType) -> None:
        check_norm("layer_norm", operands[0], operands[1:])

    def eval(self, x: Array, *weights: Array) -> Array:
        x_f32 = x.astype(jnp.float32)
        centred = x_f32 - jnp.mean(x_f32, axis=-1, keepdims=True)
        # Two passes: E[x²] − E[x]² would lose digits where the mean is large.
        y = centred * lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + self.eps)
        f32_weights = [w.astype(jnp.float32) for w in weights]
        y = jnp.multiply(*same_rank(y, f32_weights[0])) if self.scaled else y
        return (jnp.add(*same_rank(y, f32_weights[-1])) if self.shifted else y).astype(x.dtype)

    @classmethod
    def name(cls) -> str:
        return "layer_norm"


@dataclass(frozen=True)
class Standardize(Mir):
    """Standardize over `axes`, a norm without weights: `(x − mean x) · (var x + ε)^(−1/2)`, biased variance, in f32.

    The variance takes two passes. Without `centre` the mean is not subtracted: `x · (mean(x²) + ε)^(−1/2)`.
    """

    traits = NORM
    operands = "x:float@axes"

    axes: tuple[int, ...]
    eps: float
    centre: bool = True

    def check(self, x: TensorType) -> None:
        if not self.axes:
            raise ShapeError(f"standardize: expected at least one axis of {x}, got none")
        if not math.isfinite(self.eps) or self.eps < 0:
            raise GraphError(f"standardize: epsilon is a number of at least 0, got {self.eps}")

    def eval(self, x: Array) -> Array:
        x_f32 = x.astype(jnp.float32)
        if self.centre:
            x_f32 = x_f32 - jnp.mean(x_f32, axis=self.axes, keepdims=True)
        scale = lax.rsqrt(jnp.mean(x_f32 * x_f32, axis=self.axes, keepdims=True) + self.eps)
        return (x_f32 * scale).astype(x.dtype)
