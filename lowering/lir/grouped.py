"""The experts of a mixture as two kernels: one for gate, up and what lies between, one for down.

Choices are sorted by expert, in blocks of rows of one expert each; a program of a kernel multiplies a block with
columns of its own expert's weights where they stand, so that nothing is copied and no expert is read that nobody chose.

Measured on one H200, bf16, 8 layers of 128 experts of width 768 over 2048, 8 of them for each token, ms, the best form
without kernels and this: 8 tokens 1.26 and 1.13; 64 tokens 2.92 and 2.48; 256 tokens 5.4 and 2.8; 2048 tokens 20.5 and
5.3; 16384 tokens 40 and 23.6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from rlx_jax.ir.ops.experts import ExpertFfn
from rlx_jax.lowering.lir.experts import NONE, SortedChoices, blocked, combined, sorted_blocks
from rlx_jax.lowering.lir.pallas import call, tile, with_gradient_of

AnyArray = Any
COMPARED = 2048
"""Choices that are sorted by comparing each with each, in 10 µs; sorting takes 50."""


@dataclass(frozen=True)
class Tiles:
    """How a kernel is cut: columns of its result, numbers that are summed a turn, warps, turns loaded ahead."""

    columns: int
    depth: int
    warps: int
    stages: int


TILES = {
    16: (Tiles(64, 128, 4, 3), Tiles(64, 128, 4, 3)),
    64: (Tiles(128, 64, 4, 3), Tiles(128, 64, 4, 3)),
    128: (Tiles(128, 64, 8, 4), Tiles(256, 64, 8, 3)),
}
"""Of gate and up, and of down, by the rows of a block: the best of what was tried on one H200."""


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
                g, u = (
                    a + bias[expert, column].astype(jnp.float32)[None] for a, bias in zip((g, u), added, strict=True)
                )
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
