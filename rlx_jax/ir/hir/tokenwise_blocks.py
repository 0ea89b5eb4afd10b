"""Token-wise blocks, which process each token independently: linear layers, norms, embedding and mixture of experts."""

from __future__ import annotations

import numpy as np

from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import ShapeError
from rlx_jax.ir.graph import Builder, Hir, Value, constant
from rlx_jax.ir.operands import BLOCK, TABLES, Initial, Normal
from rlx_jax.ir.ops.experts import ExpertAttributes
from rlx_jax.ir.ops.index import Gather, TakeAlongAxis, TopK
from rlx_jax.ir.ops.linalg import Einsum, MatMul, check_linear
from rlx_jax.ir.ops.pointwise import UNARY, Binary, Compare, Unary, Where, in_dtype
from rlx_jax.ir.ops.reduce import LayerNormOp, Reduce, RmsNormOp, Softmax
from rlx_jax.ir.ops.shape import AxisOf, Reshape, SplitLast
from rlx_jax.ir.types import F32, TensorType


@dataclass(frozen=True)
class Linear(Hir):
    """Linear layer `act(x · w [+ b])`.

    x `[…, in]`; w `[in, out]` (`contract=0`) or `[out, in]` (`contract=1`); b `[out]`.
    """

    traits = BLOCK
    choices = {"activation": ("", *UNARY)}
    operands = "x w b?bias"

    contract: int = 0
    bias: bool = False
    activation: str = ""
    f32_result: bool = False

    def check(self, *operands: TensorType) -> None:
        check_linear("linear", operands, self.contract, self.f32_result)

    def expand(self, b: Builder, x: Value, w: Value, *bias: Value) -> Value:
        y = b(MatMul(self.contract, f32_result=self.f32_result), x, w)
        y = b(Binary("add"), y, *bias) if bias else y
        return b(Unary(self.activation), y) if self.activation else y

    def initial(self, operand_index: int, weight: TensorType) -> Initial:
        """Return 0 for the bias and a normal distribution with fan-in scaling for the matrix."""
        if operand_index == 2:
            return 0.0
        return 1.0 if weight.rank < 2 else Normal(int(weight.shape[self.contract]))

    def text(self) -> str:
        act = f"+{self.activation}" if self.activation else ""
        return f"linear{'+bias' if self.bias else ''}{act}"


@dataclass(frozen=True)
class Split(Hir):
    """Split the last axis into consecutive `sizes`: the separate outputs of several fused `Linear` blocks.

    With `shards` the axis consists of that many equal shards, and each of them is split in the proportion of `sizes`,
    so that the shard of a device contains exactly its shards of all results.
    """

    traits = BLOCK
    operands = "x"

    sizes: tuple[int, ...]
    shards: int = 1

    def check(self, *operands: TensorType) -> None:
        if self.shards < 1 or any(size % self.shards for size in self.sizes):
            raise ShapeError(f"split: {self.shards} shards have no equal part of each of {list(self.sizes)}")

    def expand(self, b: Builder, x: Value) -> tuple[Value, ...]:
        if self.shards == 1:
            return b.add(SplitLast(self.sizes), x)
        shard_sizes = tuple(size // self.shards for size in self.sizes)
        leading_axes = tuple(AxisOf(axis) for axis in range(b.type(x).rank - 1))
        split_parts = b.add(SplitLast(shard_sizes), b(Reshape((*leading_axes, self.shards, sum(shard_sizes))), x))
        pairs = zip(self.sizes, split_parts, strict=True)
        return tuple(b(Reshape((*leading_axes, size)), part) for size, part in pairs)


@dataclass(frozen=True)
class GatedFfn(Hir):
    """`act(gate) ⊙ up`: the gate of SwiGLU (silu) and GeGLU (gelu_tanh). gate and up `[…, F]`."""

    traits = BLOCK
    choices = {"activation": UNARY}
    operands = "gate up"

    activation: str = "silu"

    def expand(self, b: Builder, gate: Value, up: Value) -> Value:
        return b(Binary("mul"), b(Unary(self.activation), gate), up)


@dataclass(frozen=True)
class RmsNorm(Hir):
    """RMS norm `x · (mean(x²) + ε)^(−1/2) ⊙ (offset + γ) [+ β]`. x `[…, H]`, γ and β `[H]`.

    The offset is 1 in Gemma.
    """

    traits = BLOCK
    operands = RmsNormOp.operands

    eps: float
    offset: float = 0.0

    def expand(self, b: Builder, *operands: Value) -> Value:
        return b(RmsNormOp(self.eps, self.offset), *operands)

    def initial(self, operand_index: int, weight: TensorType) -> Initial:
        """Return 0 for β, and for γ the value that makes `offset + γ` 1."""
        return 0.0 if operand_index == 2 else 1.0 - self.offset


@dataclass(frozen=True)
class LayerNorm(Hir):
    """Layer norm `(x − mean x)(var x + ε)^(−1/2) [⊙ γ] [+ β]`. x `[…, H]`, γ and β `[H]`. See `LayerNormOp`."""

    traits = BLOCK
    operands = LayerNormOp.operands

    eps: float
    scaled: bool = True
    shifted: bool = True

    def expand(self, b: Builder, *operands: Value) -> Value:
        return b(LayerNormOp(self.eps, self.scaled, self.shifted), *operands)

    def initial(self, operand_index: int, weight: TensorType) -> Initial:
        """Return 0 for β and 1 for γ."""
        return 0.0 if operand_index == 1 + self.scaled else super().initial(operand_index, weight)


@dataclass(frozen=True)
class Embed(Hir):
    """Embedding look-up `E[ids]`: E `[V, H]`, ids `[…]` integers in `[0, V)` → `[…, H]`."""

    traits = BLOCK
    ids = (1, 0, 0)

    def expand(self, b: Builder, *operands: Value) -> Value:
        return b(Gather(), *operands)


SCORES = ("softmax", "sigmoid", "chosen")


@dataclass(frozen=True)
class Route(Hir):
    """The router of a mixture of experts: the `top_k` experts of each token, best first, and their weights, in f32.

    Operands: logits `[…, E]`, and with `biased` a bias `[E]` that is added to the scores for the selection of experts
    only. Results: weights `[…, k]` f32, ids `[…, k]` i32. Among equal scores the expert with the lower id wins.

    `scores` are "softmax" over all logits, their "sigmoid", or for "chosen" the logits themselves, with a softmax over
    the selected ones. With `normalise` the weights of a token are divided by their sum. Finally they are multiplied by
    `scale`. Sources: Mixtral of Experts (2024), DeepSeek-V3 (2024).
    """

    traits = TABLES
    choices = {"scores": SCORES}
    operands = "logits:float[…,E!] bias?biased:float[E]"

    top_k: int
    scores: str = "softmax"
    normalise: bool = True
    scale: float = 1.0
    biased: bool = False

    def check(self, logits: TensorType, *bias: TensorType) -> None:
        if not 1 <= self.top_k <= logits.shape[-1]:
            raise ShapeError(f"route: top_k is between 1 and the last axis of the logits {logits}, got {self.top_k}")

    def expand(self, b: Builder, *operands: Value) -> tuple[Value, ...]:
        f32_operands = [in_dtype(b, v, F32) for v in operands]
        # A softmax over all, divided by its sum over the selected ones, is the softmax over the selected ones.
        over_selected = self.scores == "chosen" or (self.scores == "softmax" and self.normalise and not self.biased)
        kinds = {"softmax": Softmax(-1), "sigmoid": Unary("sigmoid")}
        scores = f32_operands[0] if over_selected else b(kinds[self.scores], f32_operands[0])
        if self.biased:
            _, ids = b.add(TopK(self.top_k), b(Binary("add"), scores, f32_operands[1]))
            weights = b(TakeAlongAxis(b.type(ids).rank - 1, "clip"), scores, ids)
        else:
            weights, ids = b.add(TopK(self.top_k), scores)
        if over_selected:
            weights = b(Softmax(-1), weights)
        elif self.normalise:
            total = b(Reduce("sum", (b.type(weights).rank - 1,), keepdims=True), weights)
            if self.scores == "sigmoid":  # all of them may underflow to 0, unlike a softmax
                total = b(Binary("add"), total, b.scalar(1e-20, total))
            weights = b(Binary("div"), weights, total)
        if self.scale != 1.0:
            weights = b(Binary("mul"), weights, b.scalar(self.scale, weights))
        return weights, ids

    def initial(self, operand_index: int, weight: TensorType) -> Initial:
        """Return 0 for the bias."""
        return 0.0


@dataclass(frozen=True)
class Experts(ExpertAttributes, Hir):
    """The experts of a mixture: `Σⱼ weightsⱼ · (act(x Gₑ) ⊙ (x Uₑ)) Dₑ` with e = idsⱼ.

    For operands, result and fields see `ExpertFfn`, the tensor op of the `direct` lowering. `expand` computes every
    expert for every token.
    """

    traits = BLOCK
    notation = "experts({activation})"

    def expand(self, b: Builder, *operands: Value) -> Value:
        x, gate, up, down, weights, ids, *biases = operands
        rank, experts = b.type(x).rank, int(b.type(gate).shape[0])
        in_axes, out_axes = ("efh", "ehf") if self.contract else ("ehf", "efh")
        leading_axes = tuple(AxisOf(axis) for axis in range(rank))
        expert_ids = b.leaf(constant(np.arange(experts), b.type(ids).dtype))
        hits = b(Compare("eq"), b(Reshape((*leading_axes, 1)), ids), expert_ids)
        shares = b(Where(), hits, b(Reshape((*leading_axes, 1)), in_dtype(b, weights, F32)), b.leaf(constant(0.0, F32)))
        share, is_chosen = (b(Reduce(kind, (rank - 1,)), v) for kind, v in (("sum", shares), ("any", hits)))
        gate_bias, up_bias, down_bias = biases or (None, None, None)
        projection, gate_and_up = Einsum(f"...h,{in_axes}->...ef"), ((gate, gate_bias), (up, up_bias))
        inner = self._gated(b, *(_add_bias(b, b(projection, x, w), bias) for w, bias in gate_and_up))
        outputs = _add_bias(b, b(Einsum(f"...ef,{out_axes}->...eh", result=F32), inner, down), down_bias)
        by_expert = Reshape((*leading_axes[:-1], experts, 1))
        weighted = b(Binary("mul"), outputs, b(by_expert, share))
        # A product with weight 0 is not enough: an expert that was not chosen may overflow, and 0 · inf is NaN.
        selected = b(Where(), b(by_expert, is_chosen), weighted, b.leaf(constant(0.0, F32)))
        return in_dtype(b, b(Reduce("sum", (rank - 1,)), selected), b.type(x).dtype)

    def _gated(self, b: Builder, gate: Value, up: Value) -> Value:
        """Return the input of the down projection: the gated product, with clamping if there is a `clamp`."""
        if self.clamp is None:
            return b(GatedFfn(self.activation), gate, up)
        limit, neg_limit, alpha, offset = (
            b.scalar(n, gate) for n in (self.clamp.limit, -self.clamp.limit, self.clamp.alpha, self.clamp.offset)
        )
        activated = b(Unary(self.activation), b(Binary("mul"), b(Binary("min"), gate, limit), alpha))
        clamped_up = b(Binary("max"), b(Binary("min"), up, limit), neg_limit)
        return b(Binary("mul"), b(Binary("div"), activated, alpha), b(Binary("add"), clamped_up, offset))


def _add_bias(b: Builder, product: Value, bias: Value | None) -> Value:
    """Return a product plus its bias, if there is one, in the product's dtype."""
    return product if bias is None else b(Binary("add"), product, in_dtype(b, bias, b.type(product).dtype))
