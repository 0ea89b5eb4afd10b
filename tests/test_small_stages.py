"""Stages whose numbers no test of a model or of a flow holds alone, against formulas in NumPy float64."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import blocks
from tests.oracles.comparing import assert_close
from tests.oracles.numpy_reference import softmax
from tests.oracles.op_formulas import UNARY_REFERENCE, layer_norm

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 3, 4)).astype("f4")
silu, gelu, gelu_tanh = (UNARY_REFERENCE[kind] for kind in ("silu", "gelu", "gelu_tanh"))


def drawn(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Weights of these shapes by key; `__` stands for a dot."""
    return {key.replace("__", "."): RNG.normal(size=s).astype("f4") for key, s in shapes.items()}


def run(stage: Any, weights: Any = None, **inputs: Any) -> Any:
    """The stage over X, with other inputs of integers."""
    flow = rlx.ModelFlow("f").input("x", ("batch", "seq", 4))
    for name in inputs:
        flow = flow.input(name, ("batch", "seq"), dtype="int32")
    return rlx.compile(flow.stage(stage), weights or {})(X, **inputs)


def test_activation() -> None:
    """Each kind by its formula."""
    x = X.astype("f8")
    for kind, want in {"relu": np.maximum(x, 0), "silu": silu(x), "gelu": gelu(x), "gelu_tanh": gelu_tanh(x)}.items():
        assert_close(run(blocks.Activation(kind)), want.astype("f4"))


def test_block_as_layer() -> None:
    """What the block inside computes."""
    w = drawn(w=(4, 4))
    assert_close(run(blocks.BlockAsLayer(blocks.Linear("w")), w), (X.astype("f8") @ w["w"].T).astype("f4"))


def test_mlp() -> None:
    w = drawn(u=(5, 4), c=(5,), d=(4, 5), e=(4,))
    want = np.maximum(X.astype("f8") @ w["u"].T + w["c"], 0) @ w["d"].T + w["e"]
    assert_close(run(blocks.Mlp("u", "c", "d", "e", "relu"), w), want.astype("f4"))


def test_layer_scale() -> None:
    w = drawn(g=(4,))
    assert_close(run(blocks.LayerScale("g"), w), X * w["g"])


def test_vision_swiglu_ffn() -> None:
    w = drawn(
        l__mlp__fc11__weight=(5, 4), l__mlp__fc11__bias=(5,), l__mlp__fc12__weight=(5, 4), l__mlp__fc12__bias=(5,),
        l__mlp__norm__weight=(5,), l__mlp__norm__bias=(5,), l__mlp__fc2__weight=(4, 5), l__mlp__fc2__bias=(4,),
    )  # fmt: skip
    v = {key.removeprefix("l.mlp."): value.astype("f8") for key, value in w.items()}
    inner = (X @ v["fc11.weight"].T + v["fc11.bias"]) * silu(X @ v["fc12.weight"].T + v["fc12.bias"])
    want = layer_norm(inner, v["norm.weight"], v["norm.bias"], 1e-3) @ v["fc2.weight"].T + v["fc2.bias"]
    assert_close(run(blocks.VisionSwiGluFfn("l", 1e-3), w), want.astype("f4"))


def test_attention_pool() -> None:
    """A learned query over all tokens, and an MLP behind it."""
    w = drawn(
        h__probe=(1, 1, 4), h__attention__in_proj_weight=(12, 4), h__attention__in_proj_bias=(12,),
        h__attention__out_proj__weight=(4, 4), h__attention__out_proj__bias=(4,), h__layernorm__weight=(4,),
        h__layernorm__bias=(4,), h__mlp__fc1__weight=(5, 4), h__mlp__fc1__bias=(5,), h__mlp__fc2__weight=(4, 5),
        h__mlp__fc2__bias=(4,),
    )  # fmt: skip
    v = {key.removeprefix("h."): value.astype("f8") for key, value in w.items()}
    weights, biases = np.split(v["attention.in_proj_weight"], 3), np.split(v["attention.in_proj_bias"], 3)
    q, k, u = (a @ m.T + b for a, m, b in zip((v["probe"][0], X, X), weights, biases, strict=True))
    heads = [softmax(q[:, i : i + 2] @ np.swapaxes(k[..., i : i + 2], 1, 2) / math.sqrt(2)) @ u[..., i : i + 2]
             for i in (0, 2)]  # fmt: skip
    p = np.concatenate(heads, -1)[:, 0] @ v["attention.out_proj.weight"].T + v["attention.out_proj.bias"]
    inner = layer_norm(p, v["layernorm.weight"], v["layernorm.bias"], 1e-3) @ v["mlp.fc1.weight"].T + v["mlp.fc1.bias"]
    want = p + gelu_tanh(inner) @ v["mlp.fc2.weight"].T + v["mlp.fc2.bias"]
    assert_close(run(blocks.AttentionPool("h", 2, 1e-3), w), want.astype("f4"))


def test_end_token_pool() -> None:
    """The first place of the id; the largest id where none is said; else the first token."""
    ids = np.array([[5, 9, 9], [1, 2, 3]], np.int32)
    for end, places in ((9, (1, 0)), (None, (1, 2)), (3, (0, 2))):
        assert_close(run(blocks.EndTokenPool(end, "ids"), ids=ids), np.stack([X[b, at] for b, at in enumerate(places)]))


def test_side_output() -> None:
    """What the stage inside makes is an output; the active value stays."""
    w = drawn(w=(5, 4))
    got = run(blocks.SideOutput("side", blocks.Linear("w")), w)
    assert_close(got["side"], (X.astype("f8") @ w["w"].T).astype("f4"))
    assert_close(got["output"], X)


def test_geglu() -> None:
    w = drawn(a=(5, 4), b=(5, 4), c=(4, 5))
    x = X.astype("f8")
    want = (gelu_tanh(x @ w["a"].T) * (x @ w["b"].T)) @ w["c"].T
    assert_close(run(blocks.GeGlu("a", "b", "c"), w), want.astype("f4"))


def test_multiply() -> None:
    assert_close(run(blocks.Multiply(0.3)), X * np.float32(0.3))


SIZES: dict[str, Any] = {"num_heads": 4, "head_dim": 6, "num_kv_heads": 2, "eps": 1e-3}
LLAMA, QWEN = blocks.LlamaDecoderSpec(**SIZES), blocks.Qwen3DecoderSpec(**SIZES, attention_bias=True)
GEMMA = blocks.gemma_attn_spec(0, 4, 6, 2, "causal")
STYLE = blocks.GemmaStyle.GEMMA2
H, F = 8, 10
TOKENS = RNG.normal(size=(2, 5, H)).astype("f4")
LAYERS: dict[str, tuple[Any, Any]] = {
    "llama": (blocks.llama_prefill_layer_fused(0, LLAMA), blocks.LlamaDecodeLayer.layer(0, LLAMA)),
    "qwen": (blocks.qwen3_prefill_layer_fused(0, QWEN), blocks.Qwen3DecodeLayer.layer(0, QWEN)),
    "gemma": (blocks.gemma_prefill_layer_composed(0, STYLE, GEMMA, 1e-3),
        blocks.GemmaDecodeLayer.layer(0, blocks.gemma_layer_spec(STYLE, replace(GEMMA, eps=1e-3)))),
}  # fmt: skip


def layer_weights() -> dict[str, np.ndarray]:
    """Every weight that one of the layers has."""
    shapes: dict[str, tuple[int, ...]] = {
        f"self_attn.{n}_proj.weight": (k * 6, H) for n, k in (("q", 4), ("k", 2), ("v", 2))
    }
    shapes |= {f"self_attn.{n}_proj.bias": (k * 6,) for n, k in (("q", 4), ("k", 2), ("v", 2))}
    shapes |= {"self_attn.o_proj.bias": (H,)}
    shapes |= {"self_attn.o_proj.weight": (H, 24), "mlp.gate_proj.weight": (F, H), "mlp.up_proj.weight": (F, H)}
    shapes |= {f"self_attn.{n}_norm.weight": (6,) for n in "qk"} | {"mlp.down_proj.weight": (H, F)}
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    shapes |= {f"{n}_layernorm.weight": (H,) for n in norms}
    return {f"model.layers.0.{key}": RNG.normal(0.3, 0.4, s).astype("f4") for key, s in shapes.items()}


WEIGHTS = layer_weights()


def compiled(flow: rlx.ModelFlow) -> Any:
    return rlx.compile(flow, WEIGHTS, strict=False)


def tokens_flow() -> rlx.ModelFlow:
    return rlx.ModelFlow("f").input("x", ("batch", "seq", H)).rope_tables(blocks.RopeTables.theta(6, 100.0))


@pytest.mark.filterwarnings("ignore:.*nothing reads them")
@pytest.mark.parametrize("family", LAYERS)
def test_a_layer_behind_its_cache(family: str) -> None:
    """Two tokens behind three cached ones are the last two of five."""
    whole, step = LAYERS[family]
    want = compiled(tokens_flow().stage(whole).export_kv())(TOKENS)
    flow = tokens_flow().input("past_k_0", ("batch", "past", 12)).input("past_v_0", ("batch", "past", 12))
    past = {f"past_{n}_0": np.asarray(want[f"kv.0.{n}"])[:, :3] for n in "kv"}
    got = compiled(flow.bind_decode_inputs(1, False).stage(step))(TOKENS[:, 3:], **past)
    assert_close(got["output"], np.asarray(want["output"])[:, 3:])
    assert_close(got["kv.0.k"], np.asarray(want["kv.0.k"]))


PLAIN = rlx.ModelFlow("f").input("x", ("batch", "seq", H))


def tapped_llama(**changes: Any) -> tuple[rlx.ModelFlow, ...]:
    """A layer alone, and behind its tap: made from its spec, and called as a method."""
    spec = replace(LLAMA, **changes)
    taps = (PLAIN.stage(blocks.LlamaKvTap.layer(0, spec)), PLAIN.llama_kv_tap(0, 6, 1e-3, **changes))
    return tuple(flow.stage(blocks.llama_prefill_layer_fused(0, spec)) for flow in (PLAIN, *taps))


def tapped_gemma(style: blocks.GemmaStyle = STYLE, **changes: Any) -> tuple[rlx.ModelFlow, ...]:
    """A layer alone, and with its tap."""
    attention = replace(GEMMA, **changes)
    makers = (blocks.gemma_prefill_layer_composed, blocks.gemma_prefill_layer_kv)
    return tuple(PLAIN.stage(make(0, style, attention, 1e-3)) for make in makers)


OWN_NORMS: dict[str, Any] = {f"{n}_norm_key": f"model.layers.0.self_attn.{n}_norm.weight" for n in "qk"}
TAPPED = {
    "llama, biases": tapped_llama(attention_bias=True),
    "gemma, a part of a head rotated": tapped_gemma(n_rot=4),
    "gemma, norms of its own beside those of the style": tapped_gemma(blocks.GemmaStyle.GEMMA3, **OWN_NORMS,
        qk_norm_eps=1.0),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*nothing reads them")
@pytest.mark.parametrize("case", TAPPED)
def test_taps(case: str) -> None:
    """What a tap gives is what the layer that follows reads."""
    whole, *tapped = TAPPED[case]
    want = compiled(whole.export_kv())(TOKENS)
    for flow in tapped:
        got = compiled(flow)(TOKENS)
        for name in ("output", "kv.0.k", "kv.0.v"):
            assert_close(got[name], np.asarray(want[name]))


def register(name: str, emit: Any, x: Any) -> Any:
    return getattr(emit.state, name)


def test_rope_tables() -> None:
    """By a base and as data: cos and sin of position · θ^(−2i/D), as attention reads them."""
    angles = np.arange(5)[:, None] * 50.0 ** (-np.arange(2) / 2)
    data = blocks.RopeTables.param(5, 2, np.cos(angles), np.sin(angles))
    for tables in (blocks.RopeTables.theta(4, 50.0), data):
        for name, want in (("rope_cos", np.cos(angles)), ("rope_sin", np.sin(angles))):
            stage = blocks.Custom(functools.partial(register, name))
            assert_close(run(blocks.Sequence([tables, stage])), want[None, :3].astype("f4"))


def test_vit_self_attn() -> None:
    """Two heads over all tokens, q, k and v out of one weight, with biases and the output projection."""
    w = drawn(p__attn__qkv__weight=(12, 4), p__attn__qkv__bias=(12,), p__attn__proj__weight=(4, 4),
              p__attn__proj__bias=(4,))  # fmt: skip
    v = {key.removeprefix("p.attn."): value.astype("f8") for key, value in w.items()}
    q, k, u = np.split(X @ v["qkv.weight"].T + v["qkv.bias"], 3, axis=-1)
    heads = [
        softmax(q[..., i : i + 2] @ np.swapaxes(k[..., i : i + 2], 1, 2) / math.sqrt(2)) @ u[..., i : i + 2]
        for i in (0, 2)
    ]
    want = np.concatenate(heads, -1) @ v["proj.weight"].T + v["proj.bias"]
    assert_close(run(blocks.VitSelfAttn.dinov2("p", 4, 2), w), want.astype("f4"))
