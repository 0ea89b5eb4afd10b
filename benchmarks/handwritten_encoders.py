"""Encoders written by hand in jax.numpy: the yardstick for `encoders.py`.

Post-norm layers of BERT, those of NomicBERT (rotated, gated) and the pre-norm layers of DINOv2, over arrays by
checkpoint key. A `Layout` says how products get their weights; ours is held to the fastest. Nothing here uses rlx_jax.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

Params = Mapping[str, jax.Array]


@dataclass(frozen=True)
class Sizes:
    """Sizes of an encoder; `patch` and `image` are those of a vision model, in pixels."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int = 30522
    eps: float = 1e-12
    theta: float = 10000.0
    patch: int = 14
    image: int = 224


@dataclass(frozen=True)
class Layout:
    """`transposed`: weights `[in, out]`, else `[out, in]` as stored. `merged`: q, k and v are one product."""

    transposed: bool
    merged: bool

    @property
    def name(self) -> str:
        return f"{'[in, out]' if self.transposed else '[out, in]'}{', merged' if self.merged else ''}"


LAYOUTS = tuple(Layout(t, m) for t in (False, True) for m in (False, True))


def prepare_weights(weights: Mapping[str, np.ndarray], layout: Layout, qkv: str, dtype: str) -> dict[str, jax.Array]:
    """The weights as the layout has them; `qkv` precedes the keys query, key and value of layer `{i}`."""
    out = {key: np.asarray(w) for key, w in weights.items()}
    if layout.merged and qkv:
        for i in range(len(out)):
            p = qkv.format(i=i)
            if f"{p}.query.weight" not in out:
                break
            for kind in ("weight", "bias"):
                out[f"{p}.qkv.{kind}"] = np.concatenate([out.pop(f"{p}.{n}.{kind}") for n in ("query", "key", "value")])
    table = "embeddings."
    arrays = {k: w.T if layout.transposed and w.ndim == 2 and not k.startswith(table) else w for k, w in out.items()}
    return {k: jnp.asarray(np.ascontiguousarray(w), dtype) for k, w in arrays.items()}


def dense(p: Params, key: str, x: jax.Array, layout: Layout) -> jax.Array:
    """x Wᵀ + b, with a bias where there is one."""
    w = p[f"{key}.weight"]
    y = jax.lax.dot_general(x, w, (((x.ndim - 1,), (0 if layout.transposed else 1,)), ((), ())))
    return y + p[f"{key}.bias"] if f"{key}.bias" in p else y


def layer_norm(p: Params, key: str, x: jax.Array, eps: float) -> jax.Array:
    """γ (x − mean) / √(var + ε) + β in f32."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide, -1, keepdims=True)
    centred = wide - mean
    var = jnp.mean(centred * centred, -1, keepdims=True)
    y = centred * jax.lax.rsqrt(var + eps)
    return (y * p[f"{key}.weight"].astype(jnp.float32) + p[f"{key}.bias"].astype(jnp.float32)).astype(x.dtype)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, keep: jax.Array | None, heads: int) -> jax.Array:
    """Attention of all to all; packed heads `[B, S, H]`, `keep` `[B, S]`."""
    batch, seq, hidden = q.shape
    q, k, v = (t.reshape(batch, seq, heads, hidden // heads) for t in (q, k, v))
    scores = jnp.einsum("bsnd,btnd->bnst", q, k, preferred_element_type=jnp.float32) * (hidden // heads) ** -0.5
    if keep is not None:
        scores = jnp.where(keep[:, None, None, :] > 0, scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bnst,btnd->bsnd", weights, v).reshape(batch, seq, hidden)


def project_qkv(p: Params, key: str, x: jax.Array, layout: Layout) -> list[jax.Array]:
    """Queries, keys and values by `{key}.query` and so on, or by `{key}.qkv`."""
    if layout.merged:
        return list(jnp.split(dense(p, f"{key}.qkv", x, layout), 3, axis=-1))
    return [dense(p, f"{key}.{n}", x, layout) for n in ("query", "key", "value")]


def bert(p: Params, ids: jax.Array, keep: jax.Array, c: Sizes, layout: Layout) -> jax.Array:
    """BERT's hidden states `[B, S, H]`."""
    seq, e = ids.shape[1], "embeddings"
    x = p[f"{e}.word_embeddings.weight"][ids] + p[f"{e}.position_embeddings.weight"][:seq]
    x = layer_norm(p, f"{e}.LayerNorm", x + p[f"{e}.token_type_embeddings.weight"][0], c.eps)
    for i in range(c.layers):
        key = f"encoder.layer.{i}"
        context = attend(*project_qkv(p, f"{key}.attention.self", x, layout), keep, c.heads)
        x = layer_norm(
            p,
            f"{key}.attention.output.LayerNorm",
            dense(p, f"{key}.attention.output.dense", context, layout) + x,
            c.eps,
        )
        inner = jax.nn.gelu(dense(p, f"{key}.intermediate.dense", x, layout), approximate=False)
        x = layer_norm(p, f"{key}.output.LayerNorm", dense(p, f"{key}.output.dense", inner, layout) + x, c.eps)
    return x


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, heads: int) -> jax.Array:
    """Pairs (i, i + D/2) of every head of packed heads, by angles `[S, 1, D/2]`."""
    wide = x.reshape(*x.shape[:2], heads, -1)
    first, second = jnp.split(wide, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(x.shape)


def nomic(p: Params, ids: jax.Array, keep: jax.Array, c: Sizes, layout: Layout) -> jax.Array:
    """NomicBERT's hidden states; queries, keys and values are one weight on disk."""
    seq, width = ids.shape[1], c.hidden // c.heads
    angles = np.arange(seq)[:, None, None] * c.theta ** (-np.arange(0, width, 2) / width)
    cos, sin = (jnp.asarray(f(angles), p["emb_ln.weight"].dtype) for f in (np.cos, np.sin))
    x = p["embeddings.word_embeddings.weight"][ids] + p["embeddings.token_type_embeddings.weight"][0]
    x = layer_norm(p, "emb_ln", x, c.eps)
    for i in range(c.layers):
        key = f"encoder.layers.{i}"
        q, k, v = jnp.split(dense(p, f"{key}.attn.Wqkv", x, layout), 3, axis=-1)
        context = attend(rotate(q, cos, sin, c.heads), rotate(k, cos, sin, c.heads), v, keep, c.heads)
        x = layer_norm(p, f"{key}.norm1", dense(p, f"{key}.attn.out_proj", context, layout) + x, c.eps)
        gated = dense(p, f"{key}.mlp.fc11", x, layout) * jax.nn.silu(dense(p, f"{key}.mlp.fc12", x, layout))
        x = layer_norm(p, f"{key}.norm2", dense(p, f"{key}.mlp.fc2", gated, layout) + x, c.eps)
    return x


def dinov2(p: Params, pixels: jax.Array, c: Sizes, layout: Layout) -> jax.Array:
    """DINOv2's hidden states behind its last norm, of images of the size that it was trained for."""
    batch, channels, height, width = pixels.shape
    rows, columns, e = height // c.patch, width // c.patch, "embeddings"
    patches = pixels.reshape(batch, channels, rows, c.patch, columns, c.patch).transpose(0, 2, 4, 1, 3, 5)
    kernel = p[f"{e}.patch_embeddings.projection.weight"].reshape(c.hidden, -1)
    x = patches.reshape(batch, rows * columns, -1) @ kernel.T + p[f"{e}.patch_embeddings.projection.bias"]
    cls = jnp.broadcast_to(p[f"{e}.cls_token"], (batch, 1, c.hidden))
    x = jnp.concatenate([cls, x], axis=1) + p[f"{e}.position_embeddings"]
    for i in range(c.layers):
        key = f"encoder.layer.{i}"
        h = layer_norm(p, f"{key}.norm1", x, c.eps)
        context = attend(*project_qkv(p, f"{key}.attention.attention", h, layout), None, c.heads)
        x = x + dense(p, f"{key}.attention.output.dense", context, layout) * p[f"{key}.layer_scale1.lambda1"]
        h = layer_norm(p, f"{key}.norm2", x, c.eps)
        h = dense(p, f"{key}.mlp.fc2", jax.nn.gelu(dense(p, f"{key}.mlp.fc1", h, layout), approximate=False), layout)
        x = x + h * p[f"{key}.layer_scale2.lambda1"]
    return layer_norm(p, "layernorm", x, c.eps)
