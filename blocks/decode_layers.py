"""The decode forms of the families' layers: the layer with SelfAttnDecode as its attention, and taps of its keys."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Protocol

from rlx_jax.blocks.attention import projections
from rlx_jax.blocks.contracts import KvCacheContract, Shape
from rlx_jax.blocks.control import BlockStage, Named
from rlx_jax.blocks.decode import SelfAttnDecode, cached, side_outputs
from rlx_jax.blocks.decoder import LlamaDecoderSpec, attention_spec, check_hidden, pre_norm_layer
from rlx_jax.blocks.norm import RmsNorm
from rlx_jax.blocks.qwen3 import Qwen3DecoderSpec, attention_of
from rlx_jax.emit import Emit, FlowValue
from rlx_jax.errors import GraphError
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
        prefix = f"model.layers.{index}"
        return LlamaKvTap(prefix, index, spec.head_dim, spec.eps, spec.attention_bias, spec.rope_theta)

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "LlamaKvTap")
        normed = RmsNorm(f"{self.layer_prefix}.input_layernorm.weight", self.eps).emit(emit, x)
        sizes = LlamaDecoderSpec(1, self.head_dim, 1, attention_bias=self.attention_bias, rope_theta=self.rope_theta)
        with emit.scope("self_attn"):
            k, v = projections(emit, normed, attention_spec(self.layer_prefix, sizes), "kv")
        side_outputs(emit, self.layer_idx, k, v)
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
