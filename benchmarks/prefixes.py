"""What is read already: prompts with one beginning, and a turn of a conversation, against reading all of it.

    python benchmarks/prefixes.py           the 1B shape in bf16 on a GPU, a small one in f32 on the CPU
    python benchmarks/prefixes.py --tiny    one that checks this script

Times to the first token of each row, through `lm.generate(…, max_new_tokens=1)`. Exits with 1 if tokens differ in f32,
or a goal is missed.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from handwritten_llama import Sizes, hf_config
from report import Goals, emit, interleaved, table

import rlx_jax as rlx
from rlx_jax.models.llama import Llama32Flow, LlamaConfig, weight_specs


@dataclass(frozen=True)
class Shape:
    """A model, and prompts: so many rows of a beginning that they share and an end of their own."""

    sizes: Sizes
    dtype: str
    rows: tuple[int, ...]
    shared: tuple[int, ...]
    end: int


SHAPES = {
    "1b": Shape(
        Sizes(layers=16, hidden=2048, heads=32, kv_heads=8, head_dim=64, ffn=8192, vocab=128256, theta=5e5),
        "bf16", (1, 8, 32), (256, 1024, 4096), 60,
    ),
    "small": Shape(
        Sizes(layers=8, hidden=256, heads=8, kv_heads=4, head_dim=32, ffn=688, vocab=4096), "f32", (1, 8), (64, 256), 60
    ),
    "tiny": Shape(
        Sizes(layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=512), "f32", (1, 4), (48,), 10
    ),
}  # fmt: skip


def build(shape: Shape) -> rlx.CausalLM:
    """The model, with random weights."""
    config = LlamaConfig.from_hf(hf_config(shape.sizes))
    rng, kind = np.random.default_rng(0), jnp.dtype("float32" if shape.dtype == "f32" else "bfloat16")
    weights = {
        key: (rng.standard_normal(s.shape, np.float32) * np.float32(0.02)).astype(kind) if len(s.shape) > 1
        else np.ones(s.shape, kind)
        for key, s in weight_specs(config).items()
    }  # fmt: skip
    profile = rlx.CompileProfile.preset("auto").replace(precision={"compute": shape.dtype})
    return rlx.CausalLM(Llama32Flow(config), weights, profile=profile, max_positions=8192)


def main() -> None:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    name = "tiny" if args.tiny else "1b" if jax.default_backend() == "gpu" else "small"
    shape, goals = SHAPES[name], Goals()
    lm, rng = build(shape), np.random.default_rng(1)
    lines = []
    for shared in shape.shared:
        begin = rng.integers(0, shape.sizes.vocab, shared).tolist()
        _, state = lm.prefill([begin], logits="last")
        for rows in shape.rows:
            ends = rng.integers(0, shape.sizes.vocab, (rows, shape.end)).tolist()
            whole = [begin + end for end in ends]
            calls = {
                "all": lambda whole=whole: lm.generate(whole, 1),
                "shared": lambda whole=whole: lm.generate(whole, 1, share_prefix=True),
                "state": lambda ends=ends, state=state: lm.generate(ends, 1, state=state),
            }
            found = {name: call() for name, call in calls.items()}  # compiles
            alike = [
                sum(a == b for a, b in zip(found["all"], found[n], strict=True)) / rows for n in ("shared", "state")
            ]
            if shape.dtype == "f32":
                goals.at_most("rows with other tokens", 1 - min(alike), 0.0)
            took = {name: 1e3 * statistics.median(times) for name, times in interleaved(calls, args.rounds).items()}
            if not args.tiny and rows > 1:
                goals.at_most(f"{rows} rows of {shared} shared tokens", took["shared"] / took["all"], 1.0)
            emit(shared=shared, rows=rows, alike=alike, **{f"{name}_ms": round(ms, 3) for name, ms in took.items()})
            lines.append([f"{rows} x ({shared} + {shape.end})", *(f"{took[name]:.2f}" for name in calls)])
    print(table(["ms to the first tokens", "all read", "share_prefix", "state="], lines))
    goals.exit()


if __name__ == "__main__":
    main()
