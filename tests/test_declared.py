"""`flow.param`: what a flow says of weights by their keys; and the shapes that stages know by themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import blocks, errors
from rlx_jax.ir import hir
from rlx_jax.models.clip import ClipVisionFlow
from tests.oracles import checkpoints

LLAMA = checkpoints.FIXTURES / "llama" / "gqa_linear_mlpbias_v5"
TWOS = jax.nn.initializers.constant(2.0)

FIXTURES = (
    "llama/gqa_linear_mlpbias_v5", "qwen3/tied_v4", "gemma3_text/deep_v5", "qwen3_5_text/tied_v5", "qwen3_moe/mixed_v5",
    "mixtral/window_v5", "gpt_oss/window_v5", "mamba2/groups_v5", "gpt2/bare_v4", "bert/bare_v5", "mpnet/bare_v5",
    "nomic_bert/bare_v5", "vision/vit", "vision/dinov2_swiglu", "vision/dinov2_registers", "vision/dual/clip",
    "vision/dual/siglip", "flux2/sharded_bf16",
)  # fmt: skip
OFTEN: tuple[str, ...] = (
    "qwen3_5_text/tied_v5", "mixtral/window_v5", "bert/bare_v5", "vision/dual/clip",
)  # fmt: skip


@pytest.mark.parametrize("fixture", [pytest.param(f, marks=() if f in OFTEN else pytest.mark.slow) for f in FIXTURES])
def test_stages_declare_what_the_checkpoint_has(fixture: str) -> None:
    """The shape of every layer, norm, bias, convolution, expert and head, without any weights."""
    bound = rlx.recipe_for(checkpoints.FIXTURES / fixture)
    bare = replace(bound, weights=None)
    want = {key: spec.shape for key, spec in bound.assemble().build().params.items()}
    assert {key: spec.shape for key, spec in bare.shapes().items()} == want
    for flow, weights in ((bare.assemble(), None), (replace(bare.assemble(), _missing="init"), {})):
        built = flow.build(weights)
        assert {key: built.params[key].shape for key in built.missing_keys} == want


def test_a_size_that_no_stage_knows_comes_from_the_flow() -> None:
    """And the others follow from it."""
    found = LAYER.param("**.gate_proj.weight", shape=(80, 32)).build().params
    p = "model.layers.0.mlp"
    assert found[f"{p}.up_proj.weight"].shape == (80, 32) and found[f"{p}.down_proj.weight"].shape == (32, 80)


def test_some_weights_beside_a_config() -> None:
    """What a tower lacks is drawn as its config has it: a class token without axes of 1, and the projection."""
    recipe = rlx.recipe_for(checkpoints.FIXTURES / "vision" / "dual" / "clip")
    tower = ClipVisionFlow(recipe.config.vision)
    want = {key: spec.shape for key, spec in tower.shapes().items()}
    norm = {key: np.full(shape, 3, "f4") for key, shape in want.items() if "post_layernorm" in key}
    for weights in ({}, norm | {"visual_projection.weight": np.full(want["visual_projection.weight"], 3, "f4")}):
        found = rlx.compile(tower, weights, missing="init", key=0).weights()
        assert {key: value.shape for key, value in found.items()} == want
        for key, value in weights.items():
            np.testing.assert_array_equal(np.asarray(found[key]), value)


# -- how weights are drawn -----------------------------------------------------------------------


def step(state: Any, x: Any, decay: Any) -> tuple[Any, Any]:
    """A running sum that decays."""
    state = state * decay + x
    return state, state


def test_any_stage_is_declared() -> None:
    """Stages without `shape` or `init` of their own: a recurrence, a convolution, experts. What the flow says of a
    weight counts before its stage, what a later call says before an earlier one, and others are drawn as ever."""
    experts = blocks.MoeSpec(num_experts=3, top_k=2, inner=5)
    flow = (
        rlx.ModelFlow("m").input("x", ("batch", "seq", 6))
        .recurrent(step, "decay", init=np.zeros(6, "f4"))
        .custom_named("conv", lambda emit, x: emit.add_node(hir.CausalConv(), x, emit.param("conv.weight")))
        .stage(blocks.MoeFfn("layer", experts)).rms_norm("norm", init="zeros").linear("out", shape=(4, 6), init="zeros")
        .param("decay", shape=(6,), init="ones").param("conv.weight", shape=[6, 1, 3], init=TWOS)
        .param("layer.**", init="ones").param("**.experts.1.*.weight", init=TWOS).param("out", init="orthogonal")
    )  # fmt: skip
    model = rlx.compile(flow, missing="init", key=0)
    drawn = {key: np.asarray(value) for key, value in model.weights().items()}
    assert set(drawn) == set(model.report().initialised) and len(drawn) == 14
    assert (drawn["decay"] == 1).all() and (drawn["conv.weight"] == 2).all() and not drawn["norm"].any()
    for key, value in drawn.items():
        if key.startswith("layer."):
            assert (value == (2 if ".experts.1." in key else 1)).all(), key
    np.testing.assert_allclose(drawn["out"] @ drawn["out"].T, np.eye(4), atol=1e-5)
    again = model.init(3)
    np.testing.assert_array_equal(np.asarray(again["decay"]), np.ones(6))


def test_a_recipe_takes_them() -> None:
    """As a hook; a weight of the checkpoint stays as it is."""
    recipe = rlx.recipe_for(LLAMA).after_layers([blocks.Custom(lambda emit, x: x + emit.param("bias"), "bias")])
    built = recipe.param("bias", shape=(56,), init=TWOS).param("model.norm.weight", init="zeros").assemble()
    assert built._declared[0].shape == (56,) and built.build(_stored()).inits == {
        "bias": TWOS,
        "model.norm.weight": "zeros",
    }


def _stored() -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of the checkpoint."""
    return dict(rlx.recipe_for(LLAMA).shapes())


# -- misuse --------------------------------------------------------------------------------------

FLOW = rlx.ModelFlow("m").input("x", ("batch", 8)).linear("w")
W = jnp.zeros((6, 8))
SPEC = blocks.LlamaDecoderSpec(num_heads=4, num_kv_heads=2, head_dim=8)
LAYER = rlx.ModelFlow("m").input("x", ("batch", "seq", 32))
LAYER = LAYER.repeat_layers(1, lambda i: blocks.llama_prefill_layer_fused(i, SPEC))
MISUSE: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "nothing said": (lambda: FLOW.param("w"), errors.GraphError, r"param\('w'\): give shape=, init="),
    "no shape": (lambda: FLOW.param("w", shape=(6, "8")), errors.GraphError, r"shape is \(6, '8'\); expected a tuple"),  # type: ignore[arg-type]
    "no init": (lambda: FLOW.param("w", init="zero"), errors.GraphError, "did you mean 'zeros'"),
    "no weight": (lambda: FLOW.param("v", init="ones").param("ww", init="ones").build({"w": W}), errors.GraphError,
        r"m: param\('v'\) matches no weight that a stage reads"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_is_told(case: str) -> None:
    call, error, message = MISUSE[case]
    with pytest.raises(error, match=message):
        call()
