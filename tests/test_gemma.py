"""Gemma's stages and layers against NumPy; the recipe against Hugging Face."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import blocks
from rlx_jax.blocks import (
    GemmaStyle,
    MaskKind,
    RopeTables,
    SelfAttnPrefillSpec,
    gemma2_layer_mask,
    gemma_attn_spec,
    gemma_prefill_layer_composed,
    gemma_strided_layer_mask,
)
from rlx_jax.errors import GraphError, ShapeError, UnboundStreamError, UnsupportedError

RNG = np.random.default_rng(0)
BF16 = ml_dtypes.bfloat16


# -- stages ------------------------------------------------------------------------------------


def scaled(width: int, compute: str) -> np.ndarray:
    """A row of ones through EmbedScale."""
    flow = rlx.ModelFlow("scale").input("x", ("batch", width)).stage(blocks.EmbedScale(width))
    profile = rlx.CompileProfile().replace(precision={"compute": compute})
    return np.asarray(rlx.compile(flow, {}, profile=profile)(np.ones((1, width), np.float32)))


def test_the_embedding_is_scaled_in_the_dtype_of_the_activations() -> None:
    """√3072 = 55.4256 is 55.5 in bf16, as Hugging Face's Gemma has it."""
    np.testing.assert_array_equal(scaled(3072, "f32"), np.full((1, 3072), np.float32(3072**0.5)))
    assert np.float32(BF16(3072**0.5)) == 55.5
    np.testing.assert_array_equal(scaled(3072, "bf16"), np.full((1, 3072), 55.5, np.float32))


def test_logits_are_capped_in_f32() -> None:
    """cap · tanh(x / cap) of what the head gives, in every compute dtype."""
    head = (RNG.standard_normal((40, 8)) * 8).astype(BF16).astype(np.float32)
    x = RNG.standard_normal((1, 3, 8)).astype(BF16).astype(np.float32)
    flow = rlx.ModelFlow("head").input("x", ("batch", "seq", 8)).stage(blocks.LmHead.separate("head", 40, 8))
    flow = flow.stage(blocks.LogitSoftcap(5.0))
    want = 5 * np.tanh((x.astype(np.float64) @ head.T.astype(np.float64)) / 5)
    for compute in ("f32", "bf16"):
        profile = rlx.CompileProfile().replace(precision={"compute": compute})
        got = np.asarray(rlx.compile(flow, {"head": head}, profile=profile)(x))
        np.testing.assert_allclose(got, want, atol=2e-6)


def test_geglu_takes_the_layer_or_its_mlp() -> None:
    """And is written once, with SwiGLU."""
    assert blocks.GeGlu.hf_mlp("model.layers.0") == blocks.GeGlu.hf_mlp("model.layers.0.mlp")
    silu, gelu = blocks.SwiGlu.hf_mlp("l"), blocks.GeGlu.hf_mlp("l")
    assert (silu.gate_key, silu.up_key, silu.down_key) == (gelu.gate_key, gelu.up_key, gelu.down_key)


@pytest.mark.parametrize(
    "make, error, text",
    [
        (lambda: blocks.LogitSoftcap(0.0), GraphError, "LogitSoftcap.*over 0, got 0.0"),
        (lambda: blocks.LogitSoftcap(float("inf")), GraphError, "LogitSoftcap.*got inf"),
        (lambda: gemma_strided_layer_mask(0, 4, 0), GraphError, "stride is at least 1"),
        (lambda: gemma2_layer_mask(0, 0), GraphError, "at least 1 key"),
        (
            lambda: gemma_prefill_layer_composed(0, GemmaStyle.GEMMA4, gemma_attn_spec(0, 2, 4, 1, "causal")),
            UnsupportedError,
            "GEMMA4 is not built",
        ),
    ],
)
def test_mistakes(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def test_a_scale_of_another_width() -> None:
    flow = rlx.ModelFlow("scale").input("x", ("batch", 8)).stage(blocks.EmbedScale(9))
    with pytest.raises(ShapeError, match=r"^embed_scale: EmbedScale of width 9, the input is f32\[batch,8\]"):
        flow.build()


# -- layers ------------------------------------------------------------------------------------


def test_masks_of_layers() -> None:
    """Gemma 2: even layers read a window. Gemma 3: every sixth layer reads all keys. Stride 1 is no stride."""
    window, full = MaskKind.sliding_window(4), MaskKind.CAUSAL
    assert [gemma2_layer_mask(i, 4) for i in range(4)] == [window, full, window, full]
    assert [gemma_strided_layer_mask(i, 4, 6) for i in range(13)] == [*([window] * 5 + [full]) * 2, window]
    assert gemma_strided_layer_mask(0, 4, 1) == window


def layer_weights(style: GemmaStyle) -> dict[str, np.ndarray]:
    """One layer of 4 heads of width 4 on 2, H = 8, F = 12."""
    p = "model.layers.0"
    shapes: dict[str, tuple[int, ...]] = {"self_attn.q_proj": (16, 8), "self_attn.o_proj": (8, 16)}
    shapes |= {"self_attn.k_proj": (8, 8), "self_attn.v_proj": (8, 8), "mlp.down_proj": (8, 12)}
    shapes |= {"mlp.gate_proj": (12, 8), "mlp.up_proj": (12, 8)}
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] * (style is not GemmaStyle.GEMMA)
    shapes |= dict.fromkeys(norms, (8,))
    shapes |= {f"self_attn.{n}_norm": (4,) for n in "qk"} if style is GemmaStyle.GEMMA3 else {}
    return {f"{p}.{n}.weight": RNG.standard_normal(s).astype(np.float32) / 2 for n, s in shapes.items()}


@pytest.mark.parametrize("style", [GemmaStyle.GEMMA, GemmaStyle.GEMMA2, GemmaStyle.GEMMA3])
def test_every_weight_of_a_layer_is_read(style: GemmaStyle) -> None:
    """And no other."""
    weights = layer_weights(style)
    layer = gemma_prefill_layer_composed(0, style, gemma_attn_spec(0, 4, 4, 2, "causal"))
    built = rlx.ModelFlow("layer").input("x", ("batch", "seq", 8)).stage(layer).build(weights)
    assert set(built.keys_read) == set(weights)


def test_named_tables_are_read_by_name() -> None:
    """Two bases in one flow: each attention reads its own, and one without a name the nameless."""
    weights = {n: RNG.standard_normal((8, 8)).astype(np.float32) for n in "qkv"}
    x = RNG.standard_normal((1, 5, 8)).astype(np.float32)

    def run(rope: str, *tables: RopeTables) -> np.ndarray:
        spec = SelfAttnPrefillSpec("q", "k", "v", 2, 4, 2, rope=rope)
        flow = rlx.ModelFlow("m").input("x", ("batch", "seq", 8)).stage(*tables, blocks.SelfAttnPrefill(spec))
        return np.asarray(rlx.compile(flow, weights)(x))

    slow, fast = RopeTables.theta(4, 1e6), RopeTables.theta(4, 3.0, name="fast")
    alone = run("", RopeTables.theta(4, 3.0))
    np.testing.assert_array_equal(run("fast", fast, slow), alone)
    np.testing.assert_array_equal(run("fast", slow, fast), alone)
    np.testing.assert_array_equal(run("", slow, fast), run("", slow))
    assert np.abs(run("", slow) - alone).max() > 0.01
    with pytest.raises(UnboundStreamError, match=r"self_attn: nothing is registered as 'rope\.slow\.cos'"):
        run("slow", fast)
