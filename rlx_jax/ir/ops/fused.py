"""Fused ops, which represent several ops as one node.

`eval` is the composition of ops that defines the meaning; XLA decides which kernels to fuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import ShapeError, wrong_arity
from rlx_jax.ir.graph import Mir, TypeCache
from rlx_jax.ir.operands import ELEMENTWISE, NORM, Types, named_operands, product_traits
from rlx_jax.ir.ops.attention import AttentionOp, RopeOp
from rlx_jax.ir.ops.linalg import MatMul, check_linear, product_text
from rlx_jax.ir.ops.pointwise import UNARY, same_rank
from rlx_jax.ir.ops.reduce import LayerNormOp, RmsNormOp, check_norm
from rlx_jax.ir.ops.shape import AxisOf, Reshape, SplitLast
from rlx_jax.ir.types import TensorType

Array = jax.Array


@dataclass(frozen=True)
class FusedMatMulBiasAct(Mir):
    """Matrix product with bias and activation, `act(x · w + b)`.

    The product is a `MatMul`; b is `[N]` in the product's dtype; `activation` is a name in `UNARY`, or "" for none.
    """

    traits = product_traits(lambda op, operands, results: MatMul.traits.flops(op.product, operands, results))

    choices = {"activation": ("", *UNARY)}

    contract: int = 0
    activation: str = ""
    precision: str = "default"
    f32_result: bool = False

    @property
    def product(self) -> MatMul:
        """The op of the product without bias and activation."""
        return MatMul(self.contract, self.precision, self.f32_result)

    def check(self, *operands: TensorType) -> None:
        check_linear("linear", operands, self.contract, self.f32_result)

    def eval(self, x: Array, w: Array, b: Array) -> Array:
        return self.finish(self.product.eval(x, w), b)

    def finish(self, y: Array, b: Array) -> Array:
        """Return the result from the product `y`: add the bias and apply the activation."""
        y = jnp.add(*same_rank(y, b))
        return UNARY[self.activation](y) if self.activation else y

    def text(self) -> str:
        name = "fused_mm_bias" + (f"_{self.activation}" if self.activation else "")
        return product_text(name, self.contract, self.precision, self.f32_result)


@dataclass(frozen=True)
class FusedSwiGLU(Mir):
    """Gated activation of one fused operand, `act(gate) ⊙ up`: `[…, 2F]` → `[…, F]` (Shazeer 2020).

    The operand is gate ‖ up, or up ‖ gate without `gate_first`; `activation` is a name in `UNARY`.
    """

    traits = replace(ELEMENTWISE, widens=False)

    choices = {"activation": UNARY}
    operands = "x[…,W!]"

    gate_first: bool = True
    activation: str = "silu"

    def check(self, x: TensorType) -> None:
        if x.shape[-1] % 2:
            raise ShapeError(f"fused_swiglu: the last axis is two halves, of even static size; got {x}")

    def eval(self, x: Array) -> Array:
        low, high = jnp.split(x, 2, axis=-1)  # the gradient of a split is a concatenation
        gate, up = (low, high) if self.gate_first else (high, low)
        return UNARY[self.activation](gate) * up

    def text(self) -> str:
        activation = f", activation={self.activation}" if self.activation != "silu" else ""
        return f"fused_swiglu(gate_first={str(self.gate_first).lower()}{activation})"


# Common operands of the fused norms, in the notation of `rlx_jax.ir.operands`.
RESIDUAL = "x:float[…L] residual:x[…L] bias?has_bias:x gamma:x"


def _residual_sum(has_bias: bool, operands: Sequence[Array]) -> tuple[Array, ...]:
    """Return the sum x [+ bias] + residual, followed by the weights of the norm."""
    x, residual, *weights = operands
    if has_bias:
        x = jnp.add(*same_rank(x, weights.pop(0)))
    return (x + residual, *weights)


@dataclass(frozen=True)
class FusedResidualLayerNorm(Mir):
    """LayerNorm of a residual sum, `layer_norm(x [+ bias] + residual; γ, β)`.

    x and residual are `[…, H]`; bias (with `has_bias`), γ and β are `[H]`.
    """

    traits = NORM
    operands = f"{RESIDUAL} beta:x"
    notation = "fused_residual{has_bias?_bias}_ln(eps={eps})"

    eps: float
    has_bias: bool = False

    def check(self, *operands: TensorType) -> None:
        check_norm("fused_residual_ln", operands[0], operands[2:], 2)

    def eval(self, *arrays: Array) -> Array:
        return LayerNormOp(self.eps).eval(*_residual_sum(self.has_bias, arrays))


@dataclass(frozen=True)
class FusedResidualRmsNorm(Mir):
    """RMSNorm of a residual sum, `rms_norm(x [+ bias] + residual; γ[, β])`.

    x and residual are `[…, H]`; bias (with `has_bias`), γ and β are `[H]`; `offset` is added to γ.
    """

    traits = NORM
    operands = f"{RESIDUAL} beta?:x"
    notation = "fused_residual{has_bias?_bias}_rms(eps={eps}{offset?, offset=*})"

    eps: float
    has_bias: bool = False
    offset: float = 0.0

    def check(self, *operands: TensorType) -> None:
        check_norm("fused_residual_rms", operands[0], operands[2:], 2)

    def eval(self, *arrays: Array) -> Array:
        return RmsNormOp(self.eps, self.offset).eval(*_residual_sum(self.has_bias, arrays))


@dataclass(frozen=True)
class FusedRmsNormReshape(Mir):
    """RMSNorm with its leading axes merged into one, `reshape(rms_norm(x; γ[, β]))`: `[…, H]` → `[∏…, H]`.

    γ and β are `[H]`; `offset` is added to γ.
    """

    traits = NORM
    operands = RmsNormOp.operands
    notation = "fused_rms_reshape(eps={eps}{offset?, offset=*})"

    eps: float
    offset: float = 0.0

    def check(self, *operands: TensorType) -> None:
        check_norm("fused_rms_reshape", operands[0], operands[1:])

    def eval(self, *arrays: Array) -> Array:
        y = RmsNormOp(self.eps, self.offset).eval(*arrays)
        return Reshape((-1, AxisOf(y.ndim - 1))).eval(y)


@dataclass(frozen=True)
class Step:
    """One pointwise op of a region. Operand `i` is operand `i` of the region, or for `i ≥ inputs` step `i − inputs`."""

    op: Mir
    operands: tuple[int, ...]


@dataclass(frozen=True)
class ElementwiseRegion(Mir):
    """Run a chain of pointwise ops as one node: `steps` in order over `inputs` operands.

    The result of the last step is the result of the op.
    """

    traits = replace(ELEMENTWISE, widens=False)

    inputs: int
    steps: tuple[Step, ...]

    def infer(self, types: TypeCache, *operands: TensorType) -> tuple[TensorType, ...]:
        if len(operands) != self.inputs:
            raise wrong_arity("ew_region", str(self.inputs), len(operands))
        values = list(operands)  # the operands of the region, then the results of its steps
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


def _layer_flops(op: Any, operands: Types, results: Types) -> int:
    """Return the FLOPs: a product with every weight matrix for each token, and scores and sums over all keys."""
    hidden, by_name = operands[0], named_operands(op, operands)
    tokens = int(hidden.shape[0]) * int(hidden.shape[1])
    matrix_flops = sum(2 * tokens * t.size for name, t in by_name.items() if name.endswith("_w"))
    return int(matrix_flops) + 4 * tokens * int(hidden.shape[1]) * int(op.heads) * int(op.head_dim)


def _product(x: Array, w: Array, b: Array | None) -> Array:
    """Return `x · w`, plus the bias b if there is one."""
    return MatMul().eval(x, w) if b is None else FusedMatMulBiasAct().eval(x, w, b)


@dataclass(frozen=True)
class FusedAttentionBlock(Mir):
    """Bidirectional attention with its projections: `attn(rope(q), rope(k), v; mask) · out_w (+ out_b)`.

    q ‖ k ‖ v = hidden · qkv_w (+ qkv_b). Operands: hidden `[B,S,H]`, qkv_w `[H, 3·N·D]`, out_w `[N·D, H]`, mask
    `[B,S]` (1 keeps a key, less than ½ drops it); with `has_bias` qkv_b `[3·N·D]` and out_b `[H]`; with `has_rope` cos
    and sin `[B|1,S,D/2]`. The op computes in the dtype of its operands; mixed precision does not change it.
    """

    traits = replace(product_traits(_layer_flops), narrows=0, pinned=False)
    operands = (
        "hidden[B,S,H] qkv_w[H,qkv] out_w[width,H] mask[B,S] qkv_b?has_bias[qkv] out_b?has_bias[H] "
        "cos?has_rope[_,S,R!] sin?has_rope[_,S,R!]"
    )
    notation = "fused_attn(h={heads},d={head_dim}{has_bias?,bias}{has_rope?,rope})"

    heads: int
    head_dim: int
    has_bias: bool = False
    has_rope: bool = False

    @property
    def width(self) -> int:
        """Width of all heads, N·D."""
        return self.heads * self.head_dim

    @property
    def qkv(self) -> int:
        """Width of the fused projection of q, k and v, 3·N·D."""
        return 3 * self.width

    def check(self, *operands: TensorType) -> None:
        x = operands[0]
        if self.has_rope:
            RopeOp(self.head_dim, self.head_dim).check(TensorType((*x.shape[:2], self.width), x.dtype), *operands[-2:])

    def eval(self, *arrays: Array) -> Array:
        a = named_operands(self, arrays)
        q, k, v = SplitLast((self.width,) * 3).eval(_product(a["hidden"], a["qkv_w"], a.get("qkv_b")))
        if self.has_rope:
            q, k = (RopeOp(self.head_dim, self.head_dim).eval(x, a["cos"], a["sin"]) for x in (q, k))
        context = AttentionOp(self.heads, self.heads, extra=("keep",)).eval(q, k, v, a["mask"])
        return _product(context, a["out_w"], a.get("out_b"))


@dataclass(frozen=True)
class FusedTransformerLayer(Mir):
    """BERT's post-norm layer (Devlin et al. 2018): `a = ln₁(x + attn(x))`, `y = ln₂(a + act(a·fc1 + b₁)·fc2 + b₂)`.

    Operands with `has_bias`: hidden `[B,S,H]`, qkv_w `[H, 3·N·D]`, qkv_b, out_w `[N·D, H]`, out_b, ln1_g, ln1_b `[H]`,
    fc1_w `[H, F]`, fc1_b, fc2_w `[F, H]`, fc2_b, ln2_g, ln2_b `[H]`, mask `[B,S]` as in `FusedAttentionBlock`. Without
    `has_bias` the four biases of the products are absent, which leaves ten operands. The op computes in the dtype of
    its operands.
    """

    traits = replace(product_traits(_layer_flops), narrows=0, pinned=False)

    heads: int
    head_dim: int
    intermediate: int
    eps1: float = 1e-12
    eps2: float = 1e-12
    activation: str = "gelu"
    has_bias: bool = False

    choices = {"activation": UNARY}
    operands = (
        "hidden[B,S,H] qkv_w[H,qkv] qkv_b?has_bias[qkv] out_w[width,H] out_b?has_bias[H] ln1_g[H] ln1_b[H] "
        "fc1_w[H,intermediate] fc1_b?has_bias[intermediate] fc2_w[intermediate,H] fc2_b?has_bias[H] ln2_g[H] ln2_b[H] "
        "mask[B,S]"
    )
    notation = "fused_layer(h={heads},d={head_dim},int={intermediate}{has_bias?,bias})"
    # Sizes in the declaration of the operands above.
    qkv, width = FusedAttentionBlock.qkv, FusedAttentionBlock.width

    def eval(self, *arrays: Array) -> Array:
        a = named_operands(self, arrays)
        attend = FusedAttentionBlock(self.heads, self.head_dim, self.has_bias)
        biases = (a["qkv_b"], a["out_b"]) if self.has_bias else ()
        context = attend.eval(a["hidden"], a["qkv_w"], a["out_w"], a["mask"], *biases)
        attended = FusedResidualLayerNorm(self.eps1).eval(context, a["hidden"], a["ln1_g"], a["ln1_b"])
        inner = UNARY[self.activation](_product(attended, a["fc1_w"], a.get("fc1_b")))
        outer = _product(inner, a["fc2_w"], a.get("fc2_b"))
        return FusedResidualLayerNorm(self.eps2).eval(outer, attended, a["ln2_g"], a["ln2_b"])
