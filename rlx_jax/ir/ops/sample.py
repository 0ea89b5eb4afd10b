"""Drawing a class from logits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from rlx_jax.errors import DTypeError, GraphError, ShapeError
from rlx_jax.ir.graph import Mir
from rlx_jax.ir.traits import REDUCTION
from rlx_jax.ir.types import TensorType, is_float

Array = jax.Array


@dataclass(frozen=True)
class Sample(Mir):
    """One class of each row, i32: logits `[…, V]`, a seed of rank 0 (i32 or u32) → `[…]`.

    In this order: logits / `temperature`; those below the `top_k`-th are dropped (equal ones stay); then those outside
    of the shortest run of the likeliest whose probabilities reach `top_p`. A temperature of 0 takes the largest logit.
    The numbers are those of `jax.random.categorical` under `jax.random.key(seed)`.
    """

    traits = replace(REDUCTION, narrows=0, widens=False)

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def check(self, *operands: TensorType) -> None:
        logits, seed = operands
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise GraphError(f"sample: temperature is a number of at least 0, got {self.temperature}")
        if self.top_k is not None and (isinstance(self.top_k, bool) or self.top_k < 1):
            raise GraphError(f"sample: top_k is an int of at least 1, or None; got {self.top_k!r}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise GraphError(f"sample: top_p is over 0 and at most 1, or None; got {self.top_p!r}")
        if not logits.rank or not is_float(logits.dtype):
            raise DTypeError(f"sample: logits are floats […, V], got {logits}")
        if seed.rank or not jnp.issubdtype(seed.dtype, jnp.integer):
            raise ShapeError(f"sample: the seed is an integer of rank 0, got {seed}")

    def eval(self, logits: Array, seed: Array) -> Array:
        wide = logits.astype(jnp.float32)
        if self.temperature == 0:
            return jnp.argmax(wide, axis=-1).astype(jnp.int32)
        wide = wide / self.temperature
        ranked = jnp.sort(wide, axis=-1, descending=True)
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = jax.lax.slice_in_dim(ranked, self.top_k - 1, self.top_k, axis=-1)
            wide, ranked = (jnp.where(a < least, -jnp.inf, a) for a in (wide, ranked))
        if self.top_p is not None:
            mass = jax.nn.softmax(ranked, axis=-1)
            before = jnp.cumsum(mass, axis=-1) - mass
            last = jnp.min(jnp.where(before < self.top_p, ranked, jnp.inf), axis=-1, keepdims=True)
            wide = jnp.where(wide < last, -jnp.inf, wide)
        return jax.random.categorical(jax.random.key(seed), wide, axis=-1).astype(jnp.int32)
