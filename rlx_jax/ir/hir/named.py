"""Blocks that name a group of two or three others, under the names of the spec: they expand into these before programs
are derived, so merging, precision and the policies see what they stand for."""

from __future__ import annotations

from dataclasses import dataclass

from rlx_jax.errors import GraphError, ShapeError
from rlx_jax.ir.graph import Builder, Hir, Value
from rlx_jax.ir.hir.masks import check_arity
from rlx_jax.ir.hir.token_wise import GatedFfn, Linear, RmsNorm
from rlx_jax.ir.ops.linalg import check_linear
from rlx_jax.ir.ops.pointwise import UNARY, Binary, check_kind
from rlx_jax.ir.traits import COMPOSITE
from rlx_jax.ir.types import TensorType


@dataclass(frozen=True)
class LinearFused(Hir):
    """`act(x · w + b)`, a `Linear` with its bias. x `[…, in]`; w `[in, out]` (`contract=0`) or `[out, in]`; b as
    long as the product is wide."""

    traits = COMPOSITE

    contract: int = 0
    activation: str = ""

    def check(self, *operands: TensorType) -> None:
        check_arity("linear_fused", len(operands), 3)
        if self.activation:
            check_kind(self.activation, UNARY)
        check_linear("linear_fused", operands, self.contract, False)

    def expand(self, b: Builder, *operands: Value) -> Value:
        return b(Linear(self.contract, bias=True, activation=self.activation), *operands)

    def text(self) -> str:
        return f"linear_fused({self.activation})"


@dataclass(frozen=True)
class SharedLinearPair(Hir):
    """`x · w₁` (`slot=0`) or `x · w₂` (`slot=1`) of two products that share x, each of its own width.

    Operands: x `[…, in]`, w₁, w₂: `[in, out]` where the weight's entry of `contracts` is 0, `[out, in]` where it is 1.
    """

    traits = COMPOSITE

    slot: int
    contracts: tuple[int, int] = (0, 0)

    def check(self, *operands: TensorType) -> None:
        check_arity("shared_linear_pair", len(operands), 3)
        if self.slot not in (0, 1):
            raise GraphError(f"shared_linear_pair: slot is 0 or 1, got {self.slot!r}")
        for place, contract in enumerate(self.contracts, 1):
            _check_weight("shared_linear_pair", operands[0], operands, place, contract)

    def expand(self, b: Builder, *operands: Value) -> Value:
        return b(Linear(self.contracts[self.slot]), operands[0], operands[1 + self.slot])

    def text(self) -> str:
        return f"shared_linear_pair(out={self.slot})"


@dataclass(frozen=True)
class SwiGLU(Hir):
    """`(silu(x · gate) ⊙ (x · up)) · down` (Shazeer 2020).

    Operands: x `[…, H]`, up and gate `[H, F]`, down `[F, H]`; where the entry of `contracts` is 1, the other way.
    """

    traits = COMPOSITE

    contracts: tuple[int, int, int] = (0, 0, 0)

    @classmethod
    def name(cls) -> str:
        return "swiglu_ffn"

    def check(self, *operands: TensorType) -> None:
        check_arity(self.name(), len(operands), 4)
        x, up, gate, down = operands
        for place in (1, 2):
            _check_weight(self.name(), x, operands, place, self.contracts[place - 1])
        wide = up.shape[1 - self.contracts[0]]
        if gate.shape[1 - self.contracts[1]] != wide:
            raise ShapeError(f"{self.name()}: gate {gate} and up {up} are not equally wide").of(2)
        _check_weight(self.name(), TensorType((*x.shape[:-1], wide), x.dtype), operands, 3, self.contracts[2])

    def expand(self, b: Builder, *operands: Value) -> Value:
        x, up, gate, down = operands
        wide, gated = b(Linear(self.contracts[0]), x, up), b(Linear(self.contracts[1]), x, gate)
        return b(Linear(self.contracts[2]), b(GatedFfn("silu"), gated, wide), down)

    def text(self) -> str:
        return self.name()


@dataclass(frozen=True)
class ResidualRmsNorm(Hir):
    """`rms_norm(x + residual)`. Operands: x and residual `[…, H]` of one type, γ `[H]`, optionally β `[H]`."""

    traits = COMPOSITE

    eps: float

    def check(self, *operands: TensorType) -> None:
        check_arity("residual_rms_norm", len(operands), 3, 4)
        if operands[0] != operands[1]:
            raise ShapeError(
                f"residual_rms_norm: x and its residual have one type; got {operands[0]} and {operands[1]}"
            )

    def expand(self, b: Builder, *operands: Value) -> Value:
        x, residual, *weights = operands
        return b(RmsNorm(self.eps), b(Binary("add"), x, residual), *weights)

    def text(self) -> str:
        return f"residual_rms_norm(eps={self.eps:g})"


def _check_weight(op: str, x: TensorType, operands: tuple[TensorType, ...], place: int, contract: int) -> None:
    """The product of x with the operand at `place`, which an error names."""
    try:
        check_linear(op, (x, operands[place]), contract, False)
    except ShapeError as error:
        raise error.of(place) from error
