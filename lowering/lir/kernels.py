"""Custom Pallas kernels (Triton backend) for a single Hopper GPU, on which they were measured.

On other devices, and in training, XLA runs the implementations of the other modules; over a mesh too, other than in
the program of one device (`per_shard.py`).

Gated delta rule: each program of a kernel holds some columns of the state, which are independent of the others.
Measured on one H200, bf16, 16 heads of width 128, ms, without and with kernels: one token through 18 layers, 8 rows
0.224 and 0.157, 64 rows 0.997 and 0.763, 1 row 0.137 and 0.143, which is therefore left to XLA; one layer over 8 x 4096
tokens 3.99 and 0.52.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from rlx_jax.dataclasses import dataclass
from rlx_jax.device import running_device
from rlx_jax.ir.kernel_group import DeltaGroup
from rlx_jax.ir.ops.index import TopK
from rlx_jax.ir.ops.recurrent import GatedDeltaOp
from rlx_jax.lowering.lir.experts import SortedChoices
from rlx_jax.lowering.lir.implementations import with_reference
from rlx_jax.lowering.lir.recurrent import chunk_size, chunks_at_once, one_token

AnyArray = Any


def tile_size(size: int, limit: int) -> int:
    """Return the largest power of two that divides `size`, at most `limit`."""
    return min(size & -size, limit)


def kernel_call(
    kernel: Callable[..., None], out: Any, grid: tuple[int, ...], warps: int, stages: int = 1, **options: Any
) -> Callable[..., Any]:
    """Return a callable that runs a Pallas kernel; it is interpreted if there is no GPU.

    Args:
        kernel: the kernel over references to full arrays, of which each program of the grid accesses its own part.
        out: shapes and dtypes of the results.
        grid: the number of programs along each grid axis.
        warps: warps per program.
        stages: pipeline stages of loads.
        options: further options of `pallas_call`.
    """
    from jax.experimental.pallas import triton  # imported here, as it takes a quarter of a second

    params = triton.CompilerParams(num_warps=warps, num_stages=stages)
    interpret = running_device().kind != "cuda"
    return pl.pallas_call(kernel, out_shape=out, grid=grid, compiler_params=params, interpret=interpret, **options)


# Approximate number of kernel programs that one Hopper GPU runs concurrently.
CONCURRENT_PROGRAMS = 128


@with_reference(one_token)
def one_pass(op: GatedDeltaOp, *operands: AnyArray) -> tuple[AnyArray, ...]:
    """Compute the op over one token; the state is read once and updated in place."""
    q, k, v, g, beta = (x[:, 0] for x in operands[:5])
    state = op.initial_state(*operands)
    batch, heads, keys, values = state.shape
    columns, times, scale = tile_size(values, 64), heads // k.shape[1], op.factor(keys)

    def kernel(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, out: Any, new_state: Any) -> None:
        b, h, n = (pl.program_id(axis) for axis in range(3))
        column = pl.ds(n * columns, columns)
        query, key = (x[b, h // times, :].astype(jnp.float32)[:, None] for x in (q, k))
        state_columns = state[b, h, :, column] * jnp.exp(g[b, h].astype(jnp.float32))
        new = v[b, h, column].astype(jnp.float32) - (state_columns * key).sum(0)
        state_columns = state_columns + key * (beta[b, h].astype(jnp.float32) * new)[None]
        new_state[b, h, :, column] = state_columns
        out[b, h, column] = (scale * (state_columns * query).sum(0)).astype(out.dtype)

    shapes = (jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct(state.shape, state.dtype))
    grid = (batch, heads, values // columns)
    out, new_state = kernel_call(kernel, shapes, grid, 8, input_output_aliases={5: 1})(q, k, v, g, beta, state)
    return out[:, None], new_state


@with_reference(chunks_at_once)
def states_in_one(op: GatedDeltaOp, *operands: AnyArray) -> tuple[AnyArray, ...]:
    """Compute the op in chunks by two kernels, with the formulas of `delta_chunk`.

    The first one computes in parallel what needs no state, the second one a state and its results chunk after chunk.
    """
    q, k, v, g, beta = operands[:5]
    tokens, size, start = v.shape[1], chunk_size(v.shape[1]), op.initial_state(*operands)
    padding = -tokens % size  # with zeros, which leave the state unchanged
    q, k, v, g, beta = (jnp.pad(x, ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2))) for x in (q, k, v, g, beta))
    rows, heads, keys, values = start.shape
    rule = DeltaChunks(size, v.shape[1] // size, rows, heads, keys, values, k.shape[2], op.factor(keys))
    q, k, v = (x.astype(v.dtype).reshape(*x.shape[:2], -1) for x in (q, k, v))
    g, beta = (x.astype(jnp.float32) for x in (g, beta))
    # No operand is transposed here: XLA would give the product that it is a part of another layout, and copy the rest.
    out, state = rule.run(q, k, v, beta, start, *rule.prepare(q, k, g, beta, v.dtype))
    return out.reshape(rows, -1, heads, values)[:, :tokens], state


# Tokens that a program convolves: on one H200, 8 x 4096 tokens of 6,144 channels take 0.325 ms by 32, 0.332 by 64.
CONVOLVED_TOKENS = 32


@with_reference(DeltaGroup.eval)
def convolved_states(op: DeltaGroup, mixed: AnyArray, window: AnyArray, g: AnyArray, beta: AnyArray) -> Any:
    """Compute a group by a kernel for each of q, k and v, and by `states_in_one`."""
    from jax.experimental.pallas import triton  # imported here, as it takes a quarter of a second

    (batch, tokens, _), dtype, taps = mixed.shape, mixed.dtype, window.shape[1]
    size, blocks = CONVOLVED_TOKENS, -(-tokens // CONVOLVED_TOKENS)

    def convolve(first: int, heads: int, width: int, unit: float | None) -> AnyArray:
        """Return heads of q, k or v, whose columns before the convolution begin at `first`."""

        def kernel(x: Any, window: Any, out: Any) -> None:
            i, h, b = (pl.program_id(axis) for axis in range(3))
            columns, y = pl.ds(first + h * width, width), jnp.zeros((size, width), jnp.float32)
            for j in range(taps):
                token, column = i * size + jnp.arange(size) - (taps - 1 - j), first + h * width + jnp.arange(width)
                mask = jnp.broadcast_to(((token >= 0) & (token < tokens))[:, None], (size, width))
                row = triton.load(x.at[b, token[:, None], column[None]], mask=mask, other=0.0)
                y += row.astype(jnp.float32) * window[j, columns][None]
            y = y.astype(dtype).astype(jnp.float32)
            y = (y * jax.nn.sigmoid(y)).astype(dtype)
            if unit is not None:
                y = y.astype(jnp.float32)
                y = (y * lax.rsqrt((y * y).sum(axis=1) + unit)[:, None]).astype(dtype)
            out[b, pl.ds(i * size, size), pl.ds(h * width, width)] = y

        shape = jax.ShapeDtypeStruct((batch, blocks * size, heads * width), dtype)
        out = kernel_call(kernel, shape, (blocks, heads, batch), 8)(mixed, window.T.astype(jnp.float32))
        return out[:, :tokens].reshape(batch, tokens, heads, width)

    q, k = (convolve(i * op.key_heads * op.keys, op.key_heads, op.keys, op.unit) for i in range(2))
    v = convolve(2 * op.key_heads * op.keys, g.shape[2], op.values, None)
    return states_in_one(op.rule, q, k, v, g, beta)


# Rows of the blocks on the diagonal that `prepare` inverts: on one H200, 8 x 4096 tokens take 0.22 ms by 16 with one
# warp, 0.38 with two, 0.35 by 32 with two, and 0.94 by 64.
INVERTED_ROWS = 16


@dataclass(frozen=True)
class DeltaChunks:
    """The kernels of the gated delta rule in chunks; arrays of tokens are `[rows, tokens, heads * width]`.

    Attributes:
        size: tokens of a chunk, a power of two.
        chunks: chunks of a row.
        rows, heads, keys, values: the shape of the state.
        key_heads: heads of queries and keys.
        scale: the factor of queries.
    """

    size: int
    chunks: int
    rows: int
    heads: int
    keys: int
    values: int
    key_heads: int
    scale: float

    def key_columns(self, head: AnyArray) -> Any:
        """Return the columns of a head's query and key."""
        return pl.ds(head // (self.heads // self.key_heads) * self.keys, self.keys)

    def prepare(self, q: AnyArray, k: AnyArray, g: AnyArray, beta: AnyArray, dtype: Any) -> Any:
        """Return T and `tril(Q Kᵀ ⊙ e^{Gᵢ−Gⱼ})` `[rows, tokens, heads * size]`, and G `[rows, heads, tokens]`, in the
        formulas of `delta_chunk`.

        T is the inverse of a triangular matrix of blocks of `INVERTED_ROWS`. A block on the diagonal is inverted from
        single rows on: with the inverses X of its own diagonal blocks, and L of what is below the first block of each
        pair, those of twice the size are `X − X L X`.
        """
        size, block = self.size, min(INVERTED_ROWS, self.size)
        dot = functools.partial(jnp.dot, preferred_element_type=jnp.float32)
        precise = functools.partial(dot, precision=lax.Precision.HIGH)

        def inverted(lower: AnyArray, row: AnyArray, column: AnyArray) -> AnyArray:
            inverse, width = jnp.where(row == column, 1.0, 0.0), 1
            while width < block:
                is_below = (row // width == column // width + 1) & (row // (2 * width) == column // (2 * width))
                below = jnp.where(is_below, lower, 0.0)
                inverse -= below if width == 1 else precise(inverse, precise(below, inverse))
                width *= 2
            return inverse

        def kernel(q: Any, k: Any, g: Any, beta: Any, solved: Any, within: Any, total: Any) -> None:
            i, h, b = (pl.program_id(axis) for axis in range(3))
            row, column = (lax.broadcasted_iota(jnp.int32, (block, block), axis) for axis in (0, 1))
            token, other = (lax.broadcasted_iota(jnp.int32, (block, size), axis) for axis in (0, 1))
            gates = g[b, pl.ds(i * size, size), h][None]
            columns = [pl.ds(h * size + m * block, block) for m in range(size // block)]
            keys: list[AnyArray] = []
            sums: list[AnyArray] = []
            inverses: list[list[AnyArray]] = []
            for n in range(size // block):
                rows = pl.ds(i * size + n * block, block)
                query, rate = q[b, rows, self.key_columns(h)], beta[b, rows, h][:, None]
                keys.append(k[b, rows, self.key_columns(h)])
                sums.append(jnp.where(n * block + token >= other, gates, 0.0).sum(axis=1))
                total[b, h, rows] = sums[n]
                lower = []
                for m in range(n + 1):
                    is_visible = row + (n - m) * block >= column
                    between = jnp.exp(jnp.where(is_visible, sums[n][:, None] - sums[m][None], -jnp.inf))
                    within[b, rows, columns[m]] = (between * dot(query, keys[m].T)).astype(dtype)
                    lower.append(rate * between * dot(keys[n], keys[m].T))
                inverse = inverted(lower[n], row, column)
                left = [
                    -precise(inverse, sum(precise(lower[j], inverses[j][m]) for j in range(m, n))) for m in range(n)
                ]
                inverses.append([*left, inverse])
                for m, part in enumerate(inverses[n]):
                    solved[b, rows, columns[m]] = part.astype(dtype)
                for m in range(n + 1, size // block):
                    within[b, rows, columns[m]] = solved[b, rows, columns[m]] = jnp.zeros((block, block), dtype)

        shape = jax.ShapeDtypeStruct((*q.shape[:2], self.heads * size), dtype)
        sums_shape = jax.ShapeDtypeStruct((self.rows, self.heads, q.shape[1]), jnp.float32)
        grid = (self.chunks, self.heads, self.rows)
        return kernel_call(kernel, (shape, shape, sums_shape), grid, 1)(q, k, g, beta)

    def run(
        self, q: AnyArray, k: AnyArray, v: AnyArray, beta: AnyArray, start: AnyArray, solved: AnyArray,
        within: AnyArray, total: AnyArray,
    ) -> tuple[AnyArray, AnyArray]:  # fmt: skip
        """Return the results and the last state, from the arrays of `prepare`.

        `U − W S` is computed as `T diag(β) (V − diag(e^G) K S)`, so that U and W are not stored.
        """
        size, values, dtype = self.size, self.values, v.dtype
        num_states = self.rows * self.heads
        columns = tile_size(values, max(16, min(64, num_states * values // CONCURRENT_PROGRAMS)))
        dot = functools.partial(jnp.dot, preferred_element_type=jnp.float32)

        def kernel(
            q: Any, k: Any, v: Any, beta: Any, solved: Any, within: Any, total: Any, start: Any, out: Any, last: Any
        ) -> None:
            n, h, b = (pl.program_id(axis) for axis in range(3))
            own, in_chunk = pl.ds(n * columns, columns), pl.ds(h * size, size)
            value_columns = pl.ds(h * values + n * columns, columns)

            def step(i: AnyArray, state: AnyArray) -> AnyArray:
                rows, rounded = pl.ds(i * size, size), state.astype(dtype)
                key, sums = k[b, rows, self.key_columns(h)], total[b, h, rows]
                decay, rate = jnp.exp(sums)[:, None], beta[b, rows, h][:, None]
                change = rate * (v[b, rows, value_columns].astype(jnp.float32) - decay * dot(key, rounded))
                new = dot(solved[b, rows, in_chunk], change.astype(dtype))
                across = decay * dot(q[b, rows, self.key_columns(h)], rounded)
                result = self.scale * (across + dot(within[b, rows, in_chunk], new.astype(dtype)))
                out[b, rows, value_columns] = result.astype(dtype)
                end = total[b, h, i * size + size - 1]
                written = jnp.exp(end - sums)[:, None] * new
                return jnp.exp(end) * state + dot(key.T, written.astype(dtype))

            last[b, h, :, own] = lax.fori_loop(0, self.chunks, step, start[b, h, :, own])

        shapes = (jax.ShapeDtypeStruct(v.shape, dtype), jax.ShapeDtypeStruct(start.shape, jnp.float32))
        grid = (values // columns, self.heads, self.rows)
        out, last = kernel_call(kernel, shapes, grid, 4, 3)(q, k, v, beta, solved, within, total, start)
        return out, last


# Rows of a program that selects the largest entries of each: on one H200, 8 of 128 entries of 16,384 rows take 8 µs, by
# XLA 63.
SELECTING_ROWS = 16


@with_reference(TopK.eval)
def selected(op: TopK, x: AnyArray) -> tuple[AnyArray, AnyArray]:
    """Compute the op along the last axis, by selecting the largest entry of a row `k` times."""
    size, rows, chosen = x.shape[-1], x.reshape(-1, x.shape[-1]), jnp.iinfo(jnp.int32).min

    def flipped(bits: AnyArray) -> AnyArray:
        """Return integers in the order of the floats with these bits, or those bits: it is its own inverse."""
        return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)

    def kernel(x: Any, values: Any, ids: Any) -> None:
        own = pl.ds(pl.program_id(0) * SELECTING_ROWS, SELECTING_ROWS)
        keys = jnp.maximum(flipped(lax.bitcast_convert_type(x[own, :], jnp.int32)), chosen + 1)
        number = lax.broadcasted_iota(jnp.int32, keys.shape, 1)
        for i in range(op.k):
            top = keys.max(1)
            ids[own, i] = first = jnp.where(keys == top[:, None], number, size).min(1)
            values[own, i] = lax.bitcast_convert_type(flipped(top), jnp.float32)
            keys = jnp.where(number == first[:, None], chosen, keys)

    shapes = [jax.ShapeDtypeStruct((len(rows), op.k), dtype) for dtype in (x.dtype, jnp.int32)]
    results = kernel_call(kernel, shapes, (len(rows) // SELECTING_ROWS,), 4)(rows)
    return tuple(a.reshape(*x.shape[:-1], op.k) for a in results)


# Choices of a program that counts or places them: on one H200, a layer of 16,384 tokens takes 0.15 ms less than with
# `sort_into_blocks`, one of 1,024 tokens 0.04.
PLACED = 128


def count_into_blocks(ids: AnyArray, experts: int, rows: int) -> SortedChoices:
    """Return the result of `sort_into_blocks`, by a kernel that counts choices, and one that places them."""
    flat, width = ids.reshape(-1).astype(jnp.int32), max(16, 1 << (experts - 1).bit_length())
    num_choices, parts = flat.size, -(-flat.size // PLACED)
    blocks = min(-(-num_choices // rows) + experts - 1, num_choices)
    flat = jnp.pad(flat, (0, parts * PLACED - num_choices), constant_values=width)

    def hits(ids: Any, part: AnyArray) -> AnyArray:
        return ids[pl.ds(part * PLACED, PLACED)][:, None] == jnp.arange(width, dtype=jnp.int32)[None]

    def count(ids: Any, counts: Any) -> None:
        part = pl.program_id(0)
        counts[part, :] = jnp.where(hits(ids, part), 1, 0).sum(0)

    counts = kernel_call(count, jax.ShapeDtypeStruct((parts, width), jnp.int32), (parts,), 4)(flat)
    totals = counts.sum(0)
    num_blocks = -(-totals // rows)
    ends = jnp.cumsum(num_blocks)
    first_block = ends - num_blocks
    starts = jnp.cumsum(counts, 0) - counts + first_block[None] * rows  # the row of the first choice of each part

    def place(ids: Any, starts: Any, zeros: Any, choice_row: Any, row_choice: Any) -> None:
        part = pl.program_id(0)
        hit, number = hits(ids, part), part * PLACED + jnp.arange(PLACED)
        row, column = (lax.broadcasted_iota(jnp.int32, (PLACED, PLACED), axis) for axis in (0, 1))
        operands = (jnp.where(a, 1.0, 0.0).astype(jnp.bfloat16) for a in (row > column, hit))
        before = jnp.dot(*operands, preferred_element_type=jnp.float32)  # choices of the expert, exact
        placed = jnp.where(hit, before.astype(jnp.int32) + starts[part, :][None], 0).sum(1)
        choice_row[number] = placed
        row_choice[jnp.where(number < num_choices, placed, blocks * rows)] = number

    shapes = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in (parts * PLACED, blocks * rows + 1)]
    run = kernel_call(place, shapes, (parts,), 8, input_output_aliases={2: 1})
    choice_row, row_choice = run(flat, starts, jnp.zeros(blocks * rows + 1, jnp.int32))
    number = jnp.arange(blocks, dtype=jnp.int32)
    block_expert = jnp.minimum((ends[None] <= number[:, None]).sum(1, dtype=jnp.int32), experts - 1)
    filled = totals[block_expert] - (number - first_block[block_expert]) * rows
    row_mask = jnp.arange(rows)[None] < filled[:, None]
    return SortedChoices(block_expert, row_mask, row_choice[:-1].reshape(blocks, rows), choice_row[:num_choices])
