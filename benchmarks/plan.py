"""`rlx_jax.plan` against what is measured: bytes, peak, time of a token and of a prompt.

    python benchmarks/plan.py                    eight families with random weights in bf16 and f32: small on the
                                                 CPU, real widths on a GPU
    python benchmarks/plan.py llama qwen3        these
    python benchmarks/plan.py --figures          the plan beside the figures of benchmarks/README.md, on any machine

Decoding goes through `lm.generate`, prompts through `lm.prefill`, several queued on a GPU; bytes of parameters and
state are those of the arrays, the peak is XLA's of the compiled programs. What a plan runs to measure a CPU is timed
in rounds with the model, so that other work on the machine slows down both. Each line has what `plan` estimates by part
(operations, memory, starts of kernels), from which the efficiencies in `rlx_jax/inspection/rates.py` are fitted, and
the figures of each round. Exits with 1 if a goal is missed; families that
do not fit into `--budget` seconds are left out and named.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from report import Goals, RandomSource, emit, seconds, table

import rlx_jax as rlx
from rlx_jax.inspection import rates
from rlx_jax.inspection.plan_record import ModelPlan
from rlx_jax.runtime import estimate

START = time.perf_counter()
PROMPT, CONTEXT = 128, 256
SHORT, LONG = 17, 81
"""New tokens of two calls whose difference is the time of a step."""
QUEUED = 20
"""Prompts that are queued on a GPU."""
MAX_ROUNDS, ROUNDS_SECONDS = 15, 20.0
"""Rounds of a line, and seconds after which no more begins than `--rounds`."""
PEAK_GOAL, TIME_GOAL = 0.10, 0.20

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_act": "silu", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "tie_word_embeddings": True, "max_position_embeddings": 8192,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen3": LLAMA | {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128,
        "num_hidden_layers": 28, "num_attention_heads": 16, "attention_bias": False,
    },
    "gemma3_text": LLAMA | {
        "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912,
        "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 512, "query_pre_attn_scalar": 256,
    },
    "qwen3_moe": LLAMA | {
        "model_type": "qwen3_moe", "vocab_size": 151936, "num_hidden_layers": 8, "num_key_value_heads": 4,
        "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "tie_word_embeddings": False, "attention_bias": False,
    },
    "qwen3_5_text": LLAMA | {
        "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 1024, "intermediate_size": 3584,
        "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
        "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    },
    "mamba2": {
        "model_type": "mamba2", "vocab_size": 50288, "hidden_size": 1536, "num_hidden_layers": 24, "state_size": 128,
        "num_heads": 48, "head_dim": 64, "expand": 2, "n_groups": 1, "conv_kernel": 4, "chunk_size": 256,
        "tie_word_embeddings": True, "hidden_act": "silu",
    },
    "qwen2": LLAMA | {
        "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
    },
    "mistral": LLAMA | {"model_type": "mistral", "vocab_size": 32768, "sliding_window": 128},
}  # fmt: skip
"""Published shapes of about 1B parameters; of the mixture 8 of 48 layers, of Mistral its window and vocabulary."""

SMALL = {
    "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "moe_intermediate_size": 256, "num_experts": 16, "num_experts_per_tok": 2,
    "linear_num_key_heads": 8, "linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "num_heads": 16, "query_pre_attn_scalar": 64,
}  # fmt: skip
GPU_LAYERS, MOE_LAYERS = 4, 2
"""Layers are unrolled, and each takes its time to compile; those of the mixture have 0.6 B parameters each."""

FIGURES = {
    ("llama", 1, 256): 0.768, ("llama", 8, 256): 0.880, ("llama", 64, 256): 1.304, ("qwen3", 1, 256): 0.651,
    ("qwen3", 64, 256): 1.495, ("gemma3_text", 1, 256): 0.864, ("qwen3_moe", 1, 256): 0.498,
    ("qwen3_moe", 8, 256): 1.538, ("qwen3_moe", 64, 256): 2.934,
    ("qwen3_5_text", 1, 256): 0.904, ("qwen3_5_text", 8, 256): 1.241, ("qwen3_5_text", 64, 256): 2.125,
    ("135m", 1, 256): 0.392, ("8b", 64, 256): 5.41,
}  # fmt: skip
PROMPT_FIGURES = {
    ("llama", 1, 512): 2.87, ("llama", 1, 2048): 8.17, ("llama", 8, 2048): 54.3, ("qwen3_moe", 8, 2048): 29.0,
    ("qwen3_5_text", 1, 4096): 14.3, ("qwen3_5_text", 8, 4096): 77.6, ("8b", 8, 2048): 352.0,
}  # fmt: skip
"""Milliseconds of a step and of a prompt in bf16 on one H200, from benchmarks/README.md; of one row with
the package's kernels (jax 0.11), from docs/performance.md."""
OTHERS = {
    "135m": LLAMA | {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152,
    },
    "8b": LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128,
        "tie_word_embeddings": False,
    },
}  # fmt: skip


RECIPES = {
    "llama": rlx.Llama32Flow, "qwen2": rlx.Qwen2Flow, "qwen3": rlx.Qwen3Flow, "gemma3_text": rlx.GemmaFlow,
    "qwen3_moe": rlx.Qwen3MoeFlow, "qwen3_5_text": rlx.Qwen35Flow, "mamba2": rlx.Mamba2Flow,
    "mistral": rlx.MistralFlow,
}  # fmt: skip


def recipe_of(config: dict[str, Any]) -> Any:
    """The recipe of a config, without weights."""
    return RECIPES[config["model_type"]].for_prefill(config)


def profile_of(dtype: str) -> rlx.CompileProfile:
    """The profile of a dtype, of weights and activations."""
    return rlx.CompileProfile.preset("auto").replace(precision={"compute": dtype, "weights": dtype})


def compare_figures(goals: Goals) -> None:
    """The plan for an H200 beside figures that were measured before."""
    lines = []
    for kind, figures in (("token", FIGURES), ("prompt", PROMPT_FIGURES)):
        for (family, rows, context), measured in figures.items():
            recipe = recipe_of({**SHAPES, **OTHERS}[family])
            result = rlx.plan(recipe, device="h200", batch=rows, context=context, profile=profile_of("bf16"))
            part = result.decode if kind == "token" and result.decode is not None else result.prefill
            ms = 1e3 * part.seconds
            parts = [f"{1e3 * x:.3f}" for x in (part.compute_seconds, part.memory_seconds, part.start_seconds)]
            lines.append(
                [f"{family}, {kind}, {rows} x {context}", measured, f"{ms:.3f}", f"{ms / measured:.2f}", *parts]
            )
            emit(family=family, kind=kind, rows=rows, context=context, ms=measured, plan=ms)
            goals.at_most(f"{kind} of {family}, {rows} x {context}", abs(ms / measured - 1), TIME_GOAL)
    print(table(["", "measured", "plan", "ratio", "operations", "memory", "starts"], lines))


# -- measuring -----------------------------------------------------------------------------------


def build(config: dict[str, Any], dtype: str) -> tuple[Any, rlx.CausalLM]:
    """The recipe, and its model with random weights."""
    recipe = recipe_of(config)
    kind = np.dtype(np.float32 if dtype == "f32" else ml_dtypes.bfloat16)
    specs = {key: jax.ShapeDtypeStruct(spec.shape, kind) for key, spec in recipe.shapes().items()}
    return recipe, rlx.CausalLM(recipe, RandomSource(specs), profile=profile_of(dtype), max_positions=8192)


def step_runs(lm: rlx.CausalLM, rows: int) -> dict[int, Callable[[], Any]]:
    """Two generations by their number of new tokens: the difference is the time of decoding."""
    ids = np.random.default_rng(1).integers(0, lm.vocab_size, (rows, PROMPT)).tolist()
    # On a CPU `generate` decodes at most 32 rows together unless it is told to: the plan is for these.
    slots = {"slots": rows} if rows > 1 and jax.default_backend() == "cpu" else {}
    return {new: lambda new=new: lm.generate(ids, max_new_tokens=new, state=None, **slots) for new in (SHORT, LONG)}


def prompt_run(lm: rlx.CausalLM, rows: int, queued: int) -> Callable[[], Any]:
    """Prompts as long as the context, one after the other."""
    ids = np.random.default_rng(2).integers(0, lm.vocab_size, (rows, CONTEXT)).astype(np.int32)

    def call() -> None:
        for _ in range(queued):
            logits, _ = lm.prefill(ids, max_len=CONTEXT, logits="last")
        jax.block_until_ready(logits)

    return call


class Samples:
    """What plans run to measure this machine: recorded while the first plan is made, then timed in rounds."""

    def __init__(self) -> None:
        self.runs: list[Callable[[], Any]] = []

    def plan(self, make: Callable[[], ModelPlan], times: Sequence[float] | None = None) -> ModelPlan:
        """The plan with these seconds of the runs, in order; without them the runs are recorded and compiled."""
        remaining = iter(times or ())

        def measured(runs: Sequence[Callable[[], Any]], budget: float) -> list[float]:
            if times is not None:
                return [next(remaining) for _ in runs]
            self.runs += runs
            return [seconds(run) for run in runs]

        least_seconds = rates.least_seconds
        rates._measured_cpu.cache_clear()
        rates.least_seconds = estimate.least_seconds = measured
        try:
            return make()
        finally:
            rates.least_seconds = estimate.least_seconds = least_seconds

    def times(self) -> list[float]:
        """Seconds of each run now, as a plan takes them: the least of a few where it is short."""
        times = []
        for run in self.runs:
            until, run_times = time.perf_counter() + 0.01, [seconds(run)]
            while len(run_times) < 2 or (len(run_times) < 8 and time.perf_counter() < until):  # the first is cold
                run_times.append(seconds(run))
            times.append(min(run_times))
        return times


def peak_bytes(lm: rlx.CausalLM, rows: int) -> int:
    """The peak of the programs of so many rows, by XLA: arguments, results and temporaries, aliased bytes once."""
    peaks = []
    for key, executable in lm.model.programs.executables.items():
        memory = executable.call.memory_analysis()
        held = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
        if dict(key.binding).get("batch") == rows:
            peaks.append(held - memory.alias_size_in_bytes)
    return max(peaks)


def state_size(lm: rlx.CausalLM, rows: int) -> int:
    """The bytes of the state of so many rows."""
    _, state = lm.prefill(np.zeros((rows, CONTEXT), np.int32), max_len=CONTEXT, logits="last")
    return sum(array.nbytes for array in state.state.arrays().values())


def measure(family: str, dtype: str, rows: int, args: argparse.Namespace, model: tuple[Any, rlx.CausalLM]) -> list[Any]:
    """A line of the table: measured figures, and the ratios of the plan's to them, as medians of rounds.

    In each round the plan is made from samples of that round, the least of two turns; so are the model's times.
    """
    recipe, lm = model
    on_gpu, samples = jax.default_backend() == "gpu", Samples()
    queued = QUEUED if on_gpu else 1
    make = lambda: rlx.plan(recipe, batch=rows, context=CONTEXT, profile=profile_of(dtype))  # noqa: E731
    steps, prompt_call, result = step_runs(lm, rows), prompt_run(lm, rows, queued), samples.plan(make)
    for call in (*samples.runs, *steps.values(), prompt_call):
        call()
    rounds, start = [], time.perf_counter()
    while len(rounds) < args.rounds or (len(rounds) < MAX_ROUNDS and time.perf_counter() - start < ROUNDS_SECONDS):
        turns = [[*map(seconds, (*steps.values(), prompt_call)), *samples.times()] for _ in range(2)]
        short, long, prompt, *times = map(min, *turns)
        result = samples.plan(make, times)
        assert result.decode is not None
        step, prompt = (long - short) / (LONG - SHORT), prompt / queued
        speed = 0.0 if on_gpu else rates._measured_cpu().bandwidth / 1e9
        rounds.append((speed, step, prompt, result.decode.seconds / step, result.prefill.seconds / prompt))
    peak = peak_bytes(lm, rows)
    exact = result.params_bytes == sum(a.nbytes for a in lm.model.params.values())
    exact &= result.cache_bytes == state_size(lm, rows)
    parts = {
        name: [round(1e3 * getattr(p, f"{part}_seconds"), 4) for part in ("compute", "memory", "start", "host")]
        for name, p in (("token", result.decode), ("prompt", result.prefill))
    }
    emit(
        family=family, dtype=dtype, rows=rows, exact=exact, peak=peak, plan_peak=result.peak_bytes, parts=parts,
        # GB/s that one-row products read on a CPU; ms of a step and a prompt; the plan's ratios
        rounds=[[*(float(f"{x:.4g}") for x in (r[0], 1e3 * r[1], 1e3 * r[2], *r[3:]))] for r in rounds],
    )  # fmt: skip
    _, step, prompt, *ratios = map(statistics.median, zip(*rounds, strict=True))
    times = f"{1e3 * step:.3f}", f"{1e3 * prompt:.2f}"
    shares = (f"{ratio:.2f}" for ratio in (result.peak_bytes / peak, *ratios))
    return [f"{family}, {dtype}, {rows}", "exact" if exact else "WRONG", *times, *shares]


def jobs(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Families and dtypes, the first family in each dtype first."""
    families, dtypes = args.families or list(SHAPES), args.dtypes or ["bf16", "f32"]
    first = [(families[0], dtype) for dtype in dtypes]
    return first + [(family, dtype) for dtype in dtypes for family in families[1:]]


def compare_measured(args: argparse.Namespace, goals: Goals) -> None:
    """The plan beside what is measured here."""
    small = jax.default_backend() != "gpu"
    lines, left_out = [], []
    for family, dtype in jobs(args):
        if time.perf_counter() - START > args.budget:
            left_out.append(f"{family} {dtype}")
            continue
        config = SHAPES[family] | {n: v for n, v in SMALL.items() if small and n in SHAPES[family]}
        layers = MOE_LAYERS if "num_experts" in config else GPU_LAYERS
        config["num_hidden_layers"] = min(config["num_hidden_layers"], layers)
        try:
            model = build(config, dtype)
            lines += [measure(family, dtype, rows, args, model) for rows in args.rows]
        except Exception as error:  # the figures of the other families count
            print(f"failed: {family} {dtype}: {type(error).__name__}: {error}")
            goals.at_most(f"{family} {dtype} failed", 1, 0)
    print(table(["", "bytes", "ms/token", "ms/prompt", "peak", "token", "prompt"], lines))
    for name, column, limit in (
        () if not lines else (("peak", 4, PEAK_GOAL), ("token", 5, TIME_GOAL), ("prompt", 6, TIME_GOAL))
    ):
        worst = max(lines, key=lambda line: abs(float(line[column]) - 1))
        print(f"worst {name}: {worst[0]}: plan / measured {worst[column]}")
        goals.at_most(f"{name} of {worst[0]}", abs(float(worst[column]) - 1), limit)
    goals.at_most("families with wrong bytes", sum(line[1] != "exact" for line in lines), 0)
    if left_out:
        print("left out for time:", ", ".join(left_out))


def main() -> None:
    parser = argparse.ArgumentParser(description="rlx_jax.plan against what is measured")
    parser.add_argument("families", nargs="*", choices=[*SHAPES, []], help="by default all")
    parser.add_argument("--figures", action="store_true", help="the plan for an H200 beside published figures")
    parser.add_argument("--dtypes", nargs="*", choices=("f32", "bf16"))
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", type=float, default=120.0, help="seconds after which no family is begun")
    args = parser.parse_args()
    goals = Goals()
    compare_figures(goals) if args.figures else compare_measured(args, goals)
    goals.exit()


if __name__ == "__main__":
    main()
