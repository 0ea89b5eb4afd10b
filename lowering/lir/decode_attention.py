"""One Pallas kernel (Mosaic GPU) for the attention of one new token of each row: rotation, cache write and attention.

A program computes some query heads of one key head of a row. Its warpgroups divide the keys, a block at a time; each
keeps the weighted sum of values, the sum and the maximum of the exponentials of its keys (`head_sums.py`), which are
combined at the end. The new key and value do not go through the cache: each program computes them from the row of the
products, and the first program of a key head writes them.

A long cache is divided among several programs of a head, and a second kernel combines their sums. A program with no key
to read ends at once, so the time follows the tokens in the cache and not its length.

Measured on one H200, bf16, 32 query heads and 8 key heads of width 64, µs: 3.9 with an empty cache, 4.6 after 128
tokens, 8.4 after 1,000, and 8.6 by tiles after 8,000 (18.5 without) with 2.5 to combine. 8 rows after 400 tokens: 6.2
by tiles, 8.3 without. With two blocks read ahead in place of one, registers did not suffice: 10.6 and 7.5. The kernels
of XLA and cuDNN take 10 together for one row after 400. In the loop of a step, of a cache of 2,400 slots after 2,000
tokens, without tiles, by query heads of a program and programs of a head: 21.2 by 2 and 16, which are two rounds of
programs, 14.5 by 2 and 8, 12.7 by 1 and 4.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rlx_jax.lowering.lir.attention_step import BLOCK_ENTRIES, WARPGROUPS, AttentionKernel, Blocks, HeadRow, NewToken
from rlx_jax.lowering.lir.head_layouts import READ_VECTOR, SUM_VECTOR, HeadLayouts, half_layout
from rlx_jax.lowering.lir.head_sums import LOWEST, attend, attend_tiles, combine, scaled, spread, sum_places, warp_sums
from rlx_jax.lowering.lir.head_tiles import query_layout
from rlx_jax.lowering.lir.mosaic import load, pl, plgpu
from rlx_jax.lowering.lir.packed_matvec import WARPS
from rlx_jax.lowering.lir.row_products import MAX_ROWS

AnyArray = Any


def load_head(
    row: HeadRow, head: AnyArray, width: int, refs: Sequence[Any], buffer: Any, vector: int = READ_VECTOR
) -> Callable[[], AnyArray]:
    """Read one head of the new token, and return a function that computes it.

    Its result is `[width]`, rounded to the dtype of the row, in f32. Reads of other heads do not wait for its barriers.

    Args:
        row: where it comes from.
        head: index of the head.
        width: its columns.
        refs: the operands.
        buffer: shared memory `[width]` of the warpgroup.
        vector: neighbouring entries in a lane.
    """
    columns, half = HeadLayouts.of(width, vector).columns, row.n_rot // 2
    source = refs[row.source].at[pl.ds(row.offset + head * width, width)]
    x, *others = (load(ref, layout=columns, optimized=False) for ref in (source, *(refs[i] for i in row.operands)))
    layout = half_layout(half) if half else None
    tables = [load(refs[i].at[pl.ds(0, half)], layout=layout, optimized=False) for i in row.tables]

    def compute() -> AnyArray:
        y = x if row.trace is None else row.trace(x, *others, axis=0)[0]
        if not half:
            return y.astype(jnp.float32)
        cos, sin = tables
        buffer[...] = y
        plgpu.commit_smem()
        first, second = (load(buffer.at[pl.ds(i * half, half)], layout=layout).astype(jnp.float32) for i in range(2))
        buffer[pl.ds(0, half)] = (first * cos - second * sin).astype(y.dtype)
        buffer[pl.ds(half, half)] = (second * cos + first * sin).astype(y.dtype)
        plgpu.commit_smem()
        return load(buffer, layout=columns).astype(jnp.float32)

    return compute


def run_program(
    spec: AttentionKernel, refs: Sequence[Any], out_ref: Any, scratch: Sequence[Any], interpret: bool
) -> None:
    """Run one warpgroup of one program of the kernel.

    Args:
        spec: the shapes.
        refs: the operands of `decode_attention`.
        out_ref: the result `[rows, heads * width]`, or the parts `[rows, splits, heads, 3, width]` of several programs
            of a head.
        scratch: shared memory for a head of each warpgroup, for its sums, and a barrier that all warpgroups pass.
    """
    width, groups = spec.width, WARPGROUPS
    buffers, queries_ref, totals_ref, sums_ref, done = scratch
    group, split, program, row = (lax.axis_index(name) for name in ("group", "split", "program", "row"))
    refs = [ref.at[row if ref.shape[0] > 1 else 0] for ref in refs]
    *operands, start_ref, length_ref, position_ref, keys_ref, values_ref = refs
    out_ref = out_ref.at[row]
    first_head = program * spec.heads_at_once
    kv_head = first_head * spec.kv_heads // spec.heads
    step = NewToken.of(spec, start_ref[0], length_ref[0], position_ref[0])
    first_block = step.first // spec.block + split * groups + group
    blocks = Blocks(spec, (keys_ref, values_ref), kv_head * width, first_block, spec.splits * groups)
    ahead = blocks.read(jnp.int32(0))  # before the query, which takes as long to make
    read = functools.partial(load_head, width=width, refs=operands, buffer=buffers.at[group])
    # With tiles, a warpgroup has some of the queries; else, all of them.
    slots: list[Any] = list(range(0, queries_ref.shape[0], groups) if spec.has_tiles else range(spec.heads_at_once))
    slots = [group + i for i in slots] if spec.has_tiles else slots
    heads = [first_head + jnp.minimum(i, spec.heads_at_once - 1) for i in slots]
    new_heads = [*(read(spec.query, head) for head in heads), read(spec.key, kv_head)]
    new_heads.append(read(spec.value, kv_head, vector=SUM_VECTOR))
    *queries, key, value = [compute() for compute in new_heads]
    last = step.start + length_ref[0] - 1
    if spec.has_tiles:
        for i, query in zip(slots, queries, strict=True):
            queries_ref[i] = query.astype(queries_ref.dtype)
        plgpu.barrier_arrive(done)
        plgpu.barrier_wait(done)
        tile = load(queries_ref, query_layout(queries_ref.shape[0]), optimized=False)
        warps = pl.ds(group * WARPS, WARPS)
        totals_ref[0, warps], totals_ref[1, warps], sums_ref[warps] = attend_tiles(
            spec, step, tile, blocks, ahead, last, interpret
        )
        plgpu.barrier_arrive(done)
        plgpu.barrier_wait(done)
    else:
        for i, (peaks, totals, values) in enumerate(attend(spec, step, queries, blocks, ahead, last)):
            totals_ref[group, i, 0], totals_ref[group, i, 1] = peaks, totals
            # In two parts of bf16: a lane can store 8 of them, but not 8 of f32.
            sums_ref[group, i, 0] = high = values.astype(jnp.bfloat16)
            sums_ref[group, i, 1] = (values - high.astype(jnp.float32)).astype(jnp.bfloat16)
        plgpu.barrier_arrive(done)
        pl.when(group == 0)(lambda: plgpu.barrier_wait(done))
    is_first = step.is_written & (split == 0)  # the first program of a head adds the new token
    is_read = is_first & step.reads(spec, step.start)
    for i, head, query in zip(slots, heads, queries, strict=True):

        @pl.when(i < spec.heads_at_once if spec.has_tiles else group == 0)
        def _(i: Any = i, head: AnyArray = head, query: AnyArray = query) -> None:
            if spec.has_tiles:
                parts = warp_sums(spec, (totals_ref, sums_ref), i)
            else:
                parts = [sum_places(spec, [ref.at[:, i] for ref in (totals_ref, sums_ref)])]
            new_score = scaled(spec, (query * key).sum(axis=0))
            one = spread(jnp.where(is_read, 1.0, 0.0), width)
            parts.append([spread(jnp.where(is_read, new_score, LOWEST), width), one, value * one])
            if spec.has_sinks:
                sink = jnp.where(split == 0, operands[-1][head].astype(jnp.float32), LOWEST)
                parts.append([spread(sink, width), spread(1.0, width), spread(0.0, width)])
            write_result(spec, out_ref, split, head, combine(parts))

    @pl.when(is_first & (group == 0) & (lax.rem(first_head, spec.heads // spec.kv_heads) == 0))
    def _() -> None:
        for ref, head in ((keys_ref, key), (values_ref, value)):
            ref[step.slot, pl.ds(kv_head * width, width)] = head.astype(ref.dtype)


def write_result(
    spec: AttentionKernel, out_ref: Any, split: AnyArray, head: AnyArray, parts: Sequence[AnyArray]
) -> None:
    """Write the result of a head, or its maximum, sum and weighted values if several programs share its keys."""

    if spec.splits == 1:
        _, total, values = parts
        out_ref[pl.ds(head * spec.width, spec.width)] = (values / total).astype(out_ref.dtype)
        return
    for i, part in enumerate(parts):
        out_ref[split, head, i] = part


def scratch_of_heads(spec: AttentionKernel, dtype: Any) -> list[Any]:
    """Return the shared memory of a program for heads, queries and sums, and the barrier."""
    groups, at_once, width = WARPGROUPS, spec.heads_at_once, spec.width
    buffers, barrier = plgpu.SMEM((groups, width), dtype), plgpu.Barrier(num_arrivals=groups)
    if not spec.has_tiles:
        totals = plgpu.SMEM((groups, at_once, 2, spec.block), jnp.float32)
        return [buffers, buffers, totals, plgpu.SMEM((groups, at_once, 2, spec.block, width), jnp.bfloat16), barrier]
    sums = plgpu.SMEM((groups * WARPS, MAX_ROWS, width), jnp.float32)
    queries = plgpu.SMEM((4 if at_once <= 4 else MAX_ROWS, width), dtype)
    return [buffers, queries, plgpu.SMEM((2, groups * WARPS, MAX_ROWS), jnp.float32), sums, barrier]


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
    inputs = [*operands, *numbers]

    def body(*refs: Any) -> None:
        num_inputs = len(inputs) + 2
        run_program(spec, refs[:num_inputs], refs[num_inputs], refs[num_inputs + 1 :], interpret is not None)

    run = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, values.dtype if splits == 1 else jnp.float32),
        grid=(heads // spec.heads_at_once, splits, rows),
        grid_names=("program", "split", "row"),
        num_threads=WARPGROUPS,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=4 * BLOCK_ENTRIES),
        scratch_types=scratch_of_heads(spec, values.dtype),
        **({} if interpret is None else {"interpret": interpret}),
    )
    refs = [jax.new_ref(x) for x in (keys, values)]
    result = run(*inputs, *refs)
    if splits > 1:
        *_, total, weighted = combine([[result[:, i, :, j] for j in range(3)] for i in range(splits)])
        result = (weighted / total).astype(values.dtype).reshape(rows, -1)
    return (result, *(jax.freeze(ref) for ref in refs))
