"""Ops that read rows by number, and the numbers themselves."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array, lax

from rlx_jax.errors import DTypeError, GraphError, ShapeError
from rlx_jax.ir.graph import Mir
from rlx_jax.ir.traits import MOVEMENT, TOKENS, results_written
from rlx_jax.ir.types import TensorType, is_static


@dataclass(frozen=True)
class Gather(Mir):
    """Rows of a table: `table[ids]`, table `[V, …]`, ids `[…]` integers in `[0, V)` → `[…ids, …]`.

    Ids are checked on the host before a model is called; here an id out of range reads the nearest row.
    """

    traits = replace(TOKENS, narrows=0)
    operands = "table[_,…] ids:int"
    ids = (1, 0, 0)

    def eval(self, table: Array, ids: Array) -> Array:
        return jnp.take(table, ids, axis=0, mode="clip")


@dataclass(frozen=True)
class TakeRow(Mir):
    """`y[b, 0] = x[b, index[b]]`: x `[B, S, …]` (or `[1, S, …]`, shared by all rows), index `[B]` → `[B, 1, …]`."""

    traits = TOKENS
    operands = "x[B?,S,…] index:int[B]"
    ids = (1, 0, 1)

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
    operands = "x@axis"

    axis: int

    def eval(self, x: Array) -> Array:
        return jnp.arange(x.shape[self.axis], dtype=jnp.int32)


# What an index out of range reads, as in `jax.numpy`. `fill`: negative ones count from the end, others give NaN (the
# least number of a whole dtype). `wrap`: all count round. `clip`: the nearest entry, and negative ones the first.
MODES = ("fill", "wrap", "clip")


@dataclass(frozen=True)
class Take(Mir):
    """Entries of one axis: `y[…, i…, …] = x[…, indices[i…], …]`, the axes of `indices` in the place of `axis`."""

    traits = replace(TOKENS, narrows=1)
    choices = {"mode": MODES}
    operands = "x@axis indices:int"

    axis: int
    mode: str = "fill"

    def eval(self, x: Array, indices: Array) -> Array:
        return jnp.take(x, indices, axis=self.axis, mode=self.mode)


@dataclass(frozen=True)
class TakeAlongAxis(Mir):
    """`y[…, i, …] = x[…, indices[…, i, …], …]`: indices as x but for the size of `axis`; other axes may be 1."""

    traits = replace(TOKENS, narrows=1)
    choices = {"mode": ("fill", "clip")}
    operands = "x@axis indices:int"

    axis: int
    mode: str = "fill"

    def check(self, *operands: TensorType) -> None:
        x, indices = operands
        if x.rank != indices.rank:
            raise ShapeError(f"take_along_axis: x and indices have one rank, got {x} and {indices}")

    def eval(self, x: Array, indices: Array) -> Array:
        return jnp.take_along_axis(x, indices, axis=self.axis, mode=self.mode)


def _check_tuples(op: str, x: TensorType, indices: TensorType, batch_dims: int = 0) -> None:
    """The last axis of `indices` has an index for each of the leading axes of x."""
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
    operands = "x indices:int"

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


# How a written value joins the one that is there.
SCATTER: tuple[str, ...] = ("set", "add", "mul", "min", "max")


def _check_scatter(op: str, kind: str, x: TensorType) -> None:
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

    choices = {"kind": SCATTER}
    operands = "x@axis indices:int[…I] updates:x[…I]"

    axis: int
    kind: str = "set"

    def check(self, *operands: TensorType) -> None:
        x, indices, _ = operands
        _check_scatter("scatter", self.kind, x)
        if x.rank != indices.rank:
            raise ShapeError(f"scatter: indices have the rank of {x}, got {indices}")
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
    choices = {"kind": SCATTER}
    operands = "x indices:int updates:x"

    kind: str = "set"

    def check(self, *operands: TensorType) -> None:
        x, indices, updates = operands
        _check_tuples("scatter_nd", x, indices)
        _check_scatter("scatter_nd", self.kind, x)
        want = (*indices.shape[:-1], *x.shape[indices.shape[-1] :])
        if updates.shape != want:
            expected = TensorType(want, x.dtype)
            raise ShapeError(f"scatter_nd: the updates of {indices} in {x} are {expected}, got {updates}")

    def eval(self, x: Array, indices: Array, updates: Array) -> Array:
        return _write(x, tuple(jnp.moveaxis(indices, -1, 0)), updates, self.kind)


# -- the last tokens up to each, and what a sequence leaves of them behind its end -------------


@dataclass(frozen=True)
class TokenWindows(Mir):
    """`y[b, t, j] = x[b, t + j]` for j < `width`: x `[B, S + width − 1, …]` → `[B, S, width, …]`."""

    traits = TOKENS
    operands = "x[_,_,…]"

    width: int

    def check(self, *operands: TensorType) -> None:
        (x,) = operands
        if self.width < 1 or (is_static(x.shape[1]) and x.shape[1] < self.width):
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
    operands = "x[B,_,…] lengths:int[B]"

    count: int

    def check(self, *operands: TensorType) -> None:
        x, _ = operands
        if self.count < 1 or (is_static(x.shape[1]) and x.shape[1] <= self.count):
            raise ShapeError(f"tail_rows: x is [B, S + {self.count}, …], got {x}")

    def eval(self, x: Array, lengths: Array) -> Array:
        if isinstance(x.shape[1], int) and x.shape[1] == self.count + 1:  # one new token, or none
            new = (lengths > 0).reshape(-1, *(1,) * (x.ndim - 1))
            return jnp.where(new, x[:, 1:], x[:, :-1])
        return jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, self.count))(x, lengths)


# -- numbers of the distance between two tokens ------------------------------------------------


@dataclass(frozen=True)
class RelativeBuckets(Mir):
    """The bucket of key t seen from query s: x with S tokens along `axis` → int32 `[S, S]`.

    Half of the `buckets` are for keys up to the query's own, half for those behind it. Of each half, one half is for
    the distances 0, 1, 2 …, one each; the rest for those up to `max_distance`, wider by a constant factor, and all
    that are further away (Raffel et al. 2020, section 2.1; T5, MPNet).
    """

    traits = replace(TOKENS, bytes=results_written)
    operands = "x@axis"

    axis: int
    buckets: int = 32
    max_distance: int = 128

    def check(self, *operands: TensorType) -> None:
        if self.buckets < 4 or self.buckets % 4:
            raise GraphError(f"relative_buckets: buckets is {self.buckets}; expected a multiple of 4")
        if self.max_distance <= self.buckets // 4:
            raise GraphError(
                f"relative_buckets: max_distance is {self.max_distance}; {self.buckets // 4} distances have a bucket "
                "each, expected more"
            )

    def eval(self, x: Array) -> Array:
        at = jnp.arange(x.shape[self.axis], dtype=jnp.int32)
        behind = at[:, None] - at[None, :]
        near = jnp.minimum(jnp.abs(behind), jnp.int32(self.max_distance))
        later = jnp.where(behind < 0, jnp.int32(self.buckets // 2), jnp.int32(0))
        return jnp.take(jnp.asarray(self.of_distance()), near, mode="clip") + later

    def of_distance(self) -> npt.NDArray[np.int32]:
        """The bucket of each distance up to `max_distance`, in f32 as the reference computes it: on the host, so that
        no device rounds a logarithm to the other side of a border."""
        half = self.buckets // 2
        exact = half // 2
        distance = np.arange(self.max_distance + 1)
        ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact))
        wide = exact + ratio / np.float32(math.log(self.max_distance / exact)) * np.float32(half - exact)
        return np.where(distance < exact, distance, np.minimum(wide.astype(np.int64), half - 1)).astype(np.int32)
