"""Opening weights: mappings, trees, files, directories with shards and links, custom formats, and what can be wrong."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx
from safetensors.numpy import save_file

import rlx_jax as rlx
from rlx_jax import errors
from rlx_jax.errors import MissingWeightError, WeightShapeError
from rlx_jax.io import limits
from rlx_jax.io.files import resolve
from rlx_jax.weights.format import all_finite
from rlx_jax.weights.mapping import MappingSource
from rlx_jax.weights.safetensors_format import SafetensorsSource
from rlx_jax.weights.source import WeightSource, open_weights
from tests.shards import INDEX, SHARDS, B, W, assert_shards, write_shards
from tests.small import Own


def test_mapping() -> None:
    arrays: dict[str, Any] = {
        "w": W, "b": jnp.asarray(B), "i": np.arange(3), "d": np.ones((), np.float64), "e": np.zeros((0, 4), bool),
    }  # fmt: skip
    source = open_weights(arrays)
    assert isinstance(source, MappingSource) and isinstance(source, WeightSource)
    assert source.keys() == ("w", "b", "i", "d", "e")
    assert source.has("w") and not source.has("x") and source.where("w") == "mapping"
    for key, array in arrays.items():
        spec, value = source.spec(key), source.read(key)
        assert (spec.shape, spec.dtype) == (array.shape, array.dtype) == (value.shape, value.dtype)
        assert type(value) is np.ndarray
        np.testing.assert_array_equal(value, array)
        np.testing.assert_array_equal(source.read(key), array)  # reading removes nothing
    np.testing.assert_array_equal(source.read("w", (slice(1, 2), slice(None, None, 2))), W[1:2, ::2])
    np.testing.assert_array_equal(source.read("b", (slice(1, 3),)), B[1:])

    array = W.copy()
    part = open_weights({"w": array}).read("w")
    assert np.shares_memory(part, array) and array.flags.writeable, "it is not copied"
    with pytest.raises(ValueError, match="read-only"):
        part[0] = 1


def test_mapping_with_odd_layouts() -> None:
    """The bytes of an array may lie in any order; the values read are the same and native."""
    arrays = {"big": W.astype(">f4"), "transposed": np.asfortranarray(W), "strided": np.repeat(W, 2, 1)[:, ::2]}
    source = open_weights(arrays)
    for key in source.keys():
        assert source.spec(key).dtype == np.float32 and source.read(key).dtype.isnative
        np.testing.assert_array_equal(source.read(key), W)


def test_traced_and_deleted_arrays() -> None:
    @jax.jit
    def inside(x: jax.Array) -> jax.Array:
        source = open_weights({"w": x})
        assert source.spec("w").shape == (2, 3)
        with pytest.raises(errors.WeightError, match="'w' is traced"):
            source.read("w")
        return x

    inside(jnp.asarray(W))
    elsewhere = jnp.asarray(W)
    with (
        mock.patch.object(type(elsewhere), "is_fully_addressable", False),
        pytest.raises(errors.WeightError, match="on devices of other processes"),
    ):
        open_weights({"w": elsewhere}).read("w")
    gone = jnp.asarray(W) + 1
    source = open_weights({"w": gone, "s": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)})
    gone.delete()
    for key, message in (("w", "'w' is deleted"), ("s", "'s' has a shape only, no values: .* ShapeDtypeStruct")):
        with pytest.raises(errors.WeightError, match=message):
            source.read(key)


def source_of(kind: str, tmp_path: Path, array: np.ndarray, **options: Any) -> WeightSource:
    if kind == "mapping":
        return open_weights({"w": array}, **options)
    save_file({"w": array}, tmp_path / "model.safetensors")
    return open_weights(tmp_path / "model.safetensors", **options)


@pytest.mark.parametrize("kind", ["mapping", "file"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e5m2", "float8_e4m3fn"])
def test_nan(tmp_path: Path, kind: str, dtype: str) -> None:
    array = np.ones((3, 2), dtype)
    array[2, 1] = array[1, 0] = np.nan
    where = "mapping" if kind == "mapping" else "model.safetensors"
    source = source_of(kind, tmp_path, array)
    with pytest.raises(errors.NonFiniteWeightError, match=rf"'w' \(.*{where}.*\): 2 NaN of 6"):
        source.read("w")
    with pytest.raises(errors.NonFiniteWeightError, match="1 NaN of 2 values"):
        source.read("w", (slice(2, 3),))
    np.testing.assert_array_equal(source.read("w", (slice(0, 1),)), array[:1])
    with pytest.warns(errors.RlxNumericsWarning, match="2 NaN of 6 values"):
        source_of(kind, tmp_path, array, on_nonfinite="warn").read("w")
    assert np.isnan(source_of(kind, tmp_path, array, on_nonfinite="ignore").read("w")).sum() == 2


@pytest.mark.parametrize("kind", ["mapping", "file"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e5m2"])
def test_infinity_is_a_warning(tmp_path: Path, kind: str, dtype: str) -> None:
    array = np.array([1, -np.inf, np.inf], dtype)
    for policy in ("error", "warn"):
        with pytest.warns(errors.RlxNumericsWarning, match="'w' .*: 2 infinite of 3 values"):
            source_of(kind, tmp_path, array, on_nonfinite=policy).read("w")
    source_of(kind, tmp_path, array, on_nonfinite="ignore").read("w")  # warnings are errors here


@pytest.mark.parametrize(
    "dtype", [pytest.param("float16", marks=pytest.mark.slow), "bfloat16", "float8_e5m2", "float8_e4m3fn"]
)
def test_each_pattern_of_a_small_float(dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    bits = np.arange(0, 256**kind.itemsize, kind.itemsize**2, dtype=f"u{kind.itemsize}")
    with np.errstate(invalid="ignore"):  # NumPy warns about signalling NaN
        expected = np.isfinite(bits.view(kind))
    for value, finite in zip(bits.view(kind), expected, strict=True):
        assert all_finite(np.array([value])) == finite


def test_signalling_nan_is_counted_without_a_warning() -> None:
    array = np.array([0x7F81, 0xFF81, 0x3F80], np.uint16).view(ml_dtypes.bfloat16)
    with pytest.raises(errors.NonFiniteWeightError, match="2 NaN of 3"):
        open_weights({"w": array}).read("w")


def test_finite_at_the_edges_of_chunks() -> None:
    for at in (0, 2**18 - 1, 2**18, 2**19 + 4):
        for dtype in (np.float32, ml_dtypes.bfloat16):
            array = np.zeros((5, (2**19 + 5) // 5 + 1), dtype)
            assert all_finite(array) and all_finite(array.T) and all_finite(array[:, ::2])
            array.reshape(-1)[at] = np.inf
            assert not all_finite(array) and not all_finite(array.T)
    assert all_finite(np.zeros((0, 3), np.float32)) and all_finite(np.zeros((0, 3), ml_dtypes.bfloat16))


def test_one_file(tmp_path: Path) -> None:
    save_file({"w": W, "b": B}, tmp_path / "any name.safetensors", {"format": "pt"})
    with open_weights(tmp_path / "any name.safetensors") as source:  # type: ignore[attr-defined]
        assert isinstance(source, SafetensorsSource) and isinstance(source, WeightSource)
        assert set(source.keys()) == {"w", "b"} and source.has("w") and not source.has("x")
        assert source.where("w") == str(tmp_path / "any name.safetensors")
        assert source.spec("b") == jax.ShapeDtypeStruct((3,), jnp.bfloat16)
        np.testing.assert_array_equal(source.read("w", (slice(1, 2), slice(0, 2))), W[1:2, :2])
    with pytest.raises(errors.StorageError, match="closed"):
        source.read("w")


def test_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By any form of their path; opening reads no tensor, and threads share a source."""
    directory = write_shards(tmp_path / "model")
    monkeypatch.chdir(directory)
    forms: list[Any] = [directory, directory / INDEX, str(directory), INDEX]
    for form in forms:
        source = open_weights(form)
        assert_shards(source)
        assert source.where("c") == "model-2-of-2.safetensors"
    source = open_weights(directory)
    assert isinstance(source, SafetensorsSource)
    assert {key: source.spec(key).shape for key in source.keys()} == {"w": (2, 3), "b": (3,), "c": (3,)}
    assert sum(file.bytes_read for file in source.files) == 0
    source.read("w", (slice(1, 2),))
    source.read("b")
    assert sum(file.bytes_read for file in source.files) == 18
    with ThreadPoolExecutor(8) as pool:
        arrays = list(pool.map(source.read, ["w", "c"] * 200))
    assert all(np.array_equal(array, W if i % 2 == 0 else W[0]) for i, array in enumerate(arrays))
    assert sum(file.bytes_read for file in source.files) == 18 + 200 * (W.nbytes + W[0].nbytes)


def test_precedence(tmp_path: Path) -> None:
    """Index, then model.safetensors, then the only index, then the only file."""
    save_file({"only": W}, tmp_path / "weights.safetensors")
    assert open_weights(tmp_path).keys() == ("only",)
    save_file({"y": W}, tmp_path / "consolidated.safetensors")
    with pytest.raises(errors.MissingFileError, match="model.safetensors.*'consolidated.safetensors'"):
        open_weights(tmp_path)
    other = {"metadata": {}, "weight_map": {"only": "weights.safetensors"}}
    (tmp_path / "diffusion_model.safetensors.index.json").write_text(json.dumps(other))
    assert open_weights(tmp_path).keys() == ("only",)
    save_file({"single": W}, tmp_path / "model.safetensors")
    assert open_weights(tmp_path).keys() == ("single",)
    assert_shards(open_weights(write_shards(tmp_path)))
    (tmp_path / INDEX).write_text('{"weight_map": {}}')
    with pytest.raises(errors.ConfigError, match="weight_map: expected an object"):  # never "the other one instead"
        open_weights(tmp_path)


def test_max_bytes(tmp_path: Path) -> None:
    shards, before = write_shards(tmp_path / "model"), len(os.listdir("/dev/fd"))
    for weights in (shards, {"w": W, "b": B, "c": W[0]}, {"w": jax.ShapeDtypeStruct((42,), np.int8)}):
        open_weights(weights, max_bytes=42)
        with pytest.raises(errors.LimitError, match="42.*max_bytes.*41") as caught:
            open_weights(weights, max_bytes=41)
        assert len(os.listdir("/dev/fd")) == before and caught  # whose traceback holds the source


def test_a_source_comes_back_as_it_is() -> None:
    source = open_weights({"w": W})
    assert open_weights(source) is source
    with pytest.raises(errors.WeightError, match="already open"):
        open_weights(source, on_nonfinite="ignore")


def test_a_source_of_ones_own() -> None:
    """It is used as it is; what it lacks, or reads otherwise than it says, is told."""
    flow = rlx.ModelFlow("m").input("x", ("batch", 3)).linear("w")
    good = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(rlx.compile(flow, Own(good))(good[:1]), good[:1] @ good.T)
    for array, got in ((good.tolist(), "list"), (good.astype(np.float16), "float16")):
        with pytest.raises(errors.WeightError, match=rf"'w'.*\(mine\).*read\(\).*{got}.*f32"):
            rlx.compile(flow, Own(array))
    with pytest.raises(errors.WeightShapeError, match=r"'w' \(mine\) was f32\[2,3\]"):
        rlx.compile(flow, Own(good.T))

    class Half:
        keys, read, spec = Own.keys, Own.read, Own.spec

    with pytest.raises(errors.WeightError, match="got 'Half' without has, where"):
        rlx.compile(flow, Half())


def index_of(**shard_of: str) -> dict[str, Any]:
    return {"metadata": {}, "weight_map": shard_of}


def hub_cache(root: Path, name: str = "models--org--tiny") -> Path:
    """A snapshot as huggingface_hub lays it out: links into a sibling folder of blobs."""
    repository = root / name
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    write_shards(repository / "blobs")
    for path in (repository / "blobs").iterdir():
        blob = path.rename(path.with_name(f"hash-of-{path.name}"))
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def test_shards_in_folders_and_with_unicode_names(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    (directory / "teil-ä").mkdir(parents=True)
    assert_shards(
        open_weights(write_shards(directory, {f"teil-ä/{name}": tensors for name, tensors in SHARDS.items()}))
    )


def test_tensor_that_its_shard_lacks(tmp_path: Path) -> None:
    first, second = SHARDS
    directory = write_shards(tmp_path / "model", index=index_of(w=first, b=second, c=second, gone=first, lost=second))
    with pytest.raises(
        errors.MissingWeightError,
        match=f"'gone of {first}'.*'lost of {second}'",
    ):
        open_weights(directory)
    write_shards(directory, index=index_of(w=second, b=second, c=second))
    with pytest.raises(errors.MissingWeightError, match=f"'w of {second}'"):
        open_weights(directory)


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    shards = {"a.safetensors": {"w": W, "b": B}, "c.safetensors": {"w": W}}
    directory = write_shards(tmp_path / "model", shards, index=index_of(w="a.safetensors", b="a.safetensors"))
    assert set(open_weights(directory, strict=False).keys()) == {"w", "b"}  # the index does not name c at all
    write_shards(
        directory,
        {**shards, "c.safetensors": {"w": W, "x": W}},
        index_of(w="a.safetensors", b="a.safetensors", x="c.safetensors"),
    )
    for strict in (True, False):
        with pytest.raises(errors.DuplicateWeightError, match="'w in a.safetensors and c.safetensors'"):
            open_weights(directory, strict=strict)


def test_index_that_says_otherwise(tmp_path: Path) -> None:
    """Of tensors that it does not list, or another size in all: an error, and with strict=False a warning."""
    first, second = SHARDS
    unlisted = index_of(w=first, b=second), errors.UnexpectedWeightError, f"does not list: 'c in {second}'"
    size = {"metadata": {"total_size": 41}}, errors.CheckpointFormatError, "total_size is 41, the tensors have 42 bytes"
    for index, error, message in (unlisted, size):
        directory = write_shards(tmp_path / "model", index=index)
        with pytest.raises(error, match=f"{message}.*; pass strict=False"):
            open_weights(directory)
        with pytest.warns(errors.RlxWarning, match=message.removeprefix("does not list: ")):
            assert_shards(open_weights(directory, strict=False))
    metadata: Any
    for metadata in ({}, None, {"total_size": 42.0}):
        assert_shards(open_weights(write_shards(directory, index={"metadata": metadata, "more": 1})))
    open_weights(write_shards(tmp_path / "empty", {"m.safetensors": {"e": W[:0]}}))


def test_too_many_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_shards(tmp_path / "model", index={"metadata": {}})
    monkeypatch.setattr(limits, "MAX_TENSORS", 2)
    with pytest.raises(errors.LimitError, match=rf"{INDEX}.* limits.MAX_TENSORS = 2"):
        open_weights(directory)
    # each shard and the index are within the limit, all shards together are not
    index = index_of(w="model-1-of-2.safetensors", b="model-2-of-2.safetensors")
    with (
        pytest.raises(errors.LimitError, match=r"tensors is 3, .* limits.MAX_TENSORS = 2"),
        pytest.warns(errors.RlxWarning),
    ):
        open_weights(write_shards(directory, index=index), strict=False)


def test_hub_cache(tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path)
    (tmp_path / "link").symlink_to(snapshot)
    for path in (snapshot, snapshot / INDEX, tmp_path / "link"):
        assert_shards(open_weights(path))
    assert open_weights(snapshot / "model-1-of-2.safetensors").keys() == ("w",)
    for path in (snapshot, snapshot / INDEX, snapshot / "model-1-of-2.safetensors"):
        with pytest.raises(errors.PathEscapeError, match="symbolic link, and links are refused"):
            open_weights(path, links="refuse")


def test_links_out_of_the_directory(tmp_path: Path) -> None:
    outside = write_shards(tmp_path / "outside")
    directory = write_shards(tmp_path / "model")
    shard = directory / "model-1-of-2.safetensors"
    shard.unlink()
    shard.symlink_to(outside / shard.name)
    with pytest.raises(errors.PathEscapeError, match="'model-1-of-2.safetensors'"):
        open_weights(directory)
    # the same through a folder, by the index file, and out of a cache into another repository
    (directory / "sub").symlink_to(outside)
    with pytest.raises(errors.PathEscapeError):
        resolve(str(directory), "sub/model-1-of-2.safetensors")
    with pytest.raises(errors.PathEscapeError):
        resolve(str(directory), "../outside/model-1-of-2.safetensors")
    (directory / INDEX).unlink()
    (directory / INDEX).symlink_to(outside / INDEX)
    with pytest.raises(errors.PathEscapeError, match=INDEX):
        open_weights(directory)
    snapshot, other = hub_cache(tmp_path), hub_cache(tmp_path, "models--org--other")
    (snapshot / shard.name).unlink()
    (snapshot / shard.name).symlink_to(other / shard.name)
    with pytest.raises(errors.PathEscapeError):
        open_weights(snapshot)


def test_links_inside_and_hard_links(tmp_path: Path) -> None:
    directory = write_shards(tmp_path / "model")
    shard = directory / "model-1-of-2.safetensors"
    os.link(shard, tmp_path / "other name")
    assert_shards(open_weights(directory))
    with pytest.raises(errors.PathEscapeError, match="'model-1-of-2.safetensors' has 2 hard links"):
        open_weights(directory, links="refuse")
    (tmp_path / "other name").unlink()
    assert_shards(open_weights(directory, links="refuse"))
    shard.rename(directory / "stored")
    shard.symlink_to("stored")
    assert_shards(open_weights(directory))
    with pytest.raises(errors.PathEscapeError, match="symbolic link"):
        open_weights(directory, links="refuse")


def test_dangling_and_looping_links(tmp_path: Path) -> None:
    directory = write_shards(tmp_path / "model")
    shard = directory / "model-1-of-2.safetensors"
    shard.unlink()
    shard.symlink_to("absent")
    with pytest.raises(errors.MissingWeightError, match="1 of 2 shards are missing"):
        open_weights(directory)
    shard.unlink()
    shard.symlink_to(shard.name)
    with pytest.raises(errors.StorageError, match="symbolic links"):
        open_weights(directory)


RNG = np.random.default_rng(0)
LEAF = RNG.standard_normal((6, 3, 2, 4)).astype(np.float32)  # inputs, layer, heads, dim
TREE: dict[str, Any] = {
    "blocks": {"q": LEAF, "e": RNG.standard_normal((2, 3, 5)).astype(np.float32)},
    "norm": np.ones(6, np.float32),
}
NAMES: dict[str, Any] = {
    r"blocks\.q": rlx.TreeWeight("l.{layer}.q", "i layer h (half two) -> (h two half) i", {"two": 2}, 0.5),
    r"blocks\.e": rlx.TreeWeight("l.{layer}.e.{expert}", "expert layer o -> o"),
    "norm": None,
}


def test_values() -> None:
    """Each weight by plain indexing, whole and in part; and the tree again, also of arrays that are traced."""
    source: Any = rlx.open_weights(TREE, names=NAMES)
    assert len(source.keys()) == 3 + 6
    for layer in range(3):
        heads = [np.concatenate([LEAF[:, layer, h, ::2], LEAF[:, layer, h, 1::2]], 1).T for h in range(2)]
        want = np.concatenate(heads) * np.float32(0.5)
        np.testing.assert_array_equal(source.read(f"l.{layer}.q"), want)
        np.testing.assert_array_equal(source.read(f"l.{layer}.q", (slice(1, 7, 2), slice(2, 5))), want[1:7:2, 2:5])
        assert source.spec(f"l.{layer}.q") == jax.ShapeDtypeStruct((8, 6), np.float32)
        for expert in range(2):
            np.testing.assert_array_equal(source.read(f"l.{layer}.e.{expert}"), TREE["blocks"]["e"][expert, layer])
    weights = {key: source.read(key) for key in source.keys()}
    jax.tree.map(np.testing.assert_array_equal, source.to_tree(weights), TREE)
    doubled = jax.jit(source.to_tree)({key: 2 * value for key, value in weights.items()})
    np.testing.assert_array_equal(doubled["blocks"]["q"], 2 * LEAF)
    np.testing.assert_array_equal(doubled["norm"], TREE["norm"])
    with pytest.raises(MissingWeightError, match=r"l\.0\.e\.0"):
        source.to_tree({})
    with pytest.raises(WeightShapeError, match=r"expected shape \[8, 6\], got \[6, 8\]"):
        source.to_tree({key: value.T for key, value in weights.items()})


def test_flax_and_orbax(tmp_path: Path) -> None:
    """Linen's parameters, the variables of nnx with other state left out, and the same tree in a checkpoint."""
    names: dict[str, Any] = {
        r"(?:params\.)?(.*)kernel": rlx.TreeWeight(r"\1weight", "i o -> o i"), r"(?:params\.)?(.*)bias": r"\1bias",
        r".*rngs\..*": None,
    }  # fmt: skip
    params = linen.Dense(3).init(jax.random.key(0), jnp.ones((1, 2)))
    dense = rlx.open_weights(params, names={k: v for k, v in names.items() if v is not None})
    np.testing.assert_array_equal(dense.read("weight"), params["params"]["kernel"].T)
    block = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Dropout(0.1, rngs=nnx.Rngs(1)))
    trees: tuple[Any, ...] = (nnx.state(block), block)
    for tree in trees:
        source: Any = rlx.open_weights(tree, names=names)
        assert set(source.keys()) == {"layers.0.weight", "layers.0.bias"}
        again = source.to_tree({"layers.0.weight": np.ones((3, 2), "f4"), "layers.0.bias": np.ones(3, "f4")})
        values: Any = nnx.state(again) if tree is block else again
        np.testing.assert_array_equal(values["layers"][0]["kernel"].get_value(), np.ones((2, 3)))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", params)
    written = rlx.open_weights(tmp_path / "run", names={k: v for k, v in names.items() if v}, verify="metadata")
    np.testing.assert_array_equal(written.read("weight"), dense.read("weight"))
