"""Does rlx_jax cost anything over hand-written JAX?

    python benchmarks/no_tax.py

Compiles the same Llama (4 layers, hidden 256, f32, layers unrolled) from a flow and from `handwritten_llama.py` for
2 x 128 tokens on the CPU, compares what XLA says about both programs, and runs both in turn. Exits with 1 if XLA's
FLOPs, bytes accessed, transcendentals or temporary bytes are over 1.02 x those of the hand-written program, if the
median time ratio of the pairs is over 1.05, or if the logits differ.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from typing import Any

import handwritten_llama as hand
import jax
import jax.numpy as jnp
import numpy as np
from report import Goals, emit, interleaved, median_ratio, table

import rlx_jax as rlx
from rlx_jax.models.llama import Llama32Flow, LlamaConfig, weight_specs

PROGRAM_GOAL = 1.02
TIME_GOAL = 1.05
LOGITS_GOAL = 3e-5  # of the largest logit


def random_weights(config: LlamaConfig, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Arrays by checkpoint key: matrices normal with 1/√fan_in, norms about 1."""
    rng = np.random.default_rng(seed)

    def random_array(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        noise = rng.standard_normal(shape, np.float32)
        return noise * np.float32(shape[-1] ** -0.5) if len(shape) > 1 else 1 + np.float32(0.1) * noise

    return {key: random_array(spec.shape) for key, spec in weight_specs(config).items()}


def figures(program: jax.stages.Compiled) -> dict[str, float]:
    """What XLA says about a compiled program."""
    cost = program.cost_analysis()
    names = {"flops": "flops", "bytes": "bytes accessed", "transcendentals": "transcendentals"}
    found = {ours: float(cost[theirs]) for ours, theirs in names.items()}
    return found | {"temp_bytes": float(program.memory_analysis().temp_size_in_bytes)}


def main() -> None:
    parser = argparse.ArgumentParser(description="rlx_jax against hand-written JAX on the CPU")
    parser.add_argument("--pairs", type=int, default=500, help="timed runs of each, in turn")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")

    sizes = hand.Sizes()
    config = LlamaConfig.from_hf(hand.hf_config(sizes))
    weights = random_weights(config)
    tokens = jax.device_put(np.random.default_rng(1).integers(0, sizes.vocab, (2, 128)).astype(np.int32))
    profile = rlx.CompileProfile().replace(layers={"roll": "unroll"}, precision={"compute": "f32"})

    model = rlx.compile(Llama32Flow(config), weights, profile=profile)
    function = jax.jit(functools.partial(hand.forward, c=sizes))
    params = {key: jnp.asarray(w) for key, w in weights.items()}
    ours, theirs = figures(model.lower(tokens).compile()), figures(function.lower(params, tokens).compile())

    goals, rows = Goals(), []
    for name in ours:
        ratio = ours[name] / theirs[name]
        rows.append((name, f"{ours[name]:,.0f}", f"{theirs[name]:,.0f}", f"{ratio:.4f}",
                     goals.at_most(name, ratio, PROGRAM_GOAL)))  # fmt: skip
    a, b = np.asarray(model(tokens)), np.asarray(function(params, tokens))
    difference = float(np.abs(a - b).max() / np.abs(b).max())
    rows.append(("logits, max |a - b| / max |b|", "", "", f"{difference:.1e}",
                 goals.at_most("logits", difference, LOGITS_GOAL)))  # fmt: skip

    calls = {
        "ours": lambda: model(tokens).block_until_ready(),
        "theirs": lambda: function(params, tokens).block_until_ready(),
    }
    interleaved(calls, 10)
    times = interleaved(calls, args.pairs)
    ratio = median_ratio(times["ours"], times["theirs"])
    mine, other = (1e3 * statistics.median(times[name]) for name in ("ours", "theirs"))
    verdict = goals.at_most("time", ratio, TIME_GOAL)
    rows.append((f"ms, median of {args.pairs} pairs", f"{mine:.2f}", f"{other:.2f}", f"{ratio:.4f}", verdict))

    print(table(("", "rlx_jax", "hand-written", "ratio", "goal"), rows))
    emit(benchmark="no_tax", jax=jax.__version__, sizes=vars(sizes), ours=ours, theirs=theirs,
         logits_difference=difference, ms=[mine, other], pairs=args.pairs, time_ratio=ratio)  # fmt: skip
    goals.exit()


if __name__ == "__main__":
    main()
