"""`LayerSpec`, one record that describes every decoder layer, and Gemma's layers as differences from Llama's.

    Gemma 1     h = x + attn(norm(x))              y = h + geglu(norm(h))
    Gemma 2, 3  h = x + norm(attn(norm(x)))        y = h + norm(geglu(norm(h)))

Gemma's norms are `GemmaRmsNorm`. Gemma 2 caps its attention scores; Gemma 3 normalises the heads of queries and keys
instead. The stages that write a layer are in `decoder.py`.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Literal

from rlx_jax.blocks.ffn import DOWN_ROLES, UP_ROLES, GeGlu, MoeFfn, MoeSpec, SwiGlu
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

# The class of the MLP by the activation of its gate.
GATED_MLPS: dict[str, type[SwiGlu]] = {"silu": SwiGlu, "gelu_tanh": GeGlu}

QK_NORMS = (None, "heads", "width")

# Expected shape of a layer's input `[B, S, H]`; None accepts any size.
HiddenShape = tuple[int | str | None, ...] | None

QKV, MLP = ("q", "k", "v"), ("gate", "up", "down")


@dataclass(frozen=True, kw_only=True)
class LayerNorms:
    """Names of the norms around the two halves of a layer, relative to its prefix; None for no norm.

    The defaults are Llama's.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None

    @staticmethod
    def around_both() -> LayerNorms:
        """Return norms before and after attention and the MLP, with Gemma 2's names (sandwich norms)."""
        return LayerNorms(
            after_attention="post_attention_layernorm",
            before_mlp="pre_feedforward_layernorm",
            after_mlp="post_feedforward_layernorm",
        )

    @staticmethod
    def after_both() -> LayerNorms:
        """Return norms after attention and after the MLP only, with OLMo 2's names."""
        return replace(LayerNorms.around_both(), before_attention=None, before_mlp=None)


@dataclass(frozen=True, kw_only=True)
class DecoderKeys:
    """Keys of a layer's weights, except for its norms and experts; `{}` is a placeholder for the layer's prefix.

    Projections with the same key are fused, in the order q, k, v or gate, up: the stored tensor is their concatenation
    along the output axis. The key of a bias ends in `.bias` where the key of its weight ends in `.weight`.
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
        """Return keys with one tensor for q, k and v and one for gate and up; the defaults are Phi 3's."""
        return DecoderKeys(q=qkv, k=qkv, v=qkv, gate=gate_up, up=gate_up)

    def under(self, prefix: str) -> DecoderKeys:
        """Return the keys of the layer under `prefix`."""
        keys = {f.name: getattr(self, f.name) for f in fields(self)}
        return DecoderKeys(**{name: key and key.replace("{}", prefix) for name, key in keys.items()})


# The types of options of a `LayerSpec` that no block checks before it reads them.
OPTION_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("gated", "sinks", "qkv_bias", "output_bias", "mlp_bias", "zero_centred"), (bool,)),
    "norms": (LayerNorms,), "keys": (DecoderKeys,), "moe": (MoeSpec, type(None)),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """Sizes and options of a decoder layer; the defaults describe Llama's layer.

        h = x + m · after(attention(before(x)) Wo)        y = h + m · after(mlp(before(h)))

    `num_heads` is a multiple of `num_kv_heads`; `head_dim` need not be hidden / heads.

    Args:
        eps: epsilon of every norm.
        mask: causal, or a sliding window of the last keys; a custom mask or a bias reads an input.
        mask_input: name of that input.
        use_custom_mask: explicit decode reads the input `mask`, a keep mask.
        rope: name of the RopeTables to read, in a flow with several.
        rope_theta: base of the rotation, used when no RopeTables stage ran.
        n_rot: number of columns of each head that are rotated; None is all, 0 is none (NoPE).
        gated: multiply the context of each head by a sigmoid gate. q's weight `[N·2D, H]` then has the rows of each
            head's query and gate in turn (Qiu et al., arXiv:2505.06708).
        sinks: add one learned score per head to the softmax of attention, a weight `[N]`; see `emit.attention`.
        score_scale: factor of q kᵀ; None is D^(−1/2).
        attn_logit_softcap: c in `c tanh(scores / c)`.
        qkv_bias, output_bias, mlp_bias: whether the projections have biases.
        qk_norm: RMSNorm of queries and keys before the rotation. `heads` normalises every head separately, with
            weights `[D]`; `width` normalises all heads as one vector, with weights `[N·D]` and `[K·D]`.
        qk_norm_eps, qk_norm_offset: epsilon of these norms and the constant that is added to their weights; by default
            as in the other norms.
        norms: names of the norms around the halves.
        zero_centred: all norms, also of heads, multiply by 1 + w.
        activation: activation of the gate, `silu` or `gelu_tanh`.
        moe: experts in place of the MLP.
        residual_multiplier: m.
        keys: keys of the weights; projections may be fused.
        hidden_shape: expected shape of the input, if given.
        intermediate_size: width of the MLP; needed only for weights that no source has.
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
            raise GraphError("LayerSpec: mlp_bias applies to an MLP, but moe replaces it by experts; give one of them")
        for name, choices in (("activation", tuple(GATED_MLPS)), ("qk_norm", QK_NORMS)):
            if getattr(self, name) not in choices:
                expected = " or ".join(map(repr, choices))
                raise GraphError(f"LayerSpec: {name} is {shown(getattr(self, name))}; expected {expected}")
        for name, types in OPTION_TYPES.items():
            if not isinstance(getattr(self, name), types):
                expected = " or ".join("None" if t is type(None) else t.__name__ for t in types)
                raise GraphError(f"LayerSpec: {name} is {shown(getattr(self, name))}; expected {expected}")
        multiplier = self.residual_multiplier
        if isinstance(multiplier, bool) or not isinstance(multiplier, numbers.Real) or not math.isfinite(multiplier):
            raise GraphError(f"LayerSpec: residual_multiplier is {shown(multiplier)}; expected a finite number")

    # -- parameters under a prefix -----------------------------------------------------------

    def under(self, prefix: str, mask_input: str | None = None) -> LayerSpec:
        """Return the spec with complete keys under `prefix`, and with `mask_input` as the input of its mask."""
        return replace(self, keys=self.keys.under(prefix), mask_input=mask_input or self.mask_input)

    attention = under
    """Alias of `under`, for stages of attention, which read the spec of their layer."""

    def columns(self, name: str) -> int:
        """Return the output width of projection q, k or v; a gated query is twice as wide."""
        heads = {"q": self.num_heads * (1 + self.gated), "k": self.num_kv_heads, "v": self.num_kv_heads}
        return heads[name] * self.head_dim

    def sizes(self, name: str, hidden: DimLike) -> tuple[DimLike | None, DimLike | None]:
        """Return the shape `[out, in]` of projection `name` for values `[B,S,hidden]`; None for an unknown size."""
        inner = self.intermediate_size
        others = {"o": (hidden, self.num_heads * self.head_dim), "down": (hidden, inner)}
        return (self.columns(name), hidden) if name in QKV else others.get(name, (inner, hidden))

    def weight(self, name: str, bias: bool = False) -> WeightKey:
        """Return the key of projection `name`, or of its bias; for a fused projection, its part of the tensor."""
        key: str = getattr(self.keys, name)
        fused = [n for n in (QKV if name in QKV else MLP) if getattr(self.keys, n) == key]
        key = f"{key.removesuffix('.weight')}.bias" if bias else key
        if len(fused) < 2:
            return key
        # q is wider than k and v where heads are grouped, so their parts have sizes; gate and up are halves.
        parts = tuple(self.columns(n) for n in fused) if name in QKV else len(fused)
        return WeightPart.split(key, parts)[fused.index(name)]

    def bias(self, name: str) -> WeightKey | None:
        """Return the key of the bias of projection `name`, or None if it has none."""
        biased = self.output_bias if name == "o" else self.qkv_bias if name in QKV else self.mlp_bias
        return self.weight(name, bias=True) if biased else None

    def roles(self, name: str) -> tuple[Role, Role]:
        """Return the roles of the two axes of the stored weight of projection `name`."""
        if name in MLP or name == "o":
            return {"o": ("hidden", "heads"), "down": DOWN_ROLES}.get(name, UP_ROLES)
        part = self.weight(name)
        # The output axis of a fused weight has several roles, so that a mesh shards q, k and v separately.
        if isinstance(part, WeightPart) and part.sizes is not None:
            fused = [n for n in QKV if getattr(self.keys, n) == part.key]
            return Parts(tuple(zip(part.sizes, map(HEAD_ROLES.__getitem__, fused), strict=True))), "hidden"
        return HEAD_ROLES[name], "hidden"

    # -- stages of the layer -----------------------------------------------------------------

    def block(self, mask: MaskKind) -> hir.Attention:
        """Return the HIR operation of the layer's attention, with the mask kind `mask`."""
        return hir.attention(
            self.num_heads, self.num_kv_heads, mask, scale=self.score_scale, softcap=self.attn_logit_softcap,
            sinks=self.sinks,
        )  # fmt: skip

    def mlp(self, prefix: str) -> SwiGlu | MoeFfn:
        """Return the MLP stage of the layer under `prefix`, or its mixture of experts."""
        if self.moe is not None:
            return MoeFfn(prefix, self.moe, self.activation)
        spec = self.under(prefix)
        gate, up, down = (spec.weight(name) for name in MLP)
        biases = (spec.bias("gate"), spec.bias("up"), spec.bias("down"))
        return GATED_MLPS[self.activation](gate, up, down, biases if self.mlp_bias else None, self.intermediate_size)

    def norm(self, name: str) -> RmsNorm | GemmaRmsNorm:
        """Return a norm of the layer's kind and epsilon, with the weight `{name}.weight`."""
        return (GemmaRmsNorm if self.zero_centred else RmsNorm)(f"{name}.weight", self.eps)


HEAD_ROLES = {"q": "heads", "k": "kv_heads", "v": "kv_heads"}


class GemmaStyle(Enum):
    """Version of Gemma: `GEMMA`, `GEMMA2` or `GEMMA3`. `GEMMA4` is in the specification but not supported."""

    GEMMA = "gemma"
    GEMMA2 = "gemma2"
    GEMMA3 = "gemma3"
    GEMMA4 = "gemma4"


GEMMA_NORMS = {
    GemmaStyle.GEMMA: LayerNorms(),
    GemmaStyle.GEMMA2: LayerNorms.around_both(),
    GemmaStyle.GEMMA3: LayerNorms.around_both(),
}


def gemma_layer_spec(style: GemmaStyle, layer: LayerSpec) -> LayerSpec:
    """Return `layer` with the norms and the activation of a version of Gemma; its sizes and mask are unchanged.

    Raises:
        UnsupportedError: Gemma 4.
    """
    if style not in GEMMA_NORMS:
        raise UnsupportedError(f"{style.name} is not supported; {', '.join(s.name for s in GEMMA_NORMS)} are")
    qk_norm = layer.qk_norm or ("heads" if style is GemmaStyle.GEMMA3 else None)
    return replace(layer, norms=GEMMA_NORMS[style], zero_centred=True, activation="gelu_tanh", qk_norm=qk_norm)


def gemma2_layer_mask(index: int, window: int) -> MaskKind:
    """Return the mask of Gemma 2's layer `index`: even layers have a sliding window, odd layers are causal."""
    return gemma_strided_layer_mask(index, window, 2)


def gemma_strided_layer_mask(index: int, window: int, stride: int) -> MaskKind:
    """Return the mask of layer `index`: every `stride`-th layer is causal, the others have a sliding window.

    Args:
        index: number of the layer, from 0; layers `stride - 1`, `2 * stride - 1`, … are causal.
        window: width of the window in tokens.
        stride: at least 1; with 1 every layer has a window.

    Raises:
        GraphError: `stride` is less than 1.
    """
    if stride < 1:
        raise GraphError(f"gemma_strided_layer_mask: the stride is at least 1, got {stride}")
    if stride > 1 and (index + 1) % stride == 0:
        return MaskKind.CAUSAL
    return MaskKind.sliding_window(window)
