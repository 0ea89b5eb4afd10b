"""The feed-forward experts of a mixture, as one op: the plan says how they run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from rlx_jax.errors import GraphError, ShapeError, shown
from rlx_jax.ir.graph import Mir
from rlx_jax.ir.ops.pointwise import UNARY, same_rank
from rlx_jax.ir.traits import Initial, Normal, Types, product_traits
from rlx_jax.ir.types import TensorType

EXPERT_OPERANDS = ("x", "gate", "up", "down", "weights", "ids")


@dataclass(frozen=True)
class ClampedGate:
    """What lies between the products of an expert as gpt-oss has it: `act(α g)/α ⊙ (u + offset)`, where g is the gate,
    at most `limit`, and u what it gates, within ±`limit`. With silu that is `g σ(α g) (u + offset)`."""

    limit: float
    alpha: float = 1.0
    offset: float = 0.0

    def __post_init__(self) -> None:
        numbers = (self.limit, self.alpha, self.offset)
        real = all(isinstance(n, int | float) and not isinstance(n, bool) and math.isfinite(n) for n in numbers)
        if not real or self.limit <= 0 or self.alpha <= 0:
            raise GraphError(
                f"ClampedGate: limit and alpha are finite numbers over 0, offset a finite number; got {shown(numbers)}"
            )


EXPERTS = (
    "x:float[…L,H] gate:x[E,{wide}] up:x[E,{wide}] down:x[E,{narrow}] weights:float[…L,K!] ids:int[…L,K!] "
    "gate_bias?biased:float[E,F] up_bias?biased:float[E,F] down_bias?biased:float[E,H]"
)


def expert_operands(contract: int) -> str:
    """Return the operands of a mixture, as `rlx_jax.ir.operands` reads them. Gate, up and down have their last two axes
    turned where `contract` is 0."""
    if contract not in (0, 1):
        raise ShapeError(f"experts: contract is 0 for experts [E, in, out] and 1 for [E, out, in]; got {contract!r}")
    wide, narrow = ("F,H", "H,F") if contract else ("H,F", "F,H")
    return EXPERTS.format(wide=wide, narrow=narrow)


def initial_of_expert(place: int, weight: TensorType, contract: int) -> Initial:
    """Each expert is normal over its inputs, whether it is stored alone or with the others; biases are 0."""
    if place >= len(EXPERT_OPERANDS):
        return 0.0
    return Normal(int(weight.shape[-1 if contract else -2])) if weight.rank > 1 else 1.0


def _flops(op: Any, operands: Types, results: Types) -> int:
    """Of the experts that were chosen: three products for each token and choice."""
    gate, ids = operands[1], operands[5]
    return 6 * ids.size * int(gate.shape[1]) * int(gate.shape[2])


def _bytes(op: Any, operands: Types, results: Types) -> int:
    """Each operand is read once; of the experts no more than are chosen."""
    experts, ids = (*operands[1:4], *operands[6:]), operands[5]
    chosen = min(ids.size, int(experts[0].shape[0]))
    read = sum(t.nbytes // int(t.shape[0]) for t in experts) * chosen
    return read + sum(t.nbytes for t in (operands[0], *operands[4:6], *results))


def _workspace(op: Any, operands: Types, results: Types) -> int:
    """Gate and up of each choice, what it gives, and the weights of experts beside each other: those of each choice, or
    where choices are sorted those of a few blocks of each expert."""
    x, gate, *_, ids = operands[:6]
    experts, inner, hidden = (int(n) for n in gate.shape)
    copied = 3 * min(ids.size, 3 * experts) * inner * hidden * x.dtype.itemsize
    return int(copied + 2 * ids.size * (2 * inner + hidden) * 4)


@dataclass(frozen=True)
class ExpertFfn(Mir):
    """`Σⱼ weightsⱼ · (act(x Gₑ) ⊙ (x Uₑ)) Dₑ` with e = idsⱼ: the experts of a mixture (Shazeer et al. 2017), none of
    which has a capacity.

    x `[…, H]`; gate and up `[E, F, H]`, down `[E, H, F]` (`contract=1`), or each `[E, in, out]` (`contract=0`); weights
    `[…, k]` floats and ids `[…, k]` integers in `[0, E)` → `[…, H]`. Each token is computed alone. The weights enter in
    f32, and what an expert that was not chosen would give is never seen, be it infinite. `eval` computes all experts;
    `lowering/lir/experts.py` has ways that compute those that were chosen. `roles` are what the leading axes of x are
    (`rlx_jax.ir.roles`), where a pass divided the program over a mesh.

    `biased`: behind these, biases of gate and up `[E, F]` and of down `[E, H]`, each added to its product. `clamp`:
    another middle than `act(gate) ⊙ up`.
    """

    traits = replace(product_traits(_flops), narrows=4, bytes=_bytes, workspace=_workspace)
    choices = {"activation": UNARY}
    ids = (5, 1, 0)

    activation: str = "silu"
    contract: int = 1
    precision: str = "default"
    roles: tuple[str | None, ...] = ()
    biased: bool = False
    clamp: ClampedGate | None = None

    def declaration(self) -> str:
        return expert_operands(self.contract)

    def eval(self, x: Array, gate: Array, up: Array, down: Array, weights: Array, ids: Array, *biases: Array) -> Array:
        wide, narrow = ("efh", "ehf") if self.contract else ("ehf", "efh")
        gate_bias, up_bias, down_bias = biases or (None, None, None)
        hits = ids[..., None] == jnp.arange(gate.shape[0], dtype=ids.dtype).reshape((1,) * ids.ndim + (-1,))
        share = jnp.where(hits, weights.astype(jnp.float32)[..., None], 0.0).sum(-2)
        both = ((gate, gate_bias), (up, up_bias))
        inner = self.gated(*(plus(self.product(f"...h,{wide}->...ef", x, w), bias) for w, bias in both))
        each = self.product(f"...ef,{narrow}->e...h", inner, down, jnp.float32)  # a batch of products as it is
        if down_bias is not None:
            each = plus(each, down_bias.reshape(len(down), *(1,) * (x.ndim - 1), -1))
        seen, given = (jnp.moveaxis(a, -1, 0)[..., None] for a in (hits.any(-2), share))
        return jnp.where(seen, each * given, 0.0).sum(0).astype(x.dtype)

    def product(self, subscripts: str, a: Array, b: Array, dtype: Any = None) -> Array:
        """One of the products, in the dtype of its operands or in `dtype`."""
        dtype = a.dtype if dtype is None else dtype
        precision = lax.Precision(self.precision)
        return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=dtype)

    def gated(self, gate: Array, up: Array) -> Array:
        """What lies between the products."""
        act, clamp = UNARY[self.activation], self.clamp
        if clamp is None:
            return act(gate) * up
        gate, up = jnp.minimum(gate, clamp.limit), jnp.clip(up, -clamp.limit, clamp.limit)
        return act(clamp.alpha * gate) / clamp.alpha * (up + clamp.offset)

    def initial(self, place: int, weight: TensorType) -> Initial:
        """Each expert is normal over its inputs."""
        return initial_of_expert(place, weight, self.contract)

    def text(self) -> str:
        notes = [self.activation] * (self.activation != "silu") + ["contract=0"] * (not self.contract)
        notes += ["biased"] * self.biased + ([] if self.clamp is None else [f"clamp={self.clamp.limit:g}"])
        notes += [f"precision={self.precision}"] * (self.precision != "default")
        return f"experts({', '.join(notes)})" if notes else "experts"


def plus(made: Array, bias: Array | None) -> Array:
    """A product with its bias, if there is one, in the product's dtype."""
    if bias is None:
        return made
    return jnp.add(*same_rank(made, bias.astype(made.dtype)))
