"""Stages whose numbers no test of a model or of a flow holds alone, against formulas in NumPy float64."""

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


X8 = X.astype("f8")
IDS = np.array([[5, 9, 9], [1, 2, 3]], np.int32)
ANGLES = np.arange(5)[:, None] * 50.0 ** (-np.arange(2) / 2)
W = drawn(
    w=(5, 4), u=(5, 4), c=(5,), d=(4, 5), e=(4,), g=(4,),
    l__mlp__fc11__weight=(5, 4), l__mlp__fc11__bias=(5,), l__mlp__fc12__weight=(5, 4), l__mlp__fc12__bias=(5,),
    l__mlp__norm__weight=(5,), l__mlp__norm__bias=(5,), l__mlp__fc2__weight=(4, 5), l__mlp__fc2__bias=(4,),
    h__probe=(1, 1, 4), h__attention__in_proj_weight=(12, 4), h__attention__in_proj_bias=(12,),
    h__attention__out_proj__weight=(4, 4), h__attention__out_proj__bias=(4,), h__layernorm__weight=(4,),
    h__layernorm__bias=(4,), h__mlp__fc1__weight=(5, 4), h__mlp__fc1__bias=(5,), h__mlp__fc2__weight=(4, 5),
    h__mlp__fc2__bias=(4,),
    p__attn__qkv__weight=(12, 4), p__attn__qkv__bias=(12,), p__attn__proj__weight=(4, 4), p__attn__proj__bias=(4,),
)  # fmt: skip
V = {key: value.astype("f8") for key, value in W.items()}


def dense(name: str, x: Any) -> Any:
    """A product with a weight and its bias."""
    return x @ V[f"{name}.weight"].T + V[f"{name}.bias"]


def normed(name: str, x: Any) -> Any:
    return layer_norm(x, V[f"{name}.weight"], V[f"{name}.bias"], 1e-3)


def two_heads(q: Any, k: Any, v: Any) -> Any:
    """Attention of two heads over all tokens."""
    cut = [(q[..., i : i + 2], k[..., i : i + 2], v[..., i : i + 2]) for i in (0, 2)]
    return np.concatenate([softmax(a @ np.swapaxes(b, 1, 2) / math.sqrt(2)) @ c for a, b, c in cut], -1)


def pooled() -> Any:
    """A learned query over all tokens, and an MLP behind it."""
    weights, biases = np.split(V["h.attention.in_proj_weight"], 3), np.split(V["h.attention.in_proj_bias"], 3)
    q, k, v = (a @ m.T + b for a, m, b in zip((V["h.probe"][0], X, X), weights, biases, strict=True))
    p = dense("h.attention.out_proj", two_heads(np.broadcast_to(q, (2, 1, 4)), k, v)[:, 0])
    return p + dense("h.mlp.fc2", gelu_tanh(dense("h.mlp.fc1", normed("h.layernorm", p))))


def register(name: str, emit: Any, x: Any) -> Any:
    return getattr(emit.state, name)


def table(tables: Any, name: str) -> Any:
    """Rope tables, and then one of the two registers."""
    return blocks.Sequence([tables, blocks.Custom(functools.partial(register, name))])


DATA = blocks.RopeTables.param(5, 2, np.cos(ANGLES), np.sin(ANGLES))
STAGES: dict[str, tuple[Any, Any]] = {
    **{kind: (blocks.Activation(kind), UNARY_REFERENCE[kind](X8)) for kind in ("relu", "silu", "gelu", "gelu_tanh")},
    "a block as a layer": (blocks.BlockAsLayer(blocks.Linear("w")), X8 @ V["w"].T),
    "MLP": (blocks.Mlp("u", "c", "d", "e", "relu"), np.maximum(X8 @ V["u"].T + V["c"], 0) @ V["d"].T + V["e"]),
    "scale": (blocks.LayerScale("g"), X8 * V["g"]), "multiply": (blocks.Multiply(0.3), X8 * 0.3),
    "GeGLU": (blocks.GeGlu("u", "w", "d"), (gelu_tanh(X8 @ V["u"].T) * (X8 @ V["w"].T)) @ V["d"].T),
    "SwiGLU with a norm": (blocks.VisionSwiGluFfn("l", 1e-3),
        dense("l.mlp.fc2", normed("l.mlp.norm", dense("l.mlp.fc11", X8) * silu(dense("l.mlp.fc12", X8))))),
    "attention that pools": (blocks.AttentionPool("h", 2, 1e-3), pooled()),
    "the first place of the end": (blocks.EndTokenPool(9, "ids"), X[[0, 1], [1, 0]]),
    "the largest id": (blocks.EndTokenPool(None, "ids"), X[[0, 1], [1, 2]]),
    "the end of one row": (blocks.EndTokenPool(3, "ids"), X[[0, 1], [0, 2]]),
    "q, k and v of one weight": (blocks.VitSelfAttn.dinov2("p", 4, 2),
        dense("p.attn.proj", two_heads(*np.split(dense("p.attn.qkv", X8), 3, axis=-1)))),
    "cos of a base": (table(blocks.RopeTables.theta(4, 50.0), "rope_cos"), np.cos(ANGLES)[None, :3]),
    "sin of a base": (table(blocks.RopeTables.theta(4, 50.0), "rope_sin"), np.sin(ANGLES)[None, :3]),
    "cos of data": (table(DATA, "rope_cos"), np.cos(ANGLES)[None, :3]),
    "sin of data": (table(DATA, "rope_sin"), np.sin(ANGLES)[None, :3]),
}  # fmt: skip


def test_numbers(subtests: pytest.Subtests) -> None:
    """Each stage is a side output of one program, whose active value stays what it was."""
    flow = rlx.ModelFlow("f").input("x", ("batch", "seq", 4)).input("ids", ("batch", "seq"), dtype="int32")
    flow = flow.stage(*(blocks.SideOutput(name, stage) for name, (stage, _) in STAGES.items()))
    got = rlx.compile(flow, W)(X, IDS)
    assert_close(got["output"], X)
    for name, (_, want) in STAGES.items():
        with subtests.test(name):
            assert_close(got[name], np.asarray(want, "f4"))


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
