"""Softmax in one pass over the blocks of keys of a warpgroup (Milakov and Gimelshein 2018), in each warp by itself.

With few rows and keys each entry is multiplied by itself, in float32; else all heads of a program are multiplied with a
block at once, on matrix units (`head_tiles.py`), with weights rounded to bf16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from rlx_jax.lowering.lir.attention_step import AttentionKernel, Blocks, NewToken
from rlx_jax.lowering.lir.head_layouts import HeadLayouts, sum_layout
from rlx_jax.lowering.lir.head_tiles import WARP_KEYS, result_layout, score, score_layout, weigh
from rlx_jax.lowering.lir.mosaic import WARPS, load, plgpu
from rlx_jax.lowering.lir.row_products import MAX_ROWS

AnyArray = Any

# A score that no key reaches, finite so that differences are.
LOWEST = -1e30


def attend(
    spec: AttentionKernel, step: NewToken, blocks: Blocks, ahead: Sequence[Any], queries: Sequence[AnyArray]
) -> list[list[AnyArray]]:
    """Return maximum and sum of exponentials `[WARPS]`, and weighted values `[WARPS, width]`, for each query.

    Args:
        spec: the shapes.
        step: the numbers of the step.
        blocks: the blocks of the warpgroup.
        ahead: keys and values of the first block, read before.
        queries: queries `[width]`, f32.
    """
    layouts, shape = HeadLayouts.of(spec.width), (WARPS, spec.warp_keys, spec.width)
    across = functools.partial(lax.broadcast_in_dim, shape=shape, broadcast_dimensions=(0, 1))

    def add(sums: Any, keys: AnyArray, values: AnyArray, is_allowed: AnyArray) -> Any:
        keys, values = keys.astype(jnp.float32), values.astype(jnp.float32)
        results = []
        for query, (peak, total, values_sum) in zip(queries, sums, strict=True):
            scores = scaled(spec, (keys * lax.broadcast_in_dim(query, shape, (2,))).sum(axis=2))
            scores = jnp.where(is_allowed, scores, LOWEST)
            new_peak = jnp.maximum(peak, scores)
            weights = jnp.where(is_allowed, jnp.exp(scores - new_peak), 0.0)
            decay = jnp.exp(peak - new_peak)
            results.append((new_peak, total * decay + weights, values_sum * across(decay) + values * across(weights)))
        return results

    start = [start_of(shape[:2], layouts.rows, shape, layouts.tile) for _ in queries]
    results = []
    for peaks, totals, values in add_blocks(spec, step, blocks, ahead, (layouts.rows, shape[:2]), start, add):
        peak = peaks.max(axis=1)
        factors = jnp.exp(peaks - lax.broadcast_in_dim(peak, peaks.shape, (0,)))
        results.append([peak, (totals * factors).sum(axis=1), (values * across(factors)).sum(axis=1)])
    return results


def attend_tiles(
    spec: AttentionKernel, step: NewToken, blocks: Blocks, ahead: Sequence[Any], queries: AnyArray, interpret: bool
) -> Any:
    """Return maximum and sum of exponentials `[8, WARPS]`, and weighted values `[8, WARPS, width]`.

    Args:
        spec, step, blocks, ahead: as in `attend`.
        queries: queries `[4 or 8, width]`, of which others repeat one.
        interpret: whether the kernel runs in Mosaic's interpreter.
    """
    shape = (MAX_ROWS, WARPS, WARP_KEYS)

    def across(x: AnyArray, size: int) -> AnyArray:
        return lax.broadcast_in_dim(x, (MAX_ROWS, WARPS, size), (0, 1))

    def add(sums: Any, keys: AnyArray, values: AnyArray, is_allowed: AnyArray) -> Any:
        peak, total, values_sum = sums
        scores = jnp.where(is_allowed, scaled(spec, score(queries, keys, interpret)), LOWEST)
        new_peak = jnp.maximum(peak, scores.max(axis=2))
        weights = jnp.where(is_allowed, jnp.exp(scores - across(new_peak, WARP_KEYS)), 0.0)
        decay = jnp.exp(peak - new_peak)
        values_sum = values_sum * across(decay, spec.width) + weigh(weights.astype(values.dtype), values, interpret)
        return new_peak, total * decay + weights.sum(axis=2), values_sum

    start = start_of(shape[:2], score_layout().reduce(2), (*shape[:2], spec.width), result_layout())
    return add_blocks(spec, step, blocks, ahead, (score_layout(), shape), start, add)


def start_of(shape: tuple[int, ...], layout: Any, values_shape: tuple[int, ...], values_layout: Any) -> tuple[Any, ...]:
    """Return maximum, sum of exponentials and weighted values of no keys."""
    places = (LOWEST, shape, layout), (0.0, shape, layout), (0.0, values_shape, values_layout)
    return tuple(plgpu.layout_cast(jnp.full(size, x, jnp.float32), layout) for x, size, layout in places)


def add_blocks(
    spec: AttentionKernel, step: NewToken, blocks: Blocks, ahead: Sequence[Any], scores: tuple[Any, tuple[int, ...]],
    start: Any, add: Callable[[Any, AnyArray, AnyArray, AnyArray], Any],
) -> Any:  # fmt: skip
    """Return the sums of all blocks, each read while the one before it is added.

    Args:
        spec, step, blocks, ahead: as in `attend`.
        scores: layout and shape of scores `[…, WARPS, warp_keys]`.
        start: sums of no keys.
        add: function of sums, keys, values and which scores count, that returns the sums with them.
    """
    layout, shape = scores
    warp, key = (plgpu.broadcasted_iota(jnp.int32, shape, len(shape) + axis, layout=layout) for axis in (-2, -1))
    places = warp * spec.warp_keys + key

    def add_block(i: AnyArray, carry: Any) -> Any:
        sums, (keys, values) = carry
        following = blocks.read(i + 1)
        first, slot = blocks.row(i)
        return add(sums, keys, values, step.allowed(spec, places + slot, first)), following

    sums, _ = lax.fori_loop(0, blocks.count(step.end), add_block, (start, tuple(ahead)))
    return sums


def combine(parts: Sequence[Sequence[AnyArray]]) -> list[AnyArray]:
    """Return maximum, sum of exponentials and weighted values `[width]` of several parts of the keys of a query."""
    peak = functools.reduce(jnp.maximum, (part[0] for part in parts))
    factors = [jnp.exp(part[0] - peak) for part in parts]
    total, values = (
        functools.reduce(jnp.add, (f * part[i] for f, part in zip(factors, parts, strict=True))) for i in (1, 2)
    )
    return [peak, total, values]


def warp_sums(spec: AttentionKernel, totals_ref: Any, sums_ref: Any) -> list[AnyArray]:
    """Return maximum, sum of exponentials and weighted values `[width]` of all warps for a query.

    Each row is read by itself: for a read of several rows Mosaic swizzles the memory, in units of 8 rows of 16 bits and
    not of the 4 rows that a warpgroup writes, so that entries of other columns were read.

    Args:
        spec: the shapes.
        totals_ref: maxima and sums `[2, warps]`.
        sums_ref: weighted values `[parts, warps, width]`, to be added.
    """
    parts, warps = sums_ref.shape[:2]
    reads = [[load(sums_ref.at[i, j], sum_layout(spec.width)) for i in range(parts)] for j in range(warps)]
    rows = [functools.reduce(jnp.add, (part.astype(jnp.float32) for part in row)) for row in reads]
    return combine([[totals_ref[0, j], totals_ref[1, j], row] for j, row in enumerate(rows)])


def scaled(spec: AttentionKernel, scores: AnyArray) -> AnyArray:
    """Return products of queries and keys as scores: scaled and capped."""
    scores = scores * spec.scale
    return scores if spec.softcap is None else spec.softcap * jnp.tanh(scores / spec.softcap)
