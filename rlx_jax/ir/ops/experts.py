"""The experts of a mixture of experts as one op, whose implementation the Plan chooses, and one product with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array, lax

from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import GraphError, ShapeError, shown
from rlx_jax.ir.graph import Mir
from rlx_jax.ir.operands import Initial, Normal, Types, product_traits
from rlx_jax.ir.ops.linalg import product_text
from rlx_jax.ir.ops.pointwise import UNARY, same_rank
from rlx_jax.ir.types import TensorType, is_static

# Names of the operands that every mixture has, in order; biases follow them.
EXPERT_OPERANDS = ("x", "gate", "up", "down", "weights", "ids")


@dataclass(frozen=True)
class ClampedGate:
    """Clamped gate of an expert, as in gpt-oss: `act(α g)/α ⊙ (u + offset)`; with silu this is `g σ(α g) (u + offset)`.

    g is the gate, clipped to at most `limit`; u is the gated value, clipped to ±`limit`; α is `alpha`.
    """

    limit: float
    alpha: float = 1.0
    offset: float = 0.0

    def __post_init__(self) -> None:
        numbers = (self.limit, self.alpha, self.offset)
        is_finite = all(isinstance(n, int | float) and not isinstance(n, bool) and math.isfinite(n) for n in numbers)
        if not is_finite or self.limit <= 0 or self.alpha <= 0:
            raise GraphError(
                f"ClampedGate: limit and alpha are finite numbers over 0, offset a finite number; got {shown(numbers)}"
            )


# Declaration of the operands, in the notation of `rlx_jax.ir.operands`; {wide} and {narrow} depend on the orientation.
EXPERTS_DECLARATION = (
    "x:float[…L,H] gate:x[E,{wide}] up:x[E,{wide}] down:x[E,{narrow}] weights:float[…L,K!] ids:int[…L,K!] "
    "gate_bias?biased:float[E,F] up_bias?biased:float[E,F] down_bias?biased:float[E,H]"
)


@dataclass(frozen=True)
class ExpertAttributes:
    """The attributes and operands that `ExpertFfn` and the block `rlx_jax.ir.hir.Experts` share.

    Attributes:
        activation: a name in `UNARY`.
        contract: 1 for experts `[E, out, in]`, 0 for experts `[E, in, out]`.
        biased: whether the experts have biases.
        clamp: replaces `act(gate) ⊙ up`; None for no clamp.
    """

    choices: ClassVar[Mapping[str, Collection[str]]] = {"activation": UNARY}
    ids: ClassVar[tuple[int, int, int] | None] = (5, 1, 0)

    activation: str = "silu"
    contract: int = 1
    biased: bool = False
    clamp: ClampedGate | None = None

    def declaration(self) -> str:
        """Return the declaration of the operands.

        Raises:
            ShapeError: `contract` is neither 0 nor 1.
        """
        if self.contract not in (0, 1):
            raise ShapeError(
                f"experts: contract is 0 for experts [E, in, out] and 1 for [E, out, in]; got {self.contract!r}"
            )
        wide, narrow = ("F,H", "H,F") if self.contract else ("H,F", "F,H")
        return EXPERTS_DECLARATION.format(wide=wide, narrow=narrow)

    def initial(self, operand_index: int, weight: TensorType) -> Initial:
        """Return the initializer of an operand: normal by the number of inputs of one expert; 0 for biases.

        It is the same for experts that are stored separately and for a stack of experts.
        """
        if operand_index >= len(EXPERT_OPERANDS):
            return 0.0
        return Normal(int(weight.shape[-1 if self.contract else -2])) if weight.rank > 1 else 1.0


def _flops(op: Any, operands: Types, results: Types) -> int:
    """Return the FLOPs of the chosen experts: three products for each token and choice."""
    gate, ids = operands[1], operands[5]
    return 6 * ids.size * int(gate.shape[1]) * int(gate.shape[2])


def _bytes(op: Any, operands: Types, results: Types) -> int:
    """Return the bytes of operands and results; of the experts, at most the number of choices is read."""
    experts, ids = (*operands[1:4], *operands[6:]), operands[5]
    num_chosen = min(ids.size, int(experts[0].shape[0]))
    read = sum(t.nbytes // int(t.shape[0]) for t in experts) * num_chosen
    return read + sum(t.nbytes for t in (operands[0], *operands[4:6], *results))


def _workspace(op: Any, operands: Types, results: Types) -> int:
    """Return the scratch bytes: gate, up and result of each choice, and copied weights of experts.

    The copies are gathered weights for each choice, or, if choices are sorted by expert, weights for a few blocks of
    each expert.
    """
    x, gate, *_, ids = operands[:6]
    experts, inner, hidden = (int(n) for n in gate.shape)
    copied = 3 * min(ids.size, 3 * experts) * inner * hidden * x.dtype.itemsize
    return int(copied + 2 * ids.size * (2 * inner + hidden) * 4)


@dataclass(frozen=True)
class ExpertFfn(ExpertAttributes, Mir):
    """Experts of a mixture without capacity limits: `Σⱼ weightsⱼ · (act(x Gₑ) ⊙ (x Uₑ)) Dₑ` with e = idsⱼ.

    Operands: x `[…, H]`; gate and up `[E, F, H]` and down `[E, H, F]` (`contract=1`), or each `[E, in, out]`
    (`contract=0`); weights `[…, k]` floats and ids `[…, k]` integers in `[0, E)`; with `biased`, biases of gate and up
    `[E, F]` and of down `[E, H]`, each added to its product. Result: `[…, H]`. `clamp` replaces `act(gate) ⊙ up`.

    Each token is computed independently. The router weights enter in f32. The result of an expert that was not chosen
    never contributes, even if it is infinite. `eval` computes all experts; `lowering/lir/experts.py` has
    implementations that compute only the chosen ones. `roles` are the roles of the leading axes of x
    (`rlx_jax.ir.roles`), set by a pass that shards the program over a mesh.

    Source: Shazeer et al. 2017.
    """

    traits = replace(product_traits(_flops), narrows=4, bytes=_bytes, workspace=_workspace)

    precision: str = "default"
    roles: tuple[str | None, ...] = ()

    def eval(self, x: Array, gate: Array, up: Array, down: Array, weights: Array, ids: Array, *biases: Array) -> Array:
        wide, narrow = ("efh", "ehf") if self.contract else ("ehf", "efh")
        gate_bias, up_bias, down_bias = biases or (None, None, None)
        # A token may choose an expert twice: the weights of its choices add up to the expert's share.
        hits = ids[..., None] == jnp.arange(gate.shape[0], dtype=ids.dtype).reshape((1,) * ids.ndim + (-1,))
        share = jnp.where(hits, weights.astype(jnp.float32)[..., None], 0.0).sum(-2)
        projections = ((gate, gate_bias), (up, up_bias))
        inner = self.gated(*(add_bias(self.product(f"...h,{wide}->...ef", x, w), bias) for w, bias in projections))
        outputs = self.product(f"...ef,{narrow}->e...h", inner, down, jnp.float32)  # a batched product by expert
        if down_bias is not None:
            outputs = add_bias(outputs, down_bias.reshape(len(down), *(1,) * (x.ndim - 1), -1))
        is_chosen, shares = (jnp.moveaxis(a, -1, 0)[..., None] for a in (hits.any(-2), share))
        # `where`, not the product alone: 0 · inf of an expert that was not chosen would be NaN.
        return jnp.where(is_chosen, outputs * shares, 0.0).sum(0).astype(x.dtype)

    def product(self, subscripts: str, a: Array, b: Array, dtype: Any = None) -> Array:
        """Return one of the products, in the dtype of its operands or in `dtype`."""
        dtype = a.dtype if dtype is None else dtype
        precision = lax.Precision(self.precision)
        return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=dtype)

    def gated(self, gate: Array, up: Array) -> Array:
        """Return the gated activation of the projections gate and up, with the clamp if there is one."""
        act, clamp = UNARY[self.activation], self.clamp
        if clamp is None:
            return act(gate) * up
        gate, up = jnp.minimum(gate, clamp.limit), jnp.clip(up, -clamp.limit, clamp.limit)
        return act(clamp.alpha * gate) / clamp.alpha * (up + clamp.offset)

    def text(self) -> str:
        notes = [self.activation] * (self.activation != "silu") + ["contract=0"] * (not self.contract)
        notes += ["biased"] * self.biased + ([] if self.clamp is None else [f"clamp={self.clamp.limit:g}"])
        notes += [f"precision={self.precision}"] * (self.precision != "default")
        return f"experts({', '.join(notes)})" if notes else "experts"


def add_bias(product: Array, bias: Array | None) -> Array:
    """Return a product plus its bias, if there is one, in the product's dtype."""
    if bias is None:
        return product
    return jnp.add(*same_rank(product, bias.astype(product.dtype)))


@dataclass(frozen=True)
class GroupedMatMul(Mir):
    """Product of each row with one of several matrices, `y[i] = x[i] · w[ids[i]]`.

    Operands: x `[M, K]`; w `[E, K, N]` (`contract=0`) or `[E, N, K]` (`contract=1`); ids `[M]` integers in `[0, E)`.
    Result: `[M, N]`. `precision` is as in `MatMul`. The host checks ids before it calls a model; in this op an id out
    of range reads the nearest matrix.
    """

    traits = replace(product_traits(lambda op, x, out: 2 * x[0].size * int(out[0].shape[-1])), narrows=2)
    ids = (2, 1, 0)

    contract: int = 0
    precision: str = "default"

    def declaration(self) -> str:
        if self.contract not in (0, 1):
            raise ShapeError(
                f"grouped_matmul: contract is 0 for w [E, K, N] and 1 for [E, N, K]; got {self.contract!r}"
            )
        return f"x:float[M,K!] w:x[E,{'N,K' if self.contract else 'K,N'}] ids:int[M]"

    def eval(self, x: Array, w: Array, ids: Array) -> Array:
        return self.run(x, ids, w.shape, lambda index: jnp.take(w, index, axis=0, mode="clip"))

    def run(self, x: Array, ids: Array, shape: tuple[int, ...], take: Callable[[Array], Array]) -> Array:
        """Compute the op given the shape of w and `take`, which returns the matrices of an array of ids.

        With more rows than matrices, each matrix is read once and multiplied with all rows, so that at most one of them
        is copied or decoded at a time.
        """
        experts, matrix = shape[0], "nk" if self.contract else "kn"
        precision = lax.Precision(self.precision)

        def product(lead: str, w: Array) -> Array:
            subscripts = f"mk,{lead}{matrix}->mn"
            return jnp.einsum(subscripts, x, w, precision=precision, preferred_element_type=x.dtype)

        ids = jnp.clip(ids.astype(jnp.int32), 0, experts - 1)
        if is_static(ids.size) and ids.size <= experts:
            return product("m", take(ids))

        def add_expert(y: Array, expert: Array) -> tuple[Array, None]:
            return jnp.where((ids == expert)[:, None], product("", take(expert)), y), None

        y = jnp.zeros((x.shape[0], shape[2 - self.contract]), x.dtype)
        return lax.scan(add_expert, y, jnp.arange(experts, dtype=jnp.int32))[0]

    def initial(self, operand_index: int, weight: TensorType) -> Initial:
        return Normal(int(weight.shape[1 + self.contract]))

    def text(self) -> str:
        return product_text("grouped_matmul", self.contract, self.precision, f32_result=False)
