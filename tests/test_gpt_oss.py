"""gpt-oss: MXFP4 against a transcript of its format, checkpoints that hold it, and the model in every program."""

import json
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import rlx_jax as rlx
from rlx_jax import cli, errors
from rlx_jax.ir.packed import PackedSpec, stored_bytes
from rlx_jax.weights.mapping import MappingSource
from rlx_jax.weights.quantized import with_mxfp4_weights
from tests.opening import load
from tests.oracles import checkpoints, hugging_face
from tests.oracles.comparing import assert_close

WINDOW = checkpoints.FIXTURES / "gpt_oss" / "window_v5"
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
PACKED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def packed(shape: tuple[int, int, int], seed: int, scales: tuple[int, int] = (118, 126)) -> dict[str, np.ndarray]:
    """Random blocks and scales of `[E, out, in]`."""
    experts, out, into = shape
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (experts, out, into // 32, 16)).astype(np.uint8)
    return {"_blocks": blocks, "_scales": rng.integers(*scales, (experts, out, into // 32)).astype(np.uint8)}


def numbers(parts: dict[str, np.ndarray]) -> np.ndarray:
    """What they stand for, `[E, in, out]` float64, one number at a time: of a byte the low half comes first."""
    blocks, scales = parts["_blocks"], parts["_scales"]
    experts, out, groups, _ = blocks.shape
    found = np.zeros((experts, groups * 32, out))
    for e, o, g, i in np.ndindex(*blocks.shape):
        for half in (0, 1):
            nibble = int(blocks[e, o, g, i]) >> 4 * half & 15
            value = E2M1[nibble & 7] * (-1 if nibble & 8 else 1)
            found[e, g * 32 + 2 * i + half, o] = value * 2.0 ** (int(scales[e, o, g]) - 127)
    return found


def test_numbers_of_mxfp4() -> None:
    """Every byte, and scales from the least on: bf16 has the numbers without rounding. Parts are those of the whole."""
    parts = packed((2, 3, 96), 0, (0, 252))
    parts["_blocks"][:] = np.arange(2 * 3 * 3 * 16).reshape(2, 3, 3, 16) % 256
    parts["_scales"][0, 0] = (0, 1, 251)
    source = with_mxfp4_weights(
        MappingSource({"w" + end: a for end, a in parts.items()} | {"v": np.ones(3, np.float32)})
    )
    assert set(source.keys()) == {"w", "v"} and source.has("w") and not source.has("w_blocks")
    spec = source.spec("w")
    assert isinstance(spec, PackedSpec) and stored_bytes(spec) == sum(a.nbytes for a in parts.values())
    assert (spec.shape, spec.dtype) == ((2, 96, 3), ml_dtypes.bfloat16)
    want = numbers(parts)
    np.testing.assert_array_equal(source.read("w").astype(np.float64), want)
    cuts: list[Any] = [np.s_[1:2,], np.s_[:, 32:64], np.s_[:, 31:65, 1:], np.s_[1:, 5:6, :2], np.s_[:1, 95:]]
    for index in cuts:
        np.testing.assert_array_equal(source.read("w", index).astype(np.float64), want[index])
    np.testing.assert_array_equal(source.read("v"), np.ones(3))


def test_what_is_no_mxfp4() -> None:
    """A scale that stands for NaN; half of a pair is left as it is."""
    parts = packed((2, 3, 64), 1)
    parts["_scales"][1, 1, 1] = 253
    with pytest.raises(errors.WeightError, match="'w'.*252.*253.*bf16"):
        with_mxfp4_weights(MappingSource({"w" + end: a for end, a in parts.items()})).read("w")
    assert with_mxfp4_weights(MappingSource({"w_blocks": parts["_blocks"]})).keys() == ("w_blocks",)


SIZES = {
    "vocab_size": 41, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 4,
    "max_position_embeddings": 128, "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"],
    "swiglu_limit": 1.5, "experts_per_token": 2, "initial_context_length": 4096,
}  # fmt: skip


@pytest.fixture(scope="module")
def mxfp4(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A checkpoint whose experts are MXFP4, as they were published; and its weights as numbers."""
    made = rlx.GptOssFlow.for_prefill(SIZES | {"quantization_config": PACKED})
    rng = np.random.default_rng(3)
    stored: dict[str, np.ndarray] = {}
    plain: dict[str, np.ndarray] = {}
    for seed, (key, spec) in enumerate(made.shapes().items()):
        if key.endswith(("gate_up_proj", "down_proj")):
            experts, into, out = spec.shape
            parts = packed((experts, out, into), seed)
            stored |= {key + end: a for end, a in parts.items()}
            plain[key] = numbers(parts).astype(np.float32)
        else:
            stored[key] = plain[key] = (0.3 * rng.normal(size=spec.shape)).astype(np.float32)
    directory = tmp_path_factory.mktemp("mxfp4")
    safetensors.numpy.save_file(stored, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(SIZES | {"quantization_config": PACKED}))
    return directory, plain


TOKENS = np.random.default_rng(4).integers(0, 41, (2, 9)).astype(np.int32)


@pytest.mark.slow
def test_shapes_of_mxfp4_are_enough_to_compile(mxfp4: tuple[Path, dict[str, np.ndarray]]) -> None:
    """Under the keys that the checkpoint has."""
    stored = safetensors.numpy.load_file(mxfp4[0] / "model.safetensors")
    shapes = {key: jax.ShapeDtypeStruct(a.shape, a.dtype) for key, a in stored.items()}
    model = rlx.compile(rlx.GptOssFlow.for_prefill(SIZES | {"quantization_config": PACKED}), shapes)
    assert model.params is None and model.lower(TOKENS) is not None


@pytest.mark.slow
def test_a_checkpoint_of_mxfp4(mxfp4: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    """It stays packed, is the model of the numbers it stands for, and is saved as numbers."""
    directory, plain = mxfp4
    lm = load(directory)
    own: Any = rlx.GptOssFlow.config_type.from_hf(SIZES)
    assert (own.num_experts_per_tok, own.windows) == (2, (4, None))
    assert own.rope_factor == pytest.approx(1.3465735902799727)
    want = rlx.compile(rlx.GptOssFlow.for_prefill(SIZES), plain)(TOKENS)
    assert_close(lm.logits(TOKENS), np.asarray(want), tolerance=1e-6)
    assert not lm.model.report().decoded
    stored = rlx.open_weights(directory)
    experts = {name: leaf for name, leaf in lm.model.params.items() if leaf.dtype == np.uint8}
    assert sum(leaf.nbytes for leaf in experts.values()) == sum(
        stored_bytes(stored.spec(key)) for key in stored.keys() if key.endswith(("_blocks", "_scales"))
    )
    assert_close(load(directory, mesh=2).logits(TOKENS), np.asarray(want), tolerance=3e-6)
    for name, made in {"weights": lm.model, "whole": lm}.items():
        rlx.save(made, tmp_path / name, format="safetensors", dtype="f32")
        saved = rlx.open_weights(tmp_path / name)
        assert set(saved.keys()) == set(plain)
        for key, value in plain.items():
            np.testing.assert_array_equal(saved.read(key).astype(np.float32), value)
    assert json.loads((tmp_path / "whole" / "config.json").read_text()) == SIZES | {
        "torch_dtype": "float32"
    }  # and it does not say that they are packed


def test_a_checkpoint_of_mxfp4_is_inspected(
    mxfp4: tuple[Path, dict[str, np.ndarray]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Parameters are numbers, and bytes those that are stored; a recipe compiled with the path reads it too."""
    directory, plain = mxfp4
    assert cli.main(["inspect", str(directory), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["parameters"] == sum(value.size for value in plain.values())
    assert told["weight_bytes"] < told["parameters"] * 4
    recipe = rlx.GptOssFlow.for_prefill(SIZES)
    found = rlx.compile(recipe, directory).weights()
    assert set(found) == set(plain)
    for key, value in plain.items():
        np.testing.assert_array_equal(np.asarray(found[key]), value)
    assert set(recipe.assemble().with_weights(directory).build().params) == set(plain)


@pytest.mark.oracle
def test_live_mxfp4(mxfp4: tuple[Path, dict[str, np.ndarray]]) -> None:
    """As `transformers` reads it without kernels for it."""
    model = hugging_face.load(mxfp4[0], "AutoModelForCausalLM")
    assert_close(load(mxfp4[0]).logits(TOKENS), hugging_face.llama_batch(model, TOKENS)[1])


def test_saved_as_it_was_loaded(tmp_path: Path) -> None:
    """Gate and up are one key again, row by row, though they are two leaves."""
    model: Any = rlx.compile(rlx.recipe_for(WINDOW))
    names = [name for name in model.params if "layers.1.mlp.experts.gate_up_proj[" in name]
    assert names == [f"model.layers.1.mlp.experts.gate_up_proj[:, :, {i}::2]" for i in (0, 1)]
    rlx.save(model, tmp_path / "out", format="safetensors")
    source, before = rlx.open_weights(tmp_path / "out"), rlx.open_weights(WINDOW)
    assert set(source.keys()) == set(before.keys())
    for key in source.keys():
        np.testing.assert_array_equal(source.read(key), before.read(key))
