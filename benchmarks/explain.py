"""Do the times of the blocks add up to the time of a step that nothing traces?

    python benchmarks/explain.py          Llama 3.2 1B's shape in bf16 on an accelerator, a sixth of it on a CPU

A step of decoding and a prefill, with random weights: the sum of `lm.explain` over blocks, without the time that
belongs to no block, beside the wall-clock time of the same traced runs, and of other runs that nothing traces (the
median of several; of prompts on an accelerator several are queued, as a single one also waits for the host to start
it). Exits with 1 if the blocks are off by more than 10 % from the runs without a trace, or if more than a tenth of the
kernels' time belongs to no block. A trace slows the host down, so that the device waits more in traced runs. On a CPU
nothing else may run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from report import Goals, table

import rlx_jax as rlx
from rlx_jax.inspection.records import Inspection

ON_CPU = jax.default_backend() == "cpu"
QUEUED = 1 if ON_CPU else 5
LAYERS, HIDDEN, INNER, VOCAB, CONTEXT, NEW = (4, 1024, 4096, 32000, 256, 65) if ON_CPU else (
    16, 2048, 8192, 128256, 1024, 257)  # fmt: skip
CONFIG = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": HIDDEN // 64, "num_key_value_heads": HIDDEN // 256, "head_dim": 64,
    "max_position_embeddings": 2048, "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
}  # fmt: skip


def language_model() -> rlx.CausalLM:
    """Return the model with random weights."""
    profile = rlx.CompileProfile().replace(precision={"compute": "f32" if ON_CPU else "bf16"})
    bare = rlx.CausalLM(rlx.Llama32Flow.for_prefill(CONFIG), profile=profile).model
    return rlx.CausalLM(bare.replace(bare.init(0)))


def median_seconds(run: Callable[[], Any]) -> float:
    """Return the median seconds of seven calls, after one that compiles."""
    run()
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def row(inspection: Inspection, seconds: float, goals: Goals) -> tuple[str, ...]:
    """Return the line of a program; notes whether the blocks add up."""
    outside = {block.path: block.seconds for block in inspection.blocks if block.path.startswith("(")}
    kernels = inspection.seconds - outside.get("(no kernel runs)", 0.0)
    blocks = inspection.seconds - sum(outside.values())
    off, off_clock = abs(blocks / inspection.seconds - 1), abs(blocks / seconds - 1)
    unattributed = 1 - blocks / kernels
    verdicts = (
        goals.at_most(f"{inspection.program}: blocks off the step", off_clock, 0.10),
        goals.at_most(f"{inspection.program}: kernels without a block", unattributed, 0.10),
    )
    times = (f"{1000 * each:.3f}" for each in (seconds, inspection.seconds, kernels, blocks))
    shares = (f"{100 * each:.1f} %" for each in (off, off_clock, unattributed, inspection.roofline_seconds / seconds))
    return inspection.program, *times, *shares, " ".join(verdicts)


def main() -> None:
    """Print the table and both explanations."""
    lm, goals = language_model(), Goals()
    lm.eos_ids = ()
    prompt = np.random.default_rng(0).integers(0, VOCAB, (1, CONTEXT - NEW)).tolist()
    first = median_seconds(lambda: lm.generate(prompt, max_new_tokens=1))
    step = (median_seconds(lambda: lm.generate(prompt, max_new_tokens=NEW)) - first) / (NEW - 1)
    filled = np.ones((1, CONTEXT), np.int32)

    def prompts() -> None:
        jax.block_until_ready([lm.prefill(filled, max_len=2 * CONTEXT, logits="last")[0] for _ in range(QUEUED)])

    prefill = median_seconds(prompts) / QUEUED
    inspections = lm.explain(context=CONTEXT), lm.explain("prefill", context=CONTEXT)
    head = ("program", "clock ms", "trace ms", "kernels", "blocks", "off trace", "off clock", "no block", "roofline",
            "goals")  # fmt: skip
    rows = [row(*pair, goals) for pair in zip(inspections, (step, prefill), strict=True)]
    print(f"jax {jax.__version__}, {inspections[0].device}, {LAYERS} layers of {HIDDEN}\n{table(head, rows)}\n")
    print("\n\n".join(map(str, inspections)))
    goals.exit()


if __name__ == "__main__":
    main()
