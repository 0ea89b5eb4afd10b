"""Does compile time grow with depth? 64 layers against 4.

    python benchmarks/depth.py

Unrolled: everything rlx_jax does before JAX traces (build, derive, lower, passes, specialise, each verified), from
shapes alone. Scanned: the time JAX takes to trace the program, and the size of its text. Each time is taken from
fresh compiles of both depths in turn, after one of each to warm up the process. Exits with 1 if a ratio is over 1.5.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

import jax
import numpy as np
from handwritten_llama import Sizes, hf_config
from report import Goals, emit, median_ratio, table

import rlx_jax as rlx
from rlx_jax.models.llama import Llama32Flow, LlamaConfig, weight_specs
from rlx_jax.runtime.program_key import ProgramKey

GOAL = 1.5
SHALLOW, DEEP = 4, 64
TOKENS = jax.ShapeDtypeStruct((2, 128), np.int32)
KEY = ProgramKey("llama", "forward", binding=(("batch", 2), ("seq", 128)))


def figures(layers: int, roll: str, trace: bool, size: bool = False) -> dict[str, float]:
    """Compile one depth afresh: seconds before tracing, seconds of tracing, characters of text."""
    config = LlamaConfig.from_hf(hf_config(Sizes(layers=layers)))
    flow, specs = Llama32Flow(config), weight_specs(config)
    profile = rlx.CompileProfile().replace(layers={"roll": roll})
    gc.collect()
    start = time.perf_counter()
    model = rlx.compile(flow, specs, profile=profile)
    function = model.programs.function(KEY).run  # specialise, verify, plan
    found = {"before tracing": time.perf_counter() - start}
    if trace:
        jitted = jax.jit(function)
        start = time.perf_counter()
        traced = jitted.trace(model.param_specs(), {}, {"input_ids": TOKENS})
        found["trace"] = time.perf_counter() - start
        lowered = traced.lower()
        found["trace and lower to StableHLO"] = time.perf_counter() - start
        if size:
            found["StableHLO"] = len(lowered.as_text())
            found["optimised HLO"] = len(lowered.compile().as_text() or "")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=f"compile time of {DEEP} layers against {SHALLOW}")
    parser.add_argument("--rounds", type=int, default=31, help="fresh compiles of each depth")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    goals, rows, record = Goals(), [], {}

    def row(name: str, shallow: float, deep: float, ratio: float, unit: str, goal: bool) -> None:
        verdict = goals.at_most(name, ratio, GOAL) if goal else ""
        shown = (f"{1e3 * v:.1f} ms" if unit == "s" else f"{v:,.0f}" for v in (shallow, deep))
        rows.append((name, *shown, f"{ratio:.3f}", verdict))
        record[name] = [shallow, deep, ratio]

    for roll, trace in (("unroll", False), ("scan", True)):
        sizes = [figures(n, roll, trace, size=True) for n in (SHALLOW, DEEP)]
        runs = [[figures(n, roll, trace) for n in (SHALLOW, DEEP)] for _ in range(args.rounds)]
        for name in runs[0][0]:
            shallow, deep = ([pair[i][name] for pair in runs] for i in (0, 1))
            goal = (roll, name) in {("unroll", "before tracing"), ("scan", "trace")}
            medians = statistics.median(shallow), statistics.median(deep)
            row(f"{roll}: {name}", *medians, median_ratio(deep, shallow), "s", goal)
        for name in ("StableHLO", "optimised HLO"):
            if name in sizes[0]:
                small, large = (s[name] for s in sizes)
                row(f"{roll}: {name}, characters", small, large, large / small, "", True)

    print(table(("", f"{SHALLOW} layers", f"{DEEP} layers", "ratio", f"goal {GOAL}"), rows))
    emit(benchmark="depth", jax=jax.__version__, rounds=args.rounds, figures=record)
    goals.exit()


if __name__ == "__main__":
    main()
