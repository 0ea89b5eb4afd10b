"""One Pallas kernel (Mosaic GPU) for the attention of one new token of each row: rotation, cache write and attention.

A program computes some query heads of one key head of a row. Its warpgroups divide the keys, a block at a time; each
keeps the weighted sum of values, the sum and the maximum of the exponentials of its keys (a softmax in one pass,
Milakov and Gimelshein 2018), and the first one combines them. The new key and value do not go through the cache: each
program computes them from the row of the products, and the first program of a key head writes them.

A long cache is divided among several programs of a head, and a second kernel combines their sums. A program with no key
to read ends at once, so the time follows the tokens in the cache and not its length.

Measured on one H200, bf16, 32 query heads and 8 key heads of width 64, µs: 3.9 with an empty cache, 4.6 after 128
tokens, 8.4 after 1,000, and 18.5 and 2.5 to combine after 8,000. The kernels of XLA and cuDNN take 10 together after
400. In the loop of a step, of a cache of 2,400 slots after 2,000 tokens, by query heads of a program and programs of a
head: 21.2 by 2 and 16, which are two rounds of programs, 14.5 by 2 and 8, 12.7 by 1 and 4.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rlx_jax.dataclasses import dataclass
from rlx_jax.lowering.lir.head_layouts import READ_VECTOR, SUM_VECTOR, HeadLayouts, half_layout
from rlx_jax.lowering.lir.kernel_trace import KernelTrace
from rlx_jax.lowering.lir.matvec import MULTIPROCESSORS
from rlx_jax.lowering.lir.mosaic import load, pl, plgpu

AnyArray = Any

# Slots of a cache, at most: after 8,000 tokens XLA's form is faster, by 4 µs a layer of Llama 1B on an H200.
MAX_KEYS = 4096

# Rows of the batch, at most, and slots of a cache of several rows: longer ones were not measured.
MAX_ROWS, MAX_KEYS_OF_ROWS = 8, 2048

# Warpgroups of a program.
WARPGROUPS = 4

# Entries of a block of keys: 16 in each thread of a warpgroup.
BLOCK_ENTRIES = 2048

# A score that no key reaches, finite so that differences are.
LOWEST = -1e30


@dataclass(frozen=True)
class HeadRow:
    """Where the heads of the new query, key or value come from.

    Attributes:
        source: index of the row among the operands.
        offset: first entry of the first head.
        trace: ops on the entries of one head before the rotation, such as a norm; None for none.
        operands: indices of the other operands of `trace`.
        n_rot: columns of a head that are rotated, in halves; 0 for none.
        tables: indices of cos and sin, f32.
    """

    source: int
    offset: int
    trace: KernelTrace | None
    operands: tuple[int, ...]
    n_rot: int
    tables: tuple[int, ...]


@dataclass(frozen=True)
class AttentionKernel:
    """The shapes of one kernel.

    Attributes:
        rows: rows of the batch, each with a cache and a new token of its own.
        heads, kv_heads, width: query heads, key heads, and columns of a head.
        keys: slots of the cache.
        is_ring: whether position p is in slot p mod `keys`.
        window: a query reads this many keys, at most; None for all.
        scale: factor of the scores.
        softcap: as in `AttentionOp`.
        has_sinks: whether the last operand is sinks `[heads]`.
        query, key, value: the new token.
        heads_at_once: query heads of a program.
        splits: programs that share the keys of a head.
    """

    rows: int
    heads: int
    kv_heads: int
    width: int
    keys: int
    is_ring: bool
    window: int | None
    scale: float
    softcap: float | None
    has_sinks: bool
    query: HeadRow
    key: HeadRow
    value: HeadRow
    heads_at_once: int
    splits: int


def block_of(width: int) -> int:
    """Return the keys of a block, of heads of this width."""
    return BLOCK_ENTRIES // width


def divide(rows: int, heads: int, kv_heads: int, keys: int) -> tuple[int, int]:
    """Return the query heads of a program, and the programs that share the keys of a head.

    Programs of one query head read the keys of a key head several times, but from the L2 cache and in parallel. Two
    heads of a program share a key head.
    """
    pair = 2 if heads // kv_heads % 2 == 0 else 1
    if keys <= 2048:  # one program on each multiprocessor
        return (pair if rows * heads > MULTIPROCESSORS else 1), 1
    return 1, min(16, max(1, MULTIPROCESSORS // (rows * heads)))


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
        y = x if row.trace is None else row.trace(x, *others, by_axis=True)[0]
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


@dataclass(frozen=True)
class NewToken:
    """The numbers of one step, each a scalar.

    Attributes:
        start: tokens in the cache before it.
        position: position of the query.
        slot: slot of the new token.
        is_written: whether there is a new token and a slot for it.
        first, end: the slots that the query may read.
    """

    start: AnyArray
    position: AnyArray
    slot: AnyArray
    is_written: AnyArray
    first: AnyArray
    end: AnyArray

    @staticmethod
    def of(spec: AttentionKernel, start: AnyArray, length: AnyArray, position: AnyArray) -> NewToken:
        """Return the numbers for the operands of the cache update and the query's position."""
        slot = lax.rem(start, spec.keys) if spec.is_ring else start
        first = 0 if spec.is_ring or spec.window is None else lax.max(position - spec.window + 1, 0)
        end = lax.min(start + length if spec.is_ring else position + 1, spec.keys)
        is_written = jnp.logical_and(length > 0, slot < spec.keys)
        return NewToken(start, position, slot, is_written, jnp.int32(first), end)

    def allowed(self, spec: AttentionKernel, slots: AnyArray, first: AnyArray, last: AnyArray) -> AnyArray:
        """Return which slots of the cache the query reads, other than the new token's.

        Args:
            spec: the shapes.
            slots: numbers of slots, i32.
            first: slots before it are another block's.
            last: position of the last token, for a ring.
        """
        is_allowed = (slots >= lax.max(first, self.first)) & (slots < self.end)
        is_allowed &= (slots != self.slot) | jnp.logical_not(self.is_written)
        if spec.is_ring:
            back = lax.rem(last, spec.keys) - slots
            back = jnp.where(back < 0, back + spec.keys, back)  # tokens after the one in a slot
            is_allowed &= back <= last
            is_allowed &= self.reads(spec, last - back)
        return is_allowed

    def reads(self, spec: AttentionKernel, position: AnyArray) -> AnyArray:
        """Return whether the query reads the key of a position: not after its own, and in its window."""
        distance = self.position - position
        return (distance >= 0) & (distance < (spec.window or 2**31 - 1))


@dataclass(frozen=True)
class Blocks:
    """The blocks of keys and values that a warpgroup reads: every `stride`-th.

    Attributes:
        spec: the shapes.
        caches: keys and values of the row `[keys, kv_heads * width]`.
        column: first column of the key head.
        first: number of the first block.
        stride: blocks from one to the next.
    """

    spec: AttentionKernel
    caches: Sequence[Any]
    column: AnyArray
    first: AnyArray
    stride: int

    def row(self, index: AnyArray) -> tuple[AnyArray, AnyArray]:
        """Return the first slot of a block, and the first slot that is read for it, which the last block repeats."""
        first = (self.first + index * self.stride) * block_of(self.spec.width)
        return first, lax.min(first, self.spec.keys - block_of(self.spec.width))

    def read(self, index: AnyArray) -> tuple[AnyArray, ...]:
        """Return the keys and values of a block `[block, width]`."""
        layout = HeadLayouts.of(self.spec.width, READ_VECTOR).tile
        place = pl.ds(self.row(index)[1], block_of(self.spec.width)), pl.ds(self.column, self.spec.width)
        return tuple(load(ref.at[place], layout=layout, optimized=False) for ref in self.caches)


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
    block, layouts = block_of(spec.width), HeadLayouts.of(spec.width, READ_VECTOR)
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
    num_blocks = lax.max((step.end + block - 1) // block - blocks.first + blocks.stride - 1, 0) // blocks.stride
    sums, _ = lax.fori_loop(0, num_blocks, add_block, (start, ahead))
    return [list(s) for s in sums]


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
    across = functools.partial(
        lax.broadcast_in_dim, shape=(block_of(spec.width), spec.width), broadcast_dimensions=(0,)
    )
    parts = [(g, part) for g in range(WARPGROUPS) for part in range(2)]
    tiles = (load(refs[1].at[place], layout=layouts.tile).astype(jnp.float32) for place in parts)
    values = functools.reduce(jnp.add, (tile * across(factors[g]) for tile, (g, _) in zip(tiles, parts, strict=True)))
    return [spread(peak, spec.width), spread(total, spec.width), values.sum(axis=0)]


def run_program(spec: AttentionKernel, refs: Sequence[Any], out_ref: Any, scratch: Sequence[Any]) -> None:
    """Run one warpgroup of one program of the kernel.

    Args:
        spec: the shapes.
        refs: the operands of `decode_attention`.
        out_ref: the result `[rows, heads * width]`, or the parts `[rows, splits, heads, 3, width]` of several programs
            of a head.
        scratch: shared memory for a head of each warpgroup, for its sums, and a barrier that all warpgroups pass.
    """
    width = spec.width
    buffers, totals_ref, sums_ref, done = scratch
    group, split, program, row = (lax.axis_index(name) for name in ("group", "split", "program", "row"))
    refs = [ref.at[row if ref.shape[0] > 1 else 0] for ref in refs]
    *operands, start_ref, length_ref, position_ref, keys_ref, values_ref = refs
    out_ref = out_ref.at[row]
    first_head = program * spec.heads_at_once
    kv_head = first_head * spec.kv_heads // spec.heads
    heads = [first_head + i for i in range(spec.heads_at_once)]
    step = NewToken.of(spec, start_ref[0], length_ref[0], position_ref[0])
    first_block = step.first // block_of(spec.width) + split * WARPGROUPS + group
    blocks = Blocks(spec, (keys_ref, values_ref), kv_head * width, first_block, spec.splits * WARPGROUPS)
    ahead = blocks.read(jnp.int32(0))  # before the query, which takes as long to make
    read = functools.partial(load_head, width=width, refs=operands, buffer=buffers.at[group])
    new_heads = [*(read(spec.query, head) for head in heads), read(spec.key, kv_head)]
    new_heads.append(read(spec.value, kv_head, vector=SUM_VECTOR))
    *queries, key, value = [compute() for compute in new_heads]
    sums = attend(spec, step, queries, blocks, ahead, step.start + length_ref[0] - 1)
    for i, (peaks, totals, values) in enumerate(sums):
        totals_ref[group, i, 0], totals_ref[group, i, 1] = peaks, totals
        # In two parts of bf16: a lane can store 8 of them, but not 8 of f32.
        sums_ref[group, i, 0] = high = values.astype(jnp.bfloat16)
        sums_ref[group, i, 1] = (values - high.astype(jnp.float32)).astype(jnp.bfloat16)
    plgpu.barrier_arrive(done)

    @pl.when(group == 0)
    def _() -> None:
        plgpu.barrier_wait(done)
        is_first = step.is_written & (split == 0)  # the first program of a head adds the new token
        is_read = is_first & step.reads(spec, step.start)
        for i, (head, query) in enumerate(zip(heads, queries, strict=True)):
            parts = [sum_places(spec, [ref.at[:, i] for ref in (totals_ref, sums_ref)])]
            score = scaled(spec, (query * key).sum(axis=0))
            one = spread(jnp.where(is_read, 1.0, 0.0), width)
            parts.append([spread(jnp.where(is_read, score, LOWEST), width), one, value * one])
            if spec.has_sinks:
                sink = jnp.where(split == 0, operands[-1][head].astype(jnp.float32), LOWEST)
                parts.append([spread(sink, width), spread(1.0, width), spread(0.0, width)])
            write_result(spec, out_ref, split, head, combine(parts))

        @pl.when(is_first & (lax.rem(first_head, spec.heads // spec.kv_heads) == 0))
        def _() -> None:
            for ref, head in ((keys_ref, key), (values_ref, value)):
                ref[step.slot, pl.ds(kv_head * width, width)] = head.astype(ref.dtype)


def scaled(spec: AttentionKernel, scores: AnyArray) -> AnyArray:
    """Return products of queries and keys as scores: scaled and capped."""
    scores = scores * spec.scale
    return scores if spec.softcap is None else spec.softcap * jnp.tanh(scores / spec.softcap)


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
        run_program(spec, refs[:num_inputs], refs[num_inputs], refs[num_inputs + 1 :])

    run = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, values.dtype if splits == 1 else jnp.float32),
        grid=(heads // spec.heads_at_once, splits, rows),
        grid_names=("program", "split", "row"),
        num_threads=WARPGROUPS,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=4 * BLOCK_ENTRIES),
        scratch_types=[
            plgpu.SMEM((WARPGROUPS, width), values.dtype),
            plgpu.SMEM((WARPGROUPS, spec.heads_at_once, 2, block_of(spec.width)), jnp.float32),
            plgpu.SMEM((WARPGROUPS, spec.heads_at_once, 2, block_of(spec.width), width), jnp.bfloat16),
            plgpu.Barrier(num_arrivals=WARPGROUPS),
        ],
        **({} if interpret is None else {"interpret": interpret}),
    )
    refs = [jax.new_ref(x) for x in (keys, values)]
    result = run(*inputs, *refs)
    if splits > 1:
        *_, total, weighted = combine([[result[:, i, :, j] for j in range(3)] for i in range(splits)])
        result = (weighted / total).astype(values.dtype).reshape(rows, -1)
    return (result, *(jax.freeze(ref) for ref in refs))
