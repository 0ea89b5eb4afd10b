"""Ops of attention and of rotary embeddings.

Axis letters: B batch, S new tokens, T keys, N query heads, K key/value heads, D head width, E width of a value head.
Heads are packed head-major: head h is columns h·D … h·D+D−1.
"""

from __future__ import annotations

import functools
import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import DTypeError, GraphError, ShapeError, shown
from rlx_jax.ir.graph import Mir, TypeCache
from rlx_jax.ir.operands import TOKENS, Types, all_moved, check_declared, product_traits
from rlx_jax.ir.types import DimLike, TensorType, is_float, is_static

# Declarations of attention's optional operands, which follow q, k and v, in the notation of `rlx_jax.ir.operands`.
EXTRA_OPERANDS = {
    "keep": "keep", "bias": "bias[B?,heads?,S?,T?]", "sinks": "sinks:float[heads]", "positions": "positions",
    "key_positions": "key_positions",
}  # fmt: skip


# Results of attention: the context, or of each query and key the weight (`probs`) or the score before the softmax.
RETURNS = ("context", "probs", "scores")


def _product_flops(op: Any, operands: Types, results: Types) -> int:
    """Return the FLOPs of the two products: scores q kᵀ and, for a context, weighted sums of values."""
    values = results[0].size if op.returns == "context" else 0
    return 2 * (operands[0].size + values) * int(operands[1].shape[1])


def _score_bytes(op: Any, operands: Types, results: Types) -> int:
    """Return the bytes of three f32 arrays `[B,N,S,T]`: XLA may keep scores, masked scores and weights."""
    q, k = operands[:2]
    return 12 * int(q.shape[0]) * int(op.heads) * int(q.shape[1]) * int(k.shape[1])


@dataclass(frozen=True)
class AttentionOp(Mir):
    """Grouped-query attention: `softmax(mask(cap(scale · q kᵀ))) v` for each head.

    The order is scale → softcap → mask, bias → softmax; scores and softmax are f32. Query head h reads key head
    h // (N/K), without repeated keys; the result is `[B,S,N·E]`. A query without any key gives zeros, except with
    `positions`: the caller then ensures that each query has a key.

    Operands: q `[B,S,N·D]`, k `[B,T,K·D]`, v `[B,T,K·E]`, then the operands named in `extra`, in this order:

    - `keep` `[B|1,T]` or `[B|1,N|1,S|1,T|1]`: 1 keeps a key, less than ½ drops it.
    - `bias` `[B|1,N|1,S|1,T|1]`: added to the scores.
    - `sinks` `[N]`: one score per head that takes part in the softmax and has no value (attention sinks, Xiao et al.
      2023, learned as in gpt-oss). It is not scaled, capped or masked.
    - `positions` `[B|1,S]` int32: absolute position of each query; keys are at 0 … T−1. Without it the queries are
      aligned with the last S of the T keys (bottom-right aligned).
    - `key_positions` `[B,T]` int32: absolute position of each key, −1 for an empty slot.

    A key must pass every condition: `keep`; `causal`, at or before the query; `window` w, among the last w keys up to
    the query, or within the `ahead` keys after it.

    With `returns` "probs" the result is the weights, f32 `[B,N,S,T]`: the softmax, without the share of the sinks, and
    0 for a key that is not allowed. "scores" are what the softmax reads, sinks aside: `mask(cap(scale · q kᵀ) + bias)`,
    with −∞ for a key that is not allowed.
    """

    traits = replace(product_traits(_product_flops), narrows=3, workspace=_score_bytes)
    choices = {"returns": RETURNS}

    heads: int
    kv_heads: int
    causal: bool = False
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    extra: tuple[str, ...] = ()
    precision: str = "default"
    ahead: int = 0
    returns: str = "context"

    def declaration(self) -> str:
        return " ".join(["q:float[B,S,Q!] k:q[B,T,K!] v:q[B,T,V!]", *(EXTRA_OPERANDS[name] for name in self.extra)])

    def check(self, q: TensorType, k: TensorType, v: TensorType, *extra: TensorType) -> None:
        check_heads(self.heads, self.kv_heads)
        check_score_options(self.scale, self.softcap)
        if self.window is not None and self.window < 1:
            raise GraphError(f"attention: a window keeps at least 1 key, got {self.window}")
        if self.ahead < 0 or self.ahead and (self.causal or self.window is None):
            raise GraphError(
                f"attention: ahead={self.ahead} keys after the query's own require a window that is not causal; got "
                f"window={self.window}, causal={self.causal}"
            )
        if q.shape[2] % self.heads or k.shape[2] * self.heads != q.shape[2] * self.kv_heads:
            raise ShapeError(f"attention: {self.heads} query and {self.kv_heads} key heads do not fit q {q} and k {k}")
        if v.shape[2] % self.kv_heads:
            raise ShapeError(f"attention: the last axis of v {v} is not a multiple of {self.kv_heads} heads")
        extra_types = dict(zip(self.extra, extra, strict=True))
        keep, bias = extra_types.get("keep"), extra_types.get("bias")
        expected = (q.shape[0], self.heads, q.shape[1], k.shape[1])
        if keep is not None and not _is_mask_shape(keep, expected):
            raise ShapeError(
                f"attention: the keep mask is [B,T] for keys {k}, or {list(expected)} with 1 on any axis; got {keep}"
            ).at_operands(3)
        if keep is not None and not (is_float(keep.dtype) or keep.dtype.kind in "biu"):
            raise DTypeError(f"attention: a keep mask holds bools or numbers, got {keep}")
        if bias is not None and not is_float(bias.dtype):
            raise DTypeError(
                f"attention: a bias is added to the scores, and {bias} is not floating; pass a mask of kept keys "
                'with mask="custom" or "keep"'
            )

    def infer(self, types: TypeCache, *operands: TensorType) -> tuple[TensorType, ...]:
        check_declared(self, operands)
        self.check(*operands)
        q, k, v = operands[:3]
        if self.returns != "context":
            return (TensorType((q.shape[0], self.heads, q.shape[1], k.shape[1]), np.dtype(np.float32)),)
        return (TensorType((*q.shape[:2], self.heads * (v.shape[2] // self.kv_heads)), v.dtype),)

    def eval(
        self, q: Array, k: Array, v: Array, *extra_operands: Array, heads_first: bool = False, start: Array | int = 0,
        total: int = 0,
    ) -> Array:  # fmt: skip
        """Return the attention of all queries, or of a chunk of the queries.

        Args:
            q, k, v: the packed heads.
            extra_operands: the operands named in `extra`.
            heads_first: transpose each operand to a layout by heads before its product.
            start: index of the first query of q, if q is a chunk of `total` queries.
            total: number of all queries; 0 if q has all of them.
        """
        extra = dict(zip(self.extra, extra_operands, strict=True))
        batch, num_queries, width = q.shape
        num_keys, dim, num_groups = k.shape[1], width // self.heads, self.heads // self.kv_heads
        precision = lax.Precision(self.precision)
        q5 = q.reshape(batch, num_queries, self.kv_heads, num_groups, dim)
        k4 = k.reshape(k.shape[0], num_keys, self.kv_heads, dim)
        v4 = v.reshape(v.shape[0], num_keys, self.kv_heads, v.shape[2] // self.kv_heads)
        queries_in, keys_in = ("bkgsd", "bktd") if heads_first else ("bskgd", "btkd")
        if heads_first:
            q5, k4, v4 = q5.transpose(0, 2, 3, 1, 4), k4.transpose(0, 2, 1, 3), v4.transpose(0, 2, 1, 3)
        product = functools.partial(jnp.einsum, precision=precision)
        scores = product(f"{queries_in},{keys_in}->bkgst", q5, k4, preferred_element_type=jnp.float32) * (
            self.scale if self.scale is not None else dim**-0.5
        )
        if self.softcap is not None:
            scores = self.softcap * jnp.tanh(scores / self.softcap)
        if "bias" in extra:
            scores = scores + _split_groups(extra["bias"].astype(jnp.float32), num_groups)
        allowed = self._allowed(num_queries, num_keys, extra, num_keys - (total or num_queries) + start)
        pairs = (batch, self.heads, num_queries, num_keys)
        if self.returns == "scores":
            return masked(scores, allowed).reshape(pairs)
        # Without positions the queries are aligned with the last keys; with more queries than keys some have no key.
        rows_may_be_empty = "keep" in extra or "bias" in extra
        rows_may_be_empty |= allowed is not None and "positions" not in extra and num_keys != (total or num_queries)
        sinks = extra.get("sinks")
        if sinks is not None:
            sinks = sinks.astype(jnp.float32).reshape(1, self.kv_heads, num_groups, 1, 1)
        if heads_first and self.returns == "context":
            # The product is divided instead of the weights, as it has fewer numbers.
            weights, sums = exponentials(masked(scores, allowed), sinks)
            equation, narrow = f"bkgst,{keys_in}->{queries_in}", weights.astype(v.dtype)
            # In f32: before the division the sum over many keys may be over the largest f16.
            out = (product(equation, narrow, v4, preferred_element_type=jnp.float32) / sums).astype(v.dtype)
            return out.transpose(0, 3, 1, 2, 4).reshape(batch, num_queries, self.heads * v4.shape[3])
        weights = masked_softmax(scores, allowed, rows_may_be_empty, sinks)
        if self.returns == "probs":
            return weights.reshape(pairs)
        out = product(f"bkgst,{keys_in}->{queries_in}", weights.astype(v.dtype), v4)
        # [B,S,K,G,E] in both layouts, so that a reshape packs the heads of a token.
        out = out.transpose(0, 3, 1, 2, 4) if heads_first else out
        return out.reshape(batch, num_queries, self.heads * v4.shape[3])

    def _allowed(self, queries: int, keys: int, extra: dict[str, Array], first: Array | int) -> Array | None:
        """Return which keys each query may read, as bools broadcastable to `[B,K,G,S,T]`, or None for all keys.

        Args:
            queries, keys: numbers of queries and keys.
            extra: the optional operands by name.
            first: index among the keys of the first query, used without `positions`.
        """
        allowed = None
        # All arrays here are [B|1, S|1, T|1] until the head axes are added.
        if self.causal or self.window is not None:
            slots = extra.get("key_positions")
            key_at = jnp.arange(keys, dtype=jnp.int32)[None, None, :] if slots is None else slots[:, None, :]
            query_at = extra.get("positions")
            if query_at is None:
                aligned = jnp.arange(queries, dtype=jnp.int32) + first
                query_at = aligned[None, :] if slots is None else jnp.take(slots, aligned, axis=1, mode="clip")
            distance = query_at[:, :, None] - key_at
            allowed = distance >= -self.ahead
            allowed = allowed if slots is None else allowed & (key_at >= 0)  # −1 marks an empty slot
            if self.window is not None:
                allowed = allowed & (distance < self.window)
            allowed = allowed[:, None, None]
        if "keep" in extra:
            keep = extra["keep"].astype(jnp.float32) >= 0.5
            keep = keep[:, None, None, None, :] if keep.ndim == 2 else _split_groups(keep, self.heads // self.kv_heads)
            allowed = keep if allowed is None else allowed & keep
        return allowed

    def text(self) -> str:
        notes = [f"h={self.heads}", f"kv={self.kv_heads}"]
        notes += ["causal"] if self.causal else []
        notes += [f"sw={self.window}"] if self.window is not None else []
        notes += [f"ahead={self.ahead}"] if self.ahead else []
        notes += [f"scale={self.scale:g}"] if self.scale is not None else []
        notes += [f"softcap={self.softcap:g}"] if self.softcap is not None else []
        notes += [f"returns={self.returns}"] if self.returns != "context" else []
        return f"attention({', '.join([*notes, *self.extra])})"

    @classmethod
    def name(cls) -> str:
        return "attention"


def masked_softmax(scores: Array, allowed: Array | None, rows_may_be_empty: bool, sinks: Array | None = None) -> Array:
    """Return the softmax over the last axis of f32 scores, with zeros where `allowed` is False.

    Args:
        scores: scores `[…, T]`.
        allowed: bools broadcastable to the scores; None for all True.
        rows_may_be_empty: a row may have no allowed key; its result is zeros.
        sinks: scores `[…, 1]` that enter the denominator and have no weight in the result.
    """
    if not rows_may_be_empty and sinks is None:  # every row has a key, so a finite minimum masks without 0/0
        if allowed is not None:
            scores = jnp.where(allowed, scores, jnp.finfo(jnp.float32).min)
        return jax.nn.softmax(scores, axis=-1)
    weights, total = exponentials(masked(scores, allowed), sinks)
    return weights / total


def masked(scores: Array, allowed: Array | None) -> Array:
    """Return scores with −∞ where `allowed` is False, also in place of infinities and NaN; None for all True."""
    return scores if allowed is None else jnp.where(allowed, scores, -jnp.inf)


def exponentials(scores: Array, sinks: Array | None) -> tuple[Array, Array]:
    """Return the exponentials of masked scores less the maximum of a row, and their sum `[…, 1]`, or 1 for no key.

    `sinks`: see `masked_softmax`.
    """
    # The maximum cancels in the quotient: it only prevents overflow, so it needs no gradient.
    peak = jnp.max(scores, axis=-1, keepdims=True)
    peak = peak if sinks is None else jnp.maximum(peak, sinks)
    peak = lax.stop_gradient(jnp.where(jnp.isfinite(peak), peak, jnp.zeros_like(peak)))
    weights = jnp.exp(scores - peak)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    total = total if sinks is None else total + jnp.exp(sinks - peak)
    return weights, jnp.where(total == 0, jnp.ones_like(total), total)


def _is_mask_shape(keep: TensorType, expected: tuple[DimLike, ...]) -> bool:
    """Return whether a mask has the shape `expected` of the scores, `[B,N,S,T]`, or of keys, `[B,T]`, or 1 on an axis.

    In a mask of keys only the batch axis may be 1.
    """
    if keep.rank == 2:
        return keep.shape[1] == expected[3] and keep.shape[0] in (1, expected[0])
    return keep.rank == 4 and all(got in (1, size) for got, size in zip(keep.shape, expected, strict=True))


def _split_groups(x: Array, groups: int) -> Array:
    """Split the axis of N heads into K key heads and G groups: `[B|1,N|1,S|1,T|1]` → `[B|1,K|1,G|1,S|1,T|1]`."""
    heads = (-1, groups) if x.shape[1] > 1 else (1, 1)
    return x.reshape(x.shape[0], *heads, *x.shape[2:])


def check_heads(heads: int, kv_heads: int) -> None:
    """Check that the number of query heads is a multiple of the number of key/value heads.

    Raises:
        GraphError: it is not, or a number is less than 1.
    """
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise GraphError(f"attention: {heads} query heads are not a multiple of {kv_heads} key/value heads")


def check_score_options(scale: float | None, softcap: float | None) -> None:
    """Check the scale and the softcap of attention scores.

    A softcap of 0 would divide by zero; a negative one would equal its absolute value, so it is likely a mistake.

    Raises:
        GraphError: the scale is not finite, or the softcap is not a finite number over 0.
    """
    if softcap is not None and not (_is_real(softcap) and 0 < softcap < math.inf):
        raise GraphError(f"attention: softcap is a finite number over 0, or None for no cap; got {shown(softcap)}")
    if scale is not None and not (_is_real(scale) and math.isfinite(scale)):
        raise GraphError(f"attention: scale is a finite number, got {shown(scale)}")


def _is_real(value: object) -> bool:
    """Return whether a value is a real number; `True` and `False` are not."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


@dataclass(frozen=True)
class RopeTable(Mir):
    """Compute cos and sin of `position · inverse frequency`: positions `[P,S]` int32 → two f32 tables `[P,S,R/2]`.

    Args:
        inv_freq: the R/2 inverse frequencies in radians per token, θ^(−2i/R) before any scaling.
        factor: multiplies both tables (YaRN's attention factor).
        axes: tokens have several coordinates, such as row and column in an image: positions are `[P,S,A]` int32, and
            column i of the tables uses coordinate `axes[i]`.
    """

    traits = replace(TOKENS, bytes=all_moved)

    inv_freq: tuple[float, ...]
    factor: float = 1.0
    axes: tuple[int, ...] = ()

    def declaration(self) -> str:
        return "positions:int[B,S,A]" if self.axes else "positions:int[B,S]"

    def check(self, positions: TensorType) -> None:
        if self.axes and len(self.axes) != len(self.inv_freq):
            raise ShapeError(f"rope_table: {len(self.axes)} axes for {len(self.inv_freq)} frequencies: one for each")
        num_coordinates = positions.shape[-1]
        if self.axes and not (is_static(num_coordinates) and 0 <= min(self.axes) <= max(self.axes) < num_coordinates):
            raise ShapeError(f"rope_table: axes {list(self.axes)} are not among the coordinates of {positions}")

    def eval(self, positions: Array) -> tuple[Array, Array]:
        columns = jnp.asarray(self.axes, jnp.int32)
        coordinates = jnp.take(positions, columns, axis=2, mode="clip") if self.axes else positions[..., None]
        flat = coordinates.reshape(-1, coordinates.shape[-1])
        angles = flat.astype(jnp.float32) * jnp.asarray(self.inv_freq, jnp.float32)[None, :]
        table = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1) * jnp.float32(self.factor)
        # The gather makes XLA:CPU materialize the table; fused, every layer would compute sin and cos again.
        rows = jnp.take(table, jnp.arange(flat.shape[0], dtype=jnp.int32), axis=0, mode="clip")
        rows = rows.reshape(*positions.shape[:2], 2 * len(self.inv_freq))
        return rows[..., : len(self.inv_freq)], rows[..., len(self.inv_freq) :]

    def text(self) -> str:
        return f"rope_table(n_rot={2 * len(self.inv_freq)}{f', axes={1 + max(self.axes)}' if self.axes else ''})"


@dataclass(frozen=True)
class SinusoidTable(Mir):
    """Sinusoidal embedding of times t `[B]`: `[cos(scale · t f) ‖ sin(scale · t f)]`, f32 `[B, channels]`.

    `f_i = max_period^(−i/half)` for i < half = channels // 2; an odd last channel is 0. As in Ho et al. 2020, but with
    the cosines first.
    """

    traits = replace(TOKENS, bytes=all_moved)
    operands = "t:num[B]"
    notation = "sinusoid_table({channels}, scale={scale})"

    channels: int
    scale: float = 1.0
    max_period: float = 10000.0

    def check(self, *operands: TensorType) -> None:
        if self.channels < 2 or self.max_period <= 0:
            raise GraphError(
                f"sinusoid_table: {self.channels} channels of periods up to {self.max_period:g}; expected 2 channels "
                "at least, and a period over 0"
            )

    def eval(self, t: Array) -> Array:
        half = self.channels // 2
        log_frequencies = jnp.arange(half, dtype=jnp.float32) * jnp.float32(-math.log(self.max_period) / half)
        angles = (t.astype(jnp.float32) * jnp.float32(self.scale))[:, None] * jnp.exp(log_frequencies)[None, :]
        padding = jnp.zeros((t.shape[0], self.channels % 2), jnp.float32)
        return jnp.concatenate([jnp.cos(angles), jnp.sin(angles), padding], axis=1)


# Pairs of columns of a head in a rotation: (i, i + R/2) in NeoX and Llama, (2i, 2i + 1) in GPT-J.
ROPE_STYLES = ("half", "interleaved")


@dataclass(frozen=True)
class RopeOp(Mir):
    """Rotary embedding (Su et al. 2021): rotate pairs of each head's first R columns by the angle of the position.

    For i < R/2, the style `half` pairs columns a = i and b = i + R/2 (NeoX), `interleaved` a = 2i and b = 2i + 1
    (GPT-J): `y[a] = x[a]c[i] − x[b]s[i]`, `y[b] = x[b]c[i] + x[a]s[i]`, in f32. Columns from R on are unchanged.

    Operands: x `[B,S,N·D]`, cos and sin `[B|1,S,W]` with W = R/2. W may be larger (D/2 or R); only the first R/2
    columns are read.
    """

    traits = replace(TOKENS, narrows=1, bytes=all_moved)
    choices = {"style": ROPE_STYLES}
    operands = "x[B,S,W!] cos[_,S,R!] sin[_,S,R!]"

    head_dim: int
    n_rot: int
    style: str = "half"

    def check(self, x: TensorType, cos: TensorType, sin: TensorType) -> None:
        if self.n_rot % 2 or not 0 < self.n_rot <= self.head_dim:
            raise ShapeError(f"rope: n_rot is even and at most head_dim {self.head_dim}, got {self.n_rot}")
        if x.shape[-1] % self.head_dim:
            raise ShapeError(f"rope: x is [B,S,N·{self.head_dim}], whole heads of width head_dim; got {x}")
        if cos.shape != sin.shape or cos.shape[2] < self.n_rot // 2:
            raise ShapeError(f"rope: for x {x} the tables are [B,S,{self.n_rot // 2}], got {cos} and {sin}")

    def eval(self, x: Array, cos: Array, sin: Array) -> Array:
        half, heads = self.n_rot // 2, x.shape[-1] // self.head_dim
        x_f32 = x.reshape(*x.shape[:-1], heads, self.head_dim).astype(jnp.float32)
        c, s = (t.astype(jnp.float32)[..., None, :half] for t in (cos, sin))
        rotates_all = self.n_rot == self.head_dim
        # Split rather than slice: the gradient of a split is one concatenation, of slices a sum of padded arrays.
        if self.style == "interleaved":
            rotated, *unrotated = (x_f32,) if rotates_all else jnp.split(x_f32, (self.n_rot,), axis=-1)
            pairs = jnp.split(rotated.reshape(*rotated.shape[:-1], half, 2), 2, axis=-1)
            first, second = (p.reshape(*rotated.shape[:-1], half) for p in pairs)
        else:
            first, second, *unrotated = jnp.split(x_f32, (half,) if rotates_all else (half, self.n_rot), axis=-1)
        parts = [first * c - second * s, second * c + first * s]
        if self.style == "interleaved":
            parts = [jnp.stack(parts, axis=-1).reshape(*x_f32.shape[:-1], self.n_rot)]
        return jnp.concatenate([*parts, *unrotated], axis=-1).reshape(x.shape).astype(x.dtype)

    def text(self) -> str:
        return f"rope(d={self.head_dim}, n_rot={self.n_rot}{', interleaved' * (self.style == 'interleaved')})"
