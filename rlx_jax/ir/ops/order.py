"""Ops that order the entries of an axis: argmax and argmin, sort, top-k, and sampling from logits."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import GraphError, ShapeError
from rlx_jax.ir.graph import Mir
from rlx_jax.ir.operands import REDUCTION
from rlx_jax.ir.types import TensorType, is_float, is_static

Array = jax.Array


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

    Equal entries keep their order. `roles` are the roles of the other axes of x (`rlx_jax.ir.roles`), set by a pass
    that shards the program over a mesh.
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
        top, indices = jax.lax.top_k(rows if self.largest else _reverse_order(rows), self.k)
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
            kth_largest = jax.lax.slice_in_dim(ranked, self.top_k - 1, self.top_k, axis=-1)
            scaled, ranked = (jnp.where(a < kth_largest, -jnp.inf, a) for a in (scaled, ranked))
        if self.top_p is not None:
            mass = jax.nn.softmax(ranked, axis=-1)
            # A class remains if the more probable classes have less than `top_p`, so at least one remains.
            mass_before = jnp.cumsum(mass, axis=-1) - mass
            threshold = jnp.min(jnp.where(mass_before < self.top_p, ranked, jnp.inf), axis=-1, keepdims=True)
            scaled = jnp.where(scaled < threshold, -jnp.inf, scaled)
        return jax.random.categorical(jax.random.key(seed), scaled, axis=-1).astype(jnp.int32)
