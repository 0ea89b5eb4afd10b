"""Custom Pallas kernels (Triton backend) for a single Hopper GPU, on which they were measured.

On other devices, over a mesh, and in training, XLA runs the implementations of the other modules.

Gated delta rule: each program of a kernel holds some columns of the state, which are independent of the others.
Measured on one H200, bf16, 16 heads of width 128, ms, without and with kernels: one token through 18 layers, 8 rows
0.224 and 0.157, 64 rows 0.997 and 0.763, 1 row 0.137 and 0.143, which is therefore left to XLA; one layer over 1 x 4096
tokens 0.97 and 0.42, over 8 x 4096 3.99 and 2.31.

Mixture of experts: one kernel computes gate, up and the activation, a second one down. Choices are sorted by expert, in
blocks of rows of one expert each. A program multiplies a block with some columns of its expert's weights and reads them
in place, so that weights are not copied and experts without choices are not read. Measured on one H200, bf16, 8 layers
of 128 experts of width 768 over 2048, 8 experts per token, ms, the best implementation without kernels and this one: 8
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
    """Return the largest power of two that divides `size`, at most `most`."""
    return min(size & -size, most)


def call(
    kernel: Callable[..., None], out: Any, grid: tuple[int, ...], warps: int, stages: int = 1, **how: Any
) -> Callable[..., Any]:
    """Return a callable that runs a Pallas kernel; it is interpreted if there is no GPU.

    Args:
        kernel: the kernel over references to full arrays, of which each program of the grid accesses its own part.
        out: shapes and dtypes of the results.
        grid: the number of programs along each grid axis.
        warps: warps per program.
        stages: pipeline stages of loads.
        how: further options of `pallas_call`.
    """
    from jax.experimental.pallas import triton  # imported here, as it takes a quarter of a second

    params = triton.CompilerParams(num_warps=warps, num_stages=stages)
    interpret = running_device().kind != "cuda"
    return pl.pallas_call(kernel, out_shape=out, grid=grid, compiler_params=params, interpret=interpret, **how)


def with_gradient_of(plain: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator for a kernel `(op, *arrays)` that adds the gradient of an equivalent function.

    The backward pass recomputes the forward pass by `plain`.
    """

    def with_gradient(kernel: Callable[..., Any]) -> Callable[..., Any]:
        run = jax.custom_vjp(kernel, nondiff_argnums=(0,))
        run.defvjp(
            lambda op, *given: (kernel(op, *given), given),
            lambda op, given, pulled: jax.vjp(functools.partial(plain, op), *given)[1](pulled),
        )
        return run

    return with_gradient


# Approximate number of kernel programs that one Hopper GPU runs concurrently.
PROGRAMS = 128


@with_gradient_of(one_token)
def one_pass(op: GatedDeltaOp, *operands: AnyArray) -> tuple[AnyArray, ...]:
    """Compute the op over one token; the state is read once and updated in place."""
    q, k, v, g, beta = (x[:, 0] for x in operands[:5])
    state = op.begin(*operands)
    batch, heads, keys, values = state.shape
    columns, times, scale = tile(values, 64), heads // k.shape[1], op.factor(keys)

    def kernel(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, out: Any, after: Any) -> None:
        b, h, n = (pl.program_id(axis) for axis in range(3))
        column = pl.ds(n * columns, columns)
        query, key = (x[b, h // times, :].astype(jnp.float32)[:, None] for x in (q, k))
        state_columns = state[b, h, :, column] * jnp.exp(g[b, h].astype(jnp.float32))
        new = v[b, h, column].astype(jnp.float32) - (state_columns * key).sum(0)
        state_columns = state_columns + key * (beta[b, h].astype(jnp.float32) * new)[None]
        after[b, h, :, column] = state_columns
        out[b, h, column] = (scale * (state_columns * query).sum(0)).astype(out.dtype)

    shapes = (jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct(state.shape, state.dtype))
    grid = (batch, heads, values // columns)
    out, after = call(kernel, shapes, grid, 8, input_output_aliases={5: 1})(q, k, v, g, beta, state)
    return out[:, None], after


@with_gradient_of(chunks_at_once)
def states_in_one(op: GatedDeltaOp, *operands: AnyArray) -> tuple[AnyArray, ...]:
    """Compute the op in chunks, in parallel except for the states, which one kernel computes one after the other."""
    chunk, chunks, start, (tokens, dtype) = chunks_of(op, operands)
    ready = jax.vmap(chunk.prepare)(chunks)
    old_states, new_values, last_state = following_states(ready, start)
    out = jax.vmap(functools.partial(delta_given, op.factor(start.shape[-2]), dtype))(
        old_states, chunks, ready, new_values
    )
    return by_token(out, tokens).astype(dtype), last_state.reshape(op.begin(*operands).shape)


def following_states(ready: Any, start: AnyArray) -> tuple[AnyArray, AnyArray, AnyArray]:
    """Compute the recurrence over chunks: `V' = U − W S`, `S ← e^{G_C} S + writtenᵀ V'` for each chunk.

    Args:
        ready: the result of `delta_chunk`'s `prepare`, with leading axes `[n, …]`.
        start: the state before the first chunk `[…, K, V]`.

    Returns:
        The state before each of n chunks `[n, …, K, V]`, the values V' that each writes `[n, …, C, V]`, and the last
        state `[…, K, V]`.
    """
    fresh, erased, written, total, _ = ready  # U, W, diag(e^{G_C−G}) K and G in the formulas of `delta_chunk`
    lead, keys, dtype = fresh.shape[1:-2], erased.shape[-1], erased.dtype
    kept = jnp.exp(total[..., -1, 0])
    flat = (x.reshape(len(x), -1, *x.shape[1 + len(lead) :]) for x in (kept, fresh, erased, written))
    kept, fresh, erased, written = flat
    chunks, num_states, size, values = fresh.shape
    columns = tile(values, max(16, min(64, num_states * values // PROGRAMS)))

    def kernel(kept: Any, fresh: Any, erased: Any, written: Any, start: Any, before: Any, new: Any, last: Any) -> None:
        x = pl.program_id(0)
        column = pl.ds(pl.program_id(1) * columns, columns)

        def turn(i: AnyArray, held: AnyArray) -> AnyArray:
            rounded = held.astype(dtype)
            before[i, x, :, column] = rounded
            new_values = fresh[i, x, :, column] - jnp.dot(erased[i, x], rounded, preferred_element_type=jnp.float32)
            new[i, x, :, column] = new_values.astype(dtype)
            update = jnp.dot(written[i, x].T, new_values.astype(dtype), preferred_element_type=jnp.float32)
            return kept[i, x] * held + update

        last[x, :, column] = lax.fori_loop(0, chunks, turn, start[x, :, column])

    shapes = (
        jax.ShapeDtypeStruct((chunks, num_states, keys, values), dtype),
        jax.ShapeDtypeStruct((chunks, num_states, size, values), dtype),
        jax.ShapeDtypeStruct((num_states, keys, values), jnp.float32),
    )
    run = call(kernel, shapes, (num_states, values // columns), 4, 3)
    before, new, last = run(kept, fresh, erased, written, start.reshape(num_states, keys, values))
    outputs = (before.reshape(chunks, *lead, keys, values), new.reshape(chunks, *lead, size, values))
    return *outputs, last.reshape(start.shape)


# Number of choices up to which all pairs are compared instead of sorting: 10 µs instead of 50.
COMPARED = 2048


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of a kernel.

    Attributes:
        columns: columns of the result per program.
        depth: contracted entries per loop iteration.
        warps: warps per program.
        stages: loop iterations that are loaded ahead.
    """

    columns: int
    depth: int
    warps: int
    stages: int


# Tiles of the gate and up kernel, and of the down kernel, by the rows of a block: the fastest of those tried on one
# H200.
TILES = {
    16: (Tiles(64, 128, 4, 3), Tiles(64, 128, 4, 3)),
    64: (Tiles(128, 64, 4, 3), Tiles(128, 64, 4, 3)),
    128: (Tiles(128, 64, 8, 4), Tiles(256, 64, 8, 3)),
}


@with_gradient_of(blocked)
def grouped(op: ExpertFfn, *arrays: AnyArray) -> AnyArray:
    """Compute the op by two kernels, with operands as in `ExpertFfn`."""
    x, gate, up, down, weights, ids, *biases = arrays
    rows = next((rows for rows in TILES if ids.size <= rows * len(gate)), max(TILES))
    sorted_choices = (compared_blocks if ids.size <= COMPARED else sorted_blocks)(ids, len(gate), rows)
    owner, choice = (a.astype(jnp.int32) for a in (sorted_choices.owner, sorted_choices.choice))
    blocks = OwnedBlocks(op, rows, owner, choice, sorted_choices.used.sum(-1, dtype=jnp.int32))
    gate_bias, up_bias, down_bias = biases or NONE
    wide, narrow = TILES[rows]
    token = blocks.choice // ids.shape[-1]
    inner = _wide(blocks, wide, token, x.reshape(-1, x.shape[-1]), (gate, up), (gate_bias, up_bias))
    out = _narrow(blocks, narrow, ids.size, inner, down, down_bias)
    return combined(out.astype(jnp.float32), x, weights)


@dataclass(frozen=True)
class OwnedBlocks:
    """Blocks of choices, each of one expert.

    Attributes:
        op: the mixture.
        rows: rows of a block.
        owner: the expert of each block `[n]`.
        choice: the numbers of its choices `[n, rows]`.
        count: the number of its choices `[n]`.
    """

    op: ExpertFfn
    rows: int
    owner: AnyArray
    choice: AnyArray
    count: AnyArray

    def weights(self, ref: Any, expert: AnyArray, column: AnyArray, deep: AnyArray) -> AnyArray:
        """Load a tile `[depth, columns]` of an expert's matrix."""
        return ref[expert, column, deep].T if self.op.contract else ref[expert, deep, column]

    def product(self, x: AnyArray, ref: Any, expert: AnyArray, column: AnyArray, deep: AnyArray) -> AnyArray:
        """Multiply one tile in float32: one loop iteration of a product."""
        w = self.weights(ref, expert, column, deep)
        return jnp.dot(x, w, preferred_element_type=jnp.float32)


def _wide(
    blocks: OwnedBlocks, tiles: Tiles, token: AnyArray, x: AnyArray, both: tuple[Any, Any], biases: tuple[Any, Any]
) -> AnyArray:
    """Compute `act(x G) ⊙ (x U)` for every row of every block.

    Args:
        blocks: the n blocks of choices.
        tiles: the tile sizes.
        token: the token of each row `[n, rows]`.
        x: the tokens `[T, H]`.
        both: the weights of gate and up.
        biases: their biases, or None.

    Returns:
        `[n · rows, F]`.
    """
    op, rows, hidden = blocks.op, blocks.rows, x.shape[1]
    inner = both[0].shape[1 if op.contract else 2]
    columns, depth = tile(inner, tiles.columns), tile(hidden, tiles.depth)
    added = [bias for bias in biases if bias is not None]

    def kernel(owner: Any, count: Any, token: Any, x: Any, gate: Any, up: Any, *rest: Any) -> None:
        *added, out = rest
        n, b = pl.program_id(0), pl.program_id(1)
        column = pl.ds(n * columns, columns)

        @pl.when(count[b] > 0)
        def _() -> None:  # blocks without choices read and write nothing
            expert, tokens = owner[b], token[b, :]

            def turn(k: AnyArray, sums: tuple[AnyArray, AnyArray]) -> tuple[AnyArray, AnyArray]:
                deep = pl.ds(k * depth, depth)
                part = x[tokens, deep]
                g, u = (blocks.product(part, w, expert, column, deep) for w in (gate, up))
                return sums[0] + g, sums[1] + u

            zeros = jnp.zeros((rows, columns), jnp.float32)
            g, u = lax.fori_loop(0, hidden // depth, turn, (zeros, zeros))
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
    """Compute `inner D` for every choice `[choices, H]`, in the order of the choices."""
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

            result = lax.fori_loop(0, width // depth, turn, jnp.zeros((rows, columns), jnp.float32))
            if added:
                result = result + added[0][expert, column].astype(jnp.float32)[None]
            # Unused rows of a block write to an extra row after the last choice, which is cut off.
            place = jnp.where(jnp.arange(rows) < count[b], choice[b, :], choices)
            out[place, column] = result.astype(out.dtype)

    shape = jax.ShapeDtypeStruct((choices + 1, hidden), inner.dtype)
    run = call(kernel, shape, (hidden // columns, blocks.owner.size), tiles.warps, tiles.stages)
    return run(blocks.owner, blocks.count, blocks.choice, inner, down, *([] if bias is None else [bias]))[:choices]


def compared_blocks(ids: AnyArray, experts: int, rows: int) -> SortedChoices:
    """Return the result of `sorted_blocks` for few choices by comparing all pairs: three GPU kernels instead of ten."""
    flat = ids.reshape(-1)
    num_choices = flat.size
    blocks = min(-(-num_choices // rows) + experts - 1, num_choices)
    numbers = jnp.arange(num_choices, dtype=jnp.int32)
    is_same, is_less = flat[:, None] == flat[None], flat[None] < flat[:, None]
    rank = (is_same & (numbers[None] < numbers[:, None])).sum(
        1, dtype=jnp.int32
    )  # preceding choices of the same expert
    # Every block has one choice that is first in it, so these count the blocks of preceding experts.
    first_block = (is_less & (rank % rows == 0)[None]).sum(1, dtype=jnp.int32)
    block = first_block + rank // rows
    place = block * rows + rank % rows
    row, number = (jnp.arange(n, dtype=jnp.int32)[:, None] for n in (blocks * rows, blocks))
    choice = jnp.where(place[None] == row, numbers[None], -1).max(1).reshape(blocks, rows)
    owner = jnp.where(block[None] == number, flat[None], 0).max(1)
    return SortedChoices(owner, choice >= 0, jnp.maximum(choice, 0), place)
