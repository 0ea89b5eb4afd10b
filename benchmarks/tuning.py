"""Is a tuned profile ever slower than `auto`? `tune` on six small models, then both profiles run in turn again.

    python benchmarks/tuning.py                  all six, slow: about 18 compiles of each
    python benchmarks/tuning.py llama32 --runs 1   one of them, quickly

Each model has random weights. The figures of `tune` decide what is kept; those here are measured afterwards, by more
runs, on a quiet machine. Exits with 1 if a tuned profile takes over 1.02 x the time of `auto`, or if none is faster.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from typing import Any

import jax
import numpy as np
from presets import FAMILIES, weights_of
from report import Goals, emit, table

import rlx_jax as rlx
from rlx_jax.loading.tuning import Workload, tune

GOAL, FASTER = 1.02, 0.98
MODELS = ("llama32", "qwen3", "qwen35", "gemma", "llama32_batch", "encoder")


def open_model(name: str) -> Any:
    """Return a function that opens a model for a profile; the encoder has MiniLM's shape, with a small vocabulary."""
    config, make, specs = FAMILIES[name.removesuffix("_batch")]
    recipe = make(config)
    weights = weights_of(specs(config), np.float32)
    if name == "encoder":
        return lambda profile: rlx.Encoder(rlx.compile(recipe, weights, profile=profile))
    return lambda profile: rlx.CausalLM(recipe, weights, profile=profile)


def main() -> None:
    parser = argparse.ArgumentParser(description="tuned profiles against `auto`")
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], help="by default all")
    parser.add_argument("--runs", type=int, default=5, help="runs of each profile while tuning, and 4 x after")
    parser.add_argument("--new-tokens", type=int, default=32)
    args = parser.parse_args()
    goals, rows, ratios = Goals(), [], []
    cache = tempfile.TemporaryDirectory()  # profiles that are opened again, and those with equal programs, compile once
    rlx.compile_cache(cache.name)
    for name in args.models or MODELS:
        make = open_model(name)
        batch = 1 if name != "llama32_batch" else 8
        workload = Workload(batch, prompt_tokens=64, new_tokens=args.new_tokens, runs=args.runs)
        result = tune(make, rlx.CompileProfile.auto(), workload)
        same = result.profile == result.base
        ratio = (
            1.0 if same else statistics.median(workload.ratios(make(result.profile), make(result.base), 4 * args.runs))
        )
        kept = "; ".join(trial.change for trial in result.trials if trial.kept) or "nothing"
        ratios.append(ratio)
        emit(model=name, ratio=round(ratio, 3), tuned=round(result.ratio, 3), kept=kept, trials=len(result.trials))
        rows.append((name, f"{result.ratio:.3f}", f"{ratio:.3f}", kept if not same else "auto",
                     goals.at_most(f"{name}: tuned / auto", ratio, GOAL)))  # fmt: skip
    print(table(("model", "while tuning", "again", "kept", ""), rows))
    print(f"fastest: {min(ratios):.3f} x", goals.at_most("the fastest of all", min(ratios), FASTER))
    emit(device=jax.devices()[0].device_kind, jax=jax.__version__)
    goals.exit()


if __name__ == "__main__":
    main()
