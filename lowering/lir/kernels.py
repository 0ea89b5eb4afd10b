"""Custom Pallas kernels (Triton backend) for a single Hopper GPU, on which they were measured.

On other devices, and in training, XLA runs the implementations of the other modules; over a mesh too, other than in
the program of one device (`per_shard.py`).

Gated delta rule: each program of a kernel holds some columns of the state, which are independent of the others.
Measured on one H200, bf16, 16 heads of width 128, ms, without and with kernels: one layer over 8 x 4096 tokens 3.99 and
0.52.
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
from rlx_jax.ir.ops.recurrent import GatedDeltaOp
from rlx_jax.lowering.lir.implementations import with_reference
from rlx_jax.lowering.lir.recurrent import chunk_size, chunks_at_once
from rlx_jax.lowering.lir.row_kernels import convolve

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


@with_reference(DeltaGroup.eval)
def convolved_states(op: DeltaGroup, *arrays: AnyArray) -> Any:
    """Compute a group by a kernel for each of q, k and v, and by `states_in_one`."""
    return run_convolved(op, *arrays)


def run_convolved(
    op: DeltaGroup, mixed: AnyArray, window: AnyArray, g: AnyArray, beta: AnyArray, interpret: Any = None
) -> Any:
    """Compute a group; `interpret` are parameters of Mosaic's interpreter, None to compile."""
    heads, keys, values, own_heads = op.key_heads, op.keys, op.values, g.shape[2]
    parts = (0, heads, keys, op.unit), (heads * keys, heads, keys, op.unit), (2 * heads * keys, own_heads, values, None)
    return states_in_one(op.rule, *(convolve(mixed, window, *part, interpret) for part in parts), g, beta)


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
