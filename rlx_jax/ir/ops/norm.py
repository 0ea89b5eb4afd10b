"""Norms: RMSNorm, LayerNorm, and standardization without weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array, lax

from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import GraphError, ShapeError
from rlx_jax.ir.graph import Mir
from rlx_jax.ir.operands import NORM
from rlx_jax.ir.ops.pointwise import same_rank
from rlx_jax.ir.types import TensorType


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
