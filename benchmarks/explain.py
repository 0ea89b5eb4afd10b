"""Do the times of the blocks add up to the time of a step that nothing traces?

    python benchmarks/explain.py          Llama 3.2 1B's shape in bf16 on an accelerator, a sixth of it on a CPU

A step of decoding and a prompt, with random weights, in rounds that interleave `lm.explain` with runs that nothing
traces, so that drifts of the machine are in both; medians of the rounds. `all rows` of an explanation are a traced run
as a user sees it, with the time in which no kernel runs: they are held against one step of `generate`, and against one
prompt that the host waits for. `blocks` are the rows of blocks alone, and are held against what a run costs a device
that never waits for the host: the same steps, and on an accelerator the mean of prompts in a queue. Exits with 1 if
either is off by more than 10 %, or if more than a tenth of the kernels' time belongs to no block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import jax
import numpy as np
from report import Goals, interleaved, table

import rlx_jax as rlx
from rlx_jax.inspection.records import Inspection

ON_CPU = jax.default_backend() == "cpu"
QUEUED, ROUNDS = (1, 9) if ON_CPU else (20, 7)
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


def row(inspections: list[Inspection], clock: float, device_clock: float, goals: Goals) -> tuple[str, ...]:
    """Return the line of a program; notes whether its rows and its blocks add up to the seconds of the clocks."""
    outside = [{block.path: block.seconds for block in i.blocks if block.path.startswith("(")} for i in inspections]
    rows = median(i.seconds for i in inspections)
    blocks = median(i.seconds - sum(o.values()) for i, o in zip(inspections, outside, strict=True))
    kernels = median(i.seconds - o.get("(no kernel runs)", 0.0) for i, o in zip(inspections, outside, strict=True))
    off = {"all rows": abs(rows / clock - 1), "blocks": abs(blocks / device_clock - 1),
           "kernels without a block": 1 - blocks / kernels}  # fmt: skip
    program = inspections[0].program
    verdicts = (goals.at_most(f"{program}: {name}, off by", value, 0.10) for name, value in off.items())
    times = (f"{1000 * each:.3f}" for each in (clock, rows, device_clock, blocks))
    shares = (f"{100 * each:.1f} %" for each in (*off.values(), inspections[0].roofline_seconds / device_clock))
    return program, *times, *shares, " ".join(verdicts)


def main() -> None:
    """Print the table and both explanations."""
    lm, goals = language_model(), Goals()
    lm.eos_ids = ()
    ids = np.random.default_rng(0).integers(0, VOCAB, (1, CONTEXT), np.int32)
    prompt = ids[:, : CONTEXT - NEW].tolist()
    inspections: dict[str, list[Inspection]] = {"decode": [], "prefill": []}

    def prompts(number: int) -> None:
        jax.block_until_ready([lm.prefill(ids, max_len=2 * CONTEXT, logits="last")[0] for _ in range(number)])

    calls: dict[str, Callable[[], Any]] = (
        {
            "first": lambda: lm.generate(prompt, max_new_tokens=1),
            "answer": lambda: lm.generate(prompt, max_new_tokens=NEW),
            "prompt": lambda: prompts(1),
        }
        | ({} if ON_CPU else {"queue": lambda: prompts(QUEUED)})
        | {name: partial(lambda p: inspections[p].append(lm.explain(p, context=CONTEXT)), name) for name in inspections}
    )
    for call in calls.values():
        call()  # compiles
    times = {name: median(seconds) for name, seconds in interleaved(calls, ROUNDS).items()}
    step = (times["answer"] - times["first"]) / (NEW - 1)
    queued = times.get("queue", times["prompt"]) / QUEUED  # a CPU runs one prompt after another either way
    clocks = {"decode": (step, step), "prefill": (times["prompt"], queued)}
    head = ("program", "a run, ms", "all rows", "queued, ms", "blocks", "rows off", "blocks off", "no block",
            "roofline", "goals")  # fmt: skip
    rows = [row(inspections[name], *clock, goals) for name, clock in clocks.items()]
    device = inspections["decode"][0].device
    print(f"jax {jax.__version__}, {device}, {LAYERS} layers of {HIDDEN}\n{table(head, rows)}\n")
    print("\n\n".join(str(each[-1]) for each in inspections.values()))
    goals.exit()


if __name__ == "__main__":
    main()
