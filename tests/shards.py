"""Small checkpoints: two shards (W float32 `[2, 3]`, B bfloat16 `[3]`, a row of W), and safetensors byte by byte."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from rlx_jax.ir.weight_reads import WeightSource
from rlx_jax.weights.tensor_file import SafetensorsFile, TensorFile

INDEX = "model.safetensors.index.json"
W = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.ones(3, ml_dtypes.bfloat16)
SHARDS = {"model-1-of-2.safetensors": {"w": W}, "model-2-of-2.safetensors": {"b": B, "c": W[0]}}


def write_shards(
    directory: Path, shards: Mapping[str, Mapping[str, np.ndarray]] = SHARDS, index: dict[str, Any] | None = None
) -> Path:
    """A checkpoint directory; `index` overrides parts of the index file."""
    directory.mkdir(exist_ok=True)
    for name, tensors in shards.items():
        save_file(dict(tensors), directory / name, {"format": "pt"})
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    total = sum(array.nbytes for tensors in shards.values() for array in tensors.values())
    content = {"metadata": {"total_size": total}, "weight_map": weight_map, **(index or {})}
    (directory / INDEX).write_text(json.dumps(content))
    return directory


def assert_shards(source: WeightSource) -> None:
    assert sorted(source.keys()) == ["b", "c", "w"]
    np.testing.assert_array_equal(source.read("w"), W)
    np.testing.assert_array_equal(source.read("b"), B)
    assert source.read("b").dtype == ml_dtypes.bfloat16


ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


def frame(header: Any, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def one(data: bytes = b"1234", **changes: Any) -> bytes:
    """A file with one tensor `a`, an F32 of four bytes unless `changes` says otherwise."""
    return frame({"a": {**ENTRY, **changes}}, data)


def open_raw(tmp_path: Path, raw: bytes) -> TensorFile:
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    return SafetensorsFile(path)
