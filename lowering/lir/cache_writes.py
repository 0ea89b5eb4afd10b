"""How rows are written into a 16-bit cache on a CPU.

XLA:CPU's pass `float-normalization-bf16` computes every bf16 op in f32, scatters and `dynamic_update_slice` too. A
scatter of one row into a bf16 cache then widens the cache to f32 and narrows it again; of a batch of one row it
becomes a fusion that reads the old cache twice, so that the cache is copied as well. f16 is not normalized, but the
write of one row may be fused into the ops that read the cache, which also reads the old cache twice.

Two properties avoid this. A bf16 cache is written by an elementwise select, which XLA computes in place and in one
pass. And the write is the body of a loop of at most one turn: XLA fuses nothing across the border of a loop, and a
loop updates its carry in place.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rlx_jax.device import Device
from rlx_jax.ir.ops.attention import CacheUpdate, RingStep, write_rows
from rlx_jax.ir.types import is_float
from rlx_jax.lowering.lir.plan import Call, Choice

Array = jax.Array
CacheWrite = CacheUpdate | RingStep


def choose_cache_write(call: Call, device: Device) -> Choice | None:
    """`in_loop` for a write that scatters rows into a 16-bit floating-point cache on a CPU."""
    op, (cache, *_) = call
    scatters = not (isinstance(op, CacheUpdate) and op.fresh)
    if device.kind == "cpu" and scatters and is_float(cache.dtype) and cache.dtype.itemsize == 2:
        return Choice("in_loop", "XLA:CPU copies a 16-bit cache otherwise")
    return None


def in_loop(op: CacheWrite, cache: Array, new: Array, start: Array, lengths: Array) -> Any:
    """Evaluate a `CacheUpdate` or `RingStep` with its write in a loop of at most one turn."""
    return op.update(cache, new, start, lengths, write_in_loop)


def write_in_loop(cache: Array, slots: Array, rows: Array, ordered: bool = False) -> Array:
    """Write rows as `write_rows` does, see there; skip the cache if no row has a slot in it."""
    turns = (slots < cache.shape[1]).any().astype(jnp.int32)

    def scatter(_: Any, cache: Array) -> Array:
        return write_rows(cache, slots, rows, ordered)

    # The number of the row that goes to each slot, -1 for none: `[B,T]`, small, and equal for all layers.
    numbers = jnp.broadcast_to(jnp.arange(slots.shape[1], dtype=jnp.int32), slots.shape)
    sources = write_rows(jnp.full(cache.shape[:2], -1, jnp.int32), slots, numbers, ordered)
    is_written = (sources >= 0).reshape(*sources.shape, *(1,) * (cache.ndim - 2))

    def select(_: Any, cache: Array) -> Array:
        # One row goes to every slot that is written: broadcast, for a gather of bf16 is slower.
        each = rows if rows.shape[1] == 1 else jax.vmap(lambda r, s: jnp.take(r, s, axis=0, mode="clip"))(rows, sources)
        return jnp.where(is_written, each, cache)

    written: Array = lax.fori_loop(0, turns, scatter if cache.dtype == np.float16 else select, cache)
    return written
