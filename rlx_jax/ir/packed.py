"""Packed (quantized) tensors: integer codes with scales that groups of them share.

A packed tensor has a logical shape and dtype, which blocks, checks and summaries use. On a device it is a few arrays of
integers (`Scheme.array_types`), and its values are computed where they are used (`decode_arrays`):

    value = scale · (table[code] or code − zero) [± minimum]

To support another scheme, add a row to `SCHEMES`. Files store either these arrays, or blocks of bytes that contain
parts of all of them (`rlx_jax.io.ggml`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from rlx_jax.dataclasses import dataclass, field
from rlx_jax.errors import WeightError, WeightShapeError, did_you_mean, quote, shown
from rlx_jax.io.ggml import BLOCKS, BlockLayout, bit_fields
from rlx_jax.ir.boxes import Box
from rlx_jax.ir.types import F32 as F32
from rlx_jax.ir.types import TensorType, as_dtype, is_float, short_name, tensor_type

UINT8: np.dtype[Any] = np.dtype(np.uint8)
INT8: np.dtype[Any] = np.dtype(np.int8)


# -- tables ------------------------------------------------------------------------------------

# Values of codes. E2M1 has a sign, two bits of exponent and one of mantissa, and is doubled here, with halved scales
# e8m0: 2^(byte - 127) itself is over the range of float32 for the byte 255, in which the reference sees no NaN. A code
# of a sign alone gives +0, as there.
TABLES: dict[str, np.ndarray[Any, Any]] = {
    "iq4": np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32),
    "e2m1_doubled": np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32),
    # The scales ue4m3 are the float8 e4m3fn without its sign bit; NaN is 0, as in the reference.
    "e8m0_halved": np.ldexp(np.float32(1), np.arange(256) - 128),
    "ue4m3_halved": np.array(
        [np.ldexp(m, -10) if e == 0 else np.ldexp(8 + m, e - 11) for e in range(16) for m in range(8)] * 2, np.float32
    ),
}
TABLES["ue4m3_halved"][0x7F] = 0
# In checkpoints of Hugging Face, a code of a sign alone gives -0.
TABLES["e2m1"] = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
TABLES["e2m1"] = np.concatenate([TABLES["e2m1"], -TABLES["e2m1"]])
# Quantiles of a normal distribution, of bitsandbytes.
TABLES["nf4"] = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip

# The dtypes of scales that are stored as their bits, and of codes: one with a name in `TABLES` has those values.
BITS: dict[str, np.dtype[Any]] = {
    "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16), "f32": F32,
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "e5m2": np.dtype(ml_dtypes.float8_e5m2),
}  # fmt: skip
_UNSIGNED: dict[int, np.dtype[Any]] = {1: UINT8, 2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}


# -- schemes -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Codes:
    """Unsigned integers of `bits` bits, packed in bytes.

    Each run of `stride` bytes has 8 / `bits` · `stride` integers: first those in the lowest bits of all its bytes, then
    those in the next bits. So a stride of 1 means that neighbours share a byte.
    """

    bits: int
    stride: int = 1

    def unpack(self, data: Any) -> Any:
        """Return the integers, uint8 `[..., n · 8 / bits]`, of bytes `[..., n]` of NumPy or JAX."""
        if self.bits == 8:
            return data
        return bit_fields(data, self.stride, range(0, 8, self.bits), 2**self.bits - 1)

    def slice(self, data: Any, start: int, size: int) -> Any:
        """Return the integers from `start` on, which are in the same bits of consecutive bytes."""
        if self.bits == 8:
            return data[..., start : start + size]
        run, rest = divmod(start, self.stride * 8 // self.bits)
        field, offset = divmod(rest, self.stride)
        first = run * self.stride + offset
        return data[..., first : first + size] >> np.uint8(field * self.bits) & np.uint8(2**self.bits - 1)

    def pack(self, codes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the bytes of integers: the inverse of `unpack`."""
        if self.bits == 8:
            return codes
        runs = codes.reshape(*codes.shape[:-1], -1, 8 // self.bits, self.stride)
        shifts = np.arange(0, 8, self.bits, dtype=np.uint8)[:, None]
        packed: np.ndarray[Any, Any] = np.bitwise_or.reduce(runs << shifts, axis=-2)
        return packed.reshape(*codes.shape[:-1], -1)


@dataclass(frozen=True)
class Scheme:
    """A packing scheme.

    Attributes:
        name: as in `SCHEMES` and in messages.
        codes: the bits of the codes: one entry, or one for the lower and one for the upper bits (the array `high`).
        block: the number of values of a row that share a scale; None for all of them.
        scale: the dtype of the scales, a name in `BITS` or `TABLES`.
        signed: whether codes of 8 bits are signed.
        zero: the number that is subtracted from each code.
        table: the name of the values of codes, in `TABLES` or, for floats of 8 bits, in `BITS`.
        group: the number of values that share an integer multiple of the scale (the array `multiples`); None if there
            are no multiples.
        multiples: the bits of the multiples.
        signed_multiples: whether multiples are signed.
        six_bits: whether multiples have 6 bits and follow the scales of their block in the array `scales`, of which a
            block has four words, as in Q4_K.
        minimum: "subtracted" or "added", if each scale, and each multiple, is followed by one for the minimum; else "".
        zeros: whether each scale has its own zero point (the array `zeros`), instead of `zero`.
        outer: "multiplied" or "divided", if each row has a float32 that the scales are combined with (the array
            `outer`); else "".
        rows: the number of rows that share a scale.
        factor: a number that the values are multiplied by in the end.
        ordered: whether the codes of a row are in another order than its values, which the array `order` has: code i is
            that of value `order[i]`.
        transposed: whether the arrays have the last two axes of the tensor swapped.
    """

    name: str
    codes: tuple[Codes, ...]
    block: int | None
    scale: str
    signed: bool = False
    zero: int = 0
    table: str = ""
    group: int | None = None
    multiples: Codes = Codes(8)
    signed_multiples: bool = False
    six_bits: bool = False
    minimum: str = ""
    zeros: bool = False
    outer: str = ""
    rows: int = 1
    factor: float = 1.0
    ordered: bool = False
    transposed: bool = False

    @property
    def elements(self) -> int:
        """Return the number of consecutive values that cannot be cut: those of whole bytes and whole groups."""
        runs = (8 // codes.bits * codes.stride for codes in self.codes)
        return math.lcm(*runs, self.block or 1, self.group or 1, self.layout.elements if self.layout else 1)

    @property
    def layout(self) -> BlockLayout | None:
        """Return the layout of the blocks in which files store the tensor; None if they store the arrays."""
        return BLOCKS.get(self.name)

    @property
    def scale_dtype(self) -> np.dtype[Any]:
        """Return the dtype in which scales are stored."""
        return _UNSIGNED[4 if self.six_bits else BITS[self.scale].itemsize] if self.scale in BITS else UINT8

    def stored_axes(self, axes: Sequence[Any]) -> tuple[Any, ...]:
        """Return what there is for each axis of a tensor (sizes, edges, roles), in the order of its arrays; or back."""
        return (*axes[:-2], *axes[-2:][::-1]) if self.transposed else tuple(axes)

    def array_types(self, shape: Sequence[int]) -> dict[str, TensorType]:
        """Return the types of the arrays of a tensor of this logical shape, by name."""
        *lead, size = self.stored_axes(shape)
        blocked_rows = [*lead[:-1], -(-lead[-1] // self.rows)] if lead else []
        per_scale = 2 if self.minimum else 1
        per_block = 4 if self.six_bits else per_scale
        blocks = 1 if self.block is None else -(-size // self.block)
        sizes: dict[str, tuple[list[int], int, np.dtype[Any]]] = {
            "codes": (lead, size * self.codes[0].bits // 8, INT8 if self.signed else UINT8)
        }
        if len(self.codes) > 1:
            sizes["high"] = (lead, size * self.codes[1].bits // 8, UINT8)
        sizes["scales"] = (blocked_rows, per_block * blocks, self.scale_dtype)
        if self.group is not None and not self.six_bits:
            bytes_per_group = per_scale * self.multiples.bits / 8
            num_bytes = int(bytes_per_group * (size // self.group))
            sizes["multiples"] = (lead, num_bytes, INT8 if self.signed_multiples else UINT8)
        if self.zeros:
            sizes["zeros"] = (blocked_rows, blocks, UINT8)
        if self.outer:
            sizes["outer"] = (lead, 1, _UNSIGNED[4])
        if self.ordered:
            sizes["order"] = ([*lead[:-1], 1][: len(lead)], size, np.dtype(np.int32))
        return {name: TensorType((*rows, n), dtype) for name, (rows, n, dtype) in sizes.items()}

    def array_box(self, name: str, shape: Sequence[int], box: Box) -> Box:
        """Return the part of an array that a part of the tensor needs.

        Args:
            name: the name of the array.
            shape: the logical shape of the tensor.
            box: (start, stop) for each axis of the tensor; on the last axis, multiples of `elements` or the end.
        """
        full_shape = self.array_types(shape)[name].shape
        *rows, (start, stop) = self.stored_axes(box)
        height = self.stored_axes(shape)[-2] if rows else 1
        if rows and full_shape[-2] != height:
            (first, last), unit = rows[-1], height if full_shape[-2] == 1 else self.rows
            rows[-1] = (first // unit, -(-last // unit))
        is_shared = name == "outer" or (self.block is None and name in ("scales", "zeros"))
        if self.ordered or is_shared:  # by all of a row
            return (*rows, (0, int(full_shape[-1])))
        # Not a ratio of sizes, as the last group may be incomplete.
        unit, per_unit = self.elements, int(self.array_types((self.elements,))[name].shape[-1])
        return (*rows, (start // unit * per_unit, min(-(-stop // unit) * per_unit, int(full_shape[-1]))))


# The schemes by which `quantize` packs values.
QUANTIZED = ("int8/32", "int8/128", "int4/32", "int4/128")

_INT8 = (Codes(8),)
# The schemes by name.
SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("gguf_q4_0", (Codes(4, 16),), 32, "f16", zero=8),
        Scheme("gguf_q4_1", (Codes(4, 16),), 32, "f16", minimum="added"),
        Scheme("gguf_q5_0", (Codes(4, 16), Codes(1)), 32, "f16", zero=16),
        Scheme("gguf_q5_1", (Codes(4, 16), Codes(1)), 32, "f16", minimum="added"),
        Scheme("gguf_q8_0", _INT8, 32, "f16", signed=True),
        Scheme("gguf_q2k", (Codes(2, 32),), 256, "f16", group=16, multiples=Codes(4), minimum="subtracted"),
        Scheme("gguf_q3k", (Codes(2, 32), Codes(1, 32)), 256, "f16", zero=4, group=16, signed_multiples=True),
        Scheme("gguf_q4k", (Codes(4, 32),), 256, "f16", group=32, six_bits=True, minimum="subtracted"),
        Scheme("gguf_q5k", (Codes(4, 32), Codes(1, 32)), 256, "f16", group=32, six_bits=True, minimum="subtracted"),
        Scheme("gguf_q6k", (Codes(4, 64), Codes(2, 32)), 256, "f16", zero=32, group=16, signed_multiples=True),
        Scheme("gguf_q8k", _INT8, 256, "f32", signed=True),
        Scheme("gguf_iq4_nl", (Codes(4, 16),), 32, "f16", table="iq4"),
        Scheme("gguf_iq4_xs", (Codes(4, 16),), 256, "f16", table="iq4", group=32, signed_multiples=True),
        Scheme("gguf_mxfp4", (Codes(4, 16),), 32, "e8m0_halved", table="e2m1_doubled"),
        Scheme("gguf_nvfp4", (Codes(4, 8),), 16, "ue4m3_halved", table="e2m1_doubled"),
        Scheme("int8/32", _INT8, 32, "f16", signed=True),
        Scheme("int8/128", _INT8, 128, "f16", signed=True),
        Scheme("int4/32", (Codes(4, 16),), 32, "f16", zero=8),
        Scheme("int4/128", (Codes(4, 64),), 128, "f16", zero=8),
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

    `WeightSource.spec` returns it instead of a `jax.ShapeDtypeStruct`; `WeightSource.read` then returns the bytes of
    its blocks. If instead the source stores the arrays of the tensor under keys of their own, `arrays` has for each
    array the program that reads it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    scheme: str
    arrays: Mapping[str, Any] | None = field(default=None, repr=False)

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
    """Return the logical type of a packed tensor, and the type of its blocks. Messages begin with `where`.

    Raises:
        WeightError: the scheme is unknown or has no blocks, or the dtype is not a floating one.
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
    if (layout := packing.layout) is None:
        raise WeightError(f"{where}: {packing.name} is stored as several arrays, not as blocks of bytes")
    *rows, row_size = logical_type.shape
    if row_size % layout.elements:
        raise WeightShapeError(
            f"{where}: {packing.name} packs blocks of {layout.elements}, expected a last axis that {layout.elements} "
            f"divides, got {logical_type}; rows are not padded: store it as f16, or by a scheme of smaller blocks"
        )
    return logical_type, TensorType((*rows, row_size // layout.elements * layout.bytes), UINT8)


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
    if isinstance(spec, PackedSpec) and spec.arrays is not None:
        return sum(program.type.nbytes for program in spec.arrays.values())
    if isinstance(spec, PackedSpec):
        return packed_types(spec.shape, spec.dtype, spec.scheme, "a packed weight")[1].nbytes
    return TensorType(tuple(spec.shape), spec.dtype).nbytes
