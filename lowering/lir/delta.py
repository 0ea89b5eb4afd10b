"""The gated delta rule in kernels that hold a part of the state: columns of it, which depend on no others.

Measured on one H200, bf16, 16 heads of width 128, ms, without kernels and with: one token of 18 layers, 8 rows 0.224
and 0.157, 64 rows 0.997 and 0.763, and 1 row 0.137 and 0.143, which is therefore left to XLA; one layer over 1 x 4096
tokens 0.97 and 0.42, over 8 x 4096 3.99 and 2.31.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from rlx_jax.ir.ops.recurrent import GatedDeltaOp
from rlx_jax.lowering.lir.pallas import call, tile, with_gradient_of
from rlx_jax.lowering.lir.recurrent import by_token, chunks_at_once, chunks_of, delta_given, one_token

AnyArray = Any
PROGRAMS = 128
"""Programs of a kernel that one Hopper runs at once, about."""


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
    kept, fresh, erased, written = (
        x.reshape(len(x), -1, *x.shape[1 + len(lead) :]) for x in (kept, fresh, erased, written)
    )
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
