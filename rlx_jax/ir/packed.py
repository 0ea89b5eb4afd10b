"""Packed (quantized) tensors: values encoded in blocks of bytes, by the schemes of GGML.

A packed tensor has a logical shape and dtype, which blocks, checks and summaries use, and its bytes: for `[..., k]`
uint8 `[..., k / elements · bytes]`, where each row is a whole number of blocks. To support the decoding of another
scheme, write its function and name it in a row of `SCHEMES`; `rlx_jax.ir.ggml` has the present ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import ml_dtypes
import numpy as np

from rlx_jax.errors import WeightError, WeightShapeError, did_you_mean, quote, shown
from rlx_jax.ir import ggml
from rlx_jax.ir.types import TensorType, as_dtype, is_float, short_name, tensor_type

UINT8 = np.dtype(np.uint8)
F16, F32, E8M0 = np.dtype("<f2"), np.dtype("<f4"), np.dtype(ml_dtypes.float8_e8m0fnu)
_CHUNK = 2**19  # values decoded at a time: the temporaries then fit in the CPU's cache


# -- schemes -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scheme:
    """A packing scheme: each block of `bytes` bytes encodes `elements` consecutive values of a row.

    Attributes:
        name: as in `SCHEMES` and in messages.
        decode: from blocks, uint8 `[count, bytes]` of NumPy or JAX, to float32 `[count, elements]`.
        floats: (byte, dtype) of every float in a block, which multiply or shift codes of at most 8 bits.
    """

    name: str
    elements: int
    bytes: int
    decode: Callable[[Any], Any]
    floats: tuple[tuple[int, np.dtype[Any]], ...] = ()


# The block schemes of GGML by name.
SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("gguf_q4_0", 32, 18, ggml.decode_q4_0, ((0, F16),)),
        Scheme("gguf_q4_1", 32, 20, ggml.decode_q4_1, ((0, F16), (2, F16))),
        Scheme("gguf_q5_0", 32, 22, ggml.decode_q5_0, ((0, F16),)),
        Scheme("gguf_q5_1", 32, 24, ggml.decode_q5_1, ((0, F16), (2, F16))),
        Scheme("gguf_q8_0", 32, 34, ggml.decode_q8_0, ((0, F16),)),
        Scheme("gguf_q2k", 256, 84, ggml.decode_q2_k, ((80, F16), (82, F16))),
        Scheme("gguf_q3k", 256, 110, ggml.decode_q3_k, ((108, F16),)),
        Scheme("gguf_q4k", 256, 144, ggml.decode_q4_k, ((0, F16), (2, F16))),
        Scheme("gguf_q5k", 256, 176, ggml.decode_q5_k, ((0, F16), (2, F16))),
        Scheme("gguf_q6k", 256, 210, ggml.decode_q6_k, ((208, F16),)),
        Scheme("gguf_q8k", 256, 292, ggml.decode_q8_k, ((0, F32),)),
        Scheme("gguf_iq4_nl", 32, 18, ggml.decode_iq4_nl, ((0, F16),)),
        Scheme("gguf_iq4_xs", 256, 136, ggml.decode_iq4_xs, ((0, F16),)),
        Scheme("gguf_mxfp4", 32, 17, ggml.decode_mxfp4, ((0, E8M0),)),
        Scheme("gguf_nvfp4", 64, 36, ggml.decode_nvfp4),  # every scale byte is finite
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
        raise WeightShapeError(f"{where}: expected static sizes as the shape of a packed tensor, got {logical_type}")
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
    """Decode a packed tensor: uint8 `[..., n · bytes]` of NumPy or JAX → float32 `[..., n · elements]`."""
    packing = SCHEMES[scheme]
    shape = (*data.shape[:-1], data.shape[-1] // packing.bytes * packing.elements)
    if not isinstance(data, np.ndarray):
        return packing.decode(data.reshape(-1, packing.bytes)).reshape(shape)
    blocks = _blocks(data, packing)
    chunk = _CHUNK // packing.elements
    out = np.empty((len(blocks), packing.elements), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):  # an infinite scale times 0 gives NaN; sources check for it
        for at in range(0, len(blocks), chunk):
            out[at : at + chunk] = packing.decode(blocks[at : at + chunk])
    return out.reshape(shape)


def finite_check_floats(data: np.ndarray[Any, Any], scheme: str) -> np.ndarray[Any, Any]:
    """Return floats that are all finite only if all values of the tensor are: the floats of the blocks, which are few.

    If the products of one of them and codes might not be finite, return the decoded values instead, so that the caller
    can count the bad ones.
    """
    packing = SCHEMES[scheme]
    blocks = _blocks(data, packing)
    floats = np.zeros((len(blocks), len(packing.floats)), np.float32)
    for column, (at, dtype) in enumerate(packing.floats):
        floats[:, column] = np.ascontiguousarray(blocks[:, at : at + dtype.itemsize]).view(dtype)[:, 0]
    with np.errstate(over="ignore"):
        is_finite = bool(np.isfinite(floats * np.float32(2**7)).all())  # codes have at most 8 bits, one for the sign
    return floats if is_finite else np.asarray(decode_packed(data, scheme))


def _blocks(data: np.ndarray[Any, Any], scheme: Scheme) -> np.ndarray[Any, Any]:
    """Return the data as blocks, uint8 `[count, bytes]`, contiguous."""
    return np.ascontiguousarray(data).reshape(-1, scheme.bytes)
