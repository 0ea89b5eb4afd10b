"""Blocks that treat every token alone, the mixture of experts among them: where a token goes, and what they compute."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlx_jax.errors import ShapeError
from rlx_jax.ir.graph import Builder, Hir, Value, constant
from rlx_jax.ir.ops.experts import ClampedGate, expert_operands, initial_of_expert
from rlx_jax.ir.ops.index import Gather, TakeAlongAxis
from rlx_jax.ir.ops.linalg import Einsum, MatMul, check_linear
from rlx_jax.ir.ops.norm import LayerNormOp, RmsNormOp
from rlx_jax.ir.ops.order import TopK
from rlx_jax.ir.ops.pointwise import UNARY, Binary, Compare, Unary, Where, in_dtype
from rlx_jax.ir.ops.reduce import Reduce, Softmax
from rlx_jax.ir.ops.shape import AxisOf, Reshape, SplitLast
from rlx_jax.ir.traits import BLOCK, TABLES, Initial, Normal
from rlx_jax.ir.types import TensorType


@dataclass(frozen=True)
class Linear(Hir):
    """`act(x · w [+ b])`. x `[…, in]`; w `[in, out]` (`contract=0`) or `[out, in]` (`contract=1`); b `[out]`."""

    traits = BLOCK
    choices = {"activation": ("", *UNARY)}
    operands = "x w b?bias"

    contract: int = 0
    bias: bool = False
    activation: str = ""
    f32_result: bool = False

    def check(self, *operands: TensorType) -> None:
        check_linear("linear", operands, self.contract, self.f32_result)

    def expand(self, b: Builder, *operands: Value) -> Value:
        x, w = operands[:2]
        y = b(MatMul(self.contract, f32_result=self.f32_result), x, w)
        y = b(Binary("add"), y, operands[2]) if self.bias else y
        return b(Unary(self.activation), y) if self.activation else y

    def initial(self, place: int, weight: TensorType) -> Initial:
        """A bias starts at 0, a matrix is normal over its inputs."""
        if place == 2:
            return 0.0
        return 1.0 if weight.rank < 2 else Normal(int(weight.shape[self.contract]))

    def text(self) -> str:
        act = f"+{self.activation}" if self.activation else ""
        return f"linear{'[+bias]' if self.bias else ''}{act}"


@dataclass(frozen=True)
class Split(Hir):
    """Cut the last axis into consecutive `sizes`: what is left of several Linears that were merged.

    With `shards` the axis is so many equal pieces, and each of them is cut in that proportion: what a device has of the
    operand gives what it has of every result.
    """

    traits = BLOCK

    sizes: tuple[int, ...]
    shards: int = 1

    def check(self, *operands: TensorType) -> None:
        if self.shards < 1 or any(size % self.shards for size in self.sizes):
            raise ShapeError(f"split: {self.shards} shards have no equal part of each of {list(self.sizes)}")

    def expand(self, b: Builder, *operands: Value) -> tuple[Value, ...]:
        (x,) = operands
        if self.shards == 1:
            return b.add(SplitLast(self.sizes), x)
        parts = tuple(size // self.shards for size in self.sizes)
        lead = tuple(AxisOf(axis) for axis in range(b.type(x).rank - 1))
        cuts = b.add(SplitLast(parts), b(Reshape((*lead, self.shards, sum(parts))), x))
        return tuple(b(Reshape((*lead, size)), cut) for size, cut in zip(self.sizes, cuts, strict=True))


@dataclass(frozen=True)
class GatedFfn(Hir):
    """`act(gate) ⊙ up`: the middle of SwiGLU (silu) and GeGLU (gelu_tanh). gate and up `[…, F]`."""

    traits = BLOCK
    choices = {"activation": UNARY}
    operands = "gate up"

    activation: str = "silu"

    def expand(self, b: Builder, *operands: Value) -> Value:
        gate, up = operands
        return b(Binary("mul"), b(Unary(self.activation), gate), up)


@dataclass(frozen=True)
class RmsNorm(Hir):
    """`x · (mean(x²) + ε)^(−1/2) ⊙ (offset + γ) [+ β]`. x `[…, H]`, γ and β `[H]`; the offset is 1 in Gemma."""

    traits = BLOCK
    operands = RmsNormOp.operands

    eps: float
    offset: float = 0.0

    def expand(self, b: Builder, *operands: Value) -> Value:
        return b(RmsNormOp(self.eps, self.offset), *operands)

    def initial(self, place: int, weight: TensorType) -> Initial:
        """1 with the offset, and a bias of 0."""
        return 0.0 if place == 2 else 1.0 - self.offset


@dataclass(frozen=True)
class LayerNorm(Hir):
    """`(x − mean x)(var x + ε)^(−1/2) [⊙ γ] [+ β]`. x `[…, H]`, γ and β `[H]`. See `LayerNormOp`."""

    traits = BLOCK
    operands = LayerNormOp.operands

    eps: float
    scaled: bool = True
    shifted: bool = True

    def expand(self, b: Builder, *operands: Value) -> Value:
        return b(LayerNormOp(self.eps, self.scaled, self.shifted), *operands)

    def initial(self, place: int, weight: TensorType) -> Initial:
        """A bias of 0."""
        return 0.0 if place == 1 + self.scaled else super().initial(place, weight)


@dataclass(frozen=True)
class Embed(Hir):
    """`E[ids]`: E `[V, H]`, ids `[…]` integers in `[0, V)` → `[…, H]`."""

    traits = BLOCK
    ids = (1, 0, 0)

    def expand(self, b: Builder, *operands: Value) -> Value:
        return b(Gather(), *operands)


F32 = np.dtype(np.float32)
SCORES = ("softmax", "sigmoid", "chosen")


@dataclass(frozen=True)
class Route(Hir):
    """The `top_k` experts of each token, the foremost first, and their weights, all in f32.

    Operands: logits `[…, E]`, and with `biased` a bias `[E]` that is added to the scores where experts are chosen, and
    nowhere else. Results: weights `[…, k]` f32, ids `[…, k]` i32. Of equal scores the expert with the lower number
    wins.

    `scores` are a softmax over all logits, their sigmoid, or, as `chosen`, the logits, of which those that were chosen
    are put through a softmax. With `normalise` the weights of a token are divided by their sum; in the end they are
    multiplied with `scale`. Sources: Mixtral of Experts (2024), DeepSeek-V3 (2024).
    """

    traits = TABLES
    choices = {"scores": SCORES}
    operands = "logits:float[…,E!] bias?biased:float[E]"

    top_k: int
    scores: str = "softmax"
    normalise: bool = True
    scale: float = 1.0
    biased: bool = False

    def check(self, *operands: TensorType) -> None:
        logits = operands[0]
        if not 1 <= self.top_k <= logits.shape[-1]:
            raise ShapeError(f"route: top_k is between 1 and the last axis of the logits {logits}, got {self.top_k}")

    def expand(self, b: Builder, *operands: Value) -> tuple[Value, ...]:
        wide = [in_dtype(b, v, F32) for v in operands]
        kinds = {"softmax": Softmax(-1), "sigmoid": Unary("sigmoid")}
        scores = b(kinds[self.scores], wide[0]) if self.scores in kinds else wide[0]
        if self.biased:
            _, ids = b.add(TopK(self.top_k), b(Binary("add"), scores, wide[1]))
            weights = b(TakeAlongAxis(b.type(ids).rank - 1, "clip"), scores, ids)
        else:
            weights, ids = b.add(TopK(self.top_k), scores)
        if self.scores == "chosen":
            weights = b(Softmax(-1), weights)
        if self.normalise:
            total = b(Reduce("sum", (b.type(weights).rank - 1,), keepdims=True), weights)
            if self.scores == "sigmoid":  # which may all be 0
                total = b(Binary("add"), total, b.scalar(1e-20, total))
            weights = b(Binary("div"), weights, total)
        if self.scale != 1.0:
            weights = b(Binary("mul"), weights, b.scalar(self.scale, weights))
        return weights, ids

    def initial(self, place: int, weight: TensorType) -> Initial:
        """The bias starts at 0."""
        return 0.0


@dataclass(frozen=True)
class Experts(Hir):
    """`Σⱼ weightsⱼ · (act(x Gₑ) ⊙ (x Uₑ)) Dₑ` with e = idsⱼ. Operands, result and fields: see `ExpertFfn`, the tensor
    op that `direct` lowers to. `expand` computes every expert for every token."""

    traits = BLOCK
    choices = {"activation": UNARY}
    ids = (5, 1, 0)

    activation: str = "silu"
    contract: int = 1
    biased: bool = False
    clamp: ClampedGate | None = None

    def declaration(self) -> str:
        return expert_operands(self.contract)

    def expand(self, b: Builder, *operands: Value) -> Value:
        x, gate, up, down, weights, ids, *biases = operands
        rank, experts = b.type(x).rank, int(b.type(gate).shape[0])
        wide, narrow = ("efh", "ehf") if self.contract else ("ehf", "efh")
        lead = tuple(AxisOf(axis) for axis in range(rank))
        numbers = b.leaf(constant(np.arange(experts), b.type(ids).dtype))
        hits = b(Compare("eq"), b(Reshape((*lead, 1)), ids), numbers)
        shares = b(Where(), hits, b(Reshape((*lead, 1)), in_dtype(b, weights, F32)), b.leaf(constant(0.0, F32)))
        share, chosen = (b(Reduce(kind, (rank - 1,)), v) for kind, v in (("sum", shares), ("any", hits)))
        gate_bias, up_bias, down_bias = biases or (None, None, None)
        both = ((gate, gate_bias), (up, up_bias))
        inner = self._gated(b, *(_plus(b, b(Einsum(f"...h,{wide}->...ef"), x, w), bias) for w, bias in both))
        each = _plus(b, b(Einsum(f"...ef,{narrow}->...eh", result=F32), inner, down), down_bias)
        given = b(Binary("mul"), each, b(Reshape((*lead[:-1], experts, 1)), share))
        seen = b(Where(), b(Reshape((*lead[:-1], experts, 1)), chosen), given, b.leaf(constant(0.0, F32)))
        return in_dtype(b, b(Reduce("sum", (rank - 1,)), seen), b.type(x).dtype)

    def _gated(self, b: Builder, gate: Value, up: Value) -> Value:
        """What lies between the products."""
        if self.clamp is None:
            return b(GatedFfn(self.activation), gate, up)
        limit, least, alpha, offset = (
            b.scalar(n, gate) for n in (self.clamp.limit, -self.clamp.limit, self.clamp.alpha, self.clamp.offset)
        )
        bent = b(Unary(self.activation), b(Binary("mul"), b(Binary("min"), gate, limit), alpha))
        held = b(Binary("max"), b(Binary("min"), up, limit), least)
        return b(Binary("mul"), b(Binary("div"), bent, alpha), b(Binary("add"), held, offset))

    def initial(self, place: int, weight: TensorType) -> Initial:
        """Each expert is normal over its inputs; biases are 0."""
        return initial_of_expert(place, weight, self.contract)

    def text(self) -> str:
        return f"experts({self.activation})"


def _plus(b: Builder, product: Value, bias: Value | None) -> Value:
    """A product with its bias, if there is one, in the product's dtype."""
    return product if bias is None else b(Binary("add"), product, in_dtype(b, bias, b.type(product).dtype))
