"""`write_gguf`: write weights under checkpoint keys, and metadata, as a GGUF file. `gguf_header` describes the layout.

Names of tensors and changes of their values are those that reading undoes: `gguf_names`.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import UnsupportedError, did_you_mean, listing, quote
from rlx_jax.io.ggml import BLOCKS
from rlx_jax.ir.types import short_name
from rlx_jax.weights.format import Entry, narrow_values
from rlx_jax.weights.gguf_config import architecture_of, stated_fields
from rlx_jax.weights.gguf_header import DEFAULT_ALIGNMENT, DTYPES, MAGIC, PACKED, VERSIONS, GgufTensor, MetadataValue
from rlx_jax.weights.gguf_names import CONFIG_TENSORS, KeyReading, key_readings, tensor_names
from rlx_jax.weights.quantize import F32, quantize_q8_0
from rlx_jax.weights.tensor_file import TensorInfo

# How matrices may be stored: the names of `dtype=` in `rlx_jax.save`, each a dtype or a scheme of packing.
STORAGE: dict[str, np.dtype[Any] | str] = {
    "f32": F32, "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16), "q8_0": "gguf_q8_0",
}  # fmt: skip
# `general.file_type` for each of them, which other programs show.
FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}
_TYPE_NUMBERS: dict[np.dtype[Any] | str, int] = {dtype: number for number, dtype in DTYPES.items()}
_TYPE_NUMBERS |= {scheme: number for number, scheme in PACKED.items()}
# Kinds of values in the metadata by the dtype of an array.
_ARRAY_KINDS = {np.dtype(np.int32): 5, F32: 6, np.dtype(np.bool_): 7}
_UINT32, _FLOAT32, _BOOL, _STRING, _ARRAY, _INT64 = 4, 6, 7, 8, 9, 11
# Matrices that stay in float32, as the converters of llama.cpp keep them: a router decides by small differences.
_KEPT = "ffn_gate_inp.weight"
_BAND = 2**22  # elements that are converted at once


@dataclass(frozen=True)
class _Tensor:
    """A tensor to write.

    Attributes:
        reading: its name, and how it differs from the checkpoint.
        parts: one entry, or one for each expert.
        shape: its logical shape in the file.
        stored: its dtype or scheme of packing in the file.
    """

    reading: KeyReading
    parts: tuple[Entry, ...]
    shape: tuple[int, ...]
    stored: np.dtype[Any] | str

    @property
    def nbytes(self) -> int:
        """Return the number of bytes in the file."""
        if isinstance(self.stored, str):
            return math.prod(self.shape) // BLOCKS[self.stored].elements * BLOCKS[self.stored].bytes
        return math.prod(self.shape) * self.stored.itemsize

    def bands(self) -> Iterator[memoryview]:
        """Yield the bytes in the file, in bands of rows; one part is in memory at a time."""
        for part in self.parts:
            values = self.reading.to_file(np.asarray(part.values()))
            step = max(1, _BAND * len(values) // max(values.size, 1))
            for start in range(0, len(values), step):
                raw = self._encode(values[start : start + step], f"weight {quote(part.key)}")
                yield np.ascontiguousarray(raw).reshape(-1).view(np.uint8).data

    def _encode(self, values: np.ndarray[Any, Any], where: str) -> np.ndarray[Any, Any]:
        """Return values as the file stores them."""
        if isinstance(self.stored, str):
            return quantize_q8_0(values.astype(F32, copy=False), where)
        return values if values.dtype == self.stored else narrow_values(values, self.stored, where)


def write_gguf(path: str, entries: Sequence[Entry], metadata: Mapping[str, MetadataValue]) -> dict[str, str]:
    """Write a new file, and return the SHA-256 of the data of each tensor by its name.

    Raises:
        UnsupportedError: the architecture has no tensor for a weight, or a weight is not of a dtype that files have.
        WeightError: values are over the range of the packing.
    """
    tensors = _tensors(entries, metadata)
    digests: dict[str, str] = {}
    with open(path, "xb") as file:
        file.write(_header(tensors, metadata))
        for tensor in tensors:
            sha256 = hashlib.sha256()
            for band in tensor.bands():
                file.write(band)
                sha256.update(band)
            file.write(bytes(-tensor.nbytes % DEFAULT_ALIGNMENT))
            digests[tensor.reading.tensor] = sha256.hexdigest()
    return digests


def file_type(storage: str | None) -> dict[str, MetadataValue]:
    """Return the metadata about the types of the tensors: the type of most of them, and the version of the packing."""
    if storage is None:
        return {}
    return {"general.file_type": FILE_TYPES[storage], "general.quantization_version": 2}


def tensor_shapes(entries: Sequence[Entry], metadata: Mapping[str, MetadataValue]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that `write_gguf` writes, by name. Errors as there."""
    return {tensor.reading.tensor: tensor.shape for tensor in _tensors(entries, metadata)}


def _tensors(entries: Sequence[Entry], metadata: Mapping[str, MetadataValue]) -> list[_Tensor]:
    """Return the tensors that the weights are written as, in the order of the tables, so that equal models are equal
    files."""
    architecture = architecture_of(metadata, "save")
    config = stated_fields(metadata, architecture)
    num_experts = config.get("num_experts") or config.get("num_local_experts") or 0
    names: dict[str, tuple[str, int | None]] = {
        e.key: (e.key, None) for e in entries if CONFIG_TENSORS.fullmatch(e.key)
    }
    names |= tensor_names(architecture, num_experts, config)
    by_key = {entry.key: entry for entry in entries}
    if unknown := [key for key in by_key if key not in names]:
        raise UnsupportedError(
            f"save: GGUF has no tensor in architecture {quote(architecture)} for {listing(unknown)}"
            f"{did_you_mean(unknown[0], names)}; use format='safetensors'"
        )
    parts: dict[str, list[Entry]] = {}
    for key, (name, _) in names.items():
        if key in by_key:
            parts.setdefault(name, []).append(by_key[key])
    shapes = {
        name: same[0].type.shape if names[same[0].key][1] is None else (len(same), *same[0].type.shape)
        for name, same in parts.items()
    }
    tensors = {name: GgufTensor(TensorInfo(F32, shape, 0, 0), shape, None) for name, shape in shapes.items()}
    readings = key_readings(architecture, tensors, config, "save")
    return [_tensor(readings.get(same[0].key, KeyReading(name)), same, shapes[name]) for name, same in parts.items()]


def _tensor(reading: KeyReading, parts: Sequence[Entry], file_shape: tuple[int, ...]) -> _Tensor:
    """Return a tensor of weights. Vectors, norms and routers are float32, and so are rows that are no whole blocks."""
    first = parts[0]
    stored = first.type.dtype if first.storage is None else STORAGE[first.storage]
    shape, name = first.type.shape, reading.tensor
    if len(shape) < 2 or name.endswith(("_norm.weight", _KEPT)):
        stored = F32
    if isinstance(stored, str) and shape[-1] % BLOCKS[stored].elements:
        stored = F32
    if stored not in _TYPE_NUMBERS:
        raise UnsupportedError(
            f"save: weight {quote(first.key)} is {short_name(first.type.dtype)}; GGUF files have "
            f"{', '.join(short_name(dtype) for dtype in DTYPES.values())}"
        )
    return _Tensor(reading, tuple(parts), file_shape, stored)


def _header(tensors: Sequence[_Tensor], metadata: Mapping[str, MetadataValue]) -> bytes:
    """Return the bytes before the data."""
    out = bytearray(MAGIC + struct.pack("<IQQ", VERSIONS[-1], len(tensors), len(metadata)))
    for key, value in metadata.items():
        out += _text(key) + _value(value)
    offset = 0
    for tensor in tensors:
        shape = tensor.shape[::-1]
        out += _text(tensor.reading.tensor) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        out += struct.pack("<IQ", _TYPE_NUMBERS[tensor.stored], offset)
        offset += -(-tensor.nbytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT
    return bytes(out) + bytes(-len(out) % DEFAULT_ALIGNMENT)


def _text(text: str) -> bytes:
    """Return a string with its length; surrogates stand for bytes that are not UTF-8, as where they are read."""
    raw = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def _value(value: MetadataValue) -> bytes:
    """Return a value of the metadata with its kind."""
    if isinstance(value, bool):
        return struct.pack("<IB", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _UINT32, value) if 0 <= value < 2**32 else struct.pack("<Iq", _INT64, value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, tuple):
        return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_text, value))
    return struct.pack("<IIQ", _ARRAY, _ARRAY_KINDS[value.dtype], value.size) + value.tobytes()
