"""Qwen 3.5's text model written by hand in jax.numpy: the yardstick for `hybrid.py`.

All rows of a batch stand at one position, as in `handwritten_decode.py`. How the gated delta rule runs over a prompt is
one of several forms, `PROMPT`, and over one token one of `TOKEN`. Nothing here uses rlx_jax.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from handwritten_decode import cudnn, plain
from handwritten_llama import rotate
from jax import lax

F32 = jnp.float32
Rule = Callable[..., tuple[jax.Array, jax.Array]]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model: every `interval`-th layer has attention, the others the gated delta rule."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    delta_heads: int
    delta_dim: int
    ffn: int
    vocab: int
    interval: int = 4
    kernel: int = 4
    rotary_fraction: float = 0.25
    theta: float = 1e7
    eps: float = 1e-6


# -- the gated delta rule: q, k, v [B, S, H, D], g and beta [B, S, H] f32, state [B, H, D, D] f32 --------------


def dot(subscripts: str, *arrays: jax.Array, like: jax.Array) -> jax.Array:
    """A product in the dtype of `like`, summed in f32."""
    return jnp.einsum(subscripts, *(a.astype(like.dtype) for a in arrays), preferred_element_type=F32)


def chunked(inverse: str, size: int, unroll: int, transition: bool) -> Rule:
    """Chunks of `size` tokens; their triangular system by `inverse`; `unroll` chunks a turn of the loop; with
    `transition` the loop has one product a chunk, with a matrix that takes the state to the next."""

    def rule(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> tuple[jax.Array, jax.Array]:
        batch, seq, heads, dim = v.shape
        n = -(-seq // size)

        def to_chunks(x: jax.Array) -> jax.Array:
            x = jnp.pad(x, ((0, 0), (0, n * size - seq), *((0, 0),) * (x.ndim - 2)))
            x = x.reshape(batch, n, size, heads, *x.shape[3:])
            return jnp.moveaxis(x, (1, 3), (0, 2))

        qs, ks, vs, gs, bs = (to_chunks(x) for x in (q, k, v, g, beta))
        total = jnp.cumsum(gs, -1)
        seen = jnp.tril(jnp.ones((size, size), bool))
        decay = jnp.exp(jnp.where(seen, total[..., :, None] - total[..., None, :], -jnp.inf))
        system = jnp.tril(bs[..., None] * decay * dot("nbhik,nbhjk->nbhij", ks, ks, like=v), -1)
        right = jnp.concatenate([bs[..., None] * vs, (bs * jnp.exp(total))[..., None] * ks], -1).astype(F32)
        if inverse == "solve":
            full = system + jnp.eye(size, dtype=F32)
            both = lax.linalg.triangular_solve(full, right, left_side=True, lower=True, unit_diagonal=True)
        else:
            both = dot("nbhij,nbhjk->nbhik", unit_triangular_inverse(system), right, like=v)
        fresh, erased = both[..., :dim], both[..., dim:].astype(v.dtype)
        written = (jnp.exp(total[..., -1:] - total)[..., None] * ks).astype(v.dtype)
        kept = jnp.exp(total[..., -1])[..., None, None]
        if transition:
            forward = kept * jnp.eye(dim, dtype=F32) - dot("nbhik,nbhil->nbhkl", written, erased, like=v)
            added = dot("nbhik,nbhiv->nbhkv", written, fresh, like=v)
            step = lambda s, c: (dot("bhkl,bhlv->bhkv", c[0], s, like=v) + c[1], s.astype(v.dtype))  # noqa: E731
            last, before = lax.scan(step, state, (forward.astype(v.dtype), added), unroll=unroll)
        else:

            def plain_step(s: jax.Array, c: Any) -> tuple[jax.Array, jax.Array]:
                new = c[0] - dot("bhik,bhkv->bhiv", c[1], s, like=v)
                return c[3] * s + dot("bhik,bhiv->bhkv", c[2], new, like=v), s.astype(v.dtype)

            last, before = lax.scan(plain_step, state, (fresh, erased, written, kept), unroll=unroll)
        new = fresh - dot("nbhik,nbhkv->nbhiv", erased, before, like=v)
        inside = decay * dot("nbhik,nbhjk->nbhij", qs, ks, like=v)
        out = jnp.exp(total)[..., None] * dot("nbhik,nbhkv->nbhiv", qs, before, like=v)
        out = (out + dot("nbhij,nbhjv->nbhiv", inside, new, like=v)) * dim**-0.5
        return jnp.moveaxis(out, (0, 2), (1, 3)).reshape(batch, n * size, heads, dim)[:, :seq].astype(v.dtype), last

    return rule


def unit_triangular_inverse(a: jax.Array) -> jax.Array:
    """`(I + a)⁻¹` of a strictly lower triangle, from blocks of one row to the whole: `T − T (a of neighbours) T`."""
    n = a.shape[-1]
    row, column = np.arange(n)[:, None], np.arange(n)[None]
    inverse, size = jnp.eye(n, dtype=F32) - jnp.where((row // 2 == column // 2), a, 0), 2
    while size < n:
        pair = (row // (2 * size) == column // (2 * size)) & (row // size != column // size)
        inverse = inverse - inverse @ jnp.where(pair, a, 0) @ inverse
        size *= 2
    return inverse


PROMPT: dict[str, Rule] = {
    "solve, 64": chunked("solve", 64, 1, False),
    "products, 64": chunked("products", 64, 1, False),
    "products, 64, 8 a turn": chunked("products", 64, 8, False),
    "products, 64, one product a chunk": chunked("products", 64, 1, True),
    "products, 64, one product, 8 a turn": chunked("products", 64, 8, True),
    "products, 128, one product a chunk": chunked("products", 128, 1, True),
    "products, 32, one product, 8 a turn": chunked("products", 32, 8, True),
}


def token_sums(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> tuple[jax.Array, jax.Array]:
    """Multiplications that are summed up."""
    q, k, v, g, beta = (x[:, 0].astype(F32) for x in (q, k, v, g, beta))
    held = jnp.exp(g)[..., None, None] * state
    new = beta[..., None] * (v - (held * k[..., None]).sum(-2))
    after = held + k[..., None] * new[..., None, :]
    return ((after * q[..., None]).sum(-2) * q.shape[-1] ** -0.5)[:, None], after


def token_dots(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> tuple[jax.Array, jax.Array]:
    """One product with q and k, before the state is written."""
    q, k, v, g, beta = (x[:, 0].astype(F32) for x in (q, k, v, g, beta))
    seen = jnp.einsum("bhkv,bhnk->bhnv", state, jnp.stack([q, k], 2), precision="highest")
    seen = jnp.exp(g)[..., None, None] * seen
    new = beta[..., None] * (v - seen[:, :, 1])
    after = jnp.exp(g)[..., None, None] * state + k[..., None] * new[..., None, :]
    out = seen[:, :, 0] + (q * k).sum(-1, keepdims=True) * new
    return (out * q.shape[-1] ** -0.5)[:, None], after


TOKEN: dict[str, Rule] = {"sums": token_sums, "one product": token_dots}


# -- the model ------------------------------------------------------------------------------------


def empty(c: Sizes, batch: int, cache_len: int, dtype: Any) -> list[tuple[jax.Array, jax.Array]]:
    """Keys and values of a layer with attention; else the last inputs of the convolution, and the state."""
    keys = (batch, cache_len, c.kv_heads, c.head_dim)
    wide = 3 * c.delta_heads * c.delta_dim

    def layer(i: int) -> tuple[jax.Array, jax.Array]:
        if (i + 1) % c.interval == 0:
            return jnp.zeros(keys, dtype), jnp.zeros(keys, dtype)
        state = jnp.zeros((batch, c.delta_heads, c.delta_dim, c.delta_dim), F32)
        return jnp.zeros((batch, c.kernel - 1, wide), dtype), state

    return [layer(i) for i in range(c.layers)]


def step(
    c: Sizes, rule: Rule, on_gpu: bool, params: dict[str, Any], tokens: jax.Array, start: jax.Array, cache: Any
) -> tuple[jax.Array, Any]:
    """Read tokens `[B, S]` that stand at `start` …: the next token of each row `[B]`, and the cache after them."""
    x, after = params["embedding"][tokens], []
    for i, (layer, held) in enumerate(zip(params["layers"], cache, strict=True)):
        h = norm(x, layer["norm1"], c.eps)
        if (i + 1) % c.interval == 0:
            mixed, kept = attention(c, on_gpu, layer, h, start, *held)
        else:
            mixed, kept = delta(c, rule, layer, h, *held)
        after.append(kept)
        x = x + mixed
        gate, up = jnp.split(norm(x, layer["norm2"], c.eps) @ layer["gate_up"].T, 2, axis=-1)
        x = x + (jax.nn.silu(gate) * up) @ layer["down"].T
    last = norm(x[:, -1], params["norm"], c.eps)
    logits = jnp.einsum("bh,vh->bv", last, params["embedding"], preferred_element_type=F32)
    return jnp.argmax(logits, -1).astype(jnp.int32), after


def norm(x: jax.Array, w: jax.Array, eps: float, centre: float = 1.0) -> jax.Array:
    """RMSNorm; the weight is that of 1 + w."""
    wide = x.astype(F32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps) * (centre + w.astype(F32))).astype(x.dtype)


def attention(
    c: Sizes, on_gpu: bool, layer: Any, h: jax.Array, start: jax.Array, keys: jax.Array, values: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Gated, part of each head turned."""
    batch, seq, _ = h.shape
    at = start + jnp.arange(seq, dtype=jnp.int32)
    rotary_dim = int(c.head_dim * c.rotary_fraction)
    inv_freq = jnp.asarray(c.theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim), F32)
    angles = (at.astype(F32)[:, None] * inv_freq)[:, None, :]
    wide, kv = 2 * c.heads * c.head_dim, c.kv_heads * c.head_dim
    q, k, v = jnp.split(h @ layer["qkv"].T, [wide, wide + kv], axis=-1)
    q, gate = jnp.split(q.reshape(batch, seq, c.heads, -1), 2, axis=-1)

    def ready(t: jax.Array, w: jax.Array) -> jax.Array:
        t = norm(t, w, c.eps)
        first = rotate(t[..., :rotary_dim].astype(F32), jnp.cos(angles), jnp.sin(angles))
        return jnp.concatenate([first.astype(t.dtype), t[..., rotary_dim:]], -1)

    q, k = ready(q, layer["q_norm"]), ready(k.reshape(batch, seq, c.kv_heads, -1), layer["k_norm"])
    v, zero = v.reshape(k.shape), jnp.int32(0)
    keys = lax.dynamic_update_slice(keys, k, (zero, start, zero, zero))
    values = lax.dynamic_update_slice(values, v, (zero, start, zero, zero))
    context = cudnn(q, k, v, keys, values, start) if on_gpu else plain(q, keys, values, at)
    gated = context.reshape(gate.shape) * jax.nn.sigmoid(gate)
    return gated.reshape(batch, seq, -1) @ layer["o"].T, (keys, values)


def delta(
    c: Sizes, rule: Rule, layer: Any, h: jax.Array, tail: jax.Array, state: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The convolution, the gated delta rule, the gated norm."""
    batch, seq, _ = h.shape
    wide = c.delta_heads * c.delta_dim
    mixed, z, b, a = jnp.split(h @ layer["in"].T, np.cumsum([3 * wide, wide, c.delta_heads]).tolist(), axis=-1)
    rows = jnp.concatenate([tail, mixed], 1)
    taps = layer["conv"][:, 0].astype(F32)
    mixed = sum(rows[:, j : j + seq].astype(F32) * taps[:, j] for j in range(c.kernel))
    q, k, v = jnp.split(jax.nn.silu(mixed).reshape(batch, seq, 3 * c.delta_heads, c.delta_dim), 3, axis=2)
    q, k = (t * lax.rsqrt((t * t).sum(-1, keepdims=True) + 1e-6) for t in (q, k))
    g = -jnp.exp(layer["A_log"].astype(F32)) * jax.nn.softplus(a.astype(F32) + layer["dt_bias"].astype(F32))
    q, k, v = (t.astype(h.dtype) for t in (q, k, v))
    out, state = rule(q, k, v, g, jax.nn.sigmoid(b.astype(F32)), state)
    out = norm(out.astype(h.dtype), layer["norm"], c.eps, 0.0).reshape(z.shape) * jax.nn.silu(z)
    return out @ layer["out"].T, (rows[:, seq:], state)


def compiled(c: Sizes, rule: Rule, on_gpu: bool, params: Any, batch: int, seq: int, cache_len: int, dtype: Any) -> Any:
    """The step for `seq` tokens, its cache donated; and what makes an empty cache."""
    fresh = jax.jit(functools.partial(empty, c, batch, cache_len, dtype))
    tokens, start = jax.ShapeDtypeStruct((batch, seq), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    function = jax.jit(functools.partial(step, c, rule, on_gpu), donate_argnums=(3,))
    return function.lower(params, tokens, start, jax.eval_shape(fresh)).compile(), fresh
