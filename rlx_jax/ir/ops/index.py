"""Ops that read rows by number, and the numbers themselves."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from rlx_jax.errors import DTypeError, GraphError, ShapeError
from rlx_jax.ir.graph import Mir
from rlx_jax.ir.ops.shape import check_axis
from rlx_jax.ir.traits import MOVEMENT, TOKENS, results_written
from rlx_jax.ir.types import TensorType, is_static

Array = jax.Array


@dataclass(frozen=True)
class Gather(Mir):
    """Rows of a table: `table[ids]`, table `[V, …]`, ids `[…]` integers in `[0, V)` → `[…ids, …]`.

    Ids are checked on the host before a model is called; here an id out of range reads the nearest row.
    """

    traits = replace(TOKENS, narrows=0)
    ids = (1, 0, 0)

    def check(self, *operands: TensorType) -> None:
        table, ids = operands
        if not jnp.issubdtype(ids.dtype, jnp.integer):
            raise DTypeError(f"gather: ids are integers, got {ids}; an input of ids has dtype='int32'")
        if not table.rank:
            raise ShapeError(f"gather: the table has rows, got {table}")

    def eval(self, table: Array, ids: Array) -> Array:
        return jnp.take(table, ids, axis=0, mode="clip")


@dataclass(frozen=True)
class TakeRow(Mir):
    """`y[b, 0] = x[b, index[b]]`: x `[B, S, …]` (or `[1, S, …]`, shared by all rows), index `[B]` → `[B, 1, …]`."""

    traits = TOKENS
    ids = (1, 0, 1)

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


MODES = ("fill", "wrap", "clip")
"""What an index out of range reads, as in `jax.numpy`. `fill`: negative ones count from the end, others give NaN (the
least number of a whole dtype). `wrap`: all count round. `clip`: the nearest entry, and negative ones the first."""


def _check_indices(op: str, indices: TensorType, mode: str = "fill", modes: tuple[str, ...] = MODES) -> None:
    if not jnp.issubdtype(indices.dtype, jnp.integer):
        raise DTypeError(f"{op}: indices are integers, got {indices}")
    if mode not in modes:
        raise GraphError(f"{op}: mode is {mode!r}; expected one of {', '.join(modes)}")


@dataclass(frozen=True)
class Take(Mir):
    """Entries of one axis: `y[…, i…, …] = x[…, indices[i…], …]`, the axes of `indices` in the place of `axis`."""

    traits = replace(TOKENS, narrows=1)

    axis: int
    mode: str = "fill"

    def check(self, *operands: TensorType) -> None:
        check_axis("take", self.axis, operands[0])
        _check_indices("take", operands[1], self.mode)

    def eval(self, x: Array, indices: Array) -> Array:
        return jnp.take(x, indices, axis=self.axis, mode=self.mode)


@dataclass(frozen=True)
class TakeAlongAxis(Mir):
    """`y[…, i, …] = x[…, indices[…, i, …], …]`: indices as x but for the size of `axis`; other axes may be 1."""

    traits = replace(TOKENS, narrows=1)

    axis: int
    mode: str = "fill"

    def check(self, *operands: TensorType) -> None:
        x, indices = operands
        check_axis("take_along_axis", self.axis, x)
        _check_indices("take_along_axis", indices, self.mode, ("fill", "clip"))
        if x.rank != indices.rank:
            raise ShapeError(f"take_along_axis: x and indices have one rank, got {x} and {indices}")

    def eval(self, x: Array, indices: Array) -> Array:
        return jnp.take_along_axis(x, indices, axis=self.axis, mode=self.mode)


def _check_tuples(op: str, x: TensorType, indices: TensorType, batch_dims: int = 0) -> None:
    """The last axis of `indices` has an index for each of the leading axes of x."""
    _check_indices(op, indices)
    depth = indices.shape[-1] if indices.rank else 0
    if not is_static(depth) or not 1 <= depth <= x.rank - batch_dims or not 0 <= batch_dims < indices.rank:
        raise ShapeError(f"{op}: the last axis of the indices numbers axes of {x} behind {batch_dims}, got {indices}")
    if x.shape[:batch_dims] != indices.shape[:batch_dims]:
        raise ShapeError(f"{op}: x and indices share {batch_dims} leading axes, got {x} and {indices}")


@dataclass(frozen=True)
class GatherNd(Mir):
    """`y[b…, i…] = x[b…, indices[b…, i…, 0], indices[b…, i…, 1], …]`: the last axis of the indices is a place in x.

    The first `batch_dims` axes are shared. Negative indices count from the end; others out of range give NaN.
    """

    traits = replace(TOKENS, narrows=1)

    batch_dims: int = 0

    def check(self, *operands: TensorType) -> None:
        x, indices = operands
        _check_tuples("gather_nd", x, indices, self.batch_dims)

    def eval(self, x: Array, indices: Array) -> Array:
        def one(x: Array, indices: Array) -> Array:
            return x.at[tuple(jnp.moveaxis(indices, -1, 0))].get(mode="fill")

        for _ in range(self.batch_dims):
            one = jax.vmap(one)
        return one(x, indices)


SCATTER: tuple[str, ...] = ("set", "add", "mul", "min", "max")
"""How a written value joins the one that is there."""


def _check_scatter(op: str, kind: str, x: TensorType, updates: TensorType) -> None:
    if kind not in SCATTER:
        raise GraphError(f"{op}: unknown kind {kind!r}; known are {', '.join(SCATTER)}")
    if x.dtype != updates.dtype:
        raise DTypeError(f"{op}: x is {x}, the updates are {updates}; cast one of them")
    if kind in ("add", "mul") and x.dtype == bool:
        raise DTypeError(f"{op}: {kind} needs numbers, got {x}")


def _write(x: Array, places: tuple[Array, ...], updates: Array, kind: str) -> Array:
    written: Array = getattr(x.at[places], kind)(updates, mode="drop")
    return written


@dataclass(frozen=True)
class Scatter(Mir):
    """x with `x[…, indices[…, i, …], …] ∘ updates[…, i, …]` along `axis`, ∘ by `kind`.

    The kinds are `set`, `add`, `mul`, `min` and `max`. Indices and updates have one shape, of x's rank and no longer
    than x on the other axes. Negative indices count from the end; others out of range are dropped. What `set` writes
    twice to one place is one of the two. `mul` has no gradient in JAX.
    """

    traits = replace(MOVEMENT, widens=False)

    axis: int
    kind: str = "set"

    def check(self, *operands: TensorType) -> None:
        x, indices, updates = operands
        check_axis("scatter", self.axis, x)
        _check_indices("scatter", indices)
        _check_scatter("scatter", self.kind, x, updates)
        if indices.shape != updates.shape or x.rank != indices.rank:
            raise ShapeError(f"scatter: indices and updates have one shape, of the rank of {x}; "
                             f"got {indices} and {updates}")  # fmt: skip
        for axis, (size, own) in enumerate(zip(indices.shape, x.shape, strict=True)):
            fits = size == own or (is_static(size) and is_static(own) and size < own)
            if axis != self.axis % x.rank and not fits:
                raise ShapeError(f"scatter: axis {axis} of the indices {indices} is longer than that of {x}")

    def eval(self, x: Array, indices: Array, updates: Array) -> Array:
        places = [jax.lax.broadcasted_iota(jnp.int32, indices.shape, axis) for axis in range(x.ndim)]
        places[self.axis] = indices.astype(jnp.int32)
        return _write(x, tuple(places), updates, self.kind)


@dataclass(frozen=True)
class ScatterNd(Mir):
    """x with `x[indices[i…, 0], indices[i…, 1], …] ∘ updates[i…]`, ∘ by `kind` as in `Scatter`; `GatherNd` reads so."""

    traits = replace(MOVEMENT, widens=False)

    kind: str = "set"

    def check(self, *operands: TensorType) -> None:
        x, indices, updates = operands
        _check_tuples("scatter_nd", x, indices)
        _check_scatter("scatter_nd", self.kind, x, updates)
        want = (*indices.shape[:-1], *x.shape[indices.shape[-1] :])
        if updates.shape != want:
            raise ShapeError(
                f"scatter_nd: the updates of {indices} in {x} are {TensorType(want, x.dtype)}, got {updates}"
            )

    def eval(self, x: Array, indices: Array, updates: Array) -> Array:
        return _write(x, tuple(jnp.moveaxis(indices, -1, 0)), updates, self.kind)
