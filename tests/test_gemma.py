"""Gemma's stages and layers against NumPy; the recipe against Hugging Face."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import blocks, errors
from rlx_jax.models.gemma import STYLES, GemmaConfig, GemmaFlow
from tests.opening import load, recipe_for
from tests.oracles import checkpoints, hugging_face
from tests.oracles.comparing import assert_close
from tests.oracles.recorded import load_record

RNG = np.random.default_rng(0)
BF16 = ml_dtypes.bfloat16


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


SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 8, "num_attention_heads": 4,
}  # fmt: skip
GEMMA2_9B: dict[str, Any] = SIZES | {
    "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
    "final_logit_softcapping": 30.0, "head_dim": 6, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "initializer_range": 0.02, "max_position_embeddings": 8192,
    "model_type": "gemma2", "num_key_value_heads": 2, "pad_token_id": 0, "query_pre_attn_scalar": 224,
    "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 9, "sliding_window_size": 9,
    "torch_dtype": "float32", "transformers_version": "4.42.0.dev0", "use_cache": True,
}  # fmt: skip
GEMMA3_1B: dict[str, Any] = SIZES | {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
    "final_logit_softcapping": None, "head_dim": 6, "hidden_activation": "gelu_pytorch_tanh",
    "initializer_range": 0.02, "max_position_embeddings": 32768, "model_type": "gemma3_text",
    "num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "rope_theta": 1000000,
    "sliding_window": 5, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0", "use_cache": True,
}  # fmt: skip
ROPES = {
    "full_attention": {"rope_theta": 1000000.0, "rope_type": "linear", "factor": 8.0},
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
}
PLAIN = {kind: SIZES | {"model_type": kind, "head_dim": 6, "num_key_value_heads": 2} for kind in STYLES}


def test_the_files_of_gemma_3() -> None:
    """As transformers 4 and 5 write them: the scaling and the large base are of the layers that read all keys."""
    c = GemmaConfig.from_hf(GEMMA3_1B)
    new = {k: v for k, v in GEMMA3_1B.items() if "rope" not in k and "pattern" not in k}
    new |= {"rope_parameters": ROPES, "_sliding_window_pattern": 6, "use_bidirectional_attention": False}
    new |= {"layer_types": [*["sliding_attention"] * 5, "full_attention", *["sliding_attention"] * 2]}
    assert GemmaConfig.from_hf(new) == c
    assert c.windows == (5, 5, 5, 5, 5, None, 5, 5)
    np.testing.assert_allclose(c.inv_freq, 1e6 ** -(np.arange(3) / 3) / 8, rtol=1e-6)
    np.testing.assert_allclose(c.local_inv_freq, 1e4 ** -(np.arange(3) / 3), rtol=1e-6)
    assert [GemmaFlow(c).spec(i).rope for i in (0, 5, 6)] == ["local", "", "local"]


PATTERN = checkpoints.FIXTURES / "gemma3_text" / "pattern_v4"


def with_images(target: Path, prefix: str, **changes: Any) -> Path:
    """The recorded text model inside a larger checkpoint, whose keys begin with `prefix`."""
    checkpoints.inside(PATTERN, target, "Gemma3ForConditionalGeneration", prefix)
    vision = {"vision_config": {"model_type": "siglip_vision_model"}, "mm_tokens_per_image": 4}
    checkpoints.edit_json(target / "config.json", vision | changes)
    tower = {"vision_tower.a.weight": np.ones(3, np.float32), "multi_modal_projector.b": np.ones(2, np.float32)}
    checkpoints.edit_tensors(target, lambda tensors: tensors | tower)
    return target


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_model_of_one_that_reads_images(prefix: str, tmp_path: Path) -> None:
    """Files of both layouts give the text model alone, with a warning that says how much is left."""
    directory = with_images(tmp_path / "m", prefix)
    with pytest.warns(errors.RlxWarning, match="text model .*2 weights"):
        recipe = recipe_for(directory)
    alone = recipe_for(PATTERN)
    assert recipe.config == alone.config and sorted(recipe.weights.keys()) == sorted(alone.weights.keys())
    for key in alone.weights.keys():
        np.testing.assert_array_equal(recipe.weights.read(key), alone.weights.read(key))
        assert recipe.weights.spec(key) == alone.weights.spec(key) and "model.safetensors" in recipe.weights.where(key)
    assert not recipe.weights.has("vision_tower.a.weight")
    with pytest.raises(errors.MissingWeightError, match=r"vision_tower\.a\.weight"):
        recipe.weights.read("vision_tower.a.weight")


@pytest.mark.filterwarnings("ignore:.*reads images too")
def test_larger_models_that_are_refused(tmp_path: Path) -> None:
    changes: Any
    for n, (changes, error, text) in enumerate((
        ({"text_config": None}, errors.ConfigError, "config.json': field 'text_config' is missing"),
        ({"text_config": {"model_type": "gemma2"}}, errors.UnsupportedError, "text_config: model_type 'gemma2'"),
        ({"audio_config": {}}, errors.UnsupportedError, "audio_config"),
    )):  # fmt: skip
        with pytest.raises(error, match=text):
            load(with_images(tmp_path / str(n), "language_model.model.", **changes))


@pytest.mark.oracle
def test_live_text_of_one_that_reads_images(tmp_path: Path) -> None:
    """Text through the whole model of transformers is text through its text model."""
    transformers, torch = (importlib.import_module(name) for name in ("transformers", "torch"))
    text = PLAIN["gemma3_text"] | {"sliding_window": 3, "pad_token_id": 0}
    vision: dict[str, Any] = {
        "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2,
        "model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, image_token_index=60)
    model = transformers.Gemma3ForConditionalGeneration(config)
    hugging_face.randomise(model, 0)
    model.save_pretrained(tmp_path / "m")
    model = type(model).from_pretrained(tmp_path / "m", attn_implementation="eager").eval()
    tokens = np.random.default_rng(0).integers(0, 60, (2, 13))
    with torch.no_grad():
        want = model(torch.from_numpy(tokens)).logits.numpy()
    assert_close(load(tmp_path / "m").logits(tokens), want)


@pytest.mark.oracle
@pytest.mark.parametrize("kind", STYLES)
@pytest.mark.parametrize("config", [{}, GEMMA2_9B, GEMMA3_1B], ids=["sparse", "gemma2", "gemma3"])
def test_defaults_are_those_of_transformers(kind: str, config: dict[str, Any]) -> None:
    """What a file leaves out, and what transformers 4 wrote, mean what transformers 5 makes of them."""
    if config.get("model_type", kind) != kind:
        config = {}
    config = SIZES | {"model_type": kind} | config
    if kind == "gemma":  # 16 key/value heads unless told
        config |= {"num_attention_heads": 16}
    classes = {"gemma": "GemmaConfig", "gemma2": "Gemma2Config", "gemma3_text": "Gemma3TextConfig"}
    theirs = getattr(importlib.import_module("transformers"), classes[kind])(**config).to_dict()
    assert GemmaConfig.from_hf(theirs) == GemmaConfig.from_hf(config)


def test_given_embeddings_are_not_scaled() -> None:
    """They enter as they are, as in the reference; the head stays tied, and the softcap behind it."""
    directory = checkpoints.FIXTURES / "gemma2" / "caps_v5"
    record = load_record(directory)
    recipe = replace(recipe_for(directory), inputs_embeds=True)
    table = np.asarray(recipe.weights.read("model.embed_tokens.weight"), np.float32)
    scaled = table[record["tokens"]] * np.float32(28**0.5)
    assert_close(rlx.compile(recipe)(scaled), record["logits"])


def test_init_makes_the_norm_the_identity() -> None:
    """Its weight starts at 0, since 1 is added."""
    flow = rlx.ModelFlow("norm").input("x", ("batch", 8)).stage(blocks.GemmaRmsNorm("g"))
    params = rlx.compile(flow, {"g": jax.ShapeDtypeStruct((8,), np.float32)}).init(jax.random.key(0))
    np.testing.assert_array_equal(params["g"], np.zeros(8))
