"""FP8 and int8 directories: codes and scales by the rules of transformers and compressed-tensors, and their configs."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import rlx_jax as rlx
from rlx_jax import cli
from rlx_jax.errors import WeightError
from rlx_jax.weights.quantize import quantize_fp8, quantize_int8
from rlx_jax.weights.tensor_file import SafetensorsFile
from tests.oracles.comparing import assert_close, assert_same_model
from tests.test_gguf import random_checkpoint

RNG = np.random.default_rng(0)
WEIGHT = (RNG.standard_normal((256, 384)) * np.exp2(RNG.integers(-20, 10, (256, 1)))).astype(np.float32)
WEIGHT[:128, :128], WEIGHT[5] = 0, 0
LAYER = "model.layers.0."


def expected(method: str, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales, block by block and row by row."""
    weight = weight.astype(np.float32)
    if method == "int8":
        scales = np.array([[np.float32(max(abs(row))) / np.float32(127.5) or np.float32(2**-23)] for row in weight])
        return np.clip(np.round(weight / scales), -128, 127).astype(np.int8), scales
    codes = np.zeros(weight.shape, ml_dtypes.float8_e4m3fn)
    scales = np.zeros((weight.shape[0] // 128, weight.shape[1] // 128), np.float32)
    for i, j in np.ndindex(scales.shape):
        at = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
        largest = np.abs(weight[at]).max()
        factor = np.float32(1) / largest * np.float32(448) if largest else np.float32(1)
        codes[at] = np.clip(weight[at] * factor, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        scales[i, j] = np.float32(1) / factor
    return codes, scales


@pytest.mark.parametrize(("method", "quantize"), [("fp8", quantize_fp8), ("int8", quantize_int8)])
def test_rules(method: str, quantize: Any) -> None:
    """Bit by bit, and close to the values; values that are not finite are refused."""
    codes, scales = quantize(WEIGHT, "w")
    for ours, theirs in zip((codes, scales), expected(method, WEIGHT), strict=True):
        assert ours.dtype == theirs.dtype and ours.tobytes() == theirs.tobytes()
    each = scales if method == "int8" else scales.repeat(128, 0).repeat(128, 1)
    largest = np.abs(WEIGHT).max(1) if method == "int8" else np.abs(WEIGHT).max()
    error = np.abs(codes.astype(np.float32) * each - WEIGHT).max(1)
    assert (error <= largest * (0.004 if method == "int8" else 0.07)).all()
    with pytest.raises(WeightError, match="w: has values that are not finite"):
        quantize(np.full((128, 128), np.inf, np.float32), "w")


@pytest.mark.oracle(warnings="error")
def test_fp8_is_that_of_transformers() -> None:
    import torch
    from transformers.integrations.finegrained_fp8 import Fp8Quantize
    from transformers.utils.quantization_config import FineGrainedFP8Config

    class Quantizer:
        quantization_config = FineGrainedFP8Config()

    theirs = Fp8Quantize(Quantizer())._quantize_one("a.weight", torch.from_numpy(WEIGHT))
    codes, scales = quantize_fp8(WEIGHT, "w")
    np.testing.assert_array_equal(codes.view(np.uint8), theirs["a.weight"].view(torch.uint8).numpy())
    np.testing.assert_array_equal(scales, theirs["a.weight_scale_inv"].numpy())


@pytest.mark.oracle(warnings="error")
@pytest.mark.parametrize("method", ["fp8", "int8"])
def test_transformers_reads_the_config(method: str, tmp_path: Path) -> None:
    import transformers

    random_checkpoint(tmp_path / "hf", 128)
    rlx.save(rlx.load(tmp_path / "hf"), tmp_path / "q", dtype=method)
    declared = transformers.AutoConfig.from_pretrained(tmp_path / "q").quantization_config
    assert declared["quant_method"] == ("fp8" if method == "fp8" else "compressed-tensors")
    if method == "fp8":
        parsed = transformers.FineGrainedFP8Config.from_dict(declared)
        assert tuple(parsed.weight_block_size) == (128, 128) and "lm_head" in parsed.modules_to_not_convert
    else:  # compressed-tensors expects weights packed in words where a group does not have this
        assert declared["config_groups"]["group_0"]["format"] == declared["format"] == "int-quantized"


@pytest.mark.parametrize("method", ["fp8", "int8"])
def test_directories(method: str, tmp_path: Path) -> None:
    """Linear layers are codes and scales, others are unchanged, and the config says so; the command writes the same."""
    random_checkpoint(tmp_path / "hf", 128)
    source = load_file(tmp_path / "hf" / "model.safetensors")
    model = rlx.load(tmp_path / "hf")
    rlx.save(model, tmp_path / "q", dtype=method)
    assert cli.main(["convert", str(tmp_path / "hf"), str(tmp_path / "c"), "--dtype", method]) == 0
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert config == json.loads((tmp_path / "c" / "config.json").read_text())
    files = (SafetensorsFile(tmp_path / name / "model.safetensors") for name in ("q", "c"))
    written, converted = ({key: file.read(key) for key in file.tensors} for file in files)
    suffix = "_scale_inv" if method == "fp8" else "_scale"
    # Half of the rows of k and v are no block of 128: transformers does not quantize such weights.
    kept = ["lm_head"] if method == "int8" else ["lm_head", f"{LAYER}self_attn.k_proj", f"{LAYER}self_attn.v_proj"]
    for key, value in source.items():
        is_linear = value.ndim == 2 and "embed" not in key and key.removesuffix(".weight") not in kept
        if not is_linear:
            assert written[key].tobytes() == value.tobytes() and key + suffix not in written
            continue
        for name, want in zip((key, key + suffix), expected(method, value), strict=True):
            assert written[name].dtype == want.dtype and written[name].tobytes() == want.tobytes(), name
            assert converted[name].tobytes() == want.tobytes()
    declared = config["quantization_config"]
    assert declared["modules_to_not_convert" if method == "fp8" else "ignore"] == kept


@pytest.mark.parametrize("method", ["fp8", pytest.param("int8", marks=pytest.mark.slow)])
def test_conversions(method: str, tmp_path: Path) -> None:
    """A directory loads with the decoded numbers, and converts to others without its declaration, and back."""
    random_checkpoint(tmp_path / "hf", 256)
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    rlx.save(rlx.load(tmp_path / "hf"), tmp_path / "q", dtype=method)
    decoded = dict(weights)
    file = SafetensorsFile(tmp_path / "q" / "model.safetensors")
    for key in weights:
        if file.tensors[key].dtype.itemsize == 1:
            codes, scales = expected(method, weights[key])
            each = scales if method == "int8" else scales.repeat(128, 0).repeat(128, 1)
            decoded[key] = codes.astype(np.float32) * each
    (tmp_path / "twin").mkdir()
    save_file(decoded, tmp_path / "twin" / "model.safetensors")
    (tmp_path / "twin" / "config.json").write_text((tmp_path / "hf" / "config.json").read_text())
    for source, target, dtype in (
        ("q", "f", "f32"), ("q", "g.gguf", "f32"), ("g.gguf", "q2", method),
        ("q", "other", {"fp8": "int8", "int8": "fp8"}[method]),
    ):  # fmt: skip
        assert cli.main(["convert", str(tmp_path / source), str(tmp_path / target), "--dtype", dtype]) == 0
    tokens = np.arange(8, dtype=np.int32)[None]
    packed, plain, *twins = (rlx.load(tmp_path / name, dtype="f32") for name in ("q", "twin", "f", "g.gguf"))
    assert_close(packed.logits(tokens), np.asarray(plain.logits(tokens)), tolerance=3e-6)
    for twin in twins:
        assert_same_model(twin, plain, tolerance=1e-6)
    assert "quantization_config" not in json.loads((tmp_path / "f" / "config.json").read_text())
    assert "quantization_config" in json.loads((tmp_path / "q2" / "config.json").read_text())
    other = np.asarray(rlx.load(tmp_path / "other", dtype="f32").logits(tokens))
    np.testing.assert_allclose(other, plain.logits(tokens), atol=0.1 * np.abs(other).max())


def test_refusals(tmp_path: Path) -> None:
    random_checkpoint(tmp_path / "hf", 32)
    model, target = rlx.load(tmp_path / "hf"), tmp_path / "q"
    with pytest.raises(WeightError, match="no weight of a linear layer to store as fp8"):
        rlx.save(model, target, dtype="fp8")
    assert not target.exists()
    save_file({"a.weight": np.ones((4, 4), np.float32)}, tmp_path / "w.safetensors")
    assert cli.main(["convert", str(tmp_path / "w.safetensors"), str(target), "--dtype", "int8"]) != 0
    assert not target.exists()
