"""Decoding of one or several rows on one GPU with the package's kernels and without, beside the time to read weights.

    python benchmarks/decode_kernels.py                        all shapes, one row after 128 tokens
    python benchmarks/decode_kernels.py --shapes 1b --rows 1 8 --context 128 8000 32000 128000
    python benchmarks/decode_kernels.py --shapes 1b qwen3.5-0.8b --tokens 64 --float32

Random weights of each shape, in bf16 or packed (`--weights int8`, `int4`). A step is the difference of two calls of
`lm.generate`, in turn with and without kernels, the median of `--rounds`. With `--tokens`, greedy tokens of 20 prompts
are compared, and where two answers part, the difference of the two likeliest logits there is printed: a rounding
decides only where it is small. With `--float32` the log-probabilities of the answers are also compared with those that
a model in float32 gives the same tokens. A first run fills the compile cache: several may run at once for it.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
from functools import partial
from typing import Any

import jax
import ml_dtypes
import numpy as np
import plan
from report import RandomSource, emit, seconds

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
    "qwen3.5-0.8b": plan.SHAPES["qwen3_5_text"],
    "30b-a3b": plan.SHAPES["qwen3_moe"],
}  # fmt: skip
"""Of the mixture 8 of 48 layers."""

RECIPES = plan.RECIPES


def open_model(config: dict[str, Any], kernels: str, weights: str, compute: str = "bf16") -> Any:
    """Return a model with random weights, the same for each profile."""
    precision = {"compute": compute, "weights": weights} | ({"matmul": "highest"} if compute == "f32" else {})
    profile = rlx.CompileProfile().replace(precision=precision, backend={"cuda": {"kernels": kernels}})
    recipe = plan.recipe_of(config)
    specs = {k: jax.ShapeDtypeStruct(s.shape, np.dtype(ml_dtypes.bfloat16)) for k, s in recipe.shapes().items()}
    return rlx.CausalLM(recipe, RandomSource(specs), profile=profile, max_positions=131072)


def step_times(models: dict[str, Any], prompts: list[list[int]], new: tuple[int, int], rounds: int) -> dict[str, Any]:
    """Return the milliseconds of a step of each model in each round, as differences of two calls; models in turn.

    Two calls before them compile in the first round, and let the graphs of kernels find their buffers in the others.
    """
    readings: dict[str, list[float]] = {name: [] for name in models}
    for number, (name, lm) in itertools.product(range(rounds + 1), models.items()):
        *_, short, long = (seconds(partial(lm.generate, prompts, max_new_tokens=n)) for n in (*new, *new))
        if number:
            readings[name].append(round(1e3 * (long - short) / (new[1] - new[0]), 4))
    return readings


def step_bytes(lm: Any, config: dict[str, Any], rows: int, context: int) -> int:
    """Return the bytes that a step has to read: weights without experts that are not chosen, keys and values."""
    chosen = config.get("num_experts_per_tok", 0) * rows / config.get("num_experts", 1)
    nbytes = 0.0
    for name, a in lm.model.params.items():
        if "embed_tokens" not in name or config.get("tie_word_embeddings", True):
            nbytes += a.nbytes * (min(1.0, chosen) if "experts" in name else 1.0)
    model_plan = rlx.plan(
        plan.recipe_of(config), device="h200", batch=rows, context=context, profile=plan.profile_of("bf16")
    )
    return int(nbytes) + model_plan.cache_bytes


def greedy_answers(lm: Any, prompts: list[list[int]], tokens: int, rows: int) -> list[Any]:
    """Return greedy answers with the log-probabilities of the two likeliest tokens."""
    batches = (prompts[i : i + rows] for i in range(0, len(prompts), rows))
    return [answer for batch in batches for answer in lm.generate(batch, max_new_tokens=tokens, logprobs=2)]


def compare_tokens(ours: list[Any], theirs: list[Any]) -> dict[str, Any]:
    """Return how many answers are equal, and the gaps of the two likeliest tokens where they part."""
    gaps = []
    for one, other in zip(ours, theirs, strict=True):
        parted = np.flatnonzero(np.array(one.tokens) != np.array(other.tokens))
        if parted.size:
            (_, best), (_, second) = other.top[parted[0]][:2]
            gaps.append(round(best - second, 4))
    return {"prompts": len(ours), "equal": len(ours) - len(gaps), "gaps": gaps}


def compare_float32(exact: Any, answers: list[Any], prompts: list[list[int]]) -> dict[str, float]:
    """Return how the log-probabilities of answers differ from those of a model in float32."""
    scores = exact.score([(p, list(a.tokens)) for p, a in zip(prompts, answers, strict=True)])
    errors = np.array([np.subtract(a.token_logprobs, s.token_logprobs) for a, s in zip(answers, scores, strict=True)])
    return {"rms": round(float(np.sqrt((errors**2).mean())), 5), "largest": round(float(np.abs(errors).max()), 4)}


def main() -> None:
    """Print lines of JSON for each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--context", nargs="+", type=int, default=[128])
    parser.add_argument("--rows", nargs="+", type=int, default=[1], help="prompts that are decoded together")
    parser.add_argument("--kernels", nargs="+", choices=("auto", "off"), default=["auto", "off"])
    parser.add_argument("--weights", default="bf16")
    parser.add_argument("--new", nargs=2, type=int, default=[17, 113], help="new tokens of the two calls")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=0, help="of each answer that is compared")
    parser.add_argument("--float32", action="store_true", help="compare the answers with a model in float32")
    args = parser.parse_args()
    if args.tokens and {*args.kernels} != {"auto", "off"}:
        parser.error("--tokens compares answers with kernels and without: leave out --kernels")
    if args.float32 and not args.tokens:
        parser.error("--float32 compares the answers of --tokens, which is not given")
    for name in args.shapes:
        config = SHAPES[name]
        models = {kernels: open_model(config, kernels, args.weights) for kernels in args.kernels}
        rng = np.random.default_rng(0)
        for context, rows in itertools.product(args.context, args.rows):
            prompts = rng.integers(0, config["vocab_size"], (max(20, rows), context)).tolist()
            times = step_times(models, prompts[:rows], args.new, args.rounds) if args.rounds else {}
            limit = 1e3 * step_bytes(models[args.kernels[0]], config, rows, context) / BANDWIDTH
            row = {"shape": name, "weights": args.weights, "context": context, "rows": rows}
            medians = {kernels: round(statistics.median(ms), 4) for kernels, ms in times.items()}
            emit(**row, ms=medians, limit=round(limit, 3), readings=times)
            if not args.tokens:
                continue
            answers = {kernels: greedy_answers(lm, prompts, args.tokens, rows) for kernels, lm in models.items()}
            emit(**row, **compare_tokens(answers["auto"], answers["off"]))
            if args.float32:
                exact = open_model(config, "off", "f32", "f32")
                emit(**row, float32={k: compare_float32(exact, a, prompts) for k, a in answers.items()})
        models.clear()
        gc.collect()


if __name__ == "__main__":
    main()
