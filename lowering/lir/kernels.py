"""Kernels of our own, in Pallas' Triton dialect, for one Hopper GPU, on which they were measured.

Elsewhere, over a mesh, and in programs that are trained, XLA runs the forms that it has.

The gated delta rule holds a part of the state in a kernel: columns of it, which depend on no others. Measured on one
H200, bf16, 16 heads of width 128, ms, without kernels and with: one token of 18 layers, 8 rows 0.224 and 0.157, 64 rows
0.997 and 0.763, and 1 row 0.137 and 0.143, which is therefore left to XLA; one layer over 1 x 4096 tokens 0.97 and
0.42, over 8 x 4096 3.99 and 2.31.

The experts of a mixture are two kernels: one for gate, up and what lies between, one for down. Choices are sorted by
expert, in blocks of rows of one expert each; a program of a kernel multiplies a block with columns of its own expert's
weights where they stand, so that nothing is copied and no expert is read that nobody chose. Measured on one H200, bf16,
8 layers of 128 experts of width 768 over 2048, 8 of them for each token, ms, the best form without kernels and this: 8
tokens 1.26 and 1.13; 64 tokens 2.92 and 2.48; 256 tokens 5.4 and 2.8; 2048 tokens 20.5 and 5.3; 16384 tokens 40 and
23.6.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from rlx_jax.device import running_device
from rlx_jax.ir.ops.experts import ExpertFfn
from rlx_jax.ir.ops.recurrent import GatedDeltaOp
from rlx_jax.lowering.lir.experts import NONE, SortedChoices, blocked, combined, sorted_blocks
from rlx_jax.lowering.lir.recurrent import by_token, chunks_at_once, chunks_of, delta_given, one_token

AnyArray = Any


def tile(size: int, most: int) -> int:
    """The largest power of two that divides `size`, at most `most`."""
    return min(size & -size, most)


def call(
    kernel: Callable[..., None], out: Any, grid: tuple[int, ...], warps: int, stages: int = 1, **how: Any
) -> Callable[..., Any]:
    """A kernel over whole arrays, of which each program of the grid reads and writes its own part. Where there is no
    GPU it is interpreted."""
    from jax.experimental.pallas import triton  # a quarter of a second, which those that have no GPU save

    params = triton.CompilerParams(num_warps=warps, num_stages=stages)
    interpret = running_device().kind != "cuda"
    return pl.pallas_call(kernel, out_shape=out, grid=grid, compiler_params=params, interpret=interpret, **how)


def with_gradient_of(plain: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A kernel `(op, *arrays)`, whose gradient is that of another form of the same, computed again for it."""

    def with_gradient(kernel: Callable[..., Any]) -> Callable[..., Any]:
        run = jax.custom_vjp(kernel, nondiff_argnums=(0,))
        run.defvjp(
            lambda op, *given: (kernel(op, *given), given),
            lambda op, given, pulled: jax.vjp(functools.partial(plain, op), *given)[1](pulled),
        )
        return run

    return with_gradient


# Programs of a kernel that one Hopper runs at once, about.
PROGRAMS = 128


@with_gradient_of(one_token)
def one_pass(op: GatedDeltaOp, *operands: AnyArray) -> tuple[AnyArray, ...]:
    """The op over one token, whose state is read once and written where it stands."""
    q, k, v, g, beta = (x[:, 0] for x in operands[:5])
    state = op.begin(*operands)
    batch, heads, keys, values = state.shape
    columns, times, scale = tile(values, 64), heads // k.shape[1], op.factor(keys)

    def kernel(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, out: Any, after: Any) -> None:
        b, h, n = (pl.program_id(axis) for axis in range(3))
        column = pl.ds(n * columns, columns)
        query, key = (x[b, h // times, :].astype(jnp.float32)[:, None] for x in (q, k))
        held = state[b, h, :, column] * jnp.exp(g[b, h].astype(jnp.float32))
        new = v[b, h, column].astype(jnp.float32) - (held * key).sum(0)
        held = held + key * (beta[b, h].astype(jnp.float32) * new)[None]
        after[b, h, :, column] = held
        out[b, h, column] = (scale * (held * query).sum(0)).astype(out.dtype)

    shapes = (jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct(state.shape, state.dtype))
    grid = (batch, heads, values // columns)
    out, after = call(kernel, shapes, grid, 8, input_output_aliases={5: 1})(q, k, v, g, beta, state)
    return out[:, None], after


@with_gradient_of(chunks_at_once)
def states_in_one(op: GatedDeltaOp, *operands: AnyArray) -> tuple[AnyArray, ...]:
    """The op in chunks, all of them at once but for the states, which follow one another inside of one kernel."""
    chunk, cut, start, (tokens, dtype) = chunks_of(op, operands)
    ready = jax.vmap(chunk.prepare)(cut)
    before, new, last = following_states(ready, start)
    out = jax.vmap(functools.partial(delta_given, op.factor(start.shape[-2]), dtype))(before, cut, ready, new)
    return by_token(out, tokens).astype(dtype), last.reshape(op.begin(*operands).shape)


def following_states(ready: Any, start: AnyArray) -> tuple[AnyArray, AnyArray, AnyArray]:
    """States `[n, …, K, V]` before each of n chunks, what each writes `[n, …, C, V]`, and the last state `[…, K, V]`.

    Of what `delta_chunk` prepares, with leading axes `[n, …]`, and the state at the start: for each chunk
    `V' = U − W S`, `S ← e^{G_C} S + writtenᵀ V'`.
    """
    fresh, erased, written, total, _ = ready
    lead, keys, dtype = fresh.shape[1:-2], erased.shape[-1], erased.dtype
    kept = jnp.exp(total[..., -1, 0])
    flat = (x.reshape(len(x), -1, *x.shape[1 + len(lead) :]) for x in (kept, fresh, erased, written))
    kept, fresh, erased, written = flat
    chunks, many, size, values = fresh.shape
    columns = tile(values, max(16, min(64, many * values // PROGRAMS)))

    def kernel(kept: Any, fresh: Any, erased: Any, written: Any, start: Any, before: Any, new: Any, last: Any) -> None:
        x = pl.program_id(0)
        column = pl.ds(pl.program_id(1) * columns, columns)

        def turn(i: AnyArray, held: AnyArray) -> AnyArray:
            short = held.astype(dtype)
            before[i, x, :, column] = short
            made = fresh[i, x, :, column] - jnp.dot(erased[i, x], short, preferred_element_type=jnp.float32)
            new[i, x, :, column] = made.astype(dtype)
            wrote = jnp.dot(written[i, x].T, made.astype(dtype), preferred_element_type=jnp.float32)
            return kept[i, x] * held + wrote

        last[x, :, column] = lax.fori_loop(0, chunks, turn, start[x, :, column])

    shapes = (
        jax.ShapeDtypeStruct((chunks, many, keys, values), dtype),
        jax.ShapeDtypeStruct((chunks, many, size, values), dtype),
        jax.ShapeDtypeStruct((many, keys, values), jnp.float32),
    )
    run = call(kernel, shapes, (many, values // columns), 4, 3)
    before, new, last = run(kept, fresh, erased, written, start.reshape(many, keys, values))
    apart = (before.reshape(chunks, *lead, keys, values), new.reshape(chunks, *lead, size, values))
    return *apart, last.reshape(start.shape)


# Choices that are sorted by comparing each with each, in 10 µs; sorting takes 50.
COMPARED = 2048


@dataclass(frozen=True)
class Tiles:
    """How a kernel is cut: columns of its result, numbers that are summed a turn, warps, turns loaded ahead."""

    columns: int
    depth: int
    warps: int
    stages: int


# Of gate and up, and of down, by the rows of a block: the best of what was tried on one H200.
TILES = {
    16: (Tiles(64, 128, 4, 3), Tiles(64, 128, 4, 3)),
    64: (Tiles(128, 64, 4, 3), Tiles(128, 64, 4, 3)),
    128: (Tiles(128, 64, 8, 4), Tiles(256, 64, 8, 3)),
}


@with_gradient_of(blocked)
def grouped(op: ExpertFfn, *arrays: AnyArray) -> AnyArray:
    """The op, with operands as in `ExpertFfn`."""
    x, gate, up, down, weights, ids, *biases = arrays
    rows = next((rows for rows in TILES if ids.size <= rows * len(gate)), max(TILES))
    cut = (compared_blocks if ids.size <= COMPARED else sorted_blocks)(ids, len(gate), rows)
    owner, choice = (a.astype(jnp.int32) for a in (cut.owner, cut.choice))
    blocks = OwnedBlocks(op, rows, owner, choice, cut.used.sum(-1, dtype=jnp.int32))
    gate_bias, up_bias, down_bias = biases or NONE
    wide, narrow = TILES[rows]
    token = blocks.choice // ids.shape[-1]
    inner = _wide(blocks, wide, token, x.reshape(-1, x.shape[-1]), (gate, up), (gate_bias, up_bias))
    out = _narrow(blocks, narrow, ids.size, inner, down, down_bias)
    return combined(out.astype(jnp.float32), x, weights)


@dataclass(frozen=True)
class OwnedBlocks:
    """Of `rows` choices each: whose they are `[n]`, their numbers `[n, rows]`, and how many there are `[n]`."""

    op: ExpertFfn
    rows: int
    owner: AnyArray
    choice: AnyArray
    count: AnyArray

    def weights(self, ref: Any, expert: AnyArray, column: AnyArray, deep: AnyArray) -> AnyArray:
        """A tile `[depth, columns]` of an expert's matrix."""
        return ref[expert, column, deep].T if self.op.contract else ref[expert, deep, column]

    def product(self, x: AnyArray, ref: Any, expert: AnyArray, column: AnyArray, deep: AnyArray) -> AnyArray:
        """One turn of a product, in f32."""
        w = self.weights(ref, expert, column, deep)
        return jnp.dot(x, w, preferred_element_type=jnp.float32)


def _wide(
    blocks: OwnedBlocks, tiles: Tiles, token: AnyArray, x: AnyArray, both: tuple[Any, Any], biases: tuple[Any, Any]
) -> AnyArray:
    """`act(x G) ⊙ (x U)` of every row of every block `[n · rows, F]`: x `[T, H]`, of which each row reads its token."""
    op, rows, hidden = blocks.op, blocks.rows, x.shape[1]
    inner = both[0].shape[1 if op.contract else 2]
    columns, depth = tile(inner, tiles.columns), tile(hidden, tiles.depth)
    added = [bias for bias in biases if bias is not None]

    def kernel(owner: Any, count: Any, token: Any, x: Any, gate: Any, up: Any, *rest: Any) -> None:
        *added, out = rest
        n, b = pl.program_id(0), pl.program_id(1)
        column = pl.ds(n * columns, columns)

        @pl.when(count[b] > 0)
        def _() -> None:
            expert, read = owner[b], token[b, :]

            def turn(k: AnyArray, sums: tuple[AnyArray, AnyArray]) -> tuple[AnyArray, AnyArray]:
                deep = pl.ds(k * depth, depth)
                part = x[read, deep]
                g, u = (blocks.product(part, w, expert, column, deep) for w in (gate, up))
                return sums[0] + g, sums[1] + u

            none = jnp.zeros((rows, columns), jnp.float32)
            g, u = lax.fori_loop(0, hidden // depth, turn, (none, none))
            if added:
                pairs = zip((g, u), added, strict=True)
                g, u = (a + bias[expert, column].astype(jnp.float32)[None] for a, bias in pairs)
            out[pl.ds(b * rows, rows), column] = op.gated(g, u).astype(out.dtype)

    shape = jax.ShapeDtypeStruct((blocks.owner.size * rows, inner), x.dtype)
    run = call(kernel, shape, (inner // columns, blocks.owner.size), tiles.warps, tiles.stages)
    return run(blocks.owner, blocks.count, token, x, *both, *added)


def _narrow(
    blocks: OwnedBlocks, tiles: Tiles, choices: int, inner: AnyArray, down: AnyArray, bias: AnyArray
) -> AnyArray:
    """`inner D` of every choice `[choices, H]`."""
    op, rows, width = blocks.op, blocks.rows, inner.shape[1]
    hidden = down.shape[1 if op.contract else 2]
    columns, depth = tile(hidden, tiles.columns), tile(width, tiles.depth)

    def kernel(owner: Any, count: Any, choice: Any, inner: Any, down: Any, *rest: Any) -> None:
        *added, out = rest
        n, b = pl.program_id(0), pl.program_id(1)
        column = pl.ds(n * columns, columns)

        @pl.when(count[b] > 0)
        def _() -> None:
            expert = owner[b]

            def turn(k: AnyArray, total: AnyArray) -> AnyArray:
                deep = pl.ds(k * depth, depth)
                return total + blocks.product(inner[pl.ds(b * rows, rows), deep], down, expert, column, deep)

            made = lax.fori_loop(0, width // depth, turn, jnp.zeros((rows, columns), jnp.float32))
            if added:
                made = made + added[0][expert, column].astype(jnp.float32)[None]
            # Rows that stand for no choice write to one behind the last.
            place = jnp.where(jnp.arange(rows) < count[b], choice[b, :], choices)
            out[place, column] = made.astype(out.dtype)

    shape = jax.ShapeDtypeStruct((choices + 1, hidden), inner.dtype)
    run = call(kernel, shape, (hidden // columns, blocks.owner.size), tiles.warps, tiles.stages)
    return run(blocks.owner, blocks.count, blocks.choice, inner, down, *([] if bias is None else [bias]))[:choices]


def compared_blocks(ids: AnyArray, experts: int, rows: int) -> SortedChoices:
    """`sorted_blocks` of few choices, as sums of comparisons of each with each: three kernels in place of ten."""
    flat = ids.reshape(-1)
    many = flat.size
    blocks = min(-(-many // rows) + experts - 1, many)
    at = jnp.arange(many, dtype=jnp.int32)
    same, less = flat[:, None] == flat[None], flat[None] < flat[:, None]
    before = (same & (at[None] < at[:, None])).sum(1, dtype=jnp.int32)  # choices of the same expert
    begin = (less & (before % rows == 0)[None]).sum(1, dtype=jnp.int32)  # blocks of the experts before
    block = begin + before // rows
    place = block * rows + before % rows
    row, number = (jnp.arange(n, dtype=jnp.int32)[:, None] for n in (blocks * rows, blocks))
    choice = jnp.where(place[None] == row, at[None], -1).max(1).reshape(blocks, rows)
    owner = jnp.where(block[None] == number, flat[None], 0).max(1)
    return SortedChoices(owner, choice >= 0, jnp.maximum(choice, 0), place)
