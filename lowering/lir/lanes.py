"""Products of one or two rows and a weight on a CPU, as sums that LLVM vectorizes.

XLA:CPU computes the product of a matrix and a vector in one thread, and needs decoded weights in memory. An elementwise
fusion, in contrast, is divided among threads, decodes in registers, and is vectorized along the last axis. So `LANES`
sums are computed for each row of the matrix by one fusion, in which each term is a slice of the weight times a slice of
x; another one sums the lanes.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from rlx_jax.ir.packed import SCHEMES
from rlx_jax.ir.packed_values import decode_slice, group_scales, six_bit_scales
from rlx_jax.ir.types import TensorType, is_float

AnyArray = Any

LANES = 32
# Terms of a sum in one fusion. On two cores, 8192 x 2048, Q8_0 and Q4_K, a product took 2.5 and 2.4 ms with 20 terms,
# 2.6 and 3.2 with 64, which compile three times as long. XLA:CPU fuses no more than about a hundred.
MAX_TERMS = 20
# Values of a weight that is not packed, and rows, for which `lanes` is faster than XLA:CPU's product of 16-bit floats,
# which converts the weight first. On two cores, ms a step of a 135M Llama in bf16, one row: 33 and 154.
MIN_LANE_VALUES, MAX_LANE_ROWS = 1 << 16, 2
MIN_TERMS = 8  # with fewer, the sums of a chunk are nearly as large as the weight


def has_lanes(rows: int, w: TensorType) -> bool:
    """Return whether `lanes` is the fastest product of this many rows and a weight of this type on a CPU."""
    width = int(w.shape[-1])
    if w.size < MIN_LANE_VALUES or not 0 < rows <= MAX_LANE_ROWS or width % LANES:
        return False
    return is_float(w.dtype) and w.dtype.itemsize == 2 and width >= MIN_TERMS * LANES * num_chunks(width)


def lanes(x: AnyArray, w: AnyArray) -> AnyArray:
    """Return the product of x, float32 `[M, K]`, and a weight of 16-bit floats `[N, K]`, float32 `[M, N]`."""
    # XLA would move the conversion to float32 out of the loop over steps, and keep the converted weight.
    x, w = lax.optimization_barrier((x, w))
    cut = _split(w, chunks := num_chunks(x.shape[-1]))
    return _sums(x, lambda start: cut[..., start : start + LANES].astype(jnp.float32), chunks, LANES)


def num_chunks(width: int) -> int:
    """Return into how many chunks `lanes` divides a row."""
    units = width // LANES
    return next(n for n in range(-(-units // MAX_TERMS), units + 1) if units % n == 0)


def lanes_bytes(x: TensorType, w: TensorType) -> int:
    """Return the bytes of the sums of lanes in a product of x and a weight that is not packed."""
    return 4 * x.size // int(x.shape[-1]) * int(w.shape[0]) * num_chunks(int(x.shape[-1])) * LANES


def can_sum_lanes(scheme: str, width: int) -> bool:
    """Return whether `packed_lanes` multiplies rows of this width.

    It has no values that are looked up in tables, no scales of several rows, no rows with a part of a group, and no
    codes of which fewer than half of `LANES` lie side by side.
    """
    packing = SCHEMES[scheme]
    if packing.table or packing.transposed or packing.rows > 1 or width % (packing.group or packing.block or 1):
        return False
    return _divide(width, scheme)[1] >= LANES // 2


def packed_lanes(x: AnyArray, arrays: Mapping[str, AnyArray], scheme: str, dtypes: Sequence[Any]) -> AnyArray:
    """Return the product of x, float32 `[M, K]`, and a packed weight `[N, K]`, float32 `[M, N]`.

    Args:
        x: the rows.
        arrays: the arrays of the weight, without `order`.
        scheme: one for which `can_sum_lanes`.
        dtypes: what the values are rounded to, one after another.
    """
    # XLA would move the decoding out of the loop over steps, and keep the decoded weight.
    x, arrays = lax.optimization_barrier((x, dict(arrays)))
    (chunks, lanes, group), has_six_bits = _divide(x.shape[-1], scheme), SCHEMES[scheme].six_bits
    cut = {name: _split(a, chunks) for name, a in arrays.items() if name in ("codes", "high", "zeros")}
    # Six bits are unpacked in the sum: XLA:CPU would take longer to write the scales of all groups to memory.
    numbers = {"words": arrays["scales"]} if has_six_bits else group_scales(arrays, scheme)
    scales = {name: _split(a, chunks) for name, a in numbers.items()}

    def values(start: int) -> AnyArray:
        def of_group(a: AnyArray) -> AnyArray:
            index = start // group if a.shape[-1] > 1 else 0
            return a[..., index : index + 1]

        if has_six_bits:
            block, place = divmod(start // group, 8)
            here = six_bit_scales(scales["words"][..., 4 * block : 4 * block + 4], place)
        else:
            here = {name: of_group(a) for name, a in scales.items()}
        return functools.reduce(
            jnp.astype, (*dtypes, jnp.float32), decode_slice(cut, scheme, here, start, lanes, of_group)
        )

    return _sums(x, values, chunks, lanes)


def sums_bytes(height: int, width: int, scheme: str, rows: int) -> int:
    """Return the bytes of the sums of lanes in a product of `rows` rows and a weight `[height, width]`."""
    chunks, lanes, _ = _divide(width, scheme)
    return 4 * rows * height * chunks * lanes


def _divide(width: int, scheme: str) -> tuple[int, int, int]:
    """Return into how many chunks to divide a row, how many lanes it has, and how many values share a scale.

    A chunk has `MAX_TERMS` terms at most, and whole groups of values and of bits, and whole blocks of six-bit scales.
    """
    packing = SCHEMES[scheme]
    group = math.gcd(width, packing.group or packing.block or width)
    strides = [(codes.stride, codes.stride * 8 // codes.bits) for codes in packing.codes if codes.bits < 8]
    lanes = math.gcd(LANES, group, *(stride for stride, _ in strides))
    least_unit = packing.block or 1 if packing.six_bits else group
    units = width // (unit := math.lcm(least_unit, *(run for _, run in strides)))
    least = -(-units // max(1, MAX_TERMS * lanes // unit))
    return next(n for n in range(least, units + 1) if units % n == 0), lanes, group


def _split(array: AnyArray, chunks: int) -> AnyArray:
    """Return `[N, chunks, …]` of `[N, …]`; an entry that all of a row share stays one."""
    return array.reshape(array.shape[0], chunks if array.shape[-1] > 1 else 1, -1)


def _sums(x: AnyArray, values: Callable[[int], AnyArray], chunks: int, lanes: int) -> AnyArray:
    """Return the sums over a row, given its values `[N, chunks, lanes]` from an index on."""
    parts = x.reshape(x.shape[0], chunks, -1)
    totals = []
    for row in range(x.shape[0]):
        total = None
        for start in range(0, parts.shape[-1], lanes):
            term = values(start) * parts[row, None, :, start : start + lanes]
            total = term if total is None else total + term
        # XLA:CPU would compute the terms of a reduction one after another: without the barrier in its loop, and in jax
        # 0.10, which removes the barrier first, in a call of YNNPACK. It computes the operand of a product alone.
        ones = jnp.ones(lanes, jnp.float32)
        sums = jnp.matmul(lax.optimization_barrier(total), ones, precision="highest")
        totals.append(functools.reduce(operator.add, (sums[:, chunk] for chunk in range(chunks))))
    return jnp.stack(totals)
