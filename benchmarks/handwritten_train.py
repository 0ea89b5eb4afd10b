"""A training step of a Llama written by hand in jax.numpy: the yardstick for `train.py`. Nothing here uses rlx_jax.

Written as one would to be fast: layers unrolled, q, k and v one product, gate and up one product, cuDNN's attention
where there is one, and a loss that forms its gradients piece by piece beside the logits, which are never all there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from handwritten_llama import Sizes, rms_norm, rope_tables, rotate
from jax import lax

Params = Mapping[str, Any]


def fuse_projections(weights: Params, c: Sizes) -> dict[str, Any]:
    """Checkpoint keys as this step stores them: two products of each layer are merged."""
    out = {k: jnp.asarray(weights[k]) for k in ("model.embed_tokens.weight", "model.norm.weight")}
    for i in range(c.layers):
        p = f"model.layers.{i}."

        def of(*names: str, p: str = p) -> jax.Array:
            return jnp.concatenate([jnp.asarray(weights[f"{p}{n}.weight"]) for n in names])

        out[f"{i}.qkv"] = of(*(f"self_attn.{n}_proj" for n in "qkv"))
        out[f"{i}.gate_up"] = of("mlp.gate_proj", "mlp.up_proj")
        for name in ("self_attn.o_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"):
            out[f"{i}.{name}"] = of(name)
    return out


def attention(q: jax.Array, k: jax.Array, v: jax.Array, cudnn: bool) -> jax.Array:
    """Causal, query heads in groups of one key head: `[B, S, N, D]` and `[B, S, K, D]` → `[B, S, N·D]`."""
    batch, seq, heads, dim = q.shape
    if cudnn:
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return out.reshape(batch, seq, heads * dim)
    q = q.reshape(batch, seq, k.shape[2], -1, dim)
    scores = jnp.einsum("bskgd,btkd->bkgst", q, k, preferred_element_type=jnp.float32) * dim**-0.5
    causal = jnp.tril(jnp.ones((seq, seq), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1).astype(q.dtype)
    return jnp.einsum("bkgst,btkd->bskgd", weights, v).reshape(batch, seq, heads * dim)


def layer(x: jax.Array, w: Params, cos: jax.Array, sin: jax.Array, c: Sizes, cudnn: bool) -> jax.Array:
    """`[B, S, H]` → `[B, S, H]`; products in the dtype of x, rotations and statistics in f32."""
    batch, seq, _ = x.shape
    width, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    qkv = rms_norm(x, w["input_layernorm"], c.eps) @ w["qkv"].T
    q, k, v = (part.reshape(batch, seq, -1, c.head_dim) for part in jnp.split(qkv, (width, width + kv), -1))
    q, k = (rotate(part.astype(jnp.float32), cos, sin).astype(x.dtype) for part in (q, k))
    x = x + attention(q, k, v, cudnn) @ w["self_attn.o_proj"].T
    gate, up = jnp.split(rms_norm(x, w["post_attention_layernorm"], c.eps) @ w["gate_up"].T, 2, -1)
    return x + (jax.nn.silu(gate) * up) @ w["mlp.down_proj"].T


def is_saveable(primitive: Any, *types: Any, **options: Any) -> Any:
    """What is not computed again: products with weights, and attention."""
    dots: Any = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return primitive.name.startswith("dot_product_attention_fwd") or dots(primitive, *types, **options)


def hidden(params: Params, tokens: jax.Array, c: Sizes, cudnn: bool, remat: bool) -> jax.Array:
    """The normalised `[B, S, H]`."""
    cos, sin = rope_tables(tokens.shape[1], c.head_dim, c.theta)
    step: Callable[..., Any] = functools.partial(layer, cos=cos, sin=sin, c=c, cudnn=cudnn)
    step = jax.checkpoint(step, policy=is_saveable) if remat else step
    x = params["model.embed_tokens.weight"][tokens]
    for i in range(c.layers):
        p = f"{i}."
        x = step(x, {k.removeprefix(p): a for k, a in params.items() if k.startswith(p)})
    return rms_norm(x, params["model.norm.weight"], c.eps)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def loss(num_chunks: int, x: jax.Array, w: jax.Array, targets: jax.Array, weight: jax.Array) -> jax.Array:
    """Σ weight · nll of x `[B, S, H]` and a head `[V, H]`."""
    return loss_forward(num_chunks, x, w, targets, weight)[0]


def loss_forward(num_chunks: int, x: jax.Array, w: jax.Array, targets: jax.Array, weight: jax.Array) -> Any:
    """The loss, and the gradients of x and w: of a piece of the sequence at a time."""

    def chunk(sums: Any, part: Any) -> Any:
        total, gradient = sums
        x, targets, weight = part
        z = jnp.einsum("bsh,vh->bsv", x, w, preferred_element_type=jnp.float32)
        most = z.max(-1, keepdims=True)
        lse = (most + jnp.log(jnp.exp(z - most).sum(-1, keepdims=True)))[..., 0]
        hit = lax.broadcasted_iota(jnp.int32, z.shape, 2) == targets[..., None]
        nll = lse - jnp.take_along_axis(z, targets[..., None], -1)[..., 0]
        slope = (weight[..., None] * (jnp.exp(z - lse[..., None]) - hit.astype(jnp.float32))).astype(x.dtype)
        grad_w = jnp.einsum("bsv,bsh->vh", slope, x, preferred_element_type=jnp.float32)
        grad_x = jnp.einsum("bsv,vh->bsh", slope, w, preferred_element_type=jnp.float32).astype(x.dtype)
        return (total + (weight * nll).sum(), gradient + grad_w), grad_x

    def split(a: jax.Array) -> jax.Array:
        return a.reshape(a.shape[0], num_chunks, -1, *a.shape[2:]).swapaxes(0, 1)

    start = (jnp.float32(0), jnp.zeros(w.shape, jnp.float32))
    (total, grad_w), grad_x = lax.scan(chunk, start, (split(x), split(targets), split(weight)))
    return total, (grad_x.swapaxes(0, 1).reshape(x.shape), grad_w, jnp.zeros((), w.dtype))


def loss_backward(num_chunks: int, saved: Any, slope: jax.Array) -> Any:
    grad_x, grad_w, like = saved
    return (grad_x.astype(jnp.float32) * slope).astype(grad_x.dtype), (grad_w * slope).astype(like.dtype), None, None


loss.defvjp(loss_forward, loss_backward)


class AdamW(NamedTuple):
    """As optax.adamw, so that neither side needs it: moments in the dtype of their leaf, arithmetic in f32."""

    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any], Any]


def adamw(rate: float, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, decay: float = 1e-4) -> AdamW:
    """`p − rate (m̂ / (√v̂ + ε) + decay p)`."""

    def init(params: Any) -> Any:
        zeros = functools.partial(jax.tree.map, jnp.zeros_like)
        return jnp.zeros((), jnp.int32), zeros(params), zeros(params)

    def update(gradients: Any, state: Any, params: Any) -> Any:
        count, first, second = state
        count = count + 1
        at = count.astype(jnp.float32)
        f32 = functools.partial(jax.tree.map, lambda a: a.astype(jnp.float32))
        m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, f32(first), f32(gradients))
        v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, f32(second), f32(gradients))

        def one(m: jax.Array, v: jax.Array, p: jax.Array) -> jax.Array:
            step = (m / (1 - b1**at)) / (jnp.sqrt(v / (1 - b2**at)) + eps) + decay * p.astype(jnp.float32)
            return -rate * step

        narrow = functools.partial(jax.tree.map, lambda a, p: a.astype(p.dtype))
        return jax.tree.map(one, m, v, params), (count, narrow(m, params), narrow(v, params))

    return AdamW(init, update)


def make_step(c: Sizes, optimizer: AdamW, num_chunks: int, cudnn: bool, remat: bool) -> Callable[..., Any]:
    """`step(params, state, tokens) → (params, state, loss, norm of the gradients)`."""

    def mean(params: Params, tokens: jax.Array) -> jax.Array:
        x = hidden(params, tokens, c, cudnn, remat)
        targets = jnp.concatenate([tokens[:, 1:], tokens[:, :1]], 1)
        weight = jnp.ones(tokens.shape, jnp.float32).at[:, -1].set(0.0)
        return loss(num_chunks, x, params["model.embed_tokens.weight"], targets, weight / weight.sum())

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(mean)(params, tokens)
        updates, state = optimizer.update(gradients, state, params)
        params = jax.tree.map(lambda p, u: (p.astype(jnp.float32) + u).astype(p.dtype), params, updates)
        squares = [jnp.square(g.astype(jnp.float32)).sum() for g in gradients.values()]
        return params, state, value, jnp.sqrt(sum(squares))

    return jax.jit(step, donate_argnums=(0, 1))
