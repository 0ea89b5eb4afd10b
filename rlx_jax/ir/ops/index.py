"""Ops that read or write entries by index or compute indices, and ops that order the entries of an axis."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array, lax

from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import DTypeError, GraphError, ShapeError
from rlx_jax.ir.graph import Mir
from rlx_jax.ir.operands import MOVEMENT, REDUCTION, TOKENS, results_written
from rlx_jax.ir.types import TensorType, is_float, is_static


@dataclass(frozen=True)
class Gather(Mir):
    """Look up rows of a table: `table[ids]`, table `[V, …]`, ids `[…]` integers in `[0, V)` → `[…ids, …]`.

    The host checks ids before it calls a model. In this op an id out of range reads the nearest row.
    """

    traits = replace(TOKENS, narrows=0)
    operands = "table[_,…] ids:int"
    ids = (1, 0, 0)

    def eval(self, table: Array, ids: Array) -> Array:
        return jnp.take(table, ids, axis=0, mode="clip")


@dataclass(frozen=True)
class TakeRow(Mir):
    """Select one token per row, `y[b, 0] = x[b, index[b]]`: x `[B|1, S, …]`, index `[B]` → `[B, 1, …]`.

    With one row in x, all rows of the result select from it.
    """

    traits = TOKENS
    operands = "x[B?,S,…] index:int[B]"
    ids = (1, 0, 1)

    def eval(self, x: Array, index: Array) -> Array:
        if x.shape[0] is not index.shape[0] and x.shape[0] == 1:
            return jnp.take(x[0], index, axis=0, mode="clip")[:, None]
        if x.shape[1] == 1:  # False for a symbolic size
            return x
        indices = index.reshape(-1, *(1,) * (x.ndim - 1))
        return jnp.take_along_axis(x, indices, axis=1, mode="clip")


@dataclass(frozen=True)
class Iota(Mir):
    """Return `0, 1, …` for `axis` of the operand, as int32 `[size]`."""

    traits = replace(TOKENS, bytes=results_written)
    operands = "x@axis"

    axis: int

    def eval(self, x: Array) -> Array:
        return jnp.arange(x.shape[self.axis], dtype=jnp.int32)


# Treatment of indices out of range, as in `jax.numpy`. `fill`: negative indices count from the end, others give NaN
# (the lowest number of an integer dtype). `wrap`: indices are modulo the size. `clip`: the nearest entry, so that
# negative indices read the first.
MODES = ("fill", "wrap", "clip")


@dataclass(frozen=True)
class Take(Mir):
    """Take entries of one axis: `y[…, i…, …] = x[…, indices[i…], …]`; the axes of `indices` replace `axis`."""

    traits = replace(TOKENS, narrows=1)
    choices = {"mode": MODES}
    operands = "x@axis indices:int"

    axis: int
    mode: str = "fill"

    def eval(self, x: Array, indices: Array) -> Array:
        return jnp.take(x, indices, axis=self.axis, mode=self.mode)


@dataclass(frozen=True)
class TakeAlongAxis(Mir):
    """Take entries by an index per position along `axis`: `y[…, i, …] = x[…, indices[…, i, …], …]`.

    The shape of `indices` matches x except along `axis`; other axes may be 1.
    """

    traits = replace(TOKENS, narrows=1)
    choices = {"mode": ("fill", "clip")}
    operands = "x@axis indices:int"

    axis: int
    mode: str = "fill"

    def check(self, x: TensorType, indices: TensorType) -> None:
        if x.rank != indices.rank:
            raise ShapeError(f"take_along_axis: x and indices have the same rank, got {x} and {indices}")

    def eval(self, x: Array, indices: Array) -> Array:
        return jnp.take_along_axis(x, indices, axis=self.axis, mode=self.mode)


def _check_index_tuples(op: str, x: TensorType, indices: TensorType, batch_dims: int = 0) -> None:
    """Check indices of which the last axis numbers leading axes of x, after `batch_dims` shared axes.

    Raises:
        ShapeError: the last axis is symbolic or too long, or the shared axes differ.
    """
    depth = indices.shape[-1] if indices.rank else 0
    if not is_static(depth) or not 1 <= depth <= x.rank - batch_dims or not 0 <= batch_dims < indices.rank:
        raise ShapeError(
            f"{op}: the last axis of the indices indexes axes of {x} after the first {batch_dims}, got {indices}"
        )
    if x.shape[:batch_dims] != indices.shape[:batch_dims]:
        raise ShapeError(f"{op}: x and indices share {batch_dims} leading axes, got {x} and {indices}")


@dataclass(frozen=True)
class GatherNd(Mir):
    """Gather by index tuples: `y[b…, i…] = x[b…, indices[b…, i…, 0], indices[b…, i…, 1], …]`.

    The last axis of the indices has one index for each indexed axis of x. The first `batch_dims` axes are shared.
    Negative indices count from the end; others out of range give NaN.
    """

    traits = replace(TOKENS, narrows=1)
    operands = "x indices:int"

    batch_dims: int = 0

    def check(self, x: TensorType, indices: TensorType) -> None:
        _check_index_tuples("gather_nd", x, indices, self.batch_dims)

    def eval(self, x: Array, indices: Array) -> Array:
        def one(x: Array, indices: Array) -> Array:
            return x.at[tuple(jnp.moveaxis(indices, -1, 0))].get(mode="fill")

        for _ in range(self.batch_dims):
            one = jax.vmap(one)
        return one(x, indices)


# Combination of a written value with the existing one.
SCATTER_KINDS: tuple[str, ...] = ("set", "add", "mul", "min", "max")


def _check_scatter(op: str, kind: str, x: TensorType) -> None:
    """Check that x has numbers for a sum or a product.

    Raises:
        DTypeError: x has bools.
    """
    if kind in ("add", "mul") and x.dtype == bool:
        raise DTypeError(f"{op}: {kind} needs numbers, got {x}")


def _scatter(x: Array, indices: tuple[Array, ...], updates: Array, kind: str) -> Array:
    """Return x with `updates` combined at `indices`, one index array per axis; indices out of range are dropped."""
    written: Array = getattr(x.at[indices], kind)(updates, mode="drop")
    return written


@dataclass(frozen=True)
class Scatter(Mir):
    """Write updates along one axis: `x[…, indices[…, i, …], …] ∘= updates[…, i, …]`, with ∘ by `kind`.

    The kinds are `set`, `add`, `mul`, `min` and `max`. Indices and updates have the same shape, with the rank of x and
    at most its size on the other axes. Negative indices count from the end; others out of range are dropped. If `set`
    writes twice to one entry, either value may remain. `mul` has no gradient in JAX.
    """

    traits = replace(MOVEMENT, widens=False)

    choices = {"kind": SCATTER_KINDS}
    operands = "x@axis indices:int[…I] updates:x[…I]"

    axis: int
    kind: str = "set"

    def check(self, x: TensorType, indices: TensorType, _: TensorType) -> None:
        _check_scatter("scatter", self.kind, x)
        if x.rank != indices.rank:
            raise ShapeError(f"scatter: indices have the rank of {x}, got {indices}")
        for axis, (size, x_size) in enumerate(zip(indices.shape, x.shape, strict=True)):
            fits = size == x_size or (is_static(size) and is_static(x_size) and size < x_size)
            if axis != self.axis % x.rank and not fits:
                raise ShapeError(f"scatter: axis {axis} of the indices {indices} is longer than that of {x}")

    def eval(self, x: Array, indices: Array, updates: Array) -> Array:
        index_arrays = [lax.broadcasted_iota(jnp.int32, indices.shape, axis) for axis in range(x.ndim)]
        index_arrays[self.axis] = indices.astype(jnp.int32)
        return _scatter(x, tuple(index_arrays), updates, self.kind)


@dataclass(frozen=True)
class ScatterNd(Mir):
    """Write updates by index tuples: `x[indices[i…, 0], indices[i…, 1], …] ∘= updates[i…]`, with ∘ as in `Scatter`.

    The indices are as in `GatherNd`.
    """

    traits = replace(MOVEMENT, widens=False)
    choices = {"kind": SCATTER_KINDS}
    operands = "x indices:int updates:x"

    kind: str = "set"

    def check(self, x: TensorType, indices: TensorType, updates: TensorType) -> None:
        _check_index_tuples("scatter_nd", x, indices)
        _check_scatter("scatter_nd", self.kind, x)
        expected_shape = (*indices.shape[:-1], *x.shape[indices.shape[-1] :])
        if updates.shape != expected_shape:
            expected = TensorType(expected_shape, x.dtype)
            raise ShapeError(f"scatter_nd: the updates of {indices} in {x} are {expected}, got {updates}")

    def eval(self, x: Array, indices: Array, updates: Array) -> Array:
        return _scatter(x, tuple(jnp.moveaxis(indices, -1, 0)), updates, self.kind)


# -- windows of preceding tokens, and the context that a sequence leaves for the next call -----


@dataclass(frozen=True)
class TokenWindows(Mir):
    """Gather sliding windows of tokens: x `[B, S + width − 1, …]` → `[B, S, width, …]`, `y[b, t, j] = x[b, t + j]`."""

    traits = TOKENS
    operands = "x[_,_,…]"

    width: int

    def check(self, x: TensorType) -> None:
        if self.width < 1 or (is_static(x.shape[1]) and x.shape[1] < self.width):
            raise ShapeError(f"windows: x is [B, S + {self.width - 1}, …], got {x}")

    def eval(self, x: Array) -> Array:
        count = x.shape[1] - (self.width - 1)
        if isinstance(count, int) and count == 1:
            return x[:, None]
        return jnp.stack([x[:, j : j + count] for j in range(self.width)], axis=2)


@dataclass(frozen=True)
class TailRows(Mir):
    """Select the last `count` tokens of each row: x `[B, S + count, …]` and lengths `[B]` in `0 … S` → `[B, count, …]`.

    x has `count` tokens of preceding context, then S new tokens, of which the first `lengths[b]` are valid:
    `y[b, j] = x[b, lengths[b] + j]`.
    """

    traits = TOKENS
    operands = "x[B,_,…] lengths:int[B]"

    count: int

    def check(self, x: TensorType, _: TensorType) -> None:
        if self.count < 1 or (is_static(x.shape[1]) and x.shape[1] <= self.count):
            raise ShapeError(f"tail_rows: x is [B, S + {self.count}, …], got {x}")

    def eval(self, x: Array, lengths: Array) -> Array:
        if isinstance(x.shape[1], int) and x.shape[1] == self.count + 1:  # decoding: one new token per row, or none
            has_new = (lengths > 0).reshape(-1, *(1,) * (x.ndim - 1))
            return jnp.where(has_new, x[:, 1:], x[:, :-1])
        return jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, self.count))(x, lengths)


# -- relative positions ------------------------------------------------------------------------


@dataclass(frozen=True)
class RelativeBuckets(Mir):
    """Return the bucket of the distance from query s to key t, int32 `[S, S]`, for x with S tokens along `axis`.

    Half of the `buckets` are for keys up to the query, half for keys after it. In each half, the first half of the
    buckets is for the distances 0, 1, 2, …, one each. The others grow by a constant factor up to `max_distance`, and
    the last one includes all larger distances (Raffel et al. 2020, section 2.1; T5, MPNet).
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
        positions = jnp.arange(x.shape[self.axis], dtype=jnp.int32)
        distance = positions[:, None] - positions[None, :]
        clipped = jnp.minimum(jnp.abs(distance), jnp.int32(self.max_distance))
        half_offset = jnp.where(distance < 0, jnp.int32(self.buckets // 2), jnp.int32(0))
        return jnp.take(jnp.asarray(self.of_distance()), clipped, mode="clip") + half_offset

    def of_distance(self) -> npt.NDArray[np.int32]:
        """Return the bucket of each distance from 0 to `max_distance`, int32.

        The logarithms are f32, as in the reference implementation, and computed on the host: a device could round one
        to the other side of a bucket's border.
        """
        half = self.buckets // 2
        exact = half // 2
        distance = np.arange(self.max_distance + 1)
        ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact))
        log_buckets = exact + ratio / np.float32(math.log(self.max_distance / exact)) * np.float32(half - exact)
        return np.where(distance < exact, distance, np.minimum(log_buckets.astype(np.int64), half - 1)).astype(np.int32)


def _reverse_order(x: Array) -> Array:
    """Return x with the order of its numbers reversed."""
    # `~` instead of `-` for integers: the lowest integer has no negative, and unsigned ones have none at all.
    return -x if is_float(x.dtype) else ~x


@dataclass(frozen=True)
class ArgReduce(Mir):
    """Return the int32 index of the largest (argmax) or smallest (argmin) entry along `axis`.

    Of equal entries it is the first, or with `last` the last.
    """

    traits = replace(REDUCTION, widens=False)

    choices = {"kind": ("argmax", "argmin")}
    operands = "x@axis"

    kind: str
    axis: int
    keepdims: bool = False
    last: bool = False

    def eval(self, x: Array) -> Array:
        find = jnp.argmax if self.kind == "argmax" else jnp.argmin
        if not self.last:
            return find(x, axis=self.axis, keepdims=self.keepdims).astype(jnp.int32)
        from_end = find(jnp.flip(x, self.axis), axis=self.axis, keepdims=self.keepdims)
        return (x.shape[self.axis] - 1 - from_end).astype(jnp.int32)


@dataclass(frozen=True)
class Sort(Mir):
    """Sort the entries along `axis` in ascending order, or `descending`; the sort is stable.

    With `indices` the result is the int32 index of each entry in x, instead of the entries.
    """

    traits = replace(REDUCTION, widens=False)
    operands = "x@axis"

    axis: int = -1
    descending: bool = False
    indices: bool = False

    def eval(self, x: Array) -> Array:
        if self.indices:
            return jnp.argsort(x, axis=self.axis, stable=True, descending=self.descending).astype(jnp.int32)
        return jnp.sort(x, axis=self.axis, stable=True, descending=self.descending)


@dataclass(frozen=True)
class TopK(Mir):
    """Select the `k` largest entries along `axis`, or the smallest, best first: values and int32 indices.

    Equal entries keep their order. NaN is above infinity, but below −infinity with its sign set, and +0 is above −0.
    `roles` are the roles of the other axes of x (`rlx_jax.ir.roles`), set by a pass that shards a program over a mesh.
    """

    traits = replace(REDUCTION, widens=False)
    operands = "x:num@axis"

    k: int
    axis: int = -1
    largest: bool = True
    roles: tuple[str | None, ...] = ()

    def check(self, x: TensorType) -> None:
        size = x.shape[self.axis]
        if isinstance(self.k, bool) or self.k < 1 or (is_static(size) and self.k > size):
            raise ShapeError(f"top_k: k is between 1 and the size of axis {self.axis} of {x}, got {self.k}")

    def eval(self, x: Array) -> tuple[Array, Array]:
        # lax.top_k works on the last axis and finds the largest entries only.
        rows = jnp.moveaxis(x, self.axis, -1)
        top, indices = lax.top_k(rows if self.largest else _reverse_order(rows), self.k)
        values = top if self.largest else _reverse_order(top)
        return jnp.moveaxis(values, -1, self.axis), jnp.moveaxis(indices, -1, self.axis)


@dataclass(frozen=True)
class Sample(Mir):
    """Sample one class for each row: logits `[…, V]`, a seed of rank 0 (i32 or u32) → i32 `[…]`.

    The steps are: divide the logits by `temperature`; drop logits below the `top_k`-th largest (ties with it remain);
    keep the smallest set of most probable classes with a total probability of at least `top_p`. A temperature of 0
    selects the largest logit. The samples equal `jax.random.categorical` with `jax.random.key(seed)`.
    """

    traits = replace(REDUCTION, narrows=0, widens=False)
    operands = "logits:float[…,V] seed:int[]"

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def check(self, *operands: TensorType) -> None:
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise GraphError(f"sample: temperature is a number of at least 0, got {self.temperature}")
        if self.top_k is not None and (isinstance(self.top_k, bool) or self.top_k < 1):
            raise GraphError(f"sample: top_k is an int of at least 1, or None; got {self.top_k!r}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise GraphError(f"sample: top_p is over 0 and at most 1, or None; got {self.top_p!r}")

    def eval(self, logits: Array, seed: Array) -> Array:
        scaled = logits.astype(jnp.float32)
        if self.temperature == 0:
            return jnp.argmax(scaled, axis=-1).astype(jnp.int32)
        scaled = scaled / self.temperature
        ranked = jnp.sort(scaled, axis=-1, descending=True)
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            kth_largest = lax.slice_in_dim(ranked, self.top_k - 1, self.top_k, axis=-1)
            scaled, ranked = (jnp.where(a < kth_largest, -jnp.inf, a) for a in (scaled, ranked))
        if self.top_p is not None:
            mass = jax.nn.softmax(ranked, axis=-1)
            # A class remains if the more probable classes have less than `top_p`, so at least one remains.
            mass_before = jnp.cumsum(mass, axis=-1) - mass
            threshold = jnp.min(jnp.where(mass_before < self.top_p, ranked, jnp.inf), axis=-1, keepdims=True)
            scaled = jnp.where(scaled < threshold, -jnp.inf, scaled)
        return jax.random.categorical(jax.random.key(seed), scaled, axis=-1).astype(jnp.int32)
