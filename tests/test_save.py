"""`rlx_jax.save`: what is written loads back, in every layout; what cannot be written exactly is refused."""

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
from safetensors.numpy import load_file

import rlx_jax as rlx
from rlx_jax.errors import IntegrityError, RlxWarning, TargetExistsError, WeightError
from rlx_jax.io import atomic
from rlx_jax.ir.types import TensorType, as_dtype
from rlx_jax.weights.format import Entry
from rlx_jax.weights.save import write_checkpoint
from tests.opening import load

FORMATS = ["orbax", "safetensors"]
FIXTURES = Path(__file__).parent / "fixtures"
IDS = np.array([[1, 2, 3, 4]], np.int32)


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
    with pytest.warns(RlxWarning, match="'a.bias': 8 of 8 .*f16"):
        rlx.save(model.replace(params=params), tmp_path / "f16", "safetensors", dtype="f16")
    params["a.bias"] = jnp.full(8, 1e-7, jnp.bfloat16)
    with pytest.warns(RlxWarning, match="'a.bias': .*6.1e-05.*f16"):
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
