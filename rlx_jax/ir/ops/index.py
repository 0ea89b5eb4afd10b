"""Ops that read rows by number, and the numbers themselves."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from rlx_jax.errors import DTypeError, ShapeError
from rlx_jax.ir.graph import Mir
from rlx_jax.ir.ops.shape import check_axis
from rlx_jax.ir.traits import TOKENS, results_written
from rlx_jax.ir.types import TensorType, is_static

Array = jax.Array


@dataclass(frozen=True)
class Gather(Mir):
    """Rows of a table: `table[ids]`, table `[V, …]`, ids `[…]` integers in `[0, V)` → `[…ids, …]`.

    Ids are checked on the host before a model is called; here an id out of range reads the nearest row.
    """

    traits = replace(TOKENS, narrows=0)
    ids = (1, 0)

    def check(self, *operands: TensorType) -> None:
        table, ids = operands
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise DTypeError(f"gather: ids are integers, got {ids}")
        if not table.rank:
            raise ShapeError(f"gather: the table has rows, got {table}")

    def eval(self, table: Array, ids: Array) -> Array:
        return jnp.take(table, ids, axis=0, mode="clip")


@dataclass(frozen=True)
class TakeRow(Mir):
    """`y[b, 0] = x[b, index[b]]`: x `[B, S, …]` (or `[1, S, …]`, shared by all rows), index `[B]` → `[B, 1, …]`."""

    traits = TOKENS
    ids = (1, 1)

    def check(self, *operands: TensorType) -> None:
        x, index = operands
        shared = x.rank > 1 and is_static(x.shape[0]) and x.shape[0] == 1
        if (
            x.rank < 2
            or index.rank != 1
            or not (shared or index.shape == x.shape[:1])
            or not jnp.issubdtype(index.dtype, jnp.integer)
        ):
            raise ShapeError(f"take_row: x is [B,S,…] and the index [B] integers, got {x} and {index}")

    def eval(self, x: Array, index: Array) -> Array:
        if x.shape[0] is not index.shape[0] and x.shape[0] == 1:
            return jnp.take(x[0], index, axis=0, mode="clip")[:, None]
        if x.shape[1] == 1:  # a symbolic size is never 1 here
            return x
        at = index.reshape(-1, *(1,) * (x.ndim - 1))
        return jnp.take_along_axis(x, at, axis=1, mode="clip")


@dataclass(frozen=True)
class Iota(Mir):
    """`0, 1, …` along `axis` of the operand, as int32 of shape `[size]`."""

    traits = replace(TOKENS, bytes=results_written)

    axis: int

    def check(self, *operands: TensorType) -> None:
        check_axis("iota", self.axis, operands[0])

    def eval(self, x: Array) -> Array:
        return jnp.arange(x.shape[self.axis], dtype=jnp.int32)
