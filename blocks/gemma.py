"""Gemma's decoder layers (Gemma Team 2024, 2024, 2025) from small stages.

    Gemma 1     h = x + attn(norm(x))              y = h + geglu(norm(h))
    Gemma 2, 3  h = x + norm(attn(norm(x)))        y = h + norm(geglu(norm(h)))

norm is `GemmaRmsNorm`. Gemma 2 caps its attention scores; Gemma 3 normalises the heads of queries and keys instead.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from rlx_jax.blocks.attention import SelfAttnPrefill, SelfAttnPrefillSpec
from rlx_jax.blocks.control import BlockStage, Named, Sequence
from rlx_jax.blocks.ffn import GeGlu
from rlx_jax.blocks.linear import Linear, ResidualAdd, ResidualSave
from rlx_jax.blocks.norm import GemmaRmsNorm
from rlx_jax.errors import GraphError, UnsupportedError
from rlx_jax.ir.hir import MaskKind


class GemmaStyle(Enum):
    """Which layer: `GEMMA`, `GEMMA2`, `GEMMA3`. `GEMMA4` is a known name that is not built."""

    GEMMA = "gemma"
    GEMMA2 = "gemma2"
    GEMMA3 = "gemma3"
    GEMMA4 = "gemma4"


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
    index: int, style: GemmaStyle, attention: SelfAttnPrefillSpec, eps: float = 1e-6
) -> Named:
    """Layer `index` under Hugging Face's keys. Gemma 3 gives `attention` its norms of queries and keys.

    Raises:
        UnsupportedError: Gemma 4.
    """
    p = f"model.layers.{index}"
    attend = SelfAttnPrefill(gemma_attention(p, style, attention, eps))
    return Named(f"layer{index}", gemma_layer(p, style, attend, eps, o_bias=attention.biases is not None))


def gemma_attention(
    prefix: str, style: GemmaStyle, attention: SelfAttnPrefillSpec, eps: float = 1e-6
) -> SelfAttnPrefillSpec:
    """`attention`, in Gemma 3 with norms of the query and key heads."""
    if style is not GemmaStyle.GEMMA3:
        return attention
    q, k = (f"{prefix}.self_attn.{n}_norm.weight" for n in "qk")
    return replace(attention, q_norm_key=q, k_norm_key=k, qk_norm_eps=eps, qk_norm_offset=1.0)


def gemma_layer(
    prefix: str, style: GemmaStyle, attention: BlockStage, eps: float = 1e-6, o_bias: bool = False
) -> Sequence:
    """The layer under `prefix` around `attention`: SelfAttnPrefill or SelfAttnDecode.

    Raises:
        UnsupportedError: Gemma 4.
    """
    if style is GemmaStyle.GEMMA4:
        raise UnsupportedError(f"{prefix}: GEMMA4 is not built; GEMMA, GEMMA2 and GEMMA3 are")

    def norm(name: str) -> GemmaRmsNorm:
        return GemmaRmsNorm.hf_layer(f"{prefix}.{name}", eps)

    o_proj = f"{prefix}.self_attn.o_proj"
    attend = [attention, Linear(f"{o_proj}.weight", bias_key=f"{o_proj}.bias" if o_bias else None)]
    feed: list[BlockStage] = [norm("post_attention_layernorm"), GeGlu.hf_mlp(prefix)]
    if style is not GemmaStyle.GEMMA:
        attend.append(norm("post_attention_layernorm"))
        feed = [norm("pre_feedforward_layernorm"), GeGlu.hf_mlp(prefix), norm("post_feedforward_layernorm")]
    return Sequence(
        (
            ResidualSave(),
            norm("input_layernorm"),
            *attend,
            ResidualAdd(),
            ResidualSave(),
            *feed,
            ResidualAdd(),
        )
    )
