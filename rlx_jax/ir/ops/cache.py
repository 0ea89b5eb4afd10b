"""Ops that update the key/value cache and other arrays of the state.

Axis letters: B batch, S new tokens, T slots of the cache, K key/value heads, D head width, C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import GraphError
from rlx_jax.ir.graph import Mir
from rlx_jax.ir.operands import ELEMENTWISE, MOVEMENT, REDUCTION, STATE, Types, results_written, zero
from rlx_jax.ir.types import DimLike, TensorType, is_float, is_static, short_name

# Signature of `write_rows`: (cache, slot, new, ordered) → cache. Callers of `eval` may pass another implementation.
WriteRows = Callable[[Array, Array, Array, bool], Array]


def write_rows(cache: Array, slot: Array, new: Array, ordered: bool = False) -> Array:
    """Return the cache with `cache[b, slot[b, i]] = new[b, i]`; rows with a slot past the end are dropped.

    The batch is an axis of a `vmap`, not an index, so that it may be sharded over several devices.

    Args:
        cache: `[B,T,…]`.
        slot: `[B,S]` int32, distinct for each b.
        new: `[B,S,…]`.
        ordered: the slots increase along S.
    """

    def row(cache: Array, slot: Array, new: Array) -> Array:
        return cache.at[slot].set(new, mode="drop", unique_indices=True, indices_are_sorted=ordered)

    return jax.vmap(row)(cache, slot, new)


def _rows_written(op: Any, operands: Types, results: Types) -> int:
    """Return the bytes of a cache update in place: the new rows are read and written, the rest is untouched."""
    return 2 * operands[1].nbytes + sum(t.nbytes for t in operands[2:])


@dataclass(frozen=True)
class CacheUpdate(Mir):
    """Write the new rows of a ragged batch into a cache: cache `[B,T,C]`, new `[B,S,C]`, start and lengths `[B]`.

    Row i of batch b goes to slot `start[b] + i` if `i < lengths[b]`; padding is dropped, never clamped. With `fresh`
    the cache is empty and every row starts at slot 0, so that one slice is written instead of a scatter, with zeros
    for padding.
    """

    traits = replace(STATE, bytes=_rows_written)
    operands = "cache[B,_,…C] new:cache[B,_,…C] start:int[B] lengths:int[B]"

    fresh: bool = False

    def eval(self, cache: Array, new: Array, start: Array, lengths: Array, *, write: WriteRows = write_rows) -> Array:
        """Return the cache with the new rows; `write` is the function that writes them."""
        if self.fresh:
            new = new[:, : cache.shape[1]]  # rows past the end of the cache are padding
        step = jnp.arange(new.shape[1], dtype=jnp.int32)[None, :]
        if self.fresh:
            valid = (step < lengths[:, None]).reshape(*new.shape[:2], *(1,) * (new.ndim - 2))
            return cache.at[:, : new.shape[1]].set(jnp.where(valid, new, jnp.zeros_like(new)))
        # Padding gets distinct slots past the end: with unique indices XLA does not have to order the writes.
        slot = jnp.where(step < lengths[:, None], start[:, None] + step, cache.shape[1] + step)
        return write(cache, slot, new, True)


@dataclass(frozen=True)
class After(Mir):
    """Return the first operand, computed after the others.

    XLA may postpone the writes of all caches to the end of a program. Until then it holds the keys and values of every
    layer, although only the next op needs them.
    """

    traits = replace(MOVEMENT, narrows=0, widens=False, bytes=zero, view=lambda op, operands, results: 0)
    operands = "x *"

    def eval(self, x: Array, *others: Array) -> Array:
        """Return `x`."""
        result: Array = jax.lax.optimization_barrier((x, *others))[0]
        return result


@dataclass(frozen=True)
class Overwrite(Mir):
    """Replace a full array of the state: old and new `[…]` → new, written into the buffer of old."""

    traits = replace(STATE, bytes=results_written)
    operands = "old[…N] new:old[…N]"

    def eval(self, old: Array, new: Array) -> Array:
        return old.at[...].set(new)


def _ring_bytes(op: Any, operands: Types, results: Types) -> int:
    """Return the bytes of a ring update: those of a cache update, and a copy of ring and new rows if not in place."""
    keys, positions, _ = results
    copied = 2 * keys.nbytes if keys.shape != operands[0].shape else 0
    return _rows_written(op, operands, results) + copied + positions.nbytes


@dataclass(frozen=True)
class RingStep(Mir):
    """Read and write a ring buffer of the last T tokens, with position p in slot `p mod T`.

    Operands: ring `[B,T,K,D]`, new `[B,S,K,D]`, start and lengths `[B]` int32 (the number of tokens before this call,
    and of valid new ones).

    Results: the keys that queries of the new block may attend to, `[B,T+S,K,D]`, old ring then new block; their
    absolute positions `[B,T+S]` int32, −1 for an empty slot; and the ring after the call, with the last T of all valid
    tokens.

    In two cases the keys are the ring after the call, `[B,T,K,D]`, without a copy: if T is at least `window` + S − 1,
    because the overwritten tokens are outside of every query's window; and if T is less than the window, because such
    a ring never wraps. A decoding step and the verification of S − 1 draft tokens therefore read the cache in place.
    The default `window` is T.
    """

    traits = replace(STATE, bytes=_ring_bytes, writes=((2, 0),), size_dependent=True)
    operands = CacheUpdate.operands

    window: int | None = None

    def in_place(self, slots: DimLike, new: DimLike) -> bool:
        """Return whether queries can read the ring after the call; False for symbolic sizes."""
        if not (is_static(slots) and is_static(new)):
            return False
        window = int(slots) if self.window is None else self.window
        return int(slots) < window or int(slots) >= window + int(new) - 1

    def eval(
        self, ring: Array, new: Array, start: Array, lengths: Array, *, write: WriteRows = write_rows
    ) -> tuple[Array, Array, Array]:
        """Return the keys, their positions and the updated ring; `write` is the function that writes rows."""
        slots = ring.shape[1]
        step = jnp.arange(new.shape[1], dtype=jnp.int32)[None, :]
        new_positions = start[:, None] + step
        valid = step < lengths[:, None]
        is_retained = valid & (step >= lengths[:, None] - slots)
        slot = jnp.where(is_retained, jnp.remainder(new_positions, slots), slots + step)  # distinct, as in CacheUpdate
        new_ring = write(ring, slot, new, False)
        if self.in_place(slots, new.shape[1]):
            return new_ring, _ring_positions(start + lengths, slots), new_ring
        keys = jnp.concatenate([ring, new], axis=1)
        positions = jnp.concatenate([_ring_positions(start, slots), jnp.where(valid, new_positions, -1)], axis=1)
        return keys, positions, new_ring


def _ring_positions(count: Array, slots: int) -> Array:
    """Return the absolute position in each slot of a ring after `count` `[B]` tokens, `[B,T]`; −1 for an empty slot."""
    slot = jnp.arange(slots, dtype=jnp.int32)[None, :]
    last_position = count[:, None] - 1
    return jnp.maximum(last_position - jnp.remainder(last_position - slot, slots), -1)


def is_code_dtype(dtype: np.dtype[Any]) -> bool:
    """Return whether a cache of this dtype has codes with scales, instead of the keys and values themselves."""
    return dtype.itemsize == 1 and (is_float(dtype) or dtype == np.int8)


@dataclass(frozen=True)
class QuantizeVectors(Mir):
    """Quantize vectors along the last axis: x `[…,D]` → codes `[…,D]` of `dtype`, and scales `[…]` f32.

    The scale of a vector is max |x| / M, with M the largest finite number of `dtype` (127 for i8, 448 for f8_e4m3).
    The codes are x / scale, rounded to nearest even. A vector of zeros has the scale 0. A vector with an infinity or
    NaN has a scale that is not finite, so it decodes to values that are not finite.
    """

    # The scale needs the range of f32, so mixed precision does not narrow the operand.
    traits = replace(REDUCTION, narrows=0, widens=False)
    operands = "x:float[…,D]"

    dtype: np.dtype[Any]

    def check(self, *operands: TensorType) -> None:
        if not is_code_dtype(self.dtype):
            raise GraphError(f"quantize_vectors: codes are i8 or an 8-bit float, got {short_name(self.dtype)}")

    def eval(self, x: Array) -> tuple[Array, Array]:
        info: Any = jnp.finfo(self.dtype) if is_float(self.dtype) else jnp.iinfo(self.dtype)
        limit = jnp.float32(info.max)
        x = x.astype(jnp.float32)
        scale = jnp.abs(x).max(axis=-1) / limit
        codes = jnp.clip(x / jnp.where(scale > 0, scale, 1.0)[..., None], -limit, limit)
        return (codes if is_float(self.dtype) else jnp.round(codes)).astype(self.dtype), scale


@dataclass(frozen=True)
class DequantizeVectors(Mir):
    """Decode the result of `QuantizeVectors`: codes `[…,D]` and scales `[…]` f32 → codes · scale `[…,D]` in `dtype`."""

    traits = replace(ELEMENTWISE, narrows=0, widens=False)
    operands = "codes[…S,D] scale:f32[…S]"

    dtype: np.dtype[Any]

    def check(self, *operands: TensorType) -> None:
        if not is_code_dtype(operands[0].dtype):
            raise GraphError(f"dequantize_vectors: codes are i8 or an 8-bit float, got {operands[0]}")

    def eval(self, codes: Array, scale: Array) -> Array:
        return (codes.astype(jnp.float32) * scale[..., None]).astype(self.dtype)
