"""Many prompts through `lm.generate` in slots, against one call after another for batches in order of arrival.

    PYTHONPATH=. python benchmarks/many_prompts.py            a GPU: the 1B Llama shape with random weights in bf16
                                                             a CPU: the 135M shape in f32, 200 prompts
    PYTHONPATH=. python benchmarks/many_prompts.py --small    the 135M shape with 60 short prompts, in about a minute
    PYTHONPATH=. python benchmarks/many_prompts.py --tiny     checks the script

Prompts and answers have log-normal lengths; every answer ends at a length of its own, as with an end token. Batches use
the same API with `max_new_tokens` of their longest answer, and sorting by answer length, which nobody knows before, is
not allowed. On a GPU the batches are left out, as 512 prompts at once do not fit, unless `--batches` is passed.

Goals: CPU ≥ 1.3 × batches of 8; H200, 512 prompts: ≥ 26,000 useful tokens a second in the second call.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

import rlx_jax as rlx


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
SHAPE_135M = LLAMA | {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 2048,
}  # fmt: skip
SHAPE_TINY = SHAPE_135M | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
                           "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
GPU_JOB = Job(512, 5.0, (16, 1024), 4.3, (8, 512))
CPU_JOB = Job(200, 3.5, (8, 128), 3.2, (4, 96))
SMALL_JOB = Job(60, 3.0, (8, 64), 2.6, (4, 48))


def run_slots(lm: Any, prompts: list[list[int]], answers: list[int], slots: int | None) -> float:
    """Return the seconds of one call for all prompts."""
    start = time.perf_counter()
    rows = lm.generate(prompts, max_new_tokens=answers, slots=slots)
    seconds = time.perf_counter() - start
    assert [len(row) for row in rows] == answers
    return seconds


def run_batches(lm: Any, prompts: list[list[int]], answers: list[int], size: int) -> float:
    """Return the seconds of one call after another, in order of arrival."""
    start = time.perf_counter()
    for i in range(0, len(prompts), size):
        lm.generate(prompts[i : i + size], max_new_tokens=max(answers[i : i + size]))
    return time.perf_counter() - start


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="60 short prompts")
    parser.add_argument("--tiny", action="store_true", help="a tiny model")
    parser.add_argument("--slots", type=int, nargs="*", default=[], help="numbers of slots, in place of the default")
    parser.add_argument("--batches", type=int, default=None, help="rows of the batches to compare with")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    on_gpu = jax.default_backend() != "cpu"
    shape = SHAPE_TINY if args.tiny else SHAPE_1B if on_gpu else SHAPE_135M
    job = SMALL_JOB if args.small or args.tiny else GPU_JOB if on_gpu else CPU_JOB
    precision = {"compute": "bf16", "weights": "bf16"} if on_gpu else {}
    profile = rlx.CompileProfile().replace(precision=precision)
    recipe = rlx.Llama32Flow.for_prefill(shape)
    lm = rlx.CausalLM(recipe, {}, missing="init", key=0, profile=profile, max_positions=2048)
    prompts, answers = job.rows(shape["vocab_size"])
    best: dict[str, float] = {}

    def measure(name: str, run: Any) -> None:
        for i in range(args.rounds):
            seconds = run()
            best[name] = min(seconds, best.get(name, seconds))
            rate = round(sum(answers) / seconds)
            row = {"run": name, "call": i + 1, "seconds": round(seconds, 2), "useful_tokens_per_second": rate}
            print(json.dumps(row | {"request": str(lm.report().request)}), flush=True)

    for slots in args.slots or [None]:
        name = "slots" if slots is None else f"{slots} slots"
        measure(name, partial(run_slots, lm, prompts, answers, slots))
    size = args.batches or (0 if on_gpu else 8)
    if size:
        measure(f"batches of {size}", partial(run_batches, lm, prompts, answers, size))
        fastest = min(seconds for name, seconds in best.items() if "slots" in name)
        print(json.dumps({"times as fast": round(best[f"batches of {size}"] / fastest, 2)}))


if __name__ == "__main__":
    main()
