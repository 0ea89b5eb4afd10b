"""A Llama with a key/value cache written by hand in jax.numpy: the yardstick for `decode.py`.

All rows of a batch stand at one position, the cache is written by a slice update, and the four usual choices are
options: weights `[in, out]` or the checkpoint's `[out, in]`, projections apart or merged, XLA's or cuDNN's attention.
Nothing here uses rlx_jax.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from handwritten_llama import Sizes, rms_norm, rotate
from jax import lax

Layer = dict[str, jax.Array]
Cache = list[tuple[jax.Array, jax.Array]]


@dataclass(frozen=True)
class Layout:
    """How the hand-written program keeps its weights, and who computes attention."""

    out_in: bool
    merged: bool
    cudnn: bool = False

    def __str__(self) -> str:
        weights = f"{'[out, in]' if self.out_in else '[in, out]'}{', merged' if self.merged else ''}"
        return f"{weights}{', cuDNN' if self.cudnn else ''}"


def parameters(c: Sizes, layout: Layout, dtype: Any, tied: bool, seed: int = 0) -> dict[str, Any]:
    """Random weights; a tied head is the embedding."""
    rng = np.random.default_rng(seed)

    def random_array(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32) * 0.02).astype(dtype)

    def weight(inner: int, *outer: int) -> jax.Array:
        return random_array(sum(outer), inner) if layout.out_in else random_array(inner, sum(outer))

    q, kv, ones = c.heads * c.head_dim, c.kv_heads * c.head_dim, jnp.ones((c.hidden,), dtype)

    def layer() -> Layer:
        names: dict[str, tuple[int, ...]] = {"q": (q,), "k": (kv,), "v": (kv,), "gate": (c.ffn,), "up": (c.ffn,)}
        if layout.merged:
            names = {"qkv": (q, kv, kv), "gate_up": (c.ffn, c.ffn)}
        parts = {name: weight(c.hidden, *outer) for name, outer in names.items()}
        return parts | {"o": weight(q, c.hidden), "down": weight(c.ffn, c.hidden), "norm1": ones, "norm2": ones}

    embedding = random_array(c.vocab, c.hidden)
    head = embedding if tied else random_array(c.vocab, c.hidden)
    return {"layers": [layer() for _ in range(c.layers)], "embedding": embedding, "norm": ones, "head": head}


def empty_cache(c: Sizes, batch: int, cache_len: int, dtype: Any) -> Cache:
    """Keys and values `[B, T, K, D]` of every layer."""
    shape = (batch, cache_len, c.kv_heads, c.head_dim)
    return [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(c.layers)]


def step(
    c: Sizes, layout: Layout, params: dict[str, Any], tokens: jax.Array, start: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """Read tokens `[B, S]` that stand at `start` …: the next token of each row `[B]`, and the cache after them."""
    batch, seq = tokens.shape
    at = start + jnp.arange(seq, dtype=jnp.int32)
    inv_freq = jnp.asarray(c.theta ** (-np.arange(0, c.head_dim, 2) / c.head_dim), jnp.float32)
    angles = (at.astype(jnp.float32)[:, None] * inv_freq)[:, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    x, after = params["embedding"][tokens], []
    for layer, (keys, values) in zip(params["layers"], cache, strict=True):
        h = rms_norm(x, layer["norm1"], c.eps)
        q, k, v = several(layout, layer, h, "qkv", ("q", "k", "v"), c)
        q = rotate(q.reshape(batch, seq, c.heads, c.head_dim).astype(jnp.float32), cos, sin).astype(x.dtype)
        k = rotate(k.reshape(batch, seq, c.kv_heads, c.head_dim).astype(jnp.float32), cos, sin).astype(x.dtype)
        v = v.reshape(batch, seq, c.kv_heads, c.head_dim)
        zero = jnp.int32(0)
        keys = lax.dynamic_update_slice(keys, k, (zero, start, zero, zero))
        values = lax.dynamic_update_slice(values, v, (zero, start, zero, zero))
        after.append((keys, values))
        context = cudnn(q, k, v, keys, values, start) if layout.cudnn else plain(q, keys, values, at)
        x = x + matmul(layout, context.reshape(batch, seq, -1), layer["o"])
        h = rms_norm(x, layer["norm2"], c.eps)
        gate, up = several(layout, layer, h, "gate_up", ("gate", "up"), c)
        x = x + matmul(layout, jax.nn.silu(gate) * up, layer["down"])
    last = rms_norm(x[:, -1], params["norm"], c.eps)
    logits = jnp.einsum("bh,vh->bv", last, params["head"], preferred_element_type=jnp.float32)
    return jnp.argmax(logits, -1).astype(jnp.int32), after


def matmul(layout: Layout, x: jax.Array, w: jax.Array) -> jax.Array:
    """`x w`, or `x wᵀ`."""
    return lax.dot_general(x, w, (((x.ndim - 1,), (1 if layout.out_in else 0,)), ((), ())))


def several(
    layout: Layout, layer: Layer, x: jax.Array, merged: str, names: Sequence[str], c: Sizes
) -> Sequence[jax.Array]:
    """Projections of one input, in one product or apart."""
    if not layout.merged:
        return [matmul(layout, x, layer[name]) for name in names]
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    cuts = [q, q + kv] if merged == "qkv" else [c.ffn]
    return jnp.split(matmul(layout, x, layer[merged]), cuts, axis=-1)


def plain(q: jax.Array, keys: jax.Array, values: jax.Array, at: jax.Array) -> jax.Array:
    """Attention over the whole cache, queries grouped over the key heads."""
    batch, seq, heads, dim = q.shape
    cache_len, kv_heads = keys.shape[1:3]
    grouped = q.reshape(batch, seq, kv_heads, heads // kv_heads, dim)
    scores = jnp.einsum("bskgd,btkd->bkgst", grouped, keys, preferred_element_type=jnp.float32) * dim**-0.5
    seen = jnp.arange(cache_len, dtype=jnp.int32)[None, :] <= at[:, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), -1).astype(q.dtype)
    return jnp.einsum("bkgst,btkd->bskgd", weights, values)


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array, keys: jax.Array, values: jax.Array, start: jax.Array) -> jax.Array:
    """A prompt attends inside itself, one token over the cache up to its own slot."""
    if q.shape[1] > 1:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    lengths = jnp.full((q.shape[0],), start + 1, jnp.int32)
    ones = jnp.ones_like(lengths)
    return jax.nn.dot_product_attention(
        q, keys, values, query_seq_lengths=ones, key_value_seq_lengths=lengths, implementation="cudnn"
    )


def compiled(
    c: Sizes, layout: Layout, params: dict[str, Any], batch: int, seq: int, cache_len: int, dtype: Any
) -> Callable[..., tuple[jax.Array, Cache]]:
    """The step for `seq` tokens, its cache donated."""
    shapes = jax.eval_shape(lambda: empty_cache(c, batch, cache_len, dtype))
    function = jax.jit(functools.partial(step, c, layout), donate_argnums=(3,))
    tokens, start = jax.ShapeDtypeStruct((batch, seq), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    return function.lower(params, tokens, start, shapes).compile()
