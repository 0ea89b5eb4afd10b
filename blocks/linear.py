"""Elementary stages: embeddings, projections, LM heads, norms, residuals, token selection and pooling.

Other modules of stages build on the functions here (`dense`, `layer_norm_under`, `rms_norm`, `head_norm`).
"""

from __future__ import annotations

import math
from typing import ClassVar

from rlx_jax.blocks.control import check_hidden
from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import GraphError, ShapeError, WeightShapeError, quote
from rlx_jax.ir import hir
from rlx_jax.ir.ops.pointwise import Binary
from rlx_jax.ir.param import Roles
from rlx_jax.ir.types import DimLike, Init, TensorType
from rlx_jax.trace.emit import Emit, FlowValue
from rlx_jax.trace.parameters import WeightKey

__all__ = [
    "ClsTokenPool", "Embed", "EmbedScale", "GatherAdd", "GatherFromInput", "GatherLastToken", "GemmaRmsNorm",
    "LayerNorm", "Linear", "LmHead", "LogitSoftcap", "Multiply", "ResidualAdd", "ResidualSave", "RmsNorm", "ZeroBeta",
]  # fmt: skip

# Roles of the axes of embedding tables and of LM heads; the mesh shards axes by role.
TABLE_ROLES, HEAD_ROLES = ("embedding", "hidden"), ("vocab", "hidden")


@dataclass(frozen=True)
class Embed:
    """Look up token embeddings: ids `[…]` → `E[ids]` `[…, H]`. A tied LmHead later in the flow shares the table.

    Args:
        weight_key: the table E, `[V, H]`, as stored.
        shape, init: needed only for a table that no source has, see `emit.param`. GatherAdd, LmHead and other stages
            with these fields treat them the same way.
    """

    weight_key: str = "model.embed_tokens.weight"
    shape: tuple[int, int] | None = None
    init: Init | None = None

    @staticmethod
    def token(key: str) -> Embed:
        """Return the stage of the token embedding stored under `key`."""
        return Embed(key)

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        ids = emit.require(value, "Embed")
        with emit.scope("embed_tokens"):
            table = emit.param(self.weight_key, self.shape, TABLE_ROLES, self.init)
            emit.state.embed_weight = table
            return emit.add_node(hir.Embed(), table, ids)


@dataclass(frozen=True)
class EmbedScale:
    """Scale embeddings by the square root of their width: `x √H` for x `[…, H]`.

    √H is rounded to the dtype of x first, as in Hugging Face's Gemma: √3072 is 55.5 in bf16.
    """

    hidden_size: int

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "EmbedScale")
        with emit.scope("embed_scale"):
            if x.type.shape[-1:] != (self.hidden_size,):
                raise ShapeError(f"{emit.path}: EmbedScale of width {self.hidden_size}, but the input is {x.type}")
            return x * math.sqrt(self.hidden_size)  # Python numbers take the dtype of x


@dataclass(frozen=True)
class Multiply:
    """Multiply by a constant, `x · factor`: Granite's multipliers of embeddings and logits.

    `factor` is rounded to the dtype of x first.
    """

    factor: float

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "Multiply")
        with emit.scope("multiply"):
            return x * self.factor


@dataclass(frozen=True)
class GatherFromInput:
    """Look up embeddings of an input with integer ids, `E[input]`; the active value is ignored.

    Weight: `weight_key` `[V, H]`.
    """

    input_name: str
    weight_key: str
    shape: tuple[int, int] | None = None
    init: Init | None = None

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        emit.require(value, type(self).__name__)
        with emit.scope(self.input_name):
            return emit.embed(self.weight_key, emit.flow_input(self.input_name), shape=self.shape, init=self.init)


@dataclass(frozen=True)
class GatherAdd(GatherFromInput):
    """Add embeddings of an input to the active value: `x + E[input]`. Weight: `weight_key` `[V, H]`.

    An optional input that is absent takes its default.
    """

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        rows = super().emit(emit, value)
        with emit.scope(self.input_name):
            return emit.require(value, "GatherAdd") + rows


@dataclass(frozen=True)
class Linear:
    """Linear projection `x W [+ b]`.

    Args:
        weight_key: the weight, `[out, in]` with `transpose` (the layout of most checkpoints), else `[in, out]`.
        bias_key: the bias `[out]`, if there is one.
        shape: the stored shape, None for an unknown size; needed only without weights.
        roles: roles of the stored axes, by which a mesh of devices shards them.
        init: initializer of a weight that no source has, as in `emit.param`.
    """

    weight_key: WeightKey
    transpose: bool = True
    bias_key: WeightKey | None = None
    shape: tuple[DimLike | None, DimLike | None] | None = None
    roles: Roles | None = None
    init: Init | None = None

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "Linear")
        if self.shape is not None and len(self.shape) != 2:
            raise ShapeError(f"{emit.path}: Linear: expected two sizes in shape=, got {len(self.shape)}")
        columns, width = (self.shape or (None, None))[:: 1 if self.transpose else -1]
        with emit.scope(block_of(str(self.weight_key))):
            if width is not None and x.type.shape[-1:] != (width,):
                raise ShapeError(f"{emit.path}: Linear: shape= declares an input of width {width}, got {x.type}")
            return emit.linear(
                x, self.weight_key, self.bias_key, transpose=self.transpose, roles=self.roles, columns=columns,
                init=self.init,
            )  # fmt: skip


def module_keys(name: str) -> tuple[str, str]:
    """Return the keys of the weight and the bias of the module `name`."""
    return f"{name}.weight", f"{name}.bias"


def dense(
    emit: Emit, prefix: str, name: str, x: FlowValue, roles: Roles, columns: int | None, activation: str = "", *,
    bias: bool = True, transpose: bool = True,
) -> FlowValue:  # fmt: skip
    """Write `act(x W [+ b])` with the weights of the module `{prefix}.{name}`, in the block `name`.

    Args:
        prefix, name: their parameters are `{prefix}.{name}.weight` and `.bias`; dots in `name` nest blocks.
        x: value `[…, in]`.
        roles: roles of the axes of the stored weight.
        columns: width of the result; None to read it from the weight.
        activation: a name in `UNARY`, or "" for none.
        bias: whether there is a bias.
        transpose: whether the weight is stored as `[out, in]`.
    """
    keys = module_keys(f"{prefix}.{name}")[: 1 + bias]
    with emit.scope(*name.split(".")):
        return emit.linear(x, *keys, activation=activation, transpose=transpose, roles=roles, columns=columns)


def block_of(key: str) -> str:
    """Return the name in dumps of the block that owns a weight: `a.b.q_proj.weight` → `q_proj`.

    A key that does not end in `weight` or `bias` yields its last segment.
    """
    parts = str(key).split(".")
    return parts[-2] if len(parts) > 1 and parts[-1] in ("weight", "bias") else parts[-1]


@dataclass(frozen=True)
class ResidualSave:
    """Save the active value for a later ResidualAdd."""

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        emit.state.residual = emit.require(value, "ResidualSave")
        return value


@dataclass(frozen=True)
class ResidualAdd:
    """Add the value of the last ResidualSave to the active value, and clear it."""

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "ResidualAdd")
        saved = emit.state.residual
        if saved is None:
            raise GraphError(f"{emit.path}: ResidualAdd without a ResidualSave before it")
        emit.state.residual = None  # a second ResidualAdd without a new save is an error, not a silent reuse
        if saved.type != x.type:
            raise ShapeError(f"{emit.path}: ResidualAdd: the saved value is {saved.type}, the active one {x.type}")
        return emit.add_node(Binary("add"), saved, x)


@dataclass(frozen=True)
class LmHead:
    """Compute float32 logits: `x Eᵀ` with the flow's embedding (`tied`), or `x Wᵀ` with `weight_key` `[V, H]`; then add
    the bias `bias_key` `[V]`, if there is one.

    The embedding is contracted as it is stored, without a transposed copy. V and H follow from the embedding, or from
    the weight and x; the stage checks `vocab_size` and `hidden_size` against them where they are set. An untied head
    needs `vocab_size` only for a weight that no source has.
    """

    vocab_size: int | None = None
    hidden_size: int | None = None
    weight_key: str | None = None
    tie_word_embeddings: bool = False
    init: Init | None = None
    bias_key: str | None = None

    @staticmethod
    def tied(vocab_size: int | None = None, hidden_size: int | None = None) -> LmHead:
        """Return a head that shares the weight of the Embed stage."""
        return LmHead(vocab_size, hidden_size, None, True)

    @staticmethod
    def separate(key: str, vocab_size: int | None = None, hidden_size: int | None = None) -> LmHead:
        """Return a head with the separate weight `key`."""
        return LmHead(vocab_size, hidden_size, key, False)

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "LmHead")
        with emit.scope("lm_head"):
            weight = self._weight(emit, x.type)
            expected, actual = (self.vocab_size, self.hidden_size), weight.type.shape
            if len(actual) != 2 or any(want not in (None, size) for want, size in zip(expected, actual, strict=True)):
                hint = "; a tied head takes its sizes from the embedding: leave them out" * self.tie_word_embeddings
                text = ", ".join(name if size is None else str(size) for name, size in zip("VH", expected, strict=True))
                raise ShapeError(f"{emit.path}: expected a head [{text}], but its weight is {weight.type}{hint}")
            if actual[1] != x.type.shape[-1]:
                label = "the tied embedding" if self.tie_word_embeddings else f"weight {quote(self.weight_key)}"
                raise WeightShapeError(f"{emit.path}: {label} is {weight.type}, for width {actual[1]}; got {x.type}")
            if self.bias_key is None:
                return emit.add_node(hir.Linear(contract=1, f32_result=True), x, weight)
            bias = emit.weight(self.bias_key, ("vocab",), shape=actual[:1])
            return emit.add_node(hir.Linear(contract=1, bias=True, f32_result=True), x, weight, bias)

    def _weight(self, emit: Emit, x: TensorType) -> FlowValue:
        """Return the weight `[V, H]`: the flow's embedding for a tied head, else the parameter `weight_key`."""
        if not self.tie_word_embeddings:
            if self.weight_key is None:
                raise GraphError(f"{emit.path}: LmHead is not tied and has no weight key")
            width = x.shape[-1] if self.hidden_size is None else self.hidden_size
            return emit.param(self.weight_key, (self.vocab_size, width), HEAD_ROLES, self.init)
        if emit.state.embed_weight is None:
            raise GraphError(f"{emit.path}: a tied LmHead needs an Embed stage before it")
        # The table is also a projection to the vocabulary now, which counts in how a mesh shards it.
        emit.record_roles(emit.state.embed_weight, HEAD_ROLES)
        return emit.state.embed_weight


@dataclass(frozen=True)
class LogitSoftcap:
    """Bound logits to ±cap: `cap · tanh(x / cap)` (Gemma 2). After LmHead, x and the result are float32."""

    cap: float

    def __post_init__(self) -> None:
        if not 0 < self.cap < math.inf:
            raise GraphError(f"LogitSoftcap: the cap is a finite number over 0, got {self.cap!r}")

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "LogitSoftcap")
        with emit.scope("logit_softcap"):
            return emit.tanh(x / self.cap) * self.cap


@dataclass(frozen=True)
class GatherLastToken:
    """Select the last token of each row: `[B,S,H]` → `[B,1,H]`; by position, or by the input `last_token_idx` `[B]`.

    `batch` and `seq` are checked against the value unless they are None.
    """

    batch: int | str | None = None
    input_name: str | None = None
    seq: int | str | None = None

    @staticmethod
    def dynamic(batch: int | str | None = None) -> GatherLastToken:
        """Return a stage that selects token `last_token_idx[b]`; it declares the input unless the flow has it."""
        return GatherLastToken(batch, "last_token_idx")

    @staticmethod
    def static_last(batch: int | str | None = None, seq: int | str | None = None) -> GatherLastToken:
        """Return a stage that selects the last position."""
        return GatherLastToken(batch, seq=seq)

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "GatherLastToken")
        if x.ndim < 2:
            raise ShapeError(f"{emit.path}: GatherLastToken needs [B, S, …], got {x.type}")
        check_hidden(emit, x, (self.batch, self.seq, *[None] * (x.ndim - 2)), "GatherLastToken")
        with emit.scope("last_token"):
            if self.input_name is None:
                return emit.add_node(hir.LastToken(), x)
            return emit.add_node(hir.LastToken(), x, emit.input(self.input_name, x.shape[:1], "int32"))


@dataclass(frozen=True)
class ClsTokenPool:
    """Select the first token: `[B,S,H]` → `[B,H]`. `batch` and `hidden` are checked against the value unless None."""

    batch: int | str | None = None
    hidden: int | None = None

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "ClsTokenPool")
        if x.ndim != 3:
            raise ShapeError(f"{emit.path}: ClsTokenPool needs [B, S, {self.hidden or 'H'}], got {x.type}")
        check_hidden(emit, x, (self.batch, None, self.hidden), "ClsTokenPool")
        with emit.scope("cls"):
            return emit.add_node(hir.FirstToken(), x)


@dataclass(frozen=True)
class ZeroBeta:
    """Register zeros `[length]` as the value `name`; the first such stage provides the beta of every RMSNorm.

    RMSNorms work without this stage; the specification has it.
    """

    length: int
    name: str = "zero_beta"

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        zeros = emit.zeros(self.length)
        emit.set_named(self.name, zeros)
        if emit.state.zero_beta is None:  # norms use the first; later ones are available by name
            emit.state.zero_beta = zeros
        return value


@dataclass(frozen=True)
class RmsNorm:
    """RMSNorm `x (mean(x²) + ε)^(−1/2) ⊙ γ`.

    Weight: `weight_key` `[H]`; if no source has it, it is initialized by `init`, by default to 1.
    """

    norm: ClassVar[str] = "rms"
    offset: ClassVar[float] = 0.0
    """Constant that is added to the weight."""

    weight_key: str
    eps: float = 1e-5
    init: Init | None = None

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, type(self).__name__)
        with emit.scope(module_of(self.weight_key)):
            gamma = emit.weight(self.weight_key, shape=x.type.shape[-1:], init=self.init)
            return rms_norm(emit, x, gamma, self.eps, self.offset)


@dataclass(frozen=True)
class GemmaRmsNorm(RmsNorm):
    """Gemma's RMSNorm `x (mean(x²) + ε)^(−1/2) ⊙ (1 + w)`, rounded once, after the product.

    Weight: `weight_key` `[H]`, initialized by `init`, by default to 0.
    """

    offset = 1.0

    eps: float = 1e-6

    @staticmethod
    def hf_layer(prefix: str, eps: float = 1e-6) -> GemmaRmsNorm:
        """Return the norm with the weight `{prefix}.weight`."""
        return GemmaRmsNorm(f"{prefix}.weight", eps)


@dataclass(frozen=True)
class LayerNorm:
    """LayerNorm `(x − mean x)(var x + ε)^(−1/2) [⊙ γ] [+ β]`.

    Weights: `gamma_key` and `beta_key`, `[H]`, each optional. If no source has them, γ is initialized by `init`, by
    default to 1, and β to 0.
    """

    norm: ClassVar[str] = "layer"

    gamma_key: str | None
    beta_key: str | None
    eps: float = 1e-5
    init: Init | None = None

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "LayerNorm")
        with emit.scope(module_of(self.gamma_key or self.beta_key or "norm.weight")):
            gamma = None
            if self.gamma_key is not None:
                gamma = emit.weight(self.gamma_key, shape=x.type.shape[-1:], init=self.init)
            return emit.layer_norm(x, gamma, self.beta_key, self.eps)


def layer_norm_under(emit: Emit, prefix: str, name: str, x: FlowValue, eps: float) -> FlowValue:
    """Write a LayerNorm with the weights `{prefix}.{name}.{weight,bias}` in the block `name`."""
    with emit.scope(*name.split(".")):
        return emit.layer_norm(x, f"{prefix}.{name}.weight", f"{prefix}.{name}.bias", eps)


def rms_norm(emit: Emit, x: FlowValue, key: str | FlowValue, eps: float, offset: float = 0.0) -> FlowValue:
    """Write an RMSNorm of `x` with the weight `key` (a key or a value) plus `offset`.

    The beta comes from a ZeroBeta stage, if one ran before with the width of `x`.
    """
    beta = emit.state.zero_beta
    fits = beta is not None and beta.type.shape == x.type.shape[-1:]
    return emit.rms_norm(x, key, beta if fits else None, eps, offset=offset)


def head_norm(emit: Emit, x: FlowValue, key: str, head_dim: int | None, eps: float, offset: float = 0.0) -> FlowValue:
    """Write an RMSNorm over packed heads, `[B,S,N·D]` → same.

    Args:
        x: packed heads.
        key: the weight, `[D]` with `head_dim`, else `[N·D]`.
        head_dim: D, to normalise each head separately; None to normalise all heads as one vector.
        eps: epsilon of the norm.
        offset: constant that is added to the weight.
    """
    with emit.scope(module_of(key)):
        if head_dim is None:
            return rms_norm(emit, x, key, eps, offset)
        heads = x.reshape(*x.shape[:-1], -1, head_dim)
        return rms_norm(emit, heads, key, eps, offset).reshape(x.shape)


def module_of(key: str) -> str:
    """Return the name of the module that owns a weight: `layers.0.q_proj.weight` → `q_proj`."""
    parts = key.split(".")
    return parts[-2] if len(parts) > 1 else parts[-1]
