"""The Qwen layer as a stage: every option against a formula, what its spec is held against, errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import blocks, errors
from rlx_jax.blocks import MaskKind, Qwen3Decoder, Qwen3DecoderSpec, RopeTables
from tests.oracles import numpy_reference

H, F, HEADS, KV, DIM, EPS = 12, 18, 4, 2, 6, 1e-3
SPEC: Any = Qwen3DecoderSpec(num_heads=HEADS, num_kv_heads=KV, head_dim=DIM, eps=EPS)
X = np.random.default_rng(1).standard_normal((2, 5, H)).astype(np.float32)
P = "model.layers.0"


def weights(spec: Qwen3DecoderSpec) -> dict[str, np.ndarray]:
    """Those that the spec asks for; no norm is 1."""
    rng = np.random.default_rng(0)
    shapes = {"q": (HEADS * DIM, H), "k": (KV * DIM, H), "v": (KV * DIM, H), "o": (H, HEADS * DIM)}
    named: dict[str, Any] = {f"self_attn.{n}_proj.weight": s for n, s in shapes.items()}
    named |= {"mlp.gate_proj.weight": (F, H), "mlp.up_proj.weight": (F, H), "mlp.down_proj.weight": (H, F)}
    biased = "qkv" * spec.attention_bias + "o" * spec.output_bias
    named |= {f"self_attn.{n}_proj.bias": shapes[n][:1] for n in biased}
    made = {f"{P}.{n}": rng.normal(0, 0.4, s) for n, s in named.items()}
    norms: dict[str, int] = {"input_layernorm": H, "post_attention_layernorm": H}
    norms |= {"self_attn.q_norm": DIM, "self_attn.k_norm": DIM} if spec.qk_norm else {}
    made |= {f"{P}.{n}.weight": rng.uniform(0.5, 1.5, size) for n, size in norms.items()}
    return {key: value.astype(np.float32) for key, value in made.items()}


def flow_of(stage: blocks.BlockStage, *before: blocks.BlockStage) -> rlx.ModelFlow:
    """The layer over `x` `[batch, seq, 12]`, with an optional keep mask as input."""
    flow = rlx.ModelFlow("m").input("x", ("batch", "seq", H)).input("keep", ("batch", "seq"), "int32", default=1)
    return flow.stage(RopeTables.theta(DIM, 100.0), *before, stage)


def formula(spec: Qwen3DecoderSpec, keep: np.ndarray | None = None) -> np.ndarray:
    """The layer in NumPy, float64, row by row."""
    config = {"model_type": "mistral", "num_hidden_layers": 1, "sliding_window": window_of(spec)}
    config |= {"num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": DIM, "rms_norm_eps": EPS}
    config |= {"rope_theta": 100.0, "hidden_act": "silu"}
    w = {key: value.astype(np.float64) for key, value in weights(spec).items()}
    out = []
    for row in X:
        table = {"model.embed_tokens.weight": row.astype(np.float64), "model.norm.weight": np.ones(H)}
        stacked = w | table | {k.replace("layers.0", "layers.1"): np.zeros_like(v) for k, v in w.items()}
        states = numpy_reference.llama_states(config | {"num_hidden_layers": 2}, stacked, np.arange(len(row)))
        out.append(states[1])  # what enters the second layer
    return np.stack(out)


def window_of(spec: Qwen3DecoderSpec) -> int | None:
    """The window of a mask."""
    return spec.mask.window if isinstance(spec.mask, MaskKind) else None


@pytest.mark.parametrize(
    "spec",
    [
        replace(SPEC, mask=MaskKind.sliding_window(3)),
        pytest.param(replace(SPEC, qk_norm=False, attention_bias=True), marks=pytest.mark.slow),
        pytest.param(replace(SPEC, attention_bias=True, output_bias=True), marks=pytest.mark.slow),
    ],
    ids=["qwen3, window", "qwen2", "all biases"],
)
def test_the_formula(spec: Qwen3DecoderSpec) -> None:
    """Norms of heads before the rotation, biases before those, windows of w keys."""
    got = np.asarray(rlx.compile(flow_of(Qwen3Decoder.layer(0, spec)), weights(spec))(X))
    want = formula(spec)
    assert np.abs(got - want).max() <= 3e-6 * np.abs(want).max()


@pytest.mark.slow
def test_a_keep_mask_and_registers_of_older_flows() -> None:
    """A keep mask of ones is none; `zero_beta` and `zero_beta.head` may be declared."""
    stage = Qwen3Decoder.layer(0, replace(SPEC, mask="custom"), mask_input="keep")
    betas = (blocks.ZeroBeta(H), blocks.ZeroBeta(DIM, "zero_beta.head"))
    model = rlx.compile(flow_of(stage, *betas), weights(SPEC))
    want = formula(SPEC)
    assert np.abs(model(X) - want).max() <= 3e-6 * np.abs(want).max()
    got = np.asarray(model(X, np.array([[1, 1, 0, 1, 1], [1] * 5], np.int32)))
    assert np.abs(got[1] - want[1]).max() <= 3e-6 * np.abs(want).max()
    assert np.abs(got[0, 3:] - want[0, 3:]).max() > 1e-3 and np.abs(got[0, :2] - want[0, :2]).max() < 1e-5


@pytest.mark.slow
def test_the_norm_of_one_side_and_its_offset() -> None:
    """`SelfAttnPrefillSpec` norms queries and keys by themselves; the offset is added to the weight."""
    keys: Any = blocks.SelfAttnPrefillSpec.hf_layer(P, HEADS, DIM, KV)
    w = weights(SPEC)
    q_norm = f"{P}.self_attn.q_norm.weight"
    less = w | {q_norm: w[q_norm] - 1}

    def run(spec: blocks.SelfAttnPrefillSpec, values: dict[str, np.ndarray]) -> np.ndarray:
        flow = flow_of(blocks.SelfAttnPrefill(spec)).with_weights(values)
        with pytest.warns(errors.RlxWarning, match="nothing reads them"):
            return np.asarray(rlx.compile(flow, strict=False)(X))

    normed = run(replace(keys, q_norm_key=q_norm, qk_norm_eps=EPS), w)
    shifted = run(replace(keys, q_norm_key=q_norm, qk_norm_eps=EPS, qk_norm_offset=1.0), less)
    np.testing.assert_allclose(shifted, normed, rtol=0, atol=1e-6)
    assert np.abs(run(keys, w) - normed).max() > 1e-2


@pytest.mark.parametrize(
    "stage, error, names",
    [
        (Qwen3Decoder.layer(0, replace(SPEC, hidden_shape=("batch", "seq", 13))), errors.ShapeError, "13"),
        (
            Qwen3Decoder.layer(0, replace(SPEC, batch=3)),
            errors.ShapeError,
            r"\[batch,seq,12\], its spec says .*\[3,seq,12",
        ),
        (Qwen3Decoder.layer(0, replace(SPEC, seq="rows")), errors.ShapeError, "rows"),
        (Qwen3Decoder.layer(0, SPEC, mask_input="keep"), errors.GraphError, "Qwen3Decoder has mask_input='keep'"),
        (Qwen3Decoder.layer(0, replace(SPEC, mask="custom")), errors.GraphError, "Qwen3Decoder with mask custom needs"),
        (Qwen3Decoder.layer(0, replace(SPEC, head_dim=4)), errors.WeightShapeError, r"q_norm.*\[6\]"),
        (
            Qwen3Decoder.layer(0, replace(SPEC, head_dim=4, qk_norm=False)),
            errors.ShapeError,
            "self_attn: the tables of the stage RopeTables are of heads of width 6, and these heads have width 4",
        ),
        (Qwen3Decoder.layer(0, replace(SPEC, num_kv_heads=4)), errors.WeightShapeError, r"k_proj\.weight.*24 columns"),
        (Qwen3Decoder.layer(0, replace(SPEC, num_heads=3, num_kv_heads=2)), errors.WeightShapeError, "q_proj"),
        (Qwen3Decoder.layer(1, SPEC), errors.MissingWeightError, r"model\.layers\.1\.input_layernorm"),
        (
            blocks.Sequence([Qwen3Decoder.layer_with_kv(0, SPEC), Qwen3Decoder.layer_with_kv(0, SPEC)]),
            errors.GraphError,
            r"kv\.0\.k",
        ),
    ],
)
def test_errors(stage: blocks.BlockStage, error: type[Exception], names: str) -> None:
    """The stage, and what it expected, are named."""
    with pytest.raises(error, match=names):
        flow_of(stage).build(weights(SPEC))


def test_sizes_that_fit() -> None:
    """`hidden_shape`, `batch` and `seq` are checks, and change nothing."""
    spec = replace(SPEC, hidden_shape=("batch", "seq", H), batch="batch", seq="seq")
    built = flow_of(Qwen3Decoder.layer(0, spec)).build(weights(SPEC))
    assert built.hir.nodes == flow_of(Qwen3Decoder.layer(0, SPEC)).build(weights(SPEC)).hir.nodes
