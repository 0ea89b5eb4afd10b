"""`LayerSpec`: one record that describes every decoder layer; and Gemma's layers as differences from Llama's.

    Gemma 1     h = x + attn(norm(x))              y = h + geglu(norm(h))
    Gemma 2, 3  h = x + norm(attn(norm(x)))        y = h + norm(geglu(norm(h)))

Norms of Gemma are `GemmaRmsNorm`. Gemma 2 caps its attention scores; Gemma 3 normalises the heads of queries and keys
instead. The stages that write a layer are in `decoder.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Literal

from rlx_jax.blocks.ffn import INTO, OUT_OF, GeGlu, MoeFfn, MoeSpec, SwiGlu
from rlx_jax.blocks.linear import GemmaRmsNorm, RmsNorm
from rlx_jax.errors import GraphError, UnsupportedError, shown
from rlx_jax.ir import hir
from rlx_jax.ir.hir import MaskKind
from rlx_jax.ir.param import Parts, Role
from rlx_jax.ir.types import DimLike
from rlx_jax.trace.parameters import WeightKey, WeightPart

__all__ = [
    "DecoderKeys", "GemmaStyle", "LayerNorms", "LayerSpec", "gemma2_layer_mask", "gemma_layer_spec",
    "gemma_strided_layer_mask",
]  # fmt: skip

# The MLP by the activation of its gate.
GATES: dict[str, type[SwiGlu]] = {"silu": SwiGlu, "gelu_tanh": GeGlu}

QK_NORMS = (None, "heads", "width")

# Of the input `[B, S, H]` of a layer, to be checked; None is any size.
HiddenShape = tuple[int | str | None, ...] | None

QKV, MLP = ("q", "k", "v"), ("gate", "up", "down")


@dataclass(frozen=True, kw_only=True)
class LayerNorms:
    """The keys, inside a layer, of the norms around its two halves; None for no norm. The defaults are Llama's."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None

    @staticmethod
    def around_both() -> LayerNorms:
        """One before and one after each half, under Gemma 2's keys."""
        return LayerNorms(
            after_attention="post_attention_layernorm",
            before_mlp="pre_feedforward_layernorm",
            after_mlp="post_feedforward_layernorm",
        )

    @staticmethod
    def after_both() -> LayerNorms:
        """One after each half and none before, under OLMo 2's keys."""
        return replace(LayerNorms.around_both(), before_attention=None, before_mlp=None)


@dataclass(frozen=True, kw_only=True)
class DecoderKeys:
    """The keys of a layer's weights but for its norms and experts; `{}` stands for the prefix of the layer.

    Projections with one key are stored as one tensor, side by side: q, k and v, or gate and up. The key of a bias ends
    in `.bias` where that of the weight ends in `.weight`.
    """

    q: str = "{}.self_attn.q_proj.weight"
    k: str = "{}.self_attn.k_proj.weight"
    v: str = "{}.self_attn.v_proj.weight"
    o: str = "{}.self_attn.o_proj.weight"
    gate: str = "{}.mlp.gate_proj.weight"
    up: str = "{}.mlp.up_proj.weight"
    down: str = "{}.mlp.down_proj.weight"
    q_norm: str | None = "{}.self_attn.q_norm.weight"
    k_norm: str | None = "{}.self_attn.k_norm.weight"
    sinks: str = "{}.self_attn.sinks"

    @staticmethod
    def fused(qkv: str = "{}.self_attn.qkv_proj.weight", gate_up: str = "{}.mlp.gate_up_proj.weight") -> DecoderKeys:
        """Keys of a layer with one tensor for q, k and v and one for gate and up; the defaults are Phi 3's."""
        return DecoderKeys(q=qkv, k=qkv, v=qkv, gate=gate_up, up=gate_up)

    def under(self, prefix: str) -> DecoderKeys:
        """Return the keys of the layer under `prefix`."""
        keys = {f.name: getattr(self, f.name) for f in fields(self)}
        return DecoderKeys(**{name: key and key.replace("{}", prefix) for name, key in keys.items()})


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """A decoder layer: its sizes, and how it differs from Llama's, whose values are the defaults.

        h = x + m · after(attention(before(x)) Wo)        y = h + m · after(mlp(before(h)))

    `num_heads` is a multiple of `num_kv_heads`; `head_dim` need not be hidden / heads.

    Args:
        eps: of every norm.
        mask: causal, or a sliding window of the last keys; one that is custom or a bias reads an input.
        mask_input: the name of that input. `use_custom_mask`: explicit decode reads the keep mask `mask`.
        rope: the name of the RopeTables to read, where a flow has several.
        rope_theta: the base of the rotation when no RopeTables stage ran.
        n_rot: columns of each head that are rotated; None is all, 0 is none (NoPE).
        gated: a sigmoid gate of each head of the context, beside its query in q's weight `[N·2D, H]` (Qiu et al.,
            arXiv:2505.06708).
        sinks: a score of each head in the softmax of its attention, a weight `[N]`; see `emit.attention`.
        score_scale: what q kᵀ is multiplied with; None is D^(−1/2).
        attn_logit_softcap: c tanh(scores / c).
        qkv_bias, output_bias, mlp_bias: biases of the projections.
        qk_norm: an RMSNorm of queries and keys before the rotation: of every head alone, `heads`, with weights `[D]`,
            or of all heads as one vector, `width`, with weights `[N·D]` and `[K·D]`. `qk_norm_eps` and
            `qk_norm_offset`, what is added to the weight, are as in the other norms unless given.
        norms: which norms there are around the halves, and their keys.
        zero_centred: norms multiply with 1 + w, those of heads too.
        activation: of the gate, `silu` or `gelu_tanh`.
        moe: experts in the place of the MLP.
        residual_multiplier: m.
        keys: those of the weights; several projections may be stored as one.
        hidden_shape: what the input is held against, if given.
        intermediate_size: the width of the MLP, needed only for weights that no source has.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float = 1e-6
    mask: MaskKind | str = hir.MASK_KINDS["causal"]
    mask_input: str | None = None
    use_custom_mask: bool = False
    rope: str = ""
    rope_theta: float = 10000.0
    n_rot: int | None = None
    gated: bool = False
    sinks: bool = False
    score_scale: float | None = None
    attn_logit_softcap: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["heads", "width"] | None = None
    qk_norm_eps: float | None = None
    qk_norm_offset: float | None = None
    norms: LayerNorms = LayerNorms()
    zero_centred: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    mlp_bias: bool = False
    moe: MoeSpec | None = None
    residual_multiplier: float = 1.0
    keys: DecoderKeys = DecoderKeys()
    hidden_shape: HiddenShape = None
    intermediate_size: int | None = None

    def __post_init__(self) -> None:
        if self.moe is not None and self.mlp_bias:
            raise GraphError("LayerSpec: mlp_bias is of an MLP, and moe has experts in its place; give one of them")
        for name, choices in (("activation", tuple(GATES)), ("qk_norm", QK_NORMS)):
            if getattr(self, name) not in choices:
                expected = " or ".join(map(repr, choices))
                raise GraphError(f"LayerSpec: {name} is {shown(getattr(self, name))}; expected {expected}")

    # -- where it stands ---------------------------------------------------------------------

    def under(self, prefix: str, mask_input: str | None = None) -> LayerSpec:
        """The layer under `prefix`, whose mask reads the input `mask_input`."""
        return replace(self, keys=self.keys.under(prefix), mask_input=mask_input or self.mask_input)

    attention = under
    """The attention of the layer under a prefix: its stages read the layer's record."""

    def columns(self, name: str) -> int:
        """How wide projection q, k or v is."""
        heads = {"q": self.num_heads * (1 + self.gated), "k": self.num_kv_heads, "v": self.num_kv_heads}
        return heads[name] * self.head_dim

    def sizes(self, name: str, hidden: DimLike) -> tuple[DimLike | None, DimLike | None]:
        """What is known of the stored weight of projection `name`, `[out, in]`, for values `[B,S,hidden]`."""
        inner = self.intermediate_size
        others = {"o": (hidden, self.num_heads * self.head_dim), "down": (hidden, inner)}
        return (self.columns(name), hidden) if name in QKV else others.get(name, (inner, hidden))

    def weight(self, name: str, bias: bool = False) -> WeightKey:
        """The key of projection `name` or of its bias: a part of a stored tensor where others have that key too."""
        key: str = getattr(self.keys, name)
        shared = [n for n in (QKV if name in QKV else MLP) if getattr(self.keys, n) == key]
        key = f"{key.removesuffix('.weight')}.bias" if bias else key
        if len(shared) < 2:
            return key
        parts = tuple(self.columns(n) for n in shared) if name in QKV else len(shared)
        return WeightPart.split(key, parts)[shared.index(name)]

    def bias(self, name: str) -> WeightKey | None:
        """The key of the bias of projection `name`, if it has one."""
        biased = self.output_bias if name == "o" else self.qkv_bias if name in QKV else self.mlp_bias
        return self.weight(name, bias=True) if biased else None

    def roles(self, name: str) -> tuple[Role, Role]:
        """What the axes of the stored weight of projection `name` are."""
        if name in MLP or name == "o":
            return {"o": ("hidden", "heads"), "down": OUT_OF}.get(name, INTO)
        part = self.weight(name)
        if isinstance(part, WeightPart) and part.sizes is not None:
            shared = [n for n in QKV if getattr(self.keys, n) == part.key]
            return Parts(tuple(zip(part.sizes, map(ROLE_OF_HEADS.__getitem__, shared), strict=True))), "hidden"
        return ROLE_OF_HEADS[name], "hidden"

    # -- its parts ---------------------------------------------------------------------------

    def block(self, mask: MaskKind) -> hir.Attention:
        """The attention itself."""
        return hir.attention(
            self.num_heads, self.num_kv_heads, mask, scale=self.score_scale, softcap=self.attn_logit_softcap,
            sinks=self.sinks,
        )  # fmt: skip

    def mlp(self, prefix: str) -> SwiGlu | MoeFfn:
        """The MLP of the layer under `prefix`, or its experts."""
        if self.moe is not None:
            return MoeFfn(prefix, self.moe, self.activation)
        here = self.under(prefix)
        gate, up, down = (here.weight(name) for name in MLP)
        biases = (here.bias("gate"), here.bias("up"), here.bias("down"))
        return GATES[self.activation](gate, up, down, biases if self.mlp_bias else None, self.intermediate_size)

    def norm(self, name: str) -> RmsNorm | GemmaRmsNorm:
        """A norm as those of the layer, with the weight `{name}.weight`."""
        return (GemmaRmsNorm if self.zero_centred else RmsNorm)(f"{name}.weight", self.eps)


ROLE_OF_HEADS = {"q": "heads", "k": "kv_heads", "v": "kv_heads"}


class GemmaStyle(Enum):
    """Which layer: `GEMMA`, `GEMMA2`, `GEMMA3`. `GEMMA4` is a known name that is not built."""

    GEMMA = "gemma"
    GEMMA2 = "gemma2"
    GEMMA3 = "gemma3"
    GEMMA4 = "gemma4"


# The norms of a layer by its style.
NORMS = {
    GemmaStyle.GEMMA: LayerNorms(),
    GemmaStyle.GEMMA2: LayerNorms.around_both(),
    GemmaStyle.GEMMA3: LayerNorms.around_both(),
}


def gemma_layer_spec(style: GemmaStyle, layer: LayerSpec) -> LayerSpec:
    """Return `layer` with what sets Gemma apart from Llama, as far as its sizes do not say so.

    Raises:
        UnsupportedError: Gemma 4.
    """
    if style not in NORMS:
        raise UnsupportedError(f"{style.name} is not built; {', '.join(known.name for known in NORMS)} are")
    qk_norm = layer.qk_norm or ("heads" if style is GemmaStyle.GEMMA3 else None)
    return replace(layer, norms=NORMS[style], zero_centred=True, activation="gelu_tanh", qk_norm=qk_norm)


def gemma2_layer_mask(index: int, window: int) -> MaskKind:
    """Gemma 2: even layers read a window, odd ones every key before the query."""
    return gemma_strided_layer_mask(index, window, 2)


def gemma_strided_layer_mask(index: int, window: int, stride: int) -> MaskKind:
    """Every layer whose number, from 1, is a multiple of `stride` > 1 is causal, the others read a window."""
    if stride < 1:
        raise GraphError(f"gemma_strided_layer_mask: the stride is at least 1, got {stride}")
    if stride > 1 and (index + 1) % stride == 0:
        return MaskKind.CAUSAL
    return MaskKind.sliding_window(window)
