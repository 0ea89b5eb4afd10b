"""Fused ops: several ops as one node. `eval` is the composition that defines the op; fusing kernels is XLA's work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from rlx_jax.errors import GraphError, ShapeError, did_you_mean, quote, wrong_arity
from rlx_jax.ir.graph import Mir, TypeCache
from rlx_jax.ir.ops.linalg import MatMul, check_linear, product_text
from rlx_jax.ir.ops.norm import LayerNormOp, RmsNormOp, check_norm
from rlx_jax.ir.ops.pointwise import UNARY, same_rank
from rlx_jax.ir.traits import ELEMENTWISE, NORM, product_traits
from rlx_jax.ir.types import TensorType, is_static

Array = jax.Array


def _check_activation(op: str, activation: str) -> None:
    if activation and activation not in UNARY:
        raise GraphError(f"{op}: unknown activation {quote(activation)}{did_you_mean(activation, UNARY)}")


@dataclass(frozen=True)
class FusedMatMulBiasAct(Mir):
    """`act(x · w + b)`: a `MatMul`, a bias `[N]` in the dtype of the product, an activation from `UNARY` ("": none)."""

    traits = product_traits(lambda op, operands, results: MatMul.traits.flops(op.product, operands, results))

    contract: int = 0
    activation: str = ""
    precision: str = "default"
    f32_result: bool = False

    @property
    def product(self) -> MatMul:
        """The product alone."""
        return MatMul(self.contract, self.precision, self.f32_result)

    def check(self, *operands: TensorType) -> None:
        _check_activation("linear", self.activation)
        check_linear("linear", operands, self.contract, self.f32_result)

    def eval(self, x: Array, w: Array, b: Array) -> Array:
        return self.finish(self.product.eval(x, w), b)

    def finish(self, y: Array, b: Array) -> Array:
        """The op from its product on."""
        y = jnp.add(*same_rank(y, b))
        return UNARY[self.activation](y) if self.activation else y

    def text(self) -> str:
        name = "fused_mm_bias" + (f"_{self.activation}" if self.activation else "")
        return product_text(name, self.contract, self.precision, self.f32_result)


@dataclass(frozen=True)
class FusedSwiGLU(Mir):
    """`act(gate) ⊙ up` from one operand `[…, 2F]` → `[…, F]` (Shazeer 2020).

    The operand is gate ‖ up, or up ‖ gate where not `gate_first`; `activation` is a name in `UNARY`.
    """

    traits = replace(ELEMENTWISE, widens=False)

    gate_first: bool = True
    activation: str = "silu"

    def check(self, *operands: TensorType) -> None:
        (x,) = operands
        _check_activation("fused_swiglu", self.activation)
        if not x.rank or not is_static(x.shape[-1]) or x.shape[-1] % 2:
            raise ShapeError(f"fused_swiglu: the last axis is two halves, of even static size; got {x}")

    def eval(self, x: Array) -> Array:
        low, high = jnp.split(x, 2, axis=-1)  # a gradient joins what was split; slices it pads and adds
        gate, up = (low, high) if self.gate_first else (high, low)
        return UNARY[self.activation](gate) * up

    def text(self) -> str:
        activation = f", activation={self.activation}" if self.activation != "silu" else ""
        return f"fused_swiglu(gate_first={str(self.gate_first).lower()}{activation})"


def _check_residual(op: str, operands: Sequence[TensorType]) -> None:
    x, residual, *weights = operands
    if residual != x:
        raise ShapeError(f"{op}: x and its residual have one type; got {x} and {residual}")
    check_norm(op, x, weights, 2)


def _residual_sum(has_bias: bool, operands: Sequence[Array]) -> tuple[Array, ...]:
    """x [+ bias] + residual, then the weights of the norm."""
    x, residual, *weights = operands
    if has_bias:
        x = jnp.add(*same_rank(x, weights.pop(0)))
    return (x + residual, *weights)


@dataclass(frozen=True)
class FusedResidualLayerNorm(Mir):
    """`layer_norm(x [+ bias] + residual; γ, β)`. x and residual `[…, H]`; bias (where `has_bias`), γ, β `[H]`."""

    traits = NORM

    eps: float
    has_bias: bool = False

    def check(self, *operands: TensorType) -> None:
        if len(operands) != 4 + self.has_bias:
            raise wrong_arity("fused_residual_ln", str(4 + self.has_bias), len(operands))
        _check_residual("fused_residual_ln", operands)

    def eval(self, *arrays: Array) -> Array:
        return LayerNormOp(self.eps).eval(*_residual_sum(self.has_bias, arrays))

    def text(self) -> str:
        return f"fused_residual{'_bias' if self.has_bias else ''}_ln(eps={self.eps:g})"


@dataclass(frozen=True)
class FusedResidualRmsNorm(Mir):
    """`rms_norm(x [+ bias] + residual; γ[, β])`. x and residual `[…, H]`; bias (where `has_bias`), γ, β `[H]`."""

    traits = NORM

    eps: float
    has_bias: bool = False
    offset: float = 0.0

    def check(self, *operands: TensorType) -> None:
        if len(operands) - self.has_bias not in (3, 4):
            raise wrong_arity("fused_residual_rms", f"{3 + self.has_bias} or {4 + self.has_bias}", len(operands))
        _check_residual("fused_residual_rms", operands)

    def eval(self, *arrays: Array) -> Array:
        return RmsNormOp(self.eps, self.offset).eval(*_residual_sum(self.has_bias, arrays))

    def text(self) -> str:
        offset = f", offset={self.offset:g}" if self.offset else ""
        return f"fused_residual{'_bias' if self.has_bias else ''}_rms(eps={self.eps:g}{offset})"


@dataclass(frozen=True)
class Step:
    """One pointwise op of a region. Operand `i` is operand `i` of the region, or step `i − inputs` from there on."""

    op: Mir
    operands: tuple[int, ...]


@dataclass(frozen=True)
class ElementwiseRegion(Mir):
    """A chain of pointwise ops as one: step after step over `inputs` operands; the result is the last step's."""

    traits = replace(ELEMENTWISE, widens=False)

    inputs: int
    steps: tuple[Step, ...]

    def infer(self, types: TypeCache, *operands: TensorType) -> tuple[TensorType, ...]:
        if len(operands) != self.inputs:
            raise wrong_arity("ew_region", str(self.inputs), len(operands))
        values = list(operands)
        for step in self.steps:
            values += types.infer(step.op, tuple(values[i] for i in step.operands))
        return (values[-1],)

    def eval(self, *arrays: Array) -> Array:
        values = list(arrays)
        for step in self.steps:
            values.append(step.op.eval(*(values[i] for i in step.operands)))
        return values[-1]

    def text(self) -> str:
        return f"ew_region(in={self.inputs}, steps={len(self.steps)}: {' '.join(s.op.text() for s in self.steps)})"
