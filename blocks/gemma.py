"""Gemma's decoder layers (Gemma Team 2024, 2024, 2025) as differences from Llama's.

    Gemma 1     h = x + attn(norm(x))              y = h + geglu(norm(h))
    Gemma 2, 3  h = x + norm(attn(norm(x)))        y = h + norm(geglu(norm(h)))

norm is `GemmaRmsNorm`. Gemma 2 caps its attention scores; Gemma 3 normalises the heads of queries and keys instead.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from rlx_jax.blocks.layer import LayerNorms, LayerSpec
from rlx_jax.errors import GraphError, UnsupportedError
from rlx_jax.ir.hir import MaskKind


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
