"""Decoder-only models, BERT and sentence pooling in plain NumPy, float64, straight from a checkpoint directory.

Written from the published formulas, one row at a time and without a cache, so that there is little to get wrong. It
shares no code with the library and none with `transformers`; the recorded fixtures are checked against it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy, which the safetensors reader needs)
import numpy as np
import numpy.typing as npt
from safetensors import safe_open

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


def erf(x: Array) -> Array:
    """The error function, elementwise."""
    out: Array = np.vectorize(math.erf, otypes=[np.float64])(x)
    return out


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))),
    "gelu_new": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
    "relu6": lambda x: np.clip(x, 0, 6),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "tanh": np.tanh,
    "quick_gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
    "mish": lambda x: x * np.tanh(np.log1p(np.exp(x))),
    "hardswish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
}
ACTIVATIONS |= {
    "swish": ACTIVATIONS["silu"],
    "gelu_python": ACTIVATIONS["gelu"],
    # the constant √(2/π) to ten places, or the same formula in other words
    **dict.fromkeys(("gelu_accurate", "gelu_fast", "gelu_python_tanh", "gelu_pytorch_tanh"), ACTIVATIONS["gelu_new"]),
}


def linear(w: Weights, name: str, x: Array) -> Array:
    """`x @ W.T + b`, without b where the checkpoint has none."""
    y: Array = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


# -- Llama, Mistral, Qwen ----------------------------------------------------------------------


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


def layer_windows(config: dict[str, Any]) -> list[int | None]:
    """How many keys each layer reads, its own included; None is all."""
    layers, window = config["num_hidden_layers"], config.get("sliding_window")
    if config["model_type"].startswith("gemma") or config["model_type"] == "gpt_oss":
        every = config.get("sliding_window_pattern", 2)  # transformers 4 did not write the layers of Gemma 2
        kinds = config.get("layer_types") or ["full" if (i + 1) % every == 0 else "sliding" for i in range(layers)]
        return [window if kind.startswith("sliding") else None for kind in kinds]
    if config["model_type"] in ("mistral", "mixtral") or (config["model_type"] == "qwen3_moe" and window):
        return [window if config["model_type"] != "qwen3_moe" or config["use_sliding_window"] else None] * layers
    if not config.get("use_sliding_window"):
        return [None] * layers
    kinds = config.get("layer_types")
    slides = [k == "sliding_attention" for k in kinds] if kinds else None
    return [window if (slides[i] if slides else i >= config["max_window_layers"]) else None for i in range(layers)]


def queries_or_keys(w: Weights, name: str, x: Array, head_dim: int, eps: float) -> Array:
    """A projection of `x [S, H]` cut into heads `[S, heads, D]`, each through an RMSNorm if the checkpoint has one."""
    heads = linear(w, f"{name}_proj", x).reshape(len(x), -1, head_dim)
    return rms_norm(heads, w[f"{name}_norm.weight"], eps) if f"{name}_norm.weight" in w else heads


def llama_row(config: dict[str, Any], w: Weights, ids: Sequence[int] | Ids) -> tuple[Array, Array]:
    """One row of token ids: the normalised last hidden state `[S, H]` and the logits `[S, V]`."""
    if config["model_type"] == "gpt2":
        return gpt2_row(config, w, ids)
    gemma = config["model_type"].startswith("gemma")
    hidden = (gemma_states if gemma else llama_states)(config, w, ids)[-1]
    tied = config.get("tie_word_embeddings", gemma)
    logits = hidden @ w["model.embed_tokens.weight" if tied else "lm_head.weight"].T
    return hidden, capped(logits, config.get("final_logit_softcapping"))


def llama_states(config: dict[str, Any], w: Weights, ids: Sequence[int] | Ids) -> list[Array]:
    """What enters each layer `[S, H]`, and last what leaves the final norm: `output_hidden_states` of transformers."""
    ids = np.asarray(ids)
    n = config["num_attention_heads"]
    k = config.get("num_key_value_heads") or n
    d = config.get("head_dim") or config["hidden_size"] // n
    eps = config["rms_norm_eps"]
    angles = np.arange(len(ids))[:, None, None] * rope_frequencies(config)
    cos, sin = (rope_factor(config) * table for table in (np.cos(angles), np.sin(angles)))
    behind = np.subtract.outer(np.arange(len(ids)), np.arange(len(ids)))
    windows = layer_windows(config)
    turns = config.get("no_rope_layers") or [1] * len(windows)  # as SmolLM3 writes it: 0 is a layer without rope
    x = w["model.embed_tokens.weight"][ids]
    states = []
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}"
        states.append(x)
        h = rms_norm(x, w[f"{p}.input_layernorm.weight"], eps)
        query, key = (queries_or_keys(w, f"{p}.self_attn.{name}", h, d, eps) for name in ("q", "k"))
        query, key = (rotate(heads, cos, sin) for heads in (query, key)) if turns[i] else (query, key)
        hidden = (behind < 0) | (behind >= (windows[i] or len(ids)))
        value = linear(w, f"{p}.self_attn.v_proj", h).reshape(-1, k, d)
        heads = []
        for head in range(n):
            shared = head // (n // k)
            scores = np.where(hidden, -np.inf, query[:, head] @ key[:, shared].T / math.sqrt(d))
            sink = w[f"{p}.self_attn.sinks"][head] if f"{p}.self_attn.sinks" in w else -np.inf
            beside = np.concatenate([scores, np.full((len(ids), 1), sink)], axis=1)
            heads.append(softmax(beside)[:, :-1] @ value[:, shared])
        x = x + linear(w, f"{p}.self_attn.o_proj", np.concatenate(heads, axis=-1))
        h = rms_norm(x, w[f"{p}.post_attention_layernorm.weight"], eps)
        x = x + (experts(config, w, p, h) if has_experts(w, p) else gated(config, w, f"{p}.mlp", h))
    return [*states, rms_norm(x, w["model.norm.weight"], eps)]


def gated(config: dict[str, Any], w: Weights, p: str, h: Array, names: Sequence[str] = ("gate", "up", "down")) -> Array:
    """`(act(h Wg) ⊙ (h Wu)) Wd`."""
    gate, up, down = (name if name[-1].isdigit() else f"{name}_proj" for name in names)
    return linear(
        w, f"{p}.{down}", ACTIVATIONS[config["hidden_act"]](linear(w, f"{p}.{gate}", h)) * linear(w, f"{p}.{up}", h)
    )


# -- experts -----------------------------------------------------------------------------------


def has_experts(w: Weights, p: str) -> bool:
    """Whether the layer under `p` has a router."""
    return any(f"{p}.{name}.weight" in w for name in ("mlp.gate", "block_sparse_moe.gate", "mlp.router"))


def experts(config: dict[str, Any], w: Weights, p: str, h: Array) -> Array:
    """Each token through the experts of which its router thinks most, one after the other."""
    if f"{p}.mlp.router.weight" in w:
        return clamped_experts(config, w, f"{p}.mlp", h)
    mixtral = f"{p}.block_sparse_moe.gate.weight" in w
    block = f"{p}.{'block_sparse_moe' if mixtral else 'mlp'}"
    names = ("w1", "w3", "w2") if mixtral else ("gate", "up", "down")
    scores = softmax(h @ w[f"{block}.gate.weight"].T)
    out = np.zeros_like(h)
    for token, row in enumerate(scores):
        chosen = np.argsort(-row, kind="stable")[: config["num_experts_per_tok"]]
        total = row[chosen].sum() if mixtral or config.get("norm_topk_prob") else 1.0
        for e in chosen:
            out[token] += row[e] / total * gated(config, w, f"{block}.experts.{e}", h[token : token + 1], names)[0]
    return out


def clamped_experts(config: dict[str, Any], w: Weights, p: str, h: Array) -> Array:
    """gpt-oss: a router with a bias, the softmax of the scores of those chosen, gate and up column by column."""
    out, limit = np.zeros_like(h), config.get("swiglu_limit", 7.0)
    for token, row in enumerate(linear(w, f"{p}.router", h)):
        chosen = np.argsort(-row, kind="stable")[: config["num_experts_per_tok"]]
        for e, share in zip(chosen, softmax(row[chosen]), strict=True):
            both = h[token] @ w[f"{p}.experts.gate_up_proj"][e] + w[f"{p}.experts.gate_up_proj_bias"][e]
            gate, up = np.minimum(both[::2], limit), np.clip(both[1::2], -limit, limit)
            inner = (up + 1) * gate / (1 + np.exp(-config.get("swiglu_alpha", 1.702) * gate))
            out[token] += share * (inner @ w[f"{p}.experts.down_proj"][e] + w[f"{p}.experts.down_proj_bias"][e])
    return out


# -- Gemma -------------------------------------------------------------------------------------


def capped(x: Array, cap: float | None) -> Array:
    """`cap tanh(x / cap)`, or x without a cap."""
    return x if cap is None else np.asarray(cap * np.tanh(x / cap))


def gemma_tables(config: dict[str, Any], window: int | None) -> Array:
    """Inverse frequencies of a layer: in Gemma 3 those with a window have a base of their own, and no scaling."""
    if config["model_type"] != "gemma3_text":
        return rope_frequencies(config)
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if window is None:
        return scaled_frequencies(config["head_dim"], config.get("rope_theta", 1e6), new.get("full_attention", old))
    base = config.get("rope_local_base_freq", 1e4)
    return scaled_frequencies(config["head_dim"], base, new.get("sliding_attention", {}))


def gemma_states(config: dict[str, Any], w: Weights, ids: Sequence[int] | Ids) -> list[Array]:
    """As `llama_states`, for Gemma 1, 2 and 3."""
    ids = np.asarray(ids)
    first, d, eps = config["model_type"] == "gemma", config["head_dim"], config["rms_norm_eps"]
    scale = d**-0.5 if first else config["query_pre_attn_scalar"] ** -0.5
    behind = np.subtract.outer(np.arange(len(ids)), np.arange(len(ids)))

    def norm(name: str, x: Array) -> Array:
        return rms_norm(x, 1 + w[f"{name}.weight"], eps)

    x = w["model.embed_tokens.weight"][ids] * math.sqrt(config["hidden_size"])
    states = []
    for i, window in enumerate(layer_windows(config) if not first else [None] * config["num_hidden_layers"]):
        p = f"model.layers.{i}"
        states.append(x)
        angles = np.arange(len(ids))[:, None, None] * gemma_tables(config, window)
        h = norm(f"{p}.input_layernorm", x)
        q, k, v = (linear(w, f"{p}.self_attn.{n}_proj", h).reshape(len(ids), -1, d) for n in "qkv")
        if config["model_type"] == "gemma3_text":
            q, k = norm(f"{p}.self_attn.q_norm", q), norm(f"{p}.self_attn.k_norm", k)
        q, k = (rotate(t, np.cos(angles), np.sin(angles)) for t in (q, k))
        unseen = (behind < 0) | (behind >= (window or len(ids)))
        context = []
        for head in range(q.shape[1]):
            shared = head * k.shape[1] // q.shape[1]
            scores = capped(q[:, head] @ k[:, shared].T * scale, config.get("attn_logit_softcapping"))
            context.append(softmax(np.where(unseen, -np.inf, scores)) @ v[:, shared])
        o = linear(w, f"{p}.self_attn.o_proj", np.concatenate(context, axis=-1))
        x = x + (o if first else norm(f"{p}.post_attention_layernorm", o))
        m = norm(f"{p}.post_attention_layernorm" if first else f"{p}.pre_feedforward_layernorm", x)
        gate = ACTIVATIONS["gelu_new"](linear(w, f"{p}.mlp.gate_proj", m))
        f = linear(w, f"{p}.mlp.down_proj", gate * linear(w, f"{p}.mlp.up_proj", m))
        x = x + (f if first else norm(f"{p}.post_feedforward_layernorm", f))
    return [*states, norm("model.norm", x)]


# -- GPT-2 -------------------------------------------------------------------------------------


def gpt2_row(config: dict[str, Any], w: Weights, ids: Sequence[int] | Ids) -> tuple[Array, Array]:
    """As `llama_row`, for GPT-2: projections are stored `[in, out]`, positions are learned."""
    ids = np.asarray(ids)
    p = "" if "wte.weight" in w else "transformer."
    n, d, eps = config["n_head"], config["n_embd"] // config["n_head"], config["layer_norm_epsilon"]

    def conv(name: str, x: Array) -> Array:
        y: Array = x @ w[f"{p}{name}.weight"] + w[f"{p}{name}.bias"]
        return y

    future = np.subtract.outer(np.arange(len(ids)), np.arange(len(ids))) < 0
    x = w[f"{p}wte.weight"][ids] + w[f"{p}wpe.weight"][: len(ids)]
    for i in range(config["n_layer"]):
        scale = d**-0.5 if config.get("scale_attn_weights", True) else 1.0
        scale /= i + 1 if config.get("scale_attn_by_inverse_layer_idx") else 1
        packed = conv(f"h.{i}.attn.c_attn", layer_norm(w, f"{p}h.{i}.ln_1", x, eps))
        q, k, v = (t.reshape(len(ids), n, d) for t in np.split(packed, 3, axis=-1))
        heads = [softmax(np.where(future, -np.inf, scale * q[:, h] @ k[:, h].T)) @ v[:, h] for h in range(n)]
        x = x + conv(f"h.{i}.attn.c_proj", np.concatenate(heads, axis=-1))
        inner = conv(f"h.{i}.mlp.c_fc", layer_norm(w, f"{p}h.{i}.ln_2", x, eps))
        x = x + conv(f"h.{i}.mlp.c_proj", ACTIVATIONS[config["activation_function"]](inner))
    hidden = layer_norm(w, f"{p}ln_f", x, eps)
    return hidden, hidden @ w["lm_head.weight" if "lm_head.weight" in w else f"{p}wte.weight"].T


def llama_greedy(config: dict[str, Any], w: Weights, prompt: Sequence[int], count: int) -> list[int]:
    """`count` greedy tokens after `prompt`; the whole row is recomputed for each."""
    ids = [int(t) for t in prompt]
    for _ in range(count):
        ids.append(int(np.argmax(llama_row(config, w, ids)[1][-1])))
    return ids[len(prompt) :]


# -- BERT --------------------------------------------------------------------------------------


def layer_norm(w: Weights, name: str, x: Array, eps: float) -> Array:
    """LayerNorm with the biased variance."""
    centred = x - x.mean(-1, keepdims=True)
    scaled: Array = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]


def bert_row(config: dict[str, Any], w: Weights, ids: Sequence[int] | Ids, **inputs: Any) -> Array:
    """One row of token ids: the last hidden state `[S, H]`; `inputs` as `bert_states`."""
    return bert_states(config, w, ids, **inputs)[-1]


def bert_states(
    config: dict[str, Any],
    w: Weights,
    ids: Sequence[int] | Ids,
    keep: Sequence[int] | Ids | None = None,
    types: Sequence[int] | Ids | None = None,
    positions: Sequence[int] | Ids | None = None,
) -> list[Array]:
    """The embeddings and what leaves each layer, `[S, H]` each: `output_hidden_states` of transformers.

    `keep` is 1 for keys that may be attended to.
    """
    ids = np.asarray(ids)
    p = "" if "embeddings.word_embeddings.weight" in w else "bert."
    n, eps = config["num_attention_heads"], config["layer_norm_eps"]
    types = np.zeros(len(ids), int) if types is None else np.asarray(types)
    positions = np.arange(len(ids)) if positions is None else np.asarray(positions)
    dropped = np.zeros(len(ids), bool) if keep is None else np.asarray(keep) == 0
    x = (
        w[f"{p}embeddings.word_embeddings.weight"][ids]
        + w[f"{p}embeddings.position_embeddings.weight"][positions]
        + w[f"{p}embeddings.token_type_embeddings.weight"][types]
    )
    x = layer_norm(w, f"{p}embeddings.LayerNorm", x, eps)
    states = [x]
    for i in range(config["num_hidden_layers"]):
        q = f"{p}encoder.layer.{i}"
        query, key, value = (
            np.split(linear(w, f"{q}.attention.self.{name}", x), n, axis=-1) for name in ("query", "key", "value")
        )
        heads = [
            softmax(np.where(dropped, -np.inf, query[h] @ key[h].T / math.sqrt(key[h].shape[-1]))) @ value[h]
            for h in range(n)
        ]
        attended = linear(w, f"{q}.attention.output.dense", np.concatenate(heads, axis=-1))
        x = layer_norm(w, f"{q}.attention.output.LayerNorm", attended + x, eps)
        inner = ACTIVATIONS[config["hidden_act"]](linear(w, f"{q}.intermediate.dense", x))
        x = layer_norm(w, f"{q}.output.LayerNorm", linear(w, f"{q}.output.dense", inner) + x, eps)
        states.append(x)
    return states


def pool(hidden: Array, modes: Sequence[str], normalise: bool) -> Array:
    """Sentence embedding of one row of hidden states `[S, H]` without padding; several modes are concatenated."""
    s = len(hidden)
    ramp = np.arange(1, s + 1)[:, None]
    table: dict[str, Callable[[], Array]] = {
        "cls": lambda: hidden[0],
        "lasttoken": lambda: hidden[-1],
        "max": lambda: hidden.max(0),
        "mean": lambda: hidden.mean(0),
        "mean_sqrt_len_tokens": lambda: hidden.sum(0) / math.sqrt(s),
        "weightedmean": lambda: (hidden * ramp).sum(0) / ramp.sum(),
    }
    out = np.concatenate([table[mode]() for mode in modes])
    return out / np.linalg.norm(out) if normalise else out
