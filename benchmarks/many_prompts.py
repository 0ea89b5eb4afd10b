"""Many prompts through `lm.generate` in slots, against one call after another for batches in order of arrival.

    PYTHONPATH=. python benchmarks/many_prompts.py            a GPU: the 1B Llama shape with random weights in bf16
                                                             a CPU: the 135M shape in f32, 200 prompts
    PYTHONPATH=. python benchmarks/many_prompts.py --small    the 135M shape with 60 short prompts, in about a minute
    PYTHONPATH=. python benchmarks/many_prompts.py --mixed    short and long requests: context classes against one class
    PYTHONPATH=. python benchmarks/many_prompts.py --full     a GPU: the 8B shape, prompts and answers of 1,000 tokens
    PYTHONPATH=. python benchmarks/many_prompts.py --full --peer  the same job with transformers
    PYTHONPATH=. python benchmarks/many_prompts.py --prefix   prompts that begin with the same 1,500 tokens, on a
                                                             CPU 384, against the same call with share_prefix=False
    PYTHONPATH=. python benchmarks/many_prompts.py --tiny     checks the script, also with the other options
    PYTHONPATH=. python benchmarks/many_prompts.py --flat     20,000 tiny requests, and the memory after each 2,000

Prompts and answers have log-normal lengths; every answer ends at a length of its own, as with an end token. Batches use
the same API with `max_new_tokens` of their longest answer, and sorting by answer length, which nobody knows before, is
not allowed. On a GPU the batches are left out, as 512 prompts at once do not fit, unless `--batches` is passed.

The ideal of full slots is the time of decoding alone, with a row in each slot and a cache of the middle of a request;
`part_with_prefill` adds the time of one call for one token of each prompt to it, as prompts take the device, too.
`--peer` runs transformers' `generate_batch` (continuous batching) with a model of the same shape instead, in a process
of its own, as JAX reserves the memory of a GPU.

Goals: CPU ≥ 1.3 × batches of 8; H200, 512 prompts: ≥ 26,000 useful tokens a second in the second call, and a first call
in ≤ 2 × its time with a warm compile cache; 8B shape: ≥ 0.85 of full slots; 2,000 prompts with a shared prefix of 1,500
tokens: ≥ 2.5 × as many tokens a second as without sharing it.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

import rlx_jax as rlx
from rlx_jax.generate import slot_plan


@dataclass(frozen=True)
class Job:
    """Prompts and the lengths of their answers: log-normal with these medians, clipped to these ranges."""

    prompts: int
    prompt_median: float
    prompt_range: tuple[int, int]
    answer_median: float
    answer_range: tuple[int, int]

    def rows(self, vocab_size: int, seed: int = 3) -> tuple[list[list[int]], list[int]]:
        """Return the prompts, and the number of new tokens of each."""
        rng = np.random.default_rng(seed)

        def lengths(median: float, limits: tuple[int, int]) -> list[int]:
            values: list[int] = np.clip(rng.lognormal(median, 1, self.prompts).astype(int), *limits).tolist()
            return values

        num_tokens = lengths(self.prompt_median, self.prompt_range)
        answers = lengths(self.answer_median, self.answer_range)
        return [rng.integers(0, vocab_size, n).tolist() for n in num_tokens], answers


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": True, "rope_theta": 5e5,
}  # fmt: skip
SHAPE_1B = LLAMA | {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 40960,
}  # fmt: skip
SHAPE_8B = LLAMA | {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}  # fmt: skip
SHAPE_135M = LLAMA | {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 2048,
}  # fmt: skip
SHAPE_TINY = SHAPE_135M | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
                           "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
GPU_JOB = Job(512, 5.0, (16, 1024), 4.3, (8, 512))
CPU_JOB = Job(200, 3.5, (8, 128), 3.2, (4, 96))
SMALL_JOB = Job(60, 3.0, (8, 64), 2.6, (4, 48))
# Prompts after a shared prefix, and its length.
GPU_PREFIX_JOB = Job(2000, 3.5, (8, 128), 3.5, (8, 64)), 1500
CPU_PREFIX_JOB = Job(100, 2.8, (4, 32), 2.0, (2, 16)), 384
# Short requests, and long ones that make the longest cache 16 or 32 times as long.
MIXED_GPU = (Job(384, 5.0, (16, 512), 4.3, (8, 512)), Job(16, 9.5, (8192, 24576), 6.5, (512, 1024)))
MIXED_CPU = (Job(48, 3.0, (8, 64), 2.6, (4, 48)), Job(3, 6.0, (300, 700), 4.5, (64, 128)))


def run_slots(
    lm: Any, prompts: list[list[int]], answers: list[int], slots: int | None, share: bool | None = None
) -> float:
    """Return the seconds of one call for all prompts."""
    start = time.perf_counter()
    rows = lm.generate(prompts, max_new_tokens=answers, slots=slots, share_prefix=share)
    seconds = time.perf_counter() - start
    assert [len(row) for row in rows] == answers
    return seconds


def run_batches(lm: Any, prompts: list[list[int]], answers: list[int], size: int) -> float:
    """Return the seconds of one call after another, in order of arrival."""
    start = time.perf_counter()
    for i in range(0, len(prompts), size):
        lm.generate(prompts[i : i + size], max_new_tokens=max(answers[i : i + size]))
    return time.perf_counter() - start


def run_peer(shape: dict[str, Any], prompts: list[list[int]], answers: list[int], rounds: int) -> None:
    """Run transformers' continuous batching with the same prompts; all answers have the length of the longest."""
    import torch
    import transformers

    config = transformers.LlamaConfig(**{k: v for k, v in shape.items() if k not in ("architectures", "model_type")})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    options = transformers.GenerationConfig(
        max_new_tokens=max(answers), do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    for i in range(rounds):
        start = time.perf_counter()
        outputs = model.eval().generate_batch(inputs=prompts, generation_config=options)
        seconds = time.perf_counter() - start
        count = sum(len(output.generated_tokens) for output in outputs.values())
        row = {"run": "transformers generate_batch", "call": i + 1, "seconds": round(seconds, 2), "new_tokens": count}
        print(json.dumps(row | {"useful_tokens_per_second": round(count / seconds)}), flush=True)


def full_slots_rate(lm: Any, prompts: list[list[int]], answers: list[int]) -> float:
    """Return the tokens per second of decoding with all slots full, at the middle of a request."""
    num = lm.report().request.slots
    middle = [(prompt * 2)[: len(prompt) + answer // 2] for prompt, answer in zip(prompts, answers, strict=True)][:num]
    few, many = 32, 32 + max(answers) // 4
    seconds = {}
    for count in (few, many, few, many):
        start = time.perf_counter()
        lm.generate(middle, max_new_tokens=count, slots=num)
        seconds[count] = time.perf_counter() - start  # the second call of each, without compiles
    return len(middle) * (many - few) / (seconds[many] - seconds[few])


def run_flat(lm: Any, vocab_size: int) -> None:
    """Run 20,000 requests of 1 to 8 tokens through one iterator, and print the peak memory of the process."""
    rng = np.random.default_rng(0)
    requests = (rng.integers(0, vocab_size, 1 + i % 8).tolist() for i in range(20_000))
    start = time.perf_counter()
    for done, _ in enumerate(lm.generate_iter(requests, 4, slots=32), 1):
        if done % 2000 == 0:
            gc.collect()
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
            arrays = sum(array.nbytes for array in jax.live_arrays())
            row = {"requests": done, "seconds": round(time.perf_counter() - start, 1), "peak_MiB": peak}
            print(json.dumps(row | {"live_arrays_bytes": arrays, "compiled": lm.report().request.compiled}), flush=True)


def mixed_rows(jobs: tuple[Job, ...], vocab_size: int) -> tuple[list[list[int]], list[int]]:
    """Return the prompts and answer lengths of several jobs, in random order."""
    parts = [job.rows(vocab_size, seed) for seed, job in enumerate(jobs)]
    pairs = [pair for prompts, answers in parts for pair in zip(prompts, answers, strict=True)]
    order = np.random.default_rng(0).permutation(len(pairs))
    return [pairs[i][0] for i in order], [pairs[i][1] for i in order]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="60 short prompts")
    parser.add_argument("--prefix", action="store_true", help="prompts with a shared prefix")
    parser.add_argument("--tiny", action="store_true", help="a tiny model")
    parser.add_argument("--slots", type=int, nargs="*", default=[], help="numbers of slots, in place of the default")
    parser.add_argument("--batches", type=int, default=None, help="rows of the batches to compare with")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--mixed", action="store_true", help="short and long requests")
    parser.add_argument("--full", action="store_true", help="the 8B shape, 1,000 tokens → 1,000 tokens")
    parser.add_argument("--prompts", type=int, default=1000, help="number of prompts of --full")
    parser.add_argument("--answers", type=int, default=None, help="new tokens of each prompt of --full")
    parser.add_argument("--peer", action="store_true", help="transformers instead, which needs torch")
    parser.add_argument("--flat", action="store_true", help="20,000 tiny requests")
    args = parser.parse_args()
    on_gpu = jax.default_backend() != "cpu"
    tiny = args.tiny or args.flat
    shape = SHAPE_TINY if tiny else SHAPE_8B if args.full else SHAPE_1B if on_gpu else SHAPE_135M
    job = SMALL_JOB if args.small or args.tiny else GPU_JOB if on_gpu else CPU_JOB
    precision = {"compute": "bf16", "weights": "bf16"} if on_gpu else {}
    profile = rlx.CompileProfile().replace(precision=precision)
    prompts, answers = job.rows(shape["vocab_size"])
    if args.prefix:
        prefix_job, prefix_len = GPU_PREFIX_JOB if on_gpu else CPU_PREFIX_JOB
        prompts, answers = prefix_job.rows(shape["vocab_size"])
        prefix = np.random.default_rng(5).integers(0, shape["vocab_size"], prefix_len).tolist()
        prompts = [prefix + prompt for prompt in prompts]
    elif args.mixed:
        prompts, answers = mixed_rows(MIXED_GPU if on_gpu and not tiny else MIXED_CPU, shape["vocab_size"])
    elif args.full:
        length, count = (24, 12) if tiny else (1000, args.prompts)
        new_tokens = length if args.answers is None else args.answers
        prompts = np.random.default_rng(3).integers(0, shape["vocab_size"], (count, length)).tolist()
        answers = [new_tokens] * count
    if args.peer:
        run_peer(shape, prompts, answers, args.rounds)
        return
    recipe = rlx.Llama32Flow.for_prefill(shape)
    positions = max(2048, max(map(sum, zip(map(len, prompts), answers, strict=True))))
    lm = rlx.CausalLM(recipe, {}, missing="init", key=0, profile=profile, max_positions=positions)
    if args.flat:
        run_flat(lm, shape["vocab_size"])
        return
    best: dict[str, float] = {}

    def measure(name: str, run: Any) -> None:
        for i in range(args.rounds):
            seconds = run()
            best[name] = min(seconds, best.get(name, seconds))
            rate = round(sum(answers) / seconds)
            row = {"run": name, "call": i + 1, "seconds": round(seconds, 2), "useful_tokens_per_second": rate}
            row |= {"slot_classes": lm.report().request.slot_classes, "positions": lm.report().request.positions_read}
            print(json.dumps(row | {"request": str(lm.report().request)}), flush=True)

    if args.prefix:
        slots = args.slots[0] if args.slots else None
        for name, share in (("shared prefix", None), ("without sharing", False)):
            measure(name, partial(run_slots, lm, prompts, answers, slots, share))
        print(json.dumps({"times as fast": round(best["without sharing"] / best["shared prefix"], 2)}))
        return
    for slots in args.slots or [None]:
        name = "slots" if slots is None else f"{slots} slots"
        measure(name, partial(run_slots, lm, prompts, answers, slots))
        if args.mixed:
            slot_plan.MAX_CLASSES, classes = 1, slot_plan.MAX_CLASSES
            measure(f"{name} of one class", partial(run_slots, lm, prompts, answers, slots))
            slot_plan.MAX_CLASSES = classes
            print(json.dumps({"times as fast": round(best[f"{name} of one class"] / best[name], 2)}), flush=True)
    if args.full:
        ideal, rate = full_slots_rate(lm, prompts, answers), sum(answers) / best[name]
        row = {"full_slots_tokens_per_second": round(ideal), "part_of_it": round(rate / ideal, 2)}
        ones, num = [1] * len(prompts), lm.report().request.slots
        prefill = min(run_slots(lm, prompts, ones, num) for _ in range(2))  # the first one compiles
        bound = sum(answers) / (prefill + sum(answers) / ideal)
        row |= {"prefill_seconds": round(prefill, 2), "part_with_prefill": round(rate / bound, 2)}
        print(json.dumps(row), flush=True)
    size = args.batches or (0 if on_gpu or args.mixed or args.full else 8)
    if size:
        measure(f"batches of {size}", partial(run_batches, lm, prompts, answers, size))
        fastest = min(seconds for name, seconds in best.items() if "slots" in name)
        print(json.dumps({"times as fast": round(best[f"batches of {size}"] / fastest, 2)}))


if __name__ == "__main__":
    main()
