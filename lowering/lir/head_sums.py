"""Softmax in one pass over the blocks of keys of a warpgroup (Milakov and Gimelshein 2018).

With few rows and keys each entry is multiplied by itself, in float32; else all heads of a program are multiplied with a
block at once, on matrix units (`head_tiles.py`), with weights rounded to bf16.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from rlx_jax.lowering.lir.attention_step import WARPGROUPS, AttentionKernel, Blocks, NewToken
from rlx_jax.lowering.lir.head_layouts import READ_VECTOR, SUM_VECTOR, HeadLayouts
from rlx_jax.lowering.lir.head_tiles import WARP_KEYS, result_layout, score, score_layout, weigh
from rlx_jax.lowering.lir.mosaic import load, plgpu
from rlx_jax.lowering.lir.packed_matvec import WARPS
from rlx_jax.lowering.lir.row_products import MAX_ROWS

AnyArray = Any

# A score that no key reaches, finite so that differences are.
LOWEST = -1e30


def attend(
    spec: AttentionKernel,
    step: NewToken,
    queries: Sequence[AnyArray],
    blocks: Blocks,
    ahead: Sequence[Any],
    last: AnyArray,
) -> list[list[AnyArray]]:
    """Return maximum, sum of exponentials and weighted sum of values for each query, of the keys of a warpgroup.

    Args:
        spec: the shapes.
        step: the numbers of the step.
        queries: queries `[width]`, f32.
        blocks: the blocks of the warpgroup.
        ahead: keys and values of the first block, read before.
        last: position of the last token.

    Returns:
        for each query, the maximum and the sum `[block]` and the weighted values `[block, width]`, of the keys at each
        place of a block.
    """
    block, layouts = spec.block, HeadLayouts.of(spec.width, READ_VECTOR)
    shape = (block, spec.width)
    places = plgpu.broadcasted_iota(jnp.int32, (block,), 0, layout=layouts.rows)
    across = functools.partial(lax.broadcast_in_dim, shape=shape, broadcast_dimensions=(0,))

    def add_block(i: AnyArray, carry: Any) -> Any:
        sums, (keys, values) = carry
        following = blocks.read(i + 1)
        keys, values = keys.astype(jnp.float32), values.astype(jnp.float32)
        first, slot = blocks.row(i)
        is_allowed = step.allowed(spec, places + slot, first, last)
        results = []
        for query, (peak, total, values_sum) in zip(queries, sums, strict=True):
            scores = scaled(spec, (keys * lax.broadcast_in_dim(query, shape, (1,))).sum(axis=1))
            scores = jnp.where(is_allowed, scores, LOWEST)
            new_peak = jnp.maximum(peak, scores)
            weights = jnp.where(is_allowed, jnp.exp(scores - new_peak), 0.0)
            kept = jnp.exp(peak - new_peak)
            results.append((new_peak, total * kept + weights, values_sum * across(kept) + values * across(weights)))
        return results, following

    def full(value: float, shape: tuple[int, ...], layout: Any) -> AnyArray:
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    start = [
        (full(LOWEST, (block,), layouts.rows), full(0.0, (block,), layouts.rows), full(0.0, shape, layouts.tile))
        for _ in queries
    ]
    sums, _ = lax.fori_loop(0, blocks.count(step.end), add_block, (start, ahead))
    return [list(s) for s in sums]


def attend_tiles(
    spec: AttentionKernel, step: NewToken, queries: AnyArray, blocks: Blocks, ahead: Sequence[Any], last: AnyArray,
    interpret: bool,
) -> Any:  # fmt: skip
    """Return maximum and sum of exponentials `[WARPS, 8]`, and weighted values `[WARPS, 8, width]`.

    Args:
        spec, step, blocks, ahead, last: as in `attend`.
        queries: queries `[4 or 8, width]`, of which others repeat one.
        interpret: whether the kernel runs in Mosaic's interpreter.
    """
    shape = (WARPS, MAX_ROWS, WARP_KEYS)
    warps, keys = (plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=score_layout()) for axis in (0, 2))
    places = warps * WARP_KEYS + keys

    def across(x: AnyArray, size: int) -> AnyArray:
        return lax.broadcast_in_dim(x, (WARPS, MAX_ROWS, size), (0, 1))

    def add_block(i: AnyArray, carry: Any) -> Any:
        (peak, total, values_sum), (keys, values) = carry
        following = blocks.read(i + 1)
        first, slot = blocks.row(i)
        is_allowed = step.allowed(spec, places + slot, first, last)
        scores = jnp.where(is_allowed, scaled(spec, score(queries, keys, interpret)), LOWEST)
        new_peak = jnp.maximum(peak, scores.max(axis=2))
        weights = jnp.where(is_allowed, jnp.exp(scores - across(new_peak, WARP_KEYS)), 0.0)
        kept = jnp.exp(peak - new_peak)
        values_sum = values_sum * across(kept, spec.width) + weigh(weights.astype(values.dtype), values, interpret)
        return (new_peak, total * kept + weights.sum(axis=2), values_sum), following

    def full(value: float, shape: tuple[int, ...], layout: Any) -> AnyArray:
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    rows = score_layout().reduce(2)
    start = [full(LOWEST, shape[:2], rows), full(0.0, shape[:2], rows)]
    start.append(full(0.0, (*shape[:2], spec.width), result_layout()))
    sums, _ = lax.fori_loop(0, blocks.count(step.end), add_block, (tuple(start), tuple(ahead)))
    return sums


def spread(number: AnyArray, width: int) -> AnyArray:
    """Return a row of one f32 number."""
    row = jnp.broadcast_to(jnp.asarray(number, jnp.float32), (width,))
    return plgpu.layout_cast(row, HeadLayouts.of(width, SUM_VECTOR).columns)


def combine(parts: Sequence[Sequence[AnyArray]]) -> list[AnyArray]:
    """Return maximum, sum of exponentials and weighted values `[width]` of several parts of the keys of a query."""
    peak = functools.reduce(jnp.maximum, (part[0] for part in parts))
    factors = [jnp.exp(part[0] - peak) for part in parts]
    total, values = (
        functools.reduce(jnp.add, (f * part[i] for f, part in zip(factors, parts, strict=True))) for i in (1, 2)
    )
    return [peak, total, values]


def sum_places(spec: AttentionKernel, refs: Sequence[Any]) -> list[AnyArray]:
    """Return maximum, sum of exponentials and weighted values `[width]` of all places of all warpgroups.

    Args:
        spec: the shapes.
        refs: maxima and sums `[groups, 2, block]`, and weighted values `[groups, 2, block, width]` in two parts.
    """
    layouts = HeadLayouts.of(spec.width, SUM_VECTOR)
    peaks, totals = ([load(refs[0].at[g, j], layout=layouts.rows) for g in range(WARPGROUPS)] for j in range(2))
    peak = functools.reduce(jnp.maximum, peaks).max(axis=0)
    factors = [jnp.exp(p - peak) for p in peaks]
    total = functools.reduce(jnp.add, (f * t for f, t in zip(factors, totals, strict=True))).sum(axis=0)
    across = functools.partial(lax.broadcast_in_dim, shape=(spec.block, spec.width), broadcast_dimensions=(0,))
    parts = [(g, part) for g in range(WARPGROUPS) for part in range(2)]
    tiles = (load(refs[1].at[place], layout=layouts.tile).astype(jnp.float32) for place in parts)
    values = functools.reduce(jnp.add, (tile * across(factors[g]) for tile, (g, _) in zip(tiles, parts, strict=True)))
    return [spread(peak, spec.width), spread(total, spec.width), values.sum(axis=0)]


def warp_sums(spec: AttentionKernel, refs: Sequence[Any], slot: AnyArray) -> list[list[AnyArray]]:
    """Return maximum, sum of exponentials and weighted values `[width]` of each warp for a query.

    Args:
        spec: the shapes.
        refs: maxima and sums `[2, warps, 8]`, and weighted values `[warps, 8, width]`.
        slot: number of the query.
    """
    totals_ref, values_ref = refs
    columns = HeadLayouts.of(spec.width, SUM_VECTOR).columns
    return [
        [
            *(spread(totals_ref[i, warp, slot], spec.width) for i in range(2)),
            load(values_ref.at[warp, slot], layout=columns, optimized=False),
        ]
        for warp in range(WARPGROUPS * WARPS)
    ]


def scaled(spec: AttentionKernel, scores: AnyArray) -> AnyArray:
    """Return products of queries and keys as scores: scaled and capped."""
    scores = scores * spec.scale
    return scores if spec.softcap is None else spec.softcap * jnp.tanh(scores / spec.softcap)
