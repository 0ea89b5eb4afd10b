"""`rlx_jax.save`: what is written loads back, in every layout, FP8 and int8 too; the rest is refused."""

import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file, save_file

import rlx_jax as rlx
from rlx_jax import cli
from rlx_jax.errors import IntegrityError, RlxNumericsWarning, TargetExistsError, WeightError
from rlx_jax.io import atomic
from rlx_jax.ir.types import TensorType, as_dtype
from rlx_jax.weights.format import Entry
from rlx_jax.weights.quantize import quantize_fp8, quantize_int8
from rlx_jax.weights.save import write_checkpoint
from rlx_jax.weights.tensor_file import SafetensorsFile
from tests.opening import load
from tests.oracles.comparing import assert_close, assert_same_model
from tests.test_gguf import random_checkpoint

FORMATS = ["orbax", "safetensors"]
FIXTURES = Path(__file__).parent / "fixtures"


def mlp(dtype: Any = np.float32) -> tuple[rlx.ModelFlow, dict[str, np.ndarray]]:
    """A flow with one transposed weight and one bias, and weights for it."""
    rng = np.random.default_rng(0)
    weights = {"a.weight": rng.normal(size=(8, 4)).astype(dtype), "a.bias": rng.normal(size=8).astype(dtype)}
    flow = rlx.ModelFlow("mlp").input("x", ("batch", 4)).linear("a.weight", bias="a.bias", transpose=True)
    return flow, weights


def assert_holds(path: Path, weights: dict[str, Any]) -> None:
    source = rlx.open_weights(path, verify="full")
    assert sorted(source.keys()) == sorted(weights)
    for key, value in weights.items():
        read = source.read(key)
        assert read.dtype == value.dtype, key
        np.testing.assert_array_equal(read, value)


@pytest.mark.parametrize("format", FORMATS)
def test_a_saved_model_loads_back(tmp_path: Path, format: str) -> None:
    """Here, and by the format's own reader."""
    flow, weights = mlp()
    model = rlx.compile(flow, weights=weights)
    x = np.ones((2, 4), np.float32)
    rlx.save(model, tmp_path / "it", format)
    assert_holds(tmp_path / "it", weights)
    file = tmp_path / "it" / "model.safetensors"
    other: Any = load_file(file) if file.exists() else ocp.StandardCheckpointer().restore(tmp_path / "it")
    for key, value in weights.items():
        np.testing.assert_array_equal(np.asarray(other[key]), value)
    np.testing.assert_array_equal(rlx.compile(flow, weights=tmp_path / "it")(x), model(x))
    assert os.listdir(tmp_path) == ["it"]
    trained = jax.tree.map(lambda leaf: leaf * 2, model.params)
    rlx.save(model.replace(params=trained), tmp_path / "trained", format)
    assert_holds(tmp_path / "trained", {key: value * 2 for key, value in weights.items()})


@pytest.mark.parametrize("format", FORMATS)
def test_every_dtype(tmp_path: Path, format: str) -> None:
    """Each dtype of a checkpoint, ranks 0 to 3, and arrays whose memory is in another order."""
    rng = np.random.default_rng(0)
    names = "bool u8 i8 u16 i16 u32 i32 u64 i64 f8_e4m3 f8_e5m2 f16 bf16 f32 f64".split()
    shapes = [(), (3,), (2, 3), (2, 3, 4)]
    arrays = {f"{name}.{rank}": rng.integers(0, 2, shape).astype(as_dtype(name))
              for name in names for rank, shape in enumerate(shapes)}  # fmt: skip
    arrays |= {
        "T": rng.normal(size=(3, 5)).T,
        "F": np.asfortranarray(rng.normal(size=(4, 3))),
        "step": arrays["f32.1"][::2],
    }
    written = [Entry(key, TensorType(v.shape, v.dtype), lambda v=v: v) for key, v in arrays.items()]  # type: ignore[misc]
    write_checkpoint(tmp_path / "it", written, format, False)
    assert_holds(tmp_path / "it", arrays)


def test_a_shared_weight_is_stored_once(tmp_path: Path) -> None:
    """Used plain and transposed, in one leaf or two."""
    flow = rlx.ModelFlow("m").input("x", ("batch", 4)).linear("w", transpose=False).linear("w", transpose=True)
    weights = {"w": np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)}
    model = rlx.compile(flow, weights=weights)
    rlx.save(model, tmp_path / "it")
    assert_holds(tmp_path / "it", weights)


PROFILES: list[tuple[str, str, dict[str, dict[str, str]], str]] = [
    ("gqa_tied_llama3_v5", "orbax", {}, "{q,k,v}"),
    ("bf16_gqa_tied_v5", "safetensors", {"precision": {"compute": "f32"}, "layers": {"roll": "scan"}}, "{0..1}"),
    ("gqa_linear_mlpbias_v5", "safetensors", {"precision": {"compute": "bf16"}, "layers": {"roll": "scan"}}, "{0..2}"),
]


@pytest.mark.parametrize(("name", "format", "tables", "leaf"), PROFILES)
def test_every_profile_saves_the_same_checkpoint(
    tmp_path: Path, name: str, format: str, tables: dict[str, dict[str, str]], leaf: str
) -> None:
    """Merged, scanned, narrowed, widened: what was loaded comes back bit by bit, under the checkpoint's keys."""
    profile = rlx.CompileProfile().replace(**tables)
    lm = load(FIXTURES / "llama" / name, profile=profile)
    assert any(leaf in held for held in lm.model.params), sorted(lm.model.params)
    rlx.save(lm, tmp_path / "it", format)
    original = rlx.open_weights(FIXTURES / "llama" / name)
    assert_holds(tmp_path / "it", {key: original.read(key) for key in original.keys()})


def test_values_that_the_checkpoint_cannot_hold(tmp_path: Path) -> None:
    flow, weights = mlp(ml_dtypes.bfloat16)
    model = rlx.compile(flow, weights=weights)  # computes in f32
    trained = model.replace(params=jax.tree.map(lambda leaf: leaf + 1e-6, model.params))
    with pytest.raises(WeightError, match="f32.*bf16.*'a.weight'.*dtype=.*'f32'"):
        rlx.save(trained, tmp_path / "it")
    assert os.listdir(tmp_path) == []
    rlx.save(trained, tmp_path / "f32", dtype="f32")
    assert_holds(tmp_path / "f32", {key: value.astype(np.float32) + np.float32(1e-6) for key, value in weights.items()})
    rlx.save(trained, tmp_path / "bf16", dtype="bf16")
    assert_holds(tmp_path / "bf16", weights)


def test_untouched_weights_that_were_narrowed_are_copied_from_the_source(tmp_path: Path) -> None:
    flow, weights = mlp()
    profile = rlx.CompileProfile().replace(precision={"compute": "bf16"})
    model = rlx.compile(flow, weights=weights, profile=profile)
    params = dict(model.params or {})
    assert {leaf.dtype for leaf in params.values()} == {jnp.bfloat16.dtype}
    rlx.save(model, tmp_path / "same")
    assert_holds(tmp_path / "same", weights)
    params["a.bias"] = params["a.bias"] * 2
    changed = model.replace(params=params)
    with pytest.raises(WeightError, match="bf16.*f32.*'a.bias'"):
        rlx.save(changed, tmp_path / "no")
    rlx.save(changed, tmp_path / "f32", dtype="f32")
    twice = np.asarray(params["a.bias"]).astype(np.float32)
    assert_holds(tmp_path / "f32", {"a.weight": weights["a.weight"], "a.bias": twice})
    params["a.bias"] = jnp.full(8, 1e6, jnp.bfloat16)
    with pytest.warns(RlxNumericsWarning, match="'a.bias': 8 of 8 .*f16"):
        rlx.save(model.replace(params=params), tmp_path / "f16", "safetensors", dtype="f16")
    params["a.bias"] = jnp.full(8, 1e-7, jnp.bfloat16)
    with pytest.warns(RlxNumericsWarning, match="'a.bias': .*6.1e-05.*f16"):
        rlx.save(model.replace(params=params), tmp_path / "small", "safetensors", dtype="f16")


def test_wide_weights(tmp_path: Path) -> None:
    """JAX narrows 64-bit weights at load: what nobody changed keeps its bits, integers always do."""
    flow, weights = mlp(np.float64)
    flow = flow.custom(lambda emit, x: x + emit.param("steps", shape=(8,)).astype("f32"))
    weights["steps"] = np.arange(8)
    model = rlx.compile(flow, weights=weights)
    rlx.save(model, tmp_path / "same")
    assert_holds(tmp_path / "same", weights)
    params = {name: leaf + 1 for name, leaf in (model.params or {}).items()}
    with pytest.raises(WeightError, match="f32.*f64.*'a.weight'.*'a.bias'"):
        rlx.save(model.replace(params=params), tmp_path / "no")
    rlx.save(model.replace(params=params), tmp_path / "f32", dtype="f32")
    assert_holds(tmp_path / "f32", {key: np.asarray(params[key]) for key in mlp()[1]} | {"steps": np.arange(8) + 1})


def test_an_existing_target(tmp_path: Path) -> None:
    flow, weights = mlp()
    model = rlx.compile(flow, weights=weights)
    path = tmp_path / "it"
    rlx.save(model, path)
    (path / "config.json").write_text("{}")
    (path / "more" / "inside").mkdir(parents=True)
    (path / "more" / "inside" / "notes").write_text("mine")
    (path / "link").symlink_to("more")
    doubled = model.replace(params=jax.tree.map(lambda leaf: leaf * 2, model.params))
    rlx.save(doubled, path, "safetensors", overwrite=True)
    assert_holds(path, {key: value * 2 for key, value in weights.items()})
    assert sorted(os.listdir(path)) == ["config.json", "link", "model.safetensors", "more", "rlx_manifest.json"]
    assert (path / "link").is_symlink() and (path / "link" / "inside" / "notes").read_text() == "mine"
    assert os.listdir(tmp_path) == ["it"]


def test_folders_around_the_target_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And are on disk, with their names, when the save returns."""
    flow, weights = mlp()
    model, synced = rlx.compile(flow, weights=weights), list[str]()
    sync = atomic.sync

    def noted(path: str) -> None:
        synced.append(path)
        sync(path)

    monkeypatch.setattr(atomic, "sync", noted)
    rlx.save(model, tmp_path / "runs" / "one" / "it")
    assert_holds(tmp_path / "runs" / "one" / "it", weights)
    assert {str(tmp_path), str(tmp_path / "runs")} <= set(synced)


def test_overwriting_what_others_wrote_is_refused(tmp_path: Path) -> None:
    flow, weights = mlp()
    model = rlx.compile(flow, weights=weights)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("notes", "file"):
        with pytest.raises(TargetExistsError, match="rlx_jax.save did not write it"):
            rlx.save(model, tmp_path / name, overwrite=True)
    assert (tmp_path / "notes" / "a.txt").read_text() == (tmp_path / "file").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    rlx.save(model, tmp_path / "empty", overwrite=True)
    assert_holds(tmp_path / "empty", weights)


def test_a_link_is_written_through(tmp_path: Path) -> None:
    flow, weights = mlp()
    model = rlx.compile(flow, weights=weights)
    (tmp_path / "disk").mkdir()
    (tmp_path / "it").symlink_to(tmp_path / "disk" / "step_1")
    rlx.save(model, tmp_path / "it")
    rlx.save(model, tmp_path / "it", overwrite=True)
    assert (tmp_path / "it").is_symlink() and os.listdir(tmp_path / "disk") == ["step_1"]
    assert_holds(tmp_path / "it", weights)


def test_the_manifest_is_asked_for(tmp_path: Path) -> None:
    flow, weights = mlp()
    rlx.save(rlx.compile(flow, weights=weights), tmp_path / "it", "safetensors")
    manifest = json.loads((tmp_path / "it" / "rlx_manifest.json").read_text())
    assert manifest["version"] == 1 and sorted(manifest["weights"]) == sorted(weights)
    assert manifest["weights"]["a.bias"] | {"sha256": ""} == {"dtype": "f32", "shape": [8], "nbytes": 32, "sha256": ""}
    with pytest.raises(IntegrityError, match="a single file has no rlx_manifest.json"):
        rlx.open_weights(tmp_path / "it" / "model.safetensors", verify="full")


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
