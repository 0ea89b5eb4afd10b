"""The program `explicit` and the outputs of `export_kv`: derived for any causal flow, refused by name for others."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import blocks
from rlx_jax.blocks import LlamaDecoderSpec, MaskKind
from rlx_jax.errors import DeriveError, DTypeError, GraphError
from rlx_jax.ir import hir
from tests.small import compiled, profile, w
from tests.test_derive import CONTEXT, EMBEDDING, H, head, llama_layers, llama_weights, tokens_flow
from tests.test_examples import example

BATCH, SEQ = 2, 8
TOKENS = np.random.default_rng(2).integers(0, 17, (BATCH, SEQ)).astype(np.int32)
SPEC = LlamaDecoderSpec(num_heads=4, head_dim=4, num_kv_heads=2)


def of(outputs: Any, name: str = "logits") -> np.ndarray[Any, Any]:
    return np.asarray(outputs[name])


def past_of(outputs: Any) -> dict[str, Any]:
    """The caches that a call gave, as inputs of the next."""
    inputs: dict[str, Any] = example("explicit_cache").next_inputs(outputs)
    return inputs


def close(got: Any, want: Any, tolerance: float = 5e-6) -> None:
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= tolerance * max(1.0, np.abs(want).max())


def read_by(flow: Any) -> dict[str, Any]:
    """Weights of what the flow reads."""
    pool = llama_weights(4) | {"p": w(CONTEXT, H)}
    return {key: pool[key] for key in flow.build(pool).keys_read}


def assert_steps(flow: Any, weights: Any, **options: Any) -> None:
    """Two tokens behind a cache of three that `export_kv` gave: the forward program."""
    read, step = compiled(flow.export_kv(), weights, **options), compiled(flow, weights, program="explicit", **options)
    want = read(TOKENS)
    past = {name: value[:, :3] for name, value in past_of(want).items()}
    outputs = step(TOKENS[:, 3:5], **past)
    assert list(outputs) == list(want)
    close(of(outputs), of(want)[:, 3:5])
    for name in list(want)[1:]:
        close(of(outputs, name), of(want, name)[:, :5])


def positions_flow() -> rlx.ModelFlow:
    flow = rlx.ModelFlow("gpt").input("tokens", ("batch", "seq"), dtype="int32")
    flow = flow.input("position_ids", ("batch", "seq"), dtype="int32", default="positions")
    return head(llama_layers(flow.embed("e").gather_add("position_ids", "p"), 1))


FLOWS: dict[str, Callable[[], rlx.ModelFlow]] = {
    "layers that fold": lambda: head(llama_layers(tokens_flow(), 2)),
    "layers that alternate": lambda: head(llama_layers(tokens_flow(), 2, lambda i:
        MaskKind.sliding_window(3) if i % 2 else "causal")),
    "learned positions": positions_flow,
}  # fmt: skip


FEW = ("layers that alternate",)


@pytest.mark.parametrize("name", [n if n in FEW else pytest.param(n, marks=pytest.mark.slow) for n in FLOWS])
def test_any_causal_flow(name: str) -> None:
    """Steps of `explicit` are the forward program."""
    flow = FLOWS[name]()
    assert_steps(flow, read_by(flow))


@pytest.mark.filterwarnings("ignore:.*layers.roll.* has no effect:rlx_jax.errors.RlxWarning")
def test_settings() -> None:
    """However layers run in the forward program; here every layer has inputs of its own."""
    assert_steps(FLOWS["layers that fold"](), llama_weights(2), profile=profile(layers={"roll": "scan"}))


def test_the_last_token_of_a_step() -> None:
    """A gather of the last token takes that of the new ones."""
    flow = llama_layers(tokens_flow(), 2)
    read, step = (compiled(f, llama_weights(2)) for f in (
        head(flow).export_kv(), head(flow.gather_last_token_at()).explicit())
    )  # fmt: skip
    outputs = step(TOKENS[:, 3:6], **past_of(read(TOKENS[:, :3])))
    close(of(outputs), of(read(TOKENS))[:, 5:6])


@pytest.mark.slow
def test_dtypes_of_the_cache() -> None:
    """`precision.kv` types it, in and out; without, it is f32 like every output, whatever the program computes in."""
    flow, weights = FLOWS["layers that fold"](), llama_weights(2)
    want = compiled(flow, weights)(TOKENS)
    for tables, dtype in (({"compute": "bf16"}, np.float32), ({"kv": "bf16"}, ml_dtypes.bfloat16)):
        step = compiled(flow, weights, program="explicit", profile=profile(precision=tables))
        past = {n: v.astype(dtype) for n, v in past_of(compiled(flow.export_kv(), weights)(TOKENS[:, :4])).items()}
        outputs = step(TOKENS[:, 4:], **past)
        assert outputs["kv.1.v"].dtype == dtype and outputs["logits"].dtype == np.float32
        close(of(outputs), want[:, 4:], 0.05)
    with pytest.raises(DTypeError, match="past_k_0"):
        step(TOKENS[:, 4:], **{n: v.astype(np.float32) for n, v in past.items()})


def test_a_module_of_the_program() -> None:
    """A flow that asks to be explicit is that at every level: as a module, as JSON, and compiled from there."""
    flow, weights = FLOWS["layers that fold"](), llama_weights(2)
    built = flow.explicit(custom_mask=True).build(weights)
    module = rlx.GraphModule.from_json(built.into_graph_module().to_json())
    past = past_of(compiled(flow.export_kv(), weights)(TOKENS[:, :3]))
    call = {"mask": np.ones((BATCH, SEQ), np.int32), **past}
    close(of(compiled(module, weights)(TOKENS[:, 3:], **call)), of(compiled(built, weights)(TOKENS[:, 3:], **call)))
    with pytest.raises(GraphError, match="explicit has a separate graph"):
        built.with_extra_hir_outputs([])


def attending(**changed: Any) -> blocks.SelfAttnPrefill:
    """Two heads over the embedding."""
    spec = blocks.SelfAttnPrefillSpec.hf_layer("model.layers.0", 4, 4, 2)
    return blocks.SelfAttnPrefill(replace(spec, **changed))


def attend_flow(*inputs: tuple[str, tuple[Any, ...]], **changed: Any) -> rlx.ModelFlow:
    flow = tokens_flow()
    for name, shape in inputs:
        flow = flow.input(name, shape)
    return flow.named_layer("outer", attending(**changed))


def test_an_input_that_nothing_reads_is_refused() -> None:
    """Positions of a flow without any."""
    attend = hir.Attention(2, 2, causal=True)
    flow = tokens_flow().custom(lambda e, x: e.add_node(attend, x, x, x))
    step = compiled(flow, EMBEDDING, program="explicit")
    past = {f"past_{kind}_0": np.ones((BATCH, 2, H), np.float32) for kind in "kv"}
    assert step(TOKENS, **past)["kv.0.k"].shape == (BATCH, 2 + SEQ, H)
    with pytest.raises(DeriveError, match="'position_ids'"):
        step(TOKENS, position_ids=TOKENS, **past)


def test_export_kv_by_name() -> None:
    """The outputs are known when the flow is built, so they can be chosen; a stage's own of that name are the same, or
    collide."""
    flow = head(llama_layers(tokens_flow(), 2)).export_kv()
    names = ("logits", "kv.0.k", "kv.0.v", "kv.1.k", "kv.1.v")
    assert flow.build(llama_weights(2)).output_names == names
    chosen = compiled(flow.outputs(["logits", "kv.1.v"]), llama_weights(2))(TOKENS)
    assert list(chosen) == ["logits", "kv.1.v"]
    assert flow.with_extra_outputs([]).build(llama_weights(2)).output_names == names
    sizes = blocks.Qwen3DecoderSpec(num_heads=4, num_kv_heads=2, head_dim=4)
    twice = tokens_flow().stage(blocks.qwen3_prefill_layer_fused_kv(0, sizes))
    weights = {**llama_weights(1), **{f"model.layers.0.self_attn.{n}_norm.weight": w(4) for n in "qk"}}
    once, both = compiled(twice, weights)(TOKENS), compiled(twice.export_kv(), weights)(TOKENS)
    assert list(once) == list(both) == ["output", "kv.0.k", "kv.0.v"]
    for name, value in once.items():
        np.testing.assert_array_equal(both[name], value)
    with pytest.raises(GraphError, match=r"kv\.0\.k.*another value: leave out export_kv"):
        llama_layers(tokens_flow().llama_kv_tap(0, 4), 1).export_kv().build(llama_weights(1))
    with pytest.raises(GraphError, match="no stage has causal attention"):
        tokens_flow().export_kv().build(EMBEDDING)


def test_export_kv_of_layers_that_fold(roll: str = "scan") -> None:
    """They stay one region: the outputs are what the layers written one by one give."""
    flow, weights = head(llama_layers(tokens_flow(), 3)).export_kv(), llama_weights(3)
    got = compiled(flow, weights, profile=profile(layers={"roll": roll}))
    assert "repeat" in got.text("hir")
    apart = tokens_flow()
    for i in range(3):
        apart = apart.stage(blocks.llama_prefill_layer_composed(i, SPEC))
    want = compiled(head(apart).export_kv(), weights)(TOKENS)
    assert "logits" in want
    for name, value in got(TOKENS).items():
        close(value, want[name])


def test_a_step_with_another_start_than_zeros() -> None:
    """The input is the state, from the first call on."""
    flow = rlx.ModelFlow("f").input("x", ("batch", "seq", 8))
    flow = flow.recurrent(lambda s, x: (s * 0.5 + x, s), init=np.full(8, 3.0, "f4"))
    x = np.random.default_rng(1).normal(size=(2, 5, 8)).astype("f4")
    want: Any = rlx.compile(flow.export_kv())(x)
    step: Any = rlx.compile(flow.explicit())
    first = step(x[:, :2], state_state_0=np.full((2, 8), 3.0, "f4"))
    second = step(x[:, 2:], **past_of(first))
    close(np.concatenate([first["output"], second["output"]], 1), of(want, "output"))
    close(second["state.0.state"], of(want, "state.0.state"))
