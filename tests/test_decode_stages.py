"""Explicit decode: the growing-concat stages against the forward program and the programs derived from it."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import blocks, errors
from rlx_jax.models.decoder import DecodeOptions, as_decode
from rlx_jax.trace.frequencies import frequencies
from tests.opening import recipe_for
from tests.oracles import checkpoints, hugging_face
from tests.oracles.comparing import assert_close
from tests.test_examples import example

CACHE = example("explicit_cache")
BATCH, SEQ, VOCABULARY = 2, 7, 53
Arrays = dict[str, np.ndarray[Any, Any]]
CONFIG = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "head_dim": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 500.0, "rope_local_base_freq": 50.0,
    "sliding_window": 3, "sliding_window_pattern": 2, "model_type": "gemma3_text",
}  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (BATCH, SEQ)).astype(np.int32)


def arrays(outputs: Mapping[str, Any]) -> Arrays:
    return {name: np.asarray(value) for name, value in outputs.items()}


def past_of(outputs: Mapping[str, Any]) -> Arrays:
    """The keys and values that a call gave, as inputs of the next."""
    inputs: Arrays = CACHE.next_inputs(outputs)
    return inputs


close = partial(assert_close, tolerance=2e-6)


def test_a_cache_padded_to_a_bucket() -> None:
    """With a mask and positions the padding is not seen, new rows move up in every row, and one program serves all.

    Padding takes no place in a sliding window. A decode flow has no derived programs: it is one already.
    """
    recipe = rlx.GemmaFlow.for_prefill(CONFIG)
    weights = rlx.compile(recipe).init(0)
    forward: Any = rlx.compile(replace(recipe, export_kv=True), weights)
    step: Any = rlx.compile(replace(recipe, decode=DecodeOptions(custom_mask=True)), weights)
    with pytest.raises(errors.DeriveError, match="BindDecodeInputs"):
        rlx.compile(step.flow, program="extend").text("hir")
    want, upper = arrays(forward(TOKENS)), 9
    past = arrays(past_of(want))
    cache = {name: value[:, :3] for name, value in past.items()}
    compiles = None
    for at in range(3, SEQ):
        given = {
            "mask": CACHE.bucket_mask(at, upper, 1, BATCH),
            "position_ids": CACHE.bucket_positions(at, 1, BATCH),
            **CACHE.padded_cache(cache, upper),
        }
        outputs = arrays(step(TOKENS[:, at : at + 1], **given))
        compiles = compiles or step.report().compiles
        close(outputs["logits"], want["logits"][:, at : at + 1])
        cache = CACHE.advanced_cache(cache, outputs, upper)
    assert step.report().compiles == compiles
    masked = step(TOKENS[:, :1], mask=np.zeros((BATCH, 8), np.int32), **past)  # numbers, not NaN
    assert np.isfinite(masked["logits"]).all()
    with pytest.raises(errors.ShapeError, match="input mask: axis 1 is 3.*past.*8"):
        step(TOKENS[:, 3:4], mask=np.ones((BATCH, 3), np.int32), **past)
    with pytest.raises(errors.TokenIdError, match=r"position_ids: id -1 at \(0, 0\)"):
        step(TOKENS[:, :1], mask=np.ones((BATCH, 8), np.int32), position_ids=np.full((BATCH, 1), -1, np.int32), **past)
    for i in range(2):
        for kind in "kv":
            close(cache[f"past_{kind}_{i}"], want[f"kv.{i}.{kind}"])


WIDTH, DIM = 24, 6
ATTENTION = blocks.SelfAttnPrefillSpec("q", "k", "v", 4, DIM, 2)
ATTENTION_WEIGHTS = {
    name: np.random.default_rng(3).standard_normal((rows, WIDTH)).astype(np.float32) / 5
    for name, rows in (("q", 24), ("k", 12), ("v", 12))
}


def attention_flow(*before: Any, seq: int | str = 1, inputs: tuple[str, ...] = ()) -> rlx.ModelFlow:
    """One SelfAttnDecode behind `before` and BindDecodeInputs; `inputs` are rope rows."""
    flow = rlx.ModelFlow("attend").input("x", ("batch", seq, WIDTH))
    flow = flow.input("past_k_0", ("batch", "past", 12)).input("past_v_0", ("batch", "past", 12))
    for name in inputs:
        flow = flow.input(name, (seq, DIM // 2))
    return flow.stage(*before).bind_decode_inputs(1).stage(blocks.SelfAttnDecode(ATTENTION, 0))


def run(flow: rlx.ModelFlow, seq: int = 1, past: int = 3, **inputs: Any) -> np.ndarray[Any, Any]:
    """The context for random inputs."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal((BATCH, seq, WIDTH)).astype(np.float32)
    k, v = (rng.standard_normal((BATCH, past, 12)).astype(np.float32) for _ in "kv")
    outputs = rlx.compile(flow, ATTENTION_WEIGHTS)(x, past_k_0=k, past_v_0=v, **inputs)
    return np.asarray(outputs["output"])


def test_every_source_of_tables_gives_the_same() -> None:
    """RopeTables by frequencies and by data; rows as data and as inputs. Position 3 is not position 0."""
    angles = np.outer(np.arange(8), frequencies(DIM))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    made = blocks.RopeTables.theta(DIM)
    want = run(attention_flow(made))
    for flow, inputs in (
        (attention_flow(blocks.RopeTables.param(8, DIM // 2, cos, sin)), {}),
        (attention_flow(blocks.DecodeRopeParams(cos[3], sin[3], DIM // 2)), {}),
        (attention_flow(inputs=("rope_cos", "rope_sin")), {"rope_cos": cos[3:4], "rope_sin": sin[3:4]}),
    ):
        close(run(flow, **inputs), want)
    bare = attention_flow()
    close(run(replace(bare, _stages=(bare._stages[0], made, *bare._stages[1:]))), want)  # behind BindDecodeInputs alone
    other = attention_flow(blocks.RopeTables.theta(DIM, 7.0))
    after = replace(other, _stages=(*other._stages[:-1], made, other._stages[-1]))
    close(run(after), want)
    assert np.abs(run(other) - want).max() > 0.01
    assert np.abs(run(attention_flow(blocks.DecodeRopeParams(cos[0], sin[0], DIM // 2))) - want).max() > 0.01


def test_tables_that_another_stage_wrote_stay() -> None:
    """BindDecodeInputs makes again what a RopeTables stage made, and no other register."""

    def no_rotation(emit: Any, x: Any) -> Any:
        emit.state.rope_cos, emit.state.rope_sin = emit.state.rope_cos * 0 + 1, emit.state.rope_sin * 0
        return x

    identity = blocks.DecodeRopeParams(np.ones(DIM // 2), np.zeros(DIM // 2), DIM // 2)
    close(run(attention_flow(blocks.RopeTables.theta(DIM), blocks.Custom(no_rotation))), run(attention_flow(identity)))


def test_default_position_ids_count_from_the_cache() -> None:
    """An input `position_ids` with the default "positions" counts from P, not from 0."""
    flow = rlx.ModelFlow("attend").input("x", ("batch", "seq", WIDTH))
    flow = flow.input("past_k_0", ("batch", "past", 12)).input("past_v_0", ("batch", "past", 12))
    flow = flow.input("position_ids", ("batch", "seq"), dtype="int32", default="positions")
    flow = (
        flow.rope_tables(blocks.RopeTables.theta(DIM)).bind_decode_inputs(1).stage(blocks.SelfAttnDecode(ATTENTION, 0))
    )
    close(run(flow, seq=2), run(attention_flow(blocks.RopeTables.theta(DIM), seq=2), seq=2))


SPEC: Any = blocks.LlamaDecodeLayerSpec(num_heads=4, head_dim=DIM, num_kv_heads=2)


def two_layers(**changed: Any) -> rlx.ModelFlow:
    """Inputs of two layers and a mask; `changed` are other shapes, None takes an input out."""
    shapes: dict[str, Any] = {"mask": ("batch", "past + seq")}
    shapes |= {f"past_{kind}_{i}": ("batch", "past", 12) for i in range(2) for kind in "kv"}
    flow = rlx.ModelFlow("f").input("x", ("batch", "seq", WIDTH))
    for name, shape in {**shapes, **changed}.items():
        flow = flow if shape is None else flow.input(name, shape)
    return flow.rope_tables(blocks.RopeTables.theta(DIM))


BIND = blocks.BindDecodeInputs(2, use_custom_mask=True)
LAYER = {f"model.layers.{i}.{key}": value for i in range(3) for key, value in {
    "self_attn.q_proj.weight": (24, 24), "self_attn.k_proj.weight": (12, 24), "self_attn.v_proj.weight": (12, 24),
    "self_attn.o_proj.weight": (24, 24), "mlp.gate_proj.weight": (20, 24), "mlp.up_proj.weight": (20, 24),
    "mlp.down_proj.weight": (24, 20), "input_layernorm.weight": (24,), "post_attention_layernorm.weight": (24,),
}.items()}  # fmt: skip


def test_sums_of_dimensions() -> None:
    """They follow the sizes of their names, and keep to them."""
    flow = rlx.ModelFlow("s").input("a", (1, "past")).input("b", (1, "new")).input("c", ("past + new + 1",))
    flow = flow.custom(lambda emit, a: emit.concat([a, emit.flow_input("b")], axis=1)[:, :1])
    model = rlx.compile(flow.custom(lambda emit, a: a + emit.flow_input("c")[:1]), {})
    ones = np.ones((1, 9), np.float32)
    assert model(ones[:, :2], ones[:, :3], ones[0, :6]).shape == (1, 1)
    with pytest.raises(errors.ShapeError, match="input c: axis 0 is 5.*6"):
        model(ones[:, :2], ones[:, :3], ones[0, :5])


RECORDED = (
    "llama/gqa_plain_attnbias_v5", "mistral/window_v5", "qwen2/window_v4", "qwen3/window_bias_v5", "gemma/tied_v4",
    "gemma2/caps_v5", "gemma3_text/pattern_v4",
)  # fmt: skip


@pytest.mark.oracle
@pytest.mark.parametrize("name", RECORDED)
def test_the_cache_of_transformers(name: str) -> None:
    """Its keys and values are ours, and three tokens behind its cache have its logits."""
    directory = checkpoints.FIXTURES / name
    model, recipe = hugging_face.load(directory, "AutoModelForCausalLM"), recipe_for(directory)
    tokens = np.random.default_rng(5).integers(0, recipe.config.vocab_size, (2, 12)).astype(np.int32)
    want = hugging_face.cached(model, tokens[:, :9])
    got = rlx.compile(replace(recipe, export_kv=True))(tokens[:, :9])
    assert set(got) == set(want)
    for output, value in want.items():
        assert_close(got[output], value)
    step: Any = rlx.compile(as_decode(recipe))
    assert_close(step(tokens[:, 9:], **past_of(want))["logits"], hugging_face.cached(model, tokens)["logits"][:, 9:])
