"""Matrix products and norms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from rlx_jax.errors import DTypeError, ShapeError
from rlx_jax.ir.graph import Mir
from rlx_jax.ir.ops.pointwise import same_rank
from rlx_jax.ir.types import TensorType, is_float

Array = jax.Array


def check_product(op: str, x: TensorType, w: TensorType, contract: int) -> None:
    """The checks of `x · w` where axis `contract` (0 or 1) of `w` is summed over."""
    if w.rank != 2 or x.rank < 1:
        raise ShapeError(f"{op}: the weight has rank 2, got {w}, and x at least 1, got {x}")
    if x.shape[-1] != w.shape[contract]:
        raise ShapeError(f"{op}: last axis of x {x} is {x.shape[-1]}, axis {contract} of w {w} is {w.shape[contract]}")
    if x.dtype != w.dtype:
        raise DTypeError(f"{op}: x is {x}, w is {w}; cast one of them")


def product_text(name: str, contract: int, precision: str, f32_result: bool) -> str:
    """How dumps print a product: what is not at its default."""
    notes = [f"contract={contract}"] if contract else []
    notes += [f"precision={precision}"] if precision != "default" else []
    notes += ["f32"] if f32_result else []
    return f"{name}({', '.join(notes)})" if notes else name


@dataclass(frozen=True)
class MatMul(Mir):
    """`x · w` with a rank-2 `w`: x `[…, K]`; w `[K, N]` (`contract=0`) or `[N, K]` (`contract=1`) → `[…, N]`.

    The orientation is the Layout's choice. `precision` pins the algorithm of this one product
    ("default", "high", "highest"), whatever jax's global configuration says.
    """

    contract: int = 0
    precision: str = "default"
    f32_result: bool = False

    def check(self, *operands: TensorType) -> None:
        x, w = operands
        check_product("matmul", x, w, self.contract)

    def eval(self, x: Array, w: Array) -> Array:
        dims = (((x.ndim - 1,), (self.contract,)), ((), ()))
        dtype = jnp.float32 if self.f32_result else x.dtype
        return lax.dot_general(x, w, dims, precision=lax.Precision(self.precision), preferred_element_type=dtype)

    def flops(self, operands: Sequence[TensorType], results: Sequence[TensorType]) -> int:
        return 2 * results[0].size * int(operands[0].shape[-1])

    def text(self) -> str:
        return product_text("matmul", self.contract, self.precision, self.f32_result)


@dataclass(frozen=True)
class BatchMatMul(Mir):
    """NumPy's `a @ b`: `[…, M, K] × […, K, N]`, leading axes broadcast."""

    precision: str = "default"

    def check(self, *operands: TensorType) -> None:
        a, b = operands
        if a.dtype != b.dtype:
            raise DTypeError(f"matmul: operands are {a} and {b}; cast one of them")
        if min(a.rank, b.rank) < 1 or a.shape[-1] != b.shape[-2 if b.rank > 1 else 0]:
            raise ShapeError(f"matmul: the inner axes of {a} and {b} differ")

    def eval(self, a: Array, b: Array) -> Array:
        if min(a.ndim, b.ndim) > 1:
            a, b = same_rank(a, b)
        return jnp.matmul(a, b, precision=lax.Precision(self.precision))

    def flops(self, operands: Sequence[TensorType], results: Sequence[TensorType]) -> int:
        return 2 * results[0].size * int(operands[0].shape[-1])


def product(a: TensorType, b: TensorType) -> MatMul | BatchMatMul:
    """The op of `a @ b`: a `MatMul` where `b` is a matrix."""
    return MatMul() if b.rank == 2 and a.rank > 1 else BatchMatMul()


def check_norm(op: str, x: TensorType, scales: Sequence[TensorType]) -> None:
    """The checks of a norm of `x` over its last axis with weights `scales`."""
    if not is_float(x.dtype) or any(scale.dtype != x.dtype for scale in scales):
        raise DTypeError(f"{op}: x and its weights have one floating dtype; got {x} and {', '.join(map(str, scales))}")
    for scale in scales:
        if not 0 < scale.rank <= x.rank or scale.shape != x.shape[-scale.rank :]:
            raise ShapeError(f"{op}: x is {x}, so weights are [{x.shape[-1]}], or its last axes; got {scale}")


@dataclass(frozen=True)
class RmsNormOp(Mir):
    """`x · (mean(x²) + ε)^(−1/2) ⊙ (offset + γ) [+ β]` over the last axis; the statistic is taken in f32.

    γ and β are `[H]`, or as long as the last axes of x (`[N, H]`: weights for each head).

    Rounding, visible in bf16 only, is that of Hugging Face's models. Without an offset (Llama) the normalised value is
    rounded to x's dtype before γ is applied; with one (Gemma: 1) all is in f32, offset + γ too, and rounded once.
    """

    eps: float
    offset: float = 0.0

    def check(self, *operands: TensorType) -> None:
        check_norm("rms_norm", operands[0], operands[1:])

    def eval(self, x: Array, gamma: Array, beta: Array | None = None) -> Array:
        wide = x.astype(jnp.float32)
        normed = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        if self.offset:
            gamma = gamma.astype(jnp.float32) + self.offset
        y = jnp.multiply(*same_rank(normed.astype(gamma.dtype), gamma)).astype(x.dtype)
        return y if beta is None else jnp.add(*same_rank(y, beta))

    @classmethod
    def name(cls) -> str:
        return "rms_norm"


@dataclass(frozen=True)
class LayerNormOp(Mir):
    """`(x − mean x) · (var x + ε)^(−1/2) ⊙ γ + β` over the last axis, biased two-pass variance, in f32."""

    eps: float

    def check(self, *operands: TensorType) -> None:
        check_norm("layer_norm", operands[0], operands[1:])

    def eval(self, x: Array, gamma: Array, beta: Array) -> Array:
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        normed = centred * lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + self.eps)
        gamma, beta = (a.astype(jnp.float32) for a in (gamma, beta))
        return jnp.add(*same_rank(jnp.multiply(*same_rank(normed, gamma)), beta)).astype(x.dtype)

    @classmethod
    def name(cls) -> str:
        return "layer_norm"
