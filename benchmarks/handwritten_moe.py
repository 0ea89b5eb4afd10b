"""Qwen 3 with experts written by hand in jax.numpy: the yardstick for `moe.py`.

All rows of a batch stand at one position, as in `handwritten_decode.py`. What the experts of a layer compute is one of
several forms, `FORMS`; which is the fastest depends on the number of tokens. Nothing here uses rlx_jax.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from handwritten_decode import Cache, cudnn, plain
from handwritten_llama import rms_norm, rotate
from jax import lax

Layer = dict[str, jax.Array]
F32 = jnp.float32


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model whose layers all have experts."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    inner: int
    vocab: int
    theta: float = 1e6
    eps: float = 1e-6


# -- experts: x [T, H], weights and ids [T, k], gate and up [E, F, H], down [E, H, F] ------------


def gathered(x: jax.Array, weights: jax.Array, ids: jax.Array, w: Layer) -> jax.Array:
    """The weights of each choice, multiplied and summed where they stand."""
    flat, each = ids.reshape(-1), jnp.repeat(x, ids.shape[-1], axis=0)

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return (w[flat].astype(F32) * x.astype(F32)[:, None]).sum(-1)

    inner = jax.nn.silu(product(each, w["gate"])) * product(each, w["up"])
    return combine(product(inner.astype(x.dtype), w["down"]), x, weights)


def batched(x: jax.Array, weights: jax.Array, ids: jax.Array, w: Layer) -> jax.Array:
    """The weights of each choice, as a batch of products."""
    flat, each = ids.reshape(-1), jnp.repeat(x, ids.shape[-1], axis=0)
    inner = jax.nn.silu(jnp.einsum("nh,nfh->nf", each, w["gate"][flat])) * jnp.einsum("nh,nfh->nf", each, w["up"][flat])
    out = jnp.einsum("nf,nhf->nh", inner, w["down"][flat], preferred_element_type=F32)
    return combine(out, x, weights)


def dense(x: jax.Array, weights: jax.Array, ids: jax.Array, w: Layer) -> jax.Array:
    """Every expert for every token."""
    share = (jax.nn.one_hot(ids, len(w["gate"]), dtype=F32) * weights[..., None]).sum(-2)
    inner = jax.nn.silu(jnp.einsum("th,efh->tef", x, w["gate"])) * jnp.einsum("th,efh->tef", x, w["up"])
    scaled = (inner.astype(F32) * share[..., None]).astype(x.dtype)
    return jnp.einsum("tef,ehf->th", scaled, w["down"], preferred_element_type=F32).astype(x.dtype)


def dense_per_expert(x: jax.Array, weights: jax.Array, ids: jax.Array, w: Layer) -> jax.Array:
    """As `dense`, the products down expert by expert, and then their sum."""
    share = (jax.nn.one_hot(ids, len(w["gate"]), dtype=F32) * weights[..., None]).sum(-2)
    inner = jax.nn.silu(jnp.einsum("th,efh->tef", x, w["gate"])) * jnp.einsum("th,efh->tef", x, w["up"])
    out = jnp.einsum("tef,ehf->eth", inner, w["down"], preferred_element_type=F32)
    return (out * share.T[..., None]).sum(0).astype(x.dtype)


def blocks(rows: int, looped: bool, x: jax.Array, weights: jax.Array, ids: jax.Array, w: Layer) -> jax.Array:
    """Choices sorted by expert into blocks of one expert; all blocks as a batch, or one after the other."""
    experts, top, flat = len(w["gate"]), ids.shape[-1], ids.reshape(-1)
    count = -(-flat.size // rows) + experts - 1
    order = jnp.argsort(flat)
    sizes = jnp.bincount(flat, length=experts)
    first, needs = jnp.cumsum(sizes) - sizes, -(-sizes // rows)
    begins = jnp.cumsum(needs) - needs
    owner = jnp.clip(jnp.searchsorted(begins + needs, jnp.arange(count), side="right"), 0, experts - 1)
    row_in_expert = (jnp.arange(count) - begins[owner])[:, None] * rows + jnp.arange(rows)
    used = row_in_expert < sizes[owner][:, None]
    choice = order[jnp.where(used, first[owner][:, None] + row_in_expert, 0)]
    expert_rows = x[choice // top]

    def block(x: jax.Array, e: jax.Array) -> jax.Array:
        gate, up, down = (lax.dynamic_index_in_dim(w[n], e, keepdims=False) for n in ("gate", "up", "down"))
        return (jax.nn.silu(x @ gate.T) * (x @ up.T)) @ down.T

    if looped:
        out = lax.map(lambda given: block(*given), (expert_rows, owner))
    else:
        gate, up, down = (w[n][owner] for n in ("gate", "up", "down"))
        inner = jax.nn.silu(jnp.einsum("brh,bfh->brf", expert_rows, gate)) * jnp.einsum("brh,bfh->brf", expert_rows, up)
        out = jnp.einsum("brf,bhf->brh", inner, down)
    place = jnp.zeros_like(flat).at[jnp.where(used, choice, flat.size)].set(
        jnp.arange(count * rows, dtype=flat.dtype).reshape(count, rows), mode="drop"
    )  # fmt: skip
    return combine(out.reshape(count * rows, -1)[place].astype(F32), x, weights)


def ragged(x: jax.Array, weights: jax.Array, ids: jax.Array, w: Layer) -> jax.Array:
    """Choices sorted by expert, and `lax.ragged_dot`."""
    flat = ids.reshape(-1)
    order, sizes = jnp.argsort(flat), jnp.bincount(flat, length=len(w["gate"]))
    expert_rows = x[order // ids.shape[-1]]
    gate, up = (lax.ragged_dot(expert_rows, w[n].swapaxes(1, 2), sizes) for n in ("gate", "up"))
    out = lax.ragged_dot(jax.nn.silu(gate) * up, w["down"].swapaxes(1, 2), sizes)
    return combine(out[jnp.argsort(order)].astype(F32), x, weights)


def mosaic(x: jax.Array, weights: jax.Array, ids: jax.Array, w: Layer) -> jax.Array:
    """As `ragged`, by the kernel for Hopper that comes with jax."""
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    flat = ids.reshape(-1)
    order, sizes = jnp.argsort(flat), jnp.bincount(flat, length=len(w["gate"])).astype(jnp.int32)
    expert_rows = x[order // ids.shape[-1]]

    def product(x: jax.Array, w: jax.Array, columns: int) -> jax.Array:
        return ragged_dot(x, w, group_sizes=sizes, block_m=128, block_n=columns, block_k=64, max_concurrent_steps=4,
                          grid_block_n=1, transpose_rhs=True)  # fmt: skip

    inner = jax.nn.silu(product(expert_rows, w["gate"], 192)) * product(expert_rows, w["up"], 192)
    return combine(product(inner, w["down"], 128)[jnp.argsort(order)].astype(F32), x, weights)


def combine(out: jax.Array, x: jax.Array, weights: jax.Array) -> jax.Array:
    """The weighted sum of the choices of each token."""
    return (out.reshape(*weights.shape, -1) * weights[..., None]).sum(-2).astype(x.dtype)


Experts = Callable[[jax.Array, jax.Array, jax.Array, Layer], jax.Array]


@dataclass(frozen=True)
class Form:
    """How the experts of a layer are computed, under what options of XLA, and for how many tokens it is worth a try."""

    run: Experts
    options: tuple[tuple[str, bool], ...] = ()
    least: int = 1
    most: int = 1 << 30


def forms(c: Sizes, tokens: int, gpu: bool) -> dict[str, Form]:
    """The forms for so many tokens, by name."""
    half = int(2 ** max(0, round(math.log2(max(tokens * c.top_k / c.experts, 1.0))) - 1))
    known = {
        "gathered": Form(gathered, most=32),
        "batched": Form(batched, most=32),
        "dense": Form(dense, most=512),
        "dense, apart": Form(dense_per_expert, most=512),
        f"blocks of {half}": Form(functools.partial(blocks, half, False), least=8),
        f"blocks of {max(half // 2, 1)}": Form(functools.partial(blocks, max(half // 2, 1), False), least=8),
        f"blocks of {2 * half}, one by one": Form(functools.partial(blocks, 2 * half, True), least=256),
    }
    if gpu:
        known["ragged_dot of Mosaic"] = Form(mosaic, least=512)
        for name in ("grouped_gemm", "fusion"):
            option = ((f"xla_gpu_experimental_use_ragged_dot_{name}", True),)
            known[f"ragged_dot, {name}"] = Form(ragged, option, least=8)
    return {name: form for name, form in known.items() if form.least <= tokens <= form.most}


# -- the model -----------------------------------------------------------------------------------


def route(c: Sizes, x: jax.Array, router: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weights and ids `[T, k]`, the weights of a token summing to 1."""
    logits = jnp.einsum("th,eh->te", x, router, preferred_element_type=F32)
    weights, ids = lax.top_k(jax.nn.softmax(logits, -1), c.top_k)
    return weights / weights.sum(-1, keepdims=True), ids


def mixture(c: Sizes, run: Experts, x: jax.Array, layer: Layer) -> jax.Array:
    """The experts of a layer: x `[…, H]`."""
    rows = x.reshape(-1, c.hidden)
    return run(rows, *route(c, rows, layer["router"]), layer).reshape(x.shape)


def step(
    c: Sizes, run: Experts, on_gpu: bool, params: dict[str, Any], tokens: jax.Array, start: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """Read tokens `[B, S]` that stand at `start` …: the next token of each row `[B]`, and the cache after them."""
    batch, seq = tokens.shape
    at = start + jnp.arange(seq, dtype=jnp.int32)
    inv_freq = jnp.asarray(c.theta ** (-np.arange(0, c.head_dim, 2) / c.head_dim), F32)
    angles = (at.astype(F32)[:, None] * inv_freq)[:, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    x, after = params["embedding"][tokens], []
    q_width, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    for layer, (keys, values) in zip(params["layers"], cache, strict=True):
        h = rms_norm(x, layer["norm1"], c.eps)
        q, k, v = jnp.split(h @ layer["qkv"].T, [q_width, q_width + kv], axis=-1)
        q = rms_norm(q.reshape(batch, seq, c.heads, c.head_dim), layer["q_norm"], c.eps)
        k = rms_norm(k.reshape(batch, seq, c.kv_heads, c.head_dim), layer["k_norm"], c.eps)
        q, k = (rotate(t.astype(F32), cos, sin).astype(x.dtype) for t in (q, k))
        zero = jnp.int32(0)
        keys = lax.dynamic_update_slice(keys, k, (zero, start, zero, zero))
        values = lax.dynamic_update_slice(values, v.reshape(k.shape), (zero, start, zero, zero))
        after.append((keys, values))
        context = cudnn(q, k, v.reshape(k.shape), keys, values, start) if on_gpu else plain(q, keys, values, at)
        x = x + context.reshape(batch, seq, -1) @ layer["o"].T
        x = x + mixture(c, run, rms_norm(x, layer["norm2"], c.eps), layer)
    last = rms_norm(x[:, -1], params["norm"], c.eps)
    logits = jnp.einsum("bh,vh->bv", last, params["head"], preferred_element_type=F32)
    return jnp.argmax(logits, -1).astype(jnp.int32), after
