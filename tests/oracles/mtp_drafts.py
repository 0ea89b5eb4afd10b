"""Qwen 3.5 with its module for drafts in plain NumPy, float64: checkpoints with `mtp.*` weights, and greedy decoding
with drafts, every token computed anew from the whole row.

Sources: the formulas of `hybrid.py` and `mtp_head.py`. What the module is given, the model's hidden states behind its
last norm and its own behind `mtp.norm`, and the position of a pair, that of its hidden state, are those of vLLM's
`Qwen3_5MultiTokenPredictor` and `EagleProposer`; a fixture of a real checkpoint there is not.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from rlx_jax.models.qwen35 import Qwen35Config, Qwen35Flow, Qwen35MtpFlow
from tests.oracles.hybrid import row
from tests.oracles.mtp_head import mtp_head
from tests.oracles.numpy_reference import Array, Weights, scaled_frequencies

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": 37, "hidden_size": 22,
    "intermediate_size": 26, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "linear_conv_kernel_dim": 3,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 9, "linear_value_head_dim": 5,
    "max_position_embeddings": 96, "hidden_act": "silu", "rms_norm_eps": 0.02, "tie_word_embeddings": False,
    "mtp_num_hidden_layers": 1,
    "rope_parameters": {"partial_rotary_factor": 0.7, "rope_theta": 100.0, "rope_type": "default"},
}  # fmt: skip
"""Odd sizes; four of six columns of a head turn."""


def checkpoint(directory: Path, seed: int, changes: Mapping[str, Any] = {}, planted: float | None = None) -> Path:
    """A checkpoint with random weights. `planted`: see `plant`."""
    config = CONFIG | dict(changes)
    read = Qwen35Config.from_hf(config)
    shapes = Qwen35Flow(read).shapes() | Qwen35MtpFlow(read).shapes()
    rng = np.random.default_rng(seed)
    weights = {key: rng.normal(0, 0.3, spec.shape).astype(np.float32) for key, spec in shapes.items()}
    if planted is not None:
        plant(weights, planted, rng)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


def plant(weights: dict[str, np.ndarray], loudness: float, rng: np.random.Generator) -> None:
    """Weights by which the likeliest token follows from the last one, and the module says the same of the token that it
    is given: embeddings are `loudness` times what the layers add, and the head's rows are those of the token before."""
    table = rng.normal(0, 1, weights["model.embed_tokens.weight"].shape).astype(np.float32)
    for key in weights:
        if key.endswith("norm.weight") or "pre_fc_norm" in key:
            weights[key] = np.zeros_like(weights[key])
    order = rng.permutation(len(table))
    before = np.empty(len(table), int)
    before[np.roll(order, -1)] = order
    weights["model.embed_tokens.weight"], weights["lm_head.weight"] = table * loudness, table[before]
    halves = [np.eye(table.shape[1]), np.zeros((table.shape[1],) * 2)]
    weights["mtp.fc.weight"] = np.concatenate(halves, 1).astype(np.float32) * loudness


def module(config: dict[str, Any], w: Weights, hidden: Array, ids: Sequence[int]) -> tuple[Array, Array]:
    """The module over pairs: hidden states `[S, H]`, the token behind each → its own hidden states `[S, H]`, and
    logits `[S, V]`."""
    e, d = config["hidden_size"], config["head_dim"]
    rope, at, places = config["rope_parameters"], "mtp.layers.0", np.arange(len(ids))
    turned = int(d * rope["partial_rotary_factor"])
    angles = np.repeat(places[None, :, None] * scaled_frequencies(turned, 1e4, rope), len(ids), 0)
    zeros, zero = np.zeros(e), np.zeros(d)

    def of(name: str, added: float = 0.0) -> Array:
        return (w[f"{name}.weight"] + added).T

    pairs = (np.repeat(hidden[None], len(ids), 0), np.repeat(np.asarray(ids)[None], len(ids), 0))
    merge = (of("mtp.pre_fc_norm_hidden", 1), zeros, of("mtp.pre_fc_norm_embedding", 1), zeros, of("mtp.fc"))
    q, k, v, o = (of(f"{at}.self_attn.{name}_proj") for name in "qkvo")
    q_norm, k_norm = (of(f"{at}.self_attn.{name}_norm", 1) for name in "qk")
    gate, up, down = (of(f"{at}.mlp.{name}_proj") for name in ("gate", "up", "down"))
    every = mtp_head(
        *pairs, np.cos(angles), np.sin(angles), places, w["model.embed_tokens.weight"], *merge,
        of(f"{at}.input_layernorm", 1), zeros, q, k, v, q_norm, zero, k_norm, zero, o,
        of(f"{at}.post_attention_layernorm", 1), zeros, gate, up, down, of("mtp.norm", 1), zeros, np.eye(e),
        heads=config["num_attention_heads"], kv_heads=config["num_key_value_heads"], head_dim=d, n_rot=turned,
        eps=config["rms_norm_eps"],
    )  # fmt: skip
    own = every[:, 0]
    return own, own @ w["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"].T


def drafts(config: dict[str, Any], w: Weights, text: Sequence[int], count: int) -> list[int]:
    """`count` drafts behind a text, each from the one before."""
    hidden, ids = row(config, w, text[:-1])[0], list(text[1:])
    for _ in range(count):
        own, logits = module(config, w, hidden, ids)
        hidden, ids = np.concatenate([hidden, own[-1:]]), [*ids, int(np.argmax(logits[-1]))]
    return ids[len(text) - 1 :]


def decoded(
    config: dict[str, Any], w: Weights, prompt: Sequence[int], new: int, count: int
) -> tuple[list[int], int, int, int]:
    """Greedy tokens with `count` drafts a step: the new ones, drafts read, drafts kept, and steps."""
    text = [*prompt, int(np.argmax(row(config, w, prompt)[1][-1]))]
    read = kept = steps = 0
    while (left := len(prompt) + new - len(text)) > 0:
        offered = drafts(config, w, text, count)[: left - 1]
        said = np.argmax(row(config, w, [*text, *offered])[1], -1)[len(text) - 1 :]
        same = [int(a) == b for a, b in zip(said, offered, strict=False)]
        good = same.index(False) if False in same else len(same)
        text += [int(t) for t in said[: good + 1]]
        read, kept, steps = read + len(offered), kept + good, steps + 1
    return text[len(prompt) :], read, kept, steps
