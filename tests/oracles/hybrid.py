"""Whole models with a state of fixed size in plain NumPy, float64: Qwen 3.5's text model and Mamba-2, a row at a time.

Sources: `Qwen3_5ForCausalLM` and `Mamba2ForCausalLM` of transformers; the layers are those of `gated_delta.py` and
`mamba2.py`.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.oracles.gated_delta import gdn_layer, sigmoid
from tests.oracles.mamba2 import mixer
from tests.oracles.numpy_reference import (
    ACTIVATIONS,
    Array,
    Ids,
    Weights,
    linear,
    rms_norm,
    rotate,
    scaled_frequencies,
    softmax,
)


def row(config: dict[str, Any], w: Weights, ids: Sequence[int] | Ids) -> tuple[Array, Array]:
    """One row of token ids: the normalised last hidden state `[S, H]` and the logits `[S, V]`."""
    return (mamba2_row if config["model_type"] == "mamba2" else qwen35_row)(config, w, np.asarray(ids))


def qwen35_row(config: dict[str, Any], w: Weights, ids: Ids) -> tuple[Array, Array]:
    """Norms add 1 to their weights, but for the gated one."""
    eps = config["rms_norm_eps"]
    x = w["model.embed_tokens.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}"
        h = rms_norm(x, 1 + w[f"{p}.input_layernorm.weight"], eps)
        if config["layer_types"][i] == "full_attention":
            x = x + gated_attention(config, w, f"{p}.self_attn", h)
        else:
            x = x + gdn_layer(config, w, f"{p}.linear_attn", h[None])[0][0]
        h = rms_norm(x, 1 + w[f"{p}.post_attention_layernorm.weight"], eps)
        gate = ACTIVATIONS["silu"](linear(w, f"{p}.mlp.gate_proj", h))
        x = x + linear(w, f"{p}.mlp.down_proj", gate * linear(w, f"{p}.mlp.up_proj", h))
    hidden = rms_norm(x, 1 + w["model.norm.weight"], eps)
    return hidden, hidden @ w["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"].T


def gated_attention(config: dict[str, Any], w: Weights, name: str, x: Array) -> Array:
    """Each head of q is D columns of the query and then D of its gate; the first columns of q and k turn."""
    heads, groups, d = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    rope = config["rope_parameters"]
    turned, eps = int(d * rope["partial_rotary_factor"]), config["rms_norm_eps"]
    angles = np.arange(len(x))[:, None, None] * scaled_frequencies(turned, 1e4, rope)

    def normed(t: Array, part: str) -> Array:
        t = rms_norm(t, 1 + w[f"{name}.{part}_norm.weight"], eps)
        return np.concatenate([rotate(t[..., :turned], np.cos(angles), np.sin(angles)), t[..., turned:]], axis=-1)

    query, gate = np.split(linear(w, f"{name}.q_proj", x).reshape(len(x), heads, 2 * d), 2, axis=-1)
    q, k = normed(query, "q"), normed(linear(w, f"{name}.k_proj", x).reshape(len(x), groups, d), "k")
    v = linear(w, f"{name}.v_proj", x).reshape(len(x), groups, d)
    later = np.subtract.outer(np.arange(len(x)), np.arange(len(x))) < 0
    out = []
    for head in range(heads):
        shared = head * groups // heads
        scores = np.where(later, -np.inf, q[:, head] @ k[:, shared].T / math.sqrt(d))
        out.append(softmax(scores) @ v[:, shared] * sigmoid(gate[:, head]))
    return linear(w, f"{name}.o_proj", np.concatenate(out, axis=-1))


def mamba2_row(config: dict[str, Any], w: Weights, ids: Ids) -> tuple[Array, Array]:
    """A norm before each mixer, and nothing besides."""
    eps = config["layer_norm_epsilon"]
    limits = [math.inf if isinstance(n, dict) else float(n) for n in config["time_step_limit"]]
    x = w["backbone.embeddings.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        p = f"backbone.layers.{i}"
        h = rms_norm(x, w[f"{p}.norm.weight"], eps)
        x = x + mixer(config | {"time_step_limit": limits}, w, f"{p}.mixer", h[None])[0][0]
    hidden = rms_norm(x, w["backbone.norm_f.weight"], eps)
    tied = config["tie_word_embeddings"]
    return hidden, hidden @ w["backbone.embeddings.weight" if tied else "lm_head.weight"].T
