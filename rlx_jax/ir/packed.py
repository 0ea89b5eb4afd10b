"""Packed (quantized) tensors: values encoded in blocks of bytes, by the schemes of GGML.

A packed tensor has a logical shape and dtype, which blocks, checks and summaries use, and its bytes: for `[..., k]`
uint8 `[..., k / elements · bytes]`, where each row is a whole number of blocks. To support the decoding of another
scheme, write its function and name it in a row of `SCHEMES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from rlx_jax.errors import UnsupportedError, WeightError, WeightShapeError, did_you_mean, quote, shown
from rlx_jax.ir.types import TensorType, as_dtype, is_float, short_name, tensor_type

UINT8 = np.dtype(np.uint8)
_CHUNK = 2**14  # blocks decoded at a time: the temporaries then fit in the CPU's cache


# -- decoding ----------------------------------------------------------------------------------
#
# From blocks, uint8 [count, bytes] of NumPy or JAX, to float32 [count, elements]. Exact: the product of an 8-bit
# integer and a float16 has at most 19 significant bits, and float32 has 24.

_NIBBLES = np.array([[[0], [4]]], np.uint8)


def _float16(blocks: Any, offset: int) -> Any:
    """Return the float16 at byte `offset` of each block, as float32 `[count, 1]`."""
    return blocks[:, offset : offset + 2].view(np.dtype("<f2")).astype(np.float32)


def _decode_q4_0(blocks: Any) -> Any:
    """Return (q − 8) · d: element i < 16 is in the low half of byte i, and element i + 16 in the high half."""
    halves = (blocks[:, None, 2:] >> _NIBBLES) & 15
    return (halves.reshape(-1, 32).astype(np.float32) - 8) * _float16(blocks, 0)


def _decode_q8_0(blocks: Any) -> Any:
    """Return q · d for signed bytes q."""
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _float16(blocks, 0)


# -- schemes -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scheme:
    """A packing scheme: each block of `bytes` bytes encodes `elements` consecutive values of a row.

    Attributes:
        name: as in `SCHEMES` and in messages.
        floats: (byte, dtype) of every float in a block. If these are finite, so are the decoded values.
        decode: from blocks, uint8 `[count, bytes]` of NumPy or JAX, to float32 `[count, elements]`; None if decoding is
            not implemented.
    """

    name: str
    elements: int
    bytes: int
    floats: tuple[tuple[int, str], ...]
    decode: Callable[[Any], Any] | None = None


# The block schemes of GGML by name.
SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("gguf_q4_0", 32, 18, ((0, "<f2"),), _decode_q4_0),
        Scheme("gguf_q4_1", 32, 20, ((0, "<f2"), (2, "<f2"))),
        Scheme("gguf_q5_0", 32, 22, ((0, "<f2"),)),
        Scheme("gguf_q5_1", 32, 24, ((0, "<f2"), (2, "<f2"))),
        Scheme("gguf_q8_0", 32, 34, ((0, "<f2"),), _decode_q8_0),
        Scheme("gguf_q2k", 256, 84, ((80, "<f2"), (82, "<f2"))),
        Scheme("gguf_q3k", 256, 110, ((108, "<f2"),)),
        Scheme("gguf_q4k", 256, 144, ((0, "<f2"), (2, "<f2"))),
        Scheme("gguf_q5k", 256, 176, ((0, "<f2"), (2, "<f2"))),
        Scheme("gguf_q6k", 256, 210, ((208, "<f2"),)),
        Scheme("gguf_q8k", 256, 292, ((0, "<f4"),)),
    )
}


def scheme_of(name: object, where: str) -> Scheme:
    """Return the scheme with this name.

    Raises:
        WeightError: there is none; the message begins with `where`.
    """
    if not isinstance(name, str) or name not in SCHEMES:
        suggestion = did_you_mean(name, SCHEMES) if isinstance(name, str) else ""
        choices = "" if suggestion else f"; known are {', '.join(SCHEMES)}"
        raise WeightError(f"{where}: unknown scheme of packing {shown(name)}{suggestion}{choices}")
    return SCHEMES[name]


def decoder_of(name: object, where: str) -> Callable[[Any], Any]:
    """Return the function that decodes the blocks of a scheme.

    Raises:
        UnsupportedError: decoding of the scheme is not implemented.
        WeightError: there is no scheme with this name.
    """
    decode = scheme_of(name, where).decode
    if decode is None:
        supported = " and ".join(s.name for s in SCHEMES.values() if s.decode)
        raise UnsupportedError(
            f"{where}: {name} is not decoded yet, only {supported} are; store it as one of these or f16"
        )
    return decode


# -- values and their types --------------------------------------------------------------------


@dataclass(frozen=True)
class PackedSpec:
    """The description of a packed tensor before it is read: its logical shape and dtype, and its scheme.

    `WeightSource.spec` returns it instead of a `jax.ShapeDtypeStruct`; `WeightSource.read` then returns the bytes.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    scheme: str

    def __post_init__(self) -> None:
        # Accept lists and names of dtypes, as jax.ShapeDtypeStruct does.
        object.__setattr__(self, "dtype", as_dtype(self.dtype))
        object.__setattr__(self, "shape", tuple(self.shape) if isinstance(self.shape, list) else self.shape)

    @property
    def size(self) -> int:
        """Number of elements, not of bytes."""
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class Packed:
    """A packed tensor as a value in a mapping of weights. The mapping checks it, so that messages name its key.

    Args:
        data: uint8 `[..., k / elements · bytes]`, of NumPy or JAX.
        scheme: a name in `SCHEMES`.
        shape: the logical shape `[..., k]`.
        dtype: the logical dtype, a floating one: values are decoded to float32 and rounded to it.

    >>> Packed(np.zeros((2, 34), np.uint8), "gguf_q8_0", (2, 32)).spec
    PackedSpec(shape=(2, 32), dtype=dtype('float32'), scheme='gguf_q8_0')
    """

    data: Any
    scheme: str
    shape: Sequence[int]
    dtype: Any = np.float32

    @property
    def spec(self) -> PackedSpec:
        """Logical shape, dtype and scheme."""
        return PackedSpec(tuple(self.shape), self.dtype, self.scheme)


# The description of a tensor that a source returns before reading it.
WeightSpec = jax.ShapeDtypeStruct | PackedSpec


def packed_types(shape: Any, dtype: Any, scheme: object, where: str) -> tuple[TensorType, TensorType]:
    """Return the logical type of a packed tensor, and the type of its bytes. Messages begin with `where`.

    Raises:
        WeightError: the scheme is unknown, or the dtype is not a floating one.
        DTypeError: the dtype is unknown.
        WeightShapeError: the shape is a scalar's, has a symbolic size, or has a last axis that the block size does not
            divide.
        ShapeError: `shape` is no shape, or over the limits.

    >>> [str(t) for t in packed_types((4, 64), "f32", "gguf_q4_0", "doc")]
    ['f32[4,64]', 'u8[4,36]']
    """
    packing, logical_type = scheme_of(scheme, where), tensor_type(shape, dtype, where)
    if not is_float(logical_type.dtype):
        raise WeightError(f"{where}: {packing.name} packs floats, got {logical_type}; expected a dtype such as f32")
    if not logical_type.shape:
        raise WeightShapeError(f"{where}: {packing.name} packs rows, got the scalar {logical_type}; store it as it is")
    if not logical_type.is_static:
        raise WeightShapeError(f"{where}: expected whole numbers as the shape of what is packed, got {logical_type}")
    *rows, row_size = logical_type.shape
    if row_size % packing.elements:
        raise WeightShapeError(
            f"{where}: {packing.name} packs blocks of {packing.elements}, expected a last axis that {packing.elements} "
            f"divides, got {logical_type}; rows are not padded: store it as f16, or by a scheme of smaller blocks"
        )
    return logical_type, TensorType((*rows, row_size // packing.elements * packing.bytes), UINT8)


def check_packed(value: Packed, where: str) -> None:
    """Check that the parts of a packed value fit each other. Messages begin with `where`.

    Raises:
        WeightError: the data is not an array of uint8.
        WeightShapeError: the data has more or fewer bytes than the shape needs.
        Others: as `packed_types`.
    """
    logical_type, byte_type = packed_types(value.shape, value.dtype, value.scheme, where)
    data, expected = value.data, f"{where}: the bytes of {value.scheme} {logical_type}: expected {byte_type}"
    # A masked array is an ndarray too, but decoding would ignore its mask.
    if not isinstance(data, np.ndarray | jax.Array) or isinstance(data, np.ma.MaskedArray):
        raise WeightError(f"{expected}, got {quote(type(data).__name__)}; numpy.frombuffer makes one")
    if data.dtype != UINT8:
        raise WeightError(f"{expected}, got dtype {quote(short_name(data.dtype))}; give the bytes as they are stored")
    if data.shape != byte_type.shape:
        raise WeightShapeError(f"{expected}, got {TensorType(data.shape, UINT8)}; check the scheme and the shape")


def stored_bytes(spec: WeightSpec) -> int:
    """Return the number of bytes of a tensor in its source, which for a packed tensor are the packed bytes."""
    if isinstance(spec, PackedSpec):
        return packed_types(spec.shape, spec.dtype, spec.scheme, "a packed weight")[1].nbytes
    return TensorType(tuple(spec.shape), spec.dtype).nbytes


# -- decoded values ----------------------------------------------------------------------------


def decode_packed(data: Any, scheme: str) -> Any:
    """Return the values of a packed tensor: uint8 `[..., n · bytes]` of NumPy or JAX → float32 `[..., n · elements]`.

    Raises:
        UnsupportedError: decoding of the scheme is not implemented.
    """
    packing, decode = SCHEMES[scheme], decoder_of(scheme, "a packed tensor")
    shape = (*data.shape[:-1], data.shape[-1] // packing.bytes * packing.elements)
    if not isinstance(data, np.ndarray):
        return decode(data.reshape(-1, packing.bytes)).reshape(shape)
    blocks = _blocks(data, packing)
    out = np.empty((len(blocks), packing.elements), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):  # an infinite scale times 0 gives NaN; sources check for it
        for start in range(0, len(blocks), _CHUNK):
            out[start : start + _CHUNK] = decode(blocks[start : start + _CHUNK])
    return out.reshape(shape)


def finite_check_floats(data: np.ndarray[Any, Any], scheme: str) -> np.ndarray[Any, Any]:
    """Return floats that are all finite if and only if all values of the tensor are.

    These are the floats in the blocks, which are few compared with the values. If one of them is not finite, return the
    decoded values instead, so that the caller can count the bad ones; for a scheme without a decoder, still the floats.
    """
    packing = SCHEMES[scheme]
    blocks = _blocks(data, packing)
    float_ends = [offset + np.dtype(dtype).itemsize for offset, dtype in packing.floats]
    floats = [
        blocks[:, offset:end].view(dtype) for (offset, dtype), end in zip(packing.floats, float_ends, strict=True)
    ]
    block_floats = np.concatenate([np.ascontiguousarray(f) for f in floats], axis=1)
    return (
        block_floats
        if packing.decode is None or np.isfinite(block_floats).all()
        else np.asarray(decode_packed(data, scheme))
    )


def _blocks(data: np.ndarray[Any, Any], scheme: Scheme) -> np.ndarray[Any, Any]:
    """Return the data as blocks, uint8 `[count, bytes]`, contiguous."""
    return np.ascontiguousarray(data).reshape(-1, scheme.bytes)
