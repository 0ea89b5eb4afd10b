"""Layers that decode, and taps of keys and values, under the names of the spec.

Each is the family's own layer with SelfAttnDecode in its middle. A recipe needs none of them: `explicit` and
`export_kv` are derived from any causal flow.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, Self

from rlx_jax.blocks.attention import SelfAttnPrefillSpec, SideOutputs, kv_name, projections, side_outputs
from rlx_jax.blocks.contracts import KvCacheContract
from rlx_jax.blocks.control import Named
from rlx_jax.blocks.decode import SelfAttnDecode, check_cached
from rlx_jax.blocks.decoder import DecoderLayerSpec, HiddenShape, LlamaDecoder, LlamaDecoderSpec, norm_beta
from rlx_jax.blocks.gemma import GemmaStyle, gemma_attention, gemma_layer, gemma_layer_spec
from rlx_jax.blocks.moe import MoeSpec
from rlx_jax.blocks.qwen3 import Qwen3DecoderSpec
from rlx_jax.errors import GraphError
from rlx_jax.ir import hir
from rlx_jax.ir.hir import MaskKind
from rlx_jax.ir.types import TensorType
from rlx_jax.trace.emit import Emit, FlowValue

# -- what they share -----------------------------------------------------------------------------


class DecodeSpec(Protocol):
    """The spec of a layer that decodes: what it says of the cache, and the layer it is without one."""

    @property
    def kv_group_size(self) -> int | None: ...
    @property
    def use_custom_mask(self) -> bool: ...
    def layer(self) -> DecoderLayerSpec: ...


@dataclass(frozen=True)
class DecodeLayer:
    """One layer over cached and new tokens: `[B,S,H]` → same; see SelfAttnDecode.

    A family's stage is this class with the spec of its layer. `kv_out` collects the names of its side outputs.
    """

    layer_prefix: str
    layer_idx: int
    spec: DecodeSpec
    kv_out: SideOutputs | None = None

    @classmethod
    def layer(cls, index: int, spec: Any, kv_out: SideOutputs | None = None) -> Self:
        """Layer `index` under Hugging Face's keys."""
        return cls(f"model.layers.{index}", index, spec, kv_out)

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        stage, layer = type(self).__name__, self.spec.layer()
        x, group = emit.require(value, stage), self.spec.kv_group_size
        if group is not None and group * layer.num_kv_heads != layer.num_heads:
            raise GraphError(
                f"{emit.path}: {stage}: kv_group_size is {group}, and {layer.num_heads} query heads to "
                f"{layer.num_kv_heads} key heads are {layer.num_heads / layer.num_kv_heads:g}; leave it out"
            )
        check_cached(emit, self.layer_idx, stage)
        return layer.whole(emit, x, self.layer_prefix, self.attention(), stage)

    def cache_contract(self, emit: Emit, hidden: TensorType) -> KvCacheContract:
        """That of the attention in the middle."""
        return self.attention().cache_contract(emit, hidden)

    def attention(self) -> SelfAttnDecode:
        """The stage in the middle."""
        spec = self.spec.layer().attention(self.layer_prefix)
        return SelfAttnDecode(spec, self.layer_idx, self.spec.use_custom_mask, self.kv_out)


def common(spec: Any, kind: type[Any]) -> dict[str, Any]:
    """The fields of `spec` that `kind` has too."""
    return {f.name: getattr(spec, f.name) for f in fields(kind) if hasattr(spec, f.name)}


# -- Llama ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
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
    hidden_shape: HiddenShape = None
    mask: MaskKind | str = MaskKind.CAUSAL
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float = 10000.0

    @staticmethod
    def of(spec: LlamaDecoderSpec, use_custom_mask: bool = False) -> LlamaDecodeLayerSpec:
        """The decode form of a layer."""
        return LlamaDecodeLayerSpec(**common(spec, LlamaDecodeLayerSpec), use_custom_mask=use_custom_mask)

    def layer(self) -> DecoderLayerSpec:
        """The layer without a cache."""
        return LlamaDecoderSpec(**common(self, LlamaDecoderSpec)).layer()


@dataclass(frozen=True)
class LlamaDecodeLayer(DecodeLayer):
    """One Llama layer over cached and new tokens: `[B,S,H]` → same. Weights as LlamaDecoder."""

    spec: LlamaDecodeLayerSpec


@dataclass(frozen=True)
class LlamaKvTap:
    """Give the keys and values of the Llama layer that follows as `kv.{i}.k` and `kv.{i}.v` `[B,S,K·D]`; x passes on.

    It norms and projects x as that layer does; common subexpressions are computed once. i is `layer_idx`, or the number
    that the prefix ends in; `outputs` collects the names.
    """

    layer_prefix: str
    head_dim: int
    eps: float = 1e-5
    outputs: SideOutputs | None = None
    layer_idx: int | None = None
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
        return LlamaKvTap(layer.layer_prefix, s.head_dim, s.eps, None, index, s.attention_bias, s.rope_theta)

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "LlamaKvTap")
        with emit.scope("input_layernorm"):
            gamma = emit.weight(f"{self.layer_prefix}.input_layernorm.weight", likely=x.type.shape[-1:])
            normed = emit.add_node(hir.RmsNorm(self.eps), x, gamma, norm_beta(emit, x))
        sizes = DecoderLayerSpec(
            num_heads=1, head_dim=self.head_dim, num_kv_heads=1, qkv_bias=self.attention_bias,
            rope_theta=self.rope_theta,
        )  # fmt: skip
        with emit.scope("self_attn"):
            k, v = projections(emit, normed, sizes.attention(self.layer_prefix), "kv")
        side_outputs(emit, kv_name(self.layer_prefix, self.layer_idx), k, v, self.outputs)
        return x


def llama_decode_layer(index: int, spec: LlamaDecodeLayerSpec, side: SideOutputs | None = None) -> Named:
    """Llama's layer `index` over cached and new tokens; `side` collects the names of its side outputs."""
    return Named(f"layer{index}", LlamaDecodeLayer.layer(index, spec, side))


# -- Qwen 2 and 3 --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
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
    hidden_shape: HiddenShape = None
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

    def layer(self) -> DecoderLayerSpec:
        """The layer without a cache."""
        return Qwen3DecoderSpec(**common(self, Qwen3DecoderSpec)).layer()


@dataclass(frozen=True)
class Qwen3DecodeLayer(DecodeLayer):
    """One Qwen layer over cached and new tokens: `[B,S,H]` → same. Weights as Qwen3Decoder."""

    spec: Qwen3DecodeLayerSpec


def qwen3_decode_layer_fused(index: int, spec: Qwen3DecodeLayerSpec, kv_out: SideOutputs | None = None) -> Named:
    """Qwen's layer `index` over cached and new tokens; `kv_out` collects the names of its side outputs."""
    return Named(f"layer{index}", Qwen3DecodeLayer.layer(index, spec, kv_out))


# -- Gemma 1, 2 and 3 ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GemmaDecodeLayerSpec:
    """Sizes of a Gemma layer that decodes; `mask` is causal or a sliding window, a custom mask changes nothing else.

    Scores are `score_scale · q kᵀ`, D^(−1/2) unless given, capped by `attn_logit_softcap`; `rope` names the RopeTables
    to read. `kv_group_size` is num_heads / num_kv_heads and may be left out. `moe`: experts in the place of the MLP.
    """

    style: GemmaStyle
    num_heads: int
    head_dim: int
    num_kv_heads: int
    kv_group_size: int | None = None
    eps: float = 1e-6
    use_custom_mask: bool = False
    hidden_shape: HiddenShape = None
    mask: MaskKind | str = MaskKind.CAUSAL
    score_scale: float | None = None
    attn_logit_softcap: float | None = None
    attention_bias: bool = False
    rope_theta: float = 10000.0
    rope: str = ""
    moe: MoeSpec | None = None

    @staticmethod
    def of(
        style: GemmaStyle, attention: SelfAttnPrefillSpec, eps: float = 1e-6, use_custom_mask: bool = False
    ) -> GemmaDecodeLayerSpec:
        """The decode form of the layer around `attention`.

        Raises:
            GraphError: no layer of Gemma has what `attention` has.
        """
        norms: tuple[str, ...] = () if style is GemmaStyle.GEMMA3 else ("q_norm_key", "k_norm_key")
        plain = {"sinks_key": None, "gated": False, "n_rot": None} | dict.fromkeys(norms)
        if lost := [name for name, value in plain.items() if getattr(attention, name) != value]:
            raise GraphError(f"GemmaDecodeLayerSpec has no {', '.join(lost)}: make the layer with decoder_layer")
        return GemmaDecodeLayerSpec(
            style=style, **common(attention, GemmaDecodeLayerSpec), eps=eps, use_custom_mask=use_custom_mask,
            attention_bias=attention.biases is not None,
        )  # fmt: skip

    def layer(self) -> DecoderLayerSpec:
        """The layer without a cache."""
        sizes = DecoderLayerSpec(
            **common(self, DecoderLayerSpec), qkv_bias=self.attention_bias, output_bias=self.attention_bias
        )
        return gemma_layer_spec(self.style, sizes)


@dataclass(frozen=True)
class GemmaDecodeLayer(DecodeLayer):
    """One Gemma layer over cached and new tokens: `[B,S,H]` → same. Weights as `gemma_prefill_layer_composed`."""

    spec: GemmaDecodeLayerSpec


@dataclass(frozen=True)
class GemmaKvTap:
    """Give the keys and values of a Gemma attention as `kv.{i}.k` and `kv.{i}.v` `[B,S,K·D]`; x passes on.

    It follows the input norm: x is what the attention reads. Common subexpressions are computed once. `attention` is
    one head of width `head_dim` under Hugging Face's keys unless given; `eps` is of no use, because the input is
    normalized; i and `outputs` as in LlamaKvTap.
    """

    layer_prefix: str
    head_dim: int
    eps: float | None = None
    outputs: SideOutputs | None = None
    layer_idx: int | None = None
    attention: SelfAttnPrefillSpec | None = None

    @staticmethod
    def layer(index: int, style: GemmaStyle, attention: SelfAttnPrefillSpec, eps: float = 1e-6) -> GemmaKvTap:
        """The tap of layer `index` around `attention`, as `gemma_prefill_layer_composed` takes them."""
        spec = gemma_attention(index, style, attention, eps)
        return GemmaKvTap(f"model.layers.{index}", spec.head_dim, attention=spec)

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "GemmaKvTap")
        spec = self.attention or SelfAttnPrefillSpec.hf_layer(self.layer_prefix, 1, self.head_dim, 1)
        with emit.scope("self_attn"):
            k, v = projections(emit, x, spec, "kv")
        side_outputs(emit, kv_name(self.layer_prefix, self.layer_idx), k, v, self.outputs)
        return x


def gemma_prefill_layer_kv(index: int, style: GemmaStyle, attention: SelfAttnPrefillSpec, eps: float = 1e-6) -> Named:
    """`gemma_prefill_layer_composed` with the side outputs `kv.{index}.k` and `kv.{index}.v`."""
    return gemma_layer(index, style, attention, eps, GemmaKvTap.layer(index, style, attention, eps))


def gemma_decode_layer(index: int, spec: GemmaDecodeLayerSpec) -> Named:
    """Gemma's layer `index` over cached and new tokens."""
    return Named(f"layer{index}", GemmaDecodeLayer.layer(index, spec))


def gemma_moe_decode_layer_composed(index: int, spec: GemmaDecodeLayerSpec, moe: MoeSpec) -> Named:
    """As `gemma_decode_layer`, with experts in the place of the MLP."""
    return gemma_decode_layer(index, replace(spec, moe=moe))
