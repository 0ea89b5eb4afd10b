"""Packed tensors: numbers that are stored in blocks of bytes, by the schemes of GGML.

A packed tensor has a logical shape and dtype, which blocks, checks and summaries see, and bytes: for `[..., k]` these
are uint8 `[..., k / elements · bytes]`, each row a whole number of blocks. One more scheme that can be decoded is a
function, and its name in a row of `SCHEMES`.
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
_CHUNK = 2**14  # blocks: what decoding allocates beside the result stays in cache


# -- decoding ----------------------------------------------------------------------------------
#
# From blocks, uint8 [count, bytes] of NumPy or JAX, to float32 [count, elements]. Exact: a product of an integer of 8
# bits and a float16 has 19 bits.

_NIBBLES = np.array([[[0], [4]]], np.uint8)


def _float16(blocks: Any, at: int) -> Any:
    """The float16 at byte `at` of each block, as float32 `[count, 1]`."""
    return blocks[:, at : at + 2].view(np.dtype("<f2")).astype(np.float32)


def _decode_q4_0(blocks: Any) -> Any:
    """(q − 8) · d: element i < 16 is the low half of byte i, the others are the high halves."""
    halves = (blocks[:, None, 2:] >> _NIBBLES) & 15
    return (halves.reshape(-1, 32).astype(np.float32) - 8) * _float16(blocks, 0)


def _decode_q8_0(blocks: Any) -> Any:
    """q · d, of signed bytes."""
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _float16(blocks, 0)


# -- schemes -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scheme:
    """One way to pack: `elements` numbers that stand side by side in a row are a block of `bytes` bytes.

    Attributes:
        floats: (byte, dtype) of every float in a block. Where these are finite, so are the block's numbers.
        decode: from blocks, uint8 `[count, bytes]` of NumPy or JAX, to float32 `[count, elements]`; None: not built.
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
    """The scheme of that name.

    Raises:
        WeightError: there is none; the message begins with `where`.
    """
    if not isinstance(name, str) or name not in SCHEMES:
        close = did_you_mean(name, SCHEMES) if isinstance(name, str) else ""
        known = "" if close else f"; known are {', '.join(SCHEMES)}"
        raise WeightError(f"{where}: unknown scheme of packing {shown(name)}{close}{known}")
    return SCHEMES[name]


def decoder_of(name: object, where: str) -> Callable[[Any], Any]:
    """What decodes the blocks of a scheme.

    Raises:
        UnsupportedError: the scheme is known and not decoded yet. WeightError: there is none of that name.
    """
    decode = scheme_of(name, where).decode
    if decode is None:
        built = " and ".join(s.name for s in SCHEMES.values() if s.decode)
        raise UnsupportedError(f"{where}: {name} is not decoded yet, only {built} are; store it as one of these or f16")
    return decode


# -- values and their types --------------------------------------------------------------------


@dataclass(frozen=True)
class PackedSpec:
    """What a `WeightSource` knows of a packed tensor before it is read: its logical shape and dtype, and its scheme.

    Stands beside `jax.ShapeDtypeStruct`; `read` gives the bytes then. `checked` says what is wrong with one.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    scheme: str

    def __post_init__(self) -> None:
        # As jax.ShapeDtypeStruct takes lists and the names of dtypes.
        object.__setattr__(self, "dtype", as_dtype(self.dtype))
        object.__setattr__(self, "shape", tuple(self.shape) if isinstance(self.shape, list) else self.shape)

    @property
    def size(self) -> int:
        """Numbers, not bytes."""
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class Packed:
    """A packed tensor as a value: what stands in a mapping of weights. It is checked where it gets its key.

    Args:
        data: uint8 `[..., k / elements · bytes]`, of NumPy or JAX.
        scheme: a name in `SCHEMES`.
        shape: the logical shape `[..., k]`.
        dtype: the logical dtype, a floating one: numbers are decoded to float32 and rounded to it.

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


# What a source knows of a tensor before it is read.
WeightSpec = jax.ShapeDtypeStruct | PackedSpec


def packed_types(shape: Any, dtype: Any, scheme: object, where: str) -> tuple[TensorType, TensorType]:
    """The logical type of a packed tensor, and the type of its bytes. Messages begin with `where`.

    Raises:
        WeightError: an unknown scheme, or numbers that are no floats. DTypeError: an unknown dtype.
        WeightShapeError: a scalar, a size that is not known, or a last axis that is no whole number of blocks.
        ShapeError: something else than a shape, or one over the limits.

    >>> [str(t) for t in packed_types((4, 64), "f32", "gguf_q4_0", "doc")]
    ['f32[4,64]', 'u8[4,36]']
    """
    found, logical = scheme_of(scheme, where), tensor_type(shape, dtype, where)
    if not is_float(logical.dtype):
        raise WeightError(f"{where}: {found.name} packs floats, got {logical}; expected a dtype such as f32")
    if not logical.shape:
        raise WeightShapeError(f"{where}: {found.name} packs rows, got the scalar {logical}; store it as it is")
    if not logical.is_static:
        raise WeightShapeError(f"{where}: expected whole numbers as the shape of what is packed, got {logical}")
    *rows, last = logical.shape
    if last % found.elements:
        raise WeightShapeError(
            f"{where}: {found.name} packs blocks of {found.elements}, expected a last axis that {found.elements} "
            f"divides, got {logical}; rows are not padded: store it as f16, or by a scheme of smaller blocks"
        )
    return logical, TensorType((*rows, last // found.elements * found.bytes), UINT8)


def check_packed(value: Packed, where: str) -> None:
    """Refuse a value whose parts contradict each other. Messages begin with `where`; errors as of `packed_types`.

    Raises:
        WeightError: bytes that are no array of uint8. WeightShapeError: more or fewer bytes than the shape needs.
    """
    logical, stored = packed_types(value.shape, value.dtype, value.scheme, where)
    data, expected = value.data, f"{where}: the bytes of {value.scheme} {logical}: expected {stored}"
    if not isinstance(data, np.ndarray | jax.Array) or isinstance(data, np.ma.MaskedArray):
        raise WeightError(f"{expected}, got {quote(type(data).__name__)}; numpy.frombuffer makes one")
    if data.dtype != UINT8:
        raise WeightError(f"{expected}, got dtype {quote(short_name(data.dtype))}; give the bytes as they are stored")
    if data.shape != stored.shape:
        raise WeightShapeError(f"{expected}, got {TensorType(data.shape, UINT8)}; check the scheme and the shape")


def stored_bytes(spec: WeightSpec) -> int:
    """The bytes that a tensor takes where it is stored."""
    if isinstance(spec, PackedSpec):
        return packed_types(spec.shape, spec.dtype, spec.scheme, "a packed weight")[1].nbytes
    return TensorType(tuple(spec.shape), spec.dtype).nbytes


# -- numbers -----------------------------------------------------------------------------------


def decoded(data: Any, scheme: str) -> Any:
    """The numbers of a packed tensor: from uint8 `[..., n · bytes]` of NumPy or JAX to float32 `[..., n · elements]`.

    Raises:
        UnsupportedError: the scheme is not decoded yet.
    """
    row, decode = SCHEMES[scheme], decoder_of(scheme, "a packed tensor")
    shape = (*data.shape[:-1], data.shape[-1] // row.bytes * row.elements)
    if not isinstance(data, np.ndarray):
        return decode(data.reshape(-1, row.bytes)).reshape(shape)
    blocks = _blocks(data, row)
    out = np.empty((len(blocks), row.elements), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):  # a scale that is infinite, times 0: sources look for it
        for at in range(0, len(blocks), _CHUNK):
            out[at : at + _CHUNK] = decode(blocks[at : at + _CHUNK])
    return out.reshape(shape)


def suspects(data: np.ndarray[Any, Any], scheme: str) -> np.ndarray[Any, Any]:
    """Floats that are all finite exactly where all numbers are: those in the blocks, a few of many bytes.

    If they are not, the numbers themselves, to be counted; but of a scheme that is not decoded yet.
    """
    row = SCHEMES[scheme]
    blocks = _blocks(data, row)
    width = [at + np.dtype(dtype).itemsize for at, dtype in row.floats]
    floats = [blocks[:, at:end].view(dtype) for (at, dtype), end in zip(row.floats, width, strict=True)]
    found = np.concatenate([np.ascontiguousarray(f) for f in floats], axis=1)
    return found if row.decode is None or np.isfinite(found).all() else np.asarray(decoded(data, scheme))


def _blocks(data: np.ndarray[Any, Any], scheme: Scheme) -> np.ndarray[Any, Any]:
    """uint8 `[count, bytes]`, contiguous."""
    return np.ascontiguousarray(data).reshape(-1, scheme.bytes)
