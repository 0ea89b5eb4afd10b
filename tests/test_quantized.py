"""Directories with quantised weights: values against the packages that define the formats, models, and refusals."""

import copy
import hashlib
import json
import random
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import errors
from rlx_jax.io.folder import Folder
from rlx_jax.ir.packed import PackedSpec, stored_bytes
from rlx_jax.ir.packed_values import decode_arrays
from rlx_jax.weights.execute import read_numbers
from rlx_jax.weights.format import Entry
from rlx_jax.weights.quantized_config import read_quantization
from rlx_jax.weights.safetensors_format import write_file
from rlx_jax.weights.source import with_quantized_weights
from rlx_jax.weights.tensor_file import SafetensorsFile
from tests.opening import load
from tests.oracles import checkpoints
from tests.oracles.comparing import assert_close
from tests.oracles.fuzzing import seed_of

ARCHIVE = checkpoints.FIXTURES / "quantized.zip"
with zipfile.ZipFile(ARCHIVE) as archive:
    CASES = sorted({name.partition("/")[0] for name in archive.namelist()})
# Formats whose inputs are in mixed order.
ORDERED = ("ct_int4_g_idx", "gptq_v2_desc_act", "gptq_8bit")
# Some schemes, of which the default suite runs models; it has the values of all.
QUICK = ("awq", "bnb_nf4_nested", "fp8_block")
STATE = ".weight.quant_state.bitsandbytes__nf4"
SLOW = pytest.mark.slow
TOKENS = np.random.default_rng(5).integers(0, 48, (2, 9)).astype(np.int32)


ARCHIVES = (ARCHIVE,)


decode_on_device = jax.jit(decode_arrays, static_argnums=1)


def digest(values: Any) -> dict[str, Any]:
    data = np.asarray(values)
    assert data.dtype == np.float32
    return {"shape": list(data.shape), "sha256": hashlib.sha256(data.tobytes()).hexdigest()}


@pytest.mark.parametrize("name", CASES)
def test_values(directories: Path, name: str) -> None:
    """Each quantised weight has the values of the reference, bit by bit, on the host, on the device, and in parts."""
    directory = directories / name
    recorded = json.loads((directory / "decoded.json").read_text())
    edges = with_quantized_weights(rlx.open_weights(directory / "edges.safetensors"), Folder(directory))
    for source in (rlx.open_weights(directory / "model.safetensors"), edges):
        source = source if source is edges else with_quantized_weights(source, Folder(directory))
        for key in recorded.keys() & set(source.keys()):
            spec, values = source.spec(key), read_numbers(key, source)
            zero = 0 if name == "nvfp4_modelopt" else -0.0  # a code of a sign alone is +0 for modelopt
            assert digest(values + np.float32(zero)) == recorded.pop(key), key
            np.testing.assert_array_equal(source.read(key), values)
            for index in (np.s_[3:9, 5:], np.s_[1::3, 30:50:7], np.s_[17:18,]):
                np.testing.assert_array_equal(source.read(key, index), values[index])
            assert isinstance(spec, PackedSpec) and spec.arrays is not None
            assert ("order" in spec.arrays) == (name in ORDERED)
            arrays = {array: source.read(program.key) for array, program in spec.arrays.items()}
            assert {array: (a.shape, a.dtype) for array, a in arrays.items()} == {
                array: (program.type.shape, program.type.dtype) for array, program in spec.arrays.items()
            }
            on_device = decode_on_device({array: jnp.asarray(a) for array, a in arrays.items()}, spec.scheme)
            if key != "edge.weight":  # XLA on a CPU flushes subnormal numbers, and multiplies by reciprocals
                np.testing.assert_allclose(on_device, values, rtol=2e-7 if name == "nvfp4_ct" else 0)
            for array, program in spec.arrays.items():
                for rows, columns in ((slice(8, 17), slice(1, 3)), (slice(0, 1), slice(None))):
                    np.testing.assert_array_equal(
                        source.read(program.key, (rows, columns)), arrays[array][rows, columns]
                    )
    assert not recorded


TWINS: dict[str, rlx.CausalLM] = {}


def twin_of(directory: Path, plain: dict[str, np.ndarray]) -> rlx.CausalLM:
    """Return the model of a directory over these numbers; checkpoints of one config share its programs."""
    recipe = rlx.recipe_for(directory)
    made = rlx.compile(recipe, plain)
    twin = TWINS.setdefault(repr(recipe.config), rlx.CausalLM(made))
    twin.model = twin.model.replace(made.require_params("a twin"))
    return twin


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else SLOW) for n in CASES])
def test_models(directories: Path, name: str, tmp_path: Path) -> None:
    """The model has the logits of its decoded twin, keeps few bytes, and is saved as numbers; one format in order and
    one in mixed order have the greedy tokens, too."""
    directory = directories / name
    lm, source = load(directory), rlx.open_weights(directory)
    plain = {key: read_numbers(key, source).astype(np.float32) for key in source.keys()}
    twin = twin_of(directory, plain)
    assert_close(lm.logits(TOKENS), np.asarray(twin.logits(TOKENS)), tolerance=3e-6)
    if name in ("awq", "gptq_8bit"):
        assert lm.generate(TOKENS.tolist(), max_new_tokens=6) == twin.generate(TOKENS.tolist(), max_new_tokens=6)
    packed = [spec for spec in map(source.spec, source.keys()) if isinstance(spec, PackedSpec)]
    assert packed and not lm.model.report().decoded
    loaded = sum(leaf.nbytes for leaf in lm.model.params.values() if leaf.dtype != np.float32)
    assert loaded == sum(map(stored_bytes, packed))
    rlx.save(lm, tmp_path / "saved", dtype="f32")
    saved = rlx.open_weights(tmp_path / "saved")
    assert set(saved.keys()) == set(plain)
    for key, value in plain.items():
        np.testing.assert_array_equal(saved.read(key), value)
    assert not {"quantization_config", "quantization"} & rlx.recipe_for(tmp_path / "saved").config.__dict__.keys()


SHARDED = [
    "fp8_block",
    "gptq_v2_desc_act",
    *(pytest.param(name, marks=SLOW) for name in ("awq", "nvfp4_ct", "bnb_int8", "ct_int4", "mlx_4bit")),
]


@pytest.mark.parametrize("name", SHARDED)
def test_shards(directories: Path, name: str) -> None:
    """Over a mesh, each device reads its part of the arrays; a sum of two parts rounds otherwise."""
    lm = load(directories / name, mesh=2)
    assert_close(lm.logits(TOKENS), np.asarray(load(directories / name).logits(TOKENS)), tolerance=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gptq_v2_desc_act"])
def test_rolled(directories: Path, tmp_path: Path, name: str) -> None:
    """Rolled layers stay packed, in the order that each has of its inputs; for training they are decoded."""
    directory = checkpoints.copy(directories / name, tmp_path / "copy")
    rng, tensors = np.random.default_rng(1), read_file(directory)
    for layer in (1, 2, 3):
        layers = {k.replace("layers.0.", f"layers.{layer}."): v for k, v in tensors.items() if "layers.0." in k}
        tensors |= {k: rng.permutation(v) if k.endswith("g_idx") else v for k, v in layers.items()}
    write_tensors(directory, tensors)
    checkpoints.edit_json(directory / "config.json", {"num_hidden_layers": 4})
    source = rlx.open_weights(directory)
    plain = {key: read_numbers(key, source).astype(np.float32) for key in source.keys()}
    want = np.asarray(rlx.compile(rlx.recipe_for(directory), plain)(TOKENS))
    lm = load(directory, profile=rlx.CompileProfile().replace(layers={"roll": "scan"}))
    assert any("{" in leaf and leaf.endswith(".order") for leaf in lm.model.params) and not lm.model.report().decoded
    assert_close(lm.logits(TOKENS), want, tolerance=3e-6)
    trained = rlx.compile(rlx.recipe_for(directory), source, program="train")
    assert_close(np.asarray(trained(TOKENS)), want, tolerance=3e-6)


def as_int8(directory: Path) -> dict[str, np.ndarray]:
    """Quantise the products of a checkpoint to int8 rows, as compressed-tensors writes them; return the values."""
    values: dict[str, np.ndarray] = {}

    def edit(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        stored: dict[str, np.ndarray] = {}
        for key, value in tensors.items():
            if value.ndim != 2 or not key.endswith("proj.weight") or "visual" in key:
                stored[key] = values[key] = value
                continue
            scale = np.abs(value.astype(np.float32)).max(1, keepdims=True) / 127
            codes = np.rint(value.astype(np.float32) / scale).astype(np.int8)
            stored |= {key: codes, f"{key}_scale": scale}
            values[key] = codes * scale
        return stored

    checkpoints.edit_tensors(directory, edit)
    group = {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}, "targets": ["Linear"]}
    quantization = {"quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
                    "quantization_status": "compressed", "config_groups": {"group_0": group}}  # fmt: skip
    checkpoints.edit_json(directory / "config.json", {"quantization_config": quantization})
    return values


FAMILIES = ["mamba2/*", "qwen3_moe/mixed_v5", "qwen2/*", "qwen3/tied_v4", "mixtral/window_v5", "gemma2/caps_v5",
            "qwen3_5_text/tied_v5"]  # fmt: skip
"""Gemma 3 is below, as the text model of a checkpoint that reads images."""


@pytest.mark.parametrize(
    "family", ["llama/gqa_tied_llama3_v5", *(pytest.param(family, marks=SLOW) for family in FAMILIES)]
)
def test_families(family: str, tmp_path: Path) -> None:
    """Products of every family may be quantised: fused, tied, in rolled layers, in experts."""
    fixture = next(path for path in sorted(checkpoints.FIXTURES.glob(family)) if path.is_dir())
    directory = checkpoints.copy(fixture, tmp_path / "copy")
    values = as_int8(directory)
    twin = rlx.compile(rlx.recipe_for(fixture), values)
    lm = load(directory)
    assert any(leaf.dtype == np.int8 for leaf in lm.model.params.values())
    assert_close(lm.logits(TOKENS % 40), np.asarray(twin(TOKENS % 40)), tolerance=3e-6)


@SLOW
def test_text_part(tmp_path: Path) -> None:
    """The text model of a checkpoint that reads images has other keys, and its config a nested declaration."""
    fixture = checkpoints.FIXTURES / "gemma3_text" / "deep_v5"
    directory = checkpoints.copy(fixture, tmp_path / "text")
    values = as_int8(directory)
    outer = checkpoints.inside(directory, tmp_path / "outer", "Gemma3ForConditionalGeneration", "model.language_model.")
    with pytest.warns(errors.RlxWarning, match="only the text model"):
        lm = load(outer)
    assert any(leaf.dtype == np.int8 for leaf in lm.model.params.values())
    want = rlx.compile(rlx.recipe_for(fixture), values)(TOKENS % 40)
    assert_close(lm.logits(TOKENS % 40), np.asarray(want), tolerance=3e-6)


@pytest.mark.parametrize("value", [None, False, 0, 0.0, "", [], {}])
def test_unsupported_fields_that_are_off(value: Any) -> None:
    """A feature that is not supported may be off in any spelling."""
    for method, name in (("gptq", "dynamic"), ("modelopt", "lora_rank")):
        assert read_quantization({"quantization_config": {"quant_method": method, name: value}}, "config.json")


V = "model.layers.0.self_attn.v_proj"


def read_file(directory: Path) -> dict[str, np.ndarray]:
    """The tensors of a directory as they are stored. The reader of safetensors has no floats of 8 bits for NumPy."""
    with SafetensorsFile(directory / "model.safetensors") as file:
        return {key: file.read(key) for key in file.tensors}


def write_tensors(directory: Path, tensors: dict[str, np.ndarray]) -> None:
    (directory / "model.safetensors").unlink(missing_ok=True)
    entries = [Entry.from_array(key, value) for key, value in tensors.items()]
    write_file(str(directory / "model.safetensors"), entries)


VALUES: list[Any] = [0, -1, 2**31, 2**70, 1.5, True, False, None, "", "int", "float", [], [1], [1, 2], [128, 128], {},
                     {"weights": {}}, {"a": {"weights": {"num_bits": 8}}}, "re:(a+)+$", float("inf")]  # fmt: skip


EDITS: list[Callable[[random.Random, np.ndarray], np.ndarray | None]] = [
    lambda rng, value: None, lambda rng, value: value[:0], lambda rng, value: value.reshape(-1),
    lambda rng, value: value.reshape(1, *value.shape), lambda rng, value: value.T, lambda rng, value: value[:1],
    lambda rng, value: value.astype(rng.choice(["f4", "f2", "i4", "u1", "i1", "i8"])),
    lambda rng, value: scrambled(rng, value),
]  # fmt: skip


def damage(rng: random.Random, directory: Path, tensors: dict[str, np.ndarray], config: dict[str, Any]) -> None:
    """Change fields of the quantisation, or tensors, of a checkpoint."""
    quantization = copy.deepcopy(config["quantization_config"])
    values = copy.deepcopy(VALUES)
    for _ in range(rng.randrange(3)):
        section = rng.choice([v for v in walk(quantization) if isinstance(v, dict)])
        section[rng.choice([*section, "bits", "group_size", "strategy", "block_structure"])] = values.pop(
            rng.randrange(len(values))
        )
    tensors = dict(tensors)
    for _ in range(rng.randrange(3)):
        key = rng.choice([key for key in tensors if key.startswith(("model.layers.0.mlp", "model.layers.0.self_attn"))])
        with np.errstate(over="ignore", invalid="ignore"):  # casts to a dtype that has no such numbers
            edit = rng.choice(EDITS)(rng, np.atleast_1d(tensors.pop(key)))
        if edit is not None:
            tensors[key] = np.ascontiguousarray(edit)
    write_tensors(directory, tensors)
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


def walk(value: Any) -> Iterator[Any]:
    yield value
    for inner in value.values() if isinstance(value, dict) else ():
        yield from walk(inner)


def scrambled(rng: random.Random, value: np.ndarray) -> np.ndarray:
    """Random bytes over the first bytes of a tensor."""
    data = bytearray(value.tobytes())
    data[:16] = rng.randbytes(min(16, len(data)))
    return np.frombuffer(bytes(data), value.dtype).reshape(value.shape)


def run_damaged(directories: Path, tmp_path: Path, count: int, seed: int) -> tuple[int, int]:
    """Read all weights of damaged directories; return how many were refused, and how many were not."""
    rng, refused, read = random.Random(seed), 0, 0
    names = [name for name in CASES if (directories / name / "config.json").read_text().find("quantization_config") > 0]
    loaded = {}
    for name in names:
        config = json.loads((directories / name / "config.json").read_text())
        loaded[name] = config, read_file(directories / name)
    for _ in range(count):
        config, tensors = loaded[rng.choice(names)]
        damage(rng, tmp_path, tensors, config)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                source = rlx.open_weights(tmp_path)
                for key in source.keys():
                    assert read_numbers(key, source).shape == source.spec(key).shape
            read += 1
        except errors.RlxError as error:
            refused += 1
            assert str(error)
    return refused, read


@pytest.mark.parametrize("count", [150, pytest.param(2_000, marks=SLOW), pytest.param(20_000, marks=pytest.mark.soak)])
def test_damaged(directories: Path, tmp_path: Path, count: int) -> None:
    """Damaged directories are refused in our words, or read."""
    refused, read = run_damaged(directories, tmp_path, count, 3 if count == 150 else seed_of("new"))
    assert refused > 30 and read > 10
