"""`parse_header`: parse the JSON header of a `.safetensors` file, and check it against the size of the file.

    {"__metadata__": {str: str}, name: {"dtype": str, "shape": [int], "data_offsets": [begin, end]}, …}

Sizes are Python integers, which do not overflow.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

import rlx_jax.errors as errors
from rlx_jax.errors import DuplicateWeightError, LimitError, SafetensorsError, UnsupportedError, did_you_mean, quote
from rlx_jax.io import limits
from rlx_jax.io.files import parse
from rlx_jax.ir.types import MAX_DIM, MAX_ELEMENTS, MAX_RANK, short_name

# NumPy names integers and floats by a letter and a number of bytes, safetensors by bits: `U16` is `u2`.
DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    **{f"{kind}{8 * size}": np.dtype(f"{kind.lower()}{size}") for size in (1, 2, 4, 8) for kind in "UI"},
    **{f"F{8 * size}": np.dtype(f"f{size}") for size in (2, 4, 8)},
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
_SUB_BYTE_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
_FIELDS = ("dtype", "shape", "data_offsets")
# JSON values allowed in a header per tensor of `limits.MAX_TENSORS`; a matrix takes eight.
VALUES_PER_TENSOR = 10


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The header entry of one tensor. Its data are `nbytes` bytes from byte `start` of the file on."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int
    nbytes: int


# The tensors of a file by name, in the order of their data.
Header = dict[str, TensorInfo]


def parse_header(raw: bytes, data_bytes: int, where: str) -> Header:
    """Return the tensors of a file, after checking all of its header.

    Args:
        raw: the JSON, which starts at byte 8 of the file.
        data_bytes: the number of bytes after it.
        where: the file, for messages.

    Raises:
        SafetensorsError, DuplicateWeightError, LimitError, UnsupportedError: as `SafetensorsFile`.
    """
    max_values = VALUES_PER_TENSOR * limits.MAX_TENSORS, f"{VALUES_PER_TENSOR} limits.MAX_TENSORS"
    content = parse(raw, where, SafetensorsError, max_values, repeated_error=DuplicateWeightError, start=8)
    if not isinstance(content, dict):
        raise SafetensorsError(f"{where}: header: expected a JSON object, found {type(content).__name__}")
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise SafetensorsError(f"{where}: '__metadata__': expected an object of strings")
    limits.check_limit(len(content), limits.bound("MAX_TENSORS"), f"{where}: the number of tensors")
    longest = max((len(name.encode()) for name in content), default=0)
    limits.check_limit(longest, limits.bound("MAX_NAME_BYTES"), f"{where}: the length of a name")
    start = len(raw) + 8
    tensors = {
        name: _tensor(fields, start, data_bytes, f"{where}: tensor {quote(name)}") for name, fields in content.items()
    }
    return _sort_by_offset(tensors, start, data_bytes, where)


def _tensor(fields: Any, data_start: int, data_bytes: int, where: str) -> TensorInfo:
    """Return one checked entry, without comparing it with others. `where` names file and tensor."""
    if not isinstance(fields, dict):
        raise SafetensorsError(f"{where}: expected an object, found {_describe_json(fields)}")
    for field in fields:
        if field not in _FIELDS:
            raise SafetensorsError(f"{where}: unknown field {quote(field)}{did_you_mean(field, _FIELDS)}")
    for field in _FIELDS:
        if field not in fields:
            raise SafetensorsError(f"{where}: field {field!r} is missing")
    shape = parse_sizes(fields["shape"], f"{where}: shape")
    check_shape(shape, where)
    dtype = _dtype(fields["dtype"], shape, where)
    offsets = parse_sizes(fields["data_offsets"], f"{where}: data_offsets")
    if len(offsets) != 2:
        raise SafetensorsError(f"{where}: data_offsets: expected [begin, end], found {len(offsets)} numbers")
    begin, end = offsets
    if begin > end:
        raise SafetensorsError(f"{where}: data_offsets: begin {begin} is after end {end}")
    if end > data_bytes:
        raise SafetensorsError(
            f"{where}: data_offsets: ends at {end}, but the file has {data_bytes} bytes of data; "
            "a download that was cut short looks like this"
        )
    needed = math.prod(shape) * dtype.itemsize
    if end - begin != needed:
        raise SafetensorsError(
            f"{where}: shape {list(shape)} of {short_name(dtype)} takes {needed} bytes, data_offsets give {end - begin}"
        )
    return TensorInfo(dtype, shape, data_start + begin, needed)


def parse_sizes(value: Any, where: str, error: type[errors.RlxError] = SafetensorsError) -> tuple[int, ...]:
    """Return a JSON list of non-negative whole numbers as a tuple, or raise `error`."""
    if not isinstance(value, list):
        raise error(f"{where}: expected a list of whole numbers, found {_describe_json(value)}")
    for item in value:
        if type(item) is not int or not 0 <= item < 2**64:  # `isinstance` would accept a bool
            raise error(f"{where}: expected whole numbers from 0 to 2**64 - 1, found {_describe_json(item)}")
    return tuple(value)


def _describe_json(value: Any) -> str:
    """Return a JSON value for a message."""
    return type(value).__name__ if isinstance(value, list | dict) else quote(json.dumps(value))


def check_shape(shape: tuple[int, ...], where: str) -> None:
    """Raise `LimitError` for a shape that NumPy or XLA cannot take; XLA aborts the process on some."""
    if len(shape) > MAX_RANK:
        raise LimitError(f"{where}: rank {len(shape)} is over the limit of {MAX_RANK}")
    if max(shape, default=0) > MAX_DIM:
        raise LimitError(f"{where}: dimension {max(shape)} is over the limit of {MAX_DIM}")
    # Zero dimensions are left out, as NumPy and XLA multiply the others even if the array is empty.
    elements = math.prod(dim for dim in shape if dim)
    if elements >= MAX_ELEMENTS:
        raise LimitError(f"{where}: {elements} elements, the limit is fewer than {MAX_ELEMENTS}")


def _dtype(name: Any, shape: tuple[int, ...], where: str) -> np.dtype[Any]:
    """Return the dtype of a name.

    Raises:
        SafetensorsError: `name` is not a string, or the shape takes a fraction of a byte.
        UnsupportedError: the dtype is unknown, or has fewer than 8 bits.
    """
    if not isinstance(name, str):
        raise SafetensorsError(f"{where}: dtype: expected a string, found {_describe_json(name)}")
    bits = math.prod(shape) * _SUB_BYTE_BITS.get(name, 8)
    if bits % 8:
        raise SafetensorsError(f"{where}: shape {list(shape)} of {name} takes {bits} bits, which are not whole bytes")
    if name not in DTYPES:
        raise UnsupportedError(f"{where}: dtype {quote(name)} is not supported; these are: {', '.join(DTYPES)}")
    return DTYPES[name]


def _sort_by_offset(
    tensors: dict[str, TensorInfo], data_start: int, data_bytes: int, where: str
) -> dict[str, TensorInfo]:
    """Return the tensors sorted by offset, after checking that they fill the data without gaps or overlaps.

    Empty tensors may share an offset.
    """
    ordered = sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes))
    position, preceding = data_start, "the header"
    for name, info in ordered:
        if info.start != position:
            problem = "overlaps" if info.start < position else f"leaves {info.start - position} unused bytes after"
            raise SafetensorsError(
                f"{where}: tensor {quote(name)} {problem} {preceding}: it begins at {info.start - data_start}, "
                f"expected {position - data_start}"
            )
        position, preceding = info.start + info.nbytes, quote(name)
    if position != data_start + data_bytes:
        raise SafetensorsError(
            f"{where}: {data_start + data_bytes - position} bytes after the last tensor ({preceding}) belong to none"
        )
    return dict(ordered)
