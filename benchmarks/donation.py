"""Is the key/value cache updated in place?

    python benchmarks/donation.py

Compiles the extend step of a Llama over a cache of 2048 positions for the CPU, for 1, 8 and 64 rows, layers unrolled
and scanned, and reads the compiled program. Exits with 1 unless every byte of the state is aliased to an output,
temporaries are at most the plan's activation estimate and one layer's cache, they do not grow with the number of
layers, and no instruction copies an array of a cache's shape.
"""

from __future__ import annotations

import argparse
import re
from functools import partial

import jax
import numpy as np
from handwritten_llama import Sizes, hf_config
from report import Goals, emit, table

import rlx_jax as rlx
from rlx_jax.compiler.executable import Executable
from rlx_jax.lowering.inspect.buffers import activation_bytes
from rlx_jax.lowering.lir.plan import state_types
from rlx_jax.models.llama import Llama32Flow, LlamaConfig

CACHE_LEN = 2048
STEPS = ((1, 1), (8, 1), (64, 1), (8, 16))  # rows, tokens of each
GROWTH = 1.05  # of temporaries, when layers double
INSTRUCTION = re.compile(r"%?(\S+) = \w+\[([\d,]+)\]\S* (copy|copy-start|transpose)\(")


def extend_step(sizes: Sizes, roll: str, batch: int, tokens: int) -> Executable:
    """Compile one extend step; nothing runs."""
    config = LlamaConfig.from_hf(hf_config(sizes))
    profile = rlx.CompileProfile().replace(
        layers={"roll": roll}, backend={"cpu": {"merge": True}}, donation={"strict": True}
    )
    model = rlx.compile(Llama32Flow(config), profile=profile, program="extend")
    state = jax.eval_shape(partial(model.init_state, batch, CACHE_LEN))
    model.lower(np.ones((batch, tokens), np.int32), np.full(batch, tokens, np.int32), state=state)
    (found,) = model.programs.executables.values()
    return found


def copies(hlo: str, shapes: set[tuple[int, ...]]) -> tuple[list[str], list[str]]:
    """Copies of an array of one of `shapes`; and copies in another order of the axes, as a matrix product makes."""
    orders = {tuple(sorted(shape)) for shape in shapes}
    same, permuted = [], []
    for line in hlo.splitlines():
        if found := INSTRUCTION.search(line):
            shape = tuple(int(d) for d in found[2].split(","))
            if shape in shapes and found[3] != "transpose":
                same.append(found[1])
            elif tuple(sorted(shape)) in orders and found[3] != "transpose":
                permuted.append(found[1])
    return same, permuted


def main() -> None:
    argparse.ArgumentParser(description="is the cache updated in place?").parse_args()
    jax.config.update("jax_platforms", "cpu")
    goals, rows = Goals(), []
    for roll in ("unroll", "scan"):
        for batch, tokens in STEPS:
            name = f"{roll}, {batch} x {tokens}"
            step, deeper = (extend_step(Sizes(layers=n), roll, batch, tokens) for n in (4, 8))
            memory, graph = step.call.memory_analysis(), step.lir.graph
            caches = state_types(graph, stacked=False)
            stored = state_types(graph, stacked=step.lir.plan.scan)
            state = sum(t.nbytes for t in stored.values())
            layer = 2 * max(t.nbytes for t in caches.values())  # keys and values
            activations = activation_bytes(graph, in_place=False, scan=step.lir.plan.scan)
            temp, deep = memory.temp_size_in_bytes, deeper.call.memory_analysis().temp_size_in_bytes
            shapes = {tuple(t.shape) for t in (*caches.values(), *stored.values()) if t.rank > 2}
            same, permuted = copies(step.call.as_text() or "", shapes)
            verdicts = [
                goals.at_most(f"{name}: state bytes / aliased bytes", state / memory.alias_size_in_bytes, 1),
                goals.at_most(f"{name}: temporaries", temp, activations + layer),
                goals.at_most(f"{name}: temporaries of 8 layers / of 4", deep / temp, GROWTH),
                goals.at_most(f"{name}: cache-shaped copies", len(same), 0),
            ]
            rows.append((name, f"{state:,}", f"{memory.alias_size_in_bytes:,}", f"{temp:,}", f"{deep:,}",
                         f"{activations:,}", f"{layer:,}", len(same), len(permuted),
                         "MISSED" if "MISSED" in verdicts else "ok"))  # fmt: skip
            emit(benchmark="donation", jax=jax.__version__, case=name, state_bytes=state,
                 aliased_bytes=memory.alias_size_in_bytes, temp_bytes=temp, temp_bytes_8_layers=deep,
                 activation_estimate=activations, layer_cache_bytes=layer, cache_shaped_copies=same,
                 permuted_copies=len(permuted))  # fmt: skip
    head = ("4 layers, bytes", "state", "aliased", "temp", "temp of 8 layers", "activations, estimate",
            "a layer's cache", "copies", "permuted", "goal")  # fmt: skip
    print(table(head, rows))
    goals.exit()


if __name__ == "__main__":
    main()
