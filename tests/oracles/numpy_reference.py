"""Llama and sentence pooling in plain NumPy, float64, straight from a checkpoint directory.

Written from the published formulas, one row at a time and without a cache, so that there is little to get wrong. It
shares no code with the library and none with `transformers`.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy, which the safetensors reader needs)
import numpy as np
import numpy.typing as npt
from safetensors import safe_open

from tests.oracles.op_formulas import UNARY_REFERENCE

Array = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]
Weights = dict[str, Array]


def read_config(directory: Path) -> dict[str, Any]:
    """`config.json` as it stands."""
    config: dict[str, Any] = json.loads((directory / "config.json").read_text("utf-8"))
    return config


def read_weights(directory: Path) -> Weights:
    """All tensors of all `*.safetensors` files of `directory`, as float64."""
    weights: Weights = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(str(file), framework="numpy") as handle:
            for key in handle.keys():
                assert key not in weights, f"{key} is in two shards"
                weights[key] = np.asarray(handle.get_tensor(key)).astype(np.float64)
    return weights


def softmax(x: Array) -> Array:
    """Softmax over the last axis; rows with no finite entry give zeros."""
    top = np.max(x, axis=-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    e = np.exp(x - top)
    total = e.sum(-1, keepdims=True)
    out: Array = np.where(total > 0, e / np.where(total > 0, total, 1.0), 0.0)
    return out


# The constant √(2/π) to ten places, or the same formula in other words.
TANH = ("gelu_new", "gelu_accurate", "gelu_fast", "gelu_python_tanh", "gelu_pytorch_tanh")
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    **UNARY_REFERENCE, "hardswish": UNARY_REFERENCE["hard_silu"], "swish": UNARY_REFERENCE["silu"],
    "gelu_python": UNARY_REFERENCE["gelu"], **dict.fromkeys(TANH, UNARY_REFERENCE["gelu_tanh"]),
}  # fmt: skip


def linear(w: Weights, name: str, x: Array) -> Array:
    """`x @ W.T + b`, without b where the checkpoint has none."""
    y: Array = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def rope_frequencies(config: dict[str, Any]) -> Array:
    """Inverse frequencies `[head_dim / 2]` of a Llama config in either spelling."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    return scaled_frequencies(head_dim, config.get("rope_theta", 10000.0), rope)


def scaled_frequencies(head_dim: int, theta: float, rope: dict[str, Any]) -> Array:
    """Those of a base, unless `rope` has one, and of the scaling in `rope`."""
    theta = rope.get("rope_theta", theta)
    inverse: Array = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return inverse
    if kind == "linear":
        return inverse / rope["factor"]
    if kind == "llama3":
        out = []
        context = rope["original_max_position_embeddings"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        for f in inverse:
            turns = context * f / (2 * math.pi)  # full turns within the original context
            share = min(max((turns - low) / (high - low), 0.0), 1.0)  # 0: all scaled, 1: left alone
            out.append(share * f + (1 - share) * f / rope["factor"])
        return np.array(out)
    if kind == "yarn":
        context = rope["original_max_position_embeddings"]
        edges = [head_dim * math.log(context / (2 * math.pi * turns)) / (2 * math.log(theta))
                 for turns in (rope.get("beta_fast", 32), rope.get("beta_slow", 1))]  # fmt: skip
        if rope.get("truncate", True):
            edges = [math.floor(edges[0]), math.ceil(edges[1])]
        low, high = max(edges[0], 0), min(edges[1], head_dim - 1)
        share = np.clip((np.arange(head_dim // 2) - low) / (high - low or 0.001), 0, 1)  # 0: left alone, 1: all scaled
        return np.asarray(inverse / rope["factor"] * share + inverse * (1 - share))
    raise NotImplementedError(kind)


def rope_factor(config: dict[str, Any]) -> float:
    """What cos and sin are multiplied with: that of YaRN."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "yarn":
        return 1.0

    def scale(m: float) -> float:
        return 0.1 * m * math.log(rope["factor"]) + 1.0 if rope["factor"] > 1 else 1.0

    every, all_dims = rope.get("mscale"), rope.get("mscale_all_dim")
    return float(rope.get("attention_factor") or (scale(every) / scale(all_dims) if every and all_dims else scale(1.0)))


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """`x / sqrt(mean(x²) + eps) * weight`."""
    y: Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight
    return y


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Half-split rotation of `x [S, heads, D]`; cos and sin are `[S, 1, D/2]`."""
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def llama_row(config: dict[str, Any], w: Weights, ids: Sequence[int] | Ids) -> tuple[Array, Array]:
    """One row of token ids: the normalised last hidden state `[S, H]` and the logits `[S, V]`."""
    hidden = llama_states(config, w, ids)[-1]
    return hidden, hidden @ w["model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"].T


def llama_states(config: dict[str, Any], w: Weights, ids: Sequence[int] | Ids) -> list[Array]:
    """What enters each layer `[S, H]`, and last what leaves the final norm: `output_hidden_states` of transformers."""
    ids = np.asarray(ids)
    n = config["num_attention_heads"]
    k = config.get("num_key_value_heads") or n
    d = config.get("head_dim") or config["hidden_size"] // n
    eps = config["rms_norm_eps"]
    angles = np.arange(len(ids))[:, None, None] * rope_frequencies(config)
    cos, sin = (rope_factor(config) * table for table in (np.cos(angles), np.sin(angles)))
    hidden = np.triu(np.ones((len(ids), len(ids)), bool), 1)
    x = w["model.embed_tokens.weight"][ids]
    states = []
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}"
        states.append(x)
        h = rms_norm(x, w[f"{p}.input_layernorm.weight"], eps)
        query, key, value = (linear(w, f"{p}.self_attn.{name}_proj", h).reshape(len(h), -1, d) for name in "qkv")
        query, key = (rotate(heads, cos, sin) for heads in (query, key))
        heads = []
        for head in range(n):
            shared = head // (n // k)
            scores = np.where(hidden, -np.inf, query[:, head] @ key[:, shared].T / math.sqrt(d))
            heads.append(softmax(scores) @ value[:, shared])
        x = x + linear(w, f"{p}.self_attn.o_proj", np.concatenate(heads, axis=-1))
        h = rms_norm(x, w[f"{p}.post_attention_layernorm.weight"], eps)
        gate = ACTIVATIONS[config["hidden_act"]](linear(w, f"{p}.mlp.gate_proj", h))
        x = x + linear(w, f"{p}.mlp.down_proj", gate * linear(w, f"{p}.mlp.up_proj", h))
    return [*states, rms_norm(x, w["model.norm.weight"], eps)]


def capped(x: Array, cap: float | None) -> Array:
    """`cap tanh(x / cap)`, or x without a cap."""
    return x if cap is None else np.asarray(cap * np.tanh(x / cap))


def llama_greedy(config: dict[str, Any], w: Weights, prompt: Sequence[int], count: int) -> list[int]:
    """`count` greedy tokens after `prompt`; the whole row is recomputed for each."""
    ids = [int(t) for t in prompt]
    for _ in range(count):
        ids.append(int(np.argmax(llama_row(config, w, ids)[1][-1])))
    return ids[len(prompt) :]


def layer_norm(w: Weights, name: str, x: Array, eps: float) -> Array:
    """LayerNorm with the biased variance."""
    centred = x - x.mean(-1, keepdims=True)
    scaled: Array = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]


def pool(hidden: Array, modes: Sequence[str], normalise: bool) -> Array:
    """Sentence embedding of one row of hidden states `[S, H]` without padding; several modes are concatenated."""
    s = len(hidden)
    ramp = np.arange(1, s + 1)[:, None]
    table: dict[str, Callable[[], Array]] = {
        "cls": lambda: hidden[0], "lasttoken": lambda: hidden[-1], "max": lambda: hidden.max(0),
        "mean": lambda: hidden.mean(0), "mean_sqrt_len_tokens": lambda: hidden.sum(0) / math.sqrt(s),
        "weightedmean": lambda: (hidden * ramp).sum(0) / ramp.sum(),
    }  # fmt: skip
    out = np.concatenate([table[mode]() for mode in modes])
    return out / np.linalg.norm(out) if normalise else out
