"""Small Pallas kernels (Mosaic GPU) that the bytes of their operands limit: states, convolutions, largest entries.

Measured on one H200, µs, in Triton's dialect, XLA's form and this one. One token through a state of 16 heads of 128 x
128: 1 row 2.6, 8.7 and 2.2; 8 rows 6.4, 19 and 5.5; 64 rows 39.1, 71 and 39.9. The convolution of 8 x 4096 tokens of
6,144 channels in bf16, with silu and norms: 326 and 270; of 8 x 4095 584 and 276. The 8 largest of 128 entries of
16,384 rows: 8.0, 63 and 8.0; the 10 largest of 512 51 and 35.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rlx_jax.ir.ops.index import TopK
from rlx_jax.ir.ops.recurrent import GatedDeltaOp
from rlx_jax.lowering.lir.implementations import with_reference
from rlx_jax.lowering.lir.mosaic import flipped, load, pl, plgpu, run_kernel, store, tiled
from rlx_jax.lowering.lir.recurrent import MAX_TAPS, STATE_COLUMNS, one_token

AnyArray = Any

# Tokens of a block that is convolved, blocks of a program, and how many of them are in shared memory.
CONVOLVED_TOKENS, BLOCKS, SLOTS = 16, 8, 3

# Rows of which a program selects the largest entries.
SELECTING_ROWS = 16


def state_layout() -> Any:
    """Return where columns of a state `[keys, STATE_COLUMNS]` are: a warp has all rows of 16 columns."""
    return tiled(((8, STATE_COLUMNS), (8, 16), (4,)), (-4,), (-3, -2))


@with_reference(one_token)
def one_pass(op: GatedDeltaOp, *operands: AnyArray) -> tuple[AnyArray, ...]:
    """Compute the op over one token; the state is read once and updated in place."""
    q, k, v, g, beta = (x[:, 0] for x in operands[:5])
    out, new_state = update_states(op.factor(k.shape[2]), q, k, v, g, beta, op.initial_state(*operands))
    return out[:, None], new_state


@functools.partial(jax.jit, static_argnums=(0, 7))  # equal layers of a program are lowered once
def update_states(
    scale: float, q: AnyArray, k: AnyArray, v: AnyArray, g: AnyArray, beta: AnyArray, state: AnyArray,
    interpret: Any = None,
) -> tuple[AnyArray, AnyArray]:  # fmt: skip
    """Return the results and the new states of one token of each row.

    Args:
        scale: the factor of queries.
        q, k, v, g, beta: of the token.
        state: the states `[B, H, keys, values]`, of which a program has some columns of one.
        interpret: parameters of Mosaic's interpreter; None to compile.
    """
    batch, heads, keys, values = state.shape
    times = heads // k.shape[1]

    def body(refs: Any) -> None:
        h, b = refs.head, refs.row
        columns, tile = pl.ds(refs.part * STATE_COLUMNS, STATE_COLUMNS), state_layout()
        spread = functools.partial(lax.broadcast_in_dim, shape=(keys, STATE_COLUMNS))
        old = load(refs.state.at[b, h, :, columns], tile)
        vectors = [load(x.at[b, h // times], tile.reduce(1)) for x in (refs.q, refs.k)]
        value = load(refs.v.at[b, h, columns], tile.reduce(0)).astype(jnp.float32)
        query, key = (spread(x.astype(jnp.float32), broadcast_dimensions=(0,)) for x in vectors)
        old = old * jnp.exp(refs.g[b, h].astype(jnp.float32))
        change = refs.beta[b, h].astype(jnp.float32) * (value - (old * key).sum(axis=0))
        new = old + key * spread(change, broadcast_dimensions=(1,))
        store(refs.state.at[b, h, :, columns], new)
        store(refs.out.at[b, h, columns], (scale * (new * query).sum(axis=0)).astype(v.dtype))

    ref = jax.new_ref(state)
    (out,) = run_kernel(
        body, {"q": q, "k": k, "v": v, "g": g, "beta": beta, "state": ref}, {"out": v},
        {}, {"part": values // STATE_COLUMNS, "head": heads, "row": batch}, interpret=interpret,
        unsafe_no_auto_barriers=True,
    )  # fmt: skip
    return out, jax.freeze(ref)


def token_layout(width: int) -> Any:
    """Return where tokens `[tokens, width]` are: a lane has 8 neighbouring columns."""
    rows = 256 // width
    return tiled(((4 * rows, width), (rows, width), (8,)), (-5,), (-3, -2))


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5, 6))
def convolve(
    mixed: AnyArray, window: AnyArray, first: int, heads: int, width: int, unit: float | None, interpret: Any = None
) -> AnyArray:
    """Return silu of a causal convolution, in heads `[B, S, heads, width]` that may be divided by their norm.

    TMA reads zeros out of bounds: before the first token and after the last one, which it does not write.

    Args:
        mixed: `[B, S, M]`.
        window: weights `[C, J]`.
        first: the first column of the heads, in both.
        heads, width: their number, and their width, 64 or 128.
        unit: what is added to the sum of squares of a head before its root, by which it is divided; None for no norm.
        interpret: parameters of Mosaic's interpreter; None to compile.
    """
    (batch, tokens, _), dtype, taps = mixed.shape, mixed.dtype, window.shape[1]
    size, before, layout = CONVOLVED_TOKENS, taps - 1, token_layout(width)
    blocks, rows = min(BLOCKS, -(-tokens // size)), size + before
    weights = window[first : first + heads * width].T.astype(jnp.float32)
    if interpret is not None:  # the interpreter has no zeros before an array
        mixed, before = jnp.pad(mixed, ((0, 0), (before, 0), (0, 0))), 0

    def spread(x: AnyArray, axis: int) -> AnyArray:
        return plgpu.layout_cast(lax.broadcast_in_dim(x, (size, width), (axis,)), layout)

    def body(refs: Any) -> None:
        columns, source = (pl.ds(start + refs.head * width, width) for start in (0, first))

        def copy(block: AnyArray, slot: AnyArray) -> None:
            place = refs.row, pl.ds((refs.program * blocks + block) * size - before, rows), source
            plgpu.copy_gmem_to_smem(refs.x.at[place], refs.tokens_in.at[slot, pl.ds(0, rows)], refs.copied.at[slot])

        for slot in range(min(SLOTS, blocks)):
            copy(jnp.int32(slot), jnp.int32(slot))
        rates = [load(refs.weights.at[j, columns], layout.reduce((0,))) for j in range(taps)]

        @pl.loop(0, blocks)
        def _(block: AnyArray) -> None:
            slot = lax.rem(block, SLOTS)
            plgpu.barrier_wait(refs.copied.at[slot])
            y = jnp.float32(0)
            for j, rate in enumerate(rates):
                row = load(refs.tokens_in.at[slot, pl.ds(j, size)], layout)
                y = y + row.astype(jnp.float32) * spread(rate, 1)
            y = y.astype(dtype).astype(jnp.float32)
            y = (y * jax.nn.sigmoid(y)).astype(dtype)
            if unit is not None:
                y = y.astype(jnp.float32)
                y = (y * spread(lax.rsqrt((y * y).sum(axis=1) + unit), 0)).astype(dtype)
            target = refs.tokens_out.at[lax.rem(block, 2)]
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            target[...] = y
            plgpu.commit_smem()
            tokens_of_block = pl.ds((refs.program * blocks + block) * size, size)
            plgpu.copy_smem_to_gmem(target, refs.out.at[refs.row, tokens_of_block, columns])
            pl.when(block + SLOTS < blocks)(lambda: copy(block + SLOTS, slot))

        plgpu.wait_smem_to_gmem(0)

    (out,) = run_kernel(
        body, {"x": mixed, "weights": weights}, {"out": jax.ShapeDtypeStruct((batch, tokens, heads * width), dtype)},
        {
            "tokens_in": plgpu.SMEM((SLOTS, size + MAX_TAPS - 1, width), dtype),
            "tokens_out": plgpu.SMEM((2, size, width), dtype),
            "copied": plgpu.Barrier(num_barriers=SLOTS),
        },
        {"program": -(-tokens // (size * blocks)), "head": heads, "row": batch}, interpret=interpret, approx_math=True,
        unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane,
    )  # fmt: skip
    return out.reshape(batch, tokens, heads, width)


def entry_layout() -> Any:
    """Return where the entries of rows are: 8 lanes share a row."""
    return tiled(((16, 32), (4, 32), (4,)), (-5,), (-3, -2))


@with_reference(TopK.eval)
def selected(op: TopK, x: AnyArray) -> tuple[AnyArray, AnyArray]:
    """Compute the op along the last axis."""
    return tuple(a.reshape(*x.shape[:-1], op.k) for a in select(op.k, x.reshape(-1, x.shape[-1])))


@functools.partial(jax.jit, static_argnums=(0, 2))
def select(count: int, rows: AnyArray, interpret: Any = None) -> list[AnyArray]:
    """Return the `count` largest entries of each row and their numbers, by selecting the largest one `count` times."""
    size, chosen = rows.shape[1], jnp.iinfo(jnp.int32).min

    def body(refs: Any) -> None:
        own, tile = pl.ds(refs.program * SELECTING_ROWS, SELECTING_ROWS), entry_layout()
        spread = functools.partial(lax.broadcast_in_dim, shape=(SELECTING_ROWS, size), broadcast_dimensions=(0,))
        keys = flipped(lax.bitcast_convert_type(load(refs.x.at[own], tile), jnp.int32))
        keys = jnp.maximum(keys, chosen + 1)
        left = size - plgpu.broadcasted_iota(jnp.int32, keys.shape, 1, layout=tile)  # most for the first of equal ones
        for i in range(count):
            top = keys.max(axis=1)
            first = jnp.where(keys == spread(top), left, 0).max(axis=1)
            keys = jnp.where(left == spread(first), chosen, keys)
            store(refs.values.at[own, i], lax.bitcast_convert_type(flipped(top), jnp.float32))
            store(refs.ids.at[own, i], size - first)

    results: list[AnyArray] = run_kernel(
        body, {"x": rows},
        {n: jax.ShapeDtypeStruct((len(rows), count), d) for n, d in (("values", jnp.float32), ("ids", jnp.int32))},
        {}, {"program": len(rows) // SELECTING_ROWS}, interpret=interpret, unsafe_no_auto_barriers=True,
    )  # fmt: skip
    return results
