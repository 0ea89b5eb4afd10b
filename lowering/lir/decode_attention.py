"""One Pallas kernel (Mosaic GPU) for the attention of one new token of each row: rotation, cache write and attention.

A program computes some query heads of one key head of a row. Its warpgroups divide the keys, a block at a time; each
warp keeps the weighted sum of values, the sum and the maximum of the exponentials of its keys (`head_sums.py`), which
are combined at the end. The new key and value do not go through the cache: each program computes them from the row of
the products, and the first program of a key head writes them.

A long cache, or one of wide heads, is divided among several programs of a head, and a second kernel combines their
sums. A program with no key to read ends at once, so the time follows the tokens in the cache and not its length.

Measured on one H200, bf16, 32 query heads and 8 key heads of width 64, µs: 3.9 with an empty cache, 4.6 after 128
tokens, 8.4 after 1,000, when warps shared all sums of a block in memory; sums in registers take off about 0.7. By tiles
8.6 after 8,000 (18.5 without) with 2.5 to combine, and 6.2 for 8 rows after 400 tokens (8.3 without), 34.7 after
8,100, as fast as weights are read; XLA's form takes about 40. With two blocks read ahead in place of one, registers did
not suffice: 10.6, 7.5 and 45.4. The kernels of XLA and cuDNN take 10 together for one row after 400. Of 4 query heads
of width 256 after 400 tokens: 14.1 by one program a head, 8.3 by 8. In the loop of a step, of a cache of 2,400 slots
after 2,000 tokens, without tiles, by query heads of a program and programs of a head: 21.2 by 2 and 16, which are two
rounds of programs, 14.5 by 2 and 8, 12.7 by 1 and 4.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rlx_jax.lowering.lir.attention_step import AttentionKernel, Blocks, HeadRow, NewToken
from rlx_jax.lowering.lir.head_layouts import HeadLayouts, half_layout, sum_layout
from rlx_jax.lowering.lir.head_sums import LOWEST, attend, attend_tiles, combine, scaled, warp_sums
from rlx_jax.lowering.lir.head_tiles import query_layout
from rlx_jax.lowering.lir.mosaic import WARPS, load, pl, plgpu, run_kernel, store
from rlx_jax.lowering.lir.row_products import MAX_ROWS

AnyArray = Any


def make_head(row: HeadRow, head: AnyArray, width: int, refs: Sequence[Any], buffers: Any) -> Iterator[None]:
    """Read one head of the new token, compute it and write it, rounded to the dtype of the row, to `buffers[1]`.

    It stops after the read, so that other heads are read too, and after each write, for a barrier of all of them.

    Args:
        row: where it comes from.
        head: index of the head.
        width: its columns.
        refs: the operands.
        buffers: shared memory `[2, width]` of the warpgroup for this head.
    """
    columns, half = HeadLayouts.of(width).columns, row.n_rot // 2
    source = refs[row.source].at[pl.ds(row.offset + head * width, width)]
    x, *others = (load(ref, columns) for ref in (source, *(refs[i] for i in row.operands)))
    layout = half_layout(half) if half else None
    tables = [load(refs[i].at[pl.ds(0, half)], layout) for i in row.tables]
    yield
    y = x if row.trace is None else row.trace(x, *others, axis=0)[0]
    if row.n_rot < width:
        buffers[1] = y
    if half:
        buffers[0] = y
    yield
    if half:
        cos, sin = tables
        parts = (load(buffers.at[0, pl.ds(i * half, half)], layout, optimized=True) for i in range(2))
        first, second = (part.astype(jnp.float32) for part in parts)
        buffers[1, pl.ds(0, half)] = (first * cos - second * sin).astype(y.dtype)
        buffers[1, pl.ds(half, half)] = (second * cos + first * sin).astype(y.dtype)
    yield


def run_program(spec: AttentionKernel, refs: Any, interpret: bool) -> None:
    """Run one warpgroup of one program of the kernel.

    Args:
        spec: the shapes.
        refs: its references and its place; `out` is the result `[rows, heads * width]`, or the parts
            `[rows, splits, heads, 3, width]` of several programs of a head.
        interpret: whether the kernel runs in Mosaic's interpreter.
    """
    group, split, row = refs.group, refs.split, refs.row
    operands, (start_ref, length_ref, position_ref), caches = (
        [ref.at[row if ref.shape[0] > 1 else 0] for ref in part] for part in (refs.operands, refs.numbers, refs.caches)
    )
    buffers, totals_ref, sums_ref, count = refs.heads.at[group], refs.totals, refs.sums, spec.heads_at_once
    first_head = refs.program * count
    kv_head = first_head * spec.kv_heads // spec.heads
    step = NewToken.of(spec, start_ref[0], length_ref[0], position_ref[0])
    first_block = step.first // spec.block + split * spec.groups + group
    blocks = Blocks(spec, caches, kv_head * spec.width, first_block, spec.splits * spec.groups)
    ahead = blocks.read(jnp.int32(0))  # before the query, which takes as long to make
    rows = [*((spec.query, first_head + i) for i in range(count)), (spec.key, kv_head), (spec.value, kv_head)]
    new_heads = [make_head(*head, spec.width, operands, buffers.at[i]) for i, head in enumerate(rows)]
    for stage in range(3):
        for new_head in new_heads:
            next(new_head)
        if stage:
            plgpu.commit_smem()
    if spec.has_tiles:
        size = 4 if count <= 4 else MAX_ROWS
        queries = load(buffers.at[pl.ds(0, size), 1], query_layout(size))
        tiled_sums = attend_tiles(spec, step, blocks, ahead, queries, interpret)
        store_sums(refs, slice(None), *tiled_sums)
    else:
        for i, sums in enumerate(attend(spec, step, blocks, ahead, [head_of(spec, buffers, i) for i in range(count)])):
            store_sums(refs, i, *sums)
    plgpu.commit_smem()
    plgpu.barrier_arrive(refs.done)
    plgpu.barrier_wait(refs.done)
    is_first = step.is_written & (split == 0)  # the first program of a head adds the new token
    for start in range(0, count, spec.groups):

        @pl.when(start + group < count)
        def _(slot: Any = start + group) -> None:
            parts = [
                warp_sums(spec, totals_ref.at[:, slot], sums_ref.at[:, slot]),
                new_part(spec, buffers, slot, is_first & step.reads(spec, step.start)),
            ]
            if spec.has_sinks:
                sink = operands[-1][first_head + slot].astype(jnp.float32)
                parts.append([jnp.where(split == 0, sink, LOWEST), 1.0, 0.0])
            write_result(spec, refs.out.at[row], split, first_head + slot, combine(parts))

    @pl.when(is_first & (group == 0) & (lax.rem(first_head, spec.heads // spec.kv_heads) == 0))
    def _() -> None:
        for i, ref in enumerate(caches):
            place = step.slot // spec.warp_keys, lax.rem(step.slot, spec.warp_keys)
            head = load(buffers.at[count + i, 1], HeadLayouts.of(spec.width).columns, optimized=True)
            store(ref.at[*place, pl.ds(kv_head * spec.width, spec.width)], head.astype(ref.dtype))


def store_sums(refs: Any, heads: Any, peaks: AnyArray, totals: AnyArray, values: AnyArray) -> None:
    """Write the maximum, the sum and the weighted values of each warp for some heads to shared memory."""
    warps = pl.ds(refs.group * WARPS, WARPS)
    store(refs.totals.at[0, heads, warps], peaks)
    store(refs.totals.at[1, heads, warps], totals)
    if refs.sums.dtype == jnp.float32:
        store(refs.sums.at[0, heads, warps], values)
        return
    # In two parts of bf16: a lane can store 8 of them, but not 8 of f32.
    high = values.astype(jnp.bfloat16)
    store(refs.sums.at[0, heads, warps], high)
    store(refs.sums.at[1, heads, warps], (values - high.astype(jnp.float32)).astype(jnp.bfloat16))


def head_of(spec: AttentionKernel, buffers: Any, number: Any, layout: Any = None) -> AnyArray:
    """Return a head of the new token `[width]`, f32."""
    layout = HeadLayouts.of(spec.width).columns if layout is None else layout
    return load(buffers.at[number, 1], layout).astype(jnp.float32)


def new_part(spec: AttentionKernel, buffers: Any, slot: Any, is_read: AnyArray) -> list[AnyArray]:
    """Return maximum, sum of exponentials and weighted values of the new token for a query."""
    query, key = (head_of(spec, buffers, i) for i in (slot, spec.heads_at_once))
    value = head_of(spec, buffers, spec.heads_at_once + 1, sum_layout(spec.width))
    one = jnp.where(is_read, 1.0, 0.0)
    return [jnp.where(is_read, scaled(spec, (query * key).sum(axis=0)), LOWEST), one, value * one]


def write_result(
    spec: AttentionKernel, out_ref: Any, split: AnyArray, head: AnyArray, parts: Sequence[AnyArray]
) -> None:
    """Write the result of a head, or its maximum, sum and weighted values if several programs share its keys."""

    peak, total, values = parts
    if spec.splits == 1:
        store(out_ref.at[pl.ds(head * spec.width, spec.width)], (values / total).astype(out_ref.dtype))
        return
    for i, part in enumerate((peak, total, values)):
        row = part if i == 2 else jnp.broadcast_to(part, (spec.width,))
        store(out_ref.at[split, head, i], plgpu.layout_cast(row, sum_layout(spec.width)))


def scratch_of_heads(spec: AttentionKernel, dtype: Any) -> dict[str, Any]:
    """Return the shared memory for the heads of each warpgroup and for sums, and a barrier that all warpgroups pass."""
    count, warps = spec.heads_at_once, spec.groups * WARPS
    parts, slots, sums_dtype = (1, MAX_ROWS, jnp.float32) if spec.has_tiles else (2, count, jnp.bfloat16)
    return {
        "heads": plgpu.SMEM((spec.groups, max(count + 2, 4 if count <= 4 else MAX_ROWS), 2, spec.width), dtype),
        "totals": plgpu.SMEM((2, slots, warps), jnp.float32),
        "sums": plgpu.SMEM((parts, slots, warps, spec.width), sums_dtype),
        "done": plgpu.Barrier(num_arrivals=spec.groups),
    }


@functools.partial(jax.jit, static_argnums=(0, 5))
def decode_attention(
    spec: AttentionKernel, operands: Sequence[AnyArray], numbers: Sequence[AnyArray], keys: AnyArray, values: AnyArray,
    interpret: Any = None,
) -> tuple[AnyArray, AnyArray, AnyArray]:  # fmt: skip
    """Compute the attention of one new token, and write its key and value.

    Args:
        spec: the shapes.
        operands: heads, weights, cos and sin, sinks, which `spec` names by index: `[rows, …]`; `[1, …]` for all.
        numbers: start, lengths and the query's position, i32 `[rows, 1]`.
        keys, values: the caches `[rows, keys, kv_heads * width]`.
        interpret: parameters of Mosaic's interpreter; None to compile.

    Returns:
        the result `[rows, heads * width]` and the caches.
    """
    rows, splits, heads, width = spec.rows, spec.splits, spec.heads, spec.width
    shape = (rows, heads * width) if splits == 1 else (rows, splits, heads, 3, width)
    by_warp = (rows, keys.shape[1] // spec.warp_keys, spec.warp_keys, keys.shape[2])
    refs = [jax.new_ref(x.reshape(by_warp)) for x in (keys, values)]
    (result,) = run_kernel(
        lambda refs: run_program(spec, refs, interpret is not None),
        {"operands": [*operands], "numbers": [*numbers], "caches": refs},
        {"out": jax.ShapeDtypeStruct(shape, values.dtype if splits == 1 else jnp.float32)},
        scratch_of_heads(spec, values.dtype), {"program": heads // spec.heads_at_once, "split": splits, "row": rows},
        spec.groups, interpret, approx_math=True, unsafe_no_auto_barriers=True,
    )  # fmt: skip
    if splits > 1:
        *_, total, weighted = combine([[result[:, i, :, j] for j in range(3)] for i in range(splits)])
        result = (weighted / total).astype(values.dtype).reshape(rows, -1)
    return (result, *(jax.freeze(ref).reshape(keys.shape) for ref in refs))
