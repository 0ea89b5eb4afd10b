"""The stages of a decoder layer and `LlamaDecoderBlock`: options of `LayerSpec` against their formula, errors."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import blocks, errors
from rlx_jax.blocks import DecoderKeys, LayerNorms, LayerSpec, LlamaDecoder, MaskKind, Qwen3Decoder, RopeTables
from tests.divided import mesh
from tests.oracles.comparing import assert_close
from tests.oracles.decoder_layer import P, layer_reference, layer_weights

HIDDEN, FFN, DIM = 12, 20, 4
LLAMA: Any = blocks.LlamaDecoderSpec(num_heads=4, head_dim=DIM, num_kv_heads=2)
QWEN: Any = blocks.Qwen3DecoderSpec(num_heads=4, head_dim=6, num_kv_heads=2, eps=1e-3)
X = np.random.default_rng(1).standard_normal((2, 5, HIDDEN)).astype(np.float32)
KEEP = np.array([[1, 1, 0, 1, 1], [0, 0, 1, 1, 1]], np.int32)
BIAS = np.random.default_rng(2).standard_normal((2, 4, 5, 5)).astype(np.float32)
BIAS[:, :, 1, 3] = -np.inf
BIAS[0, 0, 2] = -np.inf  # a row that may read nothing
MASKS: dict[str, tuple[MaskKind, Any]] = {
    "none": (MaskKind.NONE, None), "causal": (MaskKind.CAUSAL, None),
    "sliding_window": (MaskKind.sliding_window(2), None), "custom": (MaskKind.CUSTOM, KEEP),
    "bias": (MaskKind.BIAS, BIAS),
}  # fmt: skip
SHAPES: dict[str, tuple[Any, ...]] = {"custom": ("batch", "seq"), "bias": ("batch", 4, "seq", "seq")}


def flow_of(*stages: blocks.BlockStage, mask: str = "") -> rlx.ModelFlow:
    """Stages over `x`, with an input `mask` where the kind takes one."""
    flow = rlx.ModelFlow("layer").input("x", ("batch", "seq", HIDDEN))
    flow = flow.input("mask", SHAPES[mask], "int32" if mask == "custom" else "float32") if mask in SHAPES else flow
    return flow.stage(*stages)


def run(
    stage: blocks.BlockStage, weights: dict[str, np.ndarray], mask: str = "", given: Any = None, **options: Any
) -> np.ndarray:
    """What a stage gives for X; `options` are those of `compile`, and `policy` and `merge` of the profile."""
    tables = {"fusion": {"policy": options.pop("policy", "direct")}}
    tables["backend"] = {"cpu": {"merge": options.pop("merge", False)}}
    profile = rlx.CompileProfile().replace(**tables)
    model = rlx.compile(flow_of(stage, mask=mask), weights, profile=profile, **options)
    return np.asarray(model(X) if given is None else model(X, given))


def weights_of(spec: LayerSpec, seed: int = 0) -> dict[str, np.ndarray]:
    return layer_weights(spec, HIDDEN, FFN, seed)


@pytest.mark.parametrize(
    ("mask", "kv_heads", "policy"), [*((mask, 2, "direct") for mask in MASKS), ("causal", 4, "fusable")]
)
def test_each_mask_kind(mask: str, kv_heads: int, policy: str) -> None:
    """Llama's layer as one block."""
    kind, given = MASKS[mask]
    spec = replace(LLAMA, mask=kind, num_kv_heads=kv_heads, mask_input="mask" if kind.operand else None)
    weights = weights_of(spec)
    got = run(LlamaDecoder.layer(0, spec), weights, mask, given, policy=policy)
    assert_close(got, layer_reference(spec, weights, X, given), tolerance=3e-6)


FUSED = DecoderKeys.fused()
BIASES = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
OPTIONS: dict[str, LayerSpec] = {
    "all biases": replace(LLAMA, **BIASES), "biases of q, k and v": replace(QWEN, qk_norm=False, attention_bias=True),
    "biases of an MLP": replace(LLAMA, num_kv_heads=1, mlp_bias=True),
    "a width that is not hidden / heads": replace(LLAMA, num_heads=3, num_kv_heads=1, head_dim=6),
    "norms of heads, a window": replace(QWEN, mask=MaskKind.sliding_window(3)),
    "norms of heads, biases": replace(QWEN, attention_bias=True, output_bias=True),
    "norms over all heads": replace(QWEN, qk_norm="width"),
    "norms behind": replace(LLAMA, norms=LayerNorms.after_both()),
    "norms around, 1 + w": replace(QWEN, norms=LayerNorms.around_both(), zero_centred=True, activation="gelu_tanh"),
    "no rope": replace(LLAMA, n_rot=0), "a scale, a softcap": replace(LLAMA, score_scale=0.3, attn_logit_softcap=2.0),
    "a multiplier of sums": replace(LLAMA, residual_multiplier=0.3), "stored as one": replace(LLAMA, keys=FUSED),
    "stored as one, biases, norms": replace(QWEN, keys=FUSED, **BIASES),
}  # fmt: skip
QUICK = ("norms of heads, a window", "norms over all heads", "stored as one, biases, norms")


def joined(spec: LayerSpec, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights as the spec stores them: q, k and v side by side where they have one key, gate and up too."""
    made = dict(weights)
    for one, names in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
        for kind in ("weight", "bias"):
            keys = [f"{P}.{one.split('.')[0]}.{name}_proj.{kind}" for name in names]
            if spec.keys == FUSED and keys[0] in made:
                made[f"{P}.{one}.{kind}"] = np.concatenate([made.pop(key) for key in keys])
    return made


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in OPTIONS])
def test_options_of_a_layer(name: str) -> None:
    """Small stages, and the stages of Llama and Qwen, merged or not, on one device and divided by heads over two."""
    spec = OPTIONS[name]
    weights = weights_of(spec, 3)
    want, stored = layer_reference(spec, weights, X), joined(spec, weights)
    assert_close(run(LlamaDecoder.layer(0, spec), stored, merge=True), want, tolerance=3e-6)
    if name in QUICK:
        assert_close(run(blocks.decoder_layer(0, spec), stored), want, tolerance=3e-6)
    if name in QUICK and spec.num_kv_heads % 2 == 0:
        assert_close(run(Qwen3Decoder.layer(0, spec), stored, mesh=mesh("tensor", 2)), want, tolerance=3e-6)


def test_numbers_of_numpy_are_options() -> None:
    """A window and a multiplier as NumPy has them; a window of another kind is an error."""
    window, multiplier = np.arange(4)[3], np.float32(0.5)
    specs = [replace(LLAMA, mask=MaskKind.sliding_window(3), residual_multiplier=0.5),
             replace(LLAMA, mask=MaskKind.sliding_window(window), residual_multiplier=multiplier)]  # fmt: skip
    got, want = (run(LlamaDecoder.layer(0, spec), weights_of(LLAMA)) for spec in specs)
    np.testing.assert_array_equal(got, want)
    for wrong in (0, 2.5, True):
        with pytest.raises(rlx.errors.GraphError, match=f"number of keys of a window is {wrong}; expected an integer"):
            MaskKind.sliding_window(wrong)  # type: ignore[arg-type]


def test_fused_is_one_block_and_composed_is_many() -> None:
    """The summary of HIR says which; `direct` groups the queries, `fusable` repeats the keys."""
    flow, weights = flow_of(RopeTables.theta(DIM)), weights_of(LLAMA)
    fused = rlx.compile(flow.llama_prefill_layer(0, LLAMA), weights).text("hir")
    composed = rlx.compile(flow.llama_prefill_layer_composed(0, LLAMA), weights).text("hir")
    assert "llama_decoder_block(heads=4, dim=4, kv=2" in fused and "LlamaDecoderBlock=1" in fused
    assert "llama_decoder_block" not in composed and "Attention=1" in composed
    for policy, repeats in (("direct", False), ("fusable", True)):
        profile = rlx.CompileProfile().replace(fusion={"policy": policy})
        model = rlx.compile(flow.llama_prefill_layer(0, LLAMA), weights, profile=profile)
        assert ("repeat_heads" in model.text("mir")) == repeats


def test_epsilon_and_theta_are_read() -> None:
    """The spec's `eps` reaches both norms, and `rope_theta` counts where no tables were made."""
    weights = weights_of(LLAMA, 6)
    for changes, theta in (({"eps": 0.5}, 10000.0), ({"rope_theta": 7.0}, 7.0)):
        spec = replace(LLAMA, **changes)
        got = run(LlamaDecoder.layer(0, spec), weights)
        assert_close(got, layer_reference(spec, weights, X, theta=theta), tolerance=3e-6)
    tables = blocks.Sequence([RopeTables.theta(DIM, 7.0), LlamaDecoder.layer(0, LLAMA)])
    assert_close(run(tables, weights), got, tolerance=2e-6)


def test_the_norm_of_one_side_and_its_offset() -> None:
    """Attention norms queries and keys by themselves; the offset is added to the weight."""
    spec: Any = blocks.SelfAttnPrefillSpec.hf_layer(P, 4, 6, 2)
    weights, key = weights_of(QWEN), f"{P}.self_attn.q_norm.weight"
    needed = {name: value for name, value in weights.items() if name == key or ".self_attn." in name}

    def context(spec: LayerSpec, **changed: np.ndarray) -> np.ndarray:
        with pytest.warns(errors.RlxWarning, match="nothing reads them"):
            model = rlx.compile(flow_of(blocks.SelfAttnPrefill(spec)), needed | changed, strict=False)
        return np.asarray(model(X))

    normed = context(replace(spec, q_norm_key=key, qk_norm_eps=1e-3))
    shifted = context(replace(spec, q_norm_key=key, qk_norm_eps=1e-3, qk_norm_offset=1.0), **{key: weights[key] - 1})
    np.testing.assert_allclose(shifted, normed, rtol=0, atol=1e-6)
    assert np.abs(context(spec) - normed).max() > 1e-2


fused, composed = blocks.llama_prefill_layer_fused, blocks.llama_prefill_layer_composed
