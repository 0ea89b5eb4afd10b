"""Gemma's decoder layers (Gemma Team 2024, 2024, 2025) from small stages.

    Gemma 1     h = x + attn(norm(x))              y = h + geglu(norm(h))
    Gemma 2, 3  h = x + norm(attn(norm(x)))        y = h + norm(geglu(norm(h)))

norm is `GemmaRmsNorm`. Gemma 2 caps its attention scores; Gemma 3 normalises the heads of queries and keys instead.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import Literal

from rlx_jax.blocks.attention import SelfAttnPrefill, SelfAttnPrefillSpec, SideOutputs
from rlx_jax.blocks.control import BlockStage, Named, Sequence
from rlx_jax.blocks.decoder import DecoderLayerSpec, LayerNorms
from rlx_jax.blocks.moe import MoeSpec
from rlx_jax.errors import GraphError, UnsupportedError
from rlx_jax.ir.hir import MaskKind


class GemmaStyle(Enum):
    """Which layer: `GEMMA`, `GEMMA2`, `GEMMA3`. `GEMMA4` is a known name that is not built."""

    GEMMA = "gemma"
    GEMMA2 = "gemma2"
    GEMMA3 = "gemma3"
    GEMMA4 = "gemma4"


NORMS = {
    GemmaStyle.GEMMA: LayerNorms(),
    GemmaStyle.GEMMA2: LayerNorms.around_both(),
    GemmaStyle.GEMMA3: LayerNorms.around_both(),
}
"""The norms of a layer by its style."""


def gemma_layer_spec(style: GemmaStyle, layer: DecoderLayerSpec) -> DecoderLayerSpec:
    """`layer` with what sets Gemma apart from Llama, as far as its sizes do not say so.

    Raises:
        UnsupportedError: Gemma 4.
    """
    if style not in NORMS:
        raise UnsupportedError(f"{style.name} is not built; {', '.join(known.name for known in NORMS)} are")
    qk_norm: Literal["heads"] | None = "heads" if style is GemmaStyle.GEMMA3 else None
    return replace(layer, norms=NORMS[style], zero_centred=True, activation="gelu_tanh", qk_norm=qk_norm)


def gemma_attn_spec(
    index: int,
    num_heads: int,
    head_dim: int,
    num_kv_heads: int,
    mask: MaskKind | str,
    scale: float | None = None,
    softcap: float | None = None,
    bias: bool = False,
) -> SelfAttnPrefillSpec:
    """Attention of layer `index` under Hugging Face's keys. Scores are `scale · q kᵀ`, D^(−1/2) unless given."""
    keys = SelfAttnPrefillSpec.hf_layer(f"model.layers.{index}", num_heads, head_dim, num_kv_heads, bias)
    return replace(keys, mask=mask, score_scale=scale, attn_logit_softcap=softcap)


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


def gemma_prefill_layer_composed(
    index: int,
    style: GemmaStyle,
    attention: SelfAttnPrefillSpec,
    eps: float = 1e-6,
    kv_sink: SideOutputs | None = None,
) -> Named:
    """Layer `index` under Hugging Face's keys. Gemma 3 gives `attention` its norms of queries and keys. With `kv_sink`
    keys and values are the side outputs `kv.{index}.k` and `kv.{index}.v`, which it collects.

    Raises:
        UnsupportedError: Gemma 4.
    """
    return gemma_layer(index, style, attention, eps, kv_sink=kv_sink)


def gemma_moe_prefill_layer_composed(
    index: int, style: GemmaStyle, attention: SelfAttnPrefillSpec, moe: MoeSpec, eps: float = 1e-6
) -> Named:
    """As `gemma_prefill_layer_composed`, with experts in the place of the MLP, gated by GELU as that is.

    Raises:
        UnsupportedError: Gemma 4.
    """
    return gemma_layer(index, style, attention, eps, moe=moe)


def gemma_layer(
    index: int,
    style: GemmaStyle,
    attention: SelfAttnPrefillSpec,
    eps: float,
    *before: BlockStage,
    moe: MoeSpec | None = None,
    kv_sink: SideOutputs | None = None,
) -> Named:
    """The layer around `attention`, with the stages of `before` between its first norm and that."""
    spec, prefix = _around(style, attention, eps, moe), f"model.layers.{index}"
    name = None if kv_sink is None else f"kv.{index}"
    attend = SelfAttnPrefill(gemma_attention(index, style, attention, eps), name, kv_sink=kv_sink)
    stages = Sequence([*before, attend])
    return Named(f"layer{index}", spec.around(prefix, stages))


def gemma_attention(index: int, style: GemmaStyle, attention: SelfAttnPrefillSpec, eps: float) -> SelfAttnPrefillSpec:
    """`attention` with the norms of heads that layer `index` has in this style, unless it has its own."""
    own = _around(style, attention, eps).attention(f"model.layers.{index}")
    if attention.q_norm_key or attention.k_norm_key:
        return attention
    norms = ("q_norm_key", "k_norm_key", "qk_norm_eps", "qk_norm_offset")
    return replace(attention, **{name: getattr(own, name) for name in norms}) if own.q_norm_key else attention


def _around(style: GemmaStyle, a: SelfAttnPrefillSpec, eps: float, moe: MoeSpec | None = None) -> DecoderLayerSpec:
    sizes = DecoderLayerSpec(
        num_heads=a.num_heads, num_kv_heads=a.num_kv_heads, head_dim=a.head_dim, eps=eps,
        output_bias=a.biases is not None, moe=moe,
    )  # fmt: skip
    return gemma_layer_spec(style, sizes)
