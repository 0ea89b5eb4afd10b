"""Products of one row on a CPU, as sums that LLVM vectorizes.

XLA:CPU computes the product of a matrix and a vector in one thread, and needs decoded weights in memory. An elementwise
fusion, in contrast, is divided among threads, decodes in registers, and is vectorized along the last axis. So `LANES`
sums are computed for each row of the matrix by one fusion, in which each term is a slice of the weight times a slice of
x; another one sums the lanes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from rlx_jax.ir.packed import SCHEMES
from rlx_jax.ir.packed_values import decode_slice, group_scales

AnyArray = Any

LANES = 32
# Terms of a sum in one fusion. Each is compiled anew; XLA:CPU fuses no more than about a hundred.
MAX_TERMS = 40


def can_sum_lanes(scheme: str) -> bool:
    """Return whether `packed_lanes` has these values: others are looked up in tables, or have scales of several rows."""
    packing = SCHEMES[scheme]
    return not (packing.table or packing.transposed or packing.rows > 1)


def packed_lanes(x: AnyArray, arrays: Mapping[str, AnyArray], scheme: str, width: int) -> AnyArray:
    """Return the product of x, float32 `[M, K]`, and a packed weight `[N, K]`, float32 `[M, N]`.

    Args:
        x: the rows.
        arrays: the arrays of the weight, without `order`.
        scheme: one for which `can_sum_lanes`.
        width: K.
    """
    # XLA would move the decoding out of the loop over steps, and keep the decoded weight.
    x, arrays = lax.optimization_barrier((x, dict(arrays)))
    packing = SCHEMES[scheme]
    group = math.gcd(width, packing.group or packing.block or width)
    runs = [codes.stride * 8 // codes.bits for codes in packing.codes if codes.bits < 8]
    lanes = math.gcd(LANES, group, *(codes.stride for codes in packing.codes if codes.bits < 8))
    chunks = _chunks(width, math.lcm(group, *runs), lanes)
    cut = {name: _split(a, chunks) for name, a in arrays.items() if name in ("codes", "high", "zeros")}
    scales = {name: _split(a, chunks) for name, a in group_scales(arrays, scheme).items()}

    def values(start: int) -> AnyArray:
        def of_group(a: AnyArray) -> AnyArray:
            index = start // group if a.shape[-1] > 1 else 0
            return a[..., index : index + 1]

        return decode_slice(cut, scheme, {name: of_group(a) for name, a in scales.items()}, start, lanes, of_group)

    return _sums(x, values, chunks, lanes)


def float_lanes(x: AnyArray, w: AnyArray) -> AnyArray:
    """Return the product of x, float32 `[M, K]`, and a weight of floats `[N, K]`, float32 `[M, N]`."""
    x, w = lax.optimization_barrier((x, w))
    width = w.shape[-1]
    lanes = math.gcd(LANES, width)
    chunks = _chunks(width, lanes, lanes)
    parts = _split(w, chunks)
    return _sums(x, lambda start: parts[..., start : start + lanes].astype(jnp.float32), chunks, lanes)


def _chunks(width: int, unit: int, lanes: int) -> int:
    """Return into how many chunks, multiples of `unit`, to divide a row, so that one has at most `MAX_TERMS` terms."""
    units = width // unit
    return next(n for n in range(1, units + 1) if units % n == 0 and (width // n <= MAX_TERMS * lanes or n == units))


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
        # Without a barrier, XLA:CPU computes the terms in the loop of the sum, one after another.
        totals.append(lax.optimization_barrier(total).sum((-2, -1)))
    return jnp.stack(totals)
