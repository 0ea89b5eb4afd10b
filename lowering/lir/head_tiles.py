"""Scores and weighted values of the query heads that share a key head, computed with `mma.m16n8k16`.

Query heads are rows of the instruction, which has 16 rows; 8 are used, and fewer heads are repeated to 8. Its columns
are keys in the first product, and columns of the values in the second, so that each lane has the attention weights that
it needs for the second product. Each lane loads the keys and values that it multiplies from global memory.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp

from rlx_jax.lowering.lir.emit import array_of, ir, llvm, mgpu, mma, number, vector, words
from rlx_jax.lowering.lir.mosaic import WARPS, copies, plgpu, tiled
from rlx_jax.lowering.lir.row_products import MAX_ROWS

AnyArray = Any

# The supported (measured) head width; number of keys of a warp per iteration.
WIDTH, WARP_KEYS = 64, 16


def query_layout(heads: int) -> Any:
    """Return the layout of the queries `[heads, width]` of 4 or 8 heads."""
    return tiled(((heads, 32), (8,)), copies(WARPS), (*copies(MAX_ROWS // heads), -3, -2))


def key_layout() -> Any:
    """Return the layout of a block of keys `[WARPS, WARP_KEYS, width]`."""
    return tiled(((WARPS, WARP_KEYS, 32), (8, 32), (8,)), (-6,), (-3, -2))


def value_layout() -> Any:
    """Return the layout of a block of values: a lane has 8 columns for each key with a weight in the lane.

    The two columns of a lane in a result are 32 apart, so that lanes store results to different shared memory banks.
    """
    return tiled(((WARPS, WARP_KEYS, 64), (8, 64), (2, 32), (8,)), (-8,), (-2, -4, -5))


def score_layout() -> Any:
    """Return the layout of the scores `[8, WARPS, WARP_KEYS]`."""
    return tiled(((MAX_ROWS, WARPS, WARP_KEYS), (8,), (2,)), (-4,), (-5, -2))


def result_layout() -> Any:
    """Return the layout of the weighted values `[8, WARPS, width]`."""
    return tiled(((MAX_ROWS, WARPS, 64), (32,), (8,), (4,)), (-5,), (-6, -3))


def score(queries: AnyArray, keys: AnyArray, interpret: bool) -> AnyArray:
    """Return the scores of the queries for a block of keys, float32."""
    if interpret:
        y = jnp.einsum("hd,wkd->hwk", *(a.astype(jnp.float32) for a in (queries, keys)))
        return jnp.tile(y, (MAX_ROWS // len(queries), 1, 1))
    out = plgpu.ShapeDtypeStruct((MAX_ROWS, WARPS, WARP_KEYS), jnp.float32, layout=score_layout())
    layouts = query_layout(len(queries)), key_layout()
    return plgpu.inline_mgpu(arg_types=layouts, return_type=out)(emit_scores)(queries, keys)


def weigh(weights: AnyArray, values: AnyArray, interpret: bool) -> AnyArray:
    """Return the sums of a block of values times the bf16 weights, float32, one sum per warp."""
    if interpret:
        return jnp.einsum("hwk,wkd->hwd", *(a.astype(jnp.float32) for a in (weights, values)))
    shape = (MAX_ROWS, WARPS, values.shape[2])
    out = plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=result_layout())
    layouts = score_layout(), value_layout()
    return plgpu.inline_mgpu(arg_types=layouts, return_type=out)(functools.partial(emit_values, shape))(weights, values)


def emit_scores(_: Any, queries: Any, keys: Any) -> Any:
    """Emit the instructions of `score` on the registers of its operands."""
    zero, halves = number(0), keys.registers.reshape(-1, 2)
    query_words = [words(register) for register in queries.registers.reshape(-1)]
    results = []
    for half in range(2):  # 8 keys each
        sums = [mgpu.c(0.0, ir.F32Type.get())] * 4
        for a, b in zip(query_words, map(words, halves[:, half]), strict=True):
            for i in (0, 2):
                sums = mma(sums, (a[i], zero, a[i + 1], zero), b[i : i + 2])
        results.append(vector_of(sums[:2]))
    return array_of(results, score_layout(), (MAX_ROWS, WARPS, WARP_KEYS))


def emit_values(shape: tuple[int, ...], _: Any, weights: Any, values: Any) -> Any:
    """Emit the instructions of `weigh` on the registers of its operands."""
    zero, f32_zero = number(0), mgpu.c(0.0, ir.F32Type.get())
    (low,), (high,) = (words(register) for register in weights.registers.reshape(-1))
    results = []
    for block in values.registers.reshape(-1, 4):
        even, odd, even_high, odd_high = map(words, block)
        sums = []
        for column in range(8):
            b = [halves_of(x[column // 2], y[column // 2], column % 2) for x, y in ((even, odd), (even_high, odd_high))]
            sums.append(mma([f32_zero] * 4, (low, zero, high, zero), b))
        results += [vector_of([sums[start + j][i] for j in range(4)]) for i in range(2) for start in (0, 4)]
    return array_of(results, result_layout(), shape)


def halves_of(first: Any, second: Any, upper: int) -> Any:
    """Return a word of the lower or the upper halves of two words."""
    asm, selected = "prmt.b32 $0, $1, $2, $3;", number(0x7632 if upper else 0x5410)
    return llvm.inline_asm(ir.IntegerType.get_signless(32), [first, second, selected], asm, "=r,r,r,r")


def vector_of(numbers: list[Any]) -> Any:
    """Return scalars as one vector register."""
    return vector.from_elements(ir.VectorType.get((len(numbers),), numbers[0].type), numbers)
