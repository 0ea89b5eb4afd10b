"""Orbax checkpoints as weights: everything that orbax writes, and everything that can be wrong with it."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx_jax as rlx
from rlx_jax import errors

W = np.arange(12, dtype=np.float32).reshape(3, 4)
B = np.ones(4, ml_dtypes.bfloat16)
TREE = {"layers": {"0": {"w": W, "b": B}}, "list": [np.arange(2), np.float32(3)], "step": 5}
FLAT = {"layers.0.w": W, "layers.0.b": B}
PLAIN = {**FLAT, "list.0": np.arange(2), "list.1": np.float32(3), "step": np.int64(5)}


def read(path: Path, **options: Any) -> dict[str, np.ndarray]:
    source = rlx.open_weights(path, **{"verify": "metadata", **options})
    return {key: source.read(key) for key in source.keys()}


def assert_equal(found: Mapping[str, np.ndarray], expected: Mapping[str, Any]) -> None:
    assert sorted(found) == sorted(expected)
    for key, value in expected.items():
        np.testing.assert_array_equal(found[key], value)
        assert found[key].flags.c_contiguous


def save_standard(path: Path, tree: Any = FLAT) -> Path:
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=ocp.args.StandardSave(tree))
    return path


def save_files(path: Path, tree: Any = FLAT, **options: Any) -> Path:
    """Without OCDBT: a directory for each array, which a test can edit."""
    ocp.PyTreeCheckpointer(use_ocdbt=False, **options).save(path, tree)
    return path


def save_manager(path: Path, steps: int = 3) -> Path:
    with ocp.CheckpointManager(path) as manager:
        for step in range(steps):
            tree = {key: value * np.array(step, value.dtype) for key, value in FLAT.items()}
            manager.save(step, args=ocp.args.StandardSave(tree))
        manager.wait_until_finished()
    return path


def save_items(path: Path) -> Path:
    ocp_v1.save_checkpointables(path, {"params": FLAT, "opt": {"m": W}})
    return path


def test_standard_checkpointer(tmp_path: Path) -> None:
    nested = {"layers": {"0": {"w": jnp.asarray(W)}}, "none": None, "step": 5}
    assert_equal(read(save_standard(tmp_path / "b", nested)), {"layers.0.w": W, "step": np.int64(5)})


@pytest.mark.parametrize("options", [{}, {"use_ocdbt": False}, {"use_ocdbt": False, "use_zarr3": True}])
def test_pytree_checkpointer(tmp_path: Path, options: dict[str, Any]) -> None:
    ocp.PyTreeCheckpointer(**options).save(tmp_path / "a", {**TREE, "name": "text", "none": None})
    assert_equal(read(tmp_path / "a"), PLAIN)


def test_checkpoint_manager(tmp_path: Path) -> None:
    root = save_manager(tmp_path / "run")
    assert_equal(read(root), {key: value * np.array(2, value.dtype) for key, value in FLAT.items()})
    for path in (root / "1", root / "1" / "default"):
        assert_equal(read(path), FLAT)
    with pytest.raises(errors.MissingFileError, match="/3': no such .*; finished steps next to it: '0', '1', '2'"):
        read(root / "3")


def test_version_1_of_the_library(tmp_path: Path) -> None:
    ocp_v1.save(tmp_path / "a", {"layers": {"0": {"w": jnp.asarray(W), "b": B}}, "step": 5})
    assert_equal(read(tmp_path / "a"), {**FLAT, "step": np.int64(5)})
    items = save_items(tmp_path / "b")
    several = "2 items hold arrays: 'opt', 'params'; name one with subtree="
    for options, message in (({}, several), ({"subtree": "parms.layers"}, "subtree=; did you mean 'params'")):
        with pytest.raises(errors.CheckpointFormatError, match=message):
            read(items, **options)
    assert_equal(read(items, subtree="params"), FLAT)
    assert_equal(read(items, subtree="params.layers.0"), {"w": FLAT["layers.0.w"], "b": FLAT["layers.0.b"]})
    path = save_standard(tmp_path / "c", {"params": {"w": W, "wide": {"w": W + 1}}, "opt": {"w": W}})
    assert_equal(read(path, subtree="params"), {"w": W, "wide.w": W + 1})


def test_a_model_from_an_orbax_checkpoint(tmp_path: Path) -> None:
    flow = rlx.ModelFlow("m").input("x", ("batch", 3)).linear("layers.0.w", transpose=False, bias="layers.0.b")
    with pytest.warns(errors.RlxWarning, match="rlx_manifest.json"):
        model = rlx.compile(flow, weights=save_standard(tmp_path / "a"))
    np.testing.assert_allclose(model(np.ones((1, 3), np.float32)), W.sum(0, keepdims=True) + 1)


@given(st.data())
@settings(max_examples=15)
def test_a_part_is_what_numpy_gives(part_source: tuple[Any, np.ndarray], data: st.DataObject) -> None:
    source, values = part_source
    bound = st.none() | st.integers(-9, 9)
    step = st.none() | st.sampled_from([-3, -2, -1, 1, 2, 3])
    index = tuple(slice(*data.draw(st.tuples(bound, bound, step))) for _ in range(data.draw(st.integers(0, 2))))
    np.testing.assert_array_equal(source.read("w", index), values[index])


@pytest.fixture(scope="module")
def part_source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, np.ndarray]:
    values = np.arange(35.0).reshape(7, 5)
    path = save_standard(tmp_path_factory.mktemp("part") / "a", {"w": values})
    return rlx.open_weights(path, verify="metadata"), values


def test_unfinished_steps(tmp_path: Path) -> None:
    root = save_manager(tmp_path / "run")
    shutil.copytree(root / "1", root / "3.orbax-checkpoint-tmp-17")
    (root / "4").mkdir()
    shutil.copytree(root / "1", root / "5")
    unmark(root / "5")
    np.testing.assert_array_equal(read(root)["layers.0.w"], W * 2)  # 2 is the latest that was finished
    for name in ("3.orbax-checkpoint-tmp-17", "4", "5"):
        with pytest.raises(errors.StorageError, match="finished steps in .*: '0', '1', '2'"):
            read(root / name)


def test_nothing_finished(tmp_path: Path) -> None:
    unmark(shutil.copytree(save_manager(tmp_path / "of", 1) / "0", tmp_path / "run" / "1"))
    with pytest.raises(errors.StorageError, match="no finished steps"):
        read(tmp_path / "run")
    alone = unmark(save_standard(tmp_path / "alone" / "it"))
    with pytest.raises(errors.StorageError, match="_CHECKPOINT_METADATA.*commit_success.txt"):
        read(alone)


def unmark(path: Path) -> Path:
    """As a save leaves it that stops before the end."""
    (path / "commit_success.txt").unlink()
    content = json.loads((path / "_CHECKPOINT_METADATA").read_text())
    (path / "_CHECKPOINT_METADATA").write_text(json.dumps(content | {"commit_timestamp_nsecs": None}))
    return path


def test_handlers_that_a_checkpoint_names_are_not_imported(tmp_path: Path) -> None:
    path = save_standard(tmp_path / "a")
    (tmp_path / "evil_handler.py").write_text("raise SystemExit('imported')")
    content = json.loads((path / "_CHECKPOINT_METADATA").read_text())
    for handlers in ("evil_handler.Handler", {"default": "evil_handler.Handler"}):
        (path / "_CHECKPOINT_METADATA").write_text(json.dumps(content | {"item_handlers": handlers}))
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(tmp_path)
            assert_equal(read(path), FLAT)
    assert "evil_handler" not in sys.modules


def edited(path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A JSON file with its content changed in place."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return path


def test_missing_chunks_and_metadata(tmp_path: Path) -> None:
    path = save_files(tmp_path / "a", {"w": W})
    os.unlink(path / "w" / "0.0")
    with pytest.raises(errors.CheckpointFormatError, match="damaged: .NOT_FOUND: chunk"):
        read(path)
    edited(path / "_METADATA", lambda content: content.update(store_array_data_equal_to_fill_value=False))
    assert_equal(read(path), {"w": np.zeros((3, 4))})  # chunks of zeros were left out by that format
    os.unlink(path / "w" / ".zarray")
    with pytest.raises(errors.CheckpointFormatError, match="array 'w': .*Metadata at"):
        read(path)


@pytest.mark.parametrize("options", [{}, {"use_ocdbt": False}, {"use_ocdbt": False, "use_zarr3": True}])
def test_a_shape_without_its_last_chunks(tmp_path: Path, options: dict[str, Any]) -> None:
    """It would be read as a smaller array."""
    import tensorstore

    chunks = ocp.SaveArgs(chunk_byte_size=16)
    path, zarr3 = tmp_path / "a", "use_zarr3" in options
    ocp.PyTreeCheckpointer(**options).save(path, {"w": W, "b": B}, save_args={"w": chunks, "b": chunks})
    assert_equal(read(path), {"w": W, "b": B})
    driver = {"driver": "ocdbt", "base": f"file://{path}/"} if not options else {"driver": "file", "path": f"{path}/"}
    store, name = tensorstore.KvStore.open(driver).result(), "w/zarr.json" if zarr3 else "w/.zarray"
    store[name] = json.dumps(json.loads(store[name]) | {"shape": [2, 4]}).encode()
    with pytest.raises(errors.CheckpointFormatError, match=r"array 'w': chunk '2.0' is outside of shape \[2, 4\]"):
        read(path)


@pytest.mark.parametrize(("depth", "error", "message"), [
    (30_000, errors.CheckpointFormatError, "nested"), (10**6, errors.LimitError, "bytes of metadata"),
])  # fmt: skip
def test_deep_metadata(depth: int, error: type[Exception], message: str, tmp_path: Path) -> None:
    """Native code, which deep nesting would end with a segmentation fault, does not get it."""
    path = save_files(tmp_path / "a", {"w": W})
    text = (path / "w" / ".zarray").read_text()
    (path / "w" / ".zarray").write_text(text.replace("null", "[" * depth + "]" * depth, 1))
    with pytest.raises(error, match=f"array 'w': .*{message}"):
        read(path)


def test_links(tmp_path: Path) -> None:
    outside = save_files(tmp_path / "b", {"w": W})
    path = save_files(tmp_path / "a", {"w": W})
    shutil.rmtree(path / "w")
    (path / "w").symlink_to(outside / "w", target_is_directory=True)
    with pytest.raises((errors.PathEscapeError, errors.ConfigError), match="outside its directory"):
        read(path)
    whole = save_files(tmp_path / "c", {"w": W})
    os.rename(whole / "w" / "0.0", whole / "data")
    (whole / "w" / "0.0").symlink_to("../data")
    assert_equal(read(whole), {"w": W})
    with pytest.raises(errors.PathEscapeError, match="links are refused"):
        read(whole, links="refuse")
    (whole / "w" / "0.0").unlink()
    os.mkfifo(whole / "w" / "0.0")
    with pytest.raises(errors.ConfigError, match="FIFO"):
        read(whole)
