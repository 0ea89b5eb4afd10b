"""The last tokens up to each, and what a sequence leaves of them behind its end."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from rlx_jax.errors import ShapeError
from rlx_jax.ir.graph import Mir
from rlx_jax.ir.traits import TOKENS
from rlx_jax.ir.types import TensorType, is_static

Array = jax.Array


@dataclass(frozen=True)
class TokenWindows(Mir):
    """`y[b, t, j] = x[b, t + j]` for j < `width`: x `[B, S + width − 1, …]` → `[B, S, width, …]`."""

    traits = TOKENS

    width: int

    def check(self, *operands: TensorType) -> None:
        (x,) = operands
        if self.width < 1 or x.rank < 2 or (is_static(x.shape[1]) and x.shape[1] < self.width):
            raise ShapeError(f"windows: x is [B, S + {self.width - 1}, …], got {x}")

    def eval(self, x: Array) -> Array:
        count = x.shape[1] - (self.width - 1)
        if isinstance(count, int) and count == 1:
            return x[:, None]
        return jnp.stack([x[:, j : j + count] for j in range(self.width)], axis=2)


@dataclass(frozen=True)
class TailRows(Mir):
    """`y[b, j] = x[b, lengths[b] + j]` for j < `count`: x `[B, S + count, …]` and lengths `[B]` in `0 … S`.

    Behind `count` tokens of the past and S new ones, of which a row has `lengths`: its last `count` tokens.
    """

    traits = TOKENS

    count: int

    def check(self, *operands: TensorType) -> None:
        x, lengths = operands
        short = x.rank < 2 or (is_static(x.shape[1]) and x.shape[1] <= self.count)
        if self.count < 1 or short or lengths.shape != x.shape[:1] or not jnp.issubdtype(lengths.dtype, jnp.integer):
            raise ShapeError(f"tail_rows: x is [B, S + {self.count}, …] and lengths [B] integers, got {x}, {lengths}")

    def eval(self, x: Array, lengths: Array) -> Array:
        if isinstance(x.shape[1], int) and x.shape[1] == self.count + 1:  # one new token, or none
            new = (lengths > 0).reshape(-1, *(1,) * (x.ndim - 1))
            return jnp.where(new, x[:, 1:], x[:, :-1])
        return jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, self.count))(x, lengths)
