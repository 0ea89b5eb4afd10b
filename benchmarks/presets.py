"""What a profile chooses by default, against what it leaves: one setting of each variant is another.

    python benchmarks/presets.py                 every family in f32 on the CPU; bert and wide in bf16 on a GPU
    python benchmarks/presets.py gemma qwen3     these
    python benchmarks/presets.py wide bert       the widths of Llama 1B in two layers, of BERT-base in four

One model of each family, with the proportions of its published ones. On a GPU most of the time is spent compiling: runs
at once, with `--rounds 1` and a few variants each, fill the compile cache for one with all of them. All variants of a
model run in turn, through `lm.generate`, `lm.prefill`, `lm.score`, `rlx.compile` and `encoder.embed`; ratios are to the
default. On a CPU, which may have other work to do, time is that of the processor, over all threads; the least of all
rounds counts. The comments in `profiles/*.rlx.toml` quote this. Exits with 1 if a step of decoding, scores, embeddings
or a forward pass take over 1.03 times as long by default as in the fastest variant.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import ml_dtypes
import numpy as np
from report import Goals, emit, table

import rlx_jax as rlx
from rlx_jax.models import bert, flux2, gemma, llama, qwen35

DECODER: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}  # fmt: skip

GELU = {"hidden_activation": "gelu_pytorch_tanh"}

FAMILIES: dict[str, tuple[Any, Any, Any]] = {
    "llama32": (llama.LlamaConfig.from_hf({**DECODER, "hidden_act": "silu"}), llama.Llama32Flow, llama.weight_specs),
    "qwen3": (llama.Qwen3Config.from_hf({**DECODER, "hidden_act": "silu"}), llama.Qwen3Flow, llama.weight_specs),
    "qwen35": (
        qwen35.Qwen35Config.from_hf(
            {**DECODER, "head_dim": 128, "num_attention_heads": 4, "linear_num_key_heads": 8,
             "linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
        ), qwen35.Qwen35Flow, lambda config: qwen35.Qwen35Flow(config).shapes(),
    ),
    "gemma": (
        gemma.GemmaConfig.from_hf(
            {**DECODER, **GELU, "model_type": "gemma2", "head_dim": 128, "sliding_window": 512,
             "query_pre_attn_scalar": 128}
        ), gemma.GemmaFlow, gemma.weight_specs,
    ),
    "encoder": (
        bert.BertConfig.from_hf(
            {"vocab_size": 8192, "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12,
             "intermediate_size": 1536, "max_position_embeddings": 512}
        ), bert.BertFlow, bert.weight_specs,
    ),
    "flux2": (
        flux2.Flux2Config.from_hf(
            {"num_attention_heads": 6, "num_layers": 2, "num_single_layers": 6, "joint_attention_dim": 1536}
        ), flux2.Flux2Flow, flux2.weight_specs,
    ),
}  # fmt: skip
"""Config, recipe and shapes of the weights: query heads share key heads, and MiniLM's shape."""

WIDE: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 2,
    "num_attention_heads": 32, "hidden_act": "silu", "num_key_value_heads": 8,
}  # fmt: skip
BERT = {"vocab_size": 8192, "hidden_size": 768, "num_hidden_layers": 4, "num_attention_heads": 12}
BERT |= {"intermediate_size": 3072, "max_position_embeddings": 512}
FAMILIES |= {
    "wide": (llama.LlamaConfig.from_hf(DECODER | WIDE), llama.Llama32Flow, llama.weight_specs),
    "bert": (bert.BertConfig.from_hf(BERT), bert.BertFlow, bert.weight_specs),
}

KIND = "cuda" if jax.default_backend() == "gpu" else "cpu"
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "default": {},
    "scan": {"layers": {"roll": "scan"}},
    "fusable": {"fusion": {"policy": "fusable"}},
    "apart": {"backend": {KIND: {"merge": False}}},
    "in_out": {"backend": {KIND: {"weight_layout": "in_out"}}},
    "XLA's products": {"backend": {KIND: {"products": "xla"}}},
}
VARIANTS |= {
    "cuda": {
        "kernels off": {"backend": {"cuda": {"kernels": "off"}}},
        "XLA's attention": {"attention": {"implementation": "xla"}},
    },
    "cpu": {
        "products by rows": {"backend": {"cpu": {"products": "row"}}},
        "16 steps": {"backend": {"cpu": {"steps_per_dispatch": 16, "stop_early": False}}},
    },
}[KIND]
"""What is set of a profile."""

PROMPT, SLOTS = 128, 1024
SHORT, LONG = 9, 41
"""New tokens of two calls whose difference is the time of a step."""

DECIDING, SLACK = ("step", "score", "forward", "embed"), 1.03
"""All programs of a model share a profile, and answers take longer than prompts."""

Call = Callable[[], Any]


def weights_of(specs: dict[str, Any], dtype: Any) -> dict[str, np.ndarray]:
    """Small random weights."""
    rng = np.random.default_rng(0)
    drawn = {key: rng.standard_normal(spec.shape, np.float32) * np.float32(0.02) for key, spec in specs.items()}
    return {key: (array + (array.ndim == 1)).astype(dtype) for key, array in drawn.items()}


def decoder_calls(recipe: Any, weights: dict[str, np.ndarray], profile: rlx.CompileProfile) -> dict[str, Call]:
    """A prompt into an empty cache, and two generations that differ by some steps."""
    lm = rlx.CausalLM(recipe, weights, profile=profile.replace(buckets={"context": [SLOTS]}))
    ids = np.random.default_rng(1).integers(0, lm.vocab_size, (1, PROMPT)).astype(np.int32)

    def generate(new: int) -> Call:
        return lambda: lm.generate(ids.tolist(), max_new_tokens=new)

    prompt: Call = lambda: jax.block_until_ready(lm.prefill(ids, max_len=SLOTS, logits="last")[0])  # noqa: E731
    texts = texts_of(lm.vocab_size)
    return {"prompt": prompt, "long": generate(LONG), "short": generate(SHORT), "score": lambda: lm.score(texts)}


def texts_of(vocab: int) -> list[list[int]]:
    """16 texts of 16 to 127 tokens."""
    rng = np.random.default_rng(2)
    return [rng.integers(0, vocab, size).tolist() for size in rng.integers(16, PROMPT, 16)]


def encoder_calls(recipe: Any, weights: dict[str, np.ndarray], profile: rlx.CompileProfile) -> dict[str, Call]:
    """A batch of sentences, and embeddings of texts of several lengths."""
    encoder = rlx.Encoder(recipe, weights, profile=profile)
    ids = np.random.default_rng(1).integers(0, 8192, (8, PROMPT)).astype(np.int32)
    texts = texts_of(8192)
    return {
        "forward": lambda: jax.block_until_ready(encoder.model(ids)),
        "embed": lambda: encoder.embed(texts),
    }


def denoiser_calls(recipe: Any, weights: dict[str, np.ndarray], profile: rlx.CompileProfile) -> dict[str, Call]:
    """A step of denoising: 16 x 16 image tokens and 64 of text."""
    model, c, rng = rlx.compile(recipe, weights, profile=profile), recipe.config, np.random.default_rng(1)
    floats = {"hidden_states": (1, 256, c.in_channels), "encoder_hidden_states": (1, 64, c.joint_attention_dim)}
    arrays_by_name = {name: rng.standard_normal(shape, np.float32) for name, shape in floats.items()}
    arrays_by_name |= {"timestep": np.full(1, 0.5, np.float32), "guidance": np.full(1, 4.0, np.float32)}
    arrays_by_name |= {"img_ids": np.zeros((256, 4), np.int32), "txt_ids": np.zeros((64, 4), np.int32)}
    arrays_by_name["img_ids"][:, 1:3] = np.stack(np.mgrid[:16, :16], axis=-1).reshape(-1, 2)
    arrays = {name: jax.device_put(value) for name, value in arrays_by_name.items()}
    return {"forward": lambda: jax.block_until_ready(model(**arrays))}


BUILDS = {"encoder": encoder_calls, "bert": encoder_calls, "flux2": denoiser_calls}
"""What is called, where it is no generation."""


def measure_family(family: str, dtype: str, rounds: int, variants: Iterable[str]) -> dict[str, dict[str, list[float]]]:
    """Seconds of each job by variant."""
    config, make, specs = FAMILIES[family]
    numbers = weights_of(specs(config), np.float32 if dtype == "f32" else ml_dtypes.bfloat16)
    calls: dict[str, Call] = {}
    for name in variants:
        profile = rlx.CompileProfile().replace(precision={"compute": dtype}, **VARIANTS[name])
        build = BUILDS.get(family, decoder_calls)
        calls |= {f"{job}: {name}": call for job, call in build(make(config), numbers, profile).items()}
    for name, call in [*calls.items()]:
        try:
            call()
            call()
        except rlx.RlxError as error:  # one that cannot run
            print(f"{family}, {name}: {error}"[:200], flush=True)
            del calls[name]
    times: dict[str, list[float]] = {name: [] for name in calls}
    clock = time.perf_counter if dtype == "bf16" else time.process_time
    for _ in range(rounds):
        for name, call in calls.items():
            start = clock()
            call()
            times[name].append(clock() - start)
    times_by_job: dict[str, dict[str, list[float]]] = {}
    for key, values in times.items():
        job, _, name = key.partition(": ")
        times_by_job.setdefault(job, {})[name] = values
    if "long" in times_by_job:
        long, short = times_by_job.pop("long"), times_by_job.pop("short")
        steps = LONG - SHORT
        times_by_job["step"] = {name: [(min(long[name]) - min(short[name])) / steps] for name in long}
    return times_by_job


def main() -> None:
    parser = argparse.ArgumentParser(description="what the presets choose, against what they leave")
    parser.add_argument(
        "families", nargs="*", choices=[*FAMILIES, []], help="by default all, on a GPU those of published widths"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS], help="with the default")
    args = parser.parse_args()
    dtype = "bf16" if jax.default_backend() == "gpu" else "f32"
    goals, lines, chosen = Goals(), [], next(iter(VARIANTS))
    variants = dict.fromkeys((chosen, *args.variants))
    for family in args.families or (("bert", "wide") if KIND == "cuda" else FAMILIES):
        for job, times in measure_family(family, dtype, args.rounds, variants).items():
            for name, values in times.items():
                ratio, ms = min(values) / min(times[chosen]), min(values) * 1e3
                emit(family=family, job=job, variant=name, ms=round(ms, 3), ratio=round(ratio, 3))
                what = f"{family}, {job}: default / {name}"
                verdict = goals.at_most(what, 1 / ratio, SLACK) if job in DECIDING else ""
                lines.append([f"{family}, {job}", name, f"{ms:.2f}", f"{ratio:.2f}", verdict])
    print(table(["job", "variant", "ms", "/ default", ""], lines))
    goals.exit()


if __name__ == "__main__":
    main()
