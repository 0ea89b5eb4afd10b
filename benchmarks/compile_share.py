"""How much of a compile is rlx_jax, and how much is JAX's tracing and XLA, from 4 to 128 layers?

    python benchmarks/compile_share.py

User CPU seconds of a tiny Llama, unrolled and scanned: `build` traces the flow, `passes` are all rows of the table of
passes with the verifier after each, and the choice of sizes; then JAX's trace and lowering, and XLA. The first line is
also the first compile of the process. Exits with 1 if the passes take over 5 % of what XLA takes in any line.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os

import jax
import numpy as np
from handwritten_llama import Sizes, hf_config
from report import Goals, emit, table

import rlx_jax as rlx
from rlx_jax.compiler.pipeline import make_lir, make_template
from rlx_jax.compiler.settings import choose_settings
from rlx_jax.models.llama import Llama32Flow, LlamaConfig, weight_specs
from rlx_jax.runtime.program_key import ProgramKey

GOAL = 0.05
DEPTHS = (4, 16, 64, 128)
WIDTHS = {"hidden": 32, "heads": 2, "kv_heads": 1, "ffn": 64, "vocab": 128}
TOKENS = jax.ShapeDtypeStruct((2, 16), np.int32)
KEY = ProgramKey("llama", "forward", binding=(("batch", 2), ("seq", 16)))


def measure_compile(layers: int, roll: str) -> dict[str, float]:
    """Compile one depth from shapes alone, and return the user CPU seconds of each step."""
    config = LlamaConfig.from_hf(hf_config(Sizes(layers=layers, **WIDTHS)))
    specs, profile = weight_specs(config), rlx.CompileProfile().replace(layers={"roll": roll})
    seconds: dict[str, float] = {}
    gc.collect()  # else a collection of what earlier compiles left falls into one of the steps
    start = os.times().user

    def lap(step: str) -> None:
        nonlocal start
        now = os.times().user
        seconds[step], start = now - start, now

    built = Llama32Flow(config).assemble().build(specs)
    lap("build")
    settings = choose_settings(built, profile, merge=False, program="forward")
    make_lir(make_template(built, settings, "forward"), dict(KEY.binding), settings)
    lap("passes")
    model = rlx.compile(built, profile=profile)
    function = model.programs.function(KEY).run
    start = os.times().user
    lowered = jax.jit(function).trace(model.param_specs(), {}, {"input_ids": TOKENS}).lower()
    lap("trace")
    lowered.compile()
    lap("xla")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="the share of a compile that passes and verifier take")
    parser.add_argument("--layers", type=int, nargs="*", default=DEPTHS)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    jax.devices()  # else the start of JAX's device, once in a process, is part of the first line
    goals, rows = Goals(), []
    for roll, layers in itertools.product(("scan", "unroll"), args.layers):
        seconds = measure_compile(layers, roll)
        share, name = seconds["passes"] / seconds["xla"], f"{roll}, {layers} layers"
        times = [f"{value:.2f}" for value in seconds.values()]
        rows.append((name, *times, f"{share:.1%}", goals.at_most(name, share, GOAL)))
        emit(benchmark="compile_share", roll=roll, layers=layers, **{k: round(v, 3) for k, v in seconds.items()})
    print(table(("", "build s", "passes s", "trace s", "XLA s", "passes / XLA", f"goal {GOAL:.0%}"), rows))
    goals.exit()


if __name__ == "__main__":
    main()
