"""Blocks that treat every token alone."""

from __future__ import annotations

from dataclasses import dataclass

from rlx_jax.errors import ShapeError
from rlx_jax.ir.graph import Builder, Hir, Value
from rlx_jax.ir.hir.masks import check_arity
from rlx_jax.ir.ops.index import Gather
from rlx_jax.ir.ops.linalg import MatMul, check_linear
from rlx_jax.ir.ops.norm import LayerNormOp, RmsNormOp
from rlx_jax.ir.ops.pointwise import UNARY, Binary, Unary, check_kind
from rlx_jax.ir.ops.shape import AxisOf, Reshape, SplitLast
from rlx_jax.ir.traits import BLOCK, Initial, Normal
from rlx_jax.ir.types import TensorType


@dataclass(frozen=True)
class Linear(Hir):
    """`act(x · w [+ b])`. x `[…, in]`; w `[in, out]` (`contract=0`) or `[out, in]` (`contract=1`); b `[out]`."""

    traits = BLOCK

    contract: int = 0
    bias: bool = False
    activation: str = ""
    f32_result: bool = False

    def check(self, *operands: TensorType) -> None:
        check_arity("linear", len(operands), 3 if self.bias else 2)
        if self.activation:
            check_kind(self.activation, UNARY)
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

    activation: str = "silu"

    def check(self, *operands: TensorType) -> None:
        check_arity("gated_ffn", len(operands), 2)
        check_kind(self.activation, UNARY)

    def expand(self, b: Builder, *operands: Value) -> Value:
        gate, up = operands
        return b(Binary("mul"), b(Unary(self.activation), gate), up)


@dataclass(frozen=True)
class RmsNorm(Hir):
    """`x · (mean(x²) + ε)^(−1/2) ⊙ (offset + γ) [+ β]`. x `[…, H]`, γ and β `[H]`; the offset is 1 in Gemma."""

    traits = BLOCK

    eps: float
    offset: float = 0.0

    def check(self, *operands: TensorType) -> None:
        check_arity("rms_norm", len(operands), 2, 3)

    def expand(self, b: Builder, *operands: Value) -> Value:
        return b(RmsNormOp(self.eps, self.offset), *operands)

    def initial(self, place: int, weight: TensorType) -> Initial:
        """1 with the offset, and a bias of 0."""
        return 0.0 if place == 2 else 1.0 - self.offset


@dataclass(frozen=True)
class LayerNorm(Hir):
    """`(x − mean x)(var x + ε)^(−1/2) [⊙ γ] [+ β]`. x `[…, H]`, γ and β `[H]`. See `LayerNormOp`."""

    traits = BLOCK

    eps: float
    scaled: bool = True
    shifted: bool = True

    def check(self, *operands: TensorType) -> None:
        check_arity("layer_norm", len(operands), 1 + self.scaled + self.shifted)

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
