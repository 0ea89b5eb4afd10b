"""Model directories: what index files, shards and links can get wrong, and the layouts that must load."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rlx_jax import errors
from rlx_jax.io import limits
from rlx_jax.io.files import resolve
from rlx_jax.weights.source import open_weights
from tests.shards import INDEX, SHARDS, B, W, assert_shards, write_shards


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


# -- index faults ------------------------------------------------------------------------------


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
        errors.MissingWeightError, match=f"lack 2 of its tensors: 'gone of {first}', 'lost of {second}'"
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


# -- links -------------------------------------------------------------------------------------


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
    with pytest.raises(errors.PathEscapeError, match="'model-1-of-2.safetensors' leads to .*outside its directory"):
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
