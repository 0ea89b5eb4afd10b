"""Weights that no checkpoint has: how they are drawn, and that it is said."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

import rlx_jax as rlx
from rlx_jax import blocks, errors
from rlx_jax.ir import hir
from rlx_jax.models.dual import ClipVisionFlow
from rlx_jax.runtime.compile_flow import compile_together
from tests.oracles import checkpoints, numpy_reference

LLAMA = checkpoints.FIXTURES / "llama" / "gqa_linear_mlpbias_v5"
HIDDEN = 56
Init = Any


def adding(init: Init = None, shape: tuple[int, ...] | None = (HIDDEN,)) -> Any:
    """The recipe with a learned vector behind its layers."""
    stage = blocks.Custom(lambda emit, x: x + emit.param("steering", shape, init=init), "steering")
    return rlx.recipe_for(LLAMA).after_layers([stage])


def test_a_new_weight_beside_those_of_a_checkpoint() -> None:
    """An error by default; drawn where that is asked for, and named; the others are the checkpoint's."""
    with pytest.raises(errors.MissingWeightError, match="steering: .*'steering'.*'init'"):
        rlx.compile(adding("zeros"))
    model = rlx.compile(adding("zeros"), missing="init", key=0)
    assert model.report().initialised == ("steering",) and "1 weights: 'steering'" in str(model.report())
    weights = model.weights()
    for key, value in numpy_reference.read_weights(LLAMA).items():
        np.testing.assert_array_equal(np.asarray(weights[key]), value.astype("f4"))
    assert not np.asarray(weights["steering"]).any()


def test_a_config_is_a_random_model() -> None:
    """Whatever a recipe is bound to; a key is one set of numbers, in every program. What was added stays."""
    recipe = rlx.recipe_for(LLAMA)
    model, again, other = (rlx.init(r, key) for r, key in ((recipe, 3), (type(recipe)(recipe.config), 3), (recipe, 4)))
    assert set(model.report().initialised) == set(model.weights()) and len(model.weights()) > 9
    trained, head = rlx.init(recipe, jax.random.key(3), program="train").weights(), "model.layers.0.mlp.up_proj.weight"
    for key, value in model.weights().items():
        np.testing.assert_array_equal(np.asarray(again.weights()[key]), np.asarray(value))
        np.testing.assert_array_equal(np.asarray(trained[key]), np.asarray(value))
    assert not np.array_equal(np.asarray(other.weights()[head]), np.asarray(model.weights()[head]))
    kept = np.full(HIDDEN, 7, "f4")
    added = rlx.init(adding().patch_flow(lambda flow: flow.with_weights({"steering": kept}, add=True)), 0)
    np.testing.assert_array_equal(np.asarray(added.weights()["steering"]), kept)
    assert "steering" not in added.report().initialised


def test_random_weights_are_stored_once() -> None:
    """In the profile's type, whose values are those of f32 rounded; weights packed on the device have the same."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    recipe = rlx.Llama32Flow.for_prefill({"architectures": ["LlamaForCausalLM"], "vocab_size": 96, **sizes})
    precise = rlx.init(recipe, 3).weights()
    before = {id(array) for array in jax.live_arrays()}
    model = rlx.init(recipe, 3, profile=rlx.CompileProfile().replace(precision={"weights": "bf16"}))
    left = [array for array in jax.live_arrays() if id(array) not in before and array.size > HIDDEN]
    assert {str(array.dtype) for array in left} == {"bfloat16"}
    before |= {id(array) for array in left}
    packed = rlx.init(recipe, 3, profile=rlx.CompileProfile().replace(precision={"weights": "int8"}))
    left = [array for array in jax.live_arrays() if id(array) not in before and array.size > HIDDEN**2]
    assert "float32" not in {str(array.dtype) for array in left} and left
    assert set(packed.report().initialised) == set(model.report().initialised) == set(precise)
    for key, value in precise.items():
        expected = np.asarray(value)
        np.testing.assert_array_equal(np.asarray(model.weights()[key]), expected.astype("bfloat16"))
        np.testing.assert_allclose(np.asarray(packed.weights()[key]), expected, atol=0.01 * np.abs(expected).max())


def test_random_weights_of_two_flows_differ() -> None:
    flows = [rlx.ModelFlow(name).input("x", ("batch", 8)).param(name, shape=(8, 8)).linear(name) for name in "vw"]
    models = compile_together(flows, {}, missing="init", key=1)
    v, w = (np.asarray(models[name].weights()[name]) for name in "vw")
    assert v.std() > 0 and not np.array_equal(v, w)


W = np.random.default_rng(0).normal(size=(6, 8)).astype("f4")


def drawn(init: Init, key: Any = 1, shape: tuple[int, int] = (9, 6)) -> np.ndarray[Any, Any]:
    """A second product behind a stored one, drawn."""
    flow = rlx.ModelFlow("m").input("x", ("batch", 8)).linear("w").linear("new", shape=shape, init=init)
    model = rlx.compile(flow, {"w": W}, missing="init", key=key)
    assert model.report().initialised == ("new",)
    np.testing.assert_array_equal(np.asarray(model.weights()["w"]), W)
    return np.asarray(model.weights()["new"])


def test_inits() -> None:
    """Names, functions, and by default a deviation of 1/√in; the same key draws the same."""
    assert not drawn("zeros").any() and (drawn("ones") == 1).all()
    square = drawn("orthogonal")
    np.testing.assert_allclose(square.T @ square, np.eye(6), atol=1e-5)
    normal = jax.nn.initializers.normal(0.02)
    assert drawn(normal, shape=(400, 6)).std() == pytest.approx(0.02, rel=0.1)
    assert drawn(None, shape=(400, 6)).std() == pytest.approx(6**-0.5, rel=0.1)
    np.testing.assert_array_equal(drawn(normal), drawn(normal, jax.random.key(1)))
    assert not np.array_equal(drawn(normal), drawn(normal, 2))
    ramp = drawn(lambda key, shape, dtype: np.arange(54, dtype=dtype).reshape(shape))
    np.testing.assert_array_equal(ramp, np.arange(54).reshape(9, 6))


def vector(init: str) -> rlx.ModelFlow:
    """A flow with one weight, of one axis."""
    return rlx.ModelFlow("m").input("x", ("batch", 8)).custom(lambda emit, x: x * emit.param("new", (8,), init=init))


BERT = checkpoints.FIXTURES / "bert" / "bare_v5"
VIT, CLIP = checkpoints.FIXTURES / "vision" / "vit", checkpoints.FIXTURES / "vision" / "dual" / "clip"


def learned(directory: Any) -> Any:
    """A recipe with a learned number behind every layer."""
    stage = blocks.Custom(lambda emit, x: x * emit.param("new", (), init="ones"), "new")
    return rlx.recipe_for(directory).after_layers([stage])


OPENED: dict[str, Callable[..., Any]] = {
    "CausalLM": lambda **o: rlx.CausalLM(learned(LLAMA), **o),
    "a flow": lambda **o: rlx.compile(vector("ones"), {}, **o),
    "Encoder": lambda **o: rlx.Encoder(learned(BERT), **o),
    "VisionEncoder": lambda **o: rlx.VisionEncoder(learned(VIT), **o),
    "DualEncoder": lambda **o: rlx.DualEncoder(learned(CLIP).of("text"), learned(CLIP).of("vision"), **o),
}


@pytest.mark.parametrize("case", OPENED)
def test_whatever_opens_a_model_draws_what_is_missing(case: str) -> None:
    """As `compile` does; and refuses it without being asked."""
    with pytest.raises(errors.MissingWeightError, match=r"'new'.*missing='init' initializes it"):
        OPENED[case]()
    assert OPENED[case](missing="init", key=0).report().initialised == ("new",)


def test_a_checkpoint_that_lacks_some_loads(tmp_path: Path) -> None:
    """What its config asks for and its files have not is drawn, and what they have is theirs."""
    weights = {key: value.astype("f4") for key, value in numpy_reference.read_weights(LLAMA).items()}
    gone = ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight")
    save_file({key: value for key, value in weights.items() if key not in gone}, tmp_path / "model.safetensors")
    shutil.copy(LLAMA / "config.json", tmp_path)
    with pytest.raises(errors.MissingWeightError, match="3 weights.*config.json"):
        rlx.load(tmp_path)
    lm = rlx.load(tmp_path, missing="init", key=0)
    assert set(lm.report().initialised) == set(gone)
    found = lm.model.weights()
    assert (np.asarray(found["model.norm.weight"]) == 1).all() and set(found) == set(weights)
    for key in set(weights) - set(gone):
        np.testing.assert_array_equal(np.asarray(found[key]), weights[key])


def test_weights_beside_others() -> None:
    """Those of another source stand beside the flow's own, or beside those that it is compiled with."""
    vector = np.full(HIDDEN, 0.5, "f4")
    flow = adding().assemble().with_weights({"steering": vector}, add=True)
    for model in (rlx.compile(flow), rlx.compile(flow, LLAMA)):
        np.testing.assert_array_equal(np.asarray(model.weights()["steering"]), vector)
    both = flow.custom(lambda emit, x: x + emit.param("drawn", (), init="ones"))
    drawn = rlx.compile(both, missing="init", key=0)
    assert drawn.report().initialised == ("drawn",) and np.asarray(drawn.weights()["steering"])[0] == 0.5
    with pytest.raises(errors.WeightError, match=r"already has: 'model\.norm\.weight'"):
        rlx.compile(flow.with_weights({"model.norm.weight": vector}, add=True))
    with pytest.raises(errors.UnexpectedWeightError, match="other"):
        rlx.compile(flow.with_weights({"other": vector}, add=True))


TWOS = jax.nn.initializers.constant(2.0)


def test_init_of_every_stage() -> None:
    """Matrices and gains are drawn as their stage says, biases are 0; the whole flow is declared once."""
    flow = (
        rlx.ModelFlow("m").input("ids", ("batch", "seq"), "int32")
        .token_embed(shape=(9, 4), init=TWOS).gather_add("ids", "more", shape=(9, 4), init=TWOS)
        .rms_norm("a", init=TWOS).layer_norm("b", "b.bias", init=TWOS)
        .stage(blocks.GemmaRmsNorm("c", init=TWOS), blocks.LearnedPositions("p", (7, 4), init=TWOS))
        .stage(blocks.SelfAttention(("q", "k", "v"), "o", 2, qkv_bias=("q.bias", "k.bias", "v.bias"), init=TWOS))
        .swiglu("g", "u", "d", inner=6, init=TWOS).linear("l", bias="l.bias", shape=(4, 4), init=TWOS)
        .stage(blocks.Mlp("m1", "m1.bias", "m2", "m2.bias", inner=3, init=TWOS))
        .stage(blocks.GeluFfn("f1", "f1.bias", "f2", "f2.bias", inner=3, init=TWOS))
        .stage(blocks.GeGlu("gg", "gu", "gd", inner=3, init=TWOS), blocks.LmHead(9, 4, "head", init=TWOS))
    )  # fmt: skip
    drawn = rlx.compile(flow, missing="init", key=0).weights()
    assert len(drawn) == 31
    for key, value in drawn.items():
        assert (np.asarray(value) == (0 if key.endswith("bias") else 2)).all(), key


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


SPEC = blocks.LlamaDecoderSpec(num_heads=4, num_kv_heads=2, head_dim=8)
LAYER = rlx.ModelFlow("m").input("x", ("batch", "seq", 32))
LAYER = LAYER.repeat_layers(1, lambda i: blocks.llama_prefill_layer_fused(i, SPEC))
