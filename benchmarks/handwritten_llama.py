"""A Llama forward pass written by hand in jax.numpy: the yardstick for `no_tax.py`.

It is written as one would write it to be fast: queries are grouped instead of repeating keys and values, weights
stay in the checkpoint's `[out, in]` layout, cos and sin are computed once per call and shared by all layers, and
nothing is computed that the logits do not need. Nothing here uses rlx_jax.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Sizes:
    """Sizes of a Llama model."""

    layers: int = 4
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    ffn: int = 688
    vocab: int = 1024
    theta: float = 10000.0
    eps: float = 1e-5


def rms_norm(x: jax.Array, gamma: jax.Array, eps: float) -> jax.Array:
    """`x / sqrt(mean(x²) + ε) · γ`, with the statistic in f32."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)).astype(x.dtype) * gamma


def rope_tables(seq: int, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """cos and sin `[S, 1, D/2]` of position · frequency.

    They are made by numpy while tracing: computed in the program, XLA on the CPU fuses sin and cos into every
    place that rotates and takes them again in each layer.
    """
    inv_freq = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = (np.arange(seq)[:, None] * inv_freq)[:, None, :]
    return jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the pairs (i, i + D/2) of every head: x `[B, S, N, D]`."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention(x: jax.Array, w: Mapping[str, jax.Array], c: Sizes, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Causal attention; the queries are grouped over the key/value heads: k key heads, g queries each."""
    batch, seq, _ = x.shape
    q = (x @ w["q_proj"].T).reshape(batch, seq, c.heads, c.head_dim)
    k = (x @ w["k_proj"].T).reshape(batch, seq, c.kv_heads, c.head_dim)
    v = (x @ w["v_proj"].T).reshape(batch, seq, c.kv_heads, c.head_dim)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    q = q.reshape(batch, seq, c.kv_heads, c.heads // c.kv_heads, c.head_dim)
    scores = jnp.einsum("bskgd,btkd->bkgst", q, k, preferred_element_type=jnp.float32) * c.head_dim**-0.5
    causal = jnp.tril(jnp.ones((seq, seq), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1).astype(x.dtype)
    out = jnp.einsum("bkgst,btkd->bskgd", weights, v).reshape(batch, seq, c.heads * c.head_dim)
    return out @ w["o_proj"].T


def forward(params: Mapping[str, jax.Array], tokens: jax.Array, c: Sizes) -> jax.Array:
    """Logits `[B, S, V]` of tokens `[B, S]`; `params` are arrays by checkpoint key."""
    cos, sin = rope_tables(tokens.shape[1], c.head_dim, c.theta)
    x = params["model.embed_tokens.weight"][tokens]
    for i in range(c.layers):
        p = f"model.layers.{i}"
        attn = {n: params[f"{p}.self_attn.{n}.weight"] for n in ("q_proj", "k_proj", "v_proj", "o_proj")}
        gate, up, down = (params[f"{p}.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        x = x + attention(rms_norm(x, params[f"{p}.input_layernorm.weight"], c.eps), attn, c, cos, sin)
        h = rms_norm(x, params[f"{p}.post_attention_layernorm.weight"], c.eps)
        x = x + (jax.nn.silu(h @ gate.T) * (h @ up.T)) @ down.T
    return rms_norm(x, params["model.norm.weight"], c.eps) @ params["lm_head.weight"].T


def hf_config(c: Sizes) -> dict[str, Any]:
    """The same sizes as a Hugging Face `config.json`."""
    return {
        "model_type": "llama",
        "vocab_size": c.vocab,
        "hidden_size": c.hidden,
        "intermediate_size": c.ffn,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "rope_theta": c.theta,
        "rms_norm_eps": c.eps,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
