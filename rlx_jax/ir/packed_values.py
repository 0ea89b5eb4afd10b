"""Compute the values of packed tensors from their arrays, and pack values, also as steps of parameter programs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import WeightError
from rlx_jax.io.ggml import BLOCKS, split_blocks
from rlx_jax.ir.boxes import Box
from rlx_jax.ir.checkpoint_tensor import UnaryStep, select_box
from rlx_jax.ir.packed import BITS, SCHEMES, TABLES, UINT8, Scheme
from rlx_jax.ir.types import F32, TensorType

_MIN_SCALE = np.finfo(np.float16).smallest_subnormal
_CHUNK = 2**19  # values decoded at a time: the temporaries then fit in the CPU's cache


def decode_arrays(arrays: Mapping[str, Any], scheme: str) -> Any:
    """Return the values of a packed tensor, float32 `[..., k]`, computed as the reference decoders do.

    A product of a float16 scale, a multiple of at most 8 bits and a code of at most 6 bits is exact in the 24 bits of
    float32, so that only the minimum rounds, once.

    Args:
        arrays: arrays of NumPy or JAX, with types as `Scheme.array_types` returns them.
        scheme: a name in `SCHEMES`.
    """
    return in_order(decode_codes(arrays, scheme, group_scales(arrays, scheme)), arrays, scheme)


def in_order(values: Any, arrays: Mapping[str, Any], scheme: str) -> Any:
    """Return decoded values, which are in the order of the codes, as the tensor has them.

    Without the array `order`, the values of a row stay in the order of its codes.
    """
    if "order" in arrays:
        xp = values.__array_namespace__()
        values = xp.take_along_axis(values, xp.argsort(arrays["order"], axis=-1), -1)
    return values.swapaxes(-1, -2) if SCHEMES[scheme].transposed else values


def group_scales(arrays: Mapping[str, Any], scheme: str) -> dict[str, Any]:
    """Return the `scales` and, if the scheme has them, the `minimums` of each group of values, in float32."""
    packing = SCHEMES[scheme]
    if packing.six_bits:
        return six_bit_scales(arrays["scales"])
    scales = _floats(arrays["scales"], packing.scale)
    parts = dict(zip(("scales", "minimums"), _pairs(scales), strict=True)) if packing.minimum else {"scales": scales}
    if packing.group is not None and packing.block is not None:
        multiples = _float32(packing.multiples.unpack(arrays["multiples"]))
        factors = _pairs(multiples) if packing.minimum else (multiples,)
        per_block = packing.block // packing.group
        pairs = zip(parts, factors, strict=True)
        parts = {name: _repeat(parts[name], per_block, factor.shape[-1]) * factor for name, factor in pairs}
    if packing.outer:
        outer = arrays["outer"].view(F32)
        scales = parts["scales"]
        parts["scales"] = scales * outer if packing.outer == "multiplied" else scales / outer
    return parts


def six_bit_scales(words: Any, place: int | None = None) -> dict[str, Any]:
    """Return `group_scales` of Q4_K and Q5_K, of all groups of each block or of the one at `place`.

    The first of the four words of a block has two float16.
    """
    xp, blocks = words.__array_namespace__(), words.reshape(*words.shape[:-1], -1, 1, 4)
    group, parts = xp.arange(8, dtype=words.dtype).reshape(*(1,) * words.ndim, 8), {}
    for i, name in enumerate(("scales", "minimums")):
        early, late = six_bit_words(blocks[..., 1 + i], blocks[..., 3], i)
        if place is None:
            multiples = xp.where(group < 4, early, late) >> group % 4 * 8
        else:
            multiples = (early if place < 4 else late) >> place % 4 * 8
        factors = (blocks[..., 0] >> 16 * i).astype(np.uint16).view(np.float16)
        parts[name] = (_float32(factors) * _float32(multiples.astype(UINT8))).reshape(*words.shape[:-1], -1)
    return parts


def six_bit_words(first: Any, last: Any, is_minimum: int) -> tuple[Any, Any]:
    """Return the multiples 0–3 and 4–7 of blocks of Q4_K, a byte each.

    Args:
        first: the second word of each block, for scales, or the third one, for minimums. Its bytes have the multiples
            0–3, and in the upper 2 bits these bits of the others.
        last: the fourth word. Its bytes have the lower 4 bits of the others, of minimums in the high halves.
        is_minimum: 1 for minimums, else 0.
    """
    return first & 0x3F3F3F3F, last >> 4 * is_minimum & 0x0F0F0F0F | first >> 2 & 0x30303030


def decode_codes(arrays: Mapping[str, Any], scheme: str, scales: Mapping[str, Any]) -> Any:
    """Return the values of a packed tensor in the order of its codes, given its `group_scales`."""
    packing = SCHEMES[scheme]
    return _decode(_codes(arrays, packing), arrays.get("zeros"), packing, scales)


def decode_slice(
    arrays: Mapping[str, Any],
    scheme: str,
    scales: Mapping[str, Any],
    start: int,
    size: int,
    of_group: Callable[[Any], Any],
) -> Any:
    """Return the `size` values from `start` on, which are of one group and whose bits start at one place in a byte.

    Args:
        arrays: as in `decode_codes`.
        scheme: a name in `SCHEMES`.
        scales: the numbers of that group from `group_scales`.
        start: the first value.
        size: how many.
        of_group: returns the numbers of that group.
    """
    packing = SCHEMES[scheme]
    names = ("codes", "high")[: len(packing.codes)]
    parts = (codes.slice(arrays[n], start, size) for n, codes in zip(names, packing.codes, strict=True))
    zeros = of_group(arrays["zeros"]) if packing.zeros else None
    return _decode(
        functools.reduce(lambda low, high: low | high << packing.codes[0].bits, parts), zeros, packing, scales
    )


def _decode(codes: Any, zeros: Any, packing: Scheme, scales: Mapping[str, Any]) -> Any:
    """Return the values of codes, given the zero points, if the scheme has them, and scales of groups."""
    shape, unit = codes.shape, packing.group or packing.block or codes.shape[-1]
    # One axis for the values of a group, so that a loop over it reads its scale once.
    is_grouped = shape[-1] % unit == 0

    def each_group(numbers: Any) -> Any:
        """Return numbers of groups, one for each row, so that they broadcast with the values."""
        if packing.rows > 1:
            numbers = _repeat(numbers.swapaxes(-1, -2), packing.rows, shape[-2]).swapaxes(-1, -2)
        return numbers[..., None] if is_grouped else _repeat(numbers, unit, shape[-1])

    codes = codes.reshape(*shape[:-1], -1, unit) if is_grouped else codes
    if packing.zeros:
        values = _float32(codes) - each_group(_float32(zeros))
    else:
        values = _look_up(packing.table, codes) if packing.table else _float32(codes) - packing.zero
    values = each_group(scales["scales"]) * values
    values = values if packing.factor == 1 else values * np.float32(packing.factor)
    if packing.minimum:
        minimums = each_group(scales["minimums"])
        values = values - minimums if packing.minimum == "subtracted" else values + minimums
    return values.reshape(shape)


def decode_packed(data: np.ndarray[Any, Any], scheme: str) -> np.ndarray[Any, Any]:
    """Return the values of a tensor in blocks: uint8 `[..., n · bytes]` → float32 `[..., n · elements]`."""
    layout, types = BLOCKS[scheme], SCHEMES[scheme].array_types((BLOCKS[scheme].elements,))
    blocks = np.ascontiguousarray(data).reshape(-1, layout.bytes)
    arrays = {name: split_blocks(blocks, layout, name, types[name].dtype) for name in layout.parts}
    return decode_on_host(arrays, scheme).reshape(*data.shape[:-1], data.shape[-1] // layout.bytes * layout.elements)


def decode_on_host(arrays: Mapping[str, np.ndarray[Any, Any]], scheme: str) -> np.ndarray[Any, Any]:
    """Return `decode_arrays` of arrays in host memory, computed in chunks that fit in the CPU's cache."""
    packing, codes = SCHEMES[scheme], arrays["codes"]
    size = codes.shape[-1] * 8 // packing.codes[0].bits
    out = np.empty((*codes.shape[:-1], size), np.float32)
    if codes.ndim < 2:
        return np.asarray(decode_arrays(arrays, scheme))
    step = -(-max(1, _CHUNK // size) // packing.rows) * packing.rows
    with np.errstate(invalid="ignore", over="ignore"):  # an infinite scale times 0 gives NaN; sources check for it
        for index in np.ndindex(codes.shape[:-2]):
            for at in range(0, codes.shape[-2], step):
                part = {}
                for name in arrays.keys() - {"order"}:
                    unit = 1 if arrays[name].shape[-2] == codes.shape[-2] else packing.rows
                    part[name] = arrays[name][index][at // unit : -(-(at + step) // unit)]
                out[index][at : at + step] = decode_codes(part, scheme, group_scales(part, scheme))
    return np.asarray(in_order(out, arrays, scheme))


def quantize(values: np.ndarray[Any, Any], scheme: str, where: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays of values `[..., k]`, packed symmetrically: the largest of each group has the largest code.

    A group whose scale float16 would round to 0 has the least positive one, so that its values do not all vanish.

    Args:
        values: floats; the size of a group divides k.
        scheme: a name in `QUANTIZED`.
        where: the beginning of messages.

    Raises:
        WeightError: a scale is over the range of float16, or not finite; or all values are below its least number.
    """
    packing = SCHEMES[scheme]
    assert packing.block is not None
    largest_code = 2 ** (packing.codes[0].bits - 1) - 1
    groups = values.astype(np.float32, copy=False).reshape(*values.shape[:-1], -1, packing.block)
    largest = np.abs(groups).max(-1)
    with np.errstate(over="ignore"):
        scales = (largest / np.float32(largest_code)).astype(np.float16)
    if not np.isfinite(scales).all():
        raise WeightError(f"{where}: the scales of {scheme} are float16, at most 65504; a value is too large for them")
    if 0 < largest.max(initial=0) < _MIN_SCALE:
        raise WeightError(f"{where}: the scales of {scheme} are float16, at least 6e-8; all values are smaller")
    scales[(scales == 0) & (largest > 0)] = _MIN_SCALE
    divisors = np.where(scales == 0, np.float32(1), scales.astype(np.float32))[..., None]
    codes = np.clip(np.rint(groups / divisors), -largest_code, largest_code).astype(np.int8).reshape(values.shape)
    packed = codes if packing.signed else packing.codes[0].pack((codes + np.int8(packing.zero)).view(np.uint8))
    return {"codes": packed, "scales": scales.view(np.uint16)}


def finite_check_floats(data: np.ndarray[Any, Any], scheme: str) -> np.ndarray[Any, Any]:
    """Return floats that are all finite only if all values of a tensor in blocks are.

    They are none if `has_finite_scales`, and else the decoded values, so that the caller can count the bad ones.
    """
    scales = split_blocks(data, BLOCKS[scheme], "scales", SCHEMES[scheme].scale_dtype)
    return np.empty(0, np.float32) if has_finite_scales(scales, scheme) else decode_packed(data, scheme)


def has_finite_scales(scales: np.ndarray[Any, Any], scheme: str) -> bool:
    """Return whether the products of scales of a tensor in blocks, which are few, and any codes are finite."""
    packing = SCHEMES[scheme]
    if packing.six_bits:
        scales = np.ascontiguousarray(scales[..., ::4]).view(np.uint16)
    if packing.scale == "f16":  # products with codes and multiples are in the range of float32
        # The largest signed integer has the bits of a positive float, the largest unsigned one of a negative float.
        return int(scales.view(np.int16).max(initial=0)) < 0x7C00 and int(scales.max(initial=0)) < 0xFC00
    # Look-ups of all scales would take longer than a read: those up to the largest byte include them.
    table = TABLES.get(packing.scale)
    floats = _floats(scales, packing.scale) if table is None else table[: int(scales.max(initial=0)) + 1]
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(floats * np.float32(2**14)).all())  # a code and a multiple have 8 bits at most


def _codes(arrays: Mapping[str, Any], scheme: Scheme) -> Any:
    """Return the codes of a tensor, one integer of 8 bits for each value."""
    low = scheme.codes[0].unpack(arrays["codes"])
    return low if len(scheme.codes) == 1 else low | scheme.codes[1].unpack(arrays["high"]) << scheme.codes[0].bits


def _float32(values: Any) -> Any:
    return values.astype(F32)


def _floats(bits: Any, dtype: str) -> Any:
    """Return the float32 values of floats that are stored as their bits."""
    return _look_up(dtype, bits) if dtype in TABLES else _float32(bits.view(BITS[dtype]))


def _look_up(table: str, codes: Any) -> Any:
    """Return the float32 values of codes by a table of all codes, or as floats of 8 bits."""
    if table not in TABLES:
        return _float32(codes.view(BITS[table]))
    return codes.__array_namespace__().asarray(TABLES[table])[codes]


def _pairs(values: Any) -> tuple[Any, Any]:
    """Return the even and the odd entries of the last axis."""
    pairs = values.reshape(*values.shape[:-1], -1, 2)
    return pairs[..., 0], pairs[..., 1]


def _repeat(values: Any, count: int, size: int) -> Any:
    """Return each entry of the last axis `count` times, and of all of them the first `size`."""
    repeated = values.__array_namespace__().broadcast_to(values[..., None], (*values.shape, count))
    return repeated.reshape(*values.shape[:-1], -1)[..., :size]


@dataclass(frozen=True)
class Quantized(UnaryStep):
    """A program whose values are rounded to a packing scheme while they are loaded, by `quantize`."""

    of: Any
    scheme: str
    lossy: ClassVar[bool] = True

    @property
    def type(self) -> TensorType:
        return TensorType(self.of.type.shape, np.dtype(np.float32))

    def __str__(self) -> str:
        return f"quantize({self.of}, {self.scheme})"

    def box(self, box: Box) -> Any:
        return Quantized(select_box(self.of, box), self.scheme)

    def join(self, *values: Any) -> Any:
        return decode_arrays(quantize(values[0], self.scheme, str(self.of)), self.scheme)


@dataclass(frozen=True)
class QuantizedArray(UnaryStep):
    """One array of a parameter that is packed while it is loaded."""

    of: Any
    scheme: str
    array: str
    no_split: ClassVar[str] = "one of several arrays; `decoded_leaves` joins them"

    @property
    def type(self) -> TensorType:
        return SCHEMES[self.scheme].array_types(self.of.type.shape)[self.array]

    def __str__(self) -> str:
        return f"{self.array}(quantize({self.of}, {self.scheme}))"

    def box(self, box: Box) -> Any:
        *rows, edges = box
        start, stop = (edge * int(self.of.type.shape[-1]) // int(self.type.shape[-1]) for edge in edges)
        return QuantizedArray(select_box(self.of, (*rows, (start, stop))), self.scheme, self.array)

    def join(self, *values: Any) -> Any:
        return quantize(values[0], self.scheme, str(self.of))[self.array]
