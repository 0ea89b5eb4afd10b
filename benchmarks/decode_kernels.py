"""Decoding of one or several rows on one GPU with the package's kernels and without, beside the time to read weights.

    python benchmarks/decode_kernels.py [--shapes 1b,qwen3-0.6b,gemma3-1b,135m,8b] [--context 128] [--rows 1]
        [--tokens 64] [--weights bf16]

Random weights of each shape, in bf16 or packed (`--weights int8`, `int4`). A step is the difference of two calls of
`lm.generate`, in turn with and without kernels. Greedy tokens of 20 prompts are compared, and where two answers part,
the difference of the two likeliest logits there is printed: a rounding decides only where it is small.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np

import rlx_jax as rlx

BANDWIDTH = 3.8e12
"""Bytes per second of the best stream of weights that was measured on one H200."""

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5}


def sizes(layers: int, hidden: int, inner: int, heads: int, kv_heads: int, width: int, vocab: int) -> dict[str, Any]:
    """Return the fields of a config."""
    return {
        "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": width, "vocab_size": vocab, "max_position_embeddings": 131072,
    }  # fmt: skip


SHAPES: dict[str, dict[str, Any]] = {
    "1b": LLAMA | sizes(16, 2048, 8192, 32, 8, 64, 128256) | {"rope_theta": 5e5, "tie_word_embeddings": True},
    "135m": LLAMA | sizes(30, 576, 1536, 9, 3, 64, 49152) | {"rope_theta": 1e4, "tie_word_embeddings": True},
    "8b": LLAMA | sizes(32, 4096, 14336, 32, 8, 128, 128256) | {"rope_theta": 5e5, "tie_word_embeddings": False},
    "qwen3-0.6b": sizes(28, 1024, 3072, 16, 8, 128, 151936)
    | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rope_theta": 1e6, "tie_word_embeddings": True}
    | {"hidden_act": "silu", "rms_norm_eps": 1e-6},
    "gemma3-1b": sizes(26, 1152, 6912, 4, 1, 256, 262144)
    | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "query_pre_attn_scalar": 256}
    | {"sliding_window": 512, "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh"},
}  # fmt: skip

RECIPES = {"llama": rlx.Llama32Flow, "qwen3": rlx.Qwen3Flow, "gemma3_text": rlx.GemmaFlow}


def open_model(config: dict[str, Any], kernels: str, max_positions: int, weights: str) -> Any:
    """Return a model with random weights."""
    profile = rlx.CompileProfile().replace(
        precision={"compute": "bf16", "weights": weights}, backend={"cuda": {"kernels": kernels}}
    )
    recipe: Any = RECIPES[config["model_type"]]
    return rlx.CausalLM(
        recipe.for_prefill(config), {}, missing="init", key=0, profile=profile, max_positions=max_positions
    )


def step_seconds(lm: Any, prompts: list[list[int]], short: int, long: int) -> float:
    """Return the seconds of one step."""
    times = []
    for tokens in (short, long):
        start = time.perf_counter()
        lm.generate(prompts, max_new_tokens=tokens)
        times.append(time.perf_counter() - start)
    return (times[1] - times[0]) / (long - short)


def compare_tokens(on: Any, off: Any, prompts: list[list[int]], tokens: int, rows: int) -> dict[str, Any]:
    """Return how many answers are equal, and the gaps of the two likeliest tokens where they part."""
    equal, gaps = 0, []
    batches = [prompts[i : i + rows] for i in range(0, len(prompts), rows)]
    answers = (
        [answer for batch in batches for answer in lm.generate(batch, max_new_tokens=tokens, logprobs=2)]
        for lm in (on, off)
    )
    for ours, theirs in zip(*answers, strict=True):
        a, b = np.array(ours.tokens), np.array(theirs.tokens)
        if (a == b).all():
            equal += 1
            continue
        first = int(np.argmax(a != b))
        (_, best), (_, second) = theirs.top[first][:2]
        gaps.append(round(best - second, 4))
    return {"equal": equal, "prompts": len(prompts), "gaps": gaps}


def main() -> None:
    """Print one line of JSON for each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--weights", default="bf16")
    parser.add_argument("--rows", type=int, default=1, help="prompts that are decoded together")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    for name in args.shapes.split(","):
        config = SHAPES[name]
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, config["vocab_size"], args.context).tolist() for _ in range(20)]
        models = {
            kernels: open_model(config, kernels, args.context + 1024, args.weights) for kernels in ("auto", "off")
        }
        seconds: dict[str, list[float]] = {kernels: [] for kernels in models}
        for lm in models.values():
            step_seconds(lm, prompts[: args.rows], 33, 513)  # compiles
        for _ in range(args.rounds):
            for kernels, lm in models.items():
                seconds[kernels].append(step_seconds(lm, prompts[: args.rows], 33, 513))
        ms = {kernels: round(1e3 * statistics.median(values), 4) for kernels, values in seconds.items()}
        model = models["auto"].model
        weights = sum(a.nbytes for a in model.params.values())
        row = {
            "shape": name,
            "weights": args.weights,
            "context": args.context,
            "rows": args.rows,
            "ms": ms,
            "weights_ms": round(weights / BANDWIDTH * 1e3, 3),
        }
        print(
            json.dumps(row | compare_tokens(*models.values(), prompts, args.tokens, args.rows)),
            flush=True,
        )


if __name__ == "__main__":
    main()
