"""Projections, norms, embeddings and heads: Linear, LmHead, RmsNorm, LayerNorm, Embed, residuals, gathers, pooling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from rlx_jax.blocks.control import check_hidden
from rlx_jax.errors import GraphError, ShapeError, WeightShapeError, quote
from rlx_jax.ir import hir
from rlx_jax.ir.initializers import Init
from rlx_jax.ir.ops.pointwise import Binary
from rlx_jax.ir.param import Roles
from rlx_jax.ir.types import DimLike, TensorType
from rlx_jax.trace.emit import Emit, FlowValue
from rlx_jax.trace.parameters import WeightKey

__all__ = [
    "ClsTokenPool", "Embed", "EmbedScale", "GatherAdd", "GatherFromInput", "GatherLastToken", "GemmaRmsNorm",
    "LayerNorm", "Linear", "LmHead", "LogitSoftcap", "Multiply", "ResidualAdd", "ResidualSave", "RmsNorm", "ZeroBeta",
]  # fmt: skip

# What the axes of tables are.
TABLE, HEAD = ("embedding", "hidden"), ("vocab", "hidden")


@dataclass(frozen=True)
class Embed:
    """`E[ids]`: ids `[…]` → `[…, H]`. Weight: `weight_key` `[V, H]`, as stored. Remembered for a tied LmHead.

    `shape` and `init` are needed only for a table that no source has: see `emit.param`. Those of GatherAdd, LmHead and
    the like are the same.
    """

    weight_key: str = "model.embed_tokens.weight"
    shape: tuple[int, int] | None = None
    init: Init | None = None

    @staticmethod
    def token(key: str) -> Embed:
        """The token embedding stored under `key`."""
        return Embed(key)

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        ids = emit.require(value, "Embed")
        with emit.scope("embed_tokens"):
            table = emit.param(self.weight_key, self.shape, TABLE, self.init)
            emit.state.embed_weight = table
            return emit.add_node(hir.Embed(), table, ids)


@dataclass(frozen=True)
class EmbedScale:
    """`x √H` for x `[…, H]`. √H takes the dtype of x first, as in Hugging Face's Gemma: √3072 is 55.5 in bf16."""

    hidden_size: int

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "EmbedScale")
        with emit.scope("embed_scale"):
            if x.type.shape[-1:] != (self.hidden_size,):
                raise ShapeError(f"{emit.path}: EmbedScale of width {self.hidden_size}, the input is {x.type}")
            return x * math.sqrt(self.hidden_size)


@dataclass(frozen=True)
class Multiply:
    """`x · factor` for a number, which takes the dtype of x first: multipliers of embeddings and logits (Granite)."""

    factor: float

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "Multiply")
        with emit.scope("multiply"):
            return x * self.factor


@dataclass(frozen=True)
class GatherFromInput:
    """`E[input]`, ignoring the active value: `weight_key` `[V, H]`, the input holds integer ids."""

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
    """`x + E[input]`: `weight_key` `[V, H]`. An optional input that is absent counts as its default."""

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        rows = super().emit(emit, value)
        with emit.scope(self.input_name):
            return emit.require(value, "GatherAdd") + rows


@dataclass(frozen=True)
class Linear:
    """`x W [+ b]`. Weight: `weight_key`, `[out, in]` with `transpose` (how checkpoints store it) or `[in, out]`.

    `shape` is the stored shape, None for an unknown size; needed only without weights. `roles` say what its axes are,
    as stored, for a mesh of devices. `init`: how the weight is drawn where there is none, as `emit.param` takes it.
    """

    weight_key: WeightKey
    transpose: bool = True
    bias_key: WeightKey | None = None
    shape: tuple[DimLike | None, DimLike | None] | None = None
    roles: Roles | None = None
    init: Init | None = None

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "Linear")
        columns, wide = (self.shape or (None, None))[:: 1 if self.transpose else -1]
        with emit.scope(block_of(str(self.weight_key))):
            if wide is not None and x.type.shape[-1:] != (wide,):
                raise ShapeError(f"{emit.path}: Linear: of its shape= the input is {wide} wide, and this is {x.type}")
            return emit.linear(
                x, self.weight_key, self.bias_key, transpose=self.transpose, roles=self.roles, columns=columns,
                init=self.init,
            )  # fmt: skip


def pair(name: str) -> tuple[str, str]:
    """The keys of a weight and its bias."""
    return f"{name}.weight", f"{name}.bias"


def dense(
    emit: Emit,
    prefix: str,
    name: str,
    x: FlowValue,
    roles: Roles,
    columns: int | None,
    activation: str = "",
    *,
    bias: bool = True,
    transpose: bool = True,
) -> FlowValue:
    """Write `act(x W [+ b])`, `columns` wide, under the keys `{prefix}.{name}` and in the block `name`."""
    weight, added = pair(f"{prefix}.{name}")
    with emit.scope(*name.split(".")):
        return emit.linear(
            x, weight, added if bias else None, activation=activation, transpose=transpose, roles=roles, columns=columns
        )


def block_of(key: str) -> str:
    """`a.b.q_proj.weight` → `q_proj`: what dumps call the block that owns a weight."""
    parts = str(key).split(".")
    return parts[-2] if len(parts) > 1 and parts[-1] in ("weight", "bias") else parts[-1]


@dataclass(frozen=True)
class ResidualSave:
    """Remember the active value for ResidualAdd."""

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        emit.state.residual = emit.require(value, "ResidualSave")
        return value


@dataclass(frozen=True)
class ResidualAdd:
    """`x + saved`; the saved value is forgotten."""

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "ResidualAdd")
        saved = emit.state.residual
        if saved is None:
            raise GraphError(f"{emit.path}: ResidualAdd without a ResidualSave before it")
        emit.state.residual = None
        if saved.type != x.type:
            raise ShapeError(f"{emit.path}: ResidualAdd: the saved value is {saved.type}, the active one {x.type}")
        return emit.add_node(Binary("add"), saved, x)


@dataclass(frozen=True)
class LmHead:
    """Logits: `x Eᵀ` with the embedding of the flow (`tied`) or `x Wᵀ` with `weight_key` `[V, H]`; no bias.

    The embedding is contracted in place, never copied. Logits are float32 in every precision. V and H follow from the
    embedding, or from the weight and from x, and are held against these where they are given; V of a weight of its own
    is needed where no source has it.
    """

    vocab_size: int | None = None
    hidden_size: int | None = None
    weight_key: str | None = None
    tie_word_embeddings: bool = False
    init: Init | None = None

    @staticmethod
    def tied(vocab_size: int | None = None, hidden_size: int | None = None) -> LmHead:
        """Share the weight of the Embed stage."""
        return LmHead(vocab_size, hidden_size, None, True)

    @staticmethod
    def separate(key: str, vocab_size: int | None = None, hidden_size: int | None = None) -> LmHead:
        """A weight of its own."""
        return LmHead(vocab_size, hidden_size, key, False)

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "LmHead")
        with emit.scope("lm_head"):
            weight = self._weight(emit, x.type)
            said, have = (self.vocab_size, self.hidden_size), weight.type.shape
            if len(have) != 2 or any(want not in (None, size) for want, size in zip(said, have, strict=True)):
                more = "; those of a tied head follow from the embedding: leave them out" * self.tie_word_embeddings
                text = ", ".join(name if size is None else str(size) for name, size in zip("VH", said, strict=True))
                raise ShapeError(f"{emit.path}: the head is said to be [{text}], and its weight is {weight.type}{more}")
            if have[1] != x.type.shape[-1]:
                which = "the tied embedding" if self.tie_word_embeddings else f"weight {quote(self.weight_key)}"
                raise WeightShapeError(
                    f"{emit.path}: the head reads values {have[1]} wide, {which} is {weight.type}; these are {x.type}"
                )
            return emit.add_node(hir.Linear(contract=1, f32_result=True), x, weight)

    def _weight(self, emit: Emit, x: TensorType) -> FlowValue:
        if not self.tie_word_embeddings:
            if self.weight_key is None:
                raise GraphError(f"{emit.path}: LmHead is not tied and has no weight key")
            wide = x.shape[-1] if self.hidden_size is None else self.hidden_size
            return emit.param(self.weight_key, (self.vocab_size, wide), HEAD, self.init)
        if emit.state.embed_weight is None:
            raise GraphError(f"{emit.path}: a tied LmHead needs an Embed stage before it")
        emit.say_roles(emit.state.embed_weight, HEAD)
        return emit.state.embed_weight


@dataclass(frozen=True)
class LogitSoftcap:
    """`cap · tanh(x / cap)`: logits within ±cap (Gemma 2). Float32 where x is what LmHead gives."""

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
    """The last token of each row: `[B,S,H]` → `[B,1,H]`; by position, or by the input `last_token_idx` `[B]`.

    `batch` and `seq` are checked against the value when given.
    """

    batch: int | str | None = None
    input_name: str | None = None
    seq: int | str | None = None

    @staticmethod
    def dynamic(batch: int | str | None = None) -> GatherLastToken:
        """Row `last_token_idx[b]`; the input is declared unless the flow has it."""
        return GatherLastToken(batch, "last_token_idx")

    @staticmethod
    def static_last(batch: int | str | None = None, seq: int | str | None = None) -> GatherLastToken:
        """The last position."""
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
    """The first token: `[B,S,H]` → `[B,H]`. `batch` and `hidden` are checked against the value when given."""

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
    """Zeros `[length]`, registered as `name`; the first one is the beta of every RMSNorm. Norms need none."""

    length: int
    name: str = "zero_beta"

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        zeros = emit.zeros(self.length)
        emit.set_named(self.name, zeros)
        if emit.state.zero_beta is None:
            emit.state.zero_beta = zeros
        return value


@dataclass(frozen=True)
class RmsNorm:
    """`x (mean(x²) + ε)^(−1/2) ⊙ γ`. Weight: `weight_key` `[H]`; where no source has it, `init` draws it, or 1."""

    norm: ClassVar[str] = "rms"
    offset: ClassVar[float] = 0.0
    """What is added to the weight."""

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
    """`x (mean(x²) + ε)^(−1/2) ⊙ (1 + w)`, rounded once. Weight: `weight_key` `[H]`, which starts at 0, or
    as `init` says."""

    offset = 1.0

    eps: float = 1e-6

    @staticmethod
    def hf_layer(prefix: str, eps: float = 1e-6) -> GemmaRmsNorm:
        """`{prefix}.weight`."""
        return GemmaRmsNorm(f"{prefix}.weight", eps)


@dataclass(frozen=True)
class LayerNorm:
    """`(x − mean x)(var x + ε)^(−1/2) [⊙ γ] [+ β]`. Weights: `gamma_key`, `beta_key` `[H]`, if not None; where no
    source has them γ is drawn by `init`, by default 1, and β is 0."""

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


def norm_under(emit: Emit, prefix: str, name: str, x: FlowValue, eps: float) -> FlowValue:
    """Write a LayerNorm by the weights `{prefix}.{name}.{weight,bias}` in the block `name`."""
    with emit.scope(*name.split(".")):
        return emit.layer_norm(x, f"{prefix}.{name}.weight", f"{prefix}.{name}.bias", eps)


def rms_norm(emit: Emit, x: FlowValue, key: str | FlowValue, eps: float, offset: float = 0.0) -> FlowValue:
    """RMSNorm by the weight under `key`, or a value, plus `offset`; the beta is that of a ZeroBeta stage if one ran and
    fits."""
    beta = emit.state.zero_beta
    fits = beta is not None and beta.type.shape == x.type.shape[-1:]
    return emit.rms_norm(x, key, beta if fits else None, eps, offset=offset)


def head_norm(emit: Emit, x: FlowValue, key: str, head_dim: int | None, eps: float, offset: float = 0.0) -> FlowValue:
    """RMSNorm of every head alone, or of all as one vector where `head_dim` is None: packed `[B,S,N·D]` → same.
    Weight: `key` `[D]` or `[N·D]`, to which `offset` is added."""
    with emit.scope(module_of(key)):
        if head_dim is None:
            return rms_norm(emit, x, key, eps, offset)
        heads = x.reshape(*x.shape[:-1], -1, head_dim)
        return rms_norm(emit, heads, key, eps, offset).reshape(x.shape)


def module_of(key: str) -> str:
    """Return `q_proj` of `layers.0.q_proj.weight`: the block that a weight belongs to."""
    parts = key.split(".")
    return parts[-2] if len(parts) > 1 else parts[-1]
