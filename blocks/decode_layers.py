"""The decode forms of the families' layers: the layer with SelfAttnDecode as its attention, and taps of its keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

from rlx_jax.blocks.attention import SelfAttnPrefill, SelfAttnPrefillSpec, projections, side_outputs
from rlx_jax.blocks.contracts import KvCacheContract, Shape
from rlx_jax.blocks.control import BlockStage, Named, Sequence
from rlx_jax.blocks.decode import SelfAttnDecode, cached
from rlx_jax.blocks.decoder import (
    LlamaDecoder,
    LlamaDecoderSpec,
    attention_spec,
    check_hidden,
    norm_beta,
    pre_norm_layer,
)
from rlx_jax.blocks.gemma import GemmaStyle, gemma_attention, gemma_layer
from rlx_jax.blocks.qwen3 import Qwen3Decoder, Qwen3DecoderSpec, attention_of
from rlx_jax.emit import Emit, FlowValue
from rlx_jax.errors import GraphError
from rlx_jax.ir import hir
from rlx_jax.ir.hir import MaskKind

# -- what they share -----------------------------------------------------------------------------


class DecodeSpec(Protocol):
    """The fields that every decode layer's spec has."""

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def kv_group_size(self) -> int | None: ...
    @property
    def hidden_shape(self) -> tuple[int | str, ...] | None: ...


def emit_layer(
    emit: Emit, value: FlowValue | None, stage: str, index: int, spec: DecodeSpec, layer: BlockStage
) -> FlowValue:
    """`layer`, after its input, its spec and its cache were checked."""
    x = emit.require(value, stage)
    check_hidden(emit, x, spec.hidden_shape, stage)
    group, heads, kv_heads = spec.kv_group_size, spec.num_heads, spec.num_kv_heads
    if group is not None and group * kv_heads != heads:
        raise GraphError(
            f"{emit.path}: {stage}: kv_group_size is {group}, and {heads} query heads to {kv_heads} key heads are "
            f"{heads / kv_heads:g}; leave it out"
        )
    cached(emit, index, stage)
    return emit.require(layer.emit(emit, x), stage)


def common(spec: Any, kind: type[Any]) -> dict[str, Any]:
    """The fields of `spec` that `kind` has too."""
    return {f.name: getattr(spec, f.name) for f in fields(kind) if hasattr(spec, f.name)}


# -- Llama ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LlamaDecodeLayerSpec:
    """Sizes of a Llama layer that decodes. As `LlamaDecoderSpec`; `mask` is causal or a sliding window.

    `kv_group_size` is num_heads / num_kv_heads and may be left out; `use_custom_mask` reads the keep mask.
    """

    num_heads: int
    head_dim: int
    num_kv_heads: int
    kv_group_size: int | None = None
    eps: float = 1e-5
    use_custom_mask: bool = False
    hidden_shape: tuple[int | str, ...] | None = None
    mask: MaskKind | str = MaskKind.CAUSAL
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float = 10000.0

    @staticmethod
    def of(spec: LlamaDecoderSpec, use_custom_mask: bool = False) -> LlamaDecodeLayerSpec:
        """The decode form of a layer."""
        return LlamaDecodeLayerSpec(**common(spec, LlamaDecodeLayerSpec), use_custom_mask=use_custom_mask)


@dataclass(frozen=True)
class LlamaDecodeLayer:
    """One Llama layer over cached and new tokens: `[B,S,H]` → same. Weights as LlamaDecoder; see SelfAttnDecode."""

    layer_prefix: str
    layer_idx: int
    spec: LlamaDecodeLayerSpec

    @staticmethod
    def layer(index: int, spec: LlamaDecodeLayerSpec) -> LlamaDecodeLayer:
        """Layer `index` under Hugging Face's keys."""
        return LlamaDecodeLayer(f"model.layers.{index}", index, spec)

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        s = self.spec
        layer = pre_norm_layer(self.layer_prefix, s.eps, self.attention(), s.attention_bias, s.mlp_bias)
        return emit_layer(emit, value, "LlamaDecodeLayer", self.layer_idx, s, layer)

    def attention(self) -> SelfAttnDecode:
        """The stage in the middle."""
        spec = LlamaDecoderSpec(**common(self.spec, LlamaDecoderSpec))
        return SelfAttnDecode(attention_spec(self.layer_prefix, spec), self.layer_idx, self.spec.use_custom_mask)

    def cache_contract(self, emit: Emit, hidden: Shape) -> KvCacheContract:
        """Keys and values `[B, P+S, K·D]` of an input `[B, S, H]`."""
        return self.attention().cache_contract(emit, hidden)


@dataclass(frozen=True)
class LlamaKvTap:
    """Give the keys and values of the Llama layer that follows as `kv.{i}.k` and `kv.{i}.v` `[B,S,K·D]`; x passes on.

    It norms and projects x as that layer does; common subexpressions are computed once.
    """

    layer_prefix: str
    layer_idx: int
    head_dim: int
    eps: float = 1e-5
    attention_bias: bool = False
    rope_theta: float = 10000.0

    @staticmethod
    def layer(index: int, spec: LlamaDecoderSpec) -> LlamaKvTap:
        """The tap of layer `index` under Hugging Face's keys."""
        return LlamaKvTap.of(LlamaDecoder.layer(index, spec), index)

    @staticmethod
    def of(layer: LlamaDecoder, index: int) -> LlamaKvTap:
        """The tap of `layer`, whose side outputs are called by `index`."""
        s = layer.spec
        return LlamaKvTap(layer.layer_prefix, index, s.head_dim, s.eps, s.attention_bias, s.rope_theta)

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "LlamaKvTap")
        with emit.scope("input_layernorm"):
            gamma = emit.param(f"{self.layer_prefix}.input_layernorm.weight")
            normed = emit.add(hir.RmsNorm(self.eps), x, gamma, norm_beta(emit, x))
        sizes = LlamaDecoderSpec(1, self.head_dim, 1, attention_bias=self.attention_bias, rope_theta=self.rope_theta)
        with emit.scope("self_attn"):
            k, v = projections(emit, normed, attention_spec(self.layer_prefix, sizes), "kv")
        side_outputs(emit, f"kv.{self.layer_idx}", k, v)
        return x


def llama_decode_layer(index: int, spec: LlamaDecodeLayerSpec) -> Named:
    """Llama's layer `index` over cached and new tokens."""
    return Named(f"layer{index}", LlamaDecodeLayer.layer(index, spec))


# -- Qwen 2 and 3 --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Qwen3DecodeLayerSpec:
    """Sizes of a Qwen layer that decodes. As `Qwen3DecoderSpec`; `mask` is causal or a sliding window.

    `kv_group_size` is num_heads / num_kv_heads and may be left out; `use_custom_mask` reads the keep mask.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_group_size: int | None = None
    eps: float = 1e-6
    use_custom_mask: bool = False
    hidden_shape: tuple[int | str, ...] | None = None
    batch: int | str | None = None
    qk_norm: bool = True
    attention_bias: bool = False
    output_bias: bool = False
    mask: MaskKind | str = MaskKind.CAUSAL
    rope_theta: float = 10000.0

    @staticmethod
    def of(spec: Qwen3DecoderSpec, use_custom_mask: bool = False) -> Qwen3DecodeLayerSpec:
        """The decode form of a layer."""
        return Qwen3DecodeLayerSpec(**common(spec, Qwen3DecodeLayerSpec), use_custom_mask=use_custom_mask)


@dataclass(frozen=True)
class Qwen3DecodeLayer:
    """One Qwen layer over cached and new tokens: `[B,S,H]` → same. Weights as Qwen3Decoder; see SelfAttnDecode."""

    layer_prefix: str
    layer_idx: int
    spec: Qwen3DecodeLayerSpec

    @staticmethod
    def layer(index: int, spec: Qwen3DecodeLayerSpec) -> Qwen3DecodeLayer:
        """Layer `index` under Hugging Face's keys."""
        return Qwen3DecodeLayer(f"model.layers.{index}", index, spec)

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        s = self.spec
        x = emit.require(value, "Qwen3DecodeLayer")
        check_hidden(emit, x, (s.batch, None, None), "Qwen3DecodeLayer")
        layer = pre_norm_layer(self.layer_prefix, s.eps, self.attention(), s.output_bias)
        return emit_layer(emit, x, "Qwen3DecodeLayer", self.layer_idx, s, layer)

    def attention(self) -> SelfAttnDecode:
        """The stage in the middle."""
        spec = Qwen3DecoderSpec(**common(self.spec, Qwen3DecoderSpec))
        return SelfAttnDecode(attention_of(self.layer_prefix, spec), self.layer_idx, self.spec.use_custom_mask)

    def cache_contract(self, emit: Emit, hidden: Shape) -> KvCacheContract:
        """Keys and values `[B, P+S, K·D]` of an input `[B, S, H]`."""
        return self.attention().cache_contract(emit, hidden)


def qwen3_decode_layer_fused(index: int, spec: Qwen3DecodeLayerSpec) -> Named:
    """Qwen's layer `index` over cached and new tokens."""
    return Named(f"layer{index}", Qwen3DecodeLayer.layer(index, spec))


# -- Gemma 1, 2 and 3 ----------------------------------------------------------------------------


@dataclass(frozen=True)
class GemmaDecodeLayerSpec:
    """Sizes of a Gemma layer that decodes; `mask` is causal or a sliding window, a custom mask changes nothing else.

    Scores are `score_scale · q kᵀ`, D^(−1/2) unless given, capped by `attn_logit_softcap`; `rope` names the RopeTables
    to read. `kv_group_size` is num_heads / num_kv_heads and may be left out.
    """

    style: GemmaStyle
    num_heads: int
    head_dim: int
    num_kv_heads: int
    kv_group_size: int | None = None
    eps: float = 1e-6
    use_custom_mask: bool = False
    hidden_shape: tuple[int | str, ...] | None = None
    mask: MaskKind | str = MaskKind.CAUSAL
    score_scale: float | None = None
    attn_logit_softcap: float | None = None
    attention_bias: bool = False
    rope_theta: float = 10000.0
    rope: str = ""

    @staticmethod
    def of(
        style: GemmaStyle, attention: SelfAttnPrefillSpec, eps: float = 1e-6, use_custom_mask: bool = False
    ) -> GemmaDecodeLayerSpec:
        """The decode form of the layer around `attention`."""
        return GemmaDecodeLayerSpec(
            style, **common(attention, GemmaDecodeLayerSpec), eps=eps, use_custom_mask=use_custom_mask,
            attention_bias=attention.biases is not None,
        )  # fmt: skip

    def attention(self, prefix: str) -> SelfAttnPrefillSpec:
        """The attention of the layer under `prefix`."""
        heads = (self.num_heads, self.head_dim, self.num_kv_heads)
        keys = SelfAttnPrefillSpec.hf_layer(prefix, *heads, self.attention_bias)
        names = ("mask", "score_scale", "attn_logit_softcap", "rope_theta", "rope")
        spec = replace(keys, **{name: getattr(self, name) for name in names})
        return gemma_attention(prefix, self.style, spec, self.eps)


@dataclass(frozen=True)
class GemmaDecodeLayer:
    """One Gemma layer over cached and new tokens: `[B,S,H]` → same.

    Weights as `gemma_prefill_layer_composed`; see SelfAttnDecode.
    """

    layer_prefix: str
    layer_idx: int
    spec: GemmaDecodeLayerSpec

    @staticmethod
    def layer(index: int, spec: GemmaDecodeLayerSpec) -> GemmaDecodeLayer:
        """Layer `index` under Hugging Face's keys."""
        return GemmaDecodeLayer(f"model.layers.{index}", index, spec)

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        s = self.spec
        layer = gemma_layer(self.layer_prefix, s.style, self.attention(), s.eps, s.attention_bias)
        return emit_layer(emit, value, "GemmaDecodeLayer", self.layer_idx, s, layer)

    def attention(self) -> SelfAttnDecode:
        """The stage in the middle."""
        return SelfAttnDecode(self.spec.attention(self.layer_prefix), self.layer_idx, self.spec.use_custom_mask)

    def cache_contract(self, emit: Emit, hidden: Shape) -> KvCacheContract:
        """Keys and values `[B, P+S, K·D]` of an input `[B, S, H]`."""
        return self.attention().cache_contract(emit, hidden)


@dataclass(frozen=True)
class GemmaKvTap:
    """Give the keys and values of a Gemma attention as `kv.{i}.k` and `kv.{i}.v` `[B,S,K·D]`; x passes on.

    It stands behind the input norm: x is what the attention reads. Common subexpressions are computed once.
    """

    layer_prefix: str
    layer_idx: int
    head_dim: int
    style: GemmaStyle = GemmaStyle.GEMMA
    eps: float = 1e-6
    attention_bias: bool = False
    rope_theta: float = 10000.0
    rope: str = ""

    @staticmethod
    def layer(index: int, style: GemmaStyle, attention: SelfAttnPrefillSpec, eps: float = 1e-6) -> GemmaKvTap:
        """The tap of layer `index` under Hugging Face's keys."""
        a, prefix = attention, f"model.layers.{index}"
        return GemmaKvTap(prefix, index, a.head_dim, style, eps, a.biases is not None, a.rope_theta, a.rope)

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "GemmaKvTap")
        spec = GemmaDecodeLayerSpec(num_heads=1, num_kv_heads=1, **common(self, GemmaDecodeLayerSpec))
        with emit.scope("self_attn"):
            k, v = projections(emit, x, spec.attention(self.layer_prefix), "kv")
        side_outputs(emit, f"kv.{self.layer_idx}", k, v)
        return x


def gemma_prefill_layer_kv(index: int, style: GemmaStyle, attention: SelfAttnPrefillSpec, eps: float = 1e-6) -> Named:
    """`gemma_prefill_layer_composed` with the side outputs `kv.{index}.k` and `kv.{index}.v`."""
    p = f"model.layers.{index}"
    attend = SelfAttnPrefill(gemma_attention(p, style, attention, eps))
    tapped = Sequence([GemmaKvTap.layer(index, style, attention, eps), attend])
    return Named(f"layer{index}", gemma_layer(p, style, tapped, eps, o_bias=attention.biases is not None))


def gemma_decode_layer(index: int, spec: GemmaDecodeLayerSpec) -> Named:
    """Gemma's layer `index` over cached and new tokens."""
    return Named(f"layer{index}", GemmaDecodeLayer.layer(index, spec))


# -- any layer -----------------------------------------------------------------------------------

Rules = dict[type[Any], Callable[[Any], BlockStage]]


def decode_form(layer: BlockStage, index: int, use_custom_mask: bool = False) -> BlockStage:
    """Layer `index` of any family behind a cache: its attention, or the fused layer, in its decode form.

    What is neither stays as it is, and has to treat tokens one by one; nothing here proves that, unlike `derive`.
    """
    rules: Rules = {
        SelfAttnPrefill: lambda s: SelfAttnDecode(s.spec, index, use_custom_mask),
        LlamaDecoder: lambda s: LlamaDecodeLayer(
            s.layer_prefix, index, LlamaDecodeLayerSpec.of(s.spec, use_custom_mask)
        ),
        Qwen3Decoder: lambda s: Qwen3DecodeLayer(
            s.layer_prefix, index, Qwen3DecodeLayerSpec.of(s.spec, use_custom_mask)
        ),
    }
    return _changed(layer, rules)


def tapped(layer: BlockStage, index: int) -> BlockStage:
    """Layer `index` of any family, with its keys and values as the side outputs `kv.{index}.k` and `kv.{index}.v`."""
    rules: Rules = {
        SelfAttnPrefill: lambda s: SelfAttnPrefill(s.spec, f"kv.{index}"),
        LlamaDecoder: lambda s: Sequence([LlamaKvTap.of(s, index), s]),
        Qwen3Decoder: lambda s: replace(s, kv_name=f"kv.{index}"),
    }
    return _changed(layer, rules)


def _changed(stage: BlockStage, rules: Rules) -> BlockStage:
    """The stage with every stage inside it by its rule."""
    if isinstance(stage, Named):
        return replace(stage, inner=_changed(stage.inner, rules))
    if isinstance(stage, Sequence):
        return Sequence(_changed(s, rules) for s in stage.stages)
    rule = rules.get(type(stage))
    return stage if rule is None else rule(stage)
