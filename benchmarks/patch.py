"""A patch sweep, every layer and every position of a prompt, as one program: against a compile for each layer.

    python benchmarks/patch.py              GPT-2 small's shape, random weights, f32
    python benchmarks/patch.py --tokens 16  a longer prompt
    python benchmarks/patch.py --tiny       a small one that checks this script

`lm.patch` puts the outputs of a clean prompt's layers into a corrupted one. Beside it, each layer is an edited model,
`recipe.at("layers.i").wrap(…)`, with the position as an operand: so many compiles, and runs of the same rows. Both take
the outputs of the clean prompt from one call of `lm.capture`, which is not counted. Times include building and
compiling, not loading weights; CPU seconds are those of this process, on a machine
that others use too. Exits with 1 if the logits differ or the goal is missed.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from report import Goals, emit, table

import rlx_jax as rlx
from rlx_jax.models.gpt2 import Gpt2Config, Gpt2Flow

SHAPES = {
    "gpt2": {"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024},
    "tiny": {"vocab_size": 311, "n_embd": 48, "n_layer": 4, "n_head": 4, "n_positions": 64},
}
# Repeated layers are one loop, which compiles faster, in either form: an edited layer divides it.
PROFILE = rlx.CompileProfile().replace(layers={"roll": "scan"})


def put(emit: rlx.Emit, x: rlx.FlowValue, inner: Any) -> rlx.FlowValue:
    """Put in values `[batch, hidden]` at one position of each row."""

    def change(output: jax.Array, at: jax.Array, value: jax.Array) -> jax.Array:
        is_changed = jnp.arange(output.shape[1])[None] == at[:, None]
        return jnp.where(is_changed[..., None], value[:, None], output)

    return emit.jax(change, inner(x), emit.state.inputs["at"], emit.state.inputs["value"])


def sweep_by_compiling(recipe: Any, weights: Any, prompt: list[int], values: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the last token's logits `[layers, positions, vocab]`, and the seconds without loading."""
    rows, width, taken = len(prompt), values.shape[-1], 0.0
    ids, at, grid = np.array([prompt] * rows, np.int32), np.arange(rows, dtype=np.int32), []
    for layer, value in enumerate(values):
        start = time.perf_counter()
        edited = recipe.patch_flow(lambda f: f.input("at", ("batch",), "int32").input("value", ("batch", width)))
        model = rlx.compile(edited.at(f"layers.{layer}").wrap(put), weights, profile=PROFILE)
        grid.append(np.asarray(model(ids, at=at, value=value))[:, -1])
        taken += time.perf_counter() - start - model.load_seconds
    return np.stack(grid), taken


def main() -> None:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tokens", type=int, default=4)
    args = parser.parse_args()
    shape, goals, rng = SHAPES["tiny" if args.tiny else "gpt2"], Goals(), np.random.default_rng(0)
    recipe = Gpt2Flow(Gpt2Config.from_hf({"model_type": "gpt2", **shape}))
    weights = {key: np.asarray(a) for key, a in rlx.init(recipe, 0).weights().items()}
    clean, corrupted = rng.integers(0, shape["vocab_size"], (2, args.tokens)).tolist()
    lm = rlx.CausalLM(recipe.at("layers.*").capture(stacked=True), weights, profile=PROFILE)
    values = lm.capture([clean])["layers.*"]

    start, cpu = time.perf_counter(), time.process_time()
    ours = np.asarray(lm.patch([corrupted], {"layers.*": values}, sweep=True))[:, :, 0]
    first, first_cpu = time.perf_counter() - start, time.process_time() - cpu
    programs = [key for c in lm.model.programs.companions.values() for key in c.programs.executables]
    start = time.perf_counter()
    np.asarray(lm.patch([corrupted], {"layers.*": values}, sweep=True))
    again = time.perf_counter() - start
    cpu = time.process_time()
    theirs, by_layer = sweep_by_compiling(recipe, weights, corrupted, np.asarray(values)[:, 0])
    by_layer_cpu = time.process_time() - cpu
    error = float(np.abs(ours - theirs).max())
    goals.at_most("difference of the logits", error, 1e-4)
    goals.at_most("programs compiled", len(programs), 1)
    if not args.tiny:
        goals.at_most("a sweep beside a compile per layer, as a share of its time", first / by_layer, 0.1)
    figures = {"sweep_s": first, "again_s": again, "by_layer_s": by_layer, "ratio": by_layer / first}
    figures |= {"sweep_cpu_s": first_cpu, "by_layer_cpu_s": by_layer_cpu}
    rounded = {name: round(value, 2) for name, value in figures.items()}
    emit(layers=len(ours), tokens=args.tokens, error=error, programs=len(programs), **rounded)
    head = [f"{len(ours)} layers x {args.tokens} positions", "seconds", "compiles"]
    lines = [["lm.patch", f"{first:.2f}", len(programs)], ["lm.patch again", f"{again:.2f}", 0]]
    print(table(head, [*lines, ["a compile for each layer", f"{by_layer:.2f}", len(theirs)]]))
    goals.exit()


if __name__ == "__main__":
    main()
